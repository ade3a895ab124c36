"""Profile of training steps: a trace from JAX's profiler, and a table of operations."""

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import profile_range
from jaxgpt.perf.hlo import CATEGORIES, Operation, parse_hlo, read_operations
from jaxgpt.perf.roofline import read_work

ROWS = 10  # number of operations in the table
MAY_BE_INCOMPLETE = (
    "  the step takes more than twice as long as these operations, so some may be missing. The "
    "trace lacks CUDA graphs unless XLA_FLAGS=--xla_gpu_enable_command_buffer= disables them. It "
    "lacks all operations if NVIDIA's driver lets only administrators profile "
    "(NVreg_RestrictProfilingToAdminUsers)"
)


class Event(NamedTuple):
    """One execution of an instruction on a device; times are in seconds on the trace's clock."""

    name: str
    device: str
    began: float
    seconds: float


class Tracing:
    """A trace that all processes are recording. Only process 0 keeps its trace files."""

    def __init__(self, directory: Path, cluster: ProcessGroup, pending: Any):
        """Wait for the arrays in `pending`, then start the trace. All processes must call this.

        Process 0 writes the trace to `directory`. Every other process uses a temporary folder, and
        raises `OSError` if it cannot create this folder.
        """
        self._cluster = cluster
        self._directory = directory if cluster.is_main else Path(tempfile.mkdtemp("-jaxgpt"))
        jax.block_until_ready(pending)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # the Python tracer would slow down the steps
        cluster.barrier()
        jax.profiler.start_trace(self._directory, profiler_options=options)

    def stop(self, pending: Any, n_steps: int, seconds: float, hlo: str) -> dict[str, Any]:
        """Wait for the arrays in `pending`, end the trace of `n_steps` steps, and summarize it.

        All processes must call this. `seconds` is the time per step, and `hlo` is
        `compiled.as_text()` of the step. Returns the result of `summary`, with `bytes` and `flops`
        (per step and device) added to each of its `parts`. The result also contains
        `may_be_incomplete`, which is True if the step runs on GPUs and the operations take less
        than half of the step time.

        Raises `ValueError` if the trace is missing, and `OSError` if a temporary folder cannot be
        removed.
        """
        jax.block_until_ready(pending)
        jax.profiler.stop_trace()
        program = parse_hlo(hlo)
        operations = read_operations(program)
        traces = self._directory.glob("plugins/profile/*/*.xplane.pb")
        newest = max(traces, key=lambda path: path.stat().st_mtime)
        events = [e for e in _read_events(newest, program.name) if e.name in operations]
        if not self._cluster.is_main:
            shutil.rmtree(self._directory)
        reports = self._cluster.allgather(report(events, operations))
        found = summary(reports, operations, n_steps, seconds)
        work = [(operations[name], one) for name, one in read_work(program).items()]
        for part in found["parts"]:
            own = [one for op, one in work if op == (part["category"], part["source"])]
            part["bytes"] = sum(one.moved for one in own)
            part["flops"] = sum(one.times * one.flops for one in own)
        may_be_incomplete = jax.default_backend() == "gpu" and found["device_seconds"] < seconds / 2
        return found | {"may_be_incomplete": may_be_incomplete}


class StepProfile:
    """Traces the steps in `profile_steps`, and logs a summary with the reporter `log`.

    The trace is written to the `profile` folder of the run directory. `train_step` is the compiled
    step. All processes must call each method. The constructor raises `UsageError` if
    `profile_steps` is invalid. On process 0, `after` and `close` raise `BrokenPipeError` if the
    output pipe is closed.
    """

    def __init__(self, run: Any, cluster: ProcessGroup, train_step: Any, log: Any):
        self._todo = profile_range(run.config)
        self._directory = run.directory / "profile"
        self._cluster, self._train_step, self._log = cluster, train_step, log
        self._tracing: Tracing | None = None
        self._began = 0.0  # clock reading before the first traced step
        self._traced: list[int] = []

    def before(self, step: int, state: Any) -> None:
        """Start the trace if `step` is the first step to trace.

        Call this before each step that is not skipped. `state` is the state before `step`.
        """
        if step not in self._todo:
            return
        if self._tracing is None:
            jax.block_until_ready(state)  # do not count unfinished steps as profiling
            with self._log.clock.within("profile"):
                self._tracing = Tracing(self._directory, self._cluster, state)
            self._began = self._log.clock.spent("step", "data")
        self._traced.append(step)

    def after(self, step: int, state: Any) -> None:
        """End the trace if no steps are left to trace. `state` is the state after `step`.

        Call this after each step, including skipped steps.
        """
        if self._todo and step >= self._todo[-1]:
            self.close(state)

    def close(self, state: Any) -> None:
        """If a trace is running, end it, log its summary, and trace no later steps."""
        if self._tracing is None:
            return
        jax.block_until_ready(state)  # do not count unfinished steps as profiling
        n_steps = len(self._traced)
        seconds = (self._log.clock.spent("step", "data") - self._began) / n_steps
        with self._log.clock.within("profile"):
            found = self._tracing.stop(state, n_steps, seconds, self._train_step.as_text())
        first, last = self._traced[0], self._traced[-1]
        skipped = last - first + 1 - n_steps
        self._log.info(
            f"traced steps {first} to {last} into {self._directory}; tracing slows them slightly"
            + (f"; skipped steps among them: {skipped}" if skipped else "")
            + f"\n{describe(found)}"
        )
        self._tracing, self._todo = None, range(0)


def _read_events(trace: Path, module: str) -> Iterator[Event]:
    """Yield an event for each executed instruction of the program `module`, in no particular order.

    `trace` is an .xplane.pb file.
    """
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    # Each accelerator has its own plane; CPU devices run in host threads.
    for plane in [p for p in planes if p.name.startswith("/device:")] or planes:
        lines = list(plane.lines)
        # On GPUs, use only the streams, because other lines may repeat their events.
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in streams or [line for line in lines if line.name == "XLA Ops"] or lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == module and "hlo_op" in stats:
                    device = f"{plane.name} {stats.get('device_ordinal', 0)}"
                    began, seconds = event.start_ns / 1e9, event.duration_ns / 1e9
                    yield Event(stats["hlo_op"], device, began, seconds)


def report(events: Sequence[Event], operations: Mapping[str, Operation]) -> dict[str, Any]:
    """Return the event totals of one process as a dict, for `summary`. Times are in seconds.

    `operations` must contain the name of every event. In the result, `devices` is the number of
    devices with events. `seconds` and `counts` map event names to totals. `collectives` maps the
    name of each collective to one list per device, with the seconds that each execution took.
    """
    seconds: Counter[str] = Counter()
    collectives: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in sorted(events, key=lambda event: event.began):
        seconds[event.name] += event.seconds
        if operations[event.name].category == "collective":
            collectives[event.name][event.device].append(event.seconds)
    return {
        "devices": len({event.device for event in events}),
        "seconds": seconds,
        "counts": Counter(event.name for event in events),
        "collectives": {name: list(each.values()) for name, each in collectives.items()},
    }


def summary(
    reports: Sequence[dict[str, Any]],
    operations: Mapping[str, Operation],
    n_steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Return a breakdown of the step time, in seconds per step and device.

    `reports` holds what `report` returned on each process, and `operations` must contain the name
    of every event. `seconds` is the time per step. The result contains it as `seconds_per_step`.
    The result also contains `n_steps` as `steps`, and the number of `processes`.

    `device_seconds` is the total of all operations, and `categories` holds the total of each
    category. `operations` is a list of up to `ROWS` operations: dicts with `name`, `category`,
    `source`, `seconds`, `share` (of `device_seconds`) and `count` (executions per step and device).
    `parts` is a list of dicts with `category`, `source` and `seconds`. Each covers all operations
    with the same category and source line. Both lists begin with the most expensive entries.
    `collective_waiting` is the time that devices spend in collectives beyond the time of the
    fastest device.
    """
    scale = 1 / n_steps / max(1, sum(one["devices"] for one in reports))
    totals = sum((Counter(one["seconds"]) for one in reports), Counter())
    counts = sum((Counter(one["counts"]) for one in reports), Counter())
    categories, waiting = dict.fromkeys(CATEGORIES, 0.0), 0.0
    parts: Counter[Operation] = Counter()
    for name, total in totals.items():
        parts[operations[name]] += total * scale
        categories[operations[name].category] += total * scale
        devices = [turns for one in reports for turns in one["collectives"].get(name, ())]
        for turn in zip(*devices, strict=False):
            waiting += sum(turn) - len(turn) * min(turn)
    busy = sum(categories.values())
    return {
        "steps": n_steps,
        "processes": len(reports),
        "seconds_per_step": seconds,
        "device_seconds": busy,
        "categories": categories,
        "collective_waiting": waiting * scale,
        "parts": [part._asdict() | {"seconds": total} for part, total in parts.most_common()],
        "operations": [
            {
                "name": name,
                **operations[name]._asdict(),
                "seconds": total * scale,
                "share": total * scale / busy,
                "count": counts[name] * scale,
            }
            for name, total in totals.most_common(ROWS)
        ],
    }


def describe(found: dict[str, Any]) -> str:
    """Format the result of `Tracing.stop` as two text tables."""
    busy = found["device_seconds"]

    def row(name: str, seconds: float) -> str:
        return f"  {name:<17} {1e3 * seconds:9.3f} ms  {seconds / busy:6.1%}"

    lines = [
        f"profile of {found['steps']} steps, {1e3 * found['seconds_per_step']:.2f} ms each; "
        f"operations take {1e3 * busy:.2f} ms per device (mean; some overlap), by category"
    ]
    for name, seconds in Counter(found["categories"]).most_common():
        if seconds > 0:
            lines.append(row(name, seconds))
            if name == "collective":
                lines.append(row("- spent waiting", found["collective_waiting"]))
    if found["may_be_incomplete"]:
        lines.append(MAY_BE_INCOMPLETE)
    lines.append(f"the {len(found['operations'])} most expensive operations of a step")
    lines += [
        f"  {1e3 * op['seconds']:9.3f} ms  {op['share']:6.1%}  {op['count']:5.4g} x  "
        f"{op['category']:<11}  {op['name']}  {op['source']}"
        for op in found["operations"]
    ]
    return "\n".join(lines)
