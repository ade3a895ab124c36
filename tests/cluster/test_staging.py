"""A copy of this Python on a host's own disk: `jaxgpt.launch --stage-env`.

The environment is a small one: what is started needs no JAX, and the interpreter is taken for the
system's, but in the long form.
"""

import asyncio
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from jaxgpt.cluster.launchers import place_processes
from jaxgpt.cluster.staging import UNPACK
from jaxgpt.cluster.supervisor import check_hosts
from jobs import environment

ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
from jaxgpt import launch
from jaxgpt.cluster import staging

if sys.argv.pop(1) == "system":
    staging.OF_THE_SYSTEM += (sys.base_prefix,)
launch.main(sys.argv[1:])
"""
# A line at once, or those of two processes mix.
WHERE = """
import sys, jaxgpt, mine, yaml
print(f"from {sys.prefix} {sys.base_prefix} {jaxgpt.__file__} {mine.VALUE}\\n", end="", flush=True)
loaded = [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]
assert not [f for f in loaded if f.startswith(sys.argv[1])], loaded
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a virtual environment, an editable jaxgpt, and a package on PYTHONPATH."""
    folder = tmp_path / "project"
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    shutil.copytree(Path(importlib.util.find_spec("yaml").origin).parent, site / "yaml")
    (folder / "checkout" / "configs").mkdir(parents=True)
    shutil.copytree(ROOT / "jaxgpt", folder / "checkout" / "jaxgpt")
    (site / "_editable_impl_jaxgpt.pth").write_text(str(folder / "checkout"))
    (folder / "more").mkdir()
    (folder / "more" / "mine.py").write_text("VALUE = 1\n")
    (folder / "more" / "run.tar").write_bytes(bytes(1000))  # no package
    return folder


def launch(project, disk, command=("python", "-c", WHERE), base="system", before=()):
    variables = environment(PYTHONPATH=str(project / "more"))
    words = [project / "venv" / "bin" / "python", "-c", LAUNCH, base, "-n", "2"]
    return subprocess.run(
        [*before, *words, "--stage-env", disk, "--", *command, project],
        cwd=disk.parent, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=120,
    )  # fmt: skip


def origins(job):
    """Where the processes of a job say that they come from."""
    assert job.returncode == 0, job.stdout
    first, second = (line for line in job.stdout.splitlines() if line.startswith("from "))
    assert first == second
    return first.split()[1:]


def test_a_command_runs_from_the_copy_which_is_made_once_and_follows_edits(project, tmp_path):
    disk = tmp_path / "disk"
    job = launch(project, disk)
    prefix, _, package, value = origins(job)
    assert Path(prefix).parents[1] == disk and Path(package).is_relative_to(disk) and value == "1"
    assert job.stdout.count("launch: packed ") == 2

    again = launch(project, disk)
    assert origins(again)[:3] == [prefix, _, package] and "launch: packed " not in again.stdout

    # A copy that was interrupted has another name.
    whole = Path(prefix).parent
    whole.rename(f"{whole}.part")
    (Path(f"{whole}.part") / "env" / "pyvenv.cfg").unlink()
    assert origins(launch(project, disk))[0] == prefix
    assert not Path(f"{whole}.part").exists()

    (project / "more" / "mine.py").write_text("VALUE = 22\n")
    edited = launch(project, disk)
    assert origins(edited)[0] == prefix and origins(edited)[3] == "22"
    assert edited.stdout.count("launch: packed ") == 1  # not the environment


@pytest.mark.long  # half a minute: some thousand files
def test_an_interpreter_that_is_not_the_systems_is_copied_too(project, tmp_path):
    if sys.base_prefix in ("/usr", "/usr/local"):
        pytest.skip("this interpreter is the system's")
    prefix, base, *_ = origins(launch(project, tmp_path / "disk", base="packed"))
    assert Path(base) == Path(prefix).parent / "base"


@pytest.mark.parametrize(
    ("disk", "command", "words"),
    [
        (
            "/proc/nowhere",
            ["python"],
            f"error: host {platform.node()}: --stage-env=/proc/nowhere: mkdir: ",
        ),
        ("/tmp", ["true"], "error: --stage-env: COMMAND begins with true, and only python comes"),
    ],
)
def test_what_cannot_be_staged_is_refused_in_a_sentence(project, disk, command, words):
    job = launch(project, Path(disk), command)
    assert job.returncode == 2, job.stdout
    assert words in job.stdout and "Traceback" not in job.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_disk_without_room_is_named_with_its_host(project, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    small = f'mount -t tmpfs -o size=100k none {disk} && exec "$@"'
    job = launch(project, disk, before=("unshare", "--mount", "sh", "-c", small, "sh"))
    assert job.returncode == 2, job.stdout
    assert f"error: host {platform.node()}: --stage-env={disk}: " in job.stdout
    assert "No space left on device); give a folder on a disk of the host" in job.stdout


def test_a_host_that_takes_a_lost_ones_place_gets_a_copy_when_it_is_checked(tmp_path):
    """One that cannot hold it is left out, with the reason."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.write_text('#!/bin/sh\n[ "$*" = "-m jaxgpt.doctor.probe job directory" ]\n')
    python.chmod(0o755)
    with tarfile.open(tmp_path / "small.tar", "w") as tar:
        tar.add(tmp_path / "env", "env")
    layout = place_processes(1, None, None, {})

    def check(disk):
        words = ("sh", "-c", UNPACK, "sh", str(disk), str(tmp_path / "small.tar"), "--")
        staged = f"{disk}/small/env/bin/python"
        found = check_hosts(layout, ["this"], "job", "directory", [*words, staged])
        return asyncio.run(found)["this"]

    assert check(tmp_path / "disk") is None
    assert (tmp_path / "disk" / "small" / "env" / "bin" / "python").exists()
    assert check("/proc/nowhere").startswith(f"host {platform.node()}: --stage-env=/proc/nowhere: ")
