"""`python -m jaxgpt.launch` builds the right command line and executes it."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxgpt import launch
from jaxgpt.cluster import launchers, supervisor
from jaxgpt.cluster.launch_line import words_before_python
from jaxgpt.cluster.supervisor import Supervisor
from jaxgpt.launch import main
from jobs import environment, run

# The first line of `mpiexec --version`: PALS as users of it record it, the others as they print it.
VERSIONS = {
    "PALS": "mpiexec version 1.8.0 revision e1a2b3c",
    "Open MPI": "mpiexec (Open MPI) 5.0.11",
    "Open MPI 4": "mpiexec (OpenRTE) 4.1.5a1",
    "MPICH": "HYDRA build details:",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626",
}
AURORA_CPUS = "list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"


@pytest.fixture
def job(monkeypatch, tmp_path, capsys):
    """Return the output of --print in a job with this environment and a launcher of this name.

    `own` names an mpiexec that is installed with this Python, in an activated environment.
    `job.messages` holds the messages of the last call.
    """
    for variable in list(os.environ):
        monkeypatch.delenv(variable)
    monkeypatch.setattr(launchers, "count_accelerators", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    binaries, venv = tmp_path / "bin", tmp_path / "venv"
    binaries.mkdir()
    venv.mkdir()
    monkeypatch.setattr(sys, "executable", str(venv / "python"))
    monkeypatch.setenv("PATH", f"{venv}:{binaries}")

    def line(*options, mpi=None, own=None, hosts=None, srun=False, **environ):
        for folder, name in ((binaries, mpi), (venv, own)):
            if name is not None:
                program(folder / "mpiexec", f"echo '{VERSIONS.get(name, name)}'")
        if srun:
            program(binaries / "srun", "exit 1")
        if hosts is not None:
            (tmp_path / "hosts").write_text("".join(f"{h}\n" for h in hosts.split()))
            environ = {"PBS_JOBID": "1.server", "PBS_NODEFILE": str(tmp_path / "hosts")} | environ
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        main([*options, "--print", "--", "train"])
        printed, line.messages = (
            text.replace(f"{binaries}/", "").replace(f"{tmp_path}/", "")
            for text in capsys.readouterr()
        )
        assert printed.endswith(" train\n")
        return printed.removesuffix(" train\n")

    return line


def program(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


POLARIS = "x3005c0s37b0n0.hsn.cm.polaris.alcf.anl.gov x3005c0s37b1n0.hsn.cm.polaris.alcf.anl.gov"
AURORA = "x4407c6s2b0n0.hsn.cm.aurora.alcf.anl.gov x4407c6s3b0n0.hsn.cm.aurora.alcf.anl.gov"


@pytest.mark.parametrize(
    ("hosts", "mpi", "options", "line"),
    [
        # As ALCF documents launching on Polaris (docs: "PyTorch on Polaris") and Aurora
        # ("Running Jobs", example 4).
        (POLARIS, "PALS", "",
         "mpiexec --envall -n 8 -ppn 4 --hostfile hosts --cpu-bind depth -d 16"),
        (POLARIS, "PALS", "--ppn 2",
         "mpiexec --envall -n 4 -ppn 2 --hostfile hosts --cpu-bind depth -d 32"),
        (AURORA, "PALS", "",
         f"mpiexec --envall -n 24 -ppn 12 --hostfile hosts --cpu-bind {AURORA_CPUS}"),
        # One process with two tiles has the cores of both, on one socket.
        (AURORA, "PALS", "--ppn 6",
         "mpiexec --envall -n 12 -ppn 6 --hostfile hosts --cpu-bind "
         "list:1-8,9-16:17-24,25-32:33-40,41-48:53-60,61-68:69-76,77-84:85-92,93-100"),
        (AURORA, "PALS", "-n 1 --ppn 1",
         "mpiexec --envall -n 1 -ppn 1 --hostfile hosts --cpu-bind "
         f"{AURORA_CPUS.replace(':', ',').replace('list,', 'list:')}"),
        ("sophia-gpu-01 sophia-gpu-02", "Open MPI 4", "",
         "mpiexec -n 16 --bind-to none --map-by ppr:8:node:OVERSUBSCRIBE "
         "--host sophia-gpu-01:8,sophia-gpu-02:8 -x PATH -x PBS_JOBID"),
        # Its queue by-gpu gives a line for each GPU.
        ("sophia-gpu-01 " * 4, "Open MPI 4", "",
         "mpiexec -n 4 --bind-to none --map-by ppr:4:node:OVERSUBSCRIBE --host sophia-gpu-01:4 "
         "-x PATH -x PBS_JOBID"),
        # A cluster without accelerators: as many as PBS was asked for with mpiprocs.
        ("a a b b", "MPICH", "", "mpiexec -n 4 -ppn 2 -hosts a,b"),
        ("a a b b", "MPICH", "--ppn 2", "mpiexec -n 4 -ppn 2 -hosts a,b"),
        ("a b c", "MPICH", "-n 6", "mpiexec -n 6 -ppn 2 -hosts a,b,c"),
        ("a b c", "MPICH", "-n 4 --ppn 2", "mpiexec -n 4 -ppn 2 -hosts a,b"),
        ("a b", "Intel MPI", "",
         "env I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=0 mpiexec -n 2 -ppn 1 -hosts a,b"),
    ],
)  # fmt: skip
def test_a_pbs_job_is_launched_in_the_words_of_its_mpiexec(job, hosts, mpi, options, line):
    assert job(*options.split(), hosts=hosts, mpi=mpi) == line


@pytest.mark.parametrize(
    ("environ", "options", "line"),
    [
        # OLCF's Frontier user guide: "the most common use", and flux with one task on a node.
        ({"SLURM_JOB_NODELIST": "frontier[00144-00145]", "LMOD_SYSTEM_NAME": "frontier"}, "",
         "srun -u --wait=120 -N 2 -n 16 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1 "
         "--gpu-bind=closest"),
        ({"SLURM_JOB_NODELIST": "frontier00144", "LMOD_SYSTEM_NAME": "frontier"}, "--ppn 1",
         "srun -u --wait=120 -N 1 -n 1 --ntasks-per-node=1 --cpus-per-task=56 --gpus-per-task=8 "
         "--gpu-bind=closest"),
        ({"SLURM_JOB_NODELIST": "nid[001234,001240]", "NERSC_HOST": "perlmutter"}, "",
         "srun -u --wait=120 -N 2 -n 8 --ntasks-per-node=4 --cpus-per-task=32 --cpu-bind=cores "
         "--gpus-per-node=4 --gpu-bind=none"),
        # Any other: what the job asked for, else equal shares of what it got.
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "3", "SLURM_CPUS_PER_TASK": "5",
          "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, "",
         "srun -u --wait=120 -N 2 -n 6 --ntasks-per-node=3 --cpus-per-task=5"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "8",
          "SLURM_JOB_CPUS_PER_NODE": "32"}, "--ppn 1",  # not a quarter of them
         "srun -u --wait=120 -N 1 -n 1 --ntasks-per-node=1 --cpus-per-task=32"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "8",
          "SLURM_JOB_CPUS_PER_NODE": "32"}, "--ppn 8",  # nor more than there are
         "srun -u --wait=120 -N 1 -n 8 --ntasks-per-node=8 --cpus-per-task=4"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "16",
          "SLURM_JOB_CPUS_PER_NODE": "16"}, "--ppn 4",
         "srun -u --wait=120 -N 1 -n 4 --ntasks-per-node=4 --cpus-per-task=4"),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "8(x2)",
          "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_CPUS_PER_NODE": "32(x2)"}, "",
         "srun -u --wait=120 -N 2 -n 16 --ntasks-per-node=8 --cpus-per-task=4"),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "8(x2)",
          "JAX_PLATFORMS": "cpu"}, "", "srun -u --wait=120 -N 2 -n 16 --ntasks-per-node=8"),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "2",
          "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, "",
         "srun -u --wait=120 -N 2 -n 4 --ntasks-per-node=2 --cpus-per-task=32"),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "16,8(x2)"}, "-n 4 --ppn 2",
         "srun -u --wait=120 -N 2 -n 4 --ntasks-per-node=2 --cpus-per-task=4"),
        ({"SLURM_JOB_NODELIST": "n1"}, "", "srun -u --wait=120 -N 1 -n 1 --ntasks-per-node=1"),
    ],
)  # fmt: skip
def test_an_allocation_of_slurms_is_launched_with_srun(job, environ, options, line):
    assert job(*options.split(), srun=True, SLURM_JOB_ID="7", **environ) == line


@pytest.mark.parametrize(
    ("n", "per_host", "hosts", "environ", "accelerators", "expected"),
    [
        (2, None, "", {}, 0, ["ranks 0 to 1, on CPUs"]),
        (2, None, "", {"JAX_PLATFORMS": "cpu"}, 8, ["ranks 0 to 1, on CPUs"]),
        (2, None, "a b", {}, 0, ["rank 0, on CPUs if the host is like this one",
                                 "rank 1, on CPUs if the host is like this one"]),
        (None, None, "", {}, 2, ["rank 0 on device 0, rank 1 on device 1"]),
        (2, None, "", {}, 8, ["rank 0 on device 0+1+2+3, rank 1 on device 4+5+6+7"]),
        (2, None, "", {"CUDA_VISIBLE_DEVICES": "5,3"}, 8,
         ["rank 0 on device 5, rank 1 on device 3"]),
        (None, None, "", {"CUDA_VISIBLE_DEVICES": "-1"}, 8, ["rank 0, on CPUs"]),
        (None, None, "", {"CUDA_VISIBLE_DEVICES": ""}, 8, ["rank 0, on CPUs"]),
        (None, None, "", {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "2,3"}, 8,
         ["rank 0 on device 2, rank 1 on device 3"]),
        (None, None, "", {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "2,3"}, 8,
         ["rank 0 on device 2, rank 1 on device 3"]),
        # Hosts of Polaris have four GPUs. The host that starts the job may have none.
        (None, 2, POLARIS, {}, 0, ["rank 0 on device 0+1, rank 1 on device 2+3",
                                   "rank 2 on device 0+1, rank 3 on device 2+3"]),
        (None, None, "frontier00144 frontier00145", {"LMOD_SYSTEM_NAME": "frontier"}, 0,
         ["ranks 0 to 7, on devices that Slurm chooses",
          "ranks 8 to 15, on devices that Slurm chooses"]),
    ],
)  # fmt: skip
def test_each_rank_has_a_host_and_devices(
    n, per_host, hosts, environ, accelerators, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(launchers, "count_accelerators", lambda: accelerators)
    (tmp_path / "hosts").write_text("".join(f"{host}\n" for host in hosts.split()))
    file = str(tmp_path / "hosts") if hosts else None
    layout = launchers.place_processes(n, per_host, file, environ)
    lines = launchers.placement_lines(layout, environ)
    assert lines == [
        f"host {host}: {text}" for host, text in zip(layout.hosts, expected, strict=True)
    ]


def test_print_says_where_each_rank_is(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    main(["-n", "3", "--print", "--", "train"])
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].endswith(": ranks 0 to 2, on CPUs")
    assert len(said.out.splitlines()) == 1  # the line to copy


@pytest.mark.parametrize(
    ("line", "before"),
    [
        ("mpiexec -n 2 /usr/bin/python3.11 -m jaxgpt.train", "mpiexec -n 2"),
        ("mpirun -x PYTHONPATH=/a/python3 --hostfile python_hosts nsys profile python -m x",
         "mpirun -x PYTHONPATH=/a/python3 --hostfile python_hosts nsys profile"),
        ("mpiexec -n 2 bash -c 'python -m jaxgpt.train'", ""),
        ("mpiexec -wdir /home/u/python-gpt ./run.sh", ""),
    ],
)  # fmt: skip
def test_a_corrected_command_keeps_what_precedes_python(line, before):
    assert shlex.join(words_before_python(shlex.split(line))) == before


def test_print_checks_the_settings_of_training_without_jax(tmp_path):
    own = str(Path(sys.executable).parent)
    train = ("-n", "8", "--print", "--", "python", "-m", "jaxgpt.train", "--mesh", "8,1,1")
    out = tmp_path / "out"
    job = run("launch", *train, "optimizer.name=lion", "--out", out, PATH=own)
    assert job.returncode == 0 and not out.exists(), job.stdout
    assert job.stdout.splitlines()[-1].endswith(f" --mesh 8,1,1 optimizer.name=lion --out {out}")
    for given, words in (
        ("train.batchsize=3", "train.batchsize: unknown key; did you mean train.batch_size?"),
        ("train.batch_size=3", "train.batch_size=3: must be a multiple of data x fsdp = 8"),
        ("optimizer.name=lio", "optimizer.name=lio: must be one of"),
    ):
        job = run("launch", *train, given, PATH=own)
        assert job.returncode == 2 and words in job.stdout, job.stdout
    job = run("launch", *train[:-1], "1,1,4", PATH=own)
    assert "its 4 devices cannot be divided evenly among 8 processes" in job.stdout
    code = f"import sys, jaxgpt.launch as j; j.main({[*train]}); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_batch_script_of_slurms_is_no_launched_process(job):
    """A batch script has a task's variables, and a shell of salloc even has a step."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0"}
    assert job(srun=True, **variables).startswith("srun")
    assert job(srun=True, SLURM_STEP_ID="4294967290", **variables).startswith("srun")


@pytest.mark.parametrize(
    ("mpi", "line"),
    [
        ("MPICH", "mpiexec -n 8"),
        ("Intel MPI", "mpiexec -n 8"),
        ("Open MPI", "mpiexec -n 8 --bind-to none --map-by :OVERSUBSCRIBE"),
    ],
)
def test_without_a_scheduler_this_host_takes_all(job, mpi, line):
    assert job("-n", "8", mpi=mpi) == line


NERSC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001234,001240]", "srun": True}


@pytest.mark.parametrize("own", ["MPICH", None])
@pytest.mark.parametrize(
    ("environ", "line", "reason"),
    [
        ({"hosts": POLARIS, "mpi": "PALS"}, "mpiexec --envall -n 8", "Cray PALS, on Polaris"),
        ({"hosts": AURORA, "mpi": "PALS"}, "mpiexec --envall -n 24", "Cray PALS, on Aurora"),
        (NERSC | {"NERSC_HOST": "perlmutter"}, "srun -u --wait=120 -N 2 -n 8",
         "srun, on Perlmutter"),
        (NERSC, "srun -u --wait=120 -N 2 -n 2", "srun, in job 7"),
        ({"hosts": "a b", "mpi": "Open MPI"}, "mpiexec -n 2 --bind-to none",
         "Open MPI, in job 1.server"),
    ],
)  # fmt: skip
def test_the_sites_launcher_comes_before_the_environments(job, own, environ, line, reason):
    assert job(own=own, **environ).startswith(line)
    if own is None and "mpi" in environ:  # there is nothing to choose between
        reason = reason.partition(",")[0] + ", found in PATH"
    assert f"launch: using {reason}" in job.messages
    assert ("venv/mpiexec is not used" in job.messages) == bool(own)


def test_elsewhere_the_environments_mpiexec_comes_first(job):
    assert job("-n", "2", own="MPICH", mpi="Open MPI") == "venv/mpiexec -n 2"
    assert "using MPICH, installed with this Python\n" in job.messages


def test_the_environments_mpiexec_is_used_if_the_machine_has_none(job):
    assert job(own="MPICH", hosts=POLARIS).startswith("venv/mpiexec -n 8 -ppn 4")
    assert "PATH has no other" in job.messages


def test_processes_are_as_many_as_the_devices_that_are_seen(job, monkeypatch):
    assert job(mpi="MPICH") == "mpiexec -n 1"
    monkeypatch.setattr(launchers, "count_accelerators", lambda: 4)
    assert job() == "mpiexec -n 4"
    assert job(CUDA_VISIBLE_DEVICES="2,3") == "mpiexec -n 2"
    assert job(CUDA_VISIBLE_DEVICES="") == "mpiexec -n 1"
    assert job(CUDA_VISIBLE_DEVICES="0,1", JAX_PLATFORMS="cpu") == "mpiexec -n 1"


def test_hosts_of_ones_own_come_before_the_schedulers(job, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("a slots=2\nb slots=2\n")
    options = ("--hosts", str(mine), "--ppn", "2")
    assert job(*options, hosts="c d", mpi="MPICH") == "mpiexec -n 4 -ppn 2 -hosts a,b"
    # PALS reads names, not slots.
    assert job(*options, mpi="PALS").startswith("mpiexec --envall -n 4 -ppn 2 --hosts a,b ")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c"}
    assert job(*options, srun=True, **slurm).endswith(" --nodelist=a,b")


@pytest.mark.parametrize(
    ("environ", "program_name", "source", "line"),
    [
        ({"PBS_JOBID": "1.server"}, "mpiexec", "PBS_NODEFILE",
         "mpiexec --envall -n 4 -ppn 2 --hosts a,c --cpu-bind depth -d 32"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c"}, "srun", "SLURM_JOB_NODELIST",
         "srun -u --wait=120 -N 2 -n 4 --ntasks-per-node=2 --nodelist=a,c"),
    ],
)  # fmt: skip
def test_after_a_host_is_excluded_the_log_still_names_the_source_of_the_hosts(
    job, tmp_path, environ, program_name, source, line
):
    program(tmp_path / "bin" / program_name, f"echo '{VERSIONS['PALS']}'")
    (tmp_path / "hosts").write_text("a\nb\nc\n")
    if source == "PBS_NODEFILE":
        environ = environ | {"PBS_NODEFILE": str(tmp_path / "hosts")}
    layout = launchers.place_processes(None, 2, None, environ)
    launcher, _ = launchers.find_launcher(layout, environ)
    moved = launchers.place_on(layout, ["a", "c"])
    assert str(layout) == f"6 processes on 3 hosts of {source} (--ppn)"
    assert str(moved) == f"4 processes on 2 hosts of {source} (--ppn)"
    words = launcher(moved, environ)
    assert shlex.join([Path(words[0]).name, *words[1:]]) == line


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ("-n 0", {}, "-n/-np/--np/--nproc/--ntasks: 0: must be a whole number"),
        ("--ppn many", {}, "--ntasks-per-node: many: must be a whole number"),
        ("-n 3", {"hosts": "a b"}, "-n=3: cannot be divided evenly among the 2 hosts"),
        ("-n 5 --ppn 2", {"hosts": "a b"}, "-n=5: must be a multiple of --ppn=2, and at most 4"),
        ("-n 3 --ppn 2", {"hosts": "a b"}, "-n=3: must be a multiple of --ppn=2"),
        ("--ppn 3", {"hosts": "a a b b"}, "--ppn=3: .*PBS_NODEFILE allows only 2; .*mpiprocs"),
        ("-n 6", {"hosts": "a a b b"}, "-n=6: 3 processes per host, .*PBS_NODEFILE allows only 2"),
        ("--ppn 8", {"hosts": POLARIS}, "--ppn=8: .*a Polaris host has 4 devices; .*JAX_PLATFORMS"),
        ("", {"hosts": POLARIS, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
         "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5: 6 processes per host, but a Polaris host has 4"),
        ("", {"PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE=/nowhere: .*cannot be read"),
        ("--hosts /nowhere", {}, "--hosts=/nowhere: .*cannot be read"),
        ("", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1"}, r"SLURM_JOB_NODELIST=a\[1: "),
        ("", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}, "SLURM_JOB_ID=7: srun is not in"),
        ("", {"mpi": "mpiexec_mpt 2.25"}, "mpiexec=.*'mpiexec_mpt 2.25', which is not"),
        ("", {"PATH": "/nowhere"}, r"PATH=/nowhere: .*no mpiexec.*pip install 'jaxgpt\[mpi\]'"),
        ("", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK=0: .*itself started by a launcher"),
        ("", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "SLURM_PROCID=0: "),
        ("--nonsense", {}, "unknown argument --nonsense; see --help"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused_in_a_sentence(job, capsys, options, environ, words):
    with pytest.raises(SystemExit, match="2"):
        job(*options.split(), **environ)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{words}", line), line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("", "--restarts=3: each restart would begin a new run; also give --out DIR"),
        ("--out r checkpoint.resume=False", "checkpoint.resume=False: --restarts=3 could not"),
        ("--out r --mesh 3,1,1", "its 3 devices cannot be divided evenly among 2 processes"),
    ],
)
def test_restarts_that_could_not_continue_the_run_are_refused(settings, words):
    ended = run("launch", *"-n 2 --restarts 3 -- python -m jaxgpt.train".split(), *settings.split())
    assert ended.returncode == 2 and words in ended.stdout


def test_nothing_to_start_is_refused(capsys):
    for argv in ([], ["-n", "2"], ["-n", "2", "--"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
        assert "put it after --" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["-n", "2", "--", "jaxgpt.train"])
    assert capsys.readouterr().err.endswith("use python -m jaxgpt.train\n")


REPORT = """
import os, sys, time
time.sleep(0.2 * int(os.environ["PMI_RANK"]))  # for whole lines
print("rank", os.environ["PMI_RANK"], sys.executable, os.environ["JAXGPT_JOB_START"], *sys.argv[1:])
sys.exit(75)
"""


def test_a_command_becomes_processes_of_this_python_with_one_job_start():
    own = str(Path(sys.executable).parent)  # whatever other mpiexec there is would be spoken of
    job = run("launch", "-n", "2", "--", "python", "-c", REPORT, "a b", "--", "$c", PATH=own)
    assert job.returncode == 75  # a job script acts on it
    said = r"launch: 2 processes on this host \(-n\)\nlaunch: using .*\nlaunch: \S+/mpiexec -n 2 "
    assert re.search(said, job.stdout)
    ranks = [line for line in job.stdout.splitlines() if line.startswith("rank")]
    words = [line.split(maxsplit=4) for line in sorted(ranks)]
    assert [w[:3] for w in words] == [["rank", str(i), sys.executable] for i in range(2)]
    assert words[0][3] == words[1][3] and float(words[0][3]) > 1.7e9
    assert words[0][4] == "a b -- $c"


SRUN = """#!/bin/bash
# As srun does: it passes SIGUSR1 on, kills the processes on SIGTERM, and asks again on SIGINT.
trap 'exit 75' USR1
trap 'exit 137' TERM
trap '' INT
echo up
for _ in {1..300}; do sleep 0.1; done
"""


def supervised(launcher, folder):
    """Return a supervisor whose launcher, this script, is up."""
    (folder / "srun").write_text(launcher)
    (folder / "srun").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxgpt.launch", "--restarts", "1", "--", "true"],
        env=environment(**variables) | {"PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout.readline() == "up\n"
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP])
def test_under_srun_every_signal_stops_the_run_with_a_checkpoint(number, tmp_path):
    job = supervised(SRUN, tmp_path)
    job.send_signal(number)
    assert job.wait(60) == 75


MPIEXEC = """#!/bin/bash
# As MPICH's mpiexec does: it passes SIGUSR1 and SIGTERM on, and aborts on the second SIGINT.
trap '' USR1 TERM
trap '[ "$again" ] && exit 0; again=1' INT
echo up
for _ in {1..300}; do sleep 0.1; done
"""


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    job = supervised(MPIEXEC, tmp_path)
    job.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1)
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == 130


QUICKLY = """
from jaxgpt.cluster import supervisor
from jaxgpt.launch import main

supervisor.RETRY = 0.01
main()
"""


@pytest.mark.parametrize(
    ("give_up_after", "tries", "reason"),
    [
        (2, 2, "--give-up-after 2: no new checkpoint after 2 failures; read the output above"),
        (0, 5, "--restarts 4: no attempts left"),  # three attempts by default
    ],
)
def test_it_gives_up_after_so_many_tries_without_a_checkpoint(
    give_up_after, tries, reason, tmp_path
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")  # a probe that finds nothing wrong
    python.chmod(0o755)
    options = ("--restarts", "4", "--give-up-after", str(give_up_after), "--", "false")
    script = f"import sys; sys.executable = {str(python)!r}\n{QUICKLY}"
    job = subprocess.run(
        [sys.executable, "-c", script, *options],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert job.returncode == 1
    assert job.stderr.count(" ended with status 1") == tries
    assert f"launch: {reason}" in job.stderr.splitlines()[-1]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_job_that_a_closed_pipe_ends_is_tried_again_only_if_somebody_reads(is_read, tmp_path):
    """mpiexec itself can die of SIGPIPE, if a job ends at once."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")  # a probe that finds nothing wrong
    python.chmod(0o755)
    script = f"import sys; sys.executable = {str(python)!r}\n{QUICKLY}"
    reader, writer = os.pipe()
    if not is_read:
        os.close(reader)
    job = subprocess.run(
        [sys.executable, "-c", script, "--restarts", "1", "--", "sh", "-c", "exit 141"],
        stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert job.returncode == 141
    assert job.stderr.count(" ended with status 141") == (2 if is_read else 0)


FAILS = """
import json, os, socket, sys
host, port = os.environ["JAXGPT_SUPERVISOR"].split(":")
message = {"job": os.environ["JAXGPT_JOB"], "run": ".", "step": 9, "ending": False, "resumed": 0}
with socket.create_connection((host, int(port))) as link:
    link.sendall(json.dumps(message | {"saved": int(sys.argv[1])}).encode() + b"\\n")
sys.exit(1)
"""


def test_a_continued_run_gives_up_after_tries_without_a_newer_checkpoint():
    script = FAILS.replace('"resumed": 0', '"resumed": 8')
    words = ["--restarts", "5", "--give-up-after", "1", "--", "python", "-c", script, "8"]
    job = subprocess.run(
        [sys.executable, "-m", "jaxgpt.launch", *words],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert job.returncode == 1
    assert job.stderr.count(" ended with status 1") == 1 and "--give-up-after 1" in job.stderr


TRAINS = """
import json, os, socket, time
host, port = os.environ["JAXGPT_SUPERVISOR"].split(":")
message = {"job": os.environ["JAXGPT_JOB"], "run": ".", "step": 9, "ending": True, "resumed": 0}
with socket.create_connection((host, int(port))) as link:
    link.sendall(json.dumps(message | {"saved": 9}).encode() + b"\\n")
"""


def test_a_script_may_go_on_after_training(monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "SLOW_DISK", 1.0)
    layout = launchers.place_processes(1, None, None, {})
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "run.sh").write_text(f"{sys.executable} {tmp_path}/train.py; sleep 5; exit 7")
    script = ["sh", str(tmp_path / "run.sh")]
    job = Supervisor(layout, lambda layout, environ: [], script, restarts=0)
    assert job.run() == 7  # not killed after 1 s


CONNECTS_AGAIN = """
import json, os, socket, time
host, port = os.environ["JAXGPT_SUPERVISOR"].split(":")
message = {"job": os.environ["JAXGPT_JOB"], "run": ".", "ending": False, "resumed": 0, "saved": 0}
links = [socket.create_connection((host, int(port))) for _ in range(2)]
for step, link in enumerate(links):
    link.sendall(json.dumps(message | {"step": step}).encode() + b"\\n")
    time.sleep(0.5)
for link in links[:N_CLOSED]:
    link.close()
time.sleep(5)
raise SystemExit(7)
"""


@pytest.mark.parametrize(("n_closed", "status"), [(1, 7), (2, 128 + signal.SIGTERM)])
def test_a_launcher_is_killed_after_process_0_exits_but_not_after_it_reconnects(
    n_closed, status, monkeypatch
):
    monkeypatch.setattr(supervisor, "COMMAND", 1.0)
    layout = launchers.place_processes(1, None, None, {})
    script = CONNECTS_AGAIN.replace("N_CLOSED", str(n_closed))
    job = Supervisor(layout, lambda layout, environ: [], [sys.executable, "-c", script], restarts=0)
    assert job.run() == status


def test_attempts_after_the_first_have_their_own_start_time():
    script = "import os; print('began', os.environ['JAXGPT_JOB_START']); raise SystemExit(1)"
    job = run(
        "launch", "-n", "1", "--restarts", "1", "--", "python", "-c", script,
        JAXGPT_JOB_START="12.5",
    )  # fmt: skip
    first, second = [line.split()[1] for line in job.stdout.splitlines() if line[:5] == "began"]
    assert first == "12.5" and float(second) > 1e9


@pytest.mark.parametrize(("saved", "status"), [(0, 128 + signal.SIGTERM), (8, 75)])
def test_a_job_that_is_stopped_between_tries_returns_75_only_with_a_checkpoint(saved, status):
    words = ["-m", "jaxgpt.launch", "--restarts", "3", "--", "python", "-c", FAILS, str(saved)]
    job = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, text=True, env=environment()
    )
    while "attempt 1 ended with status 1" not in job.stderr.readline():
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == status


@pytest.mark.parametrize(
    ("n_outages", "status", "said"),
    [
        (2, 0, "launch: restart 1 of 4\n"),
        # The attempt and each outage count.
        (3, 1, "--give-up-after 4: no new checkpoint after 4 failures; "),
    ],
)
def test_hosts_that_are_all_unhealthy_are_probed_again(n_outages, status, said, tmp_path):
    """As after a short outage of a shared file system, which every host reports."""
    probes, tries = tmp_path / "probes", tmp_path / "tries"
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho >> {probes}\ntest $(wc -l < {probes}) -gt {n_outages} && exit 0\n"
        "echo 'error: runs/a: cannot be written to'; exit 1\n"
    )
    python.chmod(0o755)
    script = f"import sys; sys.executable = {str(python)!r}\n{QUICKLY}"
    options = ("--restarts", "4", "--give-up-after", "4", "--")
    second = f"echo >> {tries}; test $(wc -l < {tries}) -eq 2"
    job = subprocess.run(
        [sys.executable, "-c", script, *options, "sh", "-c", second],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert job.returncode == status and said in job.stderr, job.stderr
    assert job.stderr.count(": runs/a: cannot be written to\n") == n_outages
    assert job.stderr.count("no host is healthy, so none is excluded\n") == n_outages
    assert "excluding" not in job.stderr


def test_a_signal_ends_a_job_whose_hosts_are_being_probed(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid\n"
                      "exec sleep 600\n")  # fmt: skip
    python.chmod(0o755)
    script = f"import sys; sys.executable = {str(python)!r}\n{QUICKLY}"
    job = subprocess.Popen(
        [sys.executable, "-c", script, "--restarts", "4", "--", "false"],
        stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    while not (tmp_path / "pid").exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, messages = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert messages.endswith("launch: SIGTERM: no attempt is running, so the job ends now\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_supervisor_asks_for_mpiexecs_version_once(job, tmp_path):
    layout = launchers.place_processes(1, None, None, {})
    program(tmp_path / "bin" / "mpiexec", f"echo '{VERSIONS['MPICH']}'")
    launcher, _ = launchers.find_launcher(layout, {})
    supervisor = Supervisor(layout, launcher, ["false"], restarts=1, give_up_after=1)
    program(tmp_path / "bin" / "mpiexec", "exit 7")  # as after 180 s on a busy file system
    assert supervisor.run() == 7


def test_the_job_start_of_a_script_is_kept():
    script = "import os; print(os.environ['JAXGPT_JOB_START'])"
    job = run("launch", "-n", "1", "--", "python", "-c", script, JAXGPT_JOB_START="12.5")
    assert job.stdout.splitlines()[-1] == "12.5"


def test_launching_waits_for_no_jax():
    heavy = "{'jax', 'numpy', 'mpi4py', 'rich', 'orbax'} & set(sys.modules)"
    code = f"import sys, jaxgpt.launch; sys.exit(bool({heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "options",
    [
        "-n 2 --ppn 2",
        "-n2",
        "-np 2",
        "--np 2",
        "--nproc-per-node 2",
        "--nproc_per_node=2",
        "-ppn 2",
    ],
)
@pytest.mark.parametrize(
    "file", ["--hosts {}", "--hostfile {}", "-f {}", "-f{}", "-machinefile {}"]
)
def test_options_of_mpiexec_and_torchrun_mean_the_same(options, file, tmp_path, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\n")
    words = f"{options} {file.format(hosts)} --print".split()
    for dashes in [["--"], []]:
        launch.main([*words, *dashes, "python", "-m", "jaxgpt.train", "--mesh", "2,1,1"])
    with_dashes, without = capsys.readouterr().out.splitlines()
    assert with_dashes == without
    assert "-n 2" in without and "node1" in without
    assert without.endswith("-m jaxgpt.train --mesh 2,1,1")


def test_a_double_dash_in_the_command_is_kept(capsys):
    for words in ("-n 2 --print sh script -- -n 3", "-n 2 --print -- sh script -- -n 3"):
        launch.main(words.split())
        assert capsys.readouterr().out.endswith(" sh script -- -n 3\n")
