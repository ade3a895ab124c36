"""Benches that run in one process."""

from jaxgpt.config import UsageError
from jaxgpt.distributed.cluster import Cluster, join_cluster


def join_alone(kind: str, timeout: float) -> Cluster:
    """A cluster of this process.

    Args:
        kind: of the bench, for the error.
        timeout: seconds to wait for the other processes of the launch, if there are any.

    Raises:
        UsageError: if there are several processes.
    """
    cluster = join_cluster(timeout)
    if cluster.size > 1:
        raise UsageError(
            f"bench {kind}: {cluster.size} processes; start it without mpiexec, it runs in one"
        )
    return cluster
