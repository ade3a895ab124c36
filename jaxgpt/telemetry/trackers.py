"""Where records go: metrics.jsonl, which is the truth, and what repeats it."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]


class Tracker(Protocol):
    def log(self, record: Record) -> None:
        """Takes one record; its `kind` says what it is."""

    def close(self) -> None:
        """Everything that was logged is on disk."""


class MetricsFile:
    """metrics.jsonl: one JSON object a line. Numbers that are not finite become null."""

    def __init__(self, path: Path, resume_step: int | None):
        """Opens the file; what a resumed run is going to do again is dropped from it.

        What an earlier run without a checkpoint left is kept as metrics.jsonl.old.
        """
        if path.exists():
            if resume_step is None:
                os.replace(path, path.with_name(path.name + ".old"))
            else:
                kept = [ln for ln in path.read_text().splitlines() if _is_past(ln, resume_step)]
                scratch = path.with_suffix(".tmp")
                scratch.write_text("".join(line + "\n" for line in kept))
                os.replace(scratch, path)
        self._file = path.open("a", buffering=1)

    def log(self, record: Record) -> None:
        clean = {k: None if _not_finite(v) else v for k, v in record.items()}
        if clean != record:
            clean["nonfinite"] = True
        self._file.write(json.dumps(clean) + "\n")

    def close(self) -> None:
        self._file.close()


class SamplesFile:
    """samples.txt: what the model wrote, for reading."""

    def __init__(self, path: Path, metrics: Path):
        """Begins with the samples that `metrics`, cut to what is done, still holds."""
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        self._file = path.open("w", buffering=1)
        for record in records:
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

    def __init__(self, directory: Path, resume_step: int | None):
        """Loads tensorboardX when there is something to write, which the first step is before."""
        self._directory, self._resume_step = directory, resume_step
        self._writer = None

    def _open(self) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        directory = self._directory
        directory.mkdir(parents=True, exist_ok=True)
        self._summary, self._proto = summary, event_pb2
        self._writer = EventsWriter(str(directory / "events"), filename_suffix=f".{os.getpid()}")
        # Whatever is there of steps that are going to be done again is not shown twice.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write((self._resume_step or 0) + 1, session_log=start)

    def log(self, record: Record) -> None:
        if "step" not in record:
            return
        if self._writer is None:
            self._open()
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "skipped"):
                scalar = self._summary.scalar(f"{record['kind']}/{name}", value)
                self._write(record["step"], summary=scalar)
        if record["kind"] == "sample":
            text = self._summary.text("sample", record["text"])
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
                self._warn(f"warning: {type(tracker).__name__} stopped: {error!r}")


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_past(line: str, step: int) -> bool:
    """Whether a line is whole and about a step up to `step`."""
    try:
        return json.loads(line).get("step", 0) <= step
    except ValueError:  # the line that was being written when the run was killed
        return False
