"""Bad input to the evaluation is a one-line error before JAX starts."""

import json
import shutil

import numpy as np
import pytest

from evaluation import BLOCK, SHAPE, TEXT
from jaxgpt.checkpoint.metadata import add_checksum
from jaxgpt.config import load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.evaluate import __main__ as command


def save(run, *settings, **more):
    """Write a checkpoint's metadata without its arrays, which are not read."""
    config = load_config(*SHAPE[1:], *settings)
    dataset = open_dataset(config.data, config.model)
    config = config.replace(model__vocab_size=dataset.vocab_size)
    meta = {"step": 3, "config": config.to_dict(), "tokenizer": dataset.tokenizer_meta}
    meta |= {"data_fingerprint": [], "checksums": {}, "jax": "0.10"}
    meta |= {"mesh": "data=1", "processes": 1, "batch_sizes": [(1, 2)]} | more
    folder = run / "checkpoints" / "3" / "meta"
    folder.mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps(add_checksum(meta)))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run on bytes, a run on tokens without a tokenizer, and other data."""
    home = tmp_path_factory.mktemp("home")
    (home / "a.txt").write_text(TEXT)
    for kind in ("byte", "char"):
        prepare_text(home / kind, [home / "a.txt"], kind)
    save(home / "run", f"data.path={home}/byte")
    for name, largest in (("bare", 49), ("large", 300)):
        (home / name).mkdir()
        for split in ("train", "val"):
            (np.arange(500) % (largest + 1)).astype(np.uint16).tofile(home / name / f"{split}.bin")
    save(home / "bare_run", f"data.path={home}/bare", "model.vocab_size=50")
    save(home / "split_run", f"data.path={home}/byte", "parallel.sequence_parallel=True")
    save(home / "weights", f"data.path={home}/byte", weights_only=True)
    shutil.copytree(home / "byte", home / "spoiled")
    tokens = np.fromfile(home / "byte" / "val.bin", np.uint16)
    tokens[-1] = 256  # the last token, which only a check of the full split finds
    tokens.tofile(home / "spoiled" / "val.bin")
    (home / "new_run").mkdir()
    return home


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(*_):
        raise AssertionError("JAX was to be started")

    monkeypatch.setattr(command, "Model", start)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as end:
        command.main([str(word) for word in words])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "are required: --run"),
        (("--run", "{home}/new_run"), "new_run: has no checkpoints yet; give a run directory"),
        (
            ("--run", "{home}/run", "--step", 99),
            "step 99: {home}/run has no such checkpoint; choose from 3",
        ),
        (
            ("--run", "{home}/run", "--step", 0),
            "step 0: {home}/run has no such checkpoint; choose from 3",
        ),
        (("--run", "{home}/weights"), "--dataset: is required, because imported weights have no"),
        (
            ("--run", "{home}/run", "--block-size", BLOCK + 1),
            f"--block-size={BLOCK + 1}: must be at most model.block_size={BLOCK}",
        ),
        (
            ("--run", "{home}/run", "--block-size", 8, "--stride", 9),
            "--stride=9: must be at most 8, the length of a row",
        ),
        (
            ("--run", "{home}/run", "--split", "test"),
            "has no split test, but only train, val; give",
        ),
        (
            ("--run", "{home}/run", "--input", "{home}/a.txt", "--dataset", "byte"),
            "--input: cannot be combined with data.dataset=byte; leave one of them out",
        ),
        (
            ("--run", "{home}/run", "--input", "{home}/a.txt", "data.path={home}/byte"),
            "--input: cannot be combined with data.path={home}/byte; leave one of them out",
        ),
        (
            ("--run", "{home}/run", "--input", "{home}/a.txt", "--split", "val"),
            "--split val: cannot be used with --input, which has no splits; remove one",
        ),
        (
            ("--run", "{home}/bare_run", "--input", "{home}/a.txt"),
            "--input: the tokenizer of {home}/bare_run is unknown; set data.tokenizer=FOLDER",
        ),
        (("--run", "{home}/run", "--input", "{home}/no.txt"), "no.txt: cannot be read (no such"),
        (("--run", "{home}/run", "--mesh", "1,1,3"), "parallel.mesh=1,1,3: tensor=3 does not"),
        (
            ("--run", "{home}/split_run", "--mesh", "1,1,4", "--block-size", 6),
            "sequence_parallel=True: tensor=4 (parallel.mesh=1,1,4) must divide model.block_size=6",
        ),
        (("--run", "{home}/run", "--stride", BLOCK + 1), f"--stride={BLOCK + 1}: must be at most"),
        (("--run", "{home}/run", "--stride", 0), "--stride: 0: must be a whole number"),
        (("--run", "{home}/run", "--dtype", "fp8"), "--dtype: invalid choice: 'fp8'"),
        (("--run", "{home}/run", "--batch", "x"), "--batch: x: must be a whole number"),
        (("--run", "{home}/run", "--dataset", "nope"), "data.dataset=nope: there is no token data"),
        (("--run", "{home}/run", "--dataset", "pyton"), "; did you mean data.dataset=python?"),
        (("--run", "{home}/run/checkpoints/3"), "; give {home}/run, and 3 as the step"),
        (("{home}/run",), "{home}/run: use --run {home}/run"),
        (("{home}/char", "--run", "{home}/run"), "{home}/char: use --input {home}/char"),
        (("--run", "{home}/run", "data.path={home}/char"), "char has a different tokenizer"),
        (("--run", "{home}/bare_run", "data.path={home}/byte"), "val.bin holds token "),
        (("--run", "{home}/run", "data.path={home}/spoiled"), "val.bin holds token 256 at offset"),
        (("--run", "{home}/bare_run", "data.path={home}/large"), "holds token 50 at offset 50"),
        (("--run", "{home}/run", "train.seed=1"), "train.seed=1: only data.* settings can be"),
        (("--run", "{home}/run", "--nope=1"), "--nope: unknown key"),
    ],
)
def test_a_split_that_cannot_be_read(home, words, sentence, capsys):
    given = [str(word).format(home=home) for word in words]
    assert sentence.format(home=home) in refused(capsys, *given)


def test_lm_eval_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert "pip install 'jaxgpt[eval]'" in refused(capsys, "lm-eval", "--tasks", "piqa")
