"""Signs of life between the processes of a job: one that is stopped is named, whatever it was at.

Each process other than 0 keeps a connection to process 0, over which threads of both say now and
then how far they are. A process that compiles for an hour goes on saying so; one that was stopped
does not, and a host that is lost does not even acknowledge. Neither needs JAX, or the main thread.
Words for process 0 travel along, so that they cost the main thread nothing.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxgpt.cluster.environment import COORDINATOR
from jaxgpt.cluster.hardware import raise_open_file_limit
from jaxgpt.cluster.process_group import ProcessGroup, own_host
from jaxgpt.cluster.shutdown import FAILED, HUNG, PeerLost
from jaxgpt.cluster.transport import accept_peers, keep_alive, say_rank

CONNECT_SECONDS = 30.0
INTERVAL = 5.0  # seconds between two messages, at most
# The kernel asks a silent host after 15 s, and gives it up 45 s later; so it does with one that
# has not acknowledged a message for a minute. A network that starts anew takes half of that.
KEEPALIVE = {
    "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 9, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 60_000
}  # fmt: skip


class Progress(NamedTuple):
    """How far a process is. All run the same program: the lowest number is the one behind."""

    number: int = 0  # of the activity, counted from the start
    activity: str = "the start"


class Heartbeats:
    """Ends the job if another process is silent for too long."""

    def __init__(self, minutes: float | None, end: Callable[[str, int], Any]):
        """Prepare; `end` ends the job, given a message and a status.

        None for `minutes` waits for ever for a process that was stopped; lost hosts are noticed.
        """
        self._minutes, self._end = minutes, end
        self._group = ProcessGroup(launcher="")  # alone, until connected
        self.on_silence: Callable[[], None] = lambda: None  # before the job is ended
        self.own_progress: Callable[[], Progress] = Progress
        self._interval = INTERVAL if minutes is None else min(60 * minutes / 4, INTERVAL)
        self._peers = selectors.DefaultSelector()
        self._progress: dict[int, Progress] = {}
        # Of messages that are not complete:
        self._received: dict[int, bytes] = {}
        self._unsent: dict[int, bytes] = {}
        self._told: list[int] = []  # processes of which process 0 hears nothing
        # Process -> seconds since it was heard, in which this one was not stopped itself.
        self._silence: dict[int, float] = {}
        self._words = ""
        self.heard: dict[int, str] = {}  # on process 0: the last words of each process
        self._stop = threading.Event()

    def connect(self, group: ProcessGroup) -> None:
        """Connect and begin, all processes together; `PeerLost` if one does not come."""
        self._group = group
        if group.size > 1:
            try:
                self._connect()
            except OSError as error:
                raise PeerLost(
                    f"process {group.rank} on host {group.host_names[group.rank]} cannot connect "
                    f"to process 0 on host {group.host_names[0]} for signs of life ({error}); its "
                    f"hosts have to reach each other at any port, by the name in {COORDINATOR} if "
                    "that is set"
                ) from None
            group.on_close.callback(self.close)
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def tell(self, words: str) -> None:
        """Send words to process 0 with the next signs of life."""
        self._words = words
        if self._group.is_main:
            self.heard[0] = words

    def silent(self) -> list[int]:
        """Return the processes that were not heard of for three intervals, or not by process 0."""
        known = [r for r, s in sorted(dict(self._silence).items()) if s > 3 * self._interval]
        return known or self._told

    def who_waits(self, ranks: list[int]) -> str:
        """Return what `ranks` were last at, and which other processes wait for them at what.

        Without `ranks`, those that are behind the others; empty where none is known to be.
        """
        known = dict(self._progress) | {self._group.rank: self.own_progress()}
        if not ranks:
            least = min(known.values()).number
            ranks = sorted(rank for rank, progress in known.items() if progress.number == least)
        return waiting_sentence(ranks, known, self._group.host_names)

    def close(self) -> None:
        """End the thread; what is connected ends with the process."""
        self._stop.set()

    def _connect(self) -> None:
        group, server = self._group, None
        if group.is_main:
            raise_open_file_limit(2 * group.size + 100)
            server = socket.create_server(("", 0), backlog=1024)
            address = own_host(group), server.getsockname()[1]
        host, port = group.broadcast(address if group.is_main else None)
        if server is None:
            connection = socket.create_connection((host, port), CONNECT_SECONDS)
            say_rank(connection, group.rank, group.size)
            self._keep(0, connection)
            return
        with server:
            for rank, connection in accept_peers(server, group.size, CONNECT_SECONDS):
                self._keep(rank, connection)

    def _keep(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        keep_alive(connection, **KEEPALIVE)
        self._silence[rank], self._received[rank], self._unsent[rank] = 0.0, b"", b""
        self._peers.register(connection, selectors.EVENT_READ, rank)

    def _beat(self) -> None:
        while self._silence and not self._stop.is_set():
            is_main = self._group.is_main
            told = [self.silent(), ""] if is_main else [[], self._words]
            message = json.dumps([*self.own_progress(), *told]).encode() + b"\n"
            for key in list(self._peers.get_map().values()):
                rest = self._unsent[key.data] or message  # of what a stopped process did not take
                with contextlib.suppress(OSError):  # reading says what has become of it
                    self._unsent[key.data] = rest[key.fileobj.send(rest) :]
            sent = time.monotonic()
            for rank in self._silence:
                self._silence[rank] += self._interval
            while (left := sent + self._interval - time.monotonic()) > 0 and self._silence:
                for key, _ in self._peers.select(left):
                    self._hear(key.fileobj, key.data)
            self._look_for_silence()

    def _hear(self, connection: socket.socket, rank: int) -> None:
        try:
            if received := connection.recv(4096):
                self._silence[rank] = 0.0
                *lines, self._received[rank] = (self._received[rank] + received).split(b"\n")
                if lines:
                    *progress, self._told, words = json.loads(lines[-1])
                    self._progress[rank] = Progress(*progress)
                    self.heard |= {rank: words} if words else {}
                return
        except BlockingIOError:
            return
        except ConnectionResetError:  # it was killed: its launcher, or JAX, ends the job
            pass
        except OSError as error:
            name = process_names([rank], self._group.host_names)
            self._end(f"error: {name} is lost: {error.strerror}\n", FAILED)
        self._peers.unregister(connection)  # it has ended
        connection.close()
        del self._silence[rank]

    def _look_for_silence(self) -> None:
        limit = None if self._minutes is None else 60 * self._minutes
        if limit is None or not any(s > limit for s in self._silence.values()):
            return
        self.on_silence()
        time.sleep(2 * self._interval)  # for the others to notice, too
        ranks = [rank for rank, seconds in self._silence.items() if seconds > limit]
        self._end(
            f"error: train.hang_timeout={self._minutes}: nothing is heard for longer than "
            f"{self._minutes:g} minutes of {self.who_waits(ranks)}; what is silent is stopped, or "
            "its host is; start again with the same --out\n",
            HUNG,
        )


def waiting_sentence(
    ranks: list[int], known: Mapping[int, Progress], host_names: tuple[str, ...]
) -> str:
    """Return where `ranks` are, and which of the `known` processes wait for them, and where."""
    at = known[ranks[0]].activity if ranks[0] in known else "the start"
    out = f"{process_names(ranks, host_names)} at {at}"
    waiting: dict[str, list[int]] = {}
    for rank, progress in sorted(known.items()):
        if rank not in ranks:
            waiting.setdefault(progress.activity, []).append(rank)
    words = [f"{process_names(them)} at {activity}" for activity, them in waiting.items()]
    return f"{out}, for which wait {' and '.join(words)}" if words else out


def process_names(ranks: list[int], host_names: tuple[str, ...] = ()) -> str:
    """Return what to call processes: "process 3 on host a", "processes 0, 1 and 3 more"."""
    first = [str(rank) for rank in ranks[:8]]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    hosts = ", ".join(dict.fromkeys(host_names[rank] for rank in ranks[:8])) if host_names else ""
    where = f" on host{'s' * (', ' in hosts)} {hosts}" if hosts else ""
    return f"process{'es' * (len(ranks) > 1)} {', '.join(first)}{more}{where}"
