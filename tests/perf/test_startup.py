import time

import pytest

from jaxgpt.perf.clock import Clock
from jaxgpt.perf.startup import startup_line, startup_report, startup_values, summary


def report(total, **seconds):
    return {
        "seconds": {name.replace("_", " "): s for name, s in seconds.items()},
        "process_start": 1000.0,
        "total": total,
        "compile_cache": "hit",
    }


REPORTS = [
    report(7.0, job_start=10.0, imports=2.0, compile=5.0),
    report(8.0, job_start=11.0, imports=4.0, compile=4.0),
    report(7.5, job_start=10.0, imports=3.0, compile=4.5),
]


def test_a_summary_has_the_spread_over_processes_and_the_slowest_rank():
    found = summary(REPORTS)
    assert list(found["phases"]) == ["job start", "imports", "compile"]
    assert found["phases"]["imports"] == {"min": 2.0, "mean": 3.0, "max": 4.0, "slowest_rank": 1}
    assert found["phases"]["compile"]["slowest_rank"] == 0
    assert found["slowest_phase"] == "job start"
    assert found["job_start_to_first_step"] == 17.0
    assert found["first_step_done"] == 1007.0
    line = startup_line(found)
    assert "8.0 s from process start to first step, 17.0 s from job start" in line
    assert "imports 2.0/3.0/4.0 (rank 1)" in line and "compile cache: hit" in line
    record = startup_values(found)
    assert record["imports_max"] == 4.0 and record["total_mean"] == 7.5
    assert record["job_start_to_first_step"] == 17.0


def test_the_job_start_is_none_if_it_is_unknown():
    reports = [report(7.0, imports=2.0)]
    assert summary(reports)["job_start_to_first_step"] is None
    assert "job start" not in startup_line(summary(reports))


def test_phases_add_up_to_the_time_since_the_process_began(monkeypatch):
    clock = Clock()
    launched = clock.began - 100_000
    monkeypatch.setenv("JAXGPT_JOB_START", str(launched))
    for activity in ("prepare", "imports", "step", "data", "step"):
        clock.enter(activity)
    found = startup_report(clock, "hit")
    phases = dict(found["seconds"])
    assert list(phases) == ["job start", "imports", "prepare", "first step"]
    assert phases.pop("job start") == pytest.approx(found["process_start"] - launched)
    assert found["total"] == pytest.approx(sum(phases.values()), abs=0.1)
    assert found["total"] == pytest.approx(time.time() - found["process_start"], abs=0.1)


def test_an_invalid_job_start_time_is_ignored(monkeypatch):
    monkeypatch.setenv("JAXGPT_JOB_START", "yesterday")
    assert "job start" not in startup_report(Clock(), "hit")["seconds"]
