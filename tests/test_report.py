import json

from jobs import run


def test_startup_compares_runs_and_refuses_what_is_none(tmp_path):
    found = {
        "model": "tiny, 0.62M",
        "processes": 96,
        "process_start": 1_700_000_000.0,
        "first_step_done": 1_700_000_050.0,
        "job_start_to_first_step": 61.5,
        "total": {"min": 49.0, "mean": 49.5, "max": 50.0, "slowest_rank": 7},
        "phases": {"compile": {"min": 20.0, "mean": 21.0, "max": 22.25, "slowest_rank": 41}},
        "compile_cache": "miss",
        "slowest_phase": "compile",
    }
    paths = [tmp_path / name for name in ("one", "two", "empty", "broken")]
    for path in paths:
        path.mkdir()
    (paths[0] / "startup.json").write_text(json.dumps(found))
    alone = found | {"job_start_to_first_step": None, "processes": 1}
    (paths[1] / "startup.json").write_text(json.dumps(alone))
    (paths[3] / "startup.json").write_text("{")
    job = run("report", "startup", *paths[:2])
    assert job.returncode == 0, job.stdout
    first, second = (line for line in job.stdout.splitlines() if "tiny, 0.62M" in line)
    for word in ("96", "61.5", "job start", "compile, 22.2 s on rank 41", "miss"):
        assert word in first
    assert "50.0" in second and "process start" in second
    for path, words in ((paths[2], "has no startup.json"), (paths[3], "cannot be read")):
        job = run("report", "startup", path)
        assert job.returncode == 2
        (line,) = job.stdout.strip().splitlines()
        assert f"RUN={path}" in line and words in line
