"""End of a job: all processes together, with an exit status that a job script can act on."""

import contextlib
import faulthandler
import io
import os
import platform
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

from jaxgpt.cluster.environment import SingleRankUsageError, find_launch, rank_from_env
from jaxgpt.cluster.timeouts import ANSWER, SETTLE
from jaxgpt.config import UsageError

DONE = 0
FAILED = 1
BAD_USAGE = 2
HUNG = 70  # a process hangs (EX_SOFTWARE in sysexits.h)
STOPPED = 75  # on a signal or a time limit, with a checkpoint saved (EX_TEMPFAIL in sysexits.h)

STDOUT, STDERR = 1, 2  # file descriptors


class PeerLost(Exception):
    """Another process of the job cannot be reached."""


def end_process(status: int) -> NoReturn:
    """End this process at once: what runs at exit would wait for processes that are gone."""
    os._exit(status)


def report_and_end(report: str, status: int) -> NoReturn:
    """Print the last words of a job, and end it."""
    if report:
        print(report, file=sys.stderr, end="", flush=True)
    abort_mpi(status)
    end_process(status)


def abort_mpi(status: int) -> None:
    """End the job with `status` if MPI runs it: the launcher ends stopped processes, too."""
    mpi = sys.modules.get("mpi4py.MPI")
    with_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if with_mpi and mpi.COMM_WORLD.size > 1:  # not alone in a world that was of no use
        time.sleep(SETTLE)  # for the launcher to pass on what was printed
        _redirect_to_null(STDOUT, STDERR)  # MPI would add a line of its own
        faulthandler.dump_traceback_later(ANSWER, exit=True, file=STDERR)  # if Abort hangs
        mpi.COMM_WORLD.Abort(status)


def end_with(error: BaseException) -> NoReturn:
    """End a process that is not connected to others because of an error."""
    flush_stdout()
    report_and_end(*report_of(error))


def flush_stdout() -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it, which may be the error itself
        sys.stdout.flush()


def report_of(error: BaseException) -> tuple[str, int]:
    """Return what to print about an exception that ends a job, and the exit status."""
    if isinstance(error, UsageError | PeerLost):
        return f"error: {error}\n", BAD_USAGE if isinstance(error, UsageError) else FAILED
    if isinstance(error, KeyboardInterrupt):  # before training, or the second one
        return "", 128 + signal.SIGINT
    return "".join(traceback.format_exception(error)), FAILED


@contextlib.contextmanager
def job_exit_handler() -> Iterator[None]:
    """Turn an exception into the end of this process, as job scripts and launchers expect it.

    A `UsageError` is one line and status 2; another exception is a traceback and status 1. Once the
    processes are connected, the `with` block of their `ProcessGroup` does the same for all of them,
    and only the first error is printed. If nobody reads the output any more, as after `| head`, a
    lone process ends as if by SIGPIPE.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # print "?" where a terminal lacks a character
        sys.stdout.reconfigure(errors="replace")
    try:
        for word in sys.argv:
            if word != word.encode(errors="replace").decode():
                raise UsageError(f"{word!r}: is not UTF-8; give it in that encoding")
        yield
        sys.stdout.flush()
    except SingleRankUsageError as error:
        where = f"process {rank_from_env()} on host {platform.node()}"
        report_and_end(f"error: {where}: {error}\n", BAD_USAGE)
    except UsageError as error:  # all processes raise the same one
        if rank_from_env() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_USAGE) from None
    except (KeyboardInterrupt, PeerLost) as error:
        end_with(error)
    except Exception as error:
        if find_launch(os.environ).through is not None:  # its end is to end the others
            end_with(error)
        if not (isinstance(error, BrokenPipeError) and nobody_reads()):
            raise
        _redirect_to_null(STDOUT)  # what Python writes at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


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


def nobody_reads() -> bool:
    """Return whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
