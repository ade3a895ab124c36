"""Repeat steps of a run and compare them: `python -m jaxgpt.replay --run DIR --step S [S ...]`.

For each S, this restores the newest checkpoint before step S, trains up to S again, and compares
the loss and the gradient norm of each logged step with metrics.jsonl. With the same mesh, number of
processes, device kind and JAX version as in the run, the values must be bitwise equal. Otherwise,
they may differ by rounding errors. The output has one line for each S. If any values differ, the
line shows the first difference, and the exit status is 1. Nothing is written to the run directory.
"""

import argparse
import contextlib
import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.checkpoint.metadata import valid_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import FAILED, job_exit_handler
from jaxgpt.config import (
    CommandParser,
    Config,
    UsageError,
    config_from_dict,
    file_path,
    mesh_shape,
    whole_number,
)
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.train.resume import source_hashes, with_moved_tokenizer

COMPARED = {"loss": 1e-3, "grad_norm": 1e-2}  # metric -> relative tolerance for rounding errors


class Conditions(NamedTuple):
    """The mesh, number of processes, device kind and JAX version that a step ran with."""

    mesh: str
    processes: int
    devices: str
    jax: str

    def __str__(self) -> str:
        return f"mesh {self.mesh}, processes={self.processes}, {self.devices}, jax {self.jax}"


class Part(NamedTuple):
    """A sequence of consecutive steps with the same batch size."""

    last: int  # its last step
    config: Config  # without skip ranges


class Stretch(NamedTuple):
    """A sequence of consecutive steps to repeat."""

    checkpoint: int  # step of the checkpoint to start from; 0 is the initial state
    last: int  # the last step to repeat
    conditions: list[Conditions]  # the distinct conditions of the steps, in order
    parts: list[Part]


class History(NamedTuple):
    """The recorded facts about a run that are needed to repeat steps of it."""

    stretches: list[Stretch]  # for each distinct step, sorted by step
    records: dict[int, dict[str, float | None]]  # step -> its metrics in `COMPARED`, as logged
    skipped: list[int]  # the skipped steps, which are always logged
    batch_sizes: Sequence[Sequence[int]]  # `BatchSizes.changes`
    fingerprints: Sequence[Any]  # `Dataset.fingerprints`


class Difference(NamedTuple):
    """A metric of a repeated step that differs from its recorded value.

    A value is None if it is missing or not finite.
    """

    step: int
    name: str
    was: float | None
    found: float | None

    def __str__(self) -> str:
        return f"step {self.step}: {self.name} was {self.was!r} and is {self.found!r}"


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--run", "--out", type=file_path, required=True, help="run directory")
    out.add_argument(
        "--step", type=whole_number(), nargs="+", required=True, metavar="S",
        help="steps to repeat, each from the newest checkpoint before it",
    )  # fmt: skip
    out.add_argument("--mesh", help="default: the mesh of the run at the first step to repeat")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        arguments = parser().parse_args(argv)
        with join_process_group() as cluster:
            differs = replay(arguments.run, arguments.step, arguments.mesh, cluster)
    if differs:
        sys.exit(FAILED)


def replay(run: Path, steps: Sequence[int], mesh: str | None, cluster: ProcessGroup) -> bool:
    """Repeat the steps and print the results; return whether anything differs.

    Process 0 prints a line for each distinct step, in ascending order. `steps` must not be empty.
    `mesh` has the format of `--mesh`. If `mesh` is None, the run's mesh at the first repeated step
    is used. All processes must call this. This starts JAX.
    """
    history = cluster.run_on_all(read_history, run, steps)
    digest = hashlib.sha256(repr(history).encode()).hexdigest()
    if len(set(cluster.allgather(digest))) > 1:
        raise UsageError(
            f"--run {run}: has changed while it was read; try again when the run has ended"
        )
    mesh = mesh or history.stretches[0].conditions[0].mesh.replace(" ", ",")
    sizes, differs, repeater = BatchSizes(history.batch_sizes), False, None
    for stretch in history.stretches:
        begin, state, scalars = stretch.checkpoint, None, {}
        for end, config in stretch.parts:
            config = config.replace(parallel__mesh=mesh)
            if repeater is None:
                initialize_jax(cluster, mesh_shape(config))
            if repeater is None or repeater.config != config:
                repeater = Repeater(
                    run, config, sizes, history.skipped, history.fingerprints, cluster
                )
            state = repeater.restore_or_init(begin) if state is None else state
            state, more = repeater.repeat(state, range(begin + 1, end + 1))
            begin, scalars = end, scalars | more
        exact = all(conditions == repeater.conditions for conditions in stretch.conditions)
        differences = compare(scalars, history.records, exact)
        differs = differs or bool(differences)
        if cluster.is_main:
            print(verdict(stretch, repeater.conditions, differences, exact), flush=True)
    return differs


def read_history(run: Path, steps: Sequence[int]) -> History:
    """Return what a run has recorded, with a stretch for each distinct step of `steps`.

    Checkpoints with damaged JSON are ignored. Raises `UsageError` if `run` is not a run directory
    with checkpoints, or if a step was skipped, was not logged or cannot be repeated.
    """
    if not (run / METRICS).exists():
        raise UsageError(f"--run {run}: has no {METRICS}; give a run directory")
    saved = valid_checkpoints(run)
    if not saved:
        raise UsageError(
            f"--run {run}: has no checkpoint, which is needed for the settings and the data; give "
            "a run with checkpoints"
        )
    logged = {r["step"]: r for r in read_records(run / METRICS, "train")}
    trained = {step: r for step, r in logged.items() if not r["skipped"]}
    starts = read_records(run / METRICS, "start")
    last, newest = max(logged, default=0), max(saved)
    sizes = BatchSizes(saved[newest]["batch_sizes"])
    if starts:  # steps after the newest checkpoint may have a different batch size
        sizes = sizes.change_after(newest, starts[-1]["batch_size"])
    stretches = []
    for step in sorted(set(steps)):
        if step > last:
            raise UsageError(f"--step {step}: the run ends at step {last}; choose an earlier step")
        if step not in trained:
            near = sorted(sorted(trained, key=lambda s: abs(s - step))[:2])
            why = "was skipped" if step in logged else "was not logged (train.log_interval)"
            raise UsageError(
                f"--step {step}: {why}; choose {' or '.join(map(str, near)) or 'another run'}"
            )
        before = max((s for s in saved if s < step), default=0)
        parts = _parts(run, saved, sizes, before, step)
        if before == 0 and parts[-1].config.train.init_from is not None:
            raise UsageError(
                f"--step {step}: no earlier checkpoint is left, and the run did not start from "
                "random weights; choose a later step"
            )
        _check_rates(parts, {s: r for s, r in trained.items() if before < s <= step})
        stretches.append(Stretch(before, step, _conditions(starts, before, step), parts))
    return History(
        stretches,
        records={s: {n: r.get(n) for n in COMPARED} for s, r in trained.items()},
        skipped=[step for step in logged if step not in trained],
        batch_sizes=sizes.changes,
        fingerprints=saved[newest]["data_fingerprint"],
    )


def _parts(
    run: Path, saved: dict[int, dict[str, Any]], sizes: BatchSizes, before: int, last: int
) -> list[Part]:
    """Split steps `before` + 1 to `last` into ranges over which the batch size is constant."""

    def settings_of(step: int) -> dict[str, Any]:
        """Return the configuration of the nearest checkpoint with this step's batch size.

        Checkpoints at or after the step are preferred. If no checkpoint has this batch size, return
        the nearest checkpoint's configuration with the batch size changed.
        """
        near = sorted(saved, key=lambda s: (s < step, abs(s - step)))
        configs, size = [saved[s]["config"] for s in near], sizes.at(step)
        for config in configs:
            if config["train"]["batch_size"] == size:
                return config
        train = {**configs[0]["train"], "batch_size": size}
        if size % train["gradient_accumulation_steps"]:
            train["gradient_accumulation_steps"] = 1
        return {**configs[0], "train": train}

    # All parts use the same parallelism. The steps to skip come from the records, because
    # checkpoints lack ranges that were added later.
    shared = {"parallel": settings_of(last)["parallel"], "train_range_to_skip": []}
    ends = [first - 1 for first, _ in sizes.changes if before + 1 < first <= last] + [last]
    name = f"checkpoint of {run}"
    return [Part(end, config_from_dict(settings_of(end) | shared, name)) for end in ends]


def _check_rates(parts: Sequence[Part], records: dict[int, dict[str, Any]]) -> None:
    """Raise `UsageError` if a recorded learning rate differs from that of the configuration.

    `records` maps steps of these parts to their `train` records.
    """
    for step, record in records.items():
        config = next(part.config for part in parts if step <= part.last)
        lr, was = float(learning_rate(config.optimizer, step)), record.get("lr")
        if was is not None and not math.isclose(was, lr, rel_tol=1e-6):  # for rounding errors
            raise UsageError(
                f"--step {max(records)}: no checkpoint has the settings of step {step}, which had "
                f"a learning rate of {was:g} instead of {lr:g}; choose another step"
            )


def _conditions(starts: Sequence[dict[str, Any]], before: int, last: int) -> list[Conditions]:
    """Return the distinct conditions of steps `before` + 1 to `last`, in order.

    `starts` are the run's `start` records, oldest first. Raises `UsageError` if the records do not
    cover these steps.
    """
    found = []
    if not starts or starts[0]["step"] > before:
        raise UsageError(
            f"--step {last}: {METRICS} does not record the mesh and devices of the steps after "
            f"{before}; choose a later step"
        )
    for step in range(before + 1, last + 1):
        start = [s for s in starts if s["step"] < step][-1]
        found.append(Conditions(*(start[name] for name in Conditions._fields)))
    return list(dict.fromkeys(found))


class Repeater:
    """Repeats steps of a run on a given mesh, with the run's data and train step."""

    def __init__(
        self,
        run: Path,
        config: Config,
        sizes: BatchSizes,
        skipped: Sequence[int],
        fingerprints: Sequence[Any],
        cluster: ProcessGroup,
    ):
        """Open the data and compile the train step; all processes must call this.

        `skipped` contains the steps that the run skipped. JAX must have been started. Raises
        `UsageError` if the data does not match `fingerprints`.
        """
        self.config = config
        config = cluster.run_on_all(with_moved_tokenizer, config, run)
        dataset = cluster.run_on_all(open_dataset, config.data, config.model)
        if source_hashes(dataset.fingerprints) != source_hashes(fingerprints):
            raise UsageError(
                f"--run {run}: the data has changed since the run was trained; restore the "
                "original data"
            )
        import jax  # initialized by the caller

        from jaxgpt.checkpoint.checkpointer import Checkpoints
        from jaxgpt.parallel.mesh import describe, job_mesh
        from jaxgpt.train.jitted import make_steps

        mesh = job_mesh(config, cluster.hosts)
        kind = mesh.devices.flat[0].device_kind
        self.conditions = Conditions(describe(mesh), cluster.size, kind, jax.__version__)
        self._cluster = cluster
        self._checkpoints = Checkpoints(run, config, cluster)
        self._steps = make_steps(config, mesh, has_masks=dataset.has_masks, hosts=cluster.hosts)
        self._train_step = self._steps.lower_train_step().compile()
        cluster.barrier()
        self._loader = Loader.for_training(dataset, config, self._steps.batch_sharding, sizes)
        self._skipped = frozenset(skipped)

    def repeat(self, state: Any, steps: range) -> tuple[Any, dict[int, dict[str, Any]]]:
        """Repeat training steps. Return the new state, and each trained step's metrics.

        `state` must be the state before the first step. All steps must have the batch size in the
        configuration. The caller must not use `state` afterwards, because its arrays are donated.
        The metrics are those in `COMPARED`, as float32 NumPy arrays of shape (). The loss is in
        nats per token. All processes must call this.
        """
        import jax

        from jaxgpt.runtime.dispatch import DispatchLimiter

        trained = [step for step in steps if step not in self._skipped]
        dispatched, found = DispatchLimiter(), {}
        with contextlib.closing(self._loader.batches(trained)) as batches:
            for step in trained:
                lr = learning_rate(self.config.optimizer, step)
                state, metrics = self._train_step(state, np.int32(step), lr, next(batches))
                found[step] = {name: metrics.scalars[name] for name in COMPARED}
                dispatched.add(found[step])
        return state, jax.device_get(found)

    def restore_or_init(self, step: int) -> Any:
        """Return the state in the checkpoint of `step`, or the initial state if `step` is 0.

        The initial state has random weights, even if train.init_from is set. All processes must
        call this.
        """
        from jaxgpt.train.restart import initial_state
        from jaxgpt.train.state import restore_state

        if step == 0:
            return initial_state(self._steps, self._cluster)
        return restore_state(self._checkpoints, step, self._steps.state_shapes)


def compare(
    found: dict[int, dict[str, Any]], records: dict[int, dict[str, float | None]], exact: bool
) -> list[Difference]:
    """Return the metrics in `found` that differ from `records`, in the order of `found`.

    `found` is a result of `Repeater.repeat`, and `records` is `History.records`. Steps that were
    not logged are not compared. If `exact` is True, the metrics must be equal. Otherwise, they may
    differ by up to the tolerances in `COMPARED`. Non-finite metrics are treated as None.
    """
    out = []
    for step, scalars in found.items():
        if step not in records:  # not logged (train.log_interval)
            continue
        for name, tolerance in COMPARED.items():
            value = float(scalars[name])
            value = value if np.isfinite(value) else None  # as in metrics.jsonl
            was = records[step][name]
            if not agree(was, value, 0 if exact else tolerance):
                out.append(Difference(step, name, was, value))
    return out


def agree(was: float | None, found: float | None, tolerance: float) -> bool:
    """Return whether `found` differs from `was` by at most `tolerance` times `abs(was)`.

    None agrees only with None.
    """
    if was is None or found is None:
        return was is found
    return abs(was - found) <= tolerance * abs(was)


def verdict(
    stretch: Stretch, conditions: Conditions, differences: list[Difference], exact: bool
) -> str:
    """Return the result of a repeated stretch as a line of text; for `exact`, see `compare`."""
    begin = f"checkpoint {stretch.checkpoint}" if stretch.checkpoint else "the initial state"
    what = f"step {stretch.last} from {begin}, on {conditions}"
    if differences:
        return f"differs: {what}: {differences[0]}"
    how = "bit for bit"
    if not exact:
        ran = " and ".join(map(str, stretch.conditions))
        how = f"up to rounding (the run had {ran})"
    return f"agrees {how}: {what}"


if __name__ == "__main__":
    main()
