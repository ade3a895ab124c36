"""trackio: a local database for each project. No network is needed.

This module uses `SQLiteStorage`, because `trackio.Run` prints to the console and drops records
that it cannot write.
"""

import contextlib
import shlex
import sqlite3
import time
import uuid
from typing import Any

from jaxgpt.tracking.about import flat_settings, names
from jaxgpt.tracking.curves import curves
from jaxgpt.tracking.records import Record

WRITE_SECONDS = 2.0  # interval between writes; a write takes a few milliseconds of CPU time


class Trackio:
    """Writes a run to the project's trackio database.

    The database is in TRACKIO_DIR. The default is $HF_HOME/trackio. The default of HF_HOME is
    huggingface in $XDG_CACHE_HOME or, if that is not set, in ~/.cache. Methods raise `OSError` if
    this folder cannot be written.
    """

    extra = "trackio"  # name of the required package, and of the jaxgpt extra that installs it

    def open(self, run: Any, resume_step: int | None) -> None:
        about = names(run)
        self._project, self._name = about["project"], about["name"]
        self._config = flat_settings(run.config.to_dict()) | {"_Group": about["group"]}
        self._id = uuid.uuid5(uuid.NAMESPACE_URL, run.directory.absolute().as_uri()).hex
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._written = time.monotonic()
        self.view = shlex.join(["trackio", "show", "--project", self._project])
        self.rewind(-1 if resume_step is None else resume_step)

    def log(self, record: Record) -> None:
        if record.kind == "checkpoint" or time.monotonic() > self._written + WRITE_SECONDS:
            self._write()  # if the run is killed, it resumes from this checkpoint
        values = curves(record.to_dict())
        if values:
            self._waiting.append((record.step, values))

    def rewind(self, step: int) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._write()
        path = SQLiteStorage.init_db(self._project)
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (self._id, step))

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.bulk_log(
            self._project,
            self._name,
            [values for _, values in self._waiting],
            steps=[step for step, _ in self._waiting],
            config=self._config,
            run_id=self._id,
        )
        self._waiting, self._written = [], time.monotonic()
