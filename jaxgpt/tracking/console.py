"""The console: log lines and a progress bar. In train.log, some of the lines are longer."""

import contextlib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from jaxgpt.cluster.environment import find_launch
from jaxgpt.cluster.launch_line import find_launcher_process
from jaxgpt.cluster.shutdown import STDERR, STDOUT, write_if_read
from jaxgpt.cluster.timeouts import SETTLE
from jaxgpt.config import in_words
from jaxgpt.tracking.appended_file import AppendedFile, printable

BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Console:
    """Prints to the terminal and writes a log file. `info` does nothing without a log file."""

    def __init__(self, log_file: Path | None, prints: bool):
        """Set the log file, and whether this process also prints to the terminal."""
        self._log = AppendedFile(log_file) if log_file else None
        self._prints = prints
        self._log_fails = False
        self._bar: tqdm | None = None
        mpiexec = find_launcher_process()
        self._mpiexec_output = Path(f"/proc/{mpiexec[0] if mpiexec else 'self'}/fd/1")
        self._outlives_reader = False

    @property
    def width(self) -> int | None:
        """Width of the terminal in columns, or None if there is no terminal.

        If stdout is a terminal, the environment variable COLUMNS overrides its width, and an
        unknown width counts as 80. Otherwise, this is the width of the terminal on file descriptor
        1 of mpiexec (or of this process without mpiexec on this host), or None if it is unknown.
        """
        if sys.stdout.isatty():
            return shutil.get_terminal_size().columns
        with contextlib.suppress(OSError):  # no terminal, or mpiexec has exited
            if self._mpiexec_output.is_char_device():  # a pipe must not be opened
                terminal = os.open(self._mpiexec_output, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
                try:
                    return os.get_terminal_size(terminal).columns or None
                finally:
                    os.close(terminal)
        return None

    def info(self, text: str, full: str = "") -> None:
        """Write `text` to the log file with a timestamp, and print it if this process prints.

        Printed text is wrapped, and appears above the progress bar. Control characters are
        replaced. If `full` is given, it replaces `text` in the log file. If there is no log file,
        this does nothing. Raises `BrokenPipeError` if the program that reads the output has exited,
        unless `outlive_reader` was called. Any other `OSError` only causes a warning; if printing
        raised it, nothing more is printed.
        """
        if self._log is None:
            return
        lines = printable(full or text).splitlines() or [""]
        try:
            if self._prints:
                self._print(text)
        except BrokenPipeError:
            if not self._outlives_reader:
                time.sleep(SETTLE)  # a Ctrl-C that has killed the reader also stops this run
            if not self._outlives_reader:
                raise
            self._leave_reader(text)
        except OSError as error:  # such as a full disk, which should not end the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            lines.append(f"warning: output to the console stopped: {in_words(error)}")
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        had_failed = self._log_fails
        try:
            self._log.write(*(f"{stamp} {line}\n" for line in lines))
            self._log_fails = False
        except OSError as error:  # such as a full disk, which should not end the run
            self._log_fails = True
            if not had_failed:
                self.info(
                    f"warning: train.log failed: {in_words(error)}; retrying with the next line"
                )

    def outlive_reader(self) -> None:
        """From now on, print to stderr if the program that reads the output has exited.

        If that program was also reading stderr, print to the terminal instead, or nowhere if there
        is no terminal. The run can then save a checkpoint even if Ctrl-C has killed a `tee` that
        was reading its output.
        """
        self._outlives_reader = True

    def _leave_reader(self, text: str) -> None:
        sys.stdout = sys.stderr
        try:
            self._print(text)
        except OSError:  # the same `tee` was reading stderr, or the terminal is closed
            try:
                terminal = os.open("/dev/tty", os.O_WRONLY)
            except OSError:  # the process has no terminal
                terminal = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (STDOUT, STDERR):
                os.dup2(terminal, descriptor)
            write_if_read("", sys.stderr)  # write the rest of the buffer

    def _print(self, text: str) -> None:
        text = wrap(printable(text), self.width)
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def start_progress(self, done: int, total: int) -> None:
        # Open MPI gives process 0 a terminal even if the output goes to a file.
        if self._prints and sys.stdout.isatty() and find_launch(os.environ).variable is None:
            # By default, tqdm would not show every step if the speed varies (`miniters`).
            self._bar = tqdm(
                total=total, initial=done, dynamic_ncols=True, miniters=1, bar_format=BAR
            )

    def progress(self, step: int, left: str = "") -> None:
        """Move the progress bar to `step`, and show the text `left` after it.

        Does nothing if there is no progress bar.
        """
        if self._bar is not None:
            self._bar.set_postfix_str(left, refresh=False)
            self._bar.update(step - self._bar.n)

    def end_progress(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        if self._log is not None:
            try:
                self._log.close()
            except OSError as error:  # such as a full disk, which should not fail the run
                print(f"warning: train.log is incomplete: {in_words(error)}", flush=True)


def wrap(text: str, width: int | None) -> str:
    """Wrap lines that are longer than `width` characters.

    Continuation lines are indented by two spaces, long words are not broken, and tabs become
    spaces. `width` must be positive. If it is None, `text` is returned unchanged.
    """
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines = text.expandtabs().split("\n")
    return "\n".join(wrapper.fill(line) if len(line) > width else line for line in lines)


def table_text(
    headings: Sequence[str], rows: Iterable[Sequence[str]], width: int, title: str | None = None
) -> str:
    """Return a table as text, at most `width` columns wide."""
    from rich.console import Console as RichConsole
    from rich.table import Table

    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    # Do not use colors, because they would add control characters to train.log.
    # With TERM=dumb, Rich ignores a width without a height.
    console = RichConsole(width=width, height=25, color_system=None, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
