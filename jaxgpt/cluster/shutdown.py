"""How a job ends: all processes together, with an exit status that a job script can act on."""

import atexit
import contextlib
import io
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from jaxgpt.cluster.environment import SingleRankUsageError, find_launch, rank_from_env
from jaxgpt.cluster.transport import PeerLost
from jaxgpt.config import UsageError

DONE = 0
FAILED = 1
BAD_USAGE = 2
HUNG = 70  # ended by the watchdog (EX_SOFTWARE in sysexits.h)
STOPPED = 75  # on a signal or a time limit, with a checkpoint saved (EX_TEMPFAIL in sysexits.h)

FAILURE = "jaxgpt/first_to_fail"  # in JAX's key-value store: its rank and the exit status
LOOK_EVERY = 5  # seconds
UNTIL_ENDED = 2 * LOOK_EVERY + 3  # seconds by which the first to fail has ended a process
LEAVE_LIMIT = 20  # seconds after which process 0 does not answer any more
STDOUT, STDERR = 1, 2  # file descriptors
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)  # that stop a run after a step


@contextlib.contextmanager
def job_exit_handler() -> Iterator[None]:
    """Turns an exception of any process into the end of the whole job.

    A `UsageError` is one line and status 2; any other exception is its traceback and status 1,
    as the last thing that the job prints: processes that fail only because their peer has gone
    keep silent. Where nobody reads on, as after `| head`, a lone process ends like one that
    SIGPIPE has killed.
    """
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it lacks is not worth a run
        sys.stdout.reconfigure(errors="replace")
    try:
        _check_encoding(sys.argv)
        yield
        sys.stdout.flush()
    except SingleRankUsageError as error:
        line = f"error: process {rank_from_env()} on host {platform.node()}: {error}"
        print(line, file=sys.stderr, flush=True)
        os._exit(BAD_USAGE)
    except UsageError as error:
        if _connected():
            leave(f"error: {error}\n", BAD_USAGE)
        if rank_from_env() == 0:  # until JAX is connected all processes raise the same error
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_USAGE) from None
    except KeyboardInterrupt:  # before training has begun, or the second of its kind
        if "jax" in sys.modules and find_launch(os.environ).through is None:
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)  # XLA, interrupted in compiling, may crash at exit
        raise SystemExit(128 + signal.SIGINT) from None
    except PeerLost as error:
        if _connected():  # one that failed says why, and ends this process
            time.sleep(UNTIL_ENDED)
        if error.args:  # one that was killed does not
            print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)  # what runs at exit would wait for the lost one
    except Exception as error:  # whatever ends this process is to end the others
        if find_launch(os.environ).through is not None:
            leave(traceback.format_exc(), FAILED)
        if not (isinstance(error, BrokenPipeError) and _nobody_reads()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what Python writes at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


def _open_what_is_closed() -> None:
    """Where a shell has closed stdout or stderr (`>&-`), what is written there is written nowhere.

    Another file would get the descriptor, and what libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w")
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w")


def _check_encoding(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{argument!r}: is not UTF-8; give it in that encoding") from None


def _nobody_reads() -> bool:
    """Whether what is written to stdout goes nowhere, because it is a pipe without a reader."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def end_with_the_first_to_fail() -> None:
    """Has this process end when another one of the connected job fails.

    For jobs without MPI, which would do it: otherwise the others would only notice that
    heartbeats are missed.
    """
    from jax._src import distributed

    client, rank = distributed.global_state.client, distributed.global_state.process_id
    at_exit = threading.Event()

    def watch() -> None:
        found = None
        while found is None and not at_exit.wait(LOOK_EVERY):
            with contextlib.suppress(Exception):  # nobody has failed, or process 0 is gone
                found = client.key_value_try_get(FAILURE)
        if found is None:
            return
        first, status = map(int, found.split())
        if rank == first:
            return  # it still has something to say
        if rank == 0:
            time.sleep(LOOK_EVERY + 2)  # it keeps the store, where the others look
        os._exit(status)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    atexit.register(thread.join)
    atexit.register(at_exit.set)  # runs first


def _connected() -> bool:
    """Whether this process is part of a running `jax.distributed` job."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def leave(report: str, status: int, until_abort: float = 1) -> NoReturn:
    """Ends the job with `status`; prints `report` unless another process failed first.

    Process 0 is asked who that was, and may be the one that hangs: after 20 s without an answer
    process 1 prints its own report, or if it does not either, the others theirs.

    Args:
        until_abort: seconds in which the others of a connected job come to wait for this process,
            and print no more.
    """
    with contextlib.suppress(RuntimeError):  # there may be no room for another thread
        threading.Timer(LEAVE_LIMIT, _leave_unasked, [report, status]).start()
    with contextlib.suppress(BrokenPipeError):  # that nobody reads may be what it is about
        sys.stdout.flush()
    first = _first_to_fail(status)
    if not first:
        if first is False:  # that one says why
            _hush()
        time.sleep(UNTIL_ENDED)
        os._exit(status)
    if _connected():
        time.sleep(until_abort)
    print(report, file=sys.stderr, end="", flush=True)
    abort_mpi(status, 0.5)
    if _connected() and rank_from_env() == 0:
        time.sleep(LOOK_EVERY + 2)  # it keeps the store, where the others look
    os._exit(status)


def abort_mpi(status: int, after: float = 0) -> None:
    """Ends the job with `status` where MPI runs it; returns where it does not.

    Where processes only end, MPICH's mpiexec may give the status of one that it has killed.

    Args:
        after: seconds for the launcher to pass on what was printed.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    with_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if with_mpi and mpi.COMM_WORLD.size > 1:  # not alone in a world that was of no use
        time.sleep(after)
        _hush()  # MPI would add a line of its own
        mpi.COMM_WORLD.Abort(status)


def _leave_unasked(report: str, status: int) -> None:
    if _connected():
        from jax._src import distributed

        if distributed.global_state.process_id != 1:
            time.sleep(UNTIL_ENDED)  # process 1 speaks, and where MPI runs the job ends it
    print(report, file=sys.stderr, end="", flush=True)
    abort_mpi(status, 0.5)
    os._exit(status)


def _hush() -> None:
    """Nothing that this process prints is seen any more.

    Another one says why the job ends. JAX has something to say, too, and at length, where process 0
    ends before the launcher has ended the others.
    """
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), STDOUT)
        os.dup2(nothing.fileno(), STDERR)


def _first_to_fail(status: int) -> bool | None:
    """Whether no other process has failed yet; None if process 0, which knows, is gone."""
    if not _connected():
        return True
    from jax._src import distributed  # JAX has no public key-value store

    try:
        # The store refuses a key that it has, so exactly one process can set it.
        state = distributed.global_state
        state.client.key_value_set(FAILURE, f"{state.process_id} {status}")
        return True
    except Exception as error:  # of JAX's client or gRPC: the job ends, whatever it is
        return False if "ALREADY_EXISTS" in str(error) else None


class StopSignal:
    """SIGTERM, SIGINT or a time limit, turned into a step at which all processes stop.

    >>> stop = StopSignal()  # installs the handlers
    >>> stop.reached(1)      # once per step, on every process
    False
    """

    def __init__(self, time_limit_minutes: float | None = None, passed: float = 0.0):
        """Catches signals from now on.

        Args:
            time_limit_minutes: after which to stop, if that is given.
            passed: seconds of them that are over already.
        """
        self.reason: str | None = None
        self._forwarded = False
        self._since = time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self._receive)
        atexit.register(self._ignore)
        if time_limit_minutes is not None and rank_from_env() == 0:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, 60 * time_limit_minutes - passed))

    @staticmethod
    def _ignore() -> None:
        """What comes when all is done changes nothing: Python would go back to being killed."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.reason and now - self._since > 2:
            raise KeyboardInterrupt  # asked twice: leave without a checkpoint
        self._since = now
        self.reason = "time limit" if number == signal.SIGALRM else signal.Signals(number).name

    def reached(self, step: int) -> bool:
        """Whether the job is to stop after `step`; the same answer on every process.

        With several processes this is JAX's preemption service: the one that got the signal
        tells the others, and all stop after the step that the furthest one is at.
        """
        if not _connected():
            return self.reason is not None
        from jax.experimental import multihost_utils

        if self.reason and not self._forwarded:
            # JAX's service listens for SIGTERM, in C++ in place of the handler above.
            self._forwarded = True
            os.kill(os.getpid(), signal.SIGTERM)
        return multihost_utils.reached_preemption_sync_point(step)
