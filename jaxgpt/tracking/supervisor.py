"""The connection that process 0 uses to report its progress to `jaxgpt.launch --restarts`."""

import json
import os
import socket
from typing import Any

from jaxgpt.cluster.environment import JOB, SUPERVISOR
from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.tracking.records import Record


class SupervisorLink:
    """Sends a JSON line for each training record, complete checkpoint and rewind.

    `open` and `close` also send a line. The keys are `job`, `run` (absolute path of the run
    directory), `resumed` (step of the checkpoint that the run resumed from, or 0), `saved` (step of
    the newest checkpoint, or 0), `step` (step of the newest training record or, until the next one,
    the step that the run resumed from or rewound to) and `ending` (true only in the line from
    `close`). `step` may be lower than `saved`. Methods raise `OSError` if a line cannot be sent.
    The next line then opens a new connection. If no send fails, the connection stays open until the
    process exits.
    """

    def __init__(self) -> None:
        self._connection: socket.socket | None = None

    def open(self, run: Any, resume_step: int | None) -> None:
        step = resume_step or 0
        run = str(run.directory.absolute())
        self._facts = {"job": os.environ[JOB], "run": run, "resumed": step, "saved": step}
        self._send(step)

    def log(self, record: Record) -> None:
        if record.kind == "checkpoint":  # training may already be at a later step
            self._facts["saved"] = record.step
            self._send(self._step)
        elif record.kind == "train":
            self._send(record.step)

    def rewind(self, step: int) -> None:
        self._facts["saved"] = min(self._facts["saved"], step)
        self._send(step)

    def close(self) -> None:
        """Report that the run has ended and that its processes are about to exit."""
        self._send(self._step, ending=True)

    def _send(self, step: int, ending: bool = False) -> None:
        self._step = step
        message = self._facts | {"step": step, "ending": ending}
        if self._connection is None:
            host, _, port = os.environ[SUPERVISOR].rpartition(":")
            self._connection = socket.create_connection((host, int(port)), ANSWER)
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._connection = None  # writing the next record reconnects
            raise
