"""CSV files: a table for each kind of record except `rewind`, for spreadsheets and pandas."""

import csv
import io
from pathlib import Path
from typing import Any

from jaxgpt.tracking.jsonl import PERSISTENT_KINDS, atomic_write_text
from jaxgpt.tracking.records import Record

Row = dict[str, Any]


class Csv:
    """Writes csv/<kind>.csv in the run directory, with a column for each field.

    The columns have the same names as in metrics.jsonl, but `kind`, lists and tuples have no
    column. Nested names are joined with `/`. Missing values are empty, and non-finite numbers are
    `nan`, `inf` or `-inf`. Methods raise `OSError` if the folder or a row cannot be written.
    """

    def open(self, run: Any, resume_step: int | None) -> None:
        self._folder: Path = run.directory / "csv"
        self._folder.mkdir(exist_ok=True)
        self._files: dict[str, tuple[io.TextIOBase, list[str]]] = {}  # kind -> (file, columns)
        self.view = str(self._folder)
        self.rewind(-1 if resume_step is None else resume_step)

    def log(self, record: Record) -> None:
        row = flatten(record.to_dict())
        kind = row.pop("kind")
        try:
            if kind not in self._files or not row.keys() <= set(self._files[kind][1]):
                self._start(kind, row)
            file, columns = self._files[kind]
            csv.DictWriter(file, columns).writerow(row)
            file.flush()
        except OSError:  # the last row may be truncated, so the next record rewrites the file
            self._files.pop(kind, None)
            raise

    def _start(self, kind: str, row: Row) -> None:
        """Open csv/<kind>.csv for appending, after adding a column for each new key in `row`."""
        if kind in self._files:
            self._files.pop(kind)[0].close()
        path = self._folder / f"{kind}.csv"
        columns, rows = read_table(path)
        columns += [name for name in row if name not in columns]
        write_table(path, columns, rows)
        self._files[kind] = path.open("a", newline=""), columns

    def rewind(self, step: int) -> None:
        self.close()
        for path in self._folder.glob("*.csv"):
            if path.stem not in PERSISTENT_KINDS:
                columns, rows = read_table(path)
                write_table(path, columns, [row for row in rows if int(row["step"]) <= step])

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files = {}


def flatten(fields: Row, prefix: str = "") -> Row:
    """Return a flat copy of a record, without its lists and tuples.

    The values of a nested dict get keys such as `seconds/step`. All keys begin with `prefix`.
    """
    out: Row = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            out |= flatten(value, f"{prefix}{name}/")
        elif not isinstance(value, list | tuple):
            out[prefix + name] = value
    return out


def read_table(path: Path) -> tuple[list[str], list[Row]]:
    """Return the columns and rows of a CSV file, without damaged rows.

    If the file does not exist or has no column `step`, both lists are empty. This sets
    `csv.field_size_limit`. Raises `OSError` if the file cannot be read.
    """
    if not path.exists():
        return [], []
    text = path.read_bytes().decode(errors="replace")
    csv.field_size_limit(2**31 - 1)  # the default is 131,072; a sample's text may be longer
    text = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(text, newline=""))
    found = list(reader)
    if text.count('"') % 2:
        found = found[:-1]  # the last row ends inside a quoted field
    whole = (row for row in found if None not in {*row} and None not in row.values())
    columns = list(reader.fieldnames or ())
    if "step" not in columns:
        return [], []
    return columns, [row for row in whole if row["step"].isdecimal()]


def write_table(path: Path, columns: list[str], rows: list[Row]) -> None:
    """Write a CSV file atomically. Each key of a row must be in `columns`."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    atomic_write_text(path, text.getvalue())
