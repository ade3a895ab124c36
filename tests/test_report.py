import json
import sys

import pytest

from jaxgpt import report
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
    paths = [tmp_path / name for name in ("one", "two", "empty", "broken", "list", "bare")]
    for path in paths:
        path.mkdir()
    (paths[0] / "startup.json").write_text(json.dumps(found))
    alone = found | {"job_start_to_first_step": None, "processes": 1}
    (paths[1] / "startup.json").write_text(json.dumps(alone))
    for path, text in zip(paths[3:], ("{", "[]", "{}"), strict=True):
        (path / "startup.json").write_text(text)
    job = run("report", "startup", *paths[:2])
    assert job.returncode == 0, job.stdout
    first, second = (line for line in job.stdout.splitlines() if "tiny, 0.62M" in line)
    for word in ("96", "61.5", "job start", "compile, 22.2 s on rank 41", "miss"):
        assert word in first
    assert "50.0" in second and "process start" in second
    for path in paths[2:]:
        job = run("report", "startup", path)
        assert job.returncode == 2
        (line,) = job.stdout.strip().splitlines()
        assert f"RUN={path}" in line and "cannot be read" in line


def test_spikes_are_listed_and_drawn(tmp_path):
    rows = [{"row": 3, "loss": 7.5, "corpus": "web", "source": "/data/web", "offset": 8192}]
    numbers = {"loss": 7.25, "grad_norm": 4.5, "median": 3.0, "limit": 3.5, "rows": rows}
    records = [{"kind": "train", "step": s, "loss": 4 - s / 50, "skipped": False} for s in (1, 5)]
    records += [
        {"kind": "spike", "step": 4, "cause": "nonfinite", "action": "skip_update", "rows": rows,
         "loss": None, "grad_norm": None, "nonfinite": True},
        {"kind": "rewind", "step": 5, "spike": 9, "cause": "loss", **numbers, "dropped": [6, 10],
         "skip": [8, 11], "dropped_losses": [[8, 3.1], [9, 7.25], [10, None]]},
        *({"kind": "train", "step": s, "loss": None, "skipped": True} for s in range(8, 12)),
        {"kind": "spike", "step": 14, "cause": "grad_norm", "action": "log", **numbers},
        {"kind": "train", "step": 15, "loss": 3.0, "skipped": False},
        {"kind": "eval", "step": 15, "train_loss": 3.0, "val_loss": 3.1},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    picture = tmp_path / "spikes.png"
    job = run("report", "spikes", tmp_path, "--png", picture)
    assert job.returncode == 0, job.stdout
    rows = [line for line in job.stdout.splitlines() if line[:1] == "│"]
    assert [line.split("│")[1].strip() for line in rows] == ["4", "8", "9", "14"]
    for line, words in zip(
        rows,
        (
            ("nonfinite", "skip_update", "3 (web @8192)"),
            ("8-11 skipped",),
            ("loss", "7.25", "3.5", "4.5", "rewound to step 5, dropped 6-10, skipped 8-11"),
            ("grad_norm", "log"),
        ),
        strict=True,
    ):
        assert all(word in line for word in words), line
    assert picture.read_bytes().startswith(b"\x89PNG")
    job = run("report", "spikes", tmp_path, "--png", tmp_path / "no" / "where.png")
    assert job.returncode == 2 and f"--png={tmp_path}/no/where.png" in job.stdout
    assert job.stdout.count("\n") == 1
    for kind in ("spikes", "goodput"):
        job = run("report", kind, tmp_path / "no")
        assert job.returncode == 2 and job.stdout.startswith(f"error: RUN={tmp_path}/no: ")
    job = run("report", "goodput", tmp_path)
    assert job.returncode == 2 and job.stdout.count("\n") == 1
    assert f"RUN={tmp_path}: its metrics.jsonl has no goodput records" in job.stdout


def test_pictures_without_matplotlib_are_refused_in_a_sentence(tmp_path, monkeypatch):
    from jaxgpt.config import UsageError
    from jaxgpt.spikes.report import draw_spikes

    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"--png=.*matplotlib; pip install 'jaxgpt\[report\]'"):
        draw_spikes([], "a run", tmp_path / "x.png")


def test_damaged_lines_are_left_out_and_said(tmp_path, capsys):
    whole = {"kind": "train", "step": 1, "loss": 4.0, "skipped": True}
    spoilt = [json.dumps(whole | {"skipped": 1}), json.dumps(whole | {"step": None}), "{", "\0"]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in (json.dumps(whole), *spoilt)))
    report.main(["spikes", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "1-1 skipped" in printed and f"warning: 4 lines of {path} are damaged" in printed
