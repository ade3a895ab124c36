"""What a job of several processes shows on a terminal, and where it says that each rank is."""

import json
import re
import shlex
import socket

from jobs import SMALL, command, run
from terminal import run_in_terminal

TRAIN = (*SMALL, "--mesh", "4,1,1", "train.max_iters=4")


def test_the_lines_of_a_job_fit_its_terminal_and_the_log_says_where_each_rank_is(tmp_path):
    words = command("train", *TRAIN, "--out", tmp_path, processes=4)
    said = run_in_terminal(words, 80, 24)
    lines = said.splitlines()
    (row, *_) = (i for i, line in enumerate(lines) if line.startswith("step=1/4 loss="))
    assert row < 24
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line), said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)

    facts = json.loads((tmp_path / "cluster.json").read_text())
    host = socket.gethostname()
    assert facts["ranks"] == [{"host": host, "devices": ["cpu"]}] * 4
    assert facts["collectives"].startswith("Gloo")
    assert facts["launch_line"] == shlex.join(words)
    log = (tmp_path / "train.log").read_text()
    ranks = ", ".join(f"rank {rank} on cpu" for rank in range(4))
    assert f" host {host}: {ranks}\n" in log
    assert f" launch line: {shlex.join(words)}\n" in log
    assert not list(tmp_path.glob("train-*.log"))


def test_the_launch_line_of_jaxgpt_launch_is_recorded(tmp_path):
    words = command("launch", "-n", "2", "--", *command("train", *SMALL), "train.max_iters=1")
    job = run("launch", *words[3:], "--mesh", "2,1,1", "--out", tmp_path)
    assert job.returncode == 0, job.stdout
    (line,) = re.findall("^launch: (.*mpiexec -n 2 .*)$", job.stdout, re.MULTILINE)
    assert json.loads((tmp_path / "cluster.json").read_text())["launch_line"] == line


def test_every_rank_can_have_a_log_of_its_own_times(tmp_path):
    job = run(
        "train", *SMALL, "--mesh", "2,1,1", "train.max_iters=3", "train.log_all_ranks=True",
        "--out", tmp_path, processes=2,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    logs = [(tmp_path / name).read_text() for name in ("train.log", "train-1.log")]
    losses = [re.findall(r"step=\d/3 loss=\S+", log) for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    memory = [re.findall(r"step=3/3 .* mem=(\S+)", log) for log in logs]
    assert all(memory) and job.stdout.count("step=3/3 loss=") == 1
    assert "PMI_RANK=0" in logs[0] and "PMI_RANK=1" in logs[1]
