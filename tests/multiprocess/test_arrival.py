"""If some processes of a job never connect, the job ends in time and reports the reason."""

import socket
import subprocess
import sys
import time

import pytest

from jobs import SMALL, command, environment

SECONDS = 8  # --init-timeout
# Past it: starting Python on busy cores, and the launcher's own cleaning up.
GRACE = 25

TRAIN = (*SMALL, "--mesh", "1,1,4", "train.max_iters=1", "--init-timeout", SECONDS)


def started(arguments, **extra):
    return subprocess.Popen(
        [str(a) for a in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
        start_new_session=True,
    )


def ended(jobs):
    """Return (status, output) of each job. All jobs must end within the stated time."""
    deadline = time.monotonic() + SECONDS + GRACE
    found = []
    for job in jobs:
        try:
            output, _ = job.communicate(timeout=max(1, deadline - time.monotonic()))
        finally:
            job.kill()
        found.append((job.returncode, output))
    return found


def mpiexec_with(first_of_rank_2, out):
    """Start four processes, where rank 2 does something else before it starts."""
    train = " ".join(map(str, command("train", *TRAIN, "--out", out)))
    shell = f'if [ "$PMI_RANK" = 2 ]; then {first_of_rank_2}; fi; exec {train}'
    return started(["mpiexec", "-n", "4", "bash", "-c", shell])


def test_a_rank_that_does_not_come_is_named(tmp_path):
    jobs = [
        mpiexec_with("exec sleep 120", tmp_path / "never"),
        mpiexec_with("exit 3", tmp_path / "dies"),
    ]
    for status, output in ended(jobs):
        assert status != 0
        assert (
            f"error: 1 of 4 processes did not start within {SECONDS} s (--init-timeout); missing "
            "ranks: 2; check "
        ) in output
        assert "Traceback" not in output


def test_without_mpi_a_rank_that_does_not_come_is_named(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    jobs = [
        started(
            command("train", *TRAIN, "--out", tmp_path),
            JAXGPT_COORDINATOR=address,
            JAXGPT_RANK=str(rank),
            JAXGPT_SIZE="4",
        )
        for rank in (0, 1, 3)
    ]
    found = ended(jobs)
    assert [status for status, _ in found] == [1, 1, 1]
    assert "1 of 4 processes did not start" in found[0][1]
    assert "missing ranks: 2;" in found[0][1]
    assert [output for _, output in found[1:]] == ["", ""]


def test_another_mpi_than_the_launchers_is_explained(tmp_path):
    pytest.importorskip("mpi4py")
    # What Open MPI's mpiexec tells a process whose mpi4py uses MPICH, which finds no launcher.
    jobs = [
        started(
            [sys.executable, "-m", "jaxgpt.train", *TRAIN, "--out", tmp_path],
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_SIZE="4",
        )
        for rank in range(2)
    ]
    (status, output), (other, silent) = ended(jobs)
    assert (status, other) == (2, 2)
    (line,) = output.strip().splitlines()
    assert "OMPI_COMM_WORLD_RANK=0: the launcher (Open MPI) started 4 processes" in line
    assert "mpi4py uses MPICH" in line
    assert silent == ""
