"""What process 0 tells `jaxgpt.launch --restarts`: how far the job has come."""

import json
import os
import socket
from typing import Any

from jaxgpt.cluster.environment import JOB, SUPERVISOR
from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.tracking.records import Record


class SupervisorLink:
    """A connection that stands as long as process 0 does; a JSON line for each record."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None

    def open(self, run: Any, resume_step: int | None) -> None:
        step = resume_step or 0
        run = str(run.directory.absolute())
        self._facts = {"job": os.environ[JOB], "run": run, "resumed": step, "saved": step}
        self._tell(step)

    def log(self, record: Record) -> None:
        if record.kind == "checkpoint":  # complete; a later step may be under way
            self._facts["saved"] = record.step
            self._tell(self._step)
        elif record.kind == "train":
            self._tell(record.step)

    def rewind(self, step: int) -> None:
        self._facts["saved"] = min(self._facts["saved"], step)
        self._tell(step)

    def close(self) -> None:
        """Say that only the end of the processes is to come."""
        self._tell(self._step, ending=True)

    def _tell(self, step: int, ending: bool = False) -> None:
        self._step = step
        message = self._facts | {"step": step, "ending": ending}
        if self._connection is None:
            host, _, port = os.environ[SUPERVISOR].rpartition(":")
            self._connection = socket.create_connection((host, int(port)), ANSWER)
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._connection = None  # the next record connects again
            raise
