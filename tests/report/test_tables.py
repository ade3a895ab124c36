"""The tables of the report command: runs, their starts, goodput and spikes."""

import csv
import json
import shutil
import subprocess
import sys

import pytest

from jaxgpt.report import __main__ as report
from jaxgpt.report.panels import PANELS
from jaxgpt.tracking.run_files import read_runs
from jaxgpt.tracking.starts import log_start, read_starts
from jobs import run
from written_runs import short_run

FIRST_STEP = {
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
START = {"processes": 96, "hosts": ["n1", "n2"], "machine": "Polaris"}
DEVICES = {"devices": 96, "device_kind": "A100", "job": "123.pbs", "mesh": {"data": 96}}


def write_starts(path):
    """Write a run that died before JAX started, died in training, stopped, and finished."""
    path.mkdir(parents=True)
    log_start(path, "start", START)
    for end in (None, 10, 20):
        log_start(path, "start", START)
        log_start(path, "devices", DEVICES)
        log_start(path, "first_step", FIRST_STEP)
        if end is not None:
            log_start(path, "end", {"step": end, "max_iters": 20, "failed": False})


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_start_after_a_line_that_was_cut_off_is_found(tmp_path):
    (tmp_path / "starts.jsonl").write_text('{"kind": "devi')
    log_start(tmp_path, "start", {"processes": 2, "hosts": ["a"], "machine": None})
    (start,) = read_starts(tmp_path)
    assert start["processes"] == 2


def test_every_start_of_a_run_is_a_row(tmp_path, capsys):
    write_starts(tmp_path / "runs" / "written")
    with (tmp_path / "runs" / "written" / "starts.jsonl").open("a") as file:
        file.write('{"kind": "end", "time": "now"}\n{"kind": "sta')  # damaged, and cut off
    real = short_run(tmp_path / "runs" / "deep" / "real", "checkpoint.interval=2")
    short_run(real, "train.max_iters=6")
    files = [tmp_path / name for name in ("s.csv", "s.json", "s.png")]
    options = [
        str(w) for pair in zip(("--csv", "--json", "--png"), files, strict=True) for w in pair
    ]
    report.main(["startup", str(tmp_path / "runs"), "--sort", "start", *options])
    rows = read_csv(files[0])
    assert [row["start"] for row in rows] == ["1", "1", "2", "2", "3", "4"]
    written = {row["start"]: row for row in rows if row["run"] == "written"}
    results = [written[n]["result"] for n in "1234"]
    assert results == ["failed", "dead", "stopped", "done"]
    assert written["1"]["seconds"] == "" and written["2"]["seconds"] == "61.5"
    about = [written["2"][c] for c in ("hosts", "first host", "machine", "devices", "job")]
    assert about == ["2", "n1", "Polaris", "96", "123.pbs"]
    assert written["2"]["slowest phase"] == "compile 22.2 s @41"
    found = [row for row in rows if row["run"] == "deep/real"]
    assert [row["result"] for row in found] == ["done", "done"]
    startup = json.loads((real / "startup.json").read_text())
    assert float(found[1]["seconds"]) == round(startup["total"]["max"], 1)
    assert len(json.loads(files[1].read_text())) == 6
    assert files[2].read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert table.count("written") == 8  # at 200 columns, there are two tables of these four starts
    assert all(f" {name} " in table for name in rows[0])
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(files[0])
    assert table["seconds"].isna().sum() == 1 and table["processes"].max() == 96


def test_runs_are_listed_with_their_states(tmp_path, capsys):
    real = short_run(tmp_path / "runs" / "done", "train.eval_interval=2")
    lines = (real / "metrics.jsonl").read_text().splitlines(keepends=True)
    config = (real / "config.yaml").read_text()
    for name in ("stopped", "dead", "running"):
        path = tmp_path / "runs" / name
        path.mkdir()
        kept = [line for line in lines if "goodput" not in line]
        if name == "stopped":  # one step after the last training line
            kept.append(lines[-1].replace('"step": 4', '"step": 5'))
        (path / "metrics.jsonl").write_text("".join(kept))
        (path / "config.yaml").write_text(config.replace("max_iters: 4", "max_iters: 9"))
        (path / ".lock").write_text((real / ".lock").read_text())
    write_starts(tmp_path / "runs" / "new")
    lock = f"import fcntl, time; f = open({str(tmp_path / 'runs' / 'running' / '.lock')!r}, 'a')"
    holder = subprocess.Popen(
        [sys.executable, "-uc", f"{lock}; fcntl.lockf(f, fcntl.LOCK_EX); print(1); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "1\n"
    report.main(["runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "runs.csv")])
    holder.communicate("\n")
    rows = {row["run"]: row for row in read_csv(tmp_path / "runs.csv")}
    states = {name: rows[name]["state"] for name in ("done", "stopped", "dead", "running")}
    assert states == {name: name for name in states}
    records = [json.loads(line) for line in lines]
    losses = [r["val_loss"] for r in records if r["kind"] == "eval"]
    done = rows["done"]
    assert (done["step"], done["max_iters"], rows["dead"]["max_iters"]) == ("4", "4", "9")
    best, last = float(done["best val loss"]), float(done["val loss"])
    assert (best, last) == (round(min(losses), 4), round(losses[-1], 4))
    assert rows["stopped"]["step"] == "5"
    assert done["mesh"] == next(r["mesh"] for r in records if r["kind"] == "start")
    assert "new" in capsys.readouterr().out
    lines = report.tables_text([{"run": "a", "mesh": "data=1", "age": 3}], width=20, keys=1)
    assert [line.split() for line in lines.splitlines() if line[0] in "┃│"] == [
        ["┃", "run", "┃", "mesh", "┃"],
        ["│", "a", "│", "data=1", "│"],
        ["┃", "run", "┃", "age", "┃"],
        ["│", "a", "│", "3", "│"],
    ]


def test_a_run_is_read_on_from_where_the_last_read_ended(tmp_path):
    def line(step):
        return json.dumps({"kind": "train", "step": step, "loss": 1.0, "skipped": False}) + "\n"

    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:9])
    (found,) = read_runs([tmp_path])
    assert [r["step"] for r in found.records["train"]] == [1]
    assert not found.refresh()
    path.write_text(line(1) + line(2) + line(3))
    assert found.refresh() and [r["step"] for r in found.records["train"]] == [1, 2, 3]
    new = tmp_path / "new"
    new.write_text(line(1))
    new.replace(path)  # as a restart does
    assert found.refresh() and [r["step"] for r in found.records["train"]] == [1]
    path.write_text(line(4) + line(5))  # longer, and in the same inode, as after two restarts
    assert found.refresh() and [r["step"] for r in found.records["train"]] == [4, 5]
    path.write_text("")
    assert found.refresh() and not found.records["train"]


def test_numbers_are_written_as_csv_and_plotted_in_the_terminal(tmp_path, capsys):
    real = short_run(tmp_path / "real", "train.eval_interval=2", "train.layers_every=2")
    capsys.readouterr()
    report.main([str(real), "--text", "--csv", str(tmp_path / "all.csv")])
    rows = read_csv(tmp_path / "all.csv")
    records = map(json.loads, (real / "metrics.jsonl").read_text().splitlines())
    wanted = [r for r in records if r["kind"] in ("train", "eval")]
    assert len(rows) == len(wanted)
    for record in wanted:
        (row,) = (
            r for r in rows if (r["kind"], r["step"]) == (record["kind"], str(record["step"]))
        )
        assert all(row[k] == str(v) for k, v in record.items() if isinstance(v, float))
    printed = capsys.readouterr().out.rpartition("wrote ")[0]
    losses = [r["loss"] for r in wanted if r["kind"] == "train"]
    loss_plot = printed.partition("\nLoss, training")[2].split("\n\n")[0]
    assert f"{max(losses):.4g}" in loss_plot and f"{min(losses):.4g}" in loss_plot
    assert "step 1" in loss_plot and max(map(len, printed.splitlines())) <= 100
    (*_, layers) = (r for r in read_runs([real])[0].records["layers"])
    plot = printed.partition(f"Layers at step {layers['step']}, weight norm\n")[2].split("\n\n")[0]
    norms = layers["weight_norm"].values()
    assert plot.startswith(f"{max(norms):>10.4g} ") and f"{min(norms):.4g} " in plot
    assert "layer 0" in plot


def test_mistakes_are_refused_in_a_sentence(tmp_path):
    write_starts(tmp_path / "runs" / "one")
    one, empty = tmp_path / "runs" / "one", tmp_path / "empty"
    empty.mkdir()
    for arguments, words in (
        ([tmp_path / "no"], f"RUN={tmp_path}/no: is not a folder; give the --out of a run"),
        ([empty], f"RUN={empty}: contains no metrics.jsonl; give the --out of a run"),
        (["runs", "--text"], "--text: not an option of the command runs, which lists runs; to"),
        (["runs", "--png=x"], "--png: not an option of the command runs"),
        (["startup", one, "--sort", "speed"], "--sort=speed: no such column; use run, start"),
        (
            [one, "--csv", tmp_path / "no" / "x.csv"],
            f"--csv={tmp_path}/no/x.csv: cannot be written",
        ),
        (["goodput", one], f"RUN={one}: its metrics.jsonl has no goodput records"),
    ):
        job = run("report", *arguments)
        assert job.returncode == 2 and job.stdout.count("\n") == 1, job.stdout
        assert job.stdout.startswith(f"error: {words}")


def test_a_run_without_goodput_does_not_hide_that_of_others(tmp_path, capsys):
    train = {"kind": "train", "step": 1, "loss": 4.0, "skipped": False}
    goodput = {"kind": "goodput", "step": 1, "after": 0, "start": 1.0, "began": 1.0, "ended": 9.0,
               "seconds": {"step": 8.0}, "is_last": True}  # fmt: skip
    for name, records in {"a": [train], "b": [train, goodput]}.items():
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    report.main(["goodput", str(tmp_path / "a"), str(tmp_path / "b")])
    first, second = capsys.readouterr().out.split("b:\n")
    assert first == "a:\nno goodput records\n" and "Goodput" in second


def test_spikes_are_listed_and_drawn(tmp_path, capsys):
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
            (" 7.25 (limit 3.5) ", " 4.5 ", "rewound to step 5, dropped 6-10, skipped 8-11"),
            ("grad_norm", " 7.25 ", " 4.5 (limit 3.5) ", "log"),
        ),
        strict=True,
    ):
        assert all(word in line for word in words), line
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "metrics.jsonl", tmp_path / "other")
    report.main(["spikes", str(tmp_path), str(tmp_path / "other"), "--png", str(picture)])
    assert capsys.readouterr().out.count(f"loss curve: {picture}") == 1  # of both runs
    job = run("report", "spikes", tmp_path, "--png", tmp_path / "no" / "where.png")
    assert job.returncode == 2 and f"--png={tmp_path}/no/where.png" in job.stdout
    assert job.stdout.count("\n") == 1


def test_a_page_without_bokeh_is_refused_in_a_sentence(tmp_path, monkeypatch):
    from jaxgpt.config import UsageError
    from jaxgpt.report.page import page

    for name in [m for m in sys.modules if m.split(".")[0] == "bokeh"] + ["bokeh"]:
        monkeypatch.setitem(sys.modules, name, None)
    write_starts(tmp_path / "one")
    with pytest.raises(UsageError, match=r"needs bokeh; pip install 'jaxgpt\[report\]', or use"):
        page(read_runs([tmp_path]), "title")


def test_pictures_without_matplotlib_are_refused_in_a_sentence(tmp_path, monkeypatch):
    from jaxgpt.config import UsageError
    from jaxgpt.report.draw import draw_png

    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"--png=.*matplotlib; pip install 'jaxgpt\[report\]'"):
        draw_png([], tmp_path / "x.png")


def test_a_picture_keeps_a_name_without_a_suffix(tmp_path):
    pytest.importorskip("matplotlib")
    from jaxgpt.report.draw import draw_png

    draw_png([], tmp_path / "curves")
    assert [path.name for path in tmp_path.iterdir()] == ["curves"]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_picture_tells_runs_and_curves_apart_and_no_legend_covers_a_panel(
    tmp_path, monkeypatch, count
):
    figure = pytest.importorskip("matplotlib.figure")
    from jaxgpt.report.draw import draw_png

    skip = {"kind": "train", "step": 4, "loss": None, "skipped": True}
    for i in range(count):
        losses = [{"kind": "train", "step": s, "loss": 4 - s / 9 - i / 5} for s in (1, 2, 3)]
        evals = [{"kind": "eval", "step": s, "train_loss": 3.5, "val_loss": 3.6} for s in (1, 3)]
        records = [*({"skipped": False} | record for record in losses), skip, *evals]
        (tmp_path / f"gpt2-lr3e-4-seed{i}").mkdir()
        path = tmp_path / f"gpt2-lr3e-4-seed{i}" / "metrics.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    saved, drawn = figure.Figure.savefig, []
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), saved(self, *a, **k))
    )
    runs = read_runs([tmp_path])
    draw_png(runs, tmp_path / "loss.png", PANELS[:1])
    (axes,), (below,) = drawn[0].axes, drawn[0].legends
    for legend in (axes.get_legend(), below):
        box = legend.get_window_extent()
        assert box.y0 >= axes.bbox.y1 - 1 or box.y1 <= axes.bbox.y0  # in pixels
    png = (tmp_path / "loss.png").read_bytes()
    assert int.from_bytes(png[20:24], "big") > 4 * 120  # 4 inches, 120 dpi, and the legend below
    names = [run.name for run in runs] if count > 1 else []
    assert [text.get_text() for text in below.get_texts()] == [*names, "skipped steps"]
    curves = ["training", "evaluation, validation split", "evaluation, training split"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == curves

    def look(line):  # without the color
        return line.get_linestyle(), line.get_marker(), line.get_fillstyle()

    assert len({look(line) for line in axes.get_legend().get_lines()}) == len(curves)
    shown = [line for line in axes.get_lines() if len(line.get_ydata()) and not line.get_alpha()]
    assert len({(str(line.get_color()), look(line)) for line in shown}) == len(curves) * count
    if count > 1:
        assert len({str(line.get_color()) for line in shown}) == count
        colors = [str(line.get_color()) for line in below.get_lines()]
        assert colors == [str(line.get_color()) for line in shown[:: len(curves)]]


def test_damaged_lines_are_left_out_and_said(tmp_path, capsys):
    whole = {"kind": "train", "step": 1, "loss": 4.0, "skipped": True}
    spoilt = [json.dumps(whole | {"skipped": 1}), json.dumps(whole | {"step": None}), "{", "\0"]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in (json.dumps(whole), *spoilt)))
    report.main(["spikes", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "1-1 skipped" in printed and f"warning: 4 lines of {path} are damaged" in printed
