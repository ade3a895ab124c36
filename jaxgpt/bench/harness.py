"""Benchmark results, and the jobs that run benchmarks."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxgpt import __version__
from jaxgpt.cluster.environment import JOB_START
from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import abort_mpi, end_process
from jaxgpt.config import Config, UsageError, mesh_shape
from jaxgpt.data.dataset import with_planned_vocabulary
from jaxgpt.doctor.directory import check_writable
from jaxgpt.parallel.mesh import job_mesh
from jaxgpt.perf.units import format_bytes
from jaxgpt.runtime.compile_cache import OFF, use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax

PROG = "python -m jaxgpt.bench"
PREFIXES = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ"}


class Value(NamedTuple):
    """A measurement: a JSON value, with a unit and a note for the table."""

    value: Any
    unit: str | None = ""
    """A unit such as s, bytes, FLOP/s, tokens/s or % (of a fraction); None shows only the note."""
    note: str = ""


Result = dict[str, Any]
"""Maps names to measurements. Plain values have no unit and no note."""


def as_json(result: Result) -> str:
    """Return the values of the result and of `environment` as a single-line JSON object."""
    bare = {k: v.value if isinstance(v, Value) else v for k, v in result.items()}
    return json.dumps(bare | environment())


def as_table(result: Result) -> str:
    """Return a table with the name, value, unit and note of each entry in the result and in
    `environment`. If the unit is None, the value is left out.
    """
    result = result | environment()
    width = max(map(len, result))
    lines = []
    for name, found in result.items():
        value, unit, note = found if isinstance(found, Value) else Value(found)
        shown = note if unit is None else format_value(value, unit)
        in_brackets = f" ({note})" if note and unit is not None else ""
        lines.append(f"{name:{width}}  {shown}{in_brackets}")
    return "\n".join(lines)


def format_value(value: Any, unit: str = "") -> str:
    """Format a number, or every number in a dict or list, with an SI prefix and a unit (`74.3 ms`).

    If the unit is %, a fraction is shown as a percentage. Bytes have binary prefixes. If the unit
    is empty or x, numbers get no prefix, and integers are shown exactly, without the x. All other
    numbers are rounded. Text and booleans get no unit. None is shown as `not known`. Numbers must
    be of type int or float.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(each, unit)}" for name, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(format_value(each, unit) for each in value)
    if value is None:
        return "not known"
    if isinstance(value, str | bool):
        return str(value)
    if unit == "%":
        return f"{value:.1%}"
    if unit == "bytes":
        return format_bytes(value)
    if unit in ("", "x"):
        return f"{value:,.4g} {unit}".rstrip() if isinstance(value, float) else f"{value:,}"
    value = float(f"{value:.3g}")  # so that 999,999 is 1 M
    scale = next((scale for scale in PREFIXES if abs(value) >= scale), min(PREFIXES))
    return f"{value / scale:.3g} {PREFIXES[scale]}{unit}"


def environment() -> dict[str, Any]:
    """Return `host_name`, `cpu`, `cpus` (the number of usable CPUs) and `versions`.

    `cpu` is the CPU's model or, if this is unknown, its architecture. The versions are those of
    jaxgpt, JAX, jaxlib and Python.
    """
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    about = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", about.read_text() if about.exists() else "")
    return {
        "host_name": platform.node(),
        "cpu": model[1] if model else platform.machine(),
        "cpus": len(own_cpus()),
        "versions": {"jaxgpt": __version__, **packages, "python": platform.python_version()},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum as `median`, `least` and `most`.

    `values` must not be empty.
    """
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


@dataclass(frozen=True)
class BenchJob:
    """The processes that run a benchmark, and their temporary folder."""

    cluster: ProcessGroup
    folder: Path
    """Initially empty, with the same path on every host; see `open_job`."""

    def start_jax(self, config: Config) -> tuple[Config, Mesh]:
        """Start JAX without a compile cache. Return `config` and the mesh.

        The returned config has been completed by `with_planned_vocabulary`. Every process must
        call this.
        """
        config = self.cluster.run_on_all(with_planned_vocabulary, config)
        initialize_jax(self.cluster, mesh_shape(config))
        use_compile_cache(OFF, self.cluster)
        return config, job_mesh(config, self.cluster.hosts)

    def log(self, message: str) -> None:
        """Print a progress message to stderr on process 0, if stderr is a terminal."""
        if self.cluster.is_main and sys.stderr.isatty():
            print(f"... {message}", file=sys.stderr, flush=True)

    def timed(self, function: Callable[[], Any]) -> tuple[Any, float]:
        """Call a function. Return this process's result and the slowest process's time in seconds.

        All processes must call this.
        """
        self.cluster.barrier()
        began = time.perf_counter()
        result = function()
        return result, max(self.cluster.allgather(time.perf_counter() - began))


@contextlib.contextmanager
def open_job(
    config: Config, single_process: bool = False, out: Path | None = None
) -> Iterator[BenchJob]:
    """Connect the processes of the job, and yield the job with a temporary folder.

    The folder is created in `out`, or in the system's temporary folder if `out` is None. It is
    removed when the block ends, but may remain if a job with several processes fails. `out` is
    created if it does not exist, and is not removed. SIGTERM and Ctrl-C also remove the temporary
    folder. Even after the block has ended, they terminate the process with status 128 plus the
    signal's number. Under MPI, they terminate the whole job. The environment variables for the
    compile cache and the job's start time are deleted.

    Every process must call this, in its main thread. Raises `UsageError` if `out` is not writable,
    or if `single_process` is set and the job has several processes. Raises `OSError` if the folder
    cannot be created.
    """
    # A compile cache would hide compile times. JOB_START would add the age of this job to the
    # start-up times that bench startup measures.
    for variable in ("JAX_COMPILATION_CACHE_DIR", JOB_START):
        os.environ.pop(variable, None)
    cluster = join_process_group(config.init_timeout)
    if single_process and cluster.size > 1:
        raise UsageError(
            f"bench: runs in a single process, not {cluster.size}; start it without mpiexec"
        )
    if out is not None:
        cluster.run_on_all(check_writable, out)
        out.mkdir(parents=True, exist_ok=True)
    name = tempfile.mkdtemp(prefix="jaxgpt-bench-", dir=out) if cluster.is_main else None
    folder = Path(cluster.broadcast(name))
    folder.mkdir(exist_ok=True)

    def end(number: int, frame: object) -> None:
        for _ in range(5):  # threads of an unfinished save may recreate folders
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)
        abort_mpi(128 + number)
        end_process(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        with cluster:
            yield BenchJob(cluster, folder)
    finally:
        if cluster.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
