"""A bench leaves no folder behind, however it ends; its result is a table and a dict."""

import json
import os
import signal
import subprocess
import time

import pytest

from jaxgpt.bench.harness import Result, scratch_folder
from jaxgpt.cluster.process_group import ProcessGroup
from jobs import command, environment, process_of


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGTERM, 2)],
)
def test_nothing_is_left_by_a_bench_that_a_signal_ends(number, processes, tmp_path):
    size = ("--size", "60MB", "--out", tmp_path)
    job = subprocess.Popen(
        command("bench", "checkpoint", "--config", "tiny", *size, processes=processes),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/checkpoint/checkpoints/1*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job.poll() is None and os.listdir(tmp_path)
    if processes:  # as Slurm and PBS do, which ask all processes
        for rank in range(processes):
            os.kill(process_of(tmp_path, rank), number)
    else:
        job.send_signal(number)
    assert job.wait(30) == 128 + number
    assert not list(tmp_path.glob("jaxgpt*"))


def test_nothing_is_left_by_a_bench_that_fails(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(ValueError), scratch_folder(ProcessGroup("test"), tmp_path) as folder:
            (folder / "written" / "so far").mkdir(parents=True)
            raise ValueError
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not list(tmp_path.iterdir())


def test_a_result_is_rows_for_a_person_and_values_for_a_program():
    result = Result({"seconds": 2.0}, [("time", "2 s"), ("", "of which 1 s waiting")])
    first, second, last = result.table().splitlines()
    assert first.split() == ["time", "2", "s"]
    assert second.index("of which") == first.index("2 s")
    values = json.loads(json.dumps(result.to_dict()))
    assert values["seconds"] == 2.0 and f"jax {values['versions']['jax']}" in last
