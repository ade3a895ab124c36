"""Reading run directories: records, curves, settings, age and state."""

import datetime
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.file_lock import is_locked
from jaxgpt.config import UsageError, parse_yaml
from jaxgpt.tracking.about import flat_settings
from jaxgpt.tracking.jsonl import METRICS, parse_records
from jaxgpt.tracking.starts import STARTS

RECENT = 120.0  # seconds; see `RunFiles.state`
TAIL = 64  # bytes


class RunFiles:
    """A run directory, and the records in its metrics.jsonl, grouped by kind."""

    records: dict[str, list[dict[str, Any]]]
    n_damaged: int  # damaged lines of metrics.jsonl

    def __init__(self, directory: Path, name: str):
        """Read the run's metrics.jsonl. Reports show the run as `name`.

        A missing file is not an error, because a run may fail before its first record.
        """
        self.directory, self.name = directory, name
        self._position, self._tail = 0, b""  # size and last bytes of the part that has been read
        self.records, self.n_damaged = defaultdict(list), 0
        self.refresh()

    def refresh(self) -> bool:
        """Read new lines of metrics.jsonl. Return True if there are any or if old lines changed.

        If a restart or a rewind has changed old lines, the file is read from the start. Raises
        `UsageError` if the file cannot be read.
        """
        path, new, found, was_replaced = self.directory / METRICS, b"", [], False
        try:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._position - len(self._tail))
                    if file.read(len(self._tail)) != self._tail:
                        self._position, self._tail, was_replaced = file.seek(0), b"", True
                        self.records, self.n_damaged = defaultdict(list), 0
                    new = file.read().rpartition(b"\n")[0]  # the last line may be incomplete
        except OSError as error:
            raise UsageError(
                f"RUN={self.directory}: {path} cannot be read ({error.strerror}); give a "
                "readable run directory"
            ) from None
        if new:
            lines = new.decode(errors="replace").split("\n")
            found = parse_records(lines)
            self._position += len(new) + 1
            self._tail = new[-TAIL:] + b"\n"
            self.n_damaged += len(lines) - len(found)
        for record in found:
            self.records[record["kind"]].append(record)
        known = [(r["step"], number(r, "consumed_tokens")) for r in self.records["train"]]
        self._tokens = np.array([(0.0, 0.0), *(pair for pair in known if pair[1] > 0)]).T
        return bool(new) or was_replaced

    def curve(self, kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the step of each record of one kind, and the value of its field `key`.

        Both results are float64 arrays of shape (N,). Records without the field are skipped.
        Invalid values become NaN (see `number`).
        """
        points = [(r["step"], number(r, key)) for r in self.records[kind] if key in r]
        steps, values = np.array(points or np.empty((0, 2)), float).T
        return steps, values

    def dropped_losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that rewinds dropped and their logged losses, as `curve` does.

        The losses of each rewind are followed by a NaN.
        """
        points: list[tuple[int, float | None]] = []
        for r in self.records["rewind"]:
            losses = dict([*r["dropped_losses"], (r["spike"], r["loss"])])
            points += [*sorted(losses.items()), (r["spike"], None)]
        steps, values = np.array(points or np.empty((0, 2)), float).T
        return steps, values

    def tokens_at(self, steps: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the number of tokens consumed up to each step: float64 (N,).

        Values are interpolated between training records, with 0 at step 0. They are constant after
        the last record.
        """
        return np.interp(steps, *self._tokens)

    def numbers(self) -> list[dict[str, Any]]:
        """Return the training and evaluation records without their lists and dicts.

        Each record has the run's name under the key `run`.
        """
        records = [{"run": self.name, **r} for k in ("train", "eval") for r in self.records[k]]
        return [{k: v for k, v in r.items() if not isinstance(v, list | dict)} for r in records]

    def settings(self) -> dict[str, str]:
        """Return the settings in config.yaml as strings, with keys such as `train.max_iters`.

        The result is empty if the file is missing or unreadable, or is not a YAML mapping.
        """
        try:
            found = parse_yaml(read_text(self.directory / "config.yaml"))
        except ValueError:
            return {}
        flat = flat_settings(found) if isinstance(found, dict) else {}
        return {key: str(value) for key, value in flat.items()}

    def age(self) -> float:
        """Return the time in seconds since the run last wrote to one of its logs.

        At least one of the logs must exist.
        """
        paths = [self.directory / name for name in (METRICS, STARTS, "train.log")]
        newest = max((p.stat().st_mtime for p in paths if p.exists()), default=0.0)
        return max(0.0, time.time() - newest)  # a file server's clock may be ahead

    def state(self) -> str:
        """Return the state of the run: `running`, `done`, `stopped` or `dead`.

        `stopped` means that a signal or the time limit ended the run. A locked run is `running`.
        Locks can be checked only on Linux, and sometimes only on the run's host. A run whose lock
        cannot be checked is `running` if it wrote to a log in the last `RECENT` seconds, unless
        `is_last` is True in its newest goodput record. Do not call this in the process that trains
        the run, because the check would release the run's lock.
        """
        lock, goodput = self.directory / ".lock", self.records["goodput"]
        if is_locked(lock):
            return "running"
        if goodput and goodput[-1]["is_last"]:
            limit = self.settings().get("train.max_iters", "0")
            return "stopped" if limit.isdecimal() and goodput[-1]["step"] < int(limit) else "done"
        # Locks may be local to a host, and `is_locked` works only on Linux.
        is_own = read_text(lock).endswith(f" on host {platform.node()}\n")
        is_known = sys.platform == "linux" and is_own
        return "running" if not is_known and self.age() < RECENT else "dead"

    def row(self) -> dict[str, Any]:
        """Return this run's row for a table of runs, as a dict that maps headings to values.

        Unknown values are None. `step` is the last step with a training or evaluation record (0 if
        there is none), or the last step of a run that is `done` or `stopped`. `age` is a timedelta,
        rounded to seconds. Losses are rounded to four decimals, and tokens/s to a whole number. At
        least one of the run's logs must exist. Do not call this in the process that trains the run
        (see `state`).
        """
        train, evals = [r for r in self.records["train"] if not r["skipped"]], self.records["eval"]
        losses = [r["val_loss"] for r in evals if r["val_loss"] is not None]
        steps = [records[-1]["step"] for records in (self.records["train"], evals) if records]
        last, starts = {**(train or [{}])[-1], **(evals or [{}])[-1]}, self.records["start"]
        limit, state = self.settings().get("train.max_iters", ""), self.state()
        if state in ("done", "stopped"):
            steps.append(self.records["goodput"][-1]["step"])

        def rounded(key: str, digits: int | None) -> float | None:
            return None if np.isnan(value := number(last, key)) else round(value, digits)

        return {
            "run": self.name,
            "state": state,
            "step": max(steps, default=0),
            "max_iters": int(limit) if limit.isdecimal() else None,
            "loss": rounded("loss", 4),
            "val loss": rounded("val_loss", 4),
            "best val loss": round(min(losses), 4) if losses else None,
            "tokens/s": rounded("tokens_per_sec", None),
            "mesh": starts[-1]["mesh"] if starts else None,
            "age": datetime.timedelta(seconds=round(self.age())),
        }


def number(record: dict[str, Any], key: str) -> float:
    """Return a number in a record, or NaN if the value is missing or not a number.

    Booleans count as 0 and 1. Numbers with an absolute value of 1e300 or more also become NaN.
    """
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan


def read_text(path: Path) -> str:
    """Return the content of a file, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Return the runs in `paths`. Each path is a run, or a folder with runs at any depth.

    The search of a folder skips the directories of runs, and does not follow symbolic links to
    folders of runs. Raises `UsageError` if there is no run at a path.
    """
    found: dict[Path, str] = {}
    for path in paths:
        inside = [path] if _is_run(path) else []
        for folder, names, _ in () if inside else os.walk(path):
            inside += (runs := [run for name in names if _is_run(run := Path(folder, name))])
            names[:] = {*names} - {run.name for run in runs}  # do not search inside runs
        if not inside:
            reason = "contains no metrics.jsonl" if os.path.isdir(path) else "is not a folder"
            raise UsageError(
                f"RUN={path}: {reason}; give the --out of a run that python -m jaxgpt.train "
                "has trained"
            )
        for run in sorted(inside):
            found[run] = run.absolute().name if run == path else str(run.relative_to(path))
    names = list(found.values())
    return [
        RunFiles(run, name if names.count(name) == 1 else str(run)) for run, name in found.items()
    ]


def _is_run(path: Path) -> bool:
    # `Path.is_file` would raise `PermissionError` if the folder is not accessible.
    return any(os.path.isfile(path / name) for name in (METRICS, STARTS))
