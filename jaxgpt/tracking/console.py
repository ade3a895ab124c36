"""The console: a legend, log lines and a progress bar. train.log receives the same lines."""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from jaxgpt.cluster.environment import find_launch
from jaxgpt.config import in_words
from jaxgpt.tracking.appended_file import AppendedFile


class Console:
    """Prints to the terminal and writes train.log on process 0; does nothing on the others."""

    def __init__(self, enabled: bool, log_file: Path):
        self._enabled = enabled
        self._log = AppendedFile(log_file) if enabled else None
        self._log_fails = False
        self._bar: tqdm | None = None
        self._explained = False

    @property
    def width(self) -> int | None:
        """Number of columns of the terminal, or None if the output is not a terminal."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def info(self, text: str, full: str = "") -> None:
        """Print `text` above the progress bar, and write it to train.log with the time.

        If `full` is given, it replaces `text` in train.log. Raises `BrokenPipeError` if the program
        that reads the output has exited. Other errors only cause a warning.
        """
        if not self._enabled:
            return
        lines = (full or text).splitlines() or [""]
        try:
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.write(text)
        except BrokenPipeError:
            raise  # the program that read the output has exited
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

    def legend(self, meanings: Mapping[str, str]) -> None:
        """Print a table of the fields and their meanings, on the first call only."""
        if not self._enabled or self._explained:
            return
        self._explained = True
        width = min(self.width or 100, 100)
        self.info(table_text(("field", "meaning"), meanings.items(), width))

    def start_progress(self, done: int, total: int) -> None:
        # Open MPI gives process 0 a terminal even if the output goes to a file.
        if self._enabled and sys.stdout.isatty() and find_launch(os.environ).variable is None:
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def progress(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def end_progress(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        if self._enabled:
            try:
                self._log.close()
            except OSError as error:  # such as a full disk, which should not fail the run
                print(f"warning: train.log is incomplete: {in_words(error)}", flush=True)


def table_text(
    headings: Sequence[str], rows: Iterable[Sequence[str]], width: int, title: str | None = None
) -> str:
    """Return a table as text, at most `width` columns wide."""
    from rich.console import Console as RichConsole
    from rich.table import Table

    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    console = RichConsole(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
