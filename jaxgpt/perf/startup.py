"""Start-up times of each process, from the start of the job to the end of the first step."""

import os
import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from jaxgpt.cluster.environment import JOB_START
from jaxgpt.perf.clock import Clock


def startup_report(clock: Clock, compile_cache: str) -> dict[str, Any]:
    """Return the start-up times of this process, for `summary`.

    The dict has the `seconds` of each phase, the `total` seconds since the process started, and the
    Unix time `process_start`. `compile_cache` is the value of `str(CacheUse)`. The `job start`
    phase is the time from job start to process start, if known. Call this at the end of the first
    step.
    """
    phases, total = clock.seconds(), clock.elapsed()
    phases["first step"] = phases.pop("step", 0.0) + phases.pop("data", 0.0)
    # An invalid value is ignored.
    started = os.environ.get(JOB_START, "")
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", started):
        waited = clock.began - float(started)
        if -10 < waited < 30 * 86_400:  # negative if the clocks of two hosts differ
            phases = {"job start": max(0.0, waited), **phases}
    return {
        "seconds": phases,
        "process_start": clock.began,
        "total": total,
        "compile_cache": compile_cache,
    }


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Build the content of startup.json from the reports of all processes, in rank order.

    Durations are in seconds, and timestamps are Unix times. `processes` is the number of processes.
    `total` is a dict of `min`, `mean`, `max` and `slowest_rank`. `phases` contains such a dict for
    each phase that all processes report. `slowest_phase` is the phase with the largest `max`.
    `process_start`, `first_step_done`, `compile_cache` and `job_start_to_first_step` describe
    process 0. `job_start_to_first_step` is None unless all processes know when the job started.
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
    """Format the content of startup.json as a log line, with times in seconds."""
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
    """Return the durations in startup.json, in seconds, as a flat dict for the trackers.

    For each phase and for `total`, the keys are NAME_min, NAME_mean, NAME_max and
    NAME_slowest_rank, with underscores instead of spaces. The other keys are `processes` and, if
    known, `job_start_to_first_step`.
    """
    record: dict[str, float] = {"processes": found["processes"]}
    for phase, spread in (found["phases"] | {"total": found["total"]}).items():
        record |= {f"{phase}_{name}".replace(" ", "_"): value for name, value in spread.items()}
    if found["job_start_to_first_step"] is not None:
        record["job_start_to_first_step"] = found["job_start_to_first_step"]
    return record
