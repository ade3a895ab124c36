"""The hosts of a job: host files, Slurm node lists, and addresses that other hosts can reach."""

import contextlib
import itertools
import re
import socket
from collections.abc import Mapping
from typing import Any

from jaxgpt.config import UsageError

# Maps each host name to its slots (the maximum number of processes), or to None if no host file
# sets the slots.
Hosts = dict[str, int | None]

HOST_FILES = ("PBS_NODEFILE", "HOSTFILE")
# The scheduler's variables come before HOSTFILE, which may be left over from another job.
_VARIABLES = ("PBS_NODEFILE", "SLURM_JOB_NODELIST", "HOSTFILE")

_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_LINE = re.compile(
    rf"(?P<host>{_HOST})(:(?P<slots>\d+))?(\s+(slots=(?P<words>\d+)|(?!slots=)[\w-]+=\S+))*"
)


def job_hosts(environ: Mapping[str, str], file: str | None = None) -> tuple[Hosts, str]:
    """Return the hosts of this job and their source (a variable, `--hosts` or `this host`).

    The hosts come from the first of these that is set: `file`, PBS_NODEFILE, SLURM_JOB_NODELIST,
    HOSTFILE. If none is set, the job has only this host.

    In a running job, call this on process 0, because a PBS node file often exists only on the job's
    first host. Raises `UsageError` if the host file is unreadable or invalid, or if the node list
    is invalid.
    """
    if file is not None:
        return read_host_file(file, "--hosts"), "--hosts"
    variable = next((v for v in _VARIABLES if environ.get(v)), None)
    if variable is None:
        return {socket.gethostname(): None}, "this host"
    if variable in HOST_FILES:
        return read_host_file(environ[variable], variable), variable
    return dict.fromkeys(expand_node_list(environ[variable], variable)), variable


def read_host_file(path: str, option: str) -> Hosts:
    """Read a host file with lines like `host`, `host:4` or `host slots=4`; `#` starts a comment.

    PBS lists a host once per slot. Therefore, a line without slots counts as one slot, and slots
    are summed over repeated lines. If no line specifies slots and no host is repeated, all slots
    are None. Other words of the form `key=value` are ignored. Raises a `UsageError` about `option`
    if the file is unreadable or malformed, or lists no hosts.
    """
    try:
        with open(path, errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise UsageError(
            f"{option}={path}: this host file cannot be read ({error.strerror}); give another "
            "file, or unset it if it is left over from another job"
        ) from None
    slots: dict[str, int] = {}
    counted = False
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        count = match and (match["slots"] or match["words"])
        if match is None or count and int(count) < 1:
            raise UsageError(
                f"{option}={path}: line {number} is {line!r}; write each line of a host file as "
                "host, host:4 or host slots=4"
            )
        host = match["host"]
        counted = counted or count is not None or host in slots
        slots[host] = slots.get(host, 0) + int(count or 1)
    if not slots:
        raise UsageError(f"{option}={path}: this host file lists no hosts; write one per line")
    return {host: n if counted else None for host, n in slots.items()}


def expand_node_list(text: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Expand a Slurm node list into unique host names, in Slurm's order.

    Raises a `UsageError` about `variable` if the list is malformed or empty.

    >>> expand_node_list("nid[001-003,007],x[1-2]c[0-1]")
    ('nid001', 'nid002', 'nid003', 'nid007', 'x1c0', 'x1c1', 'x2c0', 'x2c1')
    """
    names: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text.strip()):
        # Text outside brackets has even indices, and the ranges inside have odd indices.
        parts = re.split(r"\[([^\[\]]*)\]", word)
        choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(parts)]
        expanded = ["".join(choice) for choice in itertools.product(*choices)]
        if not expanded or not all(re.fullmatch(_HOST, name) for name in expanded):
            raise UsageError(
                f"{variable}={text}: {word!r} is not a Slurm node list such as "
                "nid[001-003,007],login1; unset it if it is left over from another job"
            )
        names += expanded
    return tuple(dict.fromkeys(names))


def _numbers(ranges: str) -> list[str]:
    """Expand `001-003,007`, keeping leading zeros. Return [] if `ranges` is malformed."""
    out: list[str] = []
    for word in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            return []
        first, last = match[1], match[2] or match[1]
        out += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return out


def address_towards(host: str) -> str:
    """Return this host's IPv4 or IPv6 address on the route to `host`.

    Raises `OSError` if `host` is malformed or does not resolve, or if there is no route to it.
    """
    for family, kind, _, _, address in _resolve(host, 9, socket.SOCK_DGRAM):
        # This host may have an IPv4 route but no IPv6 route, or vice versa.
        with contextlib.suppress(OSError), socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)  # for `reachable_name`
            s.connect(address)  # selects the interface without sending a packet
            return s.getsockname()[0]
    raise OSError(f"{host}: this host has no route to it")


def _resolve(host: str, port: int | None, kind: int = 0) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=kind)
    except UnicodeError:  # a label is empty or has more than 63 characters
        raise OSError(f"{host}: is not a valid host name") from None


def reachable_name() -> str:
    """Return a name or address that other hosts can use to reach this host.

    Returns the host's name if it resolves and none of its addresses is a loopback address.
    Otherwise, returns this host's address on the route to 10.255.255.255 (usually the default
    route). If there is no such route, returns the name anyway.
    """
    name = socket.getfqdn()
    try:
        addresses = [entry[4][0] for entry in _resolve(name, None)]
        if not any(address.startswith(("127.", "::1")) for address in addresses):
            return name
    except OSError:
        pass  # the name does not resolve
    try:
        return address_towards("10.255.255.255")  # often an address outside the local network
    except OSError:  # no route
        return name
