"""Training runs in this process, on simulated devices."""

import functools
import gc
import json
import os
import re
import shutil
import types

import jax
import numpy as np
import optax
import pytest
import yaml

from jaxgpt import sample
from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.config import MeshShape, OptimizerConfig, UsageError, load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.data.tokenizers import ByteTokenizer
from jaxgpt.train import setup
from jaxgpt.train.evaluate import make_evaluator
from jobs import (
    SMALL,
    checkpoint_arrays,
    losses,
    records,
    train_here,
)

MESH = ("--mesh", "2,1,2")


def same(a, b):
    assert a.keys() == b.keys()
    return all((a[k] == b[k]).all() for k in a)


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """A run of 40 steps with a checkpoint, an evaluation and a sample every 10."""
    out = tmp_path_factory.mktemp("runs") / "forty"
    arguments = ("train.max_iters=40", "checkpoint.interval=10", "checkpoint.keep=10")
    more = ("train.eval_interval=10", "train.sample_tokens=8")
    assert train_here(*SMALL, *MESH, "--out", out, *arguments, *more) == exits.DONE
    return out


def restarted_after_twenty(forty, out):
    """Return a copy of the run without the checkpoints after step 20."""
    shutil.copytree(forty, out)
    for step in (30, 40):
        shutil.rmtree(out / "checkpoints" / str(step))
    return out


def test_the_run_directory_holds_what_a_user_expects(forty):
    names = {p.name for p in forty.iterdir()}
    assert names == {
        "config.yaml", "train.log", "metrics.jsonl", "startup.json", "starts.jsonl", "cluster.json",
        "samples.txt", "tensorboard", "checkpoints", ".lock",
    }  # fmt: skip
    assert sorted(p.name for p in (forty / "checkpoints").iterdir()) == ["10", "20", "30", "40"]
    assert yaml.safe_load((forty / "config.yaml").read_text())["train"]["max_iters"] == 40
    assert "step=40/40 loss=" in (forty / "train.log").read_text()
    assert (forty / "samples.txt").read_text().count("--- step") == 4


def test_a_training_line_has_its_fields(forty):
    lines = records(forty)
    assert [r["step"] for r in lines] == list(range(1, 41))
    last = lines[-1]
    assert set(last) == {
        "kind", "step", "loss", "grad_norm", "lr", "dt", "tokens_per_sec",
        "tokens_per_sec_per_device", "samples_per_sec", "tflops_per_device", "mfu", "data_wait",
        "memory_bytes", "memory_peak_bytes", "seconds_left", "skipped_steps", "nonfinite_steps",
        "consumed_tokens", "skipped",
    }  # fmt: skip
    assert 0 < last["memory_bytes"] <= last["memory_peak_bytes"]
    assert last["seconds_left"] == last["skipped_steps"] == last["nonfinite_steps"] == 0
    assert last["consumed_tokens"] == 40 * 16 * 64
    assert last["tokens_per_sec"] == pytest.approx(16 * 64 / last["dt"])
    assert last["tokens_per_sec_per_device"] == pytest.approx(last["tokens_per_sec"] / 4)
    assert last["lr"] == pytest.approx(1e-3 * 40 / 100, rel=1e-6)  # warm-up
    assert last["mfu"] is None and last["skipped"] is False
    assert [r["step"] for r in records(forty, "eval")] == [10, 20, 30, 40]
    assert [r["step"] for r in records(forty, "checkpoint")] == [10, 20, 30, 40]


def test_a_run_says_what_it_trains_and_its_batch(forty):
    log = (forty / "train.log").read_text()
    for words in (
        "batch: 16 sequences per step in the whole job",
        "1,024 tokens per step; gradient accumulation 1",
        "weight decay: ",
    ):
        assert words in log


def test_evaluation_at_the_start_is_of_the_untrained_model(tmp_path):
    arguments = ("train.eval_at_start=True", "train.sample_tokens=4", "train.max_iters=2")
    assert train_here(*SMALL, *MESH, *arguments, "train.trackers=", "--out", tmp_path) == exits.DONE
    assert [r["step"] for r in records(tmp_path, "eval")] == [0, 2]
    assert [r["step"] for r in records(tmp_path, "sample")] == [0, 2]
    assert records(tmp_path, "eval")[0]["val_loss"] == pytest.approx(np.log(256), abs=0.2)
    assert not (tmp_path / "tensorboard").exists()


def test_training_learns(forty):
    found = losses(forty)
    # Knows nothing yet; the tied embedding favours a repetition, and source code has many.
    assert found[1] == pytest.approx(np.log(256), abs=0.2)
    assert found[40] < found[1] - 0.5  # still in warm-up


def test_a_restarted_run_is_bitwise_the_uninterrupted_one(forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "again")
    assert train_here("--out", out) == exits.DONE
    assert losses(out) == losses(forty)
    assert same(checkpoint_arrays(out, 40), checkpoint_arrays(forty, 40))
    log = (out / "train.log").read_text()
    mesh = "data=2 fsdp=1 tensor=2"
    assert f"resumed from step 20: mesh {mesh} on 1 process, as before" in log


def test_a_shorter_run_is_the_beginning_of_a_longer_one(forty, tmp_path):
    train_here(*SMALL, *MESH, "--out", tmp_path, "train.max_iters=10")
    assert losses(tmp_path) == {s: loss for s, loss in losses(forty).items() if s <= 10}
    assert same(checkpoint_arrays(tmp_path, 10), checkpoint_arrays(forty, 10))


@pytest.mark.long  # in short, test_layouts.py moves a checkpoint of four processes
@pytest.mark.parametrize("mesh", ["1,8,1", "1,1,1"])
def test_a_run_goes_on_from_another_mesh(forty, tmp_path, mesh, monkeypatch):
    from jaxgpt.checkpoint.checkpointer import Checkpoints

    restored = {}
    restore = Checkpoints.restore

    def remember(self, step, shapes):
        state, meta = restore(self, step, shapes)
        table = state["params"]["token_embedding"]["embedding"]
        restored["params"] = {shard.data.shape for shard in table.global_shards}
        restored["tree"] = checkpoint_arrays(out, step)
        return state, meta

    out = restarted_after_twenty(forty, tmp_path / "again")
    monkeypatch.setattr(Checkpoints, "restore", remember)
    train_here("--out", out, "--mesh", mesh)
    assert restored["params"] == {(256, 64 // int(mesh.split(",")[1]))}
    found = losses(out)
    np.testing.assert_allclose(
        [found[s] for s in range(1, 41)], [losses(forty)[s] for s in range(1, 41)], rtol=1e-4
    )
    assert "tensor=2 on 1 process -> data=1" in (out / "train.log").read_text()


def test_what_is_restored_is_bitwise_what_was_saved(forty):
    from jaxgpt.checkpoint.checkpointer import Checkpoints, restore_params
    from jaxgpt.config import MeshShape, load_config
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.jitted import make_steps
    from jaxgpt.train.state import checkpoint_tree, state_from_checkpoint

    saved = checkpoint_arrays(forty, 30)
    assert any("mu" in name for name in saved) and any("nu" in name for name in saved)
    config = load_config(*SMALL[1:]).replace(model__vocab_size=256)
    for mesh in ((1, 8, 1), (2, 2, 2)):
        steps = make_steps(config, make_mesh(MeshShape(*mesh)))
        checkpoints = Checkpoints(forty, load_config(*SMALL[1:], "checkpoint.keep=10"))
        shapes = steps.state_shapes
        state = state_from_checkpoint(*checkpoints.restore(30, checkpoint_tree(shapes)), shapes)
        params = restore_params(forty, 30, steps.state_shapes.params)
        checkpoints.close()
        from jobs import flat

        found = flat({"params": state.params, "opt_state": state.opt_state})
        assert sorted(a.tobytes() for a in found.values()) == sorted(
            a.tobytes() for a in saved.values()
        )
        assert same(
            flat({"params": params}), {k: v for k, v in saved.items() if k.startswith("['params']")}
        )
        assert int(optax.tree_utils.tree_get(state.opt_state, "count")) == 30


def test_skipped_steps_leave_everything_but_the_clock_alone(forty, tmp_path, monkeypatch):
    read, first_read, for_training = set(), Loader.read, Loader.for_training

    def remember(self, step, rows):
        read.add(step)
        return first_read(self, step, rows)

    def watched(*args):
        loader = for_training(*args)
        loader.read = functools.partial(remember, loader)
        return loader

    monkeypatch.setattr(Loader, "for_training", watched)
    train_here(
        *SMALL, *MESH, "--out", tmp_path, "train.max_iters=24", "checkpoint.interval=1",
        "checkpoint.keep=100", "--train-range-to-skip", "10", "20",
    )  # fmt: skip
    lines = {r["step"]: r for r in records(tmp_path)}
    assert [s for s, r in lines.items() if r["skipped"]] == list(range(10, 21))
    assert all(lines[s]["loss"] is None for s in range(10, 21))
    assert read == {*range(1, 10), *range(21, 25)}
    assert same(checkpoint_arrays(tmp_path, 20), checkpoint_arrays(tmp_path, 9))
    for step in (9, 15, 20, 21):
        assert lines[step]["lr"] == pytest.approx(1e-3 * step / 100, rel=1e-6)
        assert lines[step]["consumed_tokens"] == step * 16 * 64
    assert losses(tmp_path)[9] == losses(forty)[9]
    count = [a for name, a in checkpoint_arrays(tmp_path, 24).items() if "count" in name]
    assert count == [24 - 11]  # Adam's own count


def test_skip_ranges_survive_a_restart(forty, tmp_path):
    arguments = (*SMALL, *MESH, "--out", tmp_path, "checkpoint.keep=10")
    train_here(*arguments, "train.max_iters=8", "--train-range-to-skip", "5", "10")
    train_here(*arguments, "train.max_iters=14", "--train-range-to-skip", "13", "13")
    skipped = [r["step"] for r in records(tmp_path) if r["skipped"]]
    assert skipped == [5, 6, 7, 8, 9, 10, 13]
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["train_range_to_skip"]
    assert kept == [5, 10, 13, 13]
    # What is trained cannot be skipped any more: inspect would say that it was.
    train_here(*arguments, "train.max_iters=16", "--train-range-to-skip", "9", "11", "14", "15")
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["train_range_to_skip"]
    assert kept == [5, 10, 13, 13, 15, 15]
    log = (tmp_path / "train.log").read_text()
    assert "train_range_to_skip=9 11: steps of this range were trained before" in log
    assert log.count("steps of this range were trained") == 2


@pytest.mark.long
def test_skip_ranges_survive_a_kill_before_the_first_checkpoint(tmp_path):
    arguments = (*SMALL, *MESH, "--out", tmp_path, "train.max_iters=4")
    train_here(*arguments, "--train-range-to-skip", "2", "3")
    shutil.rmtree(tmp_path / "checkpoints")
    train_here(*arguments)
    assert [r["step"] for r in records(tmp_path) if r["skipped"]] == [2, 3]
    assert (tmp_path / "metrics.jsonl.old").exists()


@pytest.mark.long
def test_a_run_that_ends_before_its_first_step_goes_on_as_it_was(tmp_path, monkeypatch):
    def killed(*arguments):
        raise RuntimeError

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(setup, "restart_from", killed)
        train_here(*SMALL, *MESH, "--out", tmp_path, "train.seed=5")
    assert train_here("--out", tmp_path, "train.max_iters=1") == exits.DONE
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert kept["train"]["seed"] == 5 and kept["config"] == "shakespeare_char_cpu"


def test_a_refusal_to_resume_holds_for_the_start_that_it_was_given_to(tmp_path):
    arguments = ("--out", tmp_path, "checkpoint.resume=False")
    assert train_here(*SMALL, *MESH, *arguments, stop_at=2) == exits.STOPPED
    log = (tmp_path / "train.log").read_text()
    assert f"--out {tmp_path} checkpoint.resume=True continues from there" in log
    with pytest.raises(UsageError, match="checkpoint.resume=False"):
        train_here(*arguments)
    assert train_here("--out", tmp_path, "train.max_iters=3") == exits.DONE


@pytest.mark.parametrize(
    ("step", "kinds"), [(20, ("eval", "sample")), (40, ("eval", "sample")), (40, ("sample",))]
)
def test_an_evaluation_that_a_run_did_not_come_to_is_made_up_for(
    forty, tmp_path, step, kinds, monkeypatch
):
    """The run was killed between the save and the evaluation, perhaps at its last step."""
    beats = []
    least_of = {}

    def heartbeat(self, doing, least=0):
        beats.append(doing)
        least_of.setdefault(doing, least)

    monkeypatch.setattr(Monitor, "heartbeat", heartbeat)
    if step == 40:  # no room for a checkpoint, and none to be written
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=2**17))
    out = tmp_path / "again"
    shutil.copytree(forty, out)
    for later in range(step + 10, 41, 10):
        shutil.rmtree(out / "checkpoints" / str(later))
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    made = [json.loads(line) for line in lines]
    lacking = [r for r in made if r["step"] == step and r["kind"] in kinds]
    assert len(lacking) == len(kinds)
    kept = [line for line, r in zip(lines, made, strict=True) if r not in lacking]
    (out / "metrics.jsonl").write_text("".join(kept))
    # The run may also have been asked for less than it has done.
    fewer = ("train.max_iters=30",) if kinds == ("sample",) else ()
    for _ in range(2):  # once is enough
        assert train_here("--out", out, *fewer) == exits.DONE
        for kind in ("eval", "sample"):
            assert records(out, kind) == records(forty, kind)
    assert losses(out) == losses(forty)
    assert "nothing to do: step 40 is saved" in (out / "train.log").read_text()
    # A start, and a batch of each split, are not taken for a hang.
    assert beats[:2] == ["the setup of the state", "the compilation of the step"]
    assert beats.count(f"the evaluation after step {step}") == (3 if "eval" in kinds else 0)
    names = {"eval": "evaluation", "sample": "sample"}
    for kind in kinds:  # these compile, which may take half an hour
        assert least_of[f"the {names[kind]} after step {step}"] == 1800
    if step < 40:
        assert json.loads((out / "startup.json").read_text())["phases"]["evaluation"]["max"] > 0


def test_a_run_that_is_stopped_leaves_its_evaluation_to_the_next_start(forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "stopped")
    assert train_here("--out", out, stop_at=30) == exits.STOPPED
    assert [r["step"] for r in records(out, "eval")] == [10, 20]
    assert train_here("--out", out) == exits.DONE
    assert records(out, "eval") == records(forty, "eval")


def test_a_save_that_never_finished_is_not_a_checkpoint(forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "again")
    (out / "checkpoints" / "27.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert train_here("--out", out, "train.max_iters=30") == exits.DONE
    assert "resumed from step 20" in (out / "train.log").read_text()
    assert not list((out / "checkpoints").glob("*tmp*"))


@pytest.mark.parametrize(
    "damage",
    [
        "meta",
        "state",
        *(pytest.param(d, marks=pytest.mark.long) for d in ("no meta", "array", "cut")),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_way_out(forty, tmp_path, damage):
    out = restarted_after_twenty(forty, tmp_path / "again")
    newest = out / "checkpoints" / "20"
    if damage == "meta":
        (newest / "meta" / "metadata").write_text('{"step"')
    elif damage == "no meta":
        (newest / "meta" / "metadata").unlink()
    elif damage == "cut":
        for file in (newest / "state" / "ocdbt.process_0" / "d").iterdir():
            os.truncate(file, 10)  # where in which of them the parameters are is not known
    elif damage == "state":
        shutil.rmtree(newest / "state")
    else:
        shutil.rmtree(newest / "state" / "d")
    with pytest.raises(UsageError, match=r"checkpoints/20.*to continue from an older"):
        train_here("--out", out, "checkpoint.on_damage=refuse")
    assert "resumed from step 20" not in (out / "train.log").read_text()
    if "meta" not in damage:
        with pytest.raises(UsageError, match=r"checkpoints/20: cannot be restored.*another step"):
            params_of(out)
    else:
        with pytest.raises(UsageError, match=r"checkpoints/20.*to continue from an older"):
            sample.write(sample.parser().parse_args(["--run", str(out)]))
    gc.collect()  # Orbax's event loop, whose end breaks what Python 3.11 parses meanwhile
    shutil.rmtree(newest)
    assert train_here("--out", out, "train.max_iters=11") == exits.DONE
    assert "resumed from step 10" in (out / "train.log").read_text()


def test_a_run_among_the_checkpoints_of_another_is_refused(forty):
    """That run might remove it, as it removes its own old checkpoints."""
    for out in (forty / "checkpoints", forty / "checkpoints" / "40", forty / "checkpoints" / "new"):
        with pytest.raises(UsageError, match=rf"out={out}: .* give {forty} to cont"):
            train_here(*SMALL, "--out", out)
    assert not (forty / "checkpoints" / "new").exists()


@pytest.mark.parametrize("spoilt", [None, "model: {n_layer: [", "cut short"])
def test_a_lost_configuration_is_that_of_the_newest_checkpoint(spoilt, forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "again")
    before = (out / "config.yaml").read_text()
    (out / "config.yaml").unlink()
    if spoilt:
        text = before.partition("optimizer:")[0] if spoilt == "cut short" else spoilt
        (out / "config.yaml").write_text(text)
    assert train_here("--out", out, "train.max_iters=21") == exits.DONE
    assert "config.yaml is missing or damaged, and will be" in (out / "train.log").read_text()
    found, before = yaml.safe_load((out / "config.yaml").read_text()), yaml.safe_load(before)
    assert found["model"] == before["model"] and found["optimizer"] == before["optimizer"]


def test_settings_that_are_not_the_checkpoints_are_said(forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "again")
    kept = yaml.safe_load((out / "config.yaml").read_text())
    then, default = kept["optimizer"].pop("warmup_iters"), OptimizerConfig().warmup_iters
    assert then != default
    (out / "config.yaml").write_text(yaml.safe_dump(kept))
    assert train_here("--out", out, "train.max_iters=21", "optimizer.grad_clip=2") == exits.DONE
    (line,) = re.findall("changed since step 20: (.*)", (out / "train.log").read_text())
    assert set(line.split(", ")) == {
        "train.max_iters=21 (was 40)",
        f"optimizer.warmup_iters={default} (was {then})",
        f"optimizer.grad_clip=2.0 (was {kept['optimizer']['grad_clip']})",
    }


@pytest.mark.long
def test_a_relative_path_to_data_holds_from_anywhere(tmp_path, monkeypatch, data_home):
    monkeypatch.chdir(data_home)
    arguments = (*SMALL, *MESH, "--out", tmp_path / "run")
    train_here(*arguments, "data.path=python", "train.max_iters=1")
    monkeypatch.chdir(tmp_path)
    assert train_here("--out", tmp_path / "run", "train.max_iters=2") == exits.DONE


def params_of(out):
    """The parameters after step 20."""
    from jaxgpt.checkpoint.checkpointer import restore_params
    from jaxgpt.config import load_config
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.jitted import make_steps

    config = load_config(*SMALL[1:]).replace(model__vocab_size=256)
    return restore_params(out, 20, make_steps(config, make_mesh(MeshShape(8))).state_shapes.params)


def test_reading_a_checkpoint_leaves_a_save_in_progress_alone(forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "again")
    saving = out / "checkpoints" / "27.orbax-checkpoint-tmp" / "state"
    saving.mkdir(parents=True)
    params_of(out)
    assert saving.is_dir()


def test_an_evaluation_is_compiled_within_the_time_of_its_announcement():
    config, done = load_config("tiny"), []
    dataset = open_dataset(config.data, config.model)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def eval_step(params, batch):
        done.append("compiled")
        return np.ones(len(batch))

    steps = types.SimpleNamespace(batch_sharding=sharding, replicated=sharding, eval_step=eval_step)
    evaluate = make_evaluator(dataset, config, steps, done.append)
    assert evaluate(7, None).val_loss == 1
    assert done[:2] == ["compiled", "the evaluation after step 7"]


def test_samples_are_those_of_the_metrics(forty, tmp_path):
    out = restarted_after_twenty(forty, tmp_path / "again")
    train_here("--out", out)
    assert (out / "samples.txt").read_text() == (forty / "samples.txt").read_text()


@pytest.mark.long
def test_room_for_more_tokens_than_the_tokenizer_has_is_allowed(tmp_path):
    model = ("model.vocab_size=1000", "model.n_layer=1", "model.n_embd=32")
    arguments = (*model, "train.max_iters=2", "train.sample_tokens=50")
    assert train_here(*SMALL, *MESH, "--out", tmp_path, *arguments) == exits.DONE


def test_a_stopped_run_is_saved_and_goes_on(forty, tmp_path):
    arguments = (*SMALL, *MESH, "--out", tmp_path, "train.max_iters=10")
    assert train_here(*arguments, stop_at=6) == exits.STOPPED
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["6"]
    assert train_here(*arguments) == exits.DONE
    assert losses(tmp_path) == {s: loss for s, loss in losses(forty).items() if s <= 10}


def test_a_finished_run_has_nothing_to_do(forty, capsys):
    before = losses(forty)
    assert train_here("--out", forty) == exits.DONE
    shown = capsys.readouterr().out
    assert "nothing to do: step 40 is saved, train.max_iters=40" in shown
    assert "no steps left of 40" in shown and "steps 41 to" not in shown
    assert losses(forty) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.n_layer=3"], r"model.n_layer=3: .*checkpoints/40 .*model.n_layer=1"),
        (["model.bias=True"], r"model.bias=True: .*model.bias=False"),
        (["checkpoint.resume=False"], "checkpoint.resume=False: .*40 exists"),
        (["data.dataset=other"], "data.dataset=other: there is no"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(forty, arguments, words, monkeypatch):
    def overwritten(*arguments):
        raise AssertionError("the tokenizer of the run that is there")

    monkeypatch.setattr(ByteTokenizer, "save", overwritten)
    with pytest.raises(UsageError, match=words):
        train_here("--out", forty, *arguments)


def test_other_data_under_a_checkpoint_is_refused(forty, data_home):
    from jaxgpt.data.prepare.own_text import prepare_text

    text = data_home / "other.txt"
    text.write_bytes(bytes(range(1, 128)) * 100)
    prepare_text(data_home / "bytes", [text], "byte")
    with pytest.raises(UsageError, match="has different tokens from the training data of"):
        train_here("--out", forty, "data.dataset=bytes")


def test_another_tokenizer_under_a_checkpoint_is_refused(forty, data_home, tmp_path):
    shutil.copytree(data_home / "python", tmp_path / "data")
    meta = tmp_path / "data" / "meta.json"
    char = {"type": "char", "characters": "".join(map(chr, range(256)))}
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "tokenizer": char}))
    with pytest.raises(UsageError, match="data.path=.*: the tokenizer is not the one that .*s/40"):
        train_here("--out", forty, f"data.path={tmp_path / 'data'}")


def test_tensorboard_repeats_metrics(forty):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(forty / "tensorboard"))
    events.Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert shown == pytest.approx(losses(forty))
    assert "eval/val_loss" in events.Tags()["scalars"]


def test_startup_is_broken_down(forty):
    found = json.loads((forty / "startup.json").read_text())
    assert {"state", "compile", "first step"} <= set(found["phases"])
    assert found["total"]["max"] >= found["phases"]["compile"]["max"] > 0
