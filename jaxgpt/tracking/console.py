"""What a user sees: a legend, lines, a progress bar on a terminal, and the same in train.log."""

import os
import sys
import time
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from jaxgpt.cluster.environment import find_launch

LEGEND = (
    ("step", "optimizer step, from 1"),
    ("loss", "mean cross-entropy of the global batch, nats per token"),
    ("gnorm", "global norm of the gradient before clipping"),
    ("lr", "learning rate"),
    ("dt", "time per step, without compilation, evaluation and checkpoints"),
    ("sps", "sequences per second, whole job"),
    ("tps", "tokens per second, whole job"),
    ("mfu", "share of the devices' peak FLOP/s; - where the peak is not known"),
)


class Console:
    """Prints on process 0; silent on the others."""

    def __init__(self, enabled: bool, log_file: Path | None = None):
        self._enabled = enabled
        self._file: TextIO | None = None
        if enabled and log_file:
            self._file = log_file.open("a", encoding="utf-8", errors="replace")
        self._bar: tqdm | None = None
        self._explained = False

    def say(self, text: str = "") -> None:
        """Prints text above the progress bar and keeps it, with the time, in train.log."""
        if not self._enabled:
            return
        failure = ""
        try:
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.write(text)
        except BrokenPipeError:
            raise  # nobody reads on
        except OSError as error:  # a full disk behind it: not worth a run
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            failure = f"\nwarning: the console stopped: {error}"
        if self._file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            self._file.writelines(
                f"{stamp} {line}\n" for line in (text + failure).splitlines() or [""]
            )
            self._file.flush()
        except OSError as error:  # a full disk: not worth a run
            self._file = None
            self.say(f"warning: train.log stopped: {error}")

    def legend(self) -> None:
        """The table of what the fields of a line mean, the first time that this is called."""
        if not self._enabled or self._explained:
            return
        self._explained = True
        from rich.console import Console as RichConsole
        from rich.table import Table

        table = Table("field", "meaning")
        for row in LEGEND:
            table.add_row(*row)
        text = RichConsole(width=88)
        with text.capture() as captured:
            text.print(table)
        self.say(captured.get().rstrip())

    def start_progress(self, done: int, total: int) -> None:
        # Open MPI gives process 0 a terminal even where its output goes to a file.
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
        if self._file:
            self._file.close()
            self._file = None


def train_line(record: dict) -> str:
    """A training record as `step=100 loss=2.4527 ...`."""
    if record["skipped"]:
        return f"step={record['step']} skipped lr={record['lr']:.3g}"
    line = (
        f"step={record['step']} loss={record['loss']:.4f} gnorm={record['grad_norm']:.3f} "
        f"lr={record['lr']:.3g}"
    )
    if record["dt"] is None:
        return line
    mfu = "-" if record["mfu"] is None else f"{record['mfu']:.1%}"
    return (
        f"{line} dt={1000 * record['dt']:.1f}ms sps={record['samples_per_sec']:.1f} "
        f"tps={record['tokens_per_sec']:,.0f} mfu={mfu}"
    )
