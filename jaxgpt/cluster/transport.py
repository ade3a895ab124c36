"""Message passing between the processes of a job before JAX is up: over MPI, or over TCP."""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import socket
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxgpt.cluster.environment import Launch, SingleRankUsageError
from jaxgpt.cluster.hardware import raise_open_file_limit
from jaxgpt.cluster.shutdown import FAILED, PeerLost, end_process
from jaxgpt.config import UsageError

HELLO_SECONDS = 10.0  # in which one that has connected says its rank
GRACE_SECONDS = 5.0  # that others wait for process 0 longer than it waits for them
MARK_SECONDS = 2.0  # between two touches of the mark of a process that waits


class MpiTransport:
    """Messages over MPI's world."""

    def __init__(self, launch: Launch, timeout: float):
        """Join the job; `UsageError` if MPI cannot be loaded or makes each process its own job."""
        try:
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise SingleRankUsageError(
                f"{launch.variable}: an MPI launcher started this process but mpi4py cannot load "
                f"an MPI library ({error}); pip install 'jaxgpt[mpi]' brings MPICH"
            ) from None
        self.library = MPI.Get_library_version().split("\n")[0].replace("\x00", "").strip()
        # MPICH would abort in a job of Open MPI's, which makes each process a job of its own.
        fits = launch.launcher != "Open MPI" or not self.library.startswith(("MPICH", "Intel"))
        if fits:
            if not MPI.Is_initialized():
                # mpi4py's own call would keep Python's lock, and no thread could watch the time
                ctypes.CDLL(MPI.__file__).MPI_Init(None, None)
                atexit.register(lambda: MPI.Is_finalized() or MPI.Finalize())
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
            self._comm = MPI.COMM_WORLD.Dup()
            self.rank, self.size = self._comm.rank, self._comm.size
            fits = self.size > 1 or (launch.rank == 0 and (launch.size or 1) == 1)
        if not fits:
            # Where the launcher does not say how many there are, process 0 sees nothing wrong.
            raise (UsageError if launch.size else SingleRankUsageError)(
                f"{launch.variable}: the launcher ({launch.launcher}) started "
                f"{launch.size or 'several'} processes, but mpi4py uses {self.library}, in which "
                "each is a job of its own; start them with that MPI's mpiexec, or install mpi4py "
                "for the launcher's MPI (pip install --no-binary mpi4py mpi4py)"
            )

    def allgather(self, message: bytes) -> list[bytes]:
        """Return the messages of all processes, a line each, by rank."""
        lengths = array("q", [0] * self.size)
        self._wait(self._comm.Iallgather(array("q", [len(message)]), lengths))
        gathered = bytearray(sum(lengths))
        self._wait(self._comm.Iallgatherv(message, [gathered, lengths]))
        ends = itertools.accumulate(lengths)
        return [bytes(gathered[end - n : end]) for n, end in zip(lengths, ends, strict=True)]

    def all_are_here(self) -> None:
        """Wait for ever from now on; `arrival_limit` has ended."""

    def lost_peers(self) -> list[int]:
        return []  # MPI's launcher ends a job that has lost a process

    def close(self) -> None:
        self._comm.Free()  # MPI itself stays: it cannot be started twice

    @staticmethod
    def _wait(request: Any) -> None:
        """Wait without spinning: processes may share cores with the one that is at work."""
        while not request.Test():
            time.sleep(0.005)


class TcpTransport:
    """Messages over TCP connections between process 0 and each other process."""

    def __init__(self, launch: Launch, timeout: float):
        """Connect all to process 0 at `launch.address`; `PeerLost` after `timeout` seconds."""
        assert launch.address and launch.size
        self.rank, self.size = launch.rank, launch.size
        self._timeout = timeout
        self._open = contextlib.ExitStack()
        self._peers: dict[int, socket.socket] = {}
        self._streams: dict[int, BinaryIO] = {}
        try:
            if self.rank == 0:
                self._accept_peers(launch.address, timeout)
            else:
                peer = connect_to_rank0(launch.address, self.rank, timeout)
                say_rank(peer, self.rank, self.size)
                self._keep(0, peer)
            self.allgather(b"")  # nobody goes on before all are there
        except PeerLost:
            self.close()
            raise

    def allgather(self, message: bytes) -> list[bytes]:
        if self.rank:
            try:
                _send(self._streams[0], message)
                return [_receive(self._streams[0]) for _ in range(self.size)]
            except TimeoutError:
                raise PeerLost(silent_sentence(0, self._timeout)) from None
            except OSError:  # process 0 has said why, if it could
                time.sleep(1)
                raise PeerLost from None
        messages = [message]
        for rank in range(1, self.size):
            try:
                messages.append(_receive(self._streams[rank]))
            except TimeoutError:
                raise PeerLost(silent_sentence(rank, self._timeout)) from None
            except OSError:
                raise PeerLost(lost_sentence(rank)) from None
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # noticed at the next exchange
                _send(stream, b"\n".join(messages))
        return messages

    def all_are_here(self) -> None:
        """Wait for ever from now on."""
        for peer in self._peers.values():
            peer.settimeout(None)

    def lost_peers(self) -> list[int]:
        """Return the processes connected to this one that have ended."""
        return [rank for rank, peer in sorted(self._peers.items()) if _has_gone(peer)]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was not sent is for one that has gone
            self._open.close()

    def _accept_peers(self, address: str, timeout: float) -> None:
        raise_open_file_limit(self.size + 100)  # one connection for each process
        port = int(address.rpartition(":")[2])
        v6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if v6 else socket.AF_INET
        try:
            server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=v6, backlog=1024
            )
        except OSError as error:
            raise PeerLost(
                f"{address}: process 0 cannot listen at this port ({error.strerror}); set "
                "JAXGPT_COORDINATOR to another host:port for all processes"
            ) from None
        with server:
            for rank, peer in accept_peers(server, self.size, timeout):
                self._keep(rank, peer)

    def _keep(self, rank: int, peer: socket.socket) -> None:
        """Let the system notice within a minute that the host of a peer has vanished."""
        # Process 0 waits for all others: it is the first to give up, and says for whom it waited.
        peer.settimeout(self._timeout + (GRACE_SECONDS if self.rank else 0))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(peer, TCP_KEEPIDLE=30, TCP_KEEPINTVL=10, TCP_KEEPCNT=3)
        self._peers[rank] = self._open.enter_context(peer)
        self._streams[rank] = self._open.enter_context(peer.makefile("rwb"))


def say_rank(peer: socket.socket, rank: int, size: int) -> None:
    """Say to process 0, for `accept_peers`, which process of how many has connected."""
    peer.sendall(json.dumps([rank, size]).encode() + b"\n")


def accept_peers(
    server: socket.socket, size: int, timeout: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield rank and connection of each other process of a job of `size`, as they come.

    What does not say a rank is none of ours, and ignored. Raises `PeerLost` if one has not come
    after `timeout` seconds, or does not fit.
    """
    deadline, arrived = time.monotonic() + timeout, {0}
    while len(arrived) < size:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            peer, _ = server.accept()
        except TimeoutError:
            raise PeerLost(missing_sentence(arrived, size, timeout)) from None
        peer.settimeout(HELLO_SECONDS)
        try:
            with peer.makefile("rb", buffering=0) as stream:  # what follows the line stays unread
                rank, its_size = map(int, json.loads(stream.readline(64)))
        except (OSError, ValueError, TypeError):
            peer.close()
            continue
        if its_size != size or rank in arrived or not 0 < rank < size:
            peer.close()
            raise PeerLost(
                f"a process came as rank {rank} of {its_size}, but this is a job of {size} "
                f"processes with {len(arrived)} here already; each needs a rank of its own and the "
                "same size"
            )
        arrived.add(rank)
        yield rank, peer


def keep_alive(peer: socket.socket, **options: int) -> None:
    """Let the system ask a silent peer; `options` are TCP's, by their names in `socket`."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        if hasattr(socket, option):  # Linux has them all
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def connect_to_rank0(address: str, rank: int, timeout: float) -> socket.socket:
    """Connect to host:port of process 0, which may not listen yet; `PeerLost` after `timeout` s."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"process {rank} on host {socket.gethostname()} cannot reach process 0 at "
                    f"{address} ({error}) within {timeout:.0f} s (--init-timeout); if it has "
                    "started, set JAXGPT_COORDINATOR=host:port to a name of its host that all "
                    "hosts can reach"
                ) from None
            time.sleep(0.1)


@contextlib.contextmanager
def arrival_limit(launch: Launch, timeout: float) -> Iterator[None]:
    """End this process if the block, in which MPI waits for all processes, takes too long.

    MPI cannot say who is missing: those that wait leave a mark in a folder that all hosts see, and
    touch it as long as they are not stopped.
    """
    done = threading.Event()
    deadline = time.monotonic() + timeout
    patience = min(10.0, timeout / 2)  # longer than starts take, so that most leave no marks
    mark = _arrivals_folder() / str(launch.rank)

    def watch() -> None:
        if done.wait(patience):
            return
        arrived = {launch.rank}
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
        while not (ended := done.is_set()) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                mark.touch()
            done.wait(min(left, MARK_SECONDS))
        if missed := not ended:
            with contextlib.suppress(OSError):
                times = {int(f.name): f.stat().st_mtime for f in mark.parent.iterdir()}
                recent = max(times.values(), default=0) - 4 * MARK_SECONDS  # not of an earlier job
                arrived |= {rank for rank, touched in times.items() if touched > recent}
            if launch.rank == min(arrived):
                error = missing_sentence(arrived, launch.size, timeout)
                print(f"error: {error}", file=sys.stderr, flush=True)
            time.sleep(2)  # the others look too
        with contextlib.suppress(OSError):
            mark.unlink()
            mark.parent.rmdir()  # by the last one
        if missed:
            end_process(FAILED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


Transport = MpiTransport | TcpTransport


def lost_sentence(rank: int) -> str:
    return f"process {rank} has ended; its own output may say why"


def silent_sentence(rank: int, timeout: float) -> str:
    return (
        f"process {rank} came, and was then silent for {timeout:.0f} s (--init-timeout): it is "
        "stopped, or its host is"
    )


def missing_sentence(arrived: set[int], size: int | None, timeout: float) -> str:
    """Return the error that names the processes which did not arrive."""
    of = f" of {size}" if size else ""
    missing = [str(rank) for rank in range(size or 0) if rank not in arrived]
    names = ", ".join(missing[:20]) + (" ..." if len(missing) > 20 else "")
    who = f"; missing: rank {names}" if missing else ""
    return (
        f"{len(arrived)}{of} processes arrived within {timeout:.0f} s (--init-timeout){who}; look "
        "at the output and the host of what is missing, or give a larger --init-timeout"
    )


def _arrivals_folder() -> Path:
    """Return a folder of this job alone: by the job's name, or by its launcher's process."""
    names = ("PALS_APID", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID")
    job = next((os.environ[n] for n in names if os.environ.get(n)), None)
    if job and "SLURM_STEP_ID" in os.environ:
        job += f".{os.environ['SLURM_STEP_ID']}"
    if job is None:  # Hydra starts each process in a session of its own
        stat = Path(f"/proc/{os.getsid(0)}/stat")
        launcher = stat.read_text().rpartition(")")[2].split()[1] if stat.exists() else ""
        job = f"{socket.gethostname()}-{launcher}"
    return Path.home() / ".cache" / "jaxgpt" / "arrivals" / job.replace("/", "_")


def _has_gone(peer: socket.socket) -> bool:
    try:
        return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False  # silent, but there
    except OSError:
        return True


def _send(stream: BinaryIO, message: bytes) -> None:
    stream.write(message + b"\n")
    stream.flush()


def _receive(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the other side has gone")
    return line[:-1]
