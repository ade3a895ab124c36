"""A temporary two-node Slurm cluster on one machine, from Debian's slurm-wlm and munge.

The nodes are the two hosts of `hosts.two_hosts`, so each has its own ports and name. The controller
runs on the first. Nothing is read from or written to /etc. To do the same by hand, make a key,
start `munged`, write slurm.conf and cgroup.conf, start `slurmctld -D`, start `slurmd -D` on each
node, each with SLURM_CONF set, and wait until `sinfo` reports idle nodes.
"""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

# No cgroups, no database, no accounting: what a container or a laptop can do. Each node claims
# CPUs that the machine need not have.
CONFIG = """
ClusterName=test
SlurmctldHost=alpha
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=120
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
# Unused, but unless a version is named slurmd looks for one and ends if there is none.
CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\n"


def missing():
    """Return why Slurm cannot run on this machine, or None if it can."""
    absent = [d for d in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(d) is None]
    return f"{absent[0]} is not installed (apt-get install slurm-wlm munge)" if absent else None


@contextlib.contextmanager
def slurm(directory, hosts):
    """Slurm on `hosts`, ready for jobs; yields the environment that its commands need."""
    directory = Path(directory)
    nodes = [f"NodeName={h.name} NodeAddr={h.address} CPUs=4" for h in hosts]
    config = directory / "slurm.conf"
    config.write_text(CONFIG.format(directory=directory, nodes="\n".join(nodes)))
    (directory / "cgroup.conf").write_text(CGROUP_CONFIG)
    variables = {"SLURM_CONF": str(config)}
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = {name: f"{directory}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
    munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={files['socket']}"]
    munged += ["--force"]  # though a test's directory is closed to other users
    munged += [f"--{name}-file={files[name]}" for name in ("pid", "log", "seed")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(munged))
        _wait_until(lambda: Path(files["socket"]).exists(), "munged")
        stack.enter_context(_daemon(hosts[0].command("slurmctld", "-D"), **variables))
        for host in hosts:
            stack.enter_context(_daemon(host.command("slurmd", "-D"), **variables))

        def states():
            return hosts[0].run("sinfo", "--noheader", "-N", "-o", "%t", **variables).stdout.split()

        _wait_until(lambda: states() == ["idle"] * len(hosts), "sinfo")
        try:
            yield variables
        finally:
            hosts[0].run("scancel", "--user", "root", "--signal", "KILL", "--full", **variables)
            _wait_until(lambda: states() == ["idle"] * len(hosts), "the end of all jobs")


@contextlib.contextmanager
def _daemon(command, **variables):
    with subprocess.Popen(
        ["setpriv", "--pdeathsig=TERM", *command],  # ends with us, however we end
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,  # each has its log file
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def _wait_until(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: nothing after {seconds} s")
        time.sleep(0.1)
