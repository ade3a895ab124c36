"""Message passing between the processes of a job before JAX is up: over MPI, or over TCP.

Both offer `allgather`: every process's message to every process.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from jaxgpt.cluster.environment import Launch
from jaxgpt.cluster.hardware import raise_open_file_limit
from jaxgpt.cluster.hosts import connect_with_retries
from jaxgpt.cluster.shutdown import FAILED, PeerLost, end_process

Socket = socket.socket


class Transport(Protocol):
    def allgather(self, message: bytes) -> list[bytes]:
        """Return every process's message, by rank, once all have given theirs."""

    def lost_peers(self) -> list[int]:
        """Return the ranks of processes that this one was connected to, and that have ended."""

    def close(self) -> None:
        """Give up the connection; the processes may connect again."""


class MpiTransport:
    """Messages over MPI's world."""

    def __init__(self, comm: Any):
        self.comm = comm

    def allgather(self, message: bytes) -> list[bytes]:
        lengths = array("q", [0] * self.comm.size)
        self._wait(self.comm.Iallgather(array("q", [len(message)]), lengths))
        everything = bytearray(sum(lengths))
        self._wait(self.comm.Iallgatherv(message, [everything, lengths]))
        return _split_messages(bytes(everything), lengths)

    def lost_peers(self) -> list[int]:
        return []  # MPI's launcher ends a job that has lost a process

    def close(self) -> None:
        self.comm.Free()  # MPI itself stays: it cannot be started twice

    @staticmethod
    def _wait(request: Any) -> None:
        """Wait without spinning: processes may share cores with the one that is at work."""
        while not request.Test():
            time.sleep(0.005)


class TcpTransport:
    """Messages over TCP connections between process 0 and each other process."""

    def __init__(self, launch: Launch, timeout: float):
        """Meet the other processes: 0 listens at `launch.address`, and the others connect.

        Args:
            timeout: seconds for all to arrive.

        Raises:
            PeerLost: if one does not.
        """
        self._launch = launch
        self._peers: dict[int, Socket] = {}
        deadline = time.monotonic() + timeout
        if launch.rank == 0:
            try:
                self._accept_peers(deadline, timeout)
            except PeerLost:
                self.close()
                raise
        else:
            self._connect_to_rank0(timeout)
        self.allgather(b"")  # nobody goes on before all are there

    def allgather(self, message: bytes) -> list[bytes]:
        if self._launch.rank:
            try:
                _send(self._peers[0], message)
                lengths = json.loads(_receive(self._peers[0]))
                return _split_messages(_receive(self._peers[0]), lengths)
            except OSError:  # process 0 has said why, if it could
                time.sleep(1)
                raise PeerLost from None
        messages = {0: message}
        for rank, peer in sorted(self._peers.items()):
            try:
                messages[rank] = _receive(peer)
            except OSError:
                raise PeerLost(lost_sentence(rank)) from None
        ordered = [messages[rank] for rank in range(len(messages))]
        lengths = json.dumps([len(m) for m in ordered]).encode()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # noticed at the next exchange
                _send(peer, lengths)
                _send(peer, b"".join(ordered))
        return ordered

    def lost_peers(self) -> list[int]:
        return [rank for rank, peer in sorted(self._peers.items()) if _has_gone(peer)]

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _accept_peers(self, deadline: float, timeout: float) -> None:
        """Accept the others, until all are there."""
        launch = self._launch
        raise_open_file_limit(launch.size + 100)  # one connection for each process
        port = int(launch.address.rpartition(":")[2])
        try:
            server = _listen(port)
        except OSError as error:
            _say(
                f"error: {launch.address}: process 0 cannot listen at port {port} "
                f"({error.strerror}); set JAXGPT_COORDINATOR to another host:port for all processes"
            )
            raise PeerLost from None
        with server, selectors.DefaultSelector() as ready:
            ready.register(server, selectors.EVENT_READ)
            while len(self._peers) + 1 < launch.size:
                if not ready.select(deadline - time.monotonic()):
                    arrived = {0, *self._peers}
                    _say(missing_sentence(arrived, launch.size, timeout))
                    raise PeerLost
                peer, _ = server.accept()
                peer.settimeout(10)
                try:
                    rank, size = map(int, json.loads(_receive(peer, limit=64)))
                except (OSError, ValueError, TypeError):  # not one of ours
                    peer.close()
                    continue
                if size != launch.size or rank in self._peers or not 0 < rank < size:
                    _say(
                        f"error: a process came as rank {rank} of {size}, but this is a job of "
                        f"{launch.size} processes with {len(self._peers) + 1} here already; each "
                        "needs a rank of its own and the same size"
                    )
                    peer.close()
                    raise PeerLost
                peer.settimeout(None)
                _keep_alive(peer)
                self._peers[rank] = peer

    def _connect_to_rank0(self, timeout: float) -> None:
        """Connect to process 0, which may not be up yet."""
        launch = self._launch
        try:
            peer = connect_with_retries(launch.address, timeout)
        except OSError as error:
            _say(
                f"error: process {launch.rank} of {launch.size}, on host {socket.gethostname()}, "
                f"cannot reach process 0 at {launch.address} ({error}) within {timeout:.0f} s "
                "(--init-timeout): it has not started, or the address is wrong"
            )
            raise PeerLost from None
        # Longer than process 0 waits for the others, which it then names.
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(peer)
        self._peers[0] = peer
        _send(peer, json.dumps([launch.rank, launch.size]).encode())


@contextlib.contextmanager
def arrival_limit(launch: Launch, timeout: float) -> Iterator[None]:
    """End this process if the block, in which MPI waits for all processes, takes too long.

    MPI cannot say who is missing. Processes that have waited for a while leave a mark in a folder
    that all hosts see, so that those that left none can be named.
    """
    done = threading.Event()
    patience = min(10.0, timeout / 2)  # longer than starts take, so that most leave no marks
    folder = _arrivals_folder()

    def watch() -> None:
        if done.wait(patience):
            return
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(launch.rank)).touch()
        if done.wait(timeout - patience):
            _clear(folder, launch.rank)
            return
        arrived = {launch.rank}
        with contextlib.suppress(OSError):
            recent = time.time() - timeout - 60  # and not of an earlier job of this name
            arrived |= {int(f.name) for f in folder.iterdir() if f.stat().st_mtime > recent}
        if launch.rank == min(arrived):
            _say(missing_sentence(arrived, launch.size, timeout))
        time.sleep(2)  # the others look too
        _clear(folder, launch.rank)
        end_process(FAILED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def lost_sentence(rank: int) -> str:
    return f"process {rank} has ended; its own output may say why"


def missing_sentence(arrived: set[int], size: int | None, timeout: float) -> str:
    """Return the error that names the processes which did not arrive.

    >>> missing_sentence({0, 1, 3}, 4, 300)[:56]
    'error: 3 of 4 processes arrived within 300 s (--init-tim'
    """
    of = f" of {size}" if size else ""
    missing = [str(rank) for rank in range(size or 0) if rank not in arrived]
    names = ", ".join(missing[:20]) + (" ..." if len(missing) > 20 else "")
    who = f"; missing: rank {names}" if missing else ""
    return (
        f"error: {len(arrived)}{of} processes arrived within {timeout:.0f} s "
        f"(--init-timeout){who}; look at the output and the host of what is missing, or give a "
        "larger --init-timeout"
    )


def _arrivals_folder() -> Path:
    """Return a folder of this job alone: by the job's name, or by its launcher's id."""
    names = ("PALS_APID", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID")
    job = next((os.environ[n] for n in names if os.environ.get(n)), None)
    if job and "SLURM_STEP_ID" in os.environ:
        job += f".{os.environ['SLURM_STEP_ID']}"
    job = job or f"{socket.gethostname()}-{_launcher_pid()}"
    return Path.home() / ".cache" / "jaxgpt" / "arrivals" / job.replace("/", "_")


def _launcher_pid() -> int:
    """Return the launcher's process on this host: the nearest ancestor without a rank."""
    pid = os.getppid()
    while pid > 1:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        if b"MPI_LOCALRANKID=" not in environ and b"PMI_RANK=" not in environ:
            break
        pid = int(status.rpartition(")")[2].split()[1])
    return pid


def _clear(folder: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        (folder / str(rank)).unlink()
        folder.rmdir()  # by the last one


def _listen(port: int) -> Socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", port), backlog=1024)


def _keep_alive(peer: Socket) -> None:
    """Let the system notice within a minute that the other host has vanished."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux has them all
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _has_gone(peer: Socket) -> bool:
    try:
        return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False  # silent, but there
    except OSError:
        return True


def _send(peer: Socket, message: bytes) -> None:
    peer.sendall(len(message).to_bytes(8, "little") + message)


def _receive(peer: Socket, limit: int | None = None) -> bytes:
    """Return one message.

    Raises:
        OSError: if the other side has gone.
        ValueError: if the message is longer than `limit` bytes.
    """
    length = int.from_bytes(_read(peer, 8), "little")
    if limit is not None and length > limit:
        raise ValueError(f"a message of {length} bytes")
    return _read(peer, length)


def _read(peer: Socket, n_bytes: int) -> bytes:
    out = bytearray()
    while len(out) < n_bytes:
        piece = peer.recv(min(n_bytes - len(out), 1 << 20))
        if not piece:
            raise ConnectionError("the other side has gone")
        out += piece
    return bytes(out)


def _split_messages(everything: bytes, lengths: Any) -> list[bytes]:
    """Split messages that were strung together."""
    out, start = [], 0
    for length in lengths:
        out.append(everything[start : start + length])
        start += length
    return out


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
