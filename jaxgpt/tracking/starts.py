"""starts.jsonl: every start of a run, even if it failed before the first step.

Each start appends a line of kind `start`, and later at most one line of each of the kinds
`devices`, `first_step` and `end`. If the file system supports locks, the run directory is locked,
so two starts cannot write at the same time.
"""

import contextlib
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from jaxgpt.config import check_shape
from jaxgpt.tracking.jsonl import json_line

STARTS = "starts.jsonl"
SPREAD = {"max": float, "slowest_rank": int}
SHAPES: dict[str, Any] = {
    "start": {"processes": int, "hosts": [str], "machine": str | None},
    "devices": {"devices": int, "device_kind": str, "job": str | None, "mesh": {str: int}},
    "first_step": {  # and the other fields of startup.json
        "model": str, "process_start": float, "first_step_done": float, "compile_cache": str,
        "job_start_to_first_step": float | None, "total": SPREAD, "phases": {str: SPREAD},
        "slowest_phase": str,
    },
    "end": {"step": int, "max_iters": int, "failed": bool},
}  # fmt: skip


def log_start(directory: Path, kind: str, facts: dict[str, Any]) -> None:
    """Append a line to a run's starts.jsonl. `kind` is a key of `SHAPES`.

    Any `OSError` is ignored.
    """
    line = json_line({"kind": kind, "time": time.time(), **facts})
    # Errors such as a full disk must not end the run.
    with contextlib.suppress(OSError), (directory / STARTS).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # an earlier process died while it was writing
                file.write(b"\n")
        file.write(line.encode())


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first, each with the fields of its `start` line.

    `time` is the Unix time in seconds at which this line was written. The fields of the `devices`
    line are added, if that line exists. `first_step` and `end` each hold the fields of the line of
    that kind, or None if there is no such line. Damaged lines are ignored. The list is empty if
    there is no starts.jsonl. Raises `OSError` if starts.jsonl cannot be read.
    """
    starts: list[dict[str, Any]] = []
    path = directory / STARTS
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            check_shape(record, {"kind": str, "time": float})
            check_shape(record, SHAPES[record["kind"]])
            datetime.datetime.fromtimestamp(record["time"])  # fails if the time is out of range
        except (ValueError, KeyError, RecursionError, OverflowError, OSError):
            continue
        kind = record.pop("kind")
        if kind == "start":
            starts.append({**record, "first_step": None, "end": None})
        elif starts and kind == "devices":
            starts[-1] = {**record, **starts[-1]}
        elif starts:
            starts[-1][kind] = record
    return starts


def start_rows(name: str, directory: Path, state: str) -> list[dict[str, Any]]:
    """Return one table row for each start of a run. Unknown values are None.

    `name` is the name of the run, and `state` is as returned by `RunFiles.state`. In each row,
    `seconds` is the time from the start of the job to the end of the first step, and `from` is
    "job". If the start of the job is unknown, `seconds` is measured from the start of the process,
    and `from` is "process". `seconds` is rounded to 0.1 s. `time` is the local time of the start as
    text, and `hosts` is the number of hosts. `result` is `done`, `stopped`, `dead`, `failed` (if
    the start ended before JAX started, for example because a setting was refused) or, for the last
    start, `running`.
    """
    rows, starts = [], read_starts(directory)
    for number, start in enumerate(starts, 1):
        done, end = start["first_step"] or {}, start["end"]
        result = "dead" if "devices" in start else "failed"
        if end and not end["failed"]:
            result = "stopped"
        if end and not end["failed"] and end["step"] >= end["max_iters"]:
            result = "done"
        elif number == len(starts) and state == "running":
            result = state
        seconds, since = done.get("job_start_to_first_step"), "job"
        if done and seconds is None:
            seconds, since = done["total"]["max"], "process"
        slowest, phases = done.get("slowest_phase"), done.get("phases", {})
        if slowest in phases:
            slowest = "{} {max:.1f} s @{slowest_rank}".format(slowest, **phases[slowest])
        began = datetime.datetime.fromtimestamp(start["time"]).isoformat(" ", "seconds")
        rows.append({
            "run": name, "start": number, "time": began, "result": result,
            "seconds": None if seconds is None else round(seconds, 1),
            "from": since if done else None, "processes": start["processes"],
            "hosts": len(start["hosts"]), "first host": next(iter(start["hosts"]), None),
            "machine": start["machine"], "devices": start.get("devices"),
            "device": start.get("device_kind"), "job": start.get("job"),
            "slowest phase": slowest, "cache": done.get("compile_cache"),
            "model": done.get("model"),
        })  # fmt: skip
    return rows
