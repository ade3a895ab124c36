"""Persistent compilation cache."""

import contextlib
import hashlib
import os
import platform
import tempfile
from pathlib import Path

from jaxgpt.cluster.file_lock import lock_file
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.runtime.jax_internals import use_one_cache_key

OFF = "off"


def use_compile_cache(directory: str, cluster: ProcessGroup) -> str:
    """Set up JAX's persistent compilation cache in `directory`. Return a log line.

    All processes must call this after JAX has started. The cache is disabled if `directory` is
    empty or one of `off`, `none` and `null` (case-insensitive). Otherwise,
    JAX_COMPILATION_CACHE_DIR overrides `directory`. The cache is stored in a subfolder for the
    processor type. If the subfolder does not exist, this function creates it. If the cache cannot
    be used, JAX compiles without it, and the log line gives the reason.

    A multi-process CPU job locks the subfolder until `cluster` closes. A job that has the lock and
    runs on one host compiles programs for all processes only on process 0. A job that cannot get
    the lock, for example because another job holds it, only reads the cache.
    """
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    reset_cache()  # otherwise, JAX would keep using the folder from an earlier call
    jax.config.update("jax_compilation_cache_dir", None)
    if directory.lower() in (OFF, "none", "null", ""):
        return "compile cache: off"
    source = "compile_cache"
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        source, directory = "JAX_COMPILATION_CACHE_DIR", chosen
    if "://" in directory:
        return f"warning: {source}={directory}: is not a folder; compiling without a cache"
    folder = Path(os.path.expanduser(directory)) / _cpu_signature()
    on_cpu = jax.default_backend() == "cpu"
    # On GPUs, all processes take part in autotuning. A process with a cache miss would wait for
    # a process with a cache hit.
    writable = all(cluster.allgather(_is_writable(folder)))
    if not writable or not (on_cpu or _is_shared(folder, cluster)):
        problem = "is not one folder that all hosts share, or the hosts have different processors"
        problem = problem if writable else "cannot be written"
        return f"warning: {source}={directory}: {problem}; compiling without a cache"
    if on_cpu and cluster.size > 1 and not use_one_cache_key():
        return "warning: compile cache: off, because this JAX version has a key for each process"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if on_cpu:
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # only for GPUs
    line = f"compile cache: {folder}"
    if not on_cpu or cluster.size == 1:
        return line
    # A process with a cache miss waits for process 0 to compile, but process 0 does not compile
    # after a cache hit. Therefore, all processes must see the same files, and no other job may add
    # files.
    problem = cluster.broadcast(_lock(folder, cluster) if cluster.is_main else None)
    if problem:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # writes nothing
        return f"{line}, read-only because {problem}"
    jax.config.update("jax_share_binary_between_hosts", cluster.local_size == cluster.size)
    return line


class CacheUse:
    """Counts compile-cache requests and hits since this object was created.

    `str()` returns `off`, `not used`, `hit` (all programs came from the cache) or `miss`.
    """

    def __init__(self):
        import jax

        self.requests = self.hits = 0
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **kwargs: str | int) -> None:
        self.requests += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.hits += event == "/jax/compilation_cache/cache_hits"

    def __str__(self) -> str:
        import jax

        if not jax.config.jax_compilation_cache_dir:
            return OFF
        if self.requests == 0:
            return "not used"
        return "hit" if self.hits == self.requests else "miss"


def _cpu_signature() -> str:
    """Return a hash (12 hex digits) of the processor type that XLA generates code for."""
    found = [platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():  # Linux
        first = info.read_text().partition("\n\n")[0]
        named = ("model name", "flags", "Features")
        found += [line for line in first.splitlines() if line.startswith(named)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def _is_writable(folder: Path) -> bool:
    if str(folder).startswith("~"):  # the user's home directory is unknown
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _is_shared(folder: Path, cluster: ProcessGroup) -> bool:
    """Return whether all processes can see a file that process 0 creates in the folder."""
    with contextlib.ExitStack() as stack:
        name = "no such file"
        if cluster.is_main:
            with contextlib.suppress(OSError):  # such as a full disk; compile without a cache
                name = Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=folder)).name).name
        return all(cluster.allgather((folder / cluster.broadcast(name)).is_file()))


def _lock(folder: Path, cluster: ProcessGroup) -> str:
    """Lock the folder until the group closes. Return the reason if this fails, else ""."""
    try:
        file = cluster.on_close.enter_context((folder / ".lock").open("a"))
    except OSError as error:
        return f"its .lock cannot be written ({error.strerror})"  # e.g. another user owns it
    reasons = {"taken": "another job is writing to it", "unsupported": "it cannot be locked"}
    return reasons.get(lock_file(file), "")
