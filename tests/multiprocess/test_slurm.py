"""Jobs under a real Slurm of two nodes (see slurm.py)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hosts
from jobs import SMALL, command, environment, losses, trace, wait_for_step
from slurm import missing, slurm

HERE = Path(__file__).parent
TRAIN = (*SMALL, "--mesh", "2,1,2")
SRUN = ("srun", "--mpi=none", "-N2", "-n4", "--ntasks-per-node=2", "--distribution=cyclic")
WHO = """
from jaxgpt.cluster.process_group import join_process_group
cluster = join_process_group()
print(f"I am {cluster.rank} {cluster.size} {cluster.local_size} {cluster.launcher}\\n", end="")
"""

absent = missing() or hosts.missing()
pytestmark = pytest.mark.skipif(absent is not None, reason=absent or "")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The first node, and the variables that Slurm's commands need."""
    directory = tmp_path_factory.mktemp("slurm")
    with hosts.two_hosts(directory) as nodes, slurm(directory, nodes) as variables:
        yield nodes[0], variables


def test_srun_alone(cluster, tmp_path):
    """No MPI; ranks alternate between the nodes, and yet `tensor` stays inside each."""
    node, variables = cluster
    words = command(HERE / "placed.py", *TRAIN, "train.max_iters=3", "--out", tmp_path)
    job = node.run(*SRUN, *words, **variables)
    assert job.returncode == 0, job.stdout
    (placed,) = (line for line in job.stdout.splitlines() if line.startswith("placed "))
    assert json.loads(placed.removeprefix("placed ")) == [["alpha"] * 2, ["beta"] * 2]
    facts = json.loads((tmp_path / "cluster.json").read_text())
    assert facts["launcher"].startswith("Slurm (")
    assert (facts["processes"], facts["hosts"]) == (4, ["alpha", "beta"])
    assert job.stdout.count("run directory: ") == 1
    expected = trace(3, *TRAIN[1:], "--mesh", "1,1,1", devices=1)["losses"]
    np.testing.assert_allclose(list(losses(tmp_path).values()), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("launcher", "size", "name"),
    [
        (["srun", "--mpi=pmi2"], 4, "Slurm with PMI"),
        pytest.param(  # which starts its proxies by srun
            ["salloc", "mpiexec", "-n", "4"], 4, "MPICH", marks=pytest.mark.long
        ),
        pytest.param(["salloc"], 1, "single process", marks=pytest.mark.long),
        (["sbatch", "--wait"], 1, "single process"),
    ],
)
def test_ways_to_start(cluster, tmp_path, launcher, size, name):
    """Only steps are jobs of several processes, though all see SLURM_NTASKS=4."""
    node, variables = cluster
    script, output = tmp_path / "script", tmp_path / "output"
    script.write_text(f"#!{sys.executable}\n{WHO}")
    script.chmod(0o755)
    words = [launcher[0], "-N2", "-n4", "--ntasks-per-node=2", *launcher[1:], script]
    job = node.run(*words, SBATCH_OUTPUT=str(output), **variables)
    said = job.stdout + (output.read_text() if output.exists() else "")
    lines = sorted(line for line in said.splitlines() if line.startswith("I am"))
    assert job.returncode == 0 and len(lines) == size, said
    on_host = min(size, 2)
    for rank, line in enumerate(lines):
        assert line.startswith(f"I am {rank} {size} {on_host} {name}"), said


@pytest.mark.long  # in short test_ends.py has jobs that fail
def test_a_process_that_fails_ends_the_step(cluster, tmp_path):
    node, variables = cluster
    arguments = (*TRAIN, "train.eval_interval=5", "--out", tmp_path)
    words = command(HERE / "faulty.py", "loop", 2, *arguments)
    job = node.run(*SRUN, *words, **variables)
    assert job.returncode == 1, job.stdout
    assert job.stdout.count("Traceback") == 1, job.stdout
    assert "\nRuntimeError: planted in loop\n" in job.stdout, job.stdout
    assert "Aborted" not in job.stdout


def test_a_job_that_slurm_ends_saves_a_checkpoint(cluster, tmp_path):
    """SIGTERM, by scancel, at a time limit or for another job; SIGKILL follows after KillWait."""
    node, variables = cluster
    job = subprocess.Popen(
        node.command(
            *SRUN, "--job-name=stopped",
            *command("train", *TRAIN, "train.max_iters=100000", "--out", tmp_path),
        ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(**variables),
    )  # fmt: skip
    wait_for_step(tmp_path, 10, job)
    node.run("scancel", "--name=stopped", **variables).check_returncode()
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 75, output
    (saved,) = (int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert f"after step {saved}, which is saved" in output
