import json
from pathlib import Path

import numpy as np
import pytest

from blends import write_corpora
from jaxgpt import inspect
from jaxgpt.config import load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.tracking.jsonl import json_line
from jaxgpt.tracking.records import StartRecord
from jobs import SMALL, losses, run, train_here


@pytest.fixture
def blend(tmp_path):
    return (
        "model.vocab_size=97", "model.block_size=64", "train.batch_size=16",
        "data.val_share=0.05", "--data.blend", *write_corpora(tmp_path),
    )  # fmt: skip


def shown(capsys, *arguments):
    inspect.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        inspect.main([str(a) for a in arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_rows_are_those_of_the_step_with_their_place(blend, tmp_path, capsys):
    config = load_config("tiny", *blend)
    dataset = open_dataset(config.data, config.model)
    rows = Loader.for_training(dataset, config)
    settings = [word for word in blend if word != "--data.blend"][:4]
    config_file = tmp_path / "c.yaml"
    config_file.write_text(config.to_yaml())
    found, _ = shown(
        capsys, "--config", config_file, "--step", 123456, "--rows", "2:9", "--json", *settings
    )
    assert [record["row"] for record in found] == list(range(2, 9))
    for record, expected in zip(found, rows.read(123456, range(2, 9)), strict=True):
        assert record["tokens"] == expected.tolist()
        assert record["text"] == bytes(record["tokens"]).decode().replace("\0", "<|endoftext|>")
        corpus = int(record["corpus"].removeprefix("name"))
        offset = record["offset"]
        assert record["tokens"] == [(31 * (offset + i) + corpus) % 97 for i in range(65)]
        if corpus == 2:  # indexed, in documents of 250 tokens
            assert record["document"] == offset // 250
            assert record["document_start"] == offset - offset % 250
        else:
            assert record["document"] is record["document_start"] is None


def test_worst_prints_rows_without_a_finite_loss_first(monkeypatch, capsys):
    losses = np.array([1.0, np.nan, 2.0, np.inf, *[0.0] * 12])
    monkeypatch.setattr(inspect, "row_losses", lambda *_: losses)
    monkeypatch.setattr(inspect, "_checkpoint_before", lambda *_: 0)
    words = ("--config", "tiny", "--step", 1, "--worst", "--json", "train.batch_size=16")
    found, _ = shown(capsys, *words)
    assert {record["row"] for record in found[:2]} == {1, 3}
    assert [record["row"] for record in found[2:4]] == [2, 0]
    assert [record["loss"] for record in found[:4]] == [None, None, 2.0, 1.0]


def test_worst_works_with_the_kernels_and_mesh_of_this_machine(tmp_path):
    out, mesh = tmp_path / "run", ("--mesh", "4,1,1", "model.attention=cudnn")
    settings = ("train.batch_size=6", "train.gradient_accumulation_steps=1", "train.max_iters=1")
    assert train_here(*SMALL, *settings, "--out", out, "--mesh", "2,1,1") == 0
    found = []
    for given in (mesh, ("--mesh", "1,1,1", "--rows", "2:5")):
        job = run("inspect", "--run", out, "--step", 1, "--worst", "--json", *given)
        assert job.returncode == 0, job.stdout
        lines = [line for line in job.stdout.splitlines() if line.startswith("{")]
        found.append({r["row"]: r["loss"] for r in map(json.loads, lines)})
    everything, some = found
    assert sorted(everything) == list(range(6)) and sorted(some) == [2, 3, 4]
    assert some == pytest.approx({row: everything[row] for row in some}, rel=1e-5)


@pytest.mark.long
def test_worst_ranks_rows_by_the_loss_of_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    for end in (6, 7):
        assert train_here(*SMALL, "--out", out, "--mesh", "2,1,1", f"train.max_iters={end}") == 0
    capsys.readouterr()
    job = run("inspect", "--run", out, "--step", 7, "--worst", "--json")
    assert job.returncode == 0, job.stdout
    found = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert "losses are computed with checkpoint 6" in job.stdout
    assert sorted(record["row"] for record in found) == list(range(16))
    row_losses = [record["loss"] for record in found]
    assert row_losses == sorted(row_losses, reverse=True) and row_losses[0] > row_losses[-1]
    # What training measured on the same rows with the same parameters.
    assert np.mean(row_losses) == pytest.approx(losses(out)[7], rel=1e-5)

    _, err = shown(capsys, "--run", out, "--step", 2, "--json", "train_range_to_skip=1", "3")
    assert "step 2 is skipped" in err
    (out / "checkpoints" / "6" / "meta" / "metadata").unlink()  # no step's rows depend on it
    _, err = shown(capsys, "--run", out, "--step", 2, "--json", "train.seed=5")
    assert "train.seed was 1337 around this step, but is 5 here" in err
    assert train_here("--out", out, "train.batch_size=8", "train.max_iters=8") == 0
    capsys.readouterr()
    _, err = shown(capsys, "--run", out, "--step", 7, "--json")
    assert "train.batch_size was 16 at step 7" in err
    _, err = shown(capsys, "--run", out, "--step", 8, "--json", "faults.random_tokens=8", 9)
    assert "was 16" not in err and "step 8 has random tokens" in err
    write_corpora(tmp_path)
    other = f"data.path={tmp_path / 'corpus0'}"
    _, err = shown(capsys, "--run", out, "--step", 2, "--json", other)
    assert "differs from the data that the run was trained on" in err


def test_data_is_compared_with_that_of_the_next_checkpoint(monkeypatch):
    config = load_config("tiny", "data.dataset=python")
    dataset = open_dataset(config.data, config.model)
    train = {"train": {"seed": config.train.seed}}
    ours = {"data_fingerprint": dataset.fingerprints, "config": train}
    other = {"data_fingerprint": {}, "config": train}
    monkeypatch.setattr(inspect, "valid_checkpoints", lambda run: {100: ours, 200: other})
    found = [inspect.differences(config, dataset, Path("run"), step) for step in (50, 150, 250)]
    changed = ["warning: this data differs from the data that the run was trained on"]
    assert found == [[], changed, changed]


def test_the_blend_and_the_seed_are_compared_with_those_of_the_next_checkpoint(
    blend, tmp_path, monkeypatch
):
    config = load_config("tiny", *blend)
    dataset = open_dataset(config.data, config.model)
    lines = list(config.data.blend)

    def saved(blend, seed):
        settings = {"train": {"seed": seed}, "data": {"blend": blend}}
        return {"data_fingerprint": dataset.fingerprints, "config": settings}

    other = [lines[0].replace("0.5 ", "0.6 "), *lines[1:]]
    checkpoints = {100: saved(other, config.train.seed + 1), 200: saved(lines, config.train.seed)}
    monkeypatch.setattr(inspect, "valid_checkpoints", lambda run: checkpoints)
    monkeypatch.setattr(inspect, "batch_sizes", lambda run, config: None)

    def noted(step):
        return " ".join(inspect.differences(config, dataset, tmp_path, step))

    assert "data.blend had other weights or corpora around this step" in noted(50)
    assert f"add the data.blend in {tmp_path}/checkpoints/100/meta/metadata" in noted(50)
    assert f"add train.seed={config.train.seed + 1}" in noted(50)
    assert noted(150) == noted(250) == ""
    del checkpoints[200]
    assert "data.blend had other" in noted(250)
    facts = {"mesh": "", "processes": 1, "devices": "cpu", "jax": "", "batch_size": 16}
    start = StartRecord(step=100, consumed_sequences=1600, **facts)  # settings: config.yaml
    (tmp_path / "metrics.jsonl").write_text(json_line(start.to_dict()))
    assert noted(250) == "" and "restarted" not in noted(50)
    checkpoints.clear()  # retention has removed checkpoint 100
    checkpoints[200] = saved([line.replace("0.", "0.0") for line in lines], config.train.seed)
    place = tmp_path / "checkpoints" / "200"
    assert noted(50).startswith(f"the run restarted between step 50 and {place}, so the data, ")
    assert noted(101) == ""  # the shares in checkpoint 200 are the same


def test_what_cannot_be_shown_is_said(tmp_path, capsys):
    assert "--step: 0" in refused(capsys, "--config", "tiny", "--step", 0)
    assert "--rows=7:3" in refused(capsys, "--config", "tiny", "--step", 1, "--rows", "7:3")
    assert "--rows=24" in refused(capsys, "--config", "tiny", "--step", 1, "--rows", "24")
    assert "has no config.yaml" in refused(capsys, "--run", tmp_path, "--step", 1)
    assert "--worst: needs --run" in refused(capsys, "--config", "tiny", "--step", 1, "--worst")
    assert "one of the arguments" in refused(capsys, "--step", 1)
