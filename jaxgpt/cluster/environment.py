"""A process as its launcher describes it: environment variables, read without side effects."""

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

# (variable with the rank, variable with the size, launcher's name), the surest first.
# Without one of them mpi4py is not imported: it can abort on login nodes.
MPI_LAUNCHERS = (
    ("PALS_RANKID", "PMI_SIZE", "Cray PALS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_RANK", "PMI_SIZE", "MPICH"),
    ("PMIX_RANK", None, "PMIx"),
)
JOB_NAMES = ("PALS_APID", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID")
SLURM_WITH_PMI = "Slurm with PMI"
# Set by `jaxgpt.launch --restarts`:
SUPERVISOR = "JAXGPT_SUPERVISOR"  # host:port at which process 0 says how far the job has come
JOB = "JAXGPT_JOB"  # the name of one try, in the environment of each of its processes
# Slurm steps that are not ours: a shell on a node, a batch script, its surroundings.
SLURM_PSEUDO_STEPS = range(4294967290, 4294967296)


class SingleRankUsageError(UsageError):
    """A user's mistake that perhaps only this process sees: it prints the error itself."""


@dataclass(frozen=True)
class Launch:
    """Description of one process by its launcher."""

    launcher: str
    variable: str | None = None  # the variable that told it, `NAME=value`
    through: Literal["mpi", "tcp", None] = None  # None for a job of one process
    rank: int = 0
    size: int | None = 1  # None where only MPI knows
    address: str | None = None  # host:port at which process 0 can be found, where it is known


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Find this process by the first launcher in its environment; `UsageError` if it is wrong.

    In this order: jaxgpt's own variables, torchrun, srun with a PMI that MPICH cannot use, MPI's
    launchers (also below srun), srun, torch's variables; otherwise it is a single process.
    """
    if RANK in environ or SIZE in environ:
        return _over_tcp(environ, "by hand", RANK, SIZE, environ.get(COORDINATOR, ""))
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    step = environ.get("SLURM_STEP_ID", "")
    in_step = step.isdecimal() and int(step) not in SLURM_PSEUDO_STEPS
    by_srun = started_by_srun(environ)
    if by_srun and in_step and environ.get("SLURM_MPI_TYPE") == "pmi2":
        # Without MPI: Slurm 22.05 reads PMI's lines in pieces of 1,024 bytes, and those of
        # MPICH 5 can be longer, upon which both wait for ever.
        return replace(slurm_step(environ), launcher=SLURM_WITH_PMI)
    if in_step or not by_srun:  # some sites give a shell on a node MPI's variables
        for variable, size, launcher in MPI_LAUNCHERS:
            if variable in environ:
                return _mpi(environ, variable, size, launcher)
    if in_step and "SLURM_PROCID" in environ:
        return slurm_step(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    return Launch("single process")


def rank_from_env() -> int:
    """Return this process's rank by its environment alone, before the job is up."""
    try:
        return find_launch(os.environ).rank
    except UsageError:
        return 0


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process itself, and not an mpiexec that srun started."""
    names = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID")
    rank = next((environ[name] for name in names if name in environ), None)
    size = environ.get("PMI_SIZE", environ.get("SLURM_STEP_NUM_TASKS"))
    return (
        "SLURM_STEP_ID" in environ
        and not {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"} & set(environ)
        and (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")) == (rank, size)
    )


def slurm_step(environ: Mapping[str, str]) -> Launch:
    """Describe a process that srun started, by Slurm's variables alone.

    Process 0 runs on the step's first host, unless the step has several components or an arbitrary
    distribution (then set JAXGPT_COORDINATOR); the port is below those that systems hand out.
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
    """Return a name that the processes of this job share, and no other job at the same time."""
    job = next((environ[name] for name in JOB_NAMES if environ.get(name)), None)
    stat = Path(f"/proc/{os.getsid(0)}/stat")
    if job is None and stat.exists():  # Hydra starts each process in a session of its own
        job = f"{socket.gethostname()}-{stat.read_text().rpartition(')')[2].split()[1]}"
    return f"{job}.{environ.get('SLURM_STEP_ID', '')}".replace("/", "_")


def _torchrun(environ: Mapping[str, str]) -> Launch:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    key = "MASTER_ADDR:MASTER_PORT"
    launch = _over_tcp(environ, "RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", f"{host}:{port}", key)
    if launch.through and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return replace(launch, address=f"{host}:{int(port) + 1}")  # torchrun listens at the port
    return launch


def _over_tcp(
    environ: Mapping[str, str],
    launcher: str,
    rank_key: str,
    size_key: str,
    address: str,
    address_key: str = COORDINATOR,
) -> Launch:
    rank, size = number(environ, rank_key), number(environ, size_key)
    if rank is None or size is None or rank >= size:
        raise UsageError(
            f"{rank_key}={environ.get(rank_key, '')}, {size_key}={environ.get(size_key, '')}: must "
            "be a rank and a number of processes that is larger; set both, or neither"
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
    rank = number(environ, variable) or 0
    return Launch(launcher, f"{variable}={rank}", "mpi", rank, number(environ, size))


def check_address(key: str, address: str) -> None:
    """Raise `UsageError`, naming `key`, unless an address is host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{key}={address}: must be host:port, such as node001:29500, at which processes meet; "
            "a single process needs no rank and size"
        )


def number(environ: Mapping[str, str], key: str | None) -> int | None:
    value = (environ.get(key) if key else None) or None  # an empty one is not set
    if value is not None and not value.isdecimal():
        raise UsageError(f"{key}={value}: must be a whole number, as launchers set it")
    return None if value is None else int(value)
