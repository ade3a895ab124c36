"""Retention policy for checkpoints."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jaxgpt.config import CheckpointConfig, Config
from jaxgpt.tracking.jsonl import METRICS, read_records


def kept_steps(
    saved: Sequence[int], checkpoint: CheckpointConfig, rewinds: bool, losses: Mapping[int, float]
) -> set[int]:
    """Return the steps in `saved` whose checkpoints are kept.

    They are the newest checkpoint.keep steps, the multiples of checkpoint.keep_every, and the
    checkpoint.keep_best steps with the lowest validation losses.

    Args:
        saved: the steps of all checkpoints, oldest first.
        checkpoint: the retention settings.
        rewinds: whether the run may rewind. If so, the newest checkpoint.keep multiples of
            checkpoint.interval are also kept, because a rewind uses only such multiples.
        losses: validation losses by step, without NaNs. Steps without a loss never count as best.
    """
    kept = set(saved[-checkpoint.keep :])
    if rewinds:
        on_time = [step for step in saved if step % checkpoint.interval == 0]
        kept.update(on_time[-checkpoint.keep :])
    if checkpoint.keep_every is not None:
        kept.update(step for step in saved if step % checkpoint.keep_every == 0)
    known = sorted((losses[step], step) for step in saved if step in losses)
    return kept.union(step for _, step in known[: checkpoint.keep_best])


def steps_to_remove(directory: Path, config: Config, saved: Sequence[int]) -> Collection[int]:
    """Return the steps in `saved` whose checkpoints should be removed from a run directory.

    `saved` is sorted, oldest first. Validation losses are read from metrics.jsonl. If the file
    cannot be read, checkpoint.keep_best has no effect.
    """
    checkpoint, losses = config.checkpoint, {}
    if checkpoint.keep_best:
        with contextlib.suppress(OSError):  # the losses are unknown without the file
            records = read_records(directory / METRICS, "eval")
            losses = {r["step"]: r["val_loss"] for r in records if r["val_loss"] is not None}
    rewinds = config.spike.action == "rewind"
    return set(saved) - kept_steps(saved, checkpoint, rewinds, losses)
