"""Where records go: metrics.jsonl, which is the truth, and what repeats it."""

import contextlib
import errno
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from jaxgpt.config import UsageError

Record = dict[str, Any]
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Which field of a record TensorBoard shows as text.
_TEXTS = {"sample": "text", "spike": "cause", "rewind": "cause"}
_FILES = itertools.count()  # TensorBoard files of this process: a rewind begins another


class Tracker(Protocol):
    name: str
    """What a user knows it by."""

    def log(self, record: Record) -> None:
        """Takes one record; its `kind` says what it is."""

    def close(self) -> None:
        """Everything that was logged is on disk."""


class MetricsFile:
    """metrics.jsonl: one JSON object a line. Numbers that are not finite become null."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, resume_step: int | None):
        """Opens the file; what a resumed run is going to do again is dropped from it.

        What an earlier run without a checkpoint left is kept as metrics.jsonl.old, or with a number
        after that. Rewinds stay: they are why steps before them are missing.
        """
        if path.exists():
            if resume_step is None:
                resume_step = 0
                if any(record["kind"] != "rewind" for _, record in _whole_lines(path)):
                    with _replacing(_free_name(path)) as kept, path.open("rb") as file:
                        shutil.copyfileobj(file, kept.buffer)
            truncate_metrics(path, resume_step)
        self._file = path.open("a", buffering=1)

    def log(self, record: Record) -> None:
        self._file.write(json_line(record))

    def close(self) -> None:
        self._file.close()


class SamplesFile:
    """samples.txt: what the model wrote, for reading."""

    name = "samples.txt"

    def __init__(self, path: Path, metrics: Path):
        """Begins with the samples that `metrics`, cut to what is done, still holds."""
        self._file = path.open("w", buffering=1, encoding="utf-8", errors="replace")
        for record in read_records(metrics, "sample"):
            self.log(record)

    def log(self, record: Record) -> None:
        if record["kind"] == "sample":
            self._file.write(f"--- step {record['step']}\n{record['text']}\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files by tensorboardX, a scalar for every number of a record.

    They are written here and now: tensorboardX's SummaryWriter hands them to a thread, and waits
    for ever once that has died on a full disk.
    """

    name = "TensorBoard"

    def __init__(self, directory: Path, resume_step: int | None, rewinds: Sequence[Record] = ()):
        """Loads tensorboardX when there is something to write, which the first step is before.

        Args:
            rewinds: their records, if the run goes on from where they went back to.
        """
        self._directory, self._resume_step, self._rewinds = directory, resume_step, rewinds
        self._writer = None

    def _open(self) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        directory = self._directory
        directory.mkdir(parents=True, exist_ok=True)
        self._summary, self._proto = summary, event_pb2
        suffix = f".{os.getpid()}.{next(_FILES)}"
        self._writer = EventsWriter(str(directory / "events"), filename_suffix=suffix)
        # Whatever is there of steps that are going to be done again is not shown twice.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write((self._resume_step or 0) + 1, session_log=start)
        for record in self._rewinds:
            self.log(record)

    def log(self, record: Record) -> None:
        if "step" not in record:
            return
        if self._writer is None:
            self._open()
        for name, value in _numbers(record, record["kind"]):
            self._write(record["step"], summary=self._summary.scalar(name, value))
        if record["kind"] in _TEXTS:
            text = self._summary.text(record["kind"], record[_TEXTS[record["kind"]]])
            self._write(record["step"], summary=text)
        if record["kind"] != "train":
            self._writer.flush()  # syncs the disk, which is too slow for every line

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning; the run goes on."""

    def __init__(self, trackers: list[Tracker], warn: Callable[[str], None]):
        self._trackers = trackers
        self._warn = warn

    def log(self, record: Record) -> None:
        self._each(lambda tracker: tracker.log(record))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever it is, it is not worth a run
                self._trackers.remove(tracker)
                reason = str(error) or type(error).__name__
                self._warn(
                    f"warning: {tracker.name} stopped: {reason}; the run goes on without it, until "
                    "it is started again"
                )


def atomic_write_text(path: Path, text: str) -> None:
    """Writes a file that is either the old one or the new one, whenever the run is killed."""
    with _replacing(path) as file:
        file.write(text)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` once all has been written."""
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


def json_line(record: Record) -> str:
    """A record for metrics.jsonl."""
    clean = _clean(record)
    if clean != record:
        clean["nonfinite"] = True
    return json.dumps(clean) + "\n"


def read_records(path: Path, kind: str = "") -> list[Record]:
    """What is in a metrics.jsonl, but for a line that is still being written, or never was.

    Args:
        kind: of the records that are wanted; others are not parsed. Empty takes all.
    """
    return [record for _, record in _whole_lines(path, kind) if kind in ("", record["kind"])]


def truncate_metrics(path: Path, step: int, record: Record | None = None) -> None:
    """Drops from a metrics.jsonl what is about later steps, except rewinds, and adds `record`."""
    with _replacing(path) as file:
        for line, found in _whole_lines(path):
            if found["kind"] == "rewind" or found["step"] <= step:
                file.write(line)
        file.write(json_line(record) if record else "")


def _free_name(path: Path) -> Path:
    """metrics.jsonl.old, or the first of metrics.jsonl.old.2 ... that is not there."""
    names = itertools.chain([".old"], (f".old.{number}" for number in itertools.count(2)))
    candidates = (path.with_name(path.name + name) for name in names)
    return next(candidate for candidate in candidates if not candidate.exists())


def _whole_lines(path: Path, word: str = "") -> Iterator[tuple[str, Record]]:
    """Lines and their records, of those lines that contain a word."""
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
    """The same with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(record: Record, prefix: str) -> Iterator[tuple[str, float]]:
    """Name and value of every number in a record, however deep."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}/{name}")
        elif isinstance(value, int | float) and name != "step" and (name, value) != ("skipped", 0):
            yield f"{prefix}/{name}", value
