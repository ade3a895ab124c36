"""JAX's persistent compilation cache: what was compiled once is read from a folder next time."""

import hashlib
import os
import platform
from pathlib import Path

from jaxgpt.distributed.cluster import Cluster

OFF = "off"


def use_compile_cache(directory: str, cluster: Cluster) -> str:
    """Has JAX, which must have been started, read and write compiled programs.

    On CPUs the processes of a job also share what they compile: process 0 does it for all.

    Args:
        directory: a folder, or `off`. JAX_COMPILATION_CACHE_DIR, where set, wins.

    Returns:
        A line for the log.
    """
    import jax

    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or directory
    signature = cpu_signature()
    folder = Path(directory).expanduser() / signature
    writable = directory == OFF or _is_writable(folder)
    # Decided together: a process that would wait for another's program must not be alone.
    everyone = cluster.gather([signature, writable])
    if directory == OFF:
        return "compile cache: off"
    if not all(can_write for _, can_write in everyone):
        return f"warning: compile_cache={directory}: cannot be written; compiling without a cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    on_cpu = jax.default_backend() == "cpu"
    if cluster.size > 1 and on_cpu and all(theirs == signature for theirs, _ in everyone):
        _share_among_processes()
    return f"compile cache: {folder}"


class CacheUse:
    """Counts what the cache had and what it had not."""

    def __init__(self):
        """Counts from now on."""
        import jax

        self.requests = self.hits = 0
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **kwargs: str | int) -> None:
        self.requests += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.hits += event == "/jax/compilation_cache/cache_hits"

    def __str__(self) -> str:
        if self.requests == 0:
            return "not used"
        return "hit" if self.hits == self.requests else "miss"


def cpu_signature() -> str:
    """Tells apart processors for which XLA compiles different code."""
    found = [platform.machine()]
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features")):
                found.append(line)
            elif not line:
                break  # the next processor
    except OSError:
        pass
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def _share_among_processes() -> None:
    """On CPUs: one key for all processes, and one compilation.

    JAX's key has the topology in it, which looks different from every process on CPUs; only
    process 0 would find what it wrote. Where JAX cannot describe a topology it takes the kinds of
    devices instead, and so does this. The folder is of one kind of processor.
    """
    import jax
    from jax._src import cache_key

    cache_key._hash_accelerator_config = cache_key._hash_devices
    jax.config.update("jax_share_binary_between_hosts", True)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
