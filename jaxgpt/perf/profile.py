"""Profile of training steps: a trace of a few of them, and a table of operations.

The trace is JAX's own, which TensorBoard and Perfetto open. The table is of the devices' events
in it, each an instruction of the compiled step.
"""

import contextlib
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, profile_range
from jaxgpt.perf.hlo_text import parse_hlo
from jaxgpt.perf.operations import CATEGORIES, Operation, read_operations

ROWS = 10  # of the table
IN_GRAPHS = (
    "what XLA runs as CUDA graphs may be missing in the trace, and is in it with "
    "XLA_FLAGS=--xla_gpu_enable_command_buffer="
)


class Event(NamedTuple):
    """An instruction that ran on a device."""

    name: str
    device: str
    began: float
    seconds: float


class Tracing:
    """A trace of steps on every process, of which that of process 0 is kept."""

    def __init__(self, directory: Path, cluster: ProcessGroup):
        """Prepare; nothing is traced yet.

        Args:
            directory: where process 0 writes.
        """
        self._cluster = cluster
        self._scratch = None if cluster.is_main else tempfile.mkdtemp("-jaxgpt")
        self._directory = Path(self._scratch or directory)

    def start(self, pending: Any) -> None:
        """Begin the trace, once `pending` results of steps are there."""
        jax.block_until_ready(pending)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow down what it measures
        self._cluster.barrier()
        jax.profiler.start_trace(self._directory, profiler_options=options)
        self._began = time.perf_counter()

    def stop(self, pending: Any, n_steps: int, hlo: str) -> dict[str, Any]:
        """End the trace once `pending` results are there.

        Args:
            n_steps: that were traced.
            hlo: `compiled.as_text()` of the step.

        Returns:
            What `summary` does; under `collectives_over` the library of a CPU job; and under
            `may_lack` whether so little is in a GPU's trace that it may lack what ran in graphs.
        """
        jax.block_until_ready(pending)
        seconds = (time.perf_counter() - self._began) / n_steps
        jax.profiler.stop_trace()
        program = parse_hlo(hlo)
        events = list(read_events(newest_trace(self._directory), program.name))
        if self._scratch:
            shutil.rmtree(self._scratch)
        operations = read_operations(program)
        events = [event for event in events if event.name in operations]
        reports = self._cluster.allgather(report(events, operations))
        found = summary(reports, operations, n_steps, seconds)
        over_gloo = self._cluster.size > 1 and jax.default_backend() == "cpu"
        graphs = jax.default_backend() == "gpu" and found["device_seconds"] < seconds / 2
        return found | {"collectives_over": "Gloo" if over_gloo else None, "may_lack": graphs}


class ProfiledRun(Protocol):
    """The parts of a run that its profile needs."""

    directory: Path
    config: Config


class ProfileLog(Protocol):
    """The parts of a run's reporter that its profile needs."""

    def info(self, text: str) -> None: ...

    def between_steps(self, pending: Any) -> contextlib.AbstractContextManager[None]: ...


class StepProfile:
    """A trace of the steps of `profile_steps`, once; nothing where none are asked for."""

    def __init__(self, run: ProfiledRun, cluster: ProcessGroup, train_step: Any, log: ProfileLog):
        """Trace nothing yet.

        Args:
            train_step: the compiled step.
        """
        self._todo = profile_range(run.config)
        self._directory = run.directory / "profile"
        self._cluster, self._train_step, self._log = cluster, train_step, log
        self._tracing: Tracing | None = None
        self._traced: list[int] = []

    def before(self, step: int, state: Any) -> None:
        """Begin the trace if `step`, which is about to run on `state`, is the first of it."""
        if step not in self._todo:
            return
        if self._tracing is None:
            with self._log.between_steps(state):
                self._tracing = Tracing(self._directory, self._cluster)
                self._tracing.start(state)
        self._traced.append(step)

    def after(self, step: int, state: Any) -> None:
        """End the trace if `step`, which is under way or skipped, is the last of it."""
        if self._tracing is not None and step >= self._todo[-1]:
            self.close(state)

    def close(self, state: Any) -> None:
        """End a trace that has begun, and log what is in it; there is no other after it."""
        if self._tracing is None:
            return
        with self._log.between_steps(state):
            found = self._tracing.stop(state, len(self._traced), self._train_step.as_text())
            first, last = self._traced[0], self._traced[-1]
            skipped = last - first + 1 - len(self._traced)
            self._log.info(
                f"traced steps {first} to {last} into {self._directory}, which slows them a little"
                + (f"; {skipped} of them skipped" if skipped else "")
                + f"\n{describe(found)}"
            )
        self._tracing, self._todo = None, range(0)


def newest_trace(directory: Path) -> Path:
    """Return the file of the newest trace."""
    found = directory.glob("plugins/profile/*/*.xplane.pb")
    return max(found, key=lambda path: path.stat().st_mtime)


def read_events(trace: Path, module: str) -> Iterator[Event]:
    """Yield the instructions of a program that devices ran.

    Args:
        trace: an .xplane.pb file.
        module: the program's name.
    """
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    # Accelerators have planes of their own; CPU devices run in threads of the host.
    accelerators = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in accelerators or planes:
        lines = list(plane.lines)
        # What is on a GPU's streams TensorBoard may show again in other lines.
        chosen = [line for line in lines if line.name.startswith("Stream")]
        chosen = chosen or [line for line in lines if line.name == "XLA Ops"] or lines
        for line in chosen:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == module and "hlo_op" in stats:
                    device = f"{plane.name} {stats.get('device_ordinal', 0)}"
                    began, seconds = event.start_ns / 1e9, event.duration_ns / 1e9
                    yield Event(stats["hlo_op"], device, began, seconds)


def report(events: Sequence[Event], operations: Mapping[str, Operation]) -> dict[str, Any]:
    """Return one process's events, for `summary`: JSON."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    collectives: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in sorted(events, key=lambda event: event.began):
        totals[event.name][0] += event.seconds
        totals[event.name][1] += 1
        if operations[event.name].category == "collective":
            collectives[event.name][event.device].append(event.seconds)
    return {
        "devices": len({event.device for event in events}),
        "totals": totals,
        "collectives": {name: list(each.values()) for name, each in collectives.items()},
    }


def summary(
    reports: Sequence[dict[str, Any]],
    operations: Mapping[str, Operation],
    n_steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Return seconds per step of a device: in all, by category, of the most expensive operations.

    A device that comes to a collective before the others waits there. How long it waits no trace
    says, but the device that takes the shortest time over it has waited least: what others take
    longer than that counts as waiting.

    Args:
        reports: of every process.
        seconds: a step took, by process 0's clock.

    Returns:
        All numbers are means over the devices of the job; under `process_0` of its own.
    """
    shortest = shortest_turns(reports)
    waiting = [waited(one, shortest) for one in reports]
    every = by_category(reports, operations, sum(waiting), n_steps)
    busy = sum(every["categories"].values())
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for one in reports:
        for name, (taken, count) in one["totals"].items():
            totals[name][0] += taken
            totals[name][1] += count
    scale = 1 / n_steps / max(1, sum(one["devices"] for one in reports))
    dearest = sorted(totals, key=lambda name: -totals[name][0])[:ROWS]
    return {
        "steps": n_steps,
        "processes": len(reports),
        "seconds_per_step": seconds,
        "device_seconds": busy,
        **every,
        "process_0": by_category(reports[:1], operations, waiting[0], n_steps),
        "operations": [
            {
                "name": name,
                **operations[name]._asdict(),
                "seconds": totals[name][0] * scale,
                "share": totals[name][0] * scale / busy,
                "count": totals[name][1] * scale,
            }
            for name in dearest
        ],
    }


def by_category(
    reports: Sequence[dict[str, Any]],
    operations: Mapping[str, Operation],
    waiting: float,
    n_steps: int,
) -> dict[str, Any]:
    """Return seconds per step and device of each category, and of `waiting` in collectives."""
    scale = 1 / n_steps / max(1, sum(one["devices"] for one in reports))
    out = dict.fromkeys(CATEGORIES, 0.0)
    for one in reports:
        for name, (taken, _) in one["totals"].items():
            out[operations[name].category] += taken * scale
    return {"categories": out, "collective_waiting": waiting * scale}


def shortest_turns(reports: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return, for each run of a collective, the seconds of the device that took least."""
    devices: dict[str, list[list[float]]] = defaultdict(list)
    for one in reports:
        for name, each in one["collectives"].items():
            devices[name] += each
    return {
        name: [min(turn) for turn in zip(*each, strict=False)] for name, each in devices.items()
    }


def waited(one: dict[str, Any], shortest: Mapping[str, list[float]]) -> float:
    """Return the seconds that the devices of a process waited in collectives for others."""
    return sum(
        taken - least
        for name, each in one["collectives"].items()
        for turns in each
        for taken, least in zip(turns, shortest[name], strict=False)
    )


def describe(found: dict[str, Any]) -> str:
    """Return what `Tracing.stop` found as two tables."""
    if not found["operations"]:
        return (
            f"profile of {found['steps']} steps: the trace names no operations of the devices; "
            "NVIDIA's driver may keep them for administrators "
            f"(NVreg_RestrictProfilingToAdminUsers); {IN_GRAPHS}"
        )
    busy, several = found["device_seconds"], found["processes"] > 1
    mine = found["process_0"]

    def row(name: str, seconds: float, own: float) -> str:
        text = f"  {name:<17} {1e3 * seconds:9.3f} ms  {seconds / busy:6.1%}"
        return text + (f"  {1e3 * own:9.3f} ms" if several else "")

    lines = [
        f"profile of {found['steps']} steps, {1e3 * found['seconds_per_step']:.2f} ms each with "
        f"what lies between them: the operations of a device take {1e3 * busy:.2f} ms"
        + (" (some run at the same time)" if busy > found["seconds_per_step"] else "")
        + ", by category"
        + (" (mean of all processes, share, process 0)" if several else "")
    ]
    for name, seconds in sorted(found["categories"].items(), key=lambda item: -item[1]):
        if seconds == 0:
            continue
        over = found["collectives_over"] if name == "collective" else None
        shown = f"{name} ({over})" if over else name
        lines.append(row(shown, seconds, mine["categories"][name]))
        if name == "collective":
            lines.append(
                row("- of it waiting", found["collective_waiting"], mine["collective_waiting"])
            )
    if found["may_lack"]:
        lines.append(f"  the step takes more than twice as long: {IN_GRAPHS}")
    lines.append(f"the {len(found['operations'])} most expensive operations of a step")
    for op in found["operations"]:
        lines.append(
            f"  {1e3 * op['seconds']:9.3f} ms  {op['share']:6.1%}  {op['count']:5.4g} x  "
            f"{op['category']:<11}  {op['name']}  {op['source']}"
        )
    return "\n".join(lines)
