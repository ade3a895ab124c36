"""samples.txt: the texts that the model wrote, for reading."""

from typing import Any

from jaxgpt.tracking.jsonl import FILE, read_records
from jaxgpt.tracking.records import Record, SampleRecord


class Samples:
    """Writes samples.txt, which begins with the samples that metrics.jsonl holds."""

    def open(self, run: Any, resume_step: int | None) -> None:
        self._run = run
        path = run.directory / "samples.txt"
        self._file = path.open("w", buffering=1, encoding="utf-8", errors="replace")
        for record in read_records(run.directory / FILE, "sample"):
            self.log(SampleRecord(step=record["step"], text=record["text"]))

    def log(self, record: Record) -> None:
        if isinstance(record, SampleRecord):
            self._file.write(f"--- step {record.step}\n{record.text}\n")

    def rewind(self, step: int) -> None:
        """Write the file anew, without the samples that metrics.jsonl has lost."""
        self.close()
        self.open(self._run, step)

    def close(self) -> None:
        self._file.close()
