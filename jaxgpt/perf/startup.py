"""Start-up phases: seconds from the start of a job to the end of its first step, by process."""

import contextlib
import os
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

JOB_START = "JAXGPT_JOB_START"  # Unix seconds; set by the scripts in launch/ and by jaxgpt.launch


def process_start_time() -> float:
    """Return the Unix time at which this process started; now, where /proc does not tell."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)  # /proc/uptime is a container's own
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time()


class Startup:
    """Seconds of each phase of a start on this process; imports are spread over it."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.compile_cache = "not used"  # or `hit`, if all programs came from it, or `miss`
        self.began = self._last = process_start_time()
        with contextlib.suppress(KeyError, ValueError):
            waited = self.began - float(os.environ[JOB_START])
            if -10 < waited < 30 * 86_400:  # else it is no time of this job; clocks differ a little
                self.seconds["job start"] = max(0.0, waited)

    def mark(self, phase: str) -> None:
        """End a phase, or one more part of it; it began where the last one ended."""
        now = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def elapsed(self) -> float:
        """Return the seconds since this process started."""
        return time.time() - self.began

    def report(self) -> dict[str, Any]:
        """Return this process's numbers, for `summary`."""
        return {
            "seconds": self.seconds,
            "process_start": self.began,
            "total": self._last - self.began,
            "compile_cache": self.compile_cache,
        }


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of startup.json, from the reports of all processes by rank.

    `job_start_to_first_step` is None where nobody said when the job began.
    """

    def spread(seconds: list[float]) -> dict[str, float]:
        most, mean = max(seconds), fmean(seconds)
        return {"min": min(seconds), "mean": mean, "max": most, "slowest_rank": seconds.index(most)}

    main, all_seconds = reports[0], [one["seconds"] for one in reports]
    phases = {
        phase: spread([seconds[phase] for seconds in all_seconds])
        for phase in all_seconds[0]
        if all(phase in seconds for seconds in all_seconds)
    }
    from_job = main["seconds"]["job start"] + main["total"] if "job start" in phases else None
    return {
        "processes": len(reports),
        "process_start": main["process_start"],
        "first_step_done": main["process_start"] + main["total"],
        "job_start_to_first_step": from_job,
        "total": spread([one["total"] for one in reports]),
        "phases": phases,
        "compile_cache": main["compile_cache"],
        "slowest_phase": max(phases, key=lambda phase: phases[phase]["max"]),
    }


def startup_line(found: dict[str, Any]) -> str:
    """Return one line for the log."""
    several, from_job = found["processes"] > 1, found["job_start_to_first_step"]
    text = "{min:.1f}/{mean:.1f}/{max:.1f} (rank {slowest_rank})" if several else "{mean:.1f}"
    parts = [f"{phase} {text.format(**s)}" for phase, s in found["phases"].items()]
    job = f", {from_job:.1f} s from job start" if from_job is not None else ""
    spreads = f"; min/mean/max of {found['processes']} processes (slowest)" if several else ""
    return (
        f"start-up: {found['total']['max']:.1f} s from process start to first step{job}"
        f"{spreads}: {', '.join(parts)}; compile cache: {found['compile_cache']}"
    )


def startup_values(found: dict[str, Any]) -> dict[str, float]:
    """Return flat values for metrics.jsonl and other trackers, in seconds."""
    record: dict[str, float] = {"processes": found["processes"]}
    for phase, spread in (found["phases"] | {"total": found["total"]}).items():
        record |= {f"{phase}_{name}".replace(" ", "_"): value for name, value in spread.items()}
    if found["job_start_to_first_step"] is not None:
        record["job_start_to_first_step"] = found["job_start_to_first_step"]
    return record
