"""Table of supercomputers: names, devices, CPU binding, networks, and the source of each fact.

Sources, all read in 2026:
    [ALCF]  docs.alcf.anl.gov, "Running Jobs", "Machine Overview" and "PyTorch" for each machine.
    [ezpz]  github.com/saforem2/ezpz, src/ezpz/distributed.py (get_machine, high-speed suffixes),
            src/ezpz/pbs.py (CPU binding) and its recorded jobs (names of PBS jobs).
    [OLCF]  docs.olcf.ornl.gov, "Frontier User Guide".
    [NERSC] docs.nersc.gov, "Node Types".
    [WarpX] github.com/BLAST-WarpX/warpx, PR 3349 and issue 6382 (Perlmutter's srun options).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a machine."""

    name: str
    # Regular expression that matches a whole host name (short or full, in lower case). None if
    # other machines use the same host names.
    host_names: str | None = None
    # Maps an environment variable to a regular expression to search for in the variable's value. A
    # match takes precedence over host names.
    variables: Mapping[str, str]
    device: str  # key of `jaxgpt.perf.hardware.DEVICES`
    devices_per_host: int
    high_speed_suffix: str | None = None  # suffix of host names on the high-speed network
    cpu_bind: str | None = None  # for PALS: `list:`, followed by the cores of each device
    cpus_per_host: int | None = None  # number of logical CPUs that Slurm allocates per host
    srun_options: str = ""  # placeholders: {cpus} and {devices} per process


def _alcf(
    name: str, nodes: str, device: str, devices_per_host: int, suffix: str | None, **facts: str
) -> Machine:
    """Return an ALCF machine.

    PBS_JOBID looks like 123.aurora-pbs-0001..., and PBS_O_HOST is a login host.
    """
    prefix = name.lower()
    return Machine(
        name=name,
        host_names=rf"({nodes}|{prefix}-[\w-]+)(\..*\.(alcf\.anl\.gov|americas\.sgi\.com))?",
        variables={"PBS_JOBID": rf"^\d+(\[\d*\])?\.{prefix}-pbs", "PBS_O_HOST": rf"^{prefix}-"},
        device=device,
        devices_per_host=devices_per_host,
        high_speed_suffix=suffix,
        **facts,
    )


# [ALCF] racks x3001 to x3016, x3101 to x3112, x3201 to x3212 with nodes such as x3005c0s37b0n0.
_POLARIS_NODES = r"x3(00[1-9]|01[0-6]|[12]0[1-9]|[12]1[0-2])c0s\d+b[01]n0"
_AURORA_NODES = r"x4\d{3}c\ds\db\dn\d"  # [ALCF] such as x4407c6s2b0n0
# [ALCF] Aurora: 12 processes, 6 per socket; cores 0 and 52 are reserved for the system.
_AURORA_CPUS = "list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"
_AURORA_SUFFIX = ".hsn.cm.aurora.alcf.anl.gov"

MACHINES = (
    # [ALCF] 4 A100 GPUs with 40 GB each. Suffix: [ezpz].
    _alcf("Polaris", _POLARIS_NODES, "a100", 4, ".hsn.cm.polaris.alcf.anl.gov"),
    # Test rack x3200 of Polaris [ALCF], with the same nodes [ezpz]; user logs show host names such
    # as x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov.
    _alcf("Sirius", r"x3200c0s\d+b[01]n0", "a100", 4, ".hsn.cm.sirius.alcf.anl.gov"),
    # [ALCF] 6 PVC GPUs with 2 tiles each. The page "PyTorch" uses this suffix for MASTER_ADDR, and
    # example 4 of "Running Jobs" uses this binding.
    _alcf("Aurora", _AURORA_NODES, "pvc", 12, _AURORA_SUFFIX, cpu_bind=_AURORA_CPUS),
    # Test machine for Aurora, with the same nodes. [ezpz] uses the same binding for both. Its
    # recorded jobs and [ALCF] "Known Issues" mention racks x1921 and x1922. (Rack x1000 is ALCF's
    # Crux.)
    _alcf("Sunspot", r"x192[12]c\ds\db\dn\d", "pvc", 12, None, cpu_bind=_AURORA_CPUS),
    # [ALCF] 24 DGX A100 nodes, 22 of them with 40 GB GPUs; Open MPI. Suffix: [ezpz].
    _alcf("Sophia", r"sophia-[\w-]+", "a100", 8, ".lab.alcf.anl.gov"),
    # [OLCF] Nodes such as frontier00144 have 64 cores, 8 of them reserved for the system, and 4
    # MI250X GPUs with 2 GCDs each. The usual options are -c7 --gpus-per-task=1 --gpu-bind=closest.
    Machine(
        name="Frontier",
        host_names=r"frontier\d+(\..*)?",
        variables={"LMOD_SYSTEM_NAME": "^frontier$", "SLURM_CLUSTER_NAME": "^frontier$"},
        device="mi250x",
        devices_per_host=8,
        cpus_per_host=56,
        srun_options="--cpus-per-task={cpus} --gpus-per-task={devices} --gpu-bind=closest",
    ),
    # [NERSC] Nodes are named nid001234, as on other Cray machines. They have 4 A100 GPUs (40 GB on
    # most nodes) and 64 cores with 128 threads. [WarpX] uses -c 32 for four tasks, and no GPU
    # binding. With GPU binding, Slurm would hide the other processes' GPUs and so prevent NVLink
    # transfers.
    Machine(
        name="Perlmutter",
        variables={"NERSC_HOST": "^perlmutter$", "SLURM_CLUSTER_NAME": "^perlmutter$"},
        device="a100",
        devices_per_host=4,
        cpus_per_host=128,
        srun_options="--cpus-per-task={cpus} --cpu-bind=cores --gpus-per-node=4 --gpu-bind=none",
    ),
)


def find_machine(host_name: str, environ: Mapping[str, str]) -> Machine | None:
    """Return the machine that a host belongs to, or None if none in `MACHINES` matches.

    The variables in `environ` take precedence over `host_name`, which may be short or full.
    """
    for machine in MACHINES:
        for variable, pattern in machine.variables.items():
            if re.search(pattern, environ.get(variable, "")):
                return machine
    for machine in MACHINES:
        if machine.host_names and re.fullmatch(machine.host_names, host_name.lower()):
            return machine
    return None


def high_speed_name(machine: Machine | None, host: str) -> str:
    """Return a host's name on the high-speed network.

    `host` is a short or full name. If no high-speed network is known, `host` is returned unchanged.
    """
    if machine is None or machine.high_speed_suffix is None:
        return host
    return host.partition(".")[0] + machine.high_speed_suffix
