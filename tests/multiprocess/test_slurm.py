"""Jobs on a real two-node Slurm cluster (see slurm.py)."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hosts
from jobs import SMALL, command, environment, losses, run, trace, wait_for_step
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
    """Return the first node, and the environment variables that Slurm's commands need."""
    directory = tmp_path_factory.mktemp("slurm")
    with hosts.two_hosts(directory) as nodes, slurm(directory, nodes) as variables:
        yield nodes[0], variables


def test_srun_alone(cluster, tmp_path):
    """Without MPI, ranks alternate between nodes, but `tensor` still stays inside each node."""
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


def batch_script(project, train):
    """launch/generic.slurm as a user edits it, for one node and without the doctor."""
    text = (Path(__file__).parents[2] / "launch" / "generic.slurm").read_text()
    edits = {
        "#SBATCH --account=PROJECT\n": "",
        "#SBATCH --gpus-per-node=4\n": "",
        "--nodes=2": "--nodes=1",
        "--ntasks-per-node=4": "--ntasks-per-node=2",
        "--cpus-per-task=8": "--cpus-per-task=2",
        "out=runs/gpt2": "out=run",
        "train=(--config gpt2 data.path=data/openwebtext)": f"train=({shlex.join(train)} "
        "train.max_iters=$(cat steps))",
        'python -m jaxgpt.launch -- python -m jaxgpt.doctor --out "$out" || exit\n': "",
    }
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    activate = project / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    (project / "job.slurm").write_text(text)
    (project / "steps").write_text("100000")
    return project / "job.slurm"


class BatchJob:
    """A running job of `batch_script`."""

    def __init__(self, cluster, project, train, *options):
        self.node, self.variables = cluster
        self.out, self.log = project / "run", project / "log"
        words = ["sbatch", "--parsable", f"--output={self.log}", f"--chdir={project}", *options]
        sent = self.run(*words, batch_script(project, train))
        self.id = sent.stdout.split()[-1]

    def wait_for_step(self, step):
        metrics = self.out / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and max(losses(self.out), default=0) >= step)

    def run(self, *words):
        ran = self.node.run(*words, **self.variables)
        assert ran.returncode == 0, ran.stdout
        return ran

    def shows(self, field):
        """Return the value of a field in the output of `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", self.id).stdout
        return re.search(rf"\b{field}=(\S+)", shown)[1]

    def wait_until(self, condition):
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def wait_until_done(self):
        """Return the final state of the job. If it is requeued, it starts again at once."""

        def done():
            state = self.shows("JobState")
            if self.shows("Reason") == "BeginTime":  # Slurm would leave it there for two minutes
                self.node.run("scontrol", "update", f"JobId={self.id}", "StartTime=now")
            return state in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")

        self.wait_until(done)
        return self.shows("JobState")


@pytest.mark.long  # Slurm holds a requeued job back for two minutes
@pytest.mark.parametrize(
    "sent",
    [
        ["--batch"],  # to the batch script alone, as --signal=B:USR1@120 does
        [],  # to the steps, as --signal=USR1@120 does
        None,  # by Slurm itself, when the time is nearly up
    ],
)
def test_a_job_that_is_signalled_is_requeued_and_ends_as_if_it_were_not(cluster, tmp_path, sent):
    train = (*SMALL, "--mesh", "1,1,2", "optimizer.lr_decay_iters=1000")
    options = ["--time=2", "--signal=B:USR1@60"] if sent is None else []
    job = BatchJob(cluster, tmp_path / "project", train, *options)
    if sent is not None:
        job.wait_for_step(10)
        job.run("scancel", *sent, "--signal=USR1", job.id)
    stopped = "stopped by SIGUSR1 after step"
    job.wait_until(lambda: job.log.exists() and stopped in job.log.read_text())
    steps = max(losses(job.out)) + 20
    (tmp_path / "project" / "steps").write_text(str(steps))
    assert job.wait_until_done() == "COMPLETED", job.log.read_text()
    assert (
        int(job.shows("Restarts")) >= 1 and f"resumed from step {steps - 20}" in job.log.read_text()
    )
    steps = f"train.max_iters={steps}"
    whole = run("train", *train, steps, "--out", tmp_path / "whole", processes=2)
    assert whole.returncode == 0, whole.stdout
    assert losses(job.out) == losses(tmp_path / "whole")


@pytest.mark.long
def test_a_job_that_is_cancelled_is_not_requeued(cluster, tmp_path):
    job = BatchJob(cluster, tmp_path / "project", (*SMALL, "--mesh", "1,1,2"))
    job.wait_for_step(10)
    job.run("scancel", job.id)
    assert job.wait_until_done() == "CANCELLED", job.log.read_text()
    assert ", which is saved; the same command" in job.log.read_text()
