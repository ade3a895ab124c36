import os
import re
import subprocess

import numpy as np
import pytest

from blends import write_corpora
from jaxgpt.config import UsageError
from jobs import command, environment, losses, records, train_here, wait_for_step

SETTINGS = (
    "--config", "shakespeare_char_cpu", "model.vocab_size=97", "model.n_layer=2",
    "model.n_embd=64", "train.batch_size=16", "train.eval_iters=2", "train.eval_interval=3",
    "train.log_interval=1", "train.sample_tokens=0", "checkpoint.interval=3",
    "data.val_share=0.05", "--mesh", "2,1,1",
)  # fmt: skip


@pytest.fixture
def lines(tmp_path):
    return write_corpora(tmp_path)


def train(out, lines, n_steps, *settings):
    arguments = (*SETTINGS, f"train.max_iters={n_steps}", *settings, "--data.blend", *lines)
    return train_here(*arguments, "--out", out)


@pytest.mark.long
def test_data_that_has_changed_stops_a_resume_unless_it_is_accepted(lines, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out, lines, 3) == 0
    moved = tmp_path / "moved"
    moved.mkdir()
    os.rename(tmp_path / "corpus1.bin", moved / "corpus1.bin")
    lines[1] = f"0.25 {moved / 'corpus1.bin'} name1"
    assert train(out, lines, 6) == 0  # the same tokens in another place
    assert "warning" not in (out / "train.log").read_text()

    tokens = np.fromfile(tmp_path / "corpus4.bin", np.uint16)
    tokens[100] += 1
    tokens.tofile(tmp_path / "corpus4.bin")
    with pytest.raises(
        UsageError,
        match=r"data.blend: .*corpus4.bin has different tokens from the training data of",
    ):
        train(out, lines, 9)
    with pytest.raises(UsageError, match=r"was trained on 5 sources, not 4"):
        train(out, lines[:4], 9)
    assert train(out, lines, 9, "data.accept_changes=True") == 0
    assert "accepted by data.accept_changes" in (out / "train.log").read_text()
    tokens[100] += 1
    tokens.tofile(tmp_path / "corpus4.bin")
    with pytest.raises(UsageError, match=r"has different tokens from the training data of"):
        train_here("--out", out, "train.max_iters=10")  # that was for one change
    tokens[100] -= 1
    tokens.tofile(tmp_path / "corpus4.bin")

    spaces = tmp_path / "with spaces"
    os.rename(tmp_path / "corpus0", spaces)
    lines[0] = f"0.50 '{spaces}' name0"
    assert train(out, lines, 10, "data.accept_changes=True") == 0  # the same shares
    assert "weights or corpora" not in (out / "train.log").read_text()
    assert train_here("--out", out, "train.max_iters=11") == 0
    lines[0] = lines[0].replace("0.50", "0.7")
    assert train(out, lines, 12, "train.batch_size=32") == 0
    log = (out / "train.log").read_text()
    assert "the weights or corpora of data.blend have changed" in log
    # After 11 steps of 16 sequences, the share of name0 changes from 0.5 to 0.7 / 1.2.
    (n,) = re.findall(r"; ([0-9]+) sequences of name0 are left out", log)
    assert abs(int(n) - 11 * 16 * (0.7 / 1.2 - 0.5)) <= 1
    assert " sequences of name1 are repeated" in log
    last = records(out)[-1]
    tokens = sum(corpus["tokens"] for corpus in last["corpora"].values())
    assert tokens == last["consumed_tokens"] == (11 * 16 + 32) * 64
    assert list(losses(out)) == list(range(1, 13))


def test_the_same_data_may_be_named_in_another_way(lines, tmp_path):
    out = tmp_path / "run"
    path = lines[0].split()[1]
    arguments = (*SETTINGS, "--out", out)
    assert train_here(*arguments, f"data.path={path}", "train.max_iters=2") == 0
    assert train_here(*arguments, "--data.blend", f"1 {path}", "train.max_iters=4") == 0
    assert "repeated" not in (out / "train.log").read_text()


def test_a_run_of_a_file_list_goes_on_without_it(lines, tmp_path):
    out, file_list = tmp_path / "run", tmp_path / "list.txt"
    file_list.write_text("\n".join(lines))
    arguments = (*SETTINGS, "--out", out)
    assert train_here(*arguments, f"data.file_list={file_list}", "train.max_iters=3") == 0
    file_list.unlink()
    assert train_here("--out", out, "train.max_iters=6") == 0
    assert list(losses(out)) == list(range(1, 7))


def test_a_file_that_shrinks_during_a_run_ends_all_processes_with_a_sentence(lines, tmp_path):
    out = tmp_path / "run"
    arguments = (*SETTINGS, "--out", out, "--mesh", "2,1,1", "train.max_iters=1000000")
    job = subprocess.Popen(
        command("train", *arguments, "checkpoint.interval=0", "--data.blend", *lines, processes=2),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    wait_for_step(out, 5, job)
    os.truncate(tmp_path / "corpus0" / "train.bin", 3001)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2, output
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "train.bin: ends at byte 3001, before token" in errors[0], output
    assert "Traceback" not in output
