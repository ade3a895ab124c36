"""End of a job: all processes together, with an exit status that a job script can act on."""

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
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from jaxgpt.cluster.environment import SingleRankUsageError, find_launch, rank_from_env
from jaxgpt.config import UsageError

DONE = 0
FAILED = 1
BAD_USAGE = 2
HUNG = 70  # ended by the watchdog (EX_SOFTWARE in sysexits.h)
STOPPED = 75  # on a signal or a time limit, with a checkpoint saved (EX_TEMPFAIL in sysexits.h)

POLL_SECONDS = 5  # between two looks at the failure board
KEEP_SECONDS = POLL_SECONDS + 2  # that process 0 keeps the board, for the others to look at it
PROPAGATION_SECONDS = 2 * POLL_SECONDS + 3  # by then the first to fail has ended the others
RANK0_TIMEOUT = 20  # seconds after which process 0 counts as hung
STDOUT, STDERR = 1, 2  # file descriptors


class PeerLost(Exception):
    """Another process ended or never came; without a text, another process says why."""


class FailureBoard(Protocol):
    """A place on process 0, seen by all processes, where the first one to fail says so."""

    rank: int

    def post(self, status: int) -> bool: ...  # False if another was first, or it is out of reach
    def read(self) -> tuple[int, int] | None: ...  # rank and status of the first; None as above


def end_process(status: int) -> NoReturn:
    """End this process at once: what runs at exit would wait for processes that are gone."""
    os._exit(status)


@contextlib.contextmanager
def job_exit_handler(
    find_board: Callable[[], FailureBoard | None] = lambda: None,
) -> Iterator[None]:
    """Turn an exception of any process into the end of the whole job.

    A `UsageError` is one line and status 2; any other exception is its traceback and status 1,
    as the last thing that the job prints: processes that fail only because their peer has gone
    keep silent. Where nobody reads on, as after `| head`, a lone process ends as if by SIGPIPE.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it lacks is not worth a run
        sys.stdout.reconfigure(errors="replace")
    try:
        for word in sys.argv:
            if word != word.encode(errors="replace").decode():
                raise UsageError(f"{word!r}: is not UTF-8; give it in that encoding")
        yield
        sys.stdout.flush()
    except SingleRankUsageError as error:
        line = f"error: process {rank_from_env()} on host {platform.node()}: {error}"
        print(line, file=sys.stderr, flush=True)
        end_process(BAD_USAGE)
    except UsageError as error:
        if board := find_board():
            terminate_job(f"error: {error}\n", BAD_USAGE, board)
        if rank_from_env() == 0:  # until JAX is connected all processes raise the same error
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_USAGE) from None
    except KeyboardInterrupt:  # before training has begun, or the second of its kind
        terminate_job("", 128 + signal.SIGINT, find_board())
    except PeerLost as error:
        if find_board():  # one that failed says why, and ends this process
            time.sleep(PROPAGATION_SECONDS)
        if error.args:  # one that was killed does not
            print(f"error: {error}", file=sys.stderr, flush=True)
        end_process(FAILED)
    except Exception as error:  # whatever ends this process is to end the others
        if find_launch(os.environ).through is not None:
            terminate_job(traceback.format_exc(), FAILED, find_board())
        if not (isinstance(error, BrokenPipeError) and _nobody_reads()):
            raise
        _redirect_to_null(STDOUT)  # what Python writes at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


def terminate_job(
    report: str, status: int, board: FailureBoard | None, until_abort: float = 1
) -> NoReturn:
    """End the job with `status`; print `report` unless another process failed first.

    Process 0 keeps the board, and may be the one that hangs: after `RANK0_TIMEOUT` without an
    answer process 1 prints its own report, or if it does not either, the others theirs. In
    `until_abort` seconds the others come to wait for this process and print no more.
    """

    def report_and_end() -> NoReturn:
        print(report, file=sys.stderr, end="", flush=True)
        abort_mpi(status)
        if board and board.rank == 0:
            time.sleep(KEEP_SECONDS)
        end_process(status)

    # Process 1 speaks before the others, and where MPI runs the job ends it.
    patience = PROPAGATION_SECONDS if board and board.rank != 1 else 0
    with contextlib.suppress(RuntimeError):  # there may be no room for another thread
        threading.Timer(RANK0_TIMEOUT + patience, report_and_end).start()
    with contextlib.suppress(BrokenPipeError):  # that nobody reads may be what it is about
        sys.stdout.flush()
    if board is None:
        report_and_end()
    if not board.post(status):
        if board.read() is None:
            reason = report.strip().rpartition("\n")[2] or f"status {status}"
            line = f"process {board.rank} cannot reach process 0, and ends by itself: {reason}"
            print(line, file=sys.stderr, flush=True)
        _redirect_to_null(STDOUT, STDERR)  # JAX prints at length where process 0 ends first
        time.sleep(PROPAGATION_SECONDS)
        end_process(status)
    time.sleep(until_abort)
    report_and_end()


def abort_mpi(status: int) -> None:
    """End the job with `status` where MPI runs it; else mpiexec may give that of one it killed."""
    mpi = sys.modules.get("mpi4py.MPI")
    with_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if with_mpi and mpi.COMM_WORLD.size > 1:  # not alone in a world that was of no use
        time.sleep(0.5)  # for the launcher to pass on what was printed
        _redirect_to_null(STDOUT, STDERR)  # MPI would add a line of its own
        mpi.COMM_WORLD.Abort(status)


def watch_for_peer_failure(board: FailureBoard) -> None:
    """End this process when another one of the connected job fails, as MPI would do it."""
    at_exit = threading.Event()

    def watch() -> None:
        failure = None
        while failure is None and not at_exit.wait(POLL_SECONDS):
            failure = board.read()
        if failure is None or failure[0] == board.rank:  # this one still has something to say
            return
        if board.rank == 0:
            time.sleep(KEEP_SECONDS)
        end_process(failure[1])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    atexit.register(thread.join)
    atexit.register(at_exit.set)  # runs first


def _open_closed_streams() -> None:
    """Point closed stdout and stderr (`>&-`) at /dev/null, or the next file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w")
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w")


def _redirect_to_null(*descriptors: int) -> None:
    with open(os.devnull, "w") as nothing:
        for descriptor in descriptors:
            os.dup2(nothing.fileno(), descriptor)


def _nobody_reads() -> bool:
    """Return whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
