"""TensorBoard event files: a scalar for each number in a record, and text for samples and spikes.

tensorboardX's SummaryWriter keeps all scalars in memory, and hangs once the disk has been full. Its
EventsWriter, which this module uses, has neither problem.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.tracking.records import GoodputRecord, Record

TEXTS = {"sample": "text", "spike": "cause", "rewind": "cause"}  # kind -> field shown as text


class TensorBoard:
    """Writes tensorboard/ in the run directory."""

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, run: Any, resume_step: int | None) -> None:
        self._directory, self._resume_step = run.directory, resume_step

    def _open(self) -> None:
        """Start a new file. The first record does this, because importing tensorboardX is slow."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        folder = self._directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which consist of the time in seconds,
        # the host, and this number.
        number = f".{os.getpid()}.{len(list(folder.iterdir())):06d}"
        self._writer = EventsWriter(str(folder / "events"), number)
        first = 0 if self._resume_step is None else self._resume_step + 1
        # Make TensorBoard hide this step and all later steps in the other files.
        self._write(first, session_log=SessionLog(status=SessionLog.START))
        metrics = self._directory / METRICS
        for rewind in read_records(metrics, "rewind") if metrics.exists() else ():
            if rewind["step"] == (self._resume_step or 0):
                self._log(rewind)

    def log(self, record: Record) -> None:
        if isinstance(record, GoodputRecord):  # for `report goodput`; a curve would be meaningless
            return
        try:
            if self._writer is None:
                self._open()
            self._log(record.to_dict())
        except OSError:  # the file may end mid-event, so the next record starts a new one
            self._writer, self._resume_step = None, record.step
            raise

    def _log(self, record: dict[str, Any]) -> None:
        from tensorboardX.summary import Summary, text

        kind = record["kind"]
        numbers = _numbers(record, kind)
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in numbers]
        if kind in TEXTS:
            printable = record[TEXTS[kind]].encode(errors="replace").decode()
            values += text(kind, printable).value
        self._write(record["step"], summary=Summary(value=values))
        if kind != "train":
            self._writer.flush()  # also calls fsync, which is too slow for every step

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))

    def rewind(self, step: int) -> None:
        """Close the file; the next record starts a new one, which hides the steps after `step`."""
        self._resume_step = step
        self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _numbers(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the name and value of every number in a record, including nested ones."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}/{name}")
        elif isinstance(value, int | float) and name != "step" and (name, value) != ("skipped", 0):
            yield f"{prefix}/{name}", value
