"""Job termination, with exit statuses for job scripts."""

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
from typing import NoReturn, TextIO

from jaxgpt.cluster.environment import SingleRankUsageError, find_launch, rank_from_env
from jaxgpt.cluster.timeouts import ANSWER, SETTLE
from jaxgpt.config import UsageError

DONE = 0
FAILED = 1
BAD_USAGE = 2
HUNG = 70  # a process hung (EX_SOFTWARE in sysexits.h)
STOPPED = 75  # by a signal or a time limit, with a checkpoint saved (EX_TEMPFAIL in sysexits.h)

STDOUT, STDERR = 1, 2  # file descriptors


class PeerLost(Exception):
    """Process 0 cannot be reached, or cannot listen for the other processes."""


def end_process(status: int) -> NoReturn:
    """Exit immediately, skipping exit handlers that would wait for processes that have exited."""
    os._exit(status)


def report_and_end(report: str, status: int) -> NoReturn:
    """Print a report to stderr, then terminate this process and, if MPI is running, the whole job.

    No newline is added.
    """
    write_if_read(report, sys.stderr)
    abort_mpi(status)
    end_process(status)


def abort_mpi(status: int) -> None:
    """Terminate all MPI processes of the job with `status`, even if they are stopped.

    Returns only if MPI is not running or knows no other process. If MPI does not terminate the
    processes within `ANSWER` seconds, this process exits with status 1. stdout and stderr are
    redirected to /dev/null first.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    with_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if with_mpi and mpi.COMM_WORLD.size > 1:  # else there are no other MPI processes
        time.sleep(SETTLE)  # give the launcher time to forward the output
        _redirect_to_null(STDOUT, STDERR)  # hide MPI_Abort's message
        faulthandler.dump_traceback_later(ANSWER, exit=True, file=STDERR)  # if Abort hangs
        mpi.COMM_WORLD.Abort(status)


def end_with(error: BaseException) -> NoReturn:
    """Report an error, then terminate this process and, if MPI is running, the whole job.

    See `report_of` for the report and the exit status. If a `Monitor` connects this process to
    others, call `Monitor.end_job` instead.
    """
    write_if_read("", sys.stdout)
    report_and_end(*report_of(error))


def write_if_read(text: str, stream: TextIO) -> None:
    """Write `text` and flush the stream. `OSError` is ignored: the reader may have exited."""
    with contextlib.suppress(OSError):
        print(text, file=stream, end="", flush=True)


def report_of(error: BaseException) -> tuple[str, int]:
    """Return the report and the exit status for an exception that terminates the job.

    The report is `error: MESSAGE` for `UsageError` (status 2) and `PeerLost` (status 1), an empty
    string for Ctrl-C (status 130), and a traceback for other exceptions (status 1).
    """
    if isinstance(error, UsageError | PeerLost):
        return f"error: {error}\n", BAD_USAGE if isinstance(error, UsageError) else FAILED
    if isinstance(error, KeyboardInterrupt):  # before training, or a second Ctrl-C
        return "", 128 + signal.SIGINT
    return "".join(traceback.format_exception(error)), FAILED


@contextlib.contextmanager
def job_exit_handler() -> Iterator[None]:
    """Turn exceptions into the messages and exit statuses that job scripts and launchers expect.

    - `UsageError` exits with status 2. Only process 0 prints the message, so all processes must
      raise the error. If the launcher's variables are invalid, every process prints it.
    - `SingleRankUsageError` exits with status 2. Each process that raises it prints the message.
      If MPI is running, it terminates the whole job.
    - `PeerLost` prints its message and exits with 1. Ctrl-C prints nothing and exits with 130.
      If MPI is running, both terminate the whole job.
    - Other exceptions, except SystemExit, print a traceback and exit with status 1. In a job with
      several processes, they terminate this process at once and, if MPI is running, the whole job.
    - In a job without a launcher, a `BrokenPipeError` exits with 141 (as if killed by SIGPIPE) if
      the reader of stdout has exited, as with `| head`.

    Once the processes are connected, the `with` block of their `ProcessGroup` handles exceptions
    instead: it terminates all processes (see `Monitor.end_job`). A command-line argument that
    Python cannot decode causes a `UsageError`. Closed standard file descriptors are replaced by
    /dev/null. Characters that stdout cannot encode are printed as `?`.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # do not crash on unsupported characters
        sys.stdout.reconfigure(errors="replace")
    try:
        for word in sys.argv:
            if word != word.encode(errors="replace").decode():
                raise UsageError(f"{word!r}: is not valid UTF-8; encode this argument as UTF-8")
        try:
            yield
        except SystemExit as end:  # for example after --help
            if not end.code:
                sys.stdout.flush()
            raise
        sys.stdout.flush()
    except SingleRankUsageError as error:
        where = f"process {rank_from_env()} on host {platform.node()}"
        report_and_end(f"error: {where}: {error}\n", BAD_USAGE)
    except UsageError as error:  # all processes raise the same error
        if rank_from_env() == 0:
            write_if_read(f"error: {error}\n", sys.stderr)
        raise SystemExit(BAD_USAGE) from None
    except (KeyboardInterrupt, PeerLost) as error:
        end_with(error)
    except Exception as error:  # under a launcher, any error must end all processes
        if find_launch(os.environ).through is not None:
            end_with(error)
        if not (isinstance(error, BrokenPipeError) and nobody_reads()):
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None
    finally:
        if nobody_reads():
            _redirect_to_null(STDOUT)  # Python flushes stdout at exit


def _open_closed_streams() -> None:
    """Replace closed standard streams with /dev/null, so that no other file gets descriptor 0-2."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w")
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w")


def _redirect_to_null(*descriptors: int) -> None:
    with open(os.devnull, "w") as nothing:
        for descriptor in descriptors:
            os.dup2(nothing.fileno(), descriptor)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run after a step.

    SIGHUP is left out if it is ignored, as under nohup. `sbatch --signal` can make Slurm send USR1
    or USR2, and closing a terminal sends HUP.
    """
    out = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
    return out if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*out, signal.SIGHUP]


def nobody_reads() -> bool:
    """Return whether stdout has lost its reader, as with `| head`."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
