"""Folders that cannot be a run directory, and the lock on those that are."""

import contextlib
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from jaxgpt.config import Config, DataConfig, UsageError, parse_args
from jaxgpt.train import run_directory
from jobs import SMALL, command, environment, run, train_here


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
