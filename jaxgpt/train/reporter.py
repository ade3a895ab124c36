"""What a run tells: the console, train.log, metrics.jsonl and TensorBoard, on process 0."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxgpt import __version__
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, profile_range, skip_ranges
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import describe
from jaxgpt.perf.flops import MFU_FORMULA, Rates, StepTimer, flops_per_token, peak_flops
from jaxgpt.perf.startup import Startup, startup_line, startup_record, summary
from jaxgpt.runtime import initialize as backend
from jaxgpt.spikes.policy import METRICS, read_rewinds
from jaxgpt.spikes.report import rewind_line, spike_line, spikes_table
from jaxgpt.spikes.skip import SkipRanges, describe_faults, describe_spikes
from jaxgpt.tracking.console import Console, train_line
from jaxgpt.tracking.trackers import (
    MetricsFile,
    Record,
    SamplesFile,
    TensorBoard,
    Tracker,
    Trackers,
    atomic_write_text,
    read_records,
)
from jaxgpt.train.metrics import CorpusLosses, StepMetrics, spike_record
from jaxgpt.train.run_directory import Run
from jaxgpt.train.state import StepFunctions
from jaxgpt.train.step_metrics import Metrics


class Reporter:
    """Turns what happens in a run into records and lines, on process 0."""

    def __init__(self, run: Run, steps: StepFunctions, startup: Startup, cluster: ProcessGroup):
        """Opens the logs of a run that starts after `run.resume_step`."""
        self._cluster = cluster
        self._config, self._run, self._steps = run.config, run, steps
        self._enabled = enabled = cluster.is_main
        self._startup = startup
        self._console = Console(enabled, run.directory / "train.log")
        self._trackers = Trackers(_open_trackers(run) if enabled else [], warn=self._console.say)
        self._first_step = (run.resume_step or 0) + 1
        self._last_losses = ""

    @functools.cached_property
    def _learning_rate(self) -> Callable[[int], Any]:
        from jaxgpt.optim import learning_rate_schedule

        return learning_rate_schedule(self._config.optimizer)

    def announce(self, facts: dict[str, Any], warnings: Sequence[str]) -> None:
        """Says what is going to run, and on what; writes cluster.json."""
        if not self._enabled:
            return
        config, dataset, mesh = self._config, self._run.dataset, self._steps.mesh
        total, without_positions = self._steps.n_parameters
        self._model = f"{config.config}, {without_positions / 1e6:.2f}M"
        device = mesh.devices.flat[0]
        self._rates = Rates(
            batch_size=config.train.batch_size,
            block_size=config.model.block_size,
            flops_per_token=flops_per_token(config.model, without_positions),
            n_devices=mesh.size,
            peak=peak_flops(device.device_kind, config.train.dtype),
        )
        say = self._console.say
        say(f"jaxgpt {__version__}, run directory {self._run.directory}")
        for line in [*backend.describe(facts), *self._run.notes, *config_lines(config)]:
            say(line)
        parallel = config.parallel
        say(
            f"mesh: {describe(mesh)}; zero_stage={parallel.zero_stage} "
            f"sequence_parallel={parallel.sequence_parallel} remat={parallel.remat}"
        )
        say(f"model: {without_positions / 1e6:.2f}M parameters ({total:,} with positions)")
        say(f"attention: {self._steps.attention}")
        for line in (*warnings, *describe_faults(config)):
            say(f"warning: {line}")
        for line in dataset.describe():
            say(line)
        skips = SkipRanges(skip_ranges(config))
        say(f"steps to skip: {skips}")
        traced = profile_range(config)
        left = range(max(traced.start, self._first_step), traced.stop)
        if traced and all(step in skips for step in left):
            say(
                f"steps to trace: none, as profile_steps={config.profile_steps} are past or skipped"
            )
        say(describe_spikes(config))
        say(MFU_FORMULA + ("" if self._rates.peak else f"; not known for {device.device_kind}"))
        facts = {**facts, "mesh": dict(mesh.shape)}
        atomic_write_text(self._run.directory / "cluster.json", json.dumps(facts, indent=1) + "\n")
        if not (self._run.directory / "config.yaml").exists():  # a new run may end in compiling
            self._keep_config()

    def say(self, text: str) -> None:
        self._console.say(text)

    def start(self, loader: Loader) -> None:
        """The first step is next: keeps the configuration and starts the clock."""
        if self._enabled:
            self._keep_config()
        self._console.start_progress(self._first_step - 1, self._config.train.max_iters)
        self._loader = loader
        self._begin()

    def _keep_config(self) -> None:
        atomic_write_text(self._run.directory / "config.yaml", self._config.to_yaml())

    def _begin(self) -> None:
        self._timer = StepTimer()
        self._corpora: dict[int, Any] = {}  # of steps whose losses are not known yet
        self._corpus_losses = CorpusLosses(len(self._loader.names))

    def step(self, step: int, metrics: Metrics | None, known: list[StepMetrics]) -> None:
        """One step is under way, or skipped (None), and `known` are now those of some steps."""
        train = self._config.train
        is_first = metrics is not None and "first step" not in self._startup.seconds
        record: Record = {"kind": "train", "step": step}
        if is_first:
            jax.block_until_ready(metrics)
            self._first_step_done(step)
            self._timer = StepTimer()  # the first step warms up: it does not count in rates
        elif metrics is not None:
            self._timer.count()
        if not self._enabled:
            return
        if metrics is not None and len(self._loader.names) > 1:
            self._corpora[step] = self._loader.corpora(step)  # while the device is busy
        for reading in known:
            self.log(self.spike(reading))
            if reading.step in self._corpora:
                corpora = self._corpora.pop(reading.step)
                self._corpus_losses.add(corpora, reading.metrics.row_losses)
        if metrics is None:
            lr = float(self._learning_rate(step))
            record |= {"loss": None, "grad_norm": None, "lr": lr, **self._rates.of(None)}
        elif is_first or step % train.log_interval == 0 or step == train.max_iters:
            newest = known[-1].metrics
            record |= {name: float(value) for name, value in newest.scalars.items()}
            record |= self._rates.of(self._timer.lap())
            record |= self._by_corpus(step)
        else:
            return
        record["consumed_tokens"] = self._run.consumed_tokens(step)
        record["skipped"] = metrics is None
        self.log(record)

    def _by_corpus(self, step: int) -> Record:
        """Losses since the last line and tokens so far of each corpus, where there are several."""
        names = self._loader.names
        if len(names) == 1:
            return {}
        tokens, means = self._run.corpus_tokens(self._loader, step), self._corpus_losses.means()
        self._corpus_losses = CorpusLosses(len(names))
        return {
            "corpora": {
                name: {"tokens": tokens[name], "loss": loss}
                for name, loss in zip(names, means, strict=True)
            }
        }

    def spike(self, reading: StepMetrics) -> Record | None:
        """The record of a step that is a spike, on process 0."""
        if not self._enabled:
            return None
        return spike_record(reading, self._config, self._loader, self._run.dataset)

    def rest(self) -> None:
        """Closes the logs, whose files are going to change."""
        self._trackers.close()
        self._trackers = Trackers([], warn=self._console.say)

    def rewound(self, run: Run) -> None:
        """The run goes on from `run.resume_step`, as if it had been started there."""
        self._run, self._config, self._last_losses = run, run.config, ""
        self._begin()
        self._console.progress(run.resume_step or 0)
        if not self._enabled:
            return
        self._keep_config()
        self._trackers = Trackers(_open_trackers(run), warn=self._console.say)
        self.say(rewind_line(read_rewinds(run.directory)[-1]))

    def log(self, record: Record | None) -> None:
        """Sends a record to every tracker, and its line to the console."""
        if record is None or not self._enabled:
            return
        self._trackers.log(record)
        if record["kind"] == "train":
            self._console.legend()
        if record["kind"] == "eval":
            self._last_losses = losses_text(record)
        self._console.say(_LINES[record["kind"]](record))

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint of `step` is being written, after holding up the run for `seconds`."""
        path = f"{self._run.directory}/checkpoints/{step}"
        self.log({"kind": "checkpoint", "step": step, "path": path, "seconds": seconds})

    @contextlib.contextmanager
    def between_steps(self, pending: Any) -> Iterator[None]:
        """Work in this block does not count as training time."""
        with self._timer.excluded(pending):
            yield

    def progress(self, step: int) -> None:
        self._console.progress(step)

    def show_spikes(self) -> None:
        """The table of `python -m jaxgpt.report spikes`."""
        if self._enabled:
            self.say(spikes_table(read_records(self._run.directory / METRICS)))

    def close(self, last_line: str, with_losses: bool = True) -> None:
        """Says how the run ended, with its last losses, and closes every log."""
        self._console.end_progress()
        with_losses = with_losses and self._last_losses != ""
        self.say(f"{last_line}: {self._last_losses}" if with_losses else last_line)
        self.say(f"run directory: {self._run.directory}")
        self._trackers.close()
        self._console.close()

    def _first_step_done(self, step: int) -> None:
        self._startup.mark("first step")
        reports = self._cluster.allgather(self._startup.report())
        if self._enabled:
            found = {"model": self._model, **summary(reports)}
            self._trackers.log(startup_record(found, step))
            atomic_write_text(
                self._run.directory / "startup.json", json.dumps(found, indent=1) + "\n"
            )
            self._console.say(startup_line(found))


def config_lines(config: Config) -> list[str]:
    """The configuration, a line per section."""
    lines = []
    for name, section in dataclasses.asdict(config).items():
        if isinstance(section, dict):
            lines.append(f"{name}: " + " ".join(f"{k}={v!r}" for k, v in section.items()))
    return lines


def losses_text(record: Record) -> str:
    """The losses of an evaluation record."""
    return f"train_loss={record['train_loss']:.4f} val_loss={record['val_loss']:.4f}"


def _open_trackers(run: Run) -> list[Tracker]:
    metrics = run.directory / METRICS
    trackers: list[Tracker] = [
        MetricsFile(metrics, run.resume_step),
        SamplesFile(run.directory / "samples.txt", metrics),
    ]
    if run.config.train.tensorboard:
        start = run.resume_step or 0
        rewinds = [r for r in read_records(metrics, "rewind") if r["step"] == start]
        trackers.append(TensorBoard(run.directory / "tensorboard", run.resume_step, rewinds))
    return trackers


_LINES = {
    "train": train_line,
    "eval": lambda r: f"step={r['step']} {losses_text(r)}",
    "sample": lambda r: f"sample at step {r['step']}:\n{r['text']}\n",
    "spike": spike_line,
    "checkpoint": lambda r: f"step={r['step']} checkpoint {r['path']} ({r['seconds']:.2f}s)",
}
