"""A process as its launcher describes it: environment variables, read without side effects.

Names are those of MPICH's and Intel MPI's Hydra (PMI_*, MPI_LOCALRANKID), Open MPI
(OMPI_COMM_WORLD_*), PMIx, Cray PALS, Slurm's srun (https://slurm.schedmd.com/srun.html) and
torchrun (RANK, WORLD_SIZE, MASTER_ADDR).
"""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "Hydra"),
)
SLURM_WITH_PMI = "Slurm with PMI"
# Slurm steps that are not ours: a shell on a node, a batch script, its surroundings.
SLURM_PSEUDO_STEPS = range(4294967290, 4294967296)


class SingleRankUsageError(UsageError):
    """A user's mistake that perhaps only this process sees: it prints the error itself."""


@dataclass(frozen=True)
class Launch:
    """Description of one process by its launcher."""

    launcher: str
    """In words."""
    variable: str | None = None
    """The variable that told it, `NAME=value`."""
    through: Literal["mpi", "tcp", None] = None
    """Transport by which the processes meet; None for a job of one process."""
    rank: int = 0
    size: int | None = 1
    """None where only MPI knows."""
    local_rank: int | None = None
    """Rank among the processes of this host; None where it is not said."""
    address: str | None = None
    """host:port at which process 0 can be found, where it is known."""


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Find this process in its environment.

    The first of these decides: JAXGPT_COORDINATOR with JAXGPT_RANK and JAXGPT_SIZE; torchrun, which
    others may have started; srun with Slurm's own PMI; an MPI launcher; a step of Slurm; RANK and
    WORLD_SIZE; else a single process.

    Raises:
        UsageError: if variables contradict each other or are no numbers.
    """
    if RANK in environ or SIZE in environ:
        return _explicit(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    in_shell = step is not None and _is_pseudo_step(step)
    by_srun = started_by_srun(environ)
    with_pmi2 = by_srun and not in_shell and environ.get("SLURM_MPI_TYPE") == "pmi2"
    if with_pmi2 and _begins_on_first_host(environ):
        # Without MPI: Slurm 22.05 reads PMI's lines in pieces of 1,024 bytes, and those of
        # MPICH 5 can be longer, upon which both wait for ever.
        return replace(slurm_step(environ), launcher=SLURM_WITH_PMI)
    if not (in_shell and by_srun):  # some sites give that shell MPI's variables
        for variable, size, launcher in MPI_LAUNCHERS:
            if variable in environ:
                return _mpi(environ, variable, size, launcher)
    if step is not None and "SLURM_PROCID" in environ and not in_shell:
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


def _begins_on_first_host(environ: Mapping[str, str]) -> bool:
    """Return whether process 0 is where `slurm_step` takes it to be."""
    is_arbitrary = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    return not is_arbitrary and "SLURM_HET_SIZE" not in environ


def slurm_step(environ: Mapping[str, str]) -> Launch:
    """Describe a process that srun started, by Slurm's variables alone.

    Process 0 runs on the step's first host, but of steps of several components and of arbitrary
    distributions (there, JAXGPT_COORDINATOR is needed). Its port follows from the job and the
    step, below the ports that systems hand out by themselves.
    """
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, n_processes = _rank_and_size(environ, "SLURM_PROCID", size)
    key = next((k for k in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if k in environ), None)
    hosts = expand_node_list(environ[key], key) if key else ("127.0.0.1",)
    job = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    port = 16384 + zlib.crc32(".".join(job).encode()) % 16000
    host = "127.0.0.1" if len(hosts) == 1 else fast_name(hosts[0], environ)
    if environ.get(COORDINATOR):
        check_address(COORDINATOR, environ[COORDINATOR])
    return Launch(
        launcher="Slurm",
        variable=f"SLURM_PROCID={rank}",
        through="tcp" if n_processes > 1 else None,
        rank=rank,
        size=n_processes,
        local_rank=_number(environ, "SLURM_LOCALID"),
        address=environ.get(COORDINATOR) or f"{host}:{port}",
    )


def fast_name(host: str, environ: Mapping[str, str]) -> str:
    """Return a host's name on the high-speed network of a known machine; elsewhere its name."""
    machine = find_machine(host, environ)
    return high_speed_name(machine, host) if machine else host


def _explicit(environ: Mapping[str, str]) -> Launch:
    rank, size = _rank_and_size(environ, RANK, SIZE)
    address = environ.get(COORDINATOR, "")
    if size > 1 and not address:
        raise UsageError(
            f"{COORDINATOR}: is not set; {SIZE}={size} processes need it, such as node001:29500"
        )
    if size > 1:
        check_address(COORDINATOR, address)
    return Launch(
        launcher="by hand",
        variable=f"{RANK}={rank}",
        through="tcp" if size > 1 else None,
        rank=rank,
        size=size,
        address=address or None,
    )


def _mpi(environ: Mapping[str, str], variable: str, size: str | None, launcher: str) -> Launch:
    if started_by_srun(environ):
        launcher, size = SLURM_WITH_PMI, "SLURM_STEP_NUM_TASKS"
    elif any(name.startswith("I_MPI_HYDRA") for name in environ):
        launcher = "Intel MPI"
    rank = _number(environ, variable) or 0
    n_processes = _number(environ, size) if size else None
    return Launch(
        launcher=launcher,
        variable=f"{variable}={environ[variable]}",
        through="mpi",
        rank=0 if variable == "MPI_LOCALRANKID" else rank,
        size=n_processes,
    )


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


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if size > 1 and not (host and port):
        raise UsageError(
            f"WORLD_SIZE={size}: without MASTER_ADDR and MASTER_PORT the processes cannot find "
            f"each other; set both, or unset RANK and WORLD_SIZE for a single process"
        )
    if size > 1:
        check_address("MASTER_ADDR:MASTER_PORT", f"{host}:{port}")
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = str(int(port) + 1)  # torchrun itself listens at the port
    return Launch(
        launcher="RANK and WORLD_SIZE",
        variable=f"RANK={rank}",
        through="tcp" if size > 1 else None,
        rank=rank,
        size=size,
        local_rank=_number(environ, "LOCAL_RANK"),
        address=f"{host}:{port}" if size > 1 else None,
    )


def check_address(key: str, address: str) -> None:
    """Check that an address is host:port.

    Raises:
        UsageError: naming `key`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{key}={address}: must be host:port, such as node001:29500")


def _is_pseudo_step(step: str) -> bool:
    return not step.isdecimal() or int(step) in SLURM_PSEUDO_STEPS


def _rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    values = _number(environ, rank), _number(environ, size)
    for given, missing in ((rank, size), (size, rank)):
        if _number(environ, missing) is None:
            raise UsageError(
                f"{given}={environ.get(given)}: {missing} is not set; set both, or neither"
            )
    if not 0 <= values[0] < values[1]:
        raise UsageError(f"{rank}={values[0]}: must be at least 0 and less than {size}={values[1]}")
    return values


def _number(environ: Mapping[str, str], key: str) -> int | None:
    value = environ.get(key)
    if value is None:
        return None
    if not value.isdecimal():
        raise UsageError(f"{key}={value}: must be a whole number, as a launcher sets it")
    return int(value)
