"""`import jaxgpt` takes the steps, computes the logits and writes the files of the commands."""

import copy
import functools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxgpt
from evaluation import BLOCK, TEXT, devices_of, evaluated, reference_logits, train
from jaxgpt import inspect
from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.checkpoint.local import local_folder
from jaxgpt.checkpoint.metadata import list_checkpoints, read_meta
from jaxgpt.convert.__main__ import main as convert
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.parallel.mesh import job_mesh
from jaxgpt.train.jitted import make_steps
from jobs import SMALL, environment, limited_devices, losses, records, train_here

ROOT = Path(__file__).parents[1]
SETTINGS = (*SMALL[2:], "model.block_size=32", "train.max_iters=6")
SKIP = ("--train-range-to-skip", "2", "3")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps on bytes."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "a.txt").write_text(TEXT)
    prepare_text(folder / "data", [folder / "a.txt"], "byte")
    return train(folder / "run", f"data.path={folder}/data")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A run of six steps on two devices, of which two are skipped."""
    out = tmp_path_factory.mktemp("command") / "run"
    words = (*SMALL[:2], *SETTINGS, *SKIP, "--mesh", "1,2,1", "--out", out)
    assert train_here(*words) == 0
    return out


def trainer_on(mesh, *settings):
    with devices_of(mesh):
        return jaxgpt.Trainer(jaxgpt.load_config(SMALL[1], *SETTINGS, "--mesh", mesh, *settings))


def steps_of(found):
    return {record["step"]: record["loss"] for record in found}


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("mesh", ["1,1,1", "2,1,2"])
def test_logits_are_those_that_evaluate_scores(run, mesh):
    record = evaluated("--run", run, mesh=mesh)
    tokens = np.fromfile(run.parent / "data" / "val.bin", np.uint16)
    with devices_of(mesh):
        model = jaxgpt.load_model(str(run), mesh=mesh)
    nats = []
    for first in range(0, len(tokens) - 1, BLOCK):
        row = tokens[first : first + BLOCK + 1].astype(np.int64)
        nats += (-log_softmax(model.logits(row[:-1]))[np.arange(len(row) - 1), row[1:]]).tolist()
    assert len(nats) == record["tokens"]
    assert np.mean(nats) == pytest.approx(record["loss"], rel=1e-7)


def test_logits_of_one_text_and_of_several_are_those_of_the_plain_network(run):
    with devices_of("2,1,2"):
        model = jaxgpt.load_model(run, mesh="2,1,2")
    expected = reference_logits(run, model.config)
    texts = [model.tokenizer.encode(TEXT[start:])[:11] for start in (0, 7, 90)]
    several = model.logits(texts)
    assert several.shape == (3, 11, 256) and several.dtype == np.float32
    for text, logits in zip(texts, several, strict=True):
        np.testing.assert_allclose(log_softmax(logits), expected(text), atol=5e-5)
        np.testing.assert_allclose(model.logits(text), logits, atol=1e-5)


def test_scores_of_texts_are_the_losses_of_their_logits(run):
    with devices_of("1,1,1"):
        model = jaxgpt.load_model(run, mesh="1,1,1", batch_size=2)
    texts = [model.tokenizer.encode(TEXT[start:])[:n] for start, n in ((0, 11), (7, 5), (90, 2))]
    scores = list(model.score(texts))
    assert len(scores) == 3
    for text, (nats,) in zip(texts, scores, strict=True):
        expected = -log_softmax(model.logits(text[:-1]))[np.arange(len(text) - 1), text[1:]]
        assert nats.shape == expected.shape
        np.testing.assert_allclose(nats, expected, atol=1e-5)


def test_rows_of_a_batch_can_be_scored_with_their_last_target():
    trainer = trainer_on("1,1,1")
    (batch,) = jaxgpt.batches(trainer.config, [1])
    with devices_of("1,1,1"):
        scores = np.stack([losses for (losses,) in trainer.model.score(batch.tokens)])
        (record,) = trainer.train(1)
    assert scores.shape == batch.weights.shape
    assert np.average(scores, weights=batch.weights) == pytest.approx(record["loss"], rel=1e-6)


def test_a_trainer_remembers_the_steps_of_an_interrupted_call():
    trainer = trainer_on("1,1,1", *SKIP)

    def interrupt(record):
        if record["step"] == 4:
            raise KeyboardInterrupt

    with devices_of("1,1,1"):
        with pytest.raises(KeyboardInterrupt):
            trainer.train(report=interrupt)
        rest = trainer.train()
        again = trainer_on("1,1,1", *SKIP).train()
    assert [record["step"] for record in rest] == [5, 6]
    assert trainer.history == again


def test_a_step_that_is_not_finite_causes_a_warning(tmp_path):
    trainer = trainer_on("1,1,1", "faults.nan_step=2")
    warned = pytest.warns(UserWarning, match="non-finite loss or gradient: 1, up to step 2")
    with devices_of("1,1,1"), warned:
        trainer.train(3)


def test_two_trainers_do_not_mix_their_checkpoints(tmp_path):
    one, other = trainer_on("1,1,1"), trainer_on("1,1,1", "train.seed=5")
    with devices_of("1,1,1"):
        one.save(tmp_path)
        other.restore(tmp_path)
        other.train(1)
        other.save(tmp_path)
        one.train(2)
        with pytest.raises(jaxgpt.UsageError, match="has a newer checkpoint, of step 1"):
            one.save(tmp_path)
        other.train(1)
        other.save(tmp_path)
    assert list_checkpoints(tmp_path)[-1] == 2


def test_a_trainer_and_a_model_describe_themselves(run):
    trainer = trainer_on("1,2,1")
    layers, width, mlp = 1, 64, 4 * 64  # SMALL, without biases
    n = layers * (4 * width * width + 2 * width * mlp + 2 * width) + width + 256 * width
    of_size = f"{n / 1e6:.2f}M parameters, data=1 fsdp=2 tensor=1"
    assert repr(trainer) == f"<jaxgpt.Trainer: shakespeare_char_cpu, {of_size}, at step 0 of 6>"
    with devices_of("1,2,1"):
        model = trainer.model
        assert len(repr(trainer.state)) < 200 and f"params ({n + 32 * width:,})" in repr(
            trainer.state
        )
    assert repr(model) == f"<jaxgpt model: n_layer=1 n_embd=64, {of_size}, at step 0>"
    assert model.step == 0 and isinstance(model, jaxgpt.Model)


def test_a_value_may_be_a_string_as_in_the_command():
    config = jaxgpt.load_config("tiny").replace(train__batch_size="3")
    assert next(jaxgpt.batches(config, [1])).tokens.shape == (3, config.model.block_size + 1)


def test_greedy_text_follows_the_largest_logits(run):
    with devices_of("1,1,1"):
        model = jaxgpt.load_model(run, mesh="1,1,1")
    text = model.tokenizer.encode("The na").tolist()
    for _ in range(6):
        text.append(int(model.logits(text)[-1].argmax()))
    assert model.generate("The na", 6, temperature=0) == model.tokenizer.decode(text)


def test_a_hugging_face_folder_needs_no_prefix(run, tmp_path):
    pytest.importorskip("safetensors")
    convert(["to-hf", "--run", str(run), "--out", str(tmp_path / "hf")])
    with devices_of("1,1,1"):
        folders = (run, tmp_path / "hf", f"hf:{tmp_path}/hf")
        ours, theirs, named = (jaxgpt.load_model(f, mesh="1,1,1").logits([1, 2]) for f in folders)
    assert (theirs == ours).all() and (named == ours).all()


def test_a_trainer_takes_the_steps_of_the_command(command):
    trainer = trainer_on("1,2,1", *SKIP)
    with devices_of("1,2,1"):
        model, seen = trainer.model, []
    found = trainer.train(2, report=seen.append) + trainer.train()
    assert seen == found[:2]
    assert trainer.step == trainer.config.train.max_iters == 6 and trainer.train() == []
    assert model is trainer.model and model.trained.step == 6  # training updates a kept model
    np.testing.assert_array_equal(model.logits([1, 2]), trainer.model.logits([1, 2]))
    for record, expected in zip(found, records(command), strict=True):
        assert record == {name: expected[name] for name in record}
    assert [*found[0]] == ["step", "loss", "grad_norm", "lr"]  # `report=print` shows the step first
    assert found[1]["loss"] is None and found[1]["lr"] > 0
    (last,) = records(command, "eval")
    evaluation = trainer.evaluate()
    assert (evaluation.train_loss, evaluation.val_loss) == (last["train_loss"], last["val_loss"])


def test_trainer_and_command_continue_each_others_runs(command, tmp_path):
    expected = losses(command)
    first = trainer_on("1,2,1", *SKIP)
    first.train(4)
    first.save(str(tmp_path / "run"))
    assert train_here("--out", tmp_path / "run", "--mesh", "1,2,1") == 0
    assert losses(tmp_path / "run") == {step: expected[step] for step in (5, 6)}

    second = trainer_on("1,2,1", "train.max_iters=8")
    second.restore(tmp_path / "run")
    more = steps_of(second.train(2))
    assert train_here("--out", command, "--mesh", "1,2,1", "train.max_iters=8") == 0
    assert more == {step: losses(command)[step] for step in (7, 8)}
    second.save(tmp_path / "run")
    # Steps that have been skipped once stay skipped, but not in another run.
    assert second.config.train_range_to_skip == (2, 3)
    trainer_on("1,2,1").save(tmp_path / "other")
    second.restore(tmp_path / "other")
    assert second.config.train_range_to_skip == ()


def test_a_trainer_restores_an_earlier_checkpoint_on_another_mesh(tmp_path):
    trainer = trainer_on("1,2,1")
    trainer.save(tmp_path / "run")
    expected = steps_of(trainer.train(2))
    trainer.save(tmp_path / "run")
    other = trainer_on("1,1,2")
    other.restore(tmp_path / "run", step=0)
    assert steps_of(other.train(2)) == pytest.approx(expected, rel=1e-5)
    with devices_of("1,1,2"):
        later = other.model.logits([5, 6, 7])
    other.restore(tmp_path / "run")
    with devices_of("1,1,2"):
        np.testing.assert_allclose(other.model.logits([5, 6, 7]), later, atol=1e-4)


def test_steps_that_a_trainer_repeats_are_no_longer_in_the_run(tmp_path):
    """The run was killed after step 3, before its newest local checkpoint was copied."""
    trainer = trainer_on("1,1,1", f"checkpoint.local={tmp_path / 'nvme'}")
    trainer.save(tmp_path / "run")
    lines = [{"kind": "train", "step": step, "loss": 4.0} for step in (1, 2, 3)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    local = local_folder(trainer.config, tmp_path / "run")
    shutil.copytree(tmp_path / "run/checkpoints/0", local.directory / "checkpoints" / "3")
    trainer.restore(tmp_path / "run")
    trainer.train(1)
    trainer.save(tmp_path / "run")
    assert list_checkpoints(local.directory) == [] and metrics.read_text() == ""
    assert list_checkpoints(tmp_path / "run") == [0, 1]


def test_a_trainer_starts_from_the_weights_of_another_run_and_saves_their_origin(run, tmp_path):
    model = ("model.n_layer=1", "model.n_embd=32", f"model.block_size={BLOCK}")
    words = (*model, f"train.init_from={run}", f"data.path={run.parent}/data", "--mesh", "1,1,1")
    with devices_of("1,1,1"):
        trainer = jaxgpt.Trainer(jaxgpt.load_config("tiny", *words))
        found = trainer.model.logits([1, 2, 3])
        assert (found == jaxgpt.load_model(run, mesh="1,1,1").logits([1, 2, 3])).all()
        trainer.save(tmp_path / "run")
    assert read_meta(tmp_path / "run", 0)["init_from"] == [str(run), list_checkpoints(run)[-1]]


def test_a_trainer_keeps_the_tokenizer_of_the_weights_and_the_files_of_their_model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint16).tofile(tmp_path / "a.bin")
    data = (f"data.path={tmp_path}/a.bin", "data.val_share=0.1", "model.vocab_size=256")
    own = f"data.tokenizer={tmp_path}/tokenizer.json"
    weights, kept, other = (tmp_path / name for name in ("weights", "kept", "other"))
    trainer_on("1,1,1", *data, own).save(weights)
    expected = read_meta(weights, 0)["tokenizer"]
    names = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    for name in names:
        (weights / name).write_text(f'{{"{name}": 1}}')

    def check(run, tokenizer):
        assert read_meta(run, 0)["tokenizer"] == expected
        assert jaxgpt.load_config(run / "config.yaml").data.tokenizer == tokenizer
        for name in (*names, "tokenizer.json"):
            assert (run / name).read_bytes() == (weights / name).read_bytes()

    for settings, out, tokenizer in (((), kept, str(kept)), ((own,), other, own.partition("=")[2])):
        trainer = trainer_on("1,1,1", *data, *settings, f"train.init_from={weights}")
        trainer.save(out)
        check(out, tokenizer)
        with devices_of("1,1,1"):
            assert trainer.model.tokenizer.decode([0]) == made.decode([0])
    later = trainer_on("1,1,1", *data)
    with devices_of("1,1,1"):
        model = later.model
    with pytest.raises(jaxgpt.UsageError, match="the data: has no tokenizer"):
        _ = model.tokenizer
    later.restore(kept)
    assert model.tokenizer.to_meta() == expected
    later.save(tmp_path / "copy")
    check(tmp_path / "copy", f"{tmp_path}/copy")


@pytest.mark.parametrize("starts_from_weights", [False, True])
def test_batches_are_those_that_inspect_shows(starts_from_weights, run, capsys):
    settings = ["train.batch_size=3"]
    if starts_from_weights:  # their model.block_size determines the length of the rows
        settings += [f"train.init_from={run}", f"data.path={run.parent}/data"]
    config = jaxgpt.load_config("tiny", *settings)
    assert config.model.block_size == (BLOCK if starts_from_weights else 128)
    for batch in jaxgpt.batches(config, [4, 1]):
        inspect.main(["--config", "tiny", "--step", str(batch.step), "--json", *settings])
        shown = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
        assert batch.tokens.tolist() == shown
        assert batch.weights.shape == batch.tokens[:, 1:].shape and batch.weights.all()


def test_small_numpy_integers_count_steps():
    """Arithmetic with uint8 would wrap around at 256."""
    config = jaxgpt.load_config(SMALL[1], *SETTINGS)
    (expected,), (found,) = (jaxgpt.batches(config, [kind(200)]) for kind in (int, np.uint8))
    assert (found.tokens == expected.tokens).all()
    trainer = trainer_on("1,1,1", "--train-range-to-skip", "1", "400")
    assert sum(len(trainer.train(np.uint8(200))) for _ in range(2)) == trainer.step == 400


def refusals(home):
    """Pairs of (what a user does wrong, the sentence that says so)."""
    load, model, config = jaxgpt.load_config, jaxgpt.load_model, jaxgpt.load_config("tiny")
    trainer = trainer_on("1,1,1")
    trainer.save(home / "taken")
    with devices_of("1,1,1"):
        loaded = model(home / "taken", mesh="1,1,1")
    yield lambda: load("tiny", "train.max_iter=2"), "train.max_iter: unknown key"
    yield lambda: load("tiny", "optimizer.name=shampoo"), "optimizer.name=shampoo: "
    yield lambda: load("tiny", ["model.n_layer=1"]), "settings: must be strings"
    yield lambda: load("tiny", "--help"), "settings: run `python -m jaxgpt.train --help`"
    yield lambda: load("tiny", "--mesh 1,2,1"), "is two arguments; write '--mesh', '1,2,1'"
    for name in (None, 3, "", config):
        yield lambda name=name: load(name), "must be the name of a preset, such as 'tiny', or"
    yield lambda: load(home), f"config={home}: is a folder; give a YAML file"
    yield lambda: config.replace(n_layer=3), "n_layer: unknown key; did you mean model__n_layer?"
    yield lambda: config.replace(nothing=None), "nothing: unknown key; write section__key=value"
    yield lambda: config.replace(**{"parallel.mesh": "1,1,1"}), "parallel.mesh: unknown key"
    yield lambda: config.replace(train__batch=3), "train__batch: unknown key"
    yield lambda: config.replace(train=3), "train=3: must be a TrainConfig; to change one setting"
    for value in (-3, 2.5, True, None, [1, 2]):
        replace = functools.partial(config.replace, train__max_iters=value)
        yield replace, ": must be a whole number, at least 1 and less than 2^31"
    yield lambda: jaxgpt.Config(train={"max_iters": 3}), "train={'max_iters': 3}: must be a TrainC"
    yield lambda: jaxgpt.Trainer("tiny"), "config: must be a configuration"
    yield lambda: jaxgpt.Trainer(config, cluster=3), "cluster=3: must be None or the result of"
    yield lambda: model(home, cluster=3), "cluster=3: must be None or the result of"
    fault = ("faults.nan_step=1", "faults.nan_device=1")
    yield lambda: trainer_on("1,1,1", *fault), "faults.nan_device=1: the mesh has 1 devices"
    yield lambda: trainer.train(2.5), "n_steps=2.5: must be a whole number"
    yield lambda: trainer.train(-3), "n_steps=-3: must be a whole number"
    yield lambda: list(jaxgpt.batches(config, 3)), "steps=3: must be a list of steps"
    yield lambda: list(jaxgpt.batches(config, [0])), "steps: 0 is not a step"
    yield lambda: make_steps(config, job_mesh(config)), "model.vocab_size=None: the vocabulary"
    yield lambda: model(home / "nope"), f"{home}/nope: "
    yield lambda: model(home / "taken", dtype="fp8"), "dtype=fp8: must be float32 or bfloat16"
    yield lambda: model(home / "taken", step=3), "step 3: "
    yield (
        lambda: model("gpt2"),
        "gpt2: no such folder; give a run directory or the folder of a",
    )
    yield lambda: loaded.generate(5), "prompt=5: must be a string"
    yield lambda: loaded.score([[1, 2], [256]]), "tokens: 256 is not in the vocabulary"
    yield lambda: list(loaded.score([1, 2])), "tokens: an array of shape ()"
    yield lambda: list(loaded.score([[[1, 2]]])), "give IDs of shape (T,), such as"
    yield lambda: loaded.score(3), "rows=3: must be a list of sequences of token IDs"
    for tokens in (3, None, {1, 2}, [[1, 2]]):
        generate = functools.partial(loaded.generate_tokens, tokens, 1)
        yield generate, "does not contain token IDs; give IDs of shape (T,), such as"
    yield lambda: loaded.logits([1.5]), "tokens: an array of shape (1,) and dtype float64"
    yield lambda: loaded.logits([[]]), "tokens: an array of shape (1, 0)"
    yield lambda: loaded.logits([[1, 2], [3]]), "tokens: all sequences in a batch must have"
    yield lambda: loaded.logits([256]), "tokens: 256 is not in the vocabulary of 256"
    yield lambda: loaded.logits([1] * 33), "tokens: a sequence of 33 tokens is too long for"
    yield lambda: loaded.generate(temperature=-1), "temperature=-1: must be 0, or"
    for name, value in (
        ("temperature", "1"),
        ("temperature", None),
        ("top_p", "1"),
        ("min_p", [1]),
    ):
        generate = functools.partial(loaded.generate, **{name: value})
        yield generate, f"{name}={value!r}: must be a number"
    yield lambda: loaded.generate(top_k=2.5), "top_k=2.5: must be a whole number, at least 1"
    for stop in (3, [3], "a", [""], None):
        yield lambda stop=stop: loaded.generate(stop=stop), f"stop={stop!r}: must be a list of non-"
    yield lambda: loaded.generate(n_tokens=0), "n_tokens=0: must be a whole number"
    yield lambda: loaded.generate(n_tokens=2.5), "n_tokens=2.5: must be a whole number"
    yield lambda: loaded.generate(n_tokens=2**40), "n_tokens=1099511627776: must be a whole number"
    sampling = jaxgpt.config.Sampling()
    for prompts in ([], "a", 3):
        stream = functools.partial(loaded.stream, prompts, 1, sampling, [0])
        yield stream, f"prompts={prompts!r}: must be a list with at least one element"
    for seeds in ([0], [0, 1, 2]):
        stream = functools.partial(loaded.stream, ["a", "b"], 1, sampling, seeds)
        yield stream, f"seeds={seeds}: must have one seed for each of 2 prompts"
    for seed in (-1, 1.5, 2**31, True, "1"):
        yield lambda seed=seed: loaded.generate(seed=seed), f"seed={seed!r}: must be a whole number"
    for size in (0, -1, True):
        load = functools.partial(jaxgpt.load_model, home, batch_size=size)
        yield load, f"batch_size={size}: must be a whole number"
    yield lambda: trainer.train(1, report=3), "report=3: must be a function"
    for step in ("3", 3.0, True):
        for f in (trainer.restore, jaxgpt.load_model):
            yield (
                lambda f=f, step=step: f(home, step=step),
                f"step={step!r}: must be a whole number",
            )
    for path in (3, None, ""):
        use = f"run={path!r}: must be the path of a run directory"
        yield from ((lambda f=f, path=path: f(path), use) for f in (trainer.save, trainer.restore))
        yield lambda path=path: model(path), f"run={path!r}: must be the path of a run directory"
    for again in (lambda _: trainer.train(1), lambda _: trainer.restore(home / "taken")):
        use = functools.partial(trainer.train, 1, report=again)
        yield use, "this trainer is busy; call train and restore after the current call ends"
    trainer = trainer_on("1,1,1")
    trainer.restore(home / "taken")
    yield lambda: trainer.save(home / "taken"), "already has a checkpoint of step 0"
    yield lambda: trainer_on("1,1,1").save(home / "taken"), "taken: holds another run"
    yield lambda: trainer.restore(home / "nope"), f"{home}/nope: "
    yield (
        lambda: trainer_on("1,1,1", "model.n_embd=32").restore(home / "taken"),
        "model.n_embd=32: ",
    )


def test_a_mistake_is_one_sentence(tmp_path):
    for mistake, sentence in refusals(tmp_path):
        with pytest.raises(jaxgpt.UsageError) as error:
            mistake()
        said, *corrected = str(error.value).split("\n")
        assert sentence in said and corrected[:1] in ([], ["corrected settings:"])


def test_a_notebook_shows_the_users_own_line_and_the_message():
    with pytest.raises(jaxgpt.UsageError) as error:
        jaxgpt.load_config("tiny", "train.max_iters=x")
    lines = error.value._render_traceback_()
    assert f'File "{__file__}"' in lines[0] and "jaxgpt.load_config(" in lines[1]
    assert lines[2].startswith("UsageError: train.max_iters=x: must be") and len(lines) > 2
    assert not any(f"jaxgpt{os.sep}config" in line for line in lines)


def test_weights_of_a_smaller_vocabulary_than_the_datas_get_one_remedy(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    prepare_text(tmp_path / "data", [tmp_path / "a.txt"], "char")
    trainer_on("1,1,1", f"data.path={tmp_path}/data").save(tmp_path / "run")
    words = ("tiny", f"train.init_from={tmp_path}/run", "--mesh", "1,1,1")
    with pytest.raises(jaxgpt.UsageError, match="prepare the data with the tokenizer that"):
        jaxgpt.Trainer(jaxgpt.load_config(*words))  # the preset's data are bytes


def test_errors_of_a_trainer_do_not_mention_options(tmp_path):
    trainer = trainer_on("1,1,1")
    trainer.save(tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "odd" / "metrics.jsonl").mkdir(parents=True)
    wider = trainer_on("1,1,1", "model.n_embd=32")
    never = trainer_on("1,1,1", "checkpoint.resume=False")
    for mistake, words in (
        (lambda: trainer.save(tmp_path / "file"), "give another run directory"),
        (lambda: trainer_on("1,1,1").save(tmp_path / "odd"), "holds another run"),
        (lambda: trainer.save(tmp_path / "run" / "checkpoints" / "x"), "or another folder"),
        (lambda: wider.restore(tmp_path / "run"), "or another run directory"),
        (lambda: never.restore(tmp_path / "run"), "give another run directory"),
        (lambda: trainer.restore(tmp_path / "nope"), "give a run directory"),
        (lambda: jaxgpt.load_model(tmp_path / "nope"), "give a run directory or the folder of a"),
    ):
        with pytest.raises(jaxgpt.UsageError, match=words) as error:
            mistake()
        assert "--" not in str(error.value)


def test_a_configuration_shows_what_differs_from_the_defaults():
    assert repr(jaxgpt.load_config("tiny")) == "Config()"
    config = jaxgpt.load_config("tiny", "--mesh", "1,2,1").replace(train__trackers=("csv", "wandb"))
    shown = "Config().replace(train__trackers=('csv', 'wandb'), parallel__mesh='1,2,1')"
    assert repr(config) == shown
    for each in (config, jaxgpt.load_config("gpt2")):
        assert eval(repr(each), {"Config": jaxgpt.Config}) == each
        assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each


def test_states_and_parameters_of_a_trainer_may_be_kept():
    trainer = trainer_on("1,2,1")
    with devices_of("1,2,1"):
        kept = trainer.state.params, trainer.model.params
        before = copy.deepcopy(kept[0])
        trainer.train(2)
        for params in kept:
            jax.tree.map(np.testing.assert_array_equal, copy.deepcopy(params), before)
        assert not np.array_equal(
            *(jax.tree.leaves(params)[0] for params in (before, trainer.state.params))
        )


def test_a_model_has_the_mesh_of_its_trainer():
    settings = (*SETTINGS, "--mesh", "data=1,stage=-1", "train.gradient_accumulation_steps=2")
    with limited_devices(2):
        trainer = jaxgpt.Trainer(jaxgpt.load_config(SMALL[1], *settings, "model.n_layer=2"))
        assert trainer.model.logits([1, 2, 3]).shape[0] == 3


def test_a_model_may_be_used_while_another_thread_trains():
    trainer, found = trainer_on("1,2,1"), []
    expected = steps_of(trainer_on("1,2,1").train(30))
    with devices_of("1,2,1"):
        model = trainer.model
        model.logits([1]), trainer.evaluate()  # compile them
        thread = threading.Thread(target=lambda: found.extend(trainer.train(30)))
        thread.start()
        while thread.is_alive():
            assert np.isfinite(model.logits([1])).all()
            assert np.isfinite(trainer.evaluate().val_loss)
            assert np.isfinite(jax.tree.leaves(trainer.state.params)[0]).all()
        thread.join()
    assert steps_of(found) == expected


def python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(ROOT), **variables),
    )


def test_import_is_light_and_data_needs_no_jax():
    job = python(
        "import sys, jaxgpt; assert not {'jax', 'numpy', 'yaml'} & sys.modules.keys()\n"
        "assert set(jaxgpt.__all__) <= set(dir(jaxgpt))\n"
        "config = jaxgpt.load_config('tiny')\n"
        "next(jaxgpt.batches(config, [1]))\n"
        "assert 'jax' not in sys.modules\n"
        "for name in jaxgpt.__all__: getattr(jaxgpt, name)\n"
        "jaxgpt.nothing\n"
    )
    assert job.stderr.endswith("module 'jaxgpt' has no attribute 'nothing'\n"), job.stderr


def test_devices_that_jax_did_not_start_are_refused():
    job = python(
        "import jax, jaxgpt; jax.devices()\n"
        "jaxgpt.Trainer(jaxgpt.load_config('tiny', '--mesh', '1,2,1'))\n",
        JAX_PLATFORMS="cpu",
    )
    last = job.stderr.splitlines()[-1]
    assert "needs 2 devices, but JAX has already started with 1; restart Python" in last


@pytest.mark.long
def test_a_type_checker_knows_the_library(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(
        "import jaxgpt\n"
        "trainer = jaxgpt.Trainer(jaxgpt.load_config('tiny', 'train.max_iters=20'))\n"
        "losses = [record['loss'] for record in trainer.train(20)]\n"
        "loss: float = trainer.evaluate().val_loss\n"
        "shape = jaxgpt.load_model('runs/a').logits([1, 2, 3]).shape\n"
        "tokens = [batch.tokens.sum() for batch in jaxgpt.batches(trainer.config, range(1, 3))]\n"
        "text: bytes = trainer.model.generate('def ')\n"  # line 7: it is a str
        "jaxgpt.load_config(3)\n"  # line 8: a name or a path
        "jaxgpt.nothing\n"  # line 9: no such name
    )
    (example,) = re.findall(
        "^```python\n(.*?)^```$", (ROOT / "jaxgpt/README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "readme.py").write_text(example)
    checked = ("__init__.py", "library.py", "config/schema.py", "evaluate/model.py")
    checked += ("evaluate/trained.py", "tracking/records.py")
    files = [str(ROOT / "jaxgpt" / name) for name in checked]
    options = ("--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", tmp_path / "c")
    job = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, options), "user.py", "readme.py", *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    found = re.findall(r"^(\S+?):(\d+): error", job.stdout, re.MULTILINE)
    assert found == [("user.py", "7"), ("user.py", "8"), ("user.py", "9")], job.stdout


def test_ctrl_c_while_restoring_does_not_blame_the_checkpoint(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def interrupted(*_, **__):  # as in orbax.checkpoint's `_read_array_index_and_device_put`
        raise Exception("Encountered error while reading array index") from KeyboardInterrupt()

    trainer = trainer_on("1,1,1")
    trainer.save(tmp_path / "run")
    (record,) = trainer.train(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ocp.PyTreeCheckpointHandler, "restore", interrupted)
        trainer.restore(tmp_path / "run")
    assert trainer.step == 1
    trainer.restore(tmp_path / "run")
    assert trainer.train(1) == [record]


def test_ctrl_c_while_saving_does_not_lock_the_trainer_out(tmp_path, monkeypatch):
    close = Checkpoints.close

    def interrupted(checkpoints):
        close(checkpoints)
        raise KeyboardInterrupt

    trainer = trainer_on("1,1,1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "close", interrupted)
        trainer.save(tmp_path / "run")
    trainer.train(1)
    trainer.save(tmp_path / "run")
    assert list_checkpoints(tmp_path / "run") == [0, 1]


def test_an_interrupted_step_is_one_sentence():
    trainer = trainer_on("1,2,1")
    with devices_of("1,2,1"):
        model, step = trainer.model, trainer._train_step

    def interrupted(*arguments):
        step(*arguments)
        raise KeyboardInterrupt

    trainer.__dict__["_train_step"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train(1)
    for use in (lambda: trainer.train(1), lambda: model.logits([1])):
        with pytest.raises(jaxgpt.UsageError, match="these parameters no longer exist"):
            use()


def test_ctrl_c_during_a_step_loses_nothing():
    trainer = trainer_on("1,2,1")
    with devices_of("1,2,1"):
        model, step = trainer.model, trainer._train_step

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments)

    trainer.__dict__["_train_step"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train(5)
    assert trainer.step == model.trained.step == 1
    trainer.__dict__["_train_step"] = step
    (found,) = trainer.train(1)
    assert found["step"] == 2 and np.isfinite(model.logits([1])).all()
