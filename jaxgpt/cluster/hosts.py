"""The hosts of a job: host files, Slurm's node lists, and addresses that reach them."""

import contextlib
import itertools
import re
import socket
from collections.abc import Mapping

from jaxgpt.config import UsageError

# Host name -> slots, the room for processes by a host file; None where no file counts them.
Hosts = dict[str, int | None]

HOST_FILES = ("PBS_NODEFILE", "HOSTFILE")
# A scheduler's own variable before one that a user may have set for another job.
_VARIABLES = ("PBS_NODEFILE", "SLURM_JOB_NODELIST", "HOSTFILE")

_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_LINE = re.compile(
    rf"(?P<host>{_HOST})(:(?P<slots>\d+))?(\s+(slots=(?P<words>\d+)|(?!slots=)[\w-]+=\S+))*"
)


def job_hosts(environ: Mapping[str, str], file: str | None = None) -> tuple[Hosts, str]:
    """Find the hosts of this job, and the variable that named them, or `--hosts`, or `this host`.

    A PBS node file is often only on the job's first host: in a running job, ask on process 0.
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
    """Read the hosts of a file with lines `host`, `host:4` or `host slots=4`; `#` begins a comment.

    Lines may repeat, as PBS writes one for each slot: the slots of a host add up. Errors name
    `option`.
    """
    try:
        with open(path, errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise UsageError(
            f"{option}={path}: this host file cannot be read ({error.strerror}); give one that "
            "can, or unset it where it is left over from another job"
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
                f"{option}={path}: line {number} is {line!r}; a line of a host file is a host, "
                "host:4 or host slots=4"
            )
        host = match["host"]
        counted = counted or count is not None or host in slots
        slots[host] = slots.get(host, 0) + int(count or 1)
    if not slots:
        raise UsageError(f"{option}={path}: this host file names no host; write one on each line")
    return {host: n if counted else None for host, n in slots.items()}


def expand_node_list(text: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Expand a Slurm node list to names, in Slurm's order, each once; errors name `variable`.

    >>> expand_node_list("nid[001-003,007],x[1-2]c[0-1]")
    ('nid001', 'nid002', 'nid003', 'nid007', 'x1c0', 'x1c1', 'x2c0', 'x2c1')
    """
    names: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text.strip()):
        # Outside of brackets at the even places, inside at the odd ones.
        parts = re.split(r"\[([^\[\]]*)\]", word)
        choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(parts)]
        expanded = ["".join(choice) for choice in itertools.product(*choices)]
        if not expanded or not all(re.fullmatch(_HOST, name) for name in expanded):
            raise UsageError(
                f"{variable}={text}: {word!r} in it is not a node list of Slurm's, such as "
                "nid[001-003,007],login1; unset it where it is left over from another job"
            )
        names += expanded
    return tuple(dict.fromkeys(names))


def _numbers(ranges: str) -> list[str]:
    """Expand `001-003,007`, keeping the width; return nothing if it is malformed."""
    out: list[str] = []
    for word in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            return []
        first, last = match[1], match[2] or match[1]
        out += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return out


def address_towards(host: str) -> str:
    """Return this host's own address on the way to `host`; `OSError` if there is no way."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        # A host may have an address of a family that this host has no route for.
        with contextlib.suppress(OSError), socket.socket(family, kind) as s:
            s.connect(address)  # sends nothing, but chooses the interface
            return s.getsockname()[0]
    raise OSError(f"{host}: no network of this host leads there")


def reachable_name() -> str:
    """Return this host's name, or its address where it takes its own name for loopback."""
    name = socket.getfqdn()
    try:
        addresses = [entry[4][0] for entry in socket.getaddrinfo(name, None)]
        if not any(address.startswith(("127.", "::1")) for address in addresses):
            return name
    except OSError:
        pass  # the name stands for nothing
    try:
        return address_towards("10.255.255.255")  # any address outside: the default route
    except OSError:  # no network
        return name
