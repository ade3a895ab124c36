"""metrics.jsonl, the source of truth: one JSON object a line, no step twice."""

import contextlib
import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxgpt.config import UsageError
from jaxgpt.tracking.records import Record

FILE = "metrics.jsonl"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JsonLines:
    """Writes metrics.jsonl. Numbers that are not finite become null."""

    def open(self, run: Any, resume_step: int | None) -> None:
        """Open the file, without the steps that a resumed run is going to repeat.

        The records of an earlier run that left no checkpoint are kept as metrics.jsonl.old, or
        with a number after that. Rewinds stay: they explain why steps before them are missing.
        """
        self._path = path = run.directory / FILE
        if path.exists():
            if resume_step is None and any(r["kind"] != "rewind" for _, r in _whole_lines(path)):
                with _replacing(_free_name(path)) as kept, path.open("rb") as file:
                    shutil.copyfileobj(file, kept.buffer)
            truncate_metrics(path, -1 if resume_step is None else resume_step)
        self._file = path.open("a", buffering=1)

    def log(self, record: Record) -> None:
        self._file.write(json_line(record.to_dict()))

    def rewind(self, step: int) -> None:
        """Go on with the file that `spikes` has cut to `step`."""
        self._file.close()
        self._file = self._path.open("a", buffering=1)

    def close(self) -> None:
        self._file.close()


def atomic_write_text(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whenever the run is killed."""
    with _replacing(path) as file:
        file.write(text)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of `path` once all has been written."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("w") as file:
            yield file
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UsageError(
            f"{path}: cannot be written ({error.strerror or error}); it is as it was"
            + ("; make room" if error.errno in NO_ROOM else "")
        ) from None


def json_line(record: dict[str, Any]) -> str:
    """Return the line of a record."""
    clean = _clean(record)
    if clean != record:
        clean["nonfinite"] = True
    return json.dumps(clean) + "\n"


def read_records(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without a line that was never finished.

    Args:
        kind: of the records that are wanted; others are not parsed. Empty takes all.
    """
    return [record for _, record in _whole_lines(path, kind) if kind in ("", record["kind"])]


def truncate_metrics(path: Path, step: int, record: dict[str, Any] | None = None) -> None:
    """Drop later steps from a metrics.jsonl, except rewinds, and add `record`."""
    with _replacing(path) as file:
        for line, found in _whole_lines(path):
            if found["kind"] == "rewind" or found["step"] <= step:
                file.write(line)
        file.write(json_line(record) if record else "")


def _free_name(path: Path) -> Path:
    """Return metrics.jsonl.old, or the first of metrics.jsonl.old.2 ... that is not there."""
    names = itertools.chain([".old"], (f".old.{number}" for number in itertools.count(2)))
    candidates = (path.with_name(path.name + name) for name in names)
    return next(candidate for candidate in candidates if not candidate.exists())


def _whole_lines(path: Path, word: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield lines and their records, of those lines that contain a word."""
    with path.open(errors="replace") as file:  # a host that went down may leave any bytes
        for line in file:
            if word not in line:
                continue
            try:
                record = json.loads(line)
            except ValueError:  # the line that was being written when the run was killed
                continue
            is_ours = isinstance(record, dict) and isinstance(record.get("step"), int)
            if is_ours and "kind" in record:
                yield f"{line.rstrip()}\n", record


def _clean(value: Any) -> Any:
    """Return the value with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
