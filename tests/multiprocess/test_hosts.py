"""Jobs on two simulated hosts, each with its own network and name (see hosts.py)."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hosts
from jobs import SMALL, command, environment, losses, trace

PLACED = Path(__file__).parent / "placed.py"
TRAIN = (*SMALL, "--mesh", "2,1,2", "train.max_iters=3")
# A proxy that answers nobody, as batch systems set for the nodes' way out.
PROXY = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTPS_PROXY")}
GATHER = """
from jaxgpt.config import MeshShape
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.cluster.process_group import join_process_group
cluster = join_process_group()
initialize_jax(cluster, MeshShape(2))
import numpy, jax.experimental.multihost_utils as multihost
ranks = multihost.process_allgather(numpy.int32(cluster.rank))
if cluster.is_main:
    print(ranks)
"""

absent = hosts.missing()
pytestmark = pytest.mark.skipif(absent is not None, reason=absent or "")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """alpha and beta, each of which takes its own name for 127.0.1.1, and the remote shell."""
    directory = tmp_path_factory.mktemp("hosts")
    with hosts.two_hosts(directory, own_name="loopback") as both:
        yield *both, directory / "rsh"


@pytest.fixture(scope="module")
def expected():
    """Return the losses of TRAIN in a single process."""
    return trace(3, *SMALL[1:], devices=1)["losses"]


def assert_trained(output, out, expected):
    """Check that four processes with alternating hosts trained with `tensor` inside each host."""
    (placed,) = (line for line in output.splitlines() if line.startswith("placed "))
    assert json.loads(placed.removeprefix("placed ")) == [["alpha"] * 2, ["beta"] * 2]
    facts = json.loads((out / "cluster.json").read_text())
    assert (facts["processes"], facts["processes_on_host"]) == (4, 2)
    assert facts["hosts"] == ["alpha", "beta"]
    assert facts["coordinator"].startswith("alpha:")
    assert "cleared HTTPS_PROXY, http_proxy, https_proxy" in output
    np.testing.assert_allclose(list(losses(out).values()), expected, rtol=1e-4)


def test_mpiexec(pair, tmp_path, expected):
    alpha, _, shell = pair
    launcher = ("mpiexec", "-launcher", "rsh", "-launcher-exec", shell, "-n", 4)
    ranks = ("-ppn", 1, "-hosts", "alpha,beta")
    job = alpha.run(*launcher, *ranks, sys.executable, PLACED, *TRAIN, "--out", tmp_path, **PROXY)
    assert job.returncode == 0, job.stdout
    assert_trained(job.stdout, tmp_path, expected)


@pytest.mark.long
def test_a_local_folder_that_hosts_do_not_share_is_refused(pair, tmp_path):
    """Each host has its own /dev/shm."""
    alpha, _, shell = pair
    launcher = ("mpiexec", "-launcher", "rsh", "-launcher-exec", shell, "-n", 2)
    ranks = ("-ppn", 1, "-hosts", "alpha,beta", sys.executable, "-m", "jaxgpt.train")
    arguments = (*TRAIN, "--out", tmp_path, "checkpoint.local=/dev/shm/local", "--mesh", "1,2,1")
    job = alpha.run(*launcher, *ranks, *arguments)
    assert job.returncode == 2, job.stdout
    last = job.stdout.rstrip().splitlines()[-1]
    assert last.startswith("error: checkpoint.local=/dev/shm/local: host beta cannot see")


@pytest.mark.long
def test_by_hand(pair, tmp_path, expected):
    """Start the processes without a launcher or MPI."""
    alpha, beta, _ = pair
    variables = {"JAXGPT_COORDINATOR": "alpha:29500", "JAXGPT_SIZE": "4", **PROXY}
    processes = [
        subprocess.Popen(
            host.command(*command(PLACED, *TRAIN, "--out", tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**variables, JAXGPT_RANK=str(rank)),
        )
        for rank, host in enumerate((alpha, beta, alpha, beta))
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(outputs)
    assert_trained(outputs[0], tmp_path, expected)
    assert outputs[1:] == [""] * 3


def test_a_host_whose_name_stands_for_nothing():
    """This happens on laptops away from their usual network."""
    words = ["mpiexec", "-n", "2", sys.executable, "-c", GATHER]
    script = f"hostname elsewhere.invalid && exec {shlex.join(words)}"
    job = subprocess.run(
        ["unshare", "--uts", "sh", "-c", script],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert job.stdout == "[0 1]\n", job.stderr
