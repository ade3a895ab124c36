"""TensorBoard event files: curves, samples and spikes as text, start-up times and settings.

This module uses tensorboardX's EventsWriter, because tensorboardX's SummaryWriter keeps all scalars
in memory, and hangs after the disk fills up.
"""

import importlib.util
import os
import time
from collections.abc import Mapping
from typing import Any

from jaxgpt.tracking.about import flat_settings
from jaxgpt.tracking.curves import curves
from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.tracking.records import Record

HYPERPARAMETERS = ("model", "optimizer", "parallel", "train")  # sections in the HParams tab
TEXTS = {"sample": "text", "spike": "cause"}  # kind of record -> field shown as text


class TensorBoard:
    """Writes tensorboard/ in the run directory.

    Methods raise `OSError` if a file there cannot be written, or if metrics.jsonl cannot be read.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._unflushed: list[Record] = []  # training records that may not be on disk yet

    def open(self, run: Any, resume_step: int | None) -> None:
        self._run, self._resume_step, self._step = run, resume_step, 0
        self._directory = run.directory / "tensorboard"
        is_installed = importlib.util.find_spec("tensorboard") is not None
        hint = "" if is_installed else "  (first: pip install tensorboard)"
        self.view = f"tensorboard --logdir {self._directory}{hint}"

    def _open(self) -> None:
        """Start a new file. This is delayed until the first record, because the import is slow."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which contain the time in seconds,
        # the host, the process ID and this number.
        n_files = len(list(self._directory.iterdir()))
        writer = EventsWriter(str(self._directory / "events"), f".{os.getpid()}.{n_files:06d}")
        self._writer = writer
        first = 0 if self._resume_step is None else self._resume_step + 1
        # Make TensorBoard hide this step and all later steps in the other files.
        self._write(first, session_log=SessionLog(status=SessionLog.START))
        if not n_files:
            self._write_settings()
        metrics = self._run.directory / METRICS
        for rewind in read_records(metrics, "rewind") if metrics.exists() else ():
            if rewind["step"] == (self._resume_step or 0):
                self._write_text(rewind["step"], "rewind", rewind["cause"])

    def _write_settings(self) -> None:
        """Write the hyperparameters for the HParams tab, which shows them next to the losses."""
        from tensorboardX.summary import hparams

        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flat_settings(self._run.config.to_dict()).items()
            if name.partition(".")[0] in HYPERPARAMETERS
        }
        for summary in hparams(plain, {"train/loss": 0.0, "eval/val_loss": 0.0}):
            self._write(0, summary=summary)

    def log(self, record: Record) -> None:
        self._step = max(self._step, record.step)  # checkpoint records may be late
        todo = [record]
        try:
            if self._writer is None:
                self._open()
                todo = [*self._unflushed, record]
            for each in todo:
                self._log(each)
        except OSError:  # the last event may be truncated, so the next record starts a new file
            lost = [r.step for r in (*self._unflushed, record) if r.kind == "train"]
            self._writer, self._resume_step = None, lost[0] - 1 if lost else self._step
            raise
        if record.kind == "train":
            self._unflushed.append(record)
        else:
            self._unflushed = []

    def _log(self, record: Record) -> None:
        from tensorboardX.summary import Summary

        values = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in curves(record.to_dict()).items()
        ]
        if values:
            self._write(record.step, summary=Summary(value=values))
        if record.kind in TEXTS:
            text = record.to_dict()[TEXTS[record.kind]]
            self._write_text(record.step, record.kind, text)
        if record.kind == "startup":
            self._write_text(record.step, "startup", startup_table(record.values))
        if record.kind != "train":
            self._writer.flush()  # also calls fsync, which is too slow for every step

    def _write_text(self, step: int, tag: str, content: str) -> None:
        from tensorboardX.summary import text

        printable = content.encode(errors="replace").decode()
        self._write(step, summary=text(tag, printable))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))

    def rewind(self, step: int) -> None:
        """Close the file. The next record starts a file that makes TensorBoard hide later steps.

        TensorBoard's default reader still shows a tag's later steps until the tag is written again.
        """
        self._resume_step = self._step = step
        self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self._unflushed = []


def startup_table(values: Mapping[str, float]) -> str:
    """Return a Markdown table of the `values` of a `StartupRecord`: each phase and the total."""
    formats = {"min": ".4g", "mean": ".4g", "max": ".4g", "slowest_rank": ".0f"}
    lines = ["| seconds | min | mean | max | slowest rank |", "|---|---|---|---|---|"]
    for phase in (name.removesuffix("_max") for name in values if name.endswith("_max")):
        numbers = (format(values[f"{phase}_{column}"], f) for column, f in formats.items())
        lines.append(f"| {phase.replace('_', ' ')} | {' | '.join(numbers)} |")
    return "\n".join(lines)
