"""The command line that starts a job: srun, or mpiexec from PALS, MPICH, Intel MPI or Open MPI."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.cluster.environment import read_int
from jaxgpt.cluster.hardware import count_accelerators, own_cpus, visible_devices
from jaxgpt.cluster.hosts import HOST_FILES, job_hosts
from jaxgpt.cluster.machines import Machine, find_machine
from jaxgpt.cluster.timeouts import SLOW_DISK
from jaxgpt.config import UsageError

# Open MPI passes an environment variable to other hosts only if -x names it.
PASSED_ON = re.compile(
    r"(JAX|XLA_|NCCL_|RCCL_|FI_|CUDA_|ROCR_|HIP_|ZE_|OMP_|HF_|WANDB_)\w*|PATH|LD_LIBRARY_PATH"
    r"|GLIBC_TUNABLES|MALLOC_\w*|LD_PRELOAD|(TF|UCX)_\w*"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX|(?i:\w+_proxy)|PBS_JOBID|PBS_O_HOST"
)
NO_ACCELERATORS = "no accelerators found on this host: 1 per host, --ppn P for more"
CPUS_ONLY = "JAX_PLATFORMS=cpu: 1 per host, --ppn P for more"


@dataclass(frozen=True)
class ProcessLayout:
    """Assignment of a job's processes to hosts."""

    hosts: tuple[str, ...]  # hosts that run processes
    named_by: str  # source of `hosts`: `--hosts`, a variable, or `this host`
    host_file: str | None  # path of the host file; None without one, or if `has_moved` is True
    n_processes: int
    per_host: int
    reason: str  # reason for `per_host`, for the log
    machine: Machine | None
    spares: tuple[str, ...] = ()  # hosts of the job that run no processes
    has_moved: bool = False  # True if `place_on` has changed `hosts`

    @property
    def is_local(self) -> bool:
        """True if no scheduler or host file lists hosts, so that all processes run on this host."""
        return self.named_by == "this host"

    def __str__(self) -> str:
        n, n_hosts = self.n_processes, len(self.hosts)
        counted = "" if self.is_local else f"{n_hosts} host{'s' * (n_hosts > 1)} of "
        return f"{n} process{'es' * (n > 1)} on {counted}{self.named_by} ({self.reason})"


# Function that builds the launch command for a layout, without the command that the processes run.
# Raises `UsageError` if an environment variable is invalid.
Launcher = Callable[[ProcessLayout, Mapping[str, str]], list[str]]


def place_processes(
    n: int | None,
    per_host: int | None,
    host_file: str | None,
    environ: Mapping[str, str],
    spare: int = 0,
) -> ProcessLayout:
    """Assign the processes of a job to its hosts.

    Args:
        n: total number of processes. If None, each host runs `per_host` processes.
        per_host: processes per host. If None, `n` is divided evenly among the hosts. If `n` is also
            None, the default is the first of these that is known: SLURM_NTASKS_PER_NODE, one
            process per device (unless JAX_PLATFORMS=cpu; one process if a variable such as
            CUDA_VISIBLE_DEVICES hides all devices), the smallest count in SLURM_TASKS_PER_NODE
            (used only if SLURM_NTASKS is set), one process. The smallest number of slots in a host
            file is an upper limit. It also replaces the default of one process, unless a variable
            such as JAX_PLATFORMS or CUDA_VISIBLE_DEVICES hides the accelerators.
        host_file: file that lists the hosts. If None, `job_hosts` finds them in `environ`.
        environ: environment variables.
        spare: number of hosts to keep free, taken from the end of the list.

    Raises:
        UsageError: if there are too few hosts, slots or (on a known machine, unless
            JAX_PLATFORMS=cpu) devices, if the processes cannot be divided evenly among the hosts,
            or if `spare` leaves no host.
    """
    all_hosts, named_by = job_hosts(environ, host_file)
    if spare >= len(all_hosts):
        raise UsageError(
            f"--spare-nodes={spare}: {named_by} has {len(all_hosts)} host"
            f"{'s' * (len(all_hosts) > 1)}, and at least one must run processes; give fewer"
        )
    hosts = dict(list(all_hosts.items())[: len(all_hosts) - spare])
    machine = find_machine(next(iter(hosts)), environ)
    slots = min((s for s in hosts.values() if s is not None), default=None)
    if per_host is not None:
        option, reason = f"--ppn={per_host}", "--ppn"
    elif n is not None:
        per_host, rest = divmod(n, len(hosts))
        if rest:
            raise UsageError(
                f"-n={n}: cannot be divided evenly among the {len(hosts)} hosts of {named_by}; "
                f"give a multiple of {len(hosts)}, or also give --ppn"
            )
        option, reason = f"-n={n}", "-n"
    else:
        known = _default_per_host(machine, environ)
        per_host, reason = known or (1, NO_ACCELERATORS)
        if slots is not None and (known is None or slots < per_host):
            per_host, reason = slots, f"the slots per host in {named_by}"
        option = reason
    if slots is not None and per_host > slots:
        raise UsageError(
            f"{option}: {per_host} processes per host, but {named_by} allows only {slots}; give "
            "fewer, or request more slots from the scheduler (PBS: mpiprocs)"
        )
    if machine and per_host > machine.devices_per_host and _wants_accelerators(environ):
        raise UsageError(
            f"{option}: {per_host} processes per host, but a {machine.name} host has "
            f"{machine.devices_per_host} devices; give at most that many, or set JAX_PLATFORMS=cpu"
        )
    n = n or per_host * len(hosts)
    if n > per_host * len(hosts) or (n > per_host and n % per_host):
        on = f"on the {len(hosts)} hosts of {named_by}" if len(hosts) > 1 else "on one host"
        raise UsageError(
            f"-n={n}: must be a multiple of --ppn={per_host}, and at most "
            f"{per_host * len(hosts)} {on}"
        )
    per_host = min(n, per_host)
    used = tuple(hosts)[: n // per_host]
    file = host_file or (environ[named_by] if named_by in HOST_FILES else None)
    spares = tuple(host for host in all_hosts if host not in used)
    return ProcessLayout(used, named_by, file, n, per_host, reason, machine, spares)


def place_on(layout: ProcessLayout, hosts: Sequence[str]) -> ProcessLayout:
    """Return `layout` moved to other hosts of its job, with the same number of processes per host.

    `spares` is not updated.
    """
    if tuple(hosts) == layout.hosts:
        return layout
    n = layout.per_host * len(hosts)
    return replace(layout, hosts=tuple(hosts), host_file=None, n_processes=n, has_moved=True)


def placement_lines(layout: ProcessLayout, environ: Mapping[str, str]) -> list[str]:
    """Return one line of text for each host, with the host's ranks and their devices.

    The devices are taken from the environment, from `MACHINES` or from this host. All hosts are
    assumed to have the same devices. Example: `host a: rank 0 on device 0+1`. A line says `on CPUs`
    if the host has fewer devices than processes, or if JAX_PLATFORMS=cpu is set. On Frontier, a
    line only says that Slurm chooses the devices.
    """
    machine, per_host = layout.machine, layout.per_host
    n_devices = machine.devices_per_host if machine else count_accelerators()
    visible = visible_devices(environ)
    devices = visible[1] if visible else [str(i) for i in range(n_devices)]
    each = len(devices) // per_host
    is_certain = layout.is_local or not _wants_accelerators(environ)

    def text(first: int) -> str:
        ranks = f"ranks {first} to {first + per_host - 1}" if per_host > 1 else f"rank {first}"
        if not each or not _wants_accelerators(environ):
            return f"{ranks}, on CPUs{'' if is_certain else ' if the host is like this one'}"
        if machine and "--gpu-bind=closest" in machine.srun_options:
            return f"{ranks}, on devices that Slurm chooses"
        own = ("+".join(devices[i * each : (i + 1) * each]) for i in range(per_host))
        return ", ".join(f"rank {first + i} on device {names}" for i, names in enumerate(own))

    return [f"host {host}: {text(i * per_host)}" for i, host in enumerate(layout.hosts)]


def _wants_accelerators(environ: Mapping[str, str]) -> bool:
    return environ.get("JAX_PLATFORMS") != "cpu"


def _default_per_host(
    machine: Machine | None, environ: Mapping[str, str]
) -> tuple[int, str] | None:
    """Return the default number of processes per host, and the reason for it.

    Returns None if no accelerators are found or hidden, and no variable gives a number.
    """
    tasks = environ.get("SLURM_TASKS_PER_NODE", "") if "SLURM_NTASKS" in environ else ""
    if asked := read_int(environ, "SLURM_NTASKS_PER_NODE"):
        return asked, f"SLURM_NTASKS_PER_NODE={asked}"
    if _wants_accelerators(environ):
        if visible := visible_devices(environ):
            variable, devices = visible
            return max(1, len(devices)), f"{variable}={environ[variable]}"
        if machine:
            return machine.devices_per_host, f"one per device of each {machine.name} host"
        if given := read_int(environ, "SLURM_GPUS_ON_NODE"):
            return given, f"SLURM_GPUS_ON_NODE={given}"
        if found := count_accelerators():
            return found, f"one for each of the {found} accelerators on this host"
    if n_tasks := _least(tasks):  # from --ntasks
        return n_tasks, f"SLURM_TASKS_PER_NODE={tasks}"
    return None if _wants_accelerators(environ) else (1, CPUS_ONLY)


def find_launcher(layout: ProcessLayout, environ: Mapping[str, str]) -> tuple[Launcher, str]:
    """Return the launcher for `layout`, and a string with its name and the reason for choosing it.

    On a known machine or in a PBS or Slurm job, the machine's launcher takes precedence over an
    mpiexec that is installed with this Python. In a Slurm job, the launcher is srun unless
    PBS_NODEFILE or HOSTFILE lists the hosts. In all other cases, the launcher is an mpiexec,
    identified by the output of `mpiexec --version`. Raises `UsageError` if srun is the launcher but
    is not in PATH.
    """
    own, site = _own_mpiexec(), _site(layout, environ)
    unused = f"; {own} is not used" if own else ""
    if "SLURM_JOB_ID" in environ and layout.named_by not in HOST_FILES:
        if shutil.which("srun") is None:
            raise UsageError(
                f"SLURM_JOB_ID={environ['SLURM_JOB_ID']}: srun is not in PATH; load Slurm's "
                "commands, or run this outside the container"
            )
        return _srun, f"srun, {site}{unused}"
    mpiexec = find_mpiexec(prefer_own=site is None)
    launcher, name = _launcher_of(mpiexec, environ)
    if mpiexec != own:
        if site and own:
            remove = "if mpi4py loads its library, run: pip uninstall mpich"
            return launcher, f"{name}, {site}{unused} ({remove})"
        return launcher, f"{name}, found in PATH"
    found = f"{name}, installed with this Python"
    if site:
        found += "; PATH has no other mpiexec, so load the machine's MPI module if there is one"
    return launcher, found


def _site(layout: ProcessLayout, environ: Mapping[str, str]) -> str | None:
    """Return `on MACHINE` or `in job ID`, or None if neither is known."""
    if layout.machine:
        return f"on {layout.machine.name}"
    jobs = ("PBS_JOBID", "SLURM_JOB_ID")
    return next((f"in job {environ[job]}" for job in jobs if environ.get(job)), None)


def _launcher_of(mpiexec: str, environ: Mapping[str, str]) -> tuple[Launcher, str]:
    """Identify `mpiexec` by the output of --version. Return its launcher and name.

    Raises `UsageError` if it cannot be run, does not respond within `SLOW_DISK` seconds, or is not
    a supported launcher.
    """
    try:
        ran = subprocess.run(
            [mpiexec, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SLOW_DISK,
        )
        version = (ran.stdout + ran.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    if re.match(r"mpiexec version \d", version):
        return functools.partial(_pals, mpiexec), "Cray PALS"
    if "Open MPI" in version or "OpenRTE" in version:
        return functools.partial(_open_mpi, mpiexec), "Open MPI"
    if "Intel(R) MPI" in version:
        # In a PBS job, Intel MPI follows the scheduler's placement by default and ignores -ppn.
        placed = "PBS_JOBID" in environ
        prefix = ["env", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=0"] if placed else []
        return functools.partial(_hydra, [*prefix, mpiexec]), "Intel MPI"
    if "HYDRA" in version:
        return functools.partial(_hydra, [mpiexec]), "MPICH"
    first = version.partition("\n")[0]
    raise UsageError(
        f"mpiexec={mpiexec}: its --version prints {first!r}, which is not Cray PALS, Open MPI, "
        "MPICH or Intel MPI; put one of these first in PATH"
    )


def find_mpiexec(prefer_own: bool = True) -> str:
    """Return the path of an mpiexec.

    The mpiexec next to this Python takes precedence over others in PATH, unless `prefer_own` is
    False. Raises `UsageError` if no mpiexec is found.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    own_folder = os.path.realpath(os.path.dirname(sys.executable))
    others = [folder for folder in folders if os.path.realpath(folder) != own_folder]
    own, other = _own_mpiexec(), shutil.which("mpiexec", path=os.pathsep.join(others))
    found = own or other if prefer_own else other or own
    if found is None:
        raise UsageError(
            f"PATH={os.environ.get('PATH', '')}: contains no mpiexec, and there is none next to "
            f"{sys.executable}; load the machine's MPI, or pip install 'jaxgpt[mpi]' for MPICH"
        )
    return found


def _own_mpiexec() -> str | None:
    """Return the path of the mpiexec next to this Python, if there is one."""
    own = Path(sys.executable).parent / "mpiexec"
    return str(own) if os.access(own, os.X_OK) else None


def _hydra(mpiexec: list[str], layout: ProcessLayout, environ: Mapping[str, str]) -> list[str]:
    line = [*mpiexec, "-n", str(layout.n_processes)]
    if layout.is_local:
        return line
    return [*line, "-ppn", str(layout.per_host), "-hosts", ",".join(layout.hosts)]


def _pals(mpiexec: str, layout: ProcessLayout, environ: Mapping[str, str]) -> list[str]:
    machine, per_host = layout.machine, layout.per_host
    line = [mpiexec, "--envall", "-n", str(layout.n_processes), "-ppn", str(per_host)]
    if layout.named_by == "PBS_NODEFILE" and not layout.has_moved:
        line += ["--hostfile", layout.host_file]
    elif not layout.is_local:  # PALS does not support slots in host files
        line += ["--hosts", ",".join(layout.hosts)]
    if machine and machine.cpu_bind and machine.devices_per_host % per_host == 0:
        # Bind a process to the cores of all its devices.
        cores = machine.cpu_bind.removeprefix("list:").split(":")
        each = machine.devices_per_host // per_host
        shares = [",".join(cores[i : i + each]) for i in range(0, len(cores), each)]
        return [*line, "--cpu-bind", "list:" + ":".join(shares)]
    depth = max(1, len(own_cpus()) // per_host)
    return [*line, "--cpu-bind", "depth", "-d", str(depth)]


def _open_mpi(mpiexec: str, layout: ProcessLayout, environ: Mapping[str, str]) -> list[str]:
    # Ignore slots, and do not bind: a JAX process uses many cores, but Open MPI would bind each
    # process of a two-process job to a single core.
    line = [mpiexec, "-n", str(layout.n_processes), "--bind-to", "none", "--map-by"]
    if layout.is_local:
        return [*line, ":OVERSUBSCRIBE"]
    hosts = ",".join(f"{host}:{layout.per_host}" for host in layout.hosts)
    line += [f"ppr:{layout.per_host}:node:OVERSUBSCRIBE", "--host", hosts]
    passed_on = sorted(v for v in environ if PASSED_ON.fullmatch(v))
    return line + [word for v in passed_on for word in ("-x", v)]


def _srun(layout: ProcessLayout, environ: Mapping[str, str]) -> list[str]:
    # Without --wait, srun waits forever for the other processes if one dies.
    line = ["srun", "-u", "--wait=120", "-N", str(len(layout.hosts)), "-n", str(layout.n_processes)]
    line.append(f"--ntasks-per-node={layout.per_host}")
    if layout.named_by == "--hosts" or layout.has_moved:
        line.append("--nodelist=" + ",".join(layout.hosts))
    machine = layout.machine
    on_devices = machine and machine.cpus_per_host and _wants_accelerators(environ)
    if on_devices and layout.per_host <= machine.devices_per_host:
        cpus = machine.cpus_per_host // layout.per_host
        devices = machine.devices_per_host // layout.per_host
        return line + machine.srun_options.format(cpus=cpus, devices=devices).split()
    if cpus := _slurm_cpus(layout.per_host, environ):
        line.append(f"--cpus-per-task={cpus}")
    return line


def _slurm_cpus(per_host: int, environ: Mapping[str, str]) -> int:
    """Return the number of CPUs per process (at most an equal share), or 0 if unknown."""
    share = _least(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) // per_host
    asked = read_int(environ, "SLURM_CPUS_PER_TASK")  # ignored by srun since Slurm 22.05
    if asked and environ.get("SLURM_NTASKS_PER_NODE") in (None, str(per_host)):
        return min(asked, share or asked)
    return share


def _least(counts: str) -> int:
    """Return the smallest count in a Slurm list: 8 for `16,8(x2)`, and 0 for an empty list."""
    return min(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", counts)), default=0)
