"""If a process of a job fails, dies, stops or hangs, all processes end, with one report."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from jaxgpt.cluster import monitor
from jaxgpt.cluster.environment import Launch
from jaxgpt.cluster.monitor import HangLimit, Monitor, Progress, hang_sentence, process_names
from jaxgpt.cluster.process_group import join_process_group
from jaxgpt.cluster.shutdown import HUNG
from jobs import environment

# A process of a job of three. It says when all are there, and then does what is asked.
PROCESS = """
import sys, time
from jaxgpt.cluster.monitor import HangLimit
from jaxgpt.cluster.process_group import join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import UsageError

with job_exit_handler():
    with join_process_group(30, HangLimit(1.0, "the setting=1")) as group:
        group.monitor.heartbeat("step 1", 60)
        group.barrier()
        print("here", flush=True)
        exec(sys.argv[1])
"""
HERE = rf"on host {socket.gethostname()}"
WAIT = "time.sleep(60)"


def test_a_heartbeat_is_encoded_once_for_all_peers(monkeypatch):
    encoded, sent, encode = [], [], monitor.encode
    monkeypatch.setattr(monitor, "encode", lambda *m: encoded.append(m) or encode(*m))
    alone = Monitor()
    writer = SimpleNamespace(write=sent.append)
    alone._peers = {rank: monitor.Peer(writer) for rank in range(1, 1001)}
    alone._announce()
    assert len(encoded) == 1 and sent == 1000 * [encode("beat", 0, "the start", False, "")]


def free_address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def start(*what):
    """Start a job over TCP whose processes run these Python lines; wait until all are connected."""
    address, jobs = free_address(), []
    for rank, lines in enumerate(what):
        variables = {"JAXGPT_COORDINATOR": address, "JAXGPT_SIZE": "3", "JAXGPT_RANK": str(rank)}
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, lines], text=True, env=environment(**variables),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    assert all(job.stdout.readline() == "here\n" for job in jobs)
    return jobs


def ends(jobs, seconds=15):
    """Return the exit statuses and errors of all processes, which must end in time."""
    errors = [job.communicate(timeout=seconds)[1] for job in jobs]
    return [job.returncode for job in jobs], errors


@pytest.mark.parametrize("rank", range(3))
def test_the_first_error_is_printed_and_ends_all(rank):
    """One process waits for the failing one; another fails a little later."""
    what = ["group.barrier()", "time.sleep(0.2); 1 / 0", WAIT]
    what[rank] = "raise ValueError('the first')"
    statuses, errors = ends(start(*what))
    assert statuses == [1, 1, 1]
    assert errors.pop(rank).endswith("ValueError: the first\n") and errors == ["", ""]


def test_a_later_error_of_the_same_process_is_not_printed():
    lines = "import threading; end = group.monitor.end_job; "
    lines += "threading.Thread(target=end, args=('first\\n', 3)).start(); time.sleep(0.2); 1 / 0"
    assert ends(start(lines, WAIT, WAIT)) == ([3, 3, 3], ["first\n", "", ""])


def test_a_process_that_exits_while_the_others_work_ends_them():
    statuses, errors = ends(start(WAIT, "sys.exit(3)", WAIT))
    assert statuses == [1, 1, 1]
    assert errors.pop(1).endswith("SystemExit: 3\n") and errors == ["", ""]


def test_a_users_mistake_is_a_line_and_an_interruption_none():
    statuses, errors = ends(start(WAIT, "raise UsageError('model.n_layer=0: too few')", WAIT))
    assert (statuses, errors) == ([2, 2, 2], ["", "error: model.n_layer=0: too few\n", ""])
    statuses, errors = ends(start("raise KeyboardInterrupt", WAIT, WAIT))
    assert (statuses, errors) == ([130, 130, 130], ["", "", ""])


@pytest.mark.parametrize("rank", range(3))
def test_a_process_that_is_killed_is_named_at_once_and_ends_all(rank):
    """This also holds if the other processes fail as a consequence, as in a collective."""
    what = ["time.sleep(1.2); 1 / 0"] * 3
    what[rank] = "time.sleep(1); import os; os.kill(os.getpid(), 9)"
    jobs = start(*what)
    speaks = 1 if rank == 0 else 0
    statuses, errors = ends(jobs)
    assert statuses.pop(rank) == -signal.SIGKILL and statuses == [1, 1]
    assert (
        errors[speaks]
        == f"error: process {rank} {HERE} exited unexpectedly; its output may say why\n"
    )
    assert sum(map(bool, errors)) == 1


@pytest.mark.parametrize("rank", range(3))
def test_a_process_that_stops_is_named_with_those_that_wait_for_it(rank):
    what = [f"group.monitor.heartbeat('step {2 + (r != rank)}', 60); {WAIT}" for r in range(3)]
    jobs = start(*what)
    time.sleep(0.6)  # two heartbeats
    began = time.monotonic()
    jobs[rank].send_signal(signal.SIGSTOP)
    speaks = 1 if rank == 0 else 0
    error = jobs[speaks].communicate(timeout=15)[1]
    assert time.monotonic() - began < 1.0 + 2.5  # the limit; heartbeats are a quarter of it
    assert jobs[speaks].returncode == HUNG
    known = [r for r in range(3) if r != rank] if rank else [1]  # only process 0 knows of all
    waits = f"{process_names(known)} {'are' if known[1:] else 'is'} waiting for it at step 3; "
    assert error == (
        f"error: the setting=1: process {rank} {HERE} at step 2 has not been heard from for 0.0167 "
        f"minutes; {waits}the process or its host has stopped responding\n"
    )
    jobs[rank].kill()
    for job in jobs:
        job.communicate(timeout=30)


def test_a_process_that_makes_no_progress_is_told_from_those_that_wait_for_it():
    waits = f"group.monitor.heartbeat('step 2'); {WAIT}"
    statuses, errors = ends(start(waits, waits, WAIT))
    assert statuses == [HUNG] * 3
    assert errors[0] == (
        f"error: the setting=1: process 2 {HERE} at step 1 has made no progress for 0.0167 "
        "minutes; processes 0 and 1 are waiting for it at step 2\n"
    )
    assert errors[1:] == ["", ""]


def test_processes_may_leave_in_any_order():
    for last in range(3):
        jobs = start(*(f"time.sleep({1.0 * (rank == last)})" for rank in range(3)))
        assert ends(jobs) == ([0, 0, 0], ["", "", ""])


def test_a_process_that_fails_after_process_0_has_left_reports_its_error():
    statuses, errors = ends(start("", "", "time.sleep(1); raise ValueError('late')"))
    assert statuses == [0, 0, 1] and errors[2].endswith("ValueError: late\n"), errors


def test_processes_that_do_not_come_and_ranks_that_do_not_fit_end_the_others():
    def meet(*places, seconds=2):
        script = f"from jaxgpt.cluster.process_group import *; join_process_group({seconds})"
        address = free_address()
        jobs = [
            subprocess.Popen(
                [sys.executable, "-c", script], text=True, stderr=subprocess.PIPE,
                env=environment(
                    JAXGPT_COORDINATOR=address, JAXGPT_SIZE=str(size), JAXGPT_RANK=str(rank)
                ),
            )
            for rank, size in places
        ]  # fmt: skip
        return ends(jobs)

    statuses, (error, nothing) = meet((0, 4), (1, 4))
    assert (statuses, nothing) == ([1, 1], "")
    assert error.startswith(
        "error: 2 of 4 processes did not start within 2 s (--init-timeout); missing ranks: 2, 3; "
    )
    statuses, errors = meet((0, 3), (1, 3), (1, 3), seconds=30)
    assert statuses == [1, 1, 1]
    assert errors[0].startswith("error: a process connected as rank 1 of 3, but this job has 3 ")


def test_process_0_hears_the_last_words_of_each_process(monkeypatch):
    monkeypatch.setattr(monitor, "HEARTBEAT", 0.05)
    address, groups = free_address(), {}

    def join(rank):
        launch = Launch("test", rank=rank, size=3, address=address, through="tcp")
        groups[rank] = join_process_group(20.0, launch=launch)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wanted = {rank: f"[{rank}, 4, {'9' * 5000}]" for rank in range(3)}
    for number in range(5):  # faster than the heartbeats: what was not sent is replaced
        for rank, group in groups.items():
            group.monitor.send(wanted[rank].replace(" 4,", f" {number},"))
    deadline = time.monotonic() + 30
    while groups[0].monitor.received != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert groups[0].monitor.received == wanted
    for group in groups.values():
        group.monitor.close()


@pytest.mark.parametrize("file", ["none", "a pipe that nobody reads"])
def test_a_file_system_that_fails_or_hangs_does_not_keep_a_job_alive(
    file, tmp_path, monkeypatch, capsys
):
    directory, has_ended, statuses = tmp_path / "run", threading.Event(), []

    def end(report, status):
        statuses.append(status)
        has_ended.set()

    monkeypatch.setattr(monitor, "report_and_end", end)
    if file != "none":
        directory.mkdir()
        os.mkfifo(directory / "hang-0.txt")
    alone = Monitor(HangLimit(0.12, "train.hang_timeout=0.002"))
    alone.write_stacks_to(directory)
    alone.start()
    atexit.unregister(alone.close)  # which would wait for the process to be ended
    alone.heartbeat("the setup of the state", 1800)
    assert not has_ended.wait(0.5)
    alone.heartbeat("step 7")
    assert has_ended.wait(10)
    assert statuses == [HUNG]
    assert capsys.readouterr().err.startswith(
        "error: train.hang_timeout=0.002: process 0 at step 7 has made no progress for 0.002 "
        f"minutes; {directory}/hang-<process>.txt has the stack"
    )


def test_who_waits_for_whom_is_said():
    known = {0: Progress(9, "step 7"), 1: Progress(9, "step 7"), 2: Progress(8, "step 6"),
             3: Progress(10, "the evaluation after step 7")}  # fmt: skip
    names, limit = ("a", "a", "b", "b"), HangLimit(1800, "train.hang_timeout=30")
    waits = (
        "processes 0 and 1 are waiting for it at step 7; process 3 is waiting for it at the "
        "evaluation after step 7"
    )
    assert hang_sentence([2], limit, known, names) == (
        "train.hang_timeout=30: process 2 on host b at step 6 has not been heard from for 30 "
        f"minutes; {waits}; the process or its host has stopped responding"
    )
    assert hang_sentence([], limit, known, names) == (
        "train.hang_timeout=30: process 2 on host b at step 6 has made no progress for 30 minutes; "
        + waits
    )
    same = dict.fromkeys(range(4), Progress(9, "step 7"))
    assert hang_sentence([], limit, same, names) == (
        "train.hang_timeout=30: processes 0, 1, 2 and 3 on hosts a, b at step 7 have made no "
        "progress for 30 minutes"
    )
    assert process_names(list(range(20))) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
