"""When is a checkpoint due by the clock, and which checkpoints stay?"""

import contextlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax

from jaxgpt.config import CheckpointConfig, Config
from jaxgpt.runtime.jax_internals import key_value_store
from jaxgpt.tracking.jsonl import METRICS, read_records

LOOK_SECONDS = 5.0  # between two looks at the clock, about
KEYS_KEPT = 32  # looks; a process is never so many steps behind (`DispatchLimiter`)


def kept_steps(
    saved: Sequence[int], checkpoint: CheckpointConfig, rewinds: bool, losses: Mapping[int, float]
) -> set[int]:
    """Return which of the saved steps (oldest first) stay, given validation losses by step.

    With `rewinds` so do the newest of those that are checkpoint.interval apart, whatever a signal
    saved in between.
    """
    kept = set(saved[-checkpoint.keep :])
    if rewinds and checkpoint.interval:
        on_time = [step for step in saved if step % checkpoint.interval == 0]
        kept.update(on_time[-checkpoint.keep :])
    if checkpoint.keep_every is not None:
        kept.update(step for step in saved if step % checkpoint.keep_every == 0)
    known = sorted((losses[step], step) for step in saved if step in losses)
    return kept.union(step for _, step in known[: checkpoint.keep_best])


def steps_to_remove(directory: Path, config: Config, saved: Sequence[int]) -> Collection[int]:
    """Return the steps whose checkpoints do not stay in a run directory.

    Validation losses are read from metrics.jsonl, which a restart goes on with.
    """
    checkpoint, losses = config.checkpoint, {}
    if checkpoint.keep_best:
        with contextlib.suppress(OSError):  # it has vanished: no loss is known
            records = read_records(directory / METRICS, "eval")
            losses = {r["step"]: r["val_loss"] for r in records if r["val_loss"] is not None}
    rewinds = config.spike.action == "rewind"
    return set(saved) - kept_steps(saved, checkpoint, rewinds, losses)


class SaveClock:
    """Turns checkpoint.interval_minutes into steps, the same on all processes.

    At a step that all know beforehand process 0 looks at its clock, and tells the others whether to
    save then, and the step of its next look. That is a few seconds later, so no step waits for it.
    """

    def __init__(self, minutes: float | None):
        self._seconds = None if minutes is None else 60 * minutes
        self._store = key_value_store()
        self._tick = self._look = 0  # steps begun, which never go back; that of the next look
        self._n_looks = 0
        self._saved = self._looked = time.monotonic()
        self._looked_tick = 0

    def saved(self) -> None:
        """Begin to count again."""
        self._saved = time.monotonic()

    def is_due(self) -> bool:
        """Return whether to save after this step; all processes call this once a step."""
        if self._seconds is None:
            return False
        self._tick += 1
        if self._tick < self._look:
            return False
        key = f"jaxgpt/save_clock/{self._n_looks}"
        self._n_looks += 1
        if jax.process_index() == 0:
            answer = json.dumps([time.monotonic() - self._saved >= self._seconds, self._next()])
            if self._store is not None:
                self._store.set(f"{key}/answer", answer)
                if self._n_looks > KEYS_KEPT:
                    self._store.delete(f"jaxgpt/save_clock/{self._n_looks - KEYS_KEPT}")
        else:
            answer = self._store.get(f"{key}/answer")
        due, self._look = json.loads(answer)
        return due

    def _next(self) -> int:
        """Return the tick of the next look, by the pace since the last one."""
        now, ticks = time.monotonic(), self._tick - self._looked_tick
        pace = (now - self._looked) / ticks
        self._looked, self._looked_tick = now, self._tick
        ahead = int(min(LOOK_SECONDS, self._seconds / 4) / max(pace, 1e-6))
        # One fast stretch, as of steps that are dispatched or skipped, says little of the next.
        return self._tick + max(1, min(ahead, 2 * ticks))
