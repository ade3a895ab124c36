"""This process's rank, job size and launcher, read from environment variables."""

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxgpt.cluster.hosts import expand_node_list
from jaxgpt.cluster.machines import find_machine, high_speed_name
from jaxgpt.config import UsageError

COORDINATOR, RANK, SIZE = "JAXGPT_COORDINATOR", "JAXGPT_RANK", "JAXGPT_SIZE"

# (rank variable, size variable, launcher name), most reliable first. mpi4py is imported only if one
# of these variables is set, because MPI can abort on login nodes.
MPI_LAUNCHERS = (
    ("PALS_RANKID", "PMI_SIZE", "Cray PALS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_RANK", "PMI_SIZE", "MPICH"),
    ("PMIX_RANK", None, "PMIx"),
)
JOB_NAMES = ("PALS_APID", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID")
SLURM_WITH_PMI = "Slurm with PMI"
JOB_START = "JAXGPT_JOB_START"  # Unix seconds; set by the scripts in launch/ and by jaxgpt.launch
# Set by `jaxgpt.launch --restarts`:
SUPERVISOR = "JAXGPT_SUPERVISOR"  # host:port of the supervisor; process 0 reports progress there
JOB = "JAXGPT_JOB"  # ID of the attempt
# Slurm's reserved step IDs for interactive shells, batch scripts and the extern step.
SLURM_PSEUDO_STEPS = range(4294967290, 4294967296)


class SingleRankUsageError(UsageError):
    """A `UsageError` that may be raised on only some of the processes.

    `job_exit_handler` prints the message on every process that raises the error.
    """


@dataclass(frozen=True)
class Launch:
    """A process's identity according to its launcher."""

    launcher: str
    variable: str | None = None  # the variable that gives the rank, as `NAME=value`
    through: Literal["mpi", "tcp", None] = None  # None for a single process without MPI
    rank: int = 0
    size: int | None = 1  # None if only MPI knows the size
    address: str | None = None  # host:port of process 0 if `through` is "tcp"


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Identify this process from the first launcher found in its environment.

    The order is: jaxgpt's variables, torchrun, srun with a PMI version that MPICH cannot use, MPI
    launchers (including MPI under srun), plain srun, and torch's RANK and WORLD_SIZE. If none is
    found, the job has a single process. Raises `UsageError` if the variables that it needs are
    malformed or, in a job without MPI, incomplete or inconsistent.
    """
    if RANK in environ or SIZE in environ:
        return _over_tcp(environ, "by hand", RANK, SIZE, environ.get(COORDINATOR, ""))
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    step = environ.get("SLURM_STEP_ID", "")
    in_step = step.isdecimal() and int(step) not in SLURM_PSEUDO_STEPS
    by_srun = started_by_srun(environ)
    if by_srun and in_step and environ.get("SLURM_MPI_TYPE") == "pmi2":
        # Do not use MPI: Slurm 22.05 reads PMI messages in 1,024-byte chunks, and MPICH 5 can
        # send longer messages, which deadlocks both sides.
        return replace(slurm_step(environ), launcher=SLURM_WITH_PMI)
    if in_step or not by_srun:  # some sites set MPI variables in interactive shells
        for variable, size, launcher in MPI_LAUNCHERS:
            if variable in environ:
                return _mpi(environ, variable, size, launcher)
    if in_step and "SLURM_PROCID" in environ:
        return slurm_step(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    return Launch("single process")


def check_no_launcher(remedy: str) -> None:
    """Raise `UsageError` if a launcher, such as mpiexec or srun, started this process.

    Call this in commands that start their own processes. Otherwise, every process of the job would
    start them, and they would inherit the launcher's variables. The error message ends with
    `remedy`. Also raises `UsageError` if the launcher's variables are invalid.
    """
    launch = find_launch(os.environ)
    if launch.through is not None:
        raise UsageError(f"{launch.variable}: is set by a launcher; {remedy}")


def rank_from_env() -> int:
    """Return this process's rank from the environment, or 0 if its variables are invalid."""
    try:
        return find_launch(os.environ).rank
    except UsageError:
        return 0


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun, not mpiexec, set the MPI rank in the environment."""
    names = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID")
    rank = next((environ[name] for name in names if name in environ), "")
    size = environ.get("PMI_SIZE", environ.get("SLURM_STEP_NUM_TASKS"))
    return (
        "SLURM_STEP_ID" in environ
        and not {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"} & set(environ)
        and (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")) == (rank, size)
    )


def slurm_step(environ: Mapping[str, str]) -> Launch:
    """Identify, without using MPI, a process that srun started.

    JAXGPT_COORDINATOR is the address of process 0. Set it if the step is heterogeneous (has several
    components) or uses an arbitrary task distribution. By default, the step's first host is assumed
    to run process 0. If there is only one host, or no node list, the default host is 127.0.0.1. The
    default port is below the ephemeral range and is derived from the job and step IDs. Raises
    `UsageError` if a variable that it needs is invalid, if the rank or the number of tasks is
    missing, or if the rank is not less than the number of tasks.
    """
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    address = environ.get(COORDINATOR)
    if not address:
        lists = [k for k in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if k in environ]
        hosts = expand_node_list(environ[lists[0]], lists[0]) if lists else ()
        host = high_speed_name(find_machine(hosts[0], environ), hosts[0]) if hosts[1:] else ""
        step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        address = f"{host or '127.0.0.1'}:{16384 + zlib.crc32(step.encode()) % 16000}"
    return _over_tcp(environ, "Slurm", "SLURM_PROCID", size, address)


def job_name(environ: Mapping[str, str]) -> str:
    """Return a name for this job that can be used in a path.

    If one of the variables in `JOB_NAMES` is set, the job's processes on all hosts get the same
    name. Concurrent jobs may also share this name if they run in the same PBS or Slurm job and
    their launchers set no job ID.

    If none is set, two processes on the same host share a name if their session leaders have the
    same parent. Different jobs can therefore share a name, for example in two tmux windows or
    notebooks. If a session leader is not in /proc, even unrelated jobs may share a name.
    """
    job = next((environ[name] for name in JOB_NAMES if environ.get(name)), None)
    stat = Path(f"/proc/{os.getsid(0)}/stat")
    if job is None and stat.exists():  # Hydra gives each process its own session
        job = f"{socket.gethostname()}-{stat.read_text().rpartition(')')[2].split()[1]}"
    return f"{job}.{environ.get('SLURM_STEP_ID', '')}".replace("/", "_")


def _torchrun(environ: Mapping[str, str]) -> Launch:
    if given := environ.get(COORDINATOR):
        return _over_tcp(environ, "RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", given)
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    size = read_int(environ, "WORLD_SIZE")
    if unset and size is not None and size > 1:
        raise UsageError(
            f"WORLD_SIZE={size}: {' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not "
            "set; set both to the host and a free port of process 0, or unset RANK and WORLD_SIZE "
            "to run a single process"
        )
    key = "MASTER_ADDR:MASTER_PORT"
    launch = _over_tcp(environ, "RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", f"{host}:{port}", key)
    if launch.through and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = f"{host}:{int(port) + 1}"  # torchrun itself uses MASTER_PORT
        check_address("MASTER_ADDR:MASTER_PORT + 1", address)
        return replace(launch, address=address)
    return launch


def _over_tcp(
    environ: Mapping[str, str],
    launcher: str,
    rank_key: str,
    size_key: str,
    address: str,
    address_key: str = COORDINATOR,
) -> Launch:
    rank, size = read_int(environ, rank_key), read_int(environ, size_key)
    if rank is None or size is None or rank >= size:
        raise UsageError(
            f"{rank_key}={environ.get(rank_key, '')}, {size_key}={environ.get(size_key, '')}: the "
            "rank must be less than the number of processes; set both variables or neither"
        )
    if size > 1:
        check_address(address_key, address)
    through = "tcp" if size > 1 else None
    return Launch(launcher, f"{rank_key}={rank}", through, rank, size, address)


def _mpi(environ: Mapping[str, str], variable: str, size: str | None, launcher: str) -> Launch:
    if started_by_srun(environ):
        launcher, size = SLURM_WITH_PMI, "SLURM_STEP_NUM_TASKS"
    elif any(name.startswith("I_MPI_HYDRA") for name in environ):
        launcher = "Intel MPI"
    rank = read_int(environ, variable) or 0
    return Launch(launcher, f"{variable}={rank}", "mpi", rank, read_int(environ, size))


def check_address(key: str, address: str) -> None:
    """Raise a `UsageError` about `key` unless `address` is host:port, with a port from 1 to 65535.

    The host need not resolve, but it must have an IDNA encoding, with at most 63 characters per
    label.
    """
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # fails if a label is empty or too long
    except UnicodeError:
        host = ""
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{key}={address}: must be host:port of process 0, such as node001:29500; a "
            "single-process job does not need a rank and size"
        )


def read_int(environ: Mapping[str, str], key: str | None) -> int | None:
    """Return the environment variable `key` as an integer.

    Returns None if `key` is None, or if the variable is unset or empty. Raises `UsageError` if the
    value is not a whole number.
    """
    value = (environ.get(key) if key else None) or None  # treat an empty value as unset
    if value is not None and not value.isdecimal():
        raise UsageError(f"{key}={value}: must be a whole number; correct or unset it")
    return None if value is None else int(value)
