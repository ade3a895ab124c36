"""metrics.jsonl and samples.txt.

metrics.jsonl is the source of truth about a run. Each line is a JSON object, and no step has two
training records.
"""

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError, check_shape
from jaxgpt.tracking.appended_file import AppendedFile
from jaxgpt.tracking.records import SHAPES, Record, SampleRecord

METRICS = "metrics.jsonl"
PERSISTENT_KINDS = ("rewind", "goodput", "straggler")  # kept when steps are dropped
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JsonLines:
    """Writes metrics.jsonl. Non-finite numbers become null.

    A failed write raises `OSError`, and a failed rewind raises `UsageError` or `OSError`. The next
    call first retries the failed operation. Lines that cannot be written are kept in memory (see
    `AppendedFile`).
    """

    def open(self, run: Any, resume_step: int | None) -> None:
        """Open the file, and drop the steps that the run will repeat.

        Records whose kind is in `PERSISTENT_KINDS` are kept. If the file has other records and
        `resume_step` is None, it is first copied to metrics.jsonl.old (or metrics.jsonl.old.2 and
        so on). Raises `UsageError` if the file or the copy cannot be written, and `OSError` if the
        file exists but cannot be read.
        """
        self._path = path = run.directory / METRICS
        self._rewind_to: int | None = None
        if path.exists():
            if resume_step is None and any(
                r["kind"] not in PERSISTENT_KINDS for _, r in _whole_lines(path)
            ):
                names = itertools.chain([".old"], map(".old.{}".format, itertools.count(2)))
                old = (path.with_name(METRICS + name) for name in names)
                free = next(p for p in old if not p.exists())
                atomic_write_text(free, path.read_text(errors="replace"))
            truncate_metrics(path, -1 if resume_step is None else resume_step)
        self._file = AppendedFile(path)
        try:
            self._file.write()
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be written ({error.strerror or error}); make room or fix the "
                "permissions, and start again"
            ) from None

    def log(self, record: Record) -> None:
        self._write(json_line(record.to_dict()))

    def rewind(self, step: int) -> None:
        waiting = self._file.waiting
        kept = [line for line in waiting if _stays(json.loads(line), step)]
        waiting.clear()
        waiting.extend(kept)
        self._rewind_to = step if self._rewind_to is None else min(step, self._rewind_to)
        self._write()

    def close(self) -> None:
        self._write()
        self._file.close()

    def _write(self, *lines: str) -> None:
        """Complete a pending rewind, then flush the buffered lines and write the new ones."""
        self._file.waiting += lines
        if self._rewind_to is not None:
            truncate_metrics(self._path, self._rewind_to)
            self._rewind_to = None
            self._file.reopen()
        self._file.write()


class Samples:
    """Writes samples.txt, beginning with the samples in metrics.jsonl (at most the last 10,000).

    Methods raise `OSError` if one of these files cannot be read or written.
    """

    def open(self, run: Any, resume_step: int | None) -> None:
        self._run = run
        self._file = AppendedFile(run.directory / "samples.txt", keep=False)
        records = read_records(run.directory / METRICS, "sample")
        self._file.write(*(_sample_text(record["step"], record["text"]) for record in records))

    def log(self, record: Record) -> None:
        texts = [_sample_text(record.step, record.text)] if isinstance(record, SampleRecord) else []
        self._file.write(*texts)  # even if `texts` is empty, this retries earlier samples

    def rewind(self, step: int) -> None:
        """Rewrite the file from metrics.jsonl, as `open` does."""
        self._file.reopen()
        self.open(self._run, step)

    def close(self) -> None:
        self._file.close()


def _sample_text(step: int, text: str) -> str:
    return f"--- step {step}\n{text}\n"


def atomic_write_text(path: Path, text: str) -> None:
    """Write a file atomically: after a crash, the file has either its old or its new content.

    Raises `UsageError` if the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise, a power failure could leave an empty file
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # no such file, or the file system is now read-only
            scratch.unlink()
        remedy = "; make room" if error.errno in NO_ROOM else ""
        raise UsageError(
            f"{path}: cannot be written ({error.strerror or error}); its content has not changed"
            f"{remedy}"
        ) from None


def json_line(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON that ends with a newline.

    Non-finite numbers become null. A line with non-finite numbers also has `"nonfinite": true`.
    """
    nonfinite: list[str] = []
    clean = json.loads(json.dumps(record), parse_constant=nonfinite.append)  # NaN, Infinity -> None
    return json.dumps(clean | ({"nonfinite": True} if nonfinite else {})) + "\n"


def read_records(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return all records in a metrics.jsonl file, or only those of one kind.

    Damaged and truncated lines are ignored. Raises `OSError` if the file cannot be read.
    """
    found = (record for _, record in _whole_lines(path, kind) if kind in ("", record["kind"]))
    return [record for record in found if _is_whole(record)]


def parse_records(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the records in `lines` of a metrics.jsonl file; damaged lines are ignored."""
    found = (record for record in map(_parse, lines) if record is not None)
    return [record for record in found if _is_whole(record)]


def truncate_metrics(
    path: Path,
    step: int,
    record: dict[str, Any] | None = None,
    replaces: dict[str, Any] | None = None,
) -> None:
    """Drop the steps after `step` from metrics.jsonl, except records of `PERSISTENT_KINDS`.

    Records equal to `replaces` are also dropped, and so are lines without a valid kind and step. If
    `record` is given, it is appended.
    """
    kept = [line for line, r in _whole_lines(path) if r != replaces and _stays(r, step)]
    atomic_write_text(path, "".join(kept) + (json_line(record) if record else ""))


def _stays(record: dict[str, Any], step: int) -> bool:
    """Return whether a record is kept when the steps after `step` are dropped."""
    return record["kind"] in PERSISTENT_KINDS or record["step"] <= step


def _whole_lines(path: Path, word: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each undamaged line that contains `word`, with its record."""
    with path.open(errors="replace") as file:  # a host that crashes may leave arbitrary bytes
        for line in file:
            record = _parse(line) if word in line else None
            if record is not None:
                yield f"{line.rstrip()}\n", record


def _parse(line: str) -> dict[str, Any] | None:
    """Return the record in a line, or None if the line is damaged or truncated."""
    try:
        record = json.loads(line)
        check_shape(record, {"kind": str, "step": int})
    except (ValueError, RecursionError):
        return None
    return record


def _is_whole(record: dict[str, Any]) -> bool:
    try:
        check_shape(record, SHAPES.get(record["kind"], {}))
    except ValueError:
        return False
    return True
