"""TensorBoard event files: a scalar for every number of a record, a text for samples and spikes.

tensorboardX's SummaryWriter does not fit a run of a month: it keeps every scalar in memory, and
after a full disk its queue blocks the next call for ever. Its RecordWriter, which frames records
and adds checksums, writes here and now; the events in them are encoded below, after TensorFlow's
event.proto, summary.proto and tensor.proto.
"""

import itertools
import os
import platform
import struct
import time
from collections.abc import Iterator
from typing import Any

from jaxgpt.tracking.jsonl import FILE, read_records
from jaxgpt.tracking.records import Record

TEXTS = {"sample": "text", "spike": "cause", "rewind": "cause"}  # kind -> field shown as text
SESSION_START = 1  # hides what other files have of this step and later ones


class TensorBoard:
    """Writes tensorboard/ in the run directory."""

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, run: Any, resume_step: int | None) -> None:
        self._run, self._resume_step = run, resume_step

    def _open(self) -> None:
        """Begin a file. Loads tensorboardX, so only once there is something to write."""
        from tensorboardX import RecordWriter

        directory, resume_step = self._run.directory / "tensorboard", self._resume_step
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        start = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}"
        names = (directory / f"{start}.{number}" for number in itertools.count())
        self._writer = RecordWriter(str(next(name for name in names if not name.exists())))
        self._write(0, _bytes(3, b"brain.Event:2"))
        first = 0 if resume_step is None else resume_step + 1
        self._write(first, _bytes(7, _integer(1, SESSION_START)))
        metrics = self._run.directory / FILE
        for rewind in read_records(metrics, "rewind") if metrics.exists() else ():
            if rewind["step"] == (resume_step or 0):
                self._log(rewind)

    def log(self, record: Record) -> None:
        if self._writer is None:
            self._open()
        self._log(record.to_dict())

    def _log(self, record: dict[str, Any]) -> None:
        kind, step = record["kind"], record["step"]
        values = [_scalar(name, value) for name, value in _numbers(record, kind)]
        if kind in TEXTS:
            values.append(_text(kind, record[TEXTS[kind]]))
        self._write(step, _bytes(5, b"".join(_bytes(1, value) for value in values)))
        if kind != "train":
            self._writer.flush()  # syncs the disk, which is too slow for every line

    def rewind(self, step: int) -> None:
        """Begin another file, which hides the steps after `step`."""
        self.close()
        self.open(self._run, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _write(self, step: int, content: bytes) -> None:
        clock = struct.pack("<Bd", 1 << 3 | 1, time.time())
        self._writer.write(clock + _integer(2, step) + content)


def _numbers(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of every number in a record, however deep."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}/{name}")
        elif isinstance(value, int | float) and name != "step" and (name, value) != ("skipped", 0):
            yield f"{prefix}/{name}", value


def _scalar(tag: str, value: float) -> bytes:
    return _bytes(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, value)


def _text(tag: str, text: str) -> bytes:
    """Return a Summary.Value for TensorBoard's text plugin: a string tensor of shape (1,)."""
    metadata = _bytes(1, _bytes(1, b"text"))
    shape = _bytes(2, _bytes(2, _integer(1, 1)))
    tensor = _integer(1, 7) + shape + _bytes(8, text.encode(errors="replace"))  # 7: DT_STRING
    return _bytes(1, tag.encode()) + _bytes(9, metadata) + _bytes(8, tensor)


# protobuf's wire format: key = field number << 3 | type; 0 varint, 1 double, 2 bytes, 5 float


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
