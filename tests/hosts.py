"""Several simulated hosts on one machine, each with its own network, host name and /dev/shm.

Each host is an idle process in its own namespaces. They vanish when the process ends, so the
machine itself is not changed. Virtual cables (veth pairs) connect `eth0` of each host to a switch,
a bridge in another namespace. The hosts cannot reach any other network. Like hosts with Docker, all
of them also have a `docker0` with the same address.
"""

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jobs import environment

ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2", "gamma": "10.77.0.3"}
NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
# What a host runs. /sys shows the network interfaces of the namespace that mounted it; a tmpfs over
# /dev/shm keeps MPI from taking both hosts for one.
BOOT = """
set -e
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1/$2.hosts" /etc/hosts
hostname "$2"
ip link set lo up
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
echo up
exec cat
"""
SWITCH = "ip link add br0 type bridge && ip link set br0 up && echo up && exec cat"
CONNECT = "ip addr add $1/24 dev eth0; ip link set eth0 up"
CARRIER = 'until [ "$(cat /sys/class/net/eth0/operstate)" = up ]; do sleep 0.01; done'
# What stands in for ssh: HOST COMMAND..., the command being for a shell.
REMOTE_SHELL = """#!/bin/sh
directory=$(dirname "$0")
pid=$(cat "$directory/$1.pid") && shift
exec nsenter --target "$pid" --net --uts --ipc --mount sh -c "$*"
"""


@dataclass(frozen=True)
class Host:
    """A host that commands can be run on."""

    name: str
    address: str
    pid: int
    """The process that the namespaces belong to."""
    directory: Path
    switch: int
    """The process that the switch belongs to."""

    def command(self, *args):
        """Return a command that runs `args` on this host, in the same folder and environment."""
        enter = ["nsenter", "--target", str(self.pid), *NAMESPACES, f"--wdns={os.getcwd()}"]
        return [*enter, *map(str, args)]

    def run(self, *args, timeout=300, **variables):
        """Run `args` on this host until they end. The result has their output in `stdout`."""
        return subprocess.run(
            self.command(*args),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment(**variables),
        )

    def lose(self):
        """Disconnect the host and refuse remote shells. Its processes continue, unreachable."""
        (self.directory / f"{self.name}.pid").unlink()
        _in_switch(self.switch, "ip", "link", "set", self.name, "down")


def missing():
    """Return why this machine cannot simulate several hosts, or None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    absent = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if absent:
        return f"{absent[0]} is not installed"
    try_out = "ip link add docker0 type bridge && mount -t tmpfs tmpfs /dev/shm"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", try_out],
        capture_output=True,
        text=True,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def two_hosts(directory, own_name="address"):
    """Yield the hosts alpha and beta of `several_hosts`."""
    with several_hosts(directory, 2, own_name) as hosts:
        yield hosts


@contextlib.contextmanager
def several_hosts(directory, n, own_name="address"):
    """Yield `n` hosts, at most three, which run until the end of the `with` block.

    Args:
        directory: Folder for the hosts' files. `directory/rsh` is a remote shell for launchers.
        own_name: What a host's own name resolves to on that host: "address", the address of its
            cable, or "loopback", which is 127.0.1.1, as Debian's installer sets it.
    """
    directory = Path(directory)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_end(_start("unshare", "--net", "sh", "-c", SWITCH))).pid
        hosts = []
        for name in list(ADDRESSES)[:n]:
            (directory / f"{name}.hosts").write_text(_hosts_file(name, own_name))
            boot = ("unshare", *NAMESPACES, "sh", "-c", BOOT, "boot", str(directory), name)
            pid = stack.enter_context(_end(_start(*boot))).pid
            (directory / f"{name}.pid").write_text(str(pid))
            hosts.append(Host(name, ADDRESSES[name], pid, directory, switch))
            ends = ["eth0", "netns", str(pid)], [name, "netns", str(switch)]
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            _in_switch(switch, "ip", "link", "set", name, "master", "br0", "up")
        for host in hosts:
            host.run("sh", "-ec", CONNECT, "connect", host.address).check_returncode()
        for host in hosts:
            host.run("sh", "-ec", CARRIER, timeout=10).check_returncode()
        shell = directory / "rsh"
        shell.write_text(REMOTE_SHELL)
        shell.chmod(0o755)
        yield hosts


def _hosts_file(name, own_name):
    known = dict(ADDRESSES)
    if own_name == "loopback":
        known[name] = "127.0.1.1"
    lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in known.items())]
    return "\n".join(lines) + "\n"


def _start(*command):
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # closed when we end, however we do, and the host with it
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    return process


def _in_switch(pid, *command):
    subprocess.run(["nsenter", "--target", str(pid), "--net", *command], check=True)


@contextlib.contextmanager
def _end(process):
    with process:
        yield process
        process.stdin.close()


def _ip(*args):
    subprocess.run(["ip", *args], check=True)
