"""Folders that cannot be a run directory, and the lock on those that are."""

import contextlib
import json
import os
import resource
import string
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from jaxgpt import batches, inspect, load_config
from jaxgpt.checkpoint.metadata import add_checksum
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, DataConfig, UsageError, parse_args
from jaxgpt.data.loader import Loader
from jaxgpt.evaluate.split import open_split
from jaxgpt.evaluate.trained import find_trained
from jaxgpt.replay import Repeater
from jaxgpt.train import run_directory
from jobs import META, SMALL, command, environment, run, train_here


def test_a_folder_in_the_place_of_a_file_of_the_run_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match=rf"out={tmp_path}: contains a folder named metr"):
        train_here(*SMALL, "--out", tmp_path)


def test_a_data_folder_that_may_not_be_entered_is_one_sentence(monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", deny)
    with pytest.raises(UsageError, match="data.dataset=python: .* .Permission denied.; set JAXGPT"):
        run_directory.prepare_default_data(DataConfig())


def test_data_with_paths_of_its_own_needs_no_home_directory(monkeypatch):
    monkeypatch.delenv("JAXGPT_DATA", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
    assert run_directory.prepare_default_data(DataConfig(file_list="sources.txt")) == []
    with pytest.raises(UsageError, match="no home directory is known"):
        run_directory.prepare_default_data(DataConfig())


def test_a_run_directory_that_cannot_be_looked_up_is_one_sentence(tmp_path):
    out = tmp_path / (300 * "x") / "run"  # the system refuses to look it up
    with pytest.raises(UsageError, match=r"out=.*: cannot be written \(File name too long\)"):
        run_directory.writable_directory(Config(out=str(out)), contextlib.ExitStack())


def test_a_directory_in_use_is_refused(tmp_path):
    first = subprocess.Popen(command("train", *SMALL, "--out", tmp_path), env=environment())
    try:
        while not (tmp_path / "metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.1)
        second = run("train", *SMALL, "--out", tmp_path)
        assert second.returncode == 2
        assert f"out={tmp_path}: is in use by process {first.pid} on host" in second.stdout
    finally:
        first.kill()
        first.wait()


def test_a_run_directory_that_takes_no_file_or_no_checkpoint_is_refused(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, hard))  # as on a full disk
    try:
        with pytest.raises(UsageError, match=rf"out={tmp_path}: cannot be written \(File too la"):
            train_here(*SMALL, "--out", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UsageError, match=rf"out={tmp_path}: contains a file named checkp"):
        train_here(*SMALL, "--out", tmp_path)


def test_runs_of_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory.time, "strftime", lambda _: "now")
    for _ in range(3):
        run_directory._new_directory(parse_args(SMALL))
    names = [f"shakespeare_char_cpu-now{suffix}" for suffix in ("", "-2", "-3")]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == names


def test_a_renamed_run_finds_the_tokenizer_in_its_folder(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    old, moved = tmp_path / "old", tmp_path / "moved"
    old.mkdir()
    letters = {letter: token for token, letter in enumerate(string.ascii_lowercase)}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(old / "tokenizer.json"))
    (np.arange(3000) % 26).astype(np.uint16).tofile(tmp_path / "a.bin")
    data = (f"data.path={tmp_path / 'a.bin'}", "data.val_share=0.2", f"data.tokenizer={old}")
    small = [word for word in SMALL if not word.startswith("data.")]
    words = [*small, *data, "model.block_size=64", "--mesh", "1,1,1"]
    with ProcessGroup(launcher="test") as cluster:
        started = run_directory.prepare_run(parse_args([*words, "--out", str(old)]), cluster)
    rows = Loader.for_training(started.dataset, started.config)
    meta = add_checksum({**META, "checksums": {}, **started.checkpoint_meta(rows, 2)})
    (old / "config.yaml").write_text(started.config_yaml())
    (old / "checkpoints/2/meta").mkdir(parents=True)
    (old / "checkpoints/2/meta/metadata").write_text(json.dumps(meta))
    old.rename(moved)

    shown = ["--run", str(moved), "--step", "1", "--rows", "0", "--json"]
    inspect.main(shown)
    row = json.loads(capsys.readouterr().out)
    text = "".join(string.ascii_lowercase[token] for token in row["tokens"])
    assert row["text"].replace(" ", "") == text
    assert text in inspect.row_text(moved, 1, 0, "", "", 0).replace(" ", "")
    trained = find_trained(moved)
    assert open_split(trained, "val").dataset.tokenizer.vocab_size == 26
    with ProcessGroup(launcher="test") as cluster:
        # It has opened the data by then.
        with pytest.raises(UsageError, match="the data has changed since the run was trained"):
            Repeater(moved, started.config, started.batch_sizes, [], [], cluster)
        resumed = run_directory.prepare_run(parse_args(["--out", str(moved)]), cluster)
    assert (resumed.resume_step, resumed.dataset.tokenizer.vocab_size) == (2, 26)

    own = load_config(str(moved / "config.yaml"), "--out", str(moved))
    (batch,) = batches(own, [1])
    assert batch.tokens[0].tolist() == row["tokens"]

    with pytest.raises(SystemExit):  # the path in the command is wrong
        inspect.main([*shown, f"data.tokenizer={tmp_path / 'wrong'}"])
    assert f"error: tokenizer {tmp_path / 'wrong'}: cannot be read" in capsys.readouterr().err
    other = {letter: 25 - token for letter, token in letters.items()}
    tokenizers.Tokenizer(tokenizers.models.BPE(other, [])).save(str(moved / "tokenizer.json"))
    with pytest.raises(UsageError, match=f"tokenizer {old}: cannot be read"):
        open_split(trained, "val")
