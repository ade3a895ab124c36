"""Run the job scripts of launch/ as PBS and Slurm do: as a copy in another folder."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxgpt.cluster.machines import MACHINES
from jaxgpt.config import MeshShape
from jobs import run

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = sorted(p.name for p in LAUNCH.iterdir() if p.suffix in (".pbs", ".slurm"))
PBS, SLURM = ([s for s in SCRIPTS if s.endswith(kind)] for kind in (".pbs", ".slurm"))

# Records each call; jaxgpt.doctor and jaxgpt.train end with a status that the test gives.
PYTHON = """
echo "python $JAXGPT_JOB_START $*" >> "$CALLS"
stop() { echo "signalled" >> "$CALLS"; exit "$TRAIN"; }
if [ "$SIGNALLED" ] && [[ "$*" == *jaxgpt.train* ]]; then
    trap stop USR1
    kill -USR1 "$PPID" # as Slurm does it, to the batch script
    kill -USR1 "$PPID"
    for _ in {1..100}; do sleep 0.1; done
fi
case "$*" in *jaxgpt.doctor*) exit "$DOCTOR";; *) exit "$TRAIN";; esac
"""
SUBMIT = 'echo "$(basename "$0") $PWD $*" >> "$CALLS"'


@pytest.fixture
def run_job(tmp_path):
    """Run a job script; return (exit status, calls of python, submissions of jobs)."""
    project, programs, calls = tmp_path / "project", tmp_path / "bin", tmp_path / "calls"
    for folder in (project / "launch", project / ".venv" / "bin", programs, tmp_path / "spool"):
        folder.mkdir(parents=True)
    bodies = {"python": PYTHON, "qsub": SUBMIT, "scontrol": SUBMIT}
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (project / ".venv" / "bin" / "activate").write_text(f"PATH={programs}:$PATH\n")

    def run(script, doctor=0, train=0, at="launch", signalled=""):
        copy = shutil.copy(LAUNCH / script, tmp_path / "spool" / "job.SC")
        (project / at).mkdir(exist_ok=True)
        shutil.copy(LAUNCH / script, project / at)
        pbs = script in PBS  # begins in the home directory, Slurm in that of sbatch
        job = {"PBS_O_WORKDIR": str(project)} if pbs else {"SLURM_JOB_ID": "7"}
        result = subprocess.run(
            ["bash", copy],
            cwd=tmp_path if pbs else project,
            env=job | {"PATH": os.environ["PATH"], "CALLS": str(calls), "SIGNALLED": signalled}
            | {"DOCTOR": str(doctor), "TRAIN": str(train), "JAXGPT_JOB_START": "1.5"},
            capture_output=True,
            text=True,
            timeout=30,
        )  # fmt: skip
        lines = calls.read_text().splitlines() if calls.exists() else []
        python = [line for line in lines if line.startswith("python")]
        return result.returncode, python, [line for line in lines if line not in python]

    run.project = project
    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_run_is_submitted_again(run_job, script):
    before = time.time()
    status, (doctor, train), (submission,) = run_job(script, train=75)
    assert status == 75
    submit = f"qsub {run_job.project} launch/{script}"
    assert submission == (submit if script in PBS else f"scontrol {run_job.project} requeue 7")
    # The doctor and the trainer look at the same run, and start-up is timed from the job's start,
    # not from that of the job that submitted this one.
    launch = r"python (\d+\.\d+) -m jaxgpt.launch -- python -m jaxgpt\."
    checked = re.fullmatch(launch + r"doctor --out (\S+)", doctor)
    trained = re.fullmatch(launch + r"train .*--out (\S+)", train)
    assert checked.groups() == trained.groups()
    assert before < float(checked[1]) < time.time()


@pytest.mark.parametrize("script", SLURM)
@pytest.mark.parametrize("status", [75, 0])
def test_a_script_of_slurms_passes_a_signal_on_and_waits_for_what_becomes_of_it(
    run_job, script, status
):
    """This also holds if the signal arrives twice. The script tells Slurm to send it."""
    assert "#SBATCH --signal=B:USR1@" in text(script)
    found, _, rest = run_job(script, train=status, signalled="yes")
    assert found == status
    requeued = [f"scontrol {run_job.project} requeue 7"] if status == 75 else []
    assert rest == ["signalled", *requeued]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("status", [0, 1, 2, 70, 143])
def test_a_run_that_is_done_or_failed_is_not_submitted_again(run_job, script, status):
    assert run_job(script, train=status)[::2] == (status, [])


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_trained_where_the_doctor_found_a_fault(run_job, script):
    status, python, submissions = run_job(script, doctor=1, train=75)
    assert status == 1 and submissions == []
    assert len(python) == 1 and "jaxgpt.doctor" in python[0]


@pytest.mark.parametrize("script", PBS)
def test_a_script_that_does_not_name_itself_ends_at_once(run_job, script):
    (run_job.project / "launch").rmdir()
    assert run_job(script, at="elsewhere") == (2, [], [])


@pytest.mark.parametrize(
    "preset_alone", [False, pytest.param(True, marks=pytest.mark.long)], ids=["script", "preset"]
)
@pytest.mark.parametrize("machine", ["Aurora", "Polaris"])
def test_auroragpt_is_sharded_and_fits_on_the_nodes_of_its_job(run_job, machine, preset_alone):
    script = f"auroragpt-{machine.lower()}.pbs"
    _, (_, train), _ = run_job(script)
    options = shlex.split(train.partition("jaxgpt.train ")[2])
    nodes = int(re.search(r"^#PBS -l select=(\d+)$", text(script), re.MULTILINE)[1])
    (facts,) = (m for m in MACHINES if m.name == machine)
    n_devices = nodes * facts.devices_per_host
    if preset_alone:  # its mesh is -1,8,1
        options = ["--config", "auroragpt-7b", "--mesh", f"{n_devices // 8},8,1"]
    planned = run("plan", *options, "--device", facts.device, "--json")
    assert planned.returncode == 0, planned.stdout
    plan = json.loads(planned.stdout)
    mesh = options[options.index("--mesh") + 1]
    assert plan["mesh"] == MeshShape.parse(mesh)
    assert plan["devices"] == n_devices and plan["devices_per_host"] == facts.devices_per_host
    # Llama 2 7B has 6,738,415,616 parameters, of 4 bytes each.
    sharded = 4 * 6_738_415_616 / plan["mesh"]["fsdp"]
    assert plan["mesh"]["fsdp"] > 1
    assert plan["memory"]["parameters"] == pytest.approx(sharded, rel=0.001)
    assert plan["fits"] and not plan["warnings"]


@pytest.mark.parametrize(
    "script", sorted(p.name for p in LAUNCH.iterdir() if p.suffix not in (".txt", ".md"))
)
def test_the_shell_reads_every_script(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    said = subprocess.run([shellcheck, LAUNCH / script], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout


def text(script):
    return (LAUNCH / script).read_text()
