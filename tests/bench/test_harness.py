"""A bench leaves no folder behind, however it ends. Its result is a table or JSON."""

import json
import os
import signal
import subprocess
import time

import pytest

from jaxgpt.bench.harness import Value, as_json, as_table, format_value, open_job
from jaxgpt.config import Config
from jobs import command, environment, process_of


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        pytest.param(signal.SIGINT, None, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, None, marks=pytest.mark.long),
        (signal.SIGTERM, 2),
    ],
)
def test_a_bench_ended_by_a_signal_leaves_no_files(number, processes, tmp_path):
    size = ("model.n_layer=25", "--out", tmp_path)
    job = subprocess.Popen(
        command("bench", "checkpoint", "--config", "tiny", *size, processes=processes),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/checkpoint/checkpoints/1*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job.poll() is None and os.listdir(tmp_path)
    if processes:  # Slurm and PBS send the signal to all processes
        for rank in range(processes):
            os.kill(process_of(tmp_path, rank), number)
    else:
        job.send_signal(number)
    assert job.wait(30) == 128 + number
    assert not list(tmp_path.glob("jaxgpt*"))


def test_a_bench_that_fails_leaves_no_files(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(ValueError), open_job(Config(), out=tmp_path) as job:
            (job.folder / "written" / "so far").mkdir(parents=True)
            raise ValueError
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not list(tmp_path.iterdir())


def test_a_result_can_be_printed_as_a_table_or_as_json():
    result = {
        "seconds": Value({"median": 0.002, "most": 2.0}, "s", "of a step"),
        "mfu": Value(None, "%"),
        "ratio": 1.5,
        "profile": Value({"operations": []}, None, "no operations"),
    }
    seconds, mfu, ratio, profile, *_, last = as_table(result).splitlines()
    assert seconds.split(maxsplit=1) == ["seconds", "median 2 ms, most 2 s (of a step)"]
    assert mfu.split(maxsplit=1) == ["mfu", "not known"]
    assert ratio.index("1.5") == seconds.index("median") == profile.index("no operations")
    values = json.loads(as_json(result))
    assert values["seconds"]["most"] == 2.0 and values["profile"] == {"operations": []}
    assert f"jax {values['versions']['jax']}" in last


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.99996, "s", "1 s"),
        (999_999, "tokens/s", "1 Mtokens/s"),
        (999_000, "tokens/s", "999 ktokens/s"),
        (2.5e15, "FLOP/s", "2.5 PFLOP/s"),
    ],
)
def test_numbers_are_rounded_before_the_prefix_is_chosen(value, unit, text):
    assert format_value(value, unit) == text
