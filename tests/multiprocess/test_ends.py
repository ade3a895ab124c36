"""After a signal, failure or bad input, all processes of a job end, and the reason is printed."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxgpt.config import config_from_file
from jobs import SMALL, command, environment, losses, records, run, train_here, wait_for_step

HERE = Path(__file__).parent
MESH = ("--mesh", "1,1,4")


def processes_of(out):
    """Return the IDs of the training processes that write to `out`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words[0] == sys.executable and str(out) in words:
                found.append(int(entry.name))
    return sorted(found)


def gone(out, seconds=10):
    """Return whether all processes of a job end within a short time."""
    deadline = time.monotonic() + seconds
    while processes_of(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_of(out)


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, "a process"),
        pytest.param(signal.SIGUSR2, "a process", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, "the launcher", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "the launcher", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "the launcher", marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_all_at_the_same_step_with_a_checkpoint(tmp_path, number, to):
    out = tmp_path / "run"
    arguments = (*SMALL, *MESH, "--out", out)
    job = subprocess.Popen(
        command("train", *arguments, "train.max_iters=100000", processes=4),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    wait_for_step(out, 10, job)
    os.kill(processes_of(out)[-1] if to == "a process" else job.pid, number)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 75, output
    assert gone(out)
    (saved,) = (int(p.name) for p in (out / "checkpoints").iterdir())
    assert f"after step {saved}, which is saved" in output
    assert max(losses(out)) == saved
    if to == "the launcher":
        return  # the restart is that of the first
    again = run("train", *arguments, f"train.max_iters={saved + 2}", processes=4)
    assert again.returncode == 0, again.stdout
    assert f"resumed from step {saved}" in again.stdout
    assert list(losses(out)) == list(range(1, saved + 3))
    more = (*arguments, f"train.max_iters={saved + 9}")
    again = run(HERE / "faulty.py", "signalled", 1, *more, processes=4)  # before the first step
    assert again.returncode == 75, again.stdout
    assert max(losses(out)) == saved + 3


@pytest.mark.long  # in short test_stopping.py has it
def test_a_time_limit_stops_a_single_process(tmp_path):
    job = run("train", *SMALL, "--out", tmp_path, "train.max_iters=100000", "train.time_limit=0.05")
    assert job.returncode == 75, job.stdout
    assert "stopped by time limit after step" in job.stdout


def test_the_walltime_of_a_pbs_job_stops_it_with_a_checkpoint(tmp_path):
    """Ten seconds are left, and a quarter of them is reserved for the checkpoint."""
    started = time.ctime(time.time() - 50)
    qstat = tmp_path / "qstat"
    qstat.write_text(
        f"#!/bin/sh\necho '    Resource_List.walltime = 00:01:00'; echo '    stime = {started}'\n"
    )
    qstat.chmod(0o755)
    path = f"{tmp_path}:{environment()['PATH']}"
    arguments = (*SMALL, "--out", tmp_path / "run", "train.max_iters=100000")
    job = run("train", *arguments, PATH=path, PBS_JOBID="7.server")
    assert job.returncode == 75, job.stdout
    line = r"^time limit: the job ends at [\d :-]+ \(qstat -f 7.server\); stopping at [\d :-]+, \d "
    assert re.search(line, job.stdout, re.MULTILINE), job.stdout
    assert "stopped by time limit after step" in job.stdout


def test_ctrl_c_while_a_process_waits_for_the_others_ends_it(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"JAXGPT_COORDINATOR": f"127.0.0.1:{port}", "JAXGPT_RANK": "0", "JAXGPT_SIZE": "2"}
    job = subprocess.Popen(
        command("train", *SMALL, "--out", tmp_path), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=environment(**variables),
    )  # fmt: skip
    listens = re.compile(rf":{port:04X} 0+:0000 0A ")
    while not any(listens.search(Path(f"/proc/net/{tcp}").read_text()) for tcp in ("tcp", "tcp6")):
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, output) == (130, "")


@pytest.mark.parametrize(
    ("where", "rank"),
    [("loop", 0), pytest.param("data", 3, marks=pytest.mark.long), ("prepare", 1)],
)
def test_a_process_that_fails_takes_all_with_it(tmp_path, where, rank):
    out = tmp_path / "run"
    arguments = (*SMALL, "--mesh", "2,1,2", "--out", out, "train.eval_interval=5")
    job = run(HERE / "faulty.py", where, rank, *arguments, processes=4, timeout=60)
    assert job.returncode == 1, job.stdout
    assert job.stdout.rstrip().splitlines()[-1] == f"RuntimeError: planted in {where}"
    assert job.stdout.count("Traceback") == 1
    assert gone(out)


@pytest.mark.long
def test_a_process_that_fails_while_restoring_takes_all_with_it(tmp_path):
    arguments = (*SMALL, "--mesh", "1,1,2", "--out", tmp_path)
    train_here(*arguments, "train.max_iters=2")
    job = run(HERE / "faulty.py", "restore", 1, *arguments, processes=2, timeout=60)
    assert job.returncode == 1, job.stdout
    assert job.stdout.rstrip().splitlines()[-1] == "RuntimeError: planted in restore"
    assert gone(tmp_path)


# In which the other processes notice that one has failed.
TIMEOUT = "checkpoint.timeout_minutes=0.05"


@pytest.mark.parametrize(
    ("interval", "max_iters"),
    [
        pytest.param(3, 200, id="found at the next save"),
        pytest.param(0, 10, id="found at the end", marks=pytest.mark.long),
    ],
)
def test_a_process_without_room_on_its_disk_ends_all_with_a_sentence(tmp_path, interval, max_iters):
    steps = (f"train.max_iters={max_iters}", f"checkpoint.interval={interval}", TIMEOUT)
    arguments = (*SMALL, "--mesh", "1,2,1", "--out", tmp_path, *steps)
    job = run(HERE / "faulty.py", "disk", 1, *arguments, processes=2, timeout=120)
    assert job.returncode == 2, job.stdout
    last = job.stdout.rstrip().splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}/checkpoints: checkpoint ")
    assert "could not be written (process 1: File too large); make room" in last
    assert "Traceback" not in job.stdout
    assert (max(losses(tmp_path)) == max_iters) == (interval == 0)
    assert gone(tmp_path)


def test_a_job_goes_on_after_a_save_for_which_one_process_had_no_room(tmp_path):
    steps = ("train.max_iters=9", "checkpoint.interval=3", TIMEOUT)
    arguments = (*SMALL, "--mesh", "1,2,1", "--out", tmp_path, *steps)
    job = run(HERE / "faulty.py", "disk6", 1, *arguments, processes=2, timeout=60)
    assert job.returncode == 0, job.stdout
    assert "Traceback" not in job.stdout
    (failed,) = records(tmp_path, "checkpoint_failed")
    assert (failed["step"], failed["latest_complete"]) == (6, 3)
    assert "process 1: File too large" in failed["reason"]
    shown = failed["reason"].replace(f"{tmp_path}/", "")  # the console shows relative paths
    assert job.stdout.count("could not be written") == 1 and shown in job.stdout
    assert [r["step"] for r in records(tmp_path, "checkpoint")] == [3, 9]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "9"]


@pytest.mark.parametrize(
    ("how", "statuses"),
    # MPICH, Open MPI and Intel MPI have different statuses for a killed process.
    [("killed", [9, 137, 255]), pytest.param("interrupted", [130], marks=pytest.mark.long)],
)
def test_a_process_that_is_killed_or_interrupted_takes_all_with_it(tmp_path, how, statuses):
    arguments = (*SMALL, "--mesh", "1,1,2", "--out", tmp_path, "train.eval_interval=5")
    job = run(HERE / "faulty.py", how, 1, *arguments, processes=2, timeout=60)
    assert job.returncode in statuses, job.stdout
    assert gone(tmp_path)


@pytest.mark.long  # in short, those of a supervisor: they have no MPI either
@pytest.mark.parametrize(
    ("how", "statuses", "last"),
    [
        (
            "killed",
            [1, -signal.SIGKILL],
            f"\nerror: process 1 on host {socket.gethostname()} exited unexpectedly; its output "
            "may say why; to resume, start again with the same --out\n",
        ),
        ("interrupted", [130, 130], ""),
    ],
)
def test_over_tcp_a_process_that_is_killed_or_interrupted_takes_the_other_with_it(
    tmp_path, how, statuses, last
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"JAXGPT_COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}"}
    arguments = (*SMALL, "--mesh", "1,1,2", "--out", tmp_path, "train.eval_interval=2")
    jobs = [
        subprocess.Popen(
            command(HERE / "faulty.py", how, 1, *arguments),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(**variables, JAXGPT_SIZE="2", JAXGPT_RANK=str(rank)),
        )
        for rank in range(2)
    ]  # fmt: skip
    output, nothing = (job.communicate(timeout=120)[0] for job in jobs)
    assert [job.returncode for job in jobs] == statuses, output
    assert output.endswith(last) and "Traceback" not in output
    assert nothing == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.max_iters=x"], "train.max_iters=x: must be a whole number"),
        (["--mesh", "2,1,3"], "parallel.mesh=2,1,3: tensor=3 does not divide model.n_head=4"),
        (["--mesh", "3,1,2"], "must be a multiple of data x fsdp = 3"),
        (["--mesh", "2,1,1"], "2 devices cannot be divided evenly among 4 processes"),
        (["data.path=/nowhere"], "data.path=/nowhere: there is no token data; give"),
        (["model.vocab_size=32"], "model.vocab_size=32"),
        (["--train-range-to-skip", "9", "5"], "9 5"),
        (["--out", "/proc/nowhere"], "out=/proc/nowhere: cannot be written"),
    ],
)
def test_bad_input_is_one_line_on_all_processes(tmp_path, arguments, words):
    base = () if "--mesh" in arguments else MESH
    job = run("train", *SMALL, *base, "--out", tmp_path / "run", *arguments, processes=4)
    assert job.returncode == 2, job.stdout
    (line,) = job.stdout.strip().splitlines()
    assert line.startswith("error: ") and words in line
    assert gone(tmp_path / "run")


def test_all_problems_are_printed_once_by_all_processes(tmp_path):
    wrong = ("model.n_layers=1", "spike.actoin=off")
    job = run("train", "--out", tmp_path / "run", *wrong, processes=2)
    assert job.returncode == 2, job.stdout
    first, *problems, _, command = job.stdout.strip().splitlines()
    assert first == "error: 2 problems"
    assert [line.partition(":")[0].strip() for line in problems] == [
        "model.n_layers",
        "spike.actoin",
    ]
    corrected = f"python -m jaxgpt.train --out {tmp_path}/run model.n_layer=1 spike.action=off"
    assert command.startswith("  ") and command.endswith(f"mpiexec -n 2 {corrected}")
    assert gone(tmp_path / "run")
    options = ("-n", "2", "--restarts", "3", "--")
    job = run("launch", *options, "python", "-m", "jaxgpt.train", "--out", tmp_path / "run", *wrong)
    assert job.returncode == 2, job.stdout
    launch = shlex.join(["python", "-m", "jaxgpt.launch", *options])
    assert job.stdout.splitlines()[-1] == f"  {launch} {corrected}"


def test_a_batch_size_per_device_is_multiplied_by_the_devices_of_all_processes(tmp_path):
    small = [word for word in SMALL if not word.startswith("train.batch_size")]
    sizes = ("train.max_iters=1", "model.batch_size=3", "optimizer.gas=2")
    job = run("train", *small, *sizes, "--out", tmp_path / "run", processes=2)
    assert job.returncode == 0, job.stdout
    assert config_from_file(tmp_path / "run/config.yaml").train.batch_size == 12
    log = (tmp_path / "run/train.log").read_text()
    assert "train.batch_size=12: 3 sequences per device x 2 devices x 2 microbatches" in log


def test_a_file_that_one_process_lacks_stops_all(tmp_path):
    one = command("train", "--out", tmp_path / "run", processes=1)
    other = command("train", "--out", tmp_path / "run", "--config", "/nowhere.yaml")
    job = subprocess.run(
        [*one, ":", "-n", "1", *other],
        capture_output=True, text=True, env=environment(), timeout=30,
    )  # fmt: skip
    assert job.returncode == 2
    (line,) = job.stderr.strip().splitlines()
    assert line.startswith("error: config=/nowhere.yaml: no such file")


@pytest.mark.parametrize("differs", ["tokens", "tokenizer"])
def test_a_host_that_has_other_data_stops_all(differs, tmp_path):
    """Its tokens are in a file of the right size, with zeros after the first quarter."""
    shutil.copytree(os.environ["JAXGPT_DATA"], tmp_path / "copy")
    tokens, meta = (tmp_path / "copy" / "python" / name for name in ("train.bin", "meta.json"))
    if differs == "tokens":
        size = tokens.stat().st_size
        os.truncate(tokens, size // 4)
        os.truncate(tokens, size)
    else:
        char = {"type": "char", "characters": "ab"}
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "tokenizer": char}))
    arguments = (*SMALL, "--mesh", "2,1,1", "--out", tmp_path / "run")
    other = ["env", f"JAXGPT_DATA={tmp_path / 'copy'}", *command("train", *arguments)]
    job = subprocess.run(
        [*command("train", *arguments, processes=1), ":", "-n", "1", *other],
        capture_output=True, text=True, env=environment(), timeout=30,
    )  # fmt: skip
    assert job.returncode == 2
    (line,) = job.stderr.strip().splitlines()
    assert line.startswith("error: data.dataset=python: ") and "same files" in line


def test_help_is_printed_once():
    job = run("train", "--help", processes=3)
    assert job.returncode == 0
    assert job.stdout.count("--model.n_layer") == 1


def test_devices_that_do_not_fit_the_mesh_are_refused(tmp_path):
    job = run("train", *SMALL, *MESH, "--out", tmp_path, processes=2, JAX_NUM_CPU_DEVICES="1")
    assert job.returncode == 2
    assert "parallel.mesh=1,1,4: the product is 4 but the job has 2 devices" in job.stdout


@pytest.mark.parametrize("pipe", ["|", pytest.param("2>&1 |", marks=pytest.mark.long)])
def test_ctrl_c_that_also_kills_tee_saves_a_checkpoint(tmp_path, pipe):
    words = command("train", *SMALL, "train.max_iters=100000", "--out", tmp_path / "run")
    line = f"{shlex.join(map(str, words))} {pipe} tee {tmp_path / 'copy'}; exit ${{PIPESTATUS[0]}}"
    job = subprocess.Popen(
        ["bash", "-c", f"trap true INT; {line}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 3, job)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 75, said
    end = (tmp_path / "run" / "train.log").read_text()
    assert "SIGINT: stopping after" in end and "stopped by SIGINT after step" in end
    if pipe == "|":
        assert "stopped by SIGINT after step" in said
    assert list((tmp_path / "run" / "checkpoints").iterdir())
