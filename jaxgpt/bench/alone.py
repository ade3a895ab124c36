"""Benches that run in one process, and the commands that they start."""

import os

from jaxgpt.cluster.environment import find_launch
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import UsageError
from jaxgpt.perf.startup import JOB_START


def join_alone(kind: str, timeout: float) -> ProcessGroup:
    """A cluster of this process.

    Args:
        kind: of the bench, for the error.
        timeout: seconds to wait for the other processes of the launch, if there are any.

    Raises:
        UsageError: if there are several processes.
    """
    cluster = join_process_group(timeout)
    if cluster.size > 1:
        raise UsageError(
            f"bench {kind}: {cluster.size} processes; start it without mpiexec, it runs in one"
        )
    return cluster


def refuse_launcher(kind: str, remedy: str) -> None:
    """For a bench whose commands would take a launcher's variables for their own.

    Raises:
        UsageError: if a launcher has started this process.
    """
    launch = find_launch(os.environ)
    if launch.through is not None:
        raise UsageError(f"{launch.variable}: bench {kind} starts the processes itself; {remedy}")


def of_its_own() -> dict[str, str]:
    """The variables for a command that a user could have started, without what we add to ours."""
    found = dict(os.environ)
    found.pop(JOB_START, None)  # of the job that this process is in
    return found
