"""Thread that connects a process to its job and detects failures and hangs.

Each process other than process 0 has a TCP connection to process 0. The thread serves this
connection, so a process answers even while its main thread compiles for an hour. Each message is
one line of JSON:

    ["beat", number, activity, overdue, words]  Both ways: I am alive and have made this progress.
    ["gather", value]     To process 0: this is my value for a collective.
    ["combined", result]  From process 0: this is the collective's result.
    ["failed", status]    To process 0: I have an error to report.
    ["report"]            From process 0: your error came first, so print it and exit.
    ["end", status]       From process 0: the job's failure has been reported, so exit.
    ["stacks"]            Both ways: the job hangs, so write the stacks of your threads to a file.
    ["bye"]               Both ways: I am leaving the job without an error.

Process 0 terminates the job if a process reports an error, disconnects, is silent for too long, or
makes no progress. The other processes only watch process 0.
"""

import asyncio
import atexit
import contextlib
import faulthandler
import glob
import json
import os
import queue
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.cluster.environment import Launch, job_name
from jaxgpt.cluster.shutdown import (
    FAILED,
    HUNG,
    end_process,
    report_and_end,
    write_if_read,
)
from jaxgpt.cluster.timeouts import ANSWER, HEARTBEAT, LOST_HOST, SETTLE, TICK

MAX_LINE = 2**30  # bytes per message


class HangLimit(NamedTuple):
    """Time that a process may be silent, or spend on one activity, before it counts as hanging.

    Activities before the first `Monitor.heartbeat` have no limit. A heartbeat can allow more time.
    """

    seconds: float
    setting: str  # the user's setting, such as `train.hang_timeout=30`


class Progress(NamedTuple):
    """Progress of a process. The process with the lowest `number` is the furthest behind."""

    number: int = 0  # of the activity; all processes count the same activities
    activity: str = "the start"
    is_overdue: bool = False  # whether the activity exceeds its time limit


class Peer:
    """A process at the other end of a connection."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.progress = Progress()
        self.silence = 0.0  # seconds since its last message

    def send(self, *message: Any) -> None:
        self.writer.write(encode(*message))


class Monitor:
    """Monitors a job from one of its processes, and ends the job if any process fails or hangs.

    Hangs are detected only if a `HangLimit` is given. To detect hangs in a single-process job, call
    `start` instead of `connect`.
    """

    def __init__(self, limit: HangLimit | None = None):
        """Create a monitor without starting its thread."""
        self.rank, self.size = 0, 1
        self.host_names: tuple[str, ...] = ()  # by rank; empty until known
        self.received: dict[int, str] = {}  # on process 0: newest message by rank
        self.stalled = 0.0  # seconds since `connect` when the OS did not run this process
        self.on_hang: Callable[[], None] = lambda: None  # called before exiting because of a hang
        self.stacks = self.advice = ""  # for the reports of hangs and lost processes
        self._limit = limit
        self._interval = min(HEARTBEAT, limit.seconds / 4) if limit else HEARTBEAT
        self._progress, self._words = Progress(), ""
        self._allowed = self._spent = 0.0  # time limit and elapsed time of the current activity
        self._peers: dict[int, Peer] = {}
        # On process 0, values of the current collective, and the function that combines them.
        self._parts: dict[int, Any] = {}
        self._combine: Callable[[list[Any]], Any] = list
        self._combined: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._report = "", FAILED  # printed if this process is chosen to report
        self._is_announcing = self._is_failing = self._is_decided = False
        self._main_left = False  # whether process 0 has left the job without an error
        self._thread: threading.Thread | None = None

    # Called from the main thread.

    def start(self) -> None:
        """Start the thread unless it is already running, and stop it when the process exits."""
        if self._thread is None:
            is_up = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(is_up,), daemon=True)
            self._thread.start()
            is_up.wait()
            atexit.register(self.close)

    def connect(self, rank: int, size: int, connection: socket.socket, timeout: float) -> None:
        """Connect all processes to process 0, and start the thread.

        On process 0, `connection` is a listening socket. On other processes, it is connected to
        process 0. Only process 0 waits for the other processes. If some processes do not connect
        within `timeout` seconds, process 0 prints the ranks of up to 20 of them and terminates the
        job. It also terminates the job if a process reports an invalid or duplicate rank, or a
        different number of processes. In both cases, the status is 1. There must be at least two
        processes.
        """
        self.rank, self.size = rank, size
        self.start()
        meeting = self._accept(connection, timeout) if rank == 0 else self._join(connection)
        asyncio.run_coroutine_threadsafe(meeting, self._loop).result()

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Return `function(values)`, where `values` has each process's value in rank order.

        Only process 0 calls `function`, which must not raise errors, and sends the result to the
        other processes. All values and the result must be JSON values. If there are several
        processes, they are converted to JSON and back, so tuples become lists. All processes must
        call this.
        """
        if self.size == 1:
            return function([value])
        if self.rank == 0:
            self._combine = function
            self._loop.call_soon_threadsafe(self._contribute, 0, value)
        else:
            self._loop.call_soon_threadsafe(self._peers[0].send, "gather", value)
        return self._combined.get()

    def heartbeat(self, activity: str, min_seconds: float = 0.0) -> None:
        """Report the start of `activity`.

        If there is a `HangLimit`, the job ends with status 70 when the activity takes longer than
        both the limit and `min_seconds`. A single-process job must call `start` first. All
        processes must report the same activities in the same order.
        """
        self._allowed = max(min_seconds, self._limit.seconds if self._limit else 0.0)
        self._progress, self._spent = Progress(self._progress.number + 1, activity), 0.0
        if self._peers and not self._is_announcing:  # one heartbeat covers many activities
            self._is_announcing = True
            delay = TICK / 4 * max(1, self.size / 100)  # process 0 receives at most 10,000/s
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._announce)

    def send(self, words: str) -> None:
        """Piggyback a message on the heartbeats to process 0, which stores it in `received`.

        The message replaces the previous one, and must not be empty.
        """
        self._words = words
        if self.rank == 0:
            self.received[0] = words

    def watch_pipe(self, pipe: int, receive: Callable[[], None]) -> None:
        """Call `receive` in the monitor's thread whenever `pipe` (a file descriptor) is readable.

        This starts the thread.
        """
        self.start()
        self._loop.call_soon_threadsafe(self._loop.add_reader, pipe, receive)

    def write_stacks_to(self, directory: Path) -> None:
        """When a hang is detected, write this process's stacks to hang-RANK.txt in `directory`.

        The hang report names these files, even if they cannot be written. The reports of hangs and
        lost processes also say how to resume the run.
        """
        self.on_hang = lambda: _write_stacks(directory / f"hang-{self.rank}.txt")
        self.stacks = f"; {directory}/hang-<process>.txt has the stacks of each process"
        self.advice = "; to resume, start again with the same --out"

    def end_job(self, report: str, status: int) -> None:
        """Print `report` and terminate all processes with `status`.

        If another process has failed first or is lost, that failure is reported instead, with its
        status. If process 0 is lost or stopped, only process 1 and the first process on another
        host print their reports. Returns only if called in the monitor's thread, which then
        terminates the job.
        """
        write_if_read("", sys.stdout)
        if self._thread is None:
            report_and_end(report, status)
        self._loop.call_soon_threadsafe(self._fail, report, status)
        if threading.current_thread() is not self._thread:
            threading.Event().wait()

    @contextlib.contextmanager
    def arrival_limit(self, launch: Launch, timeout: float) -> Iterator[None]:
        """Terminate this process with status 1 if the block takes longer than `timeout` seconds.

        The block starts MPI, which waits for all processes. When a process exits, the launcher
        terminates the job. The error lists up to 20 missing ranks if the number of processes is
        known and files can be created in the home directory. If the hosts do not share that
        directory, processes on other hosts count as missing. Usually only the waiting process with
        the lowest rank prints the error. This starts the thread, which may create files in
        ~/.cache/jaxgpt (under /tmp if HOME is not set) and removes them afterwards.
        """
        self.start()
        waiting = asyncio.run_coroutine_threadsafe(self._limit_arrival(launch, timeout), self._loop)
        try:
            yield
        finally:
            waiting.cancel()

    def close(self) -> None:
        """Leave the job and stop the thread.

        This waits at most `ANSWER` seconds for the other processes to close their connections. If
        the job is failing, this process is terminated. Does nothing if the thread is not running.
        """
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(4 * ANSWER)  # less if the job is failing
            self._thread = None
            atexit.unregister(self.close)

    # The thread and its connections.

    def _run(self, is_up: threading.Event) -> None:
        try:
            asyncio.run(self._main(is_up))
        except BaseException:  # a bug here must not leave the job without a monitor
            report_and_end(traceback.format_exc(), FAILED)

    async def _main(self, is_up: threading.Event) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._on_defect)
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._beat())
            is_up.set()
            await self._closing.wait()
            if self._is_failing:  # this process will be terminated
                await asyncio.Event().wait()
            for peer in self._peers.values():
                peer.send("bye")
            # Let the other side close first. If this side closed with unread data, the kernel would
            # reset the connection and "bye" could be lost.
            await self._until_gone(self._peers.keys(), ANSWER)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        self._fail("".join(traceback.format_exception(error)), FAILED)

    async def _accept(self, server: socket.socket, timeout: float) -> None:
        self._all_here = asyncio.Event()
        listening = await asyncio.start_server(self._greet, sock=server, limit=MAX_LINE)
        try:
            await asyncio.wait_for(self._all_here.wait(), timeout)
        except TimeoutError:
            missing = set(range(1, self.size)) - self._peers.keys()
            self._fail(_missing_sentence(missing, self.size, timeout), FAILED)
        listening.close()
        self._tasks.create_task(self._measure_stalls())

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a process. Terminate the job if the process reports a wrong rank or job size."""
        try:
            rank, size = json.loads(await asyncio.wait_for(reader.readline(), ANSWER))
            fits = size == self.size and 0 < rank < size and rank not in self._peers
        except (OSError, ValueError, TypeError):
            writer.close()
            return
        if not fits:
            error = (
                f"error: a process connected as rank {rank} of {size}, but this job has "
                f"{self.size} processes, and {1 + len(self._peers)} are connected; give each "
                "process a different rank and the same size\n"
            )
            self._fail(error, FAILED)
            return
        self._add_peer(rank, reader, writer)
        if len(self._peers) == self.size - 1:
            self._all_here.set()

    async def _join(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
        writer.write(encode(self.rank, self.size))
        self._add_peer(0, reader, writer)
        self._tasks.create_task(self._measure_stalls())

    def _add_peer(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        keep_alive(writer)
        self._peers[rank] = Peer(writer)
        self._tasks.create_task(self._listen(rank, self._peers[rank], reader))

    async def _listen(self, rank: int, peer: Peer, reader: asyncio.StreamReader) -> None:
        message, loss = None, "exited unexpectedly; its output may say why"
        try:
            while message != ["bye"] and (line := await reader.readline()).endswith(b"\n"):
                message, peer.silence = json.loads(line), 0.0
                self._receive(rank, peer, message)
        except OSError as error:
            if not isinstance(error, ConnectionResetError | BrokenPipeError):  # not killed
                loss = f"is unreachable: {error.strerror}"  # the host does not respond
        del self._peers[rank]
        peer.writer.close()
        self._main_left |= rank == 0 and message == ["bye"]
        if message != ["bye"] and not self._closing.is_set():
            name = process_names([rank], self.host_names)
            self._fail(f"error: {name} {loss}{self.advice}\n", FAILED, delay=0.0)

    def _receive(self, rank: int, peer: Peer, message: list[Any]) -> None:
        match message:
            case ["beat", *progress, words]:
                peer.progress = Progress(*progress)
                self.received |= {rank: words} if words else {}
            case ["gather", value]:
                self._contribute(rank, value)
            case ["combined", result]:
                self._combined.put(result)
            case ["failed", status]:
                self._tasks.create_task(self._end_all(rank, status, SETTLE))
            case ["report"]:
                report_and_end(*self._report)
            case ["end", status]:
                report_and_end("", status)
            case ["stacks"]:
                self._note_hang()

    def _contribute(self, rank: int, value: Any) -> None:
        """Record a process's value for a collective. If all have arrived, send out the result.

        Only process 0 calls this.
        """
        self._parts[rank] = value
        if len(self._parts) == self.size:
            values = [value for _, value in sorted(self._parts.items())]
            answer = encode("combined", self._combine(values))
            self._parts.clear()
            for peer in self._peers.values():
                peer.writer.write(answer)
            self._combined.put(json.loads(answer)[1])

    # Hang detection. The clocks advance at each heartbeat, so they stop if this process is stopped.

    def _announce(self) -> None:
        """Send a heartbeat to all peers."""
        self._is_announcing = False
        line = encode("beat", *self._own_progress(), self._words)
        for peer in self._peers.values():
            peer.writer.write(line)

    async def _beat(self) -> None:
        while True:
            self._announce()
            await asyncio.sleep(self._interval)
            self._spent += self._interval
            for peer in self._peers.values():
                peer.silence += self._interval
            if self._limit is not None and not self._is_failing:
                await self._look_for_hang(self._limit)

    def _own_progress(self) -> Progress:
        is_overdue = self._progress.number > 0 and self._spent > self._allowed
        return self._progress._replace(is_overdue=is_overdue)

    def _known(self) -> dict[int, Progress]:
        """Return the progress of this process and the last known progress of its peers."""
        known = {rank: peer.progress for rank, peer in self._peers.items()}
        return known | {self.rank: self._own_progress()}

    def _silent(self, seconds: float) -> list[int]:
        return [rank for rank, peer in self._peers.items() if peer.silence > seconds]

    async def _look_for_hang(self, limit: HangLimit) -> None:
        silent = self._silent(limit.seconds)
        overdue = self.rank == 0 and any(p.is_overdue for p in self._known().values())
        # If a process may have been stopped, wait until it has been silent for long enough, so that
        # the report names it and not the processes waiting for it.
        if not silent and (not overdue or self._silent(3 * self._interval)):
            return
        for peer in self._peers.values():
            peer.send("stacks")
        self._note_hang()
        await asyncio.sleep(self._interval)  # wait for stacks and progress
        report = hang_sentence(silent, limit, self._known(), self.host_names)
        self._fail(f"error: {report}{self.stacks}{self.advice}\n", HUNG)

    def _note_hang(self) -> None:
        # Use another thread, because the hang may be in a file system or a pipe.
        threading.Thread(target=self.on_hang, daemon=True).start()

    async def _measure_stalls(self) -> None:
        """Add up the delays of this thread's wake-ups."""
        began = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            late, began = now - began - TICK, now
            if late > TICK / 2:
                self.stalled += late

    # Termination of a failed job.

    def _fail(self, report: str, status: int, delay: float = SETTLE) -> None:
        """Terminate the job. Print `report`, unless process 0 knows of an earlier failure."""
        if not self._is_failing or delay == 0.0:  # ignore later errors, except losses
            self._report = report, status
        self._is_failing = True
        ending = self._ask_to_report() if self.rank else self._end_all(0, status, delay)
        self._tasks.create_task(ending)

    async def _ask_to_report(self) -> None:
        if 0 in self._peers and not self._silent(3 * self._interval):
            self._peers[0].send("failed", self._report[1])
            await asyncio.sleep(2 * ANSWER)
        if self._main_left:  # nobody else decides who reports
            report_and_end(*self._report)
        # Process 0 is lost or stopped, so process 1 reports the error. The first process on another
        # host reports it too, because the host of processes 0 and 1 may be lost.
        elsewhere = (r for r, name in enumerate(self.host_names) if name != self.host_names[0])
        if self.rank in (1, next(elsewhere, 1)):
            report_and_end(*self._report)
        # Let these processes report first, because the MPI launcher kills the others when a process
        # exits. If process 0 is lost, a short wait is enough, because all processes detect the loss
        # at once.
        await asyncio.sleep(ANSWER if 0 in self._peers else SETTLE)
        end_process(self._report[1])

    async def _end_all(self, rank: int, status: int, delay: float) -> None:
        """On process 0, ask `rank` to report the job's first error, then terminate all processes.

        Later errors are ignored. This first waits for `delay` seconds, because the error may be due
        to a lost process. If a lost process is detected meanwhile, the loss is reported instead.
        """
        self._is_failing = True
        await asyncio.sleep(delay)
        if self._is_decided:
            return
        self._is_decided = True
        if rank == 0:
            write_if_read(self._report[0], sys.stderr)
        elif rank in self._peers:
            self._peers[rank].send("report")
            await self._until_gone({rank}, ANSWER)
        for peer in self._peers.values():
            peer.send("end", status)
        # Terminate the others first. They would print pages of JAX errors if JAX's coordinator on
        # process 0 exited before them.
        await self._until_gone(self._peers.keys() - self._silent(3 * self._interval), ANSWER)
        report_and_end("", status)

    async def _until_gone(self, ranks: Collection[int], seconds: float) -> None:
        deadline = self._loop.time() + seconds
        while self._peers.keys() & ranks and self._loop.time() < deadline:
            await asyncio.sleep(TICK)

    async def _limit_arrival(self, launch: Launch, timeout: float) -> None:
        """After `timeout` seconds, list the processes that did not start, and end this process.

        MPI cannot tell which processes are missing. Therefore, after half of the timeout, each
        waiting process creates a file in a folder that all hosts share.
        """
        await asyncio.sleep(timeout / 2)
        home = os.environ.get("HOME") or "/tmp"  # no shared folder without $HOME
        folder = Path(home, ".cache/jaxgpt/starting", job_name(os.environ))
        try:
            with contextlib.suppress(OSError):  # not writable: list no ranks
                folder.mkdir(parents=True, exist_ok=True)
                (folder / str(launch.rank)).touch()
            await asyncio.sleep(timeout / 2)
            arrived = {int(name) for name in glob.glob("[0-9]*", root_dir=folder)}
            # The lowest rank reports and exits first, but not before all have listed the folder.
            await asyncio.sleep(ANSWER if launch.rank > min(arrived, default=0) else SETTLE)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        missing = set(range(launch.size or 0)) - arrived if arrived else ()
        sys.stderr.write(_missing_sentence(missing, launch.size, timeout))
        end_process(FAILED)


def encode(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Make the kernel close the connection if the peer sends no ACK for `LOST_HOST` seconds.

    This may take longer on macOS, which does not support all of these socket options.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": LOST_HOST / 4, "TCP_KEEPINTVL": LOST_HOST * 3 / 20, "TCP_KEEPCNT": 5,
        "TCP_USER_TIMEOUT": LOST_HOST * 1000,
    }  # fmt: skip
    for name, value in options.items():
        if hasattr(socket, name):  # some are missing on macOS
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))


def _write_stacks(file: Path) -> None:
    # A full or unreachable disk must not keep the job alive.
    with contextlib.suppress(OSError), file.open("w") as opened:
        faulthandler.dump_traceback(opened, all_threads=True)


def _missing_sentence(missing: Collection[int], size: int | None, timeout: float) -> str:
    """Return the error line for processes that did not start. It lists up to 20 `missing` ranks.

    `missing` is empty if the ranks are unknown. `size` is None if the number of processes is
    unknown. `timeout` is in seconds.
    """
    names = ", ".join(map(str, sorted(missing)[:20])) + (" ..." if len(missing) > 20 else "")
    which = f"{len(missing)} of {size}" if missing else f"some of the {size or ''}".rstrip()
    return (
        f"error: {which} processes did not start within {timeout:.0f} s (--init-timeout)"
        f"{'; missing ranks: ' * bool(missing)}{names}; check their output and their hosts, or "
        "set a larger --init-timeout\n"
    )


def hang_sentence(
    silent: list[int], limit: HangLimit, known: dict[int, Progress], hosts: tuple[str, ...]
) -> str:
    """Return a sentence that names the hanging and the waiting processes and their activities.

    The `silent` ranks are reported as hanging. If there are none, the processes that are furthest
    behind are reported. All of them are reported with the activity of the lowest rank. `known` maps
    ranks to their last known progress. `hosts` has the host name of each rank; if it is empty, no
    hosts are named. Hosts of waiting processes are not named. `process_names` shortens long lists.
    """
    least = min(progress.number for progress in known.values())
    ranks = sorted(silent or (rank for rank, p in known.items() if p.number == least))
    activity = known.get(ranks[0], Progress()).activity
    what = "not been heard from" if silent else "made no progress"
    waiting: dict[str, list[int]] = {}
    for rank, progress in sorted(known.items()):
        if rank not in ranks:
            waiting.setdefault(progress.activity, []).append(rank)
    one = len(ranks) == 1
    return "; ".join(
        [
            f"{limit.setting}: {process_names(ranks, hosts)} at {activity} "
            f"{'has' if one else 'have'} {what} for {limit.seconds / 60:.3g} minutes",
            *(
                f"{process_names(others)} {'is' if len(others) == 1 else 'are'} waiting for "
                f"{'it' if one else 'them'} at {where}"
                for where, others in waiting.items()
            ),
            *["the process or its host has stopped responding"] * bool(silent),
        ]
    )


def process_names(ranks: list[int], hosts: tuple[str, ...] = ()) -> str:
    """Return "process 3 on host a", "processes 0, 1 and 2" and so on.

    At most 8 of the `ranks` are listed, with their hosts. The rest are only counted. `hosts` has
    the host name of each process of the job. If it is empty, no hosts are named.
    """
    names = [*map(str, ranks[:8]), *[f"{len(ranks) - 8} more"] * (len(ranks) > 8)]
    text = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    on = list(dict.fromkeys(hosts[rank] for rank in ranks[:8])) if hosts else []
    where = f" on host{'s' * (len(on) > 1)} {', '.join(on)}" if on else ""
    return f"process{'es' * (len(ranks) > 1)} {text}{where}"
