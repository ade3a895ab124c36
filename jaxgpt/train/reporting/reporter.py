"""Reporting on process 0: console, trackers and the files that describe a run."""

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, UsageError, skip_ranges
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.data.loader import Loader
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.parallel.mesh import describe
from jaxgpt.perf.clock import Clock
from jaxgpt.perf.flops import Rates, StepTimer, flops_per_token, peak_flops
from jaxgpt.perf.memory import memory_in_use
from jaxgpt.perf.startup import startup_line, startup_report, startup_values, summary
from jaxgpt.perf.units import count
from jaxgpt.spikes.detector import CAUSES
from jaxgpt.spikes.policy import read_rewinds
from jaxgpt.spikes.record import spike_record
from jaxgpt.spikes.report import LOG_WIDTH, rewind_line, spike_line, spikes_table
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking import Trackers
from jaxgpt.tracking.console import Console
from jaxgpt.tracking.jsonl import METRICS, atomic_write_text, read_records
from jaxgpt.tracking.records import (
    EvalRecord,
    GoodputRecord,
    LayersRecord,
    Record,
    SpikeRecord,
    StartRecord,
    StartupRecord,
    TrainRecord,
)
from jaxgpt.tracking.starts import log_start
from jaxgpt.tracking.train_line import HOST_METRICS, MetricFormat, clock_text, legend, train_line
from jaxgpt.train.jitted import JittedFunctions
from jaxgpt.train.reporting.corpora import CorpusLosses
from jaxgpt.train.reporting.ending import ending_lines
from jaxgpt.train.reporting.goodput import Goodput, goodput_line, read_goodput
from jaxgpt.train.reporting.header import header_lines, summary_lines
from jaxgpt.train.reporting.metrics import StepMetrics
from jaxgpt.train.reporting.stragglers import Stragglers, straggler_line
from jaxgpt.train.run_directory import Run
from jaxgpt.train.step import STEP_METRICS, Metrics


class Reporter:
    """Writes the log, the records and the files that describe a run.

    Every process has a reporter. Process 0 prints and writes the files. If train.log_all_ranks is
    set, each of the other processes also writes its own log. On process 0, methods that log raise
    `BrokenPipeError` if the output pipe is closed and `Console.outlive_reader` was not called.
    """

    def __init__(self, run: Run, steps: JittedFunctions, clock: Clock, cluster: ProcessGroup):
        """Prepare the log of a run that starts after `run.resume_step`.

        The first call of `restart` opens the trackers.
        """
        self.clock, self._cluster = clock, cluster
        self.compile_cache = "not used"  # for the start-up report; see `startup_report`
        self._config, self._run, self._steps = run.config, run, steps
        config, mesh, multiplied = run.config, steps.mesh, steps.n_parameters[1]
        self._model = f"{config.config}, {multiplied / 1e6:.2f}M"
        self._rates = Rates(
            batch_size=config.train.batch_size,
            block_size=config.model.block_size,
            flops_per_token=flops_per_token(config.model, multiplied),
            n_devices=mesh.size,
            peak=peak_flops(mesh.devices.flat[0].device_kind, config.train.dtype),
        )
        self._enabled = cluster.is_main or self._config.train.log_all_ranks
        self._shown_metrics = chosen_metrics(self._config, cluster.size)
        log_file = run.directory / ("train.log" if cluster.is_main else f"train-{cluster.rank}.log")
        self._has_log = log_file.exists()
        self._console = Console(log_file if self._enabled else None, prints=cluster.is_main)
        self.info, self.outlive_reader = self._console.info, self._console.outlive_reader
        self._trackers: Trackers | None = None  # opened by `restart` on process 0
        self._evaluated: EvalRecord | None = None  # the last evaluation
        self._goodput = Goodput(clock, run.resume_step or 0, self._log_goodput)
        self._has_started = self._has_stepped = False
        self._skipped = self._nonfinite = 0
        self._stragglers = Stragglers(cluster.host_names)

    def log_header(self, facts: dict[str, Any], warnings: Sequence[str]) -> None:
        """Log the header. Process 0 also writes cluster.json, and config.yaml if it is missing.

        Process 0 also appends a line to starts.jsonl. If the log is new, the legend of the training
        lines follows the header. Without a terminal, the legend is printed only if train.verbose is
        set. `facts` is the result of `initialize_jax`.
        """
        if not self._enabled:
            return
        config, mesh = self._config, self._steps.mesh
        if mesh.devices.flat[0].platform == "cpu":
            warnings = (*warnings, *self._rates.slow_step_warnings())
        about = self._run, self._steps, self._rates, facts, warnings
        full, short = header_lines(*about), summary_lines(*about)
        if self._rates.peak is None:
            self._shown_metrics.pop("mfu", None)
        if not config.train.eval_interval:
            self._shown_metrics.pop("train_loss", None)
            self._shown_metrics.pop("val_loss", None)
        if not self._has_log:
            corpora, steps = self._run.dataset.corpora, config.train.max_iters
            explain = functools.partial(
                legend, self._shown_metrics, steps, corpora if len(corpora) > 1 else ()
            )
            full += ["training lines:", *explain()]
            width = self._console.width
            short += explain(width=width) if width else ["training lines: explained in train.log"]
        text = "\n".join(full)
        self.info(text if config.train.verbose else "\n".join(short), full=text)
        if not self._cluster.is_main:
            return
        facts = {**facts, "mesh": dict(mesh.shape)}
        atomic_write_text(self._run.directory / "cluster.json", json.dumps(facts, indent=1) + "\n")
        known = ("devices", "device_kind", "job", "mesh")
        log_start(self._run.directory, "devices", {key: facts[key] for key in known})
        # A new run may fail while compiling, before `start` writes the file.
        if not (self._run.directory / "config.yaml").exists():
            self._keep_config()

    def log_resume(self) -> None:
        """If the run resumed, log the checkpoint's step and any change of mesh or process count."""
        saved, size = self._run.resume_meta, self._cluster.size
        if self._run.resume_step is None:
            return
        before, now = (saved["mesh"], saved["processes"]), (describe(self._steps.mesh), size)
        change = f" -> {now[0]} on {size}" if before != now else ", as before"
        self.info(
            f"resumed from step {self._run.resume_step}: mesh {before[0]} on "
            f"{count(before[1], 'process', 'es')}{change}"
        )

    def start(self, loader: Loader) -> None:
        """Write config.yaml, log the start of training, and start timing the steps.

        Only process 0 writes config.yaml. Call this once, before the first step. `loader` reads the
        training batches.
        """
        if self._cluster.is_main:
            self._keep_config()
        done = self._run.resume_step or 0
        self._console.start_progress(done, self._config.train.max_iters)
        self._loader, self._has_started = loader, True
        self._begin()
        self._log_start()
        self.clock.enter("step")

    def _keep_config(self) -> None:
        atomic_write_text(self._run.directory / "config.yaml", self._run.config_yaml())

    def _log_goodput(self, record: GoodputRecord) -> None:
        if self._trackers is not None:
            self._trackers.log(record)

    def _begin(self) -> None:
        self.timer = self._new_timer()
        self._began = self.clock.elapsed(), self._run.resume_step or 0
        self._step_ended = self.clock.spent("step", "data")  # clock reading after the last step
        self._corpora = CorpusLosses(self._loader)

    def _log_start(self) -> None:
        if self._trackers is not None:
            mesh, sizes, step = self._steps.mesh, self._run.batch_sizes, self._run.resume_step or 0
            start = StartRecord(
                step=step,
                mesh=describe(mesh),
                processes=self._cluster.size,
                devices=mesh.devices.flat[0].device_kind,
                jax=jax.__version__,
                batch_size=sizes.at(step + 1),
                consumed_sequences=sizes.consumed(step),
            )
            self._trackers.log(start)
            if step and sizes.at(step) != sizes.at(step + 1):
                self.info(_data_line(sizes, step))

    def _new_timer(self) -> StepTimer:
        return StepTimer(self.clock, lambda: self._cluster.monitor.stalled)

    def gather_host_times(self, step: int) -> None:
        """Send this process's host times to process 0, which logs stragglers.

        With several processes, this happens every train.log_interval steps. With a single process,
        this does nothing. The times are piggybacked on the next heartbeat, so no process waits for
        them.
        """
        if self._cluster.size == 1 or step % self._config.train.log_interval:
            return
        self._cluster.monitor.send(json.dumps(self.timer.host_times()))
        if self._cluster.is_main:
            for straggler in self._stragglers.compare(step, self._cluster.monitor.received):
                self.log(straggler)

    def step(self, step: int, metrics: Metrics | None, known: list[StepMetrics]) -> None:
        """Report a step that was dispatched or, if `metrics` is None, skipped.

        `known` is the result of `MetricsBuffer.read` for this step. All processes must call this
        together. After the first training step, this waits for the step to finish, gathers the
        start-up times of all processes and writes startup.json.
        """
        train = self._config.train
        is_first = metrics is not None and not self._has_stepped
        if is_first:
            self._has_stepped = True
            jax.block_until_ready(metrics)
            self._first_step_done(step)
            # The first step is a warm-up and is excluded from the rates.
            self.timer = self._new_timer()
            self._began = self.clock.elapsed(), step
        elif metrics is not None:
            self.timer.count()
        self._goodput.reach(step)
        left = self._seconds_left(step)
        self._console.progress(step, "" if left is None else f"left={clock_text(left)}")
        if not self._enabled:
            return
        if metrics is not None:
            self._corpora.expect(step)
        for reading in known:
            self._log_known(reading)
        now = self.clock.spent("step", "data")
        dt, self._step_ended = now - self._step_ended, now
        if metrics is None:
            self._skipped += 1
            lr = float(learning_rate(self._config.optimizer, step))
            values = {"loss": None, "grad_norm": None, "lr": lr, **self._rates.of(None)}
            values |= {"dt": dt, "skipped_steps": self._skipped}
            corpora = None
        elif is_first or step % train.log_interval == 0 or step == train.max_iters:
            values = {name: float(v) for name, v in known[-1].metrics.scalars.items()}
            values |= self._measured() | {"seconds_left": left}
            corpora = self._by_corpus(step)
        else:
            return
        self.log(
            TrainRecord(
                step=step,
                values=values,
                consumed_tokens=self._run.consumed_tokens(step),
                skipped=metrics is None,
                skipped_range=SkipRanges(skip_ranges(self._config)).around(step),
                corpora=corpora,
            )
        )

    def _seconds_left(self, step: int) -> float | None:
        """Estimate the remaining seconds at the average speed so far; None if no step was timed."""
        began, first = self._began
        if step <= first:
            return None
        pace = (self.clock.elapsed() - began) / (step - first)
        return pace * (self._config.train.max_iters - step)

    def _log_known(self, reading: StepMetrics) -> None:
        self._nonfinite += CAUSES[int(reading.metrics.detection.cause)] == "nonfinite"
        self.log(self.spike_record(reading))
        if self._trackers is not None and reading.metrics.layers is not None:
            self._log_layers(reading.step, reading.metrics.layers)
        self._corpora.add(reading)

    def _log_layers(self, step: int, layers: dict[str, np.ndarray]) -> None:
        if step % self._config.train.layers_every == 0:
            named = {
                name: {f"{i:03}": float(value) for i, value in enumerate(values_L)}
                for name, values_L in layers.items()
            }
            self._trackers.log(LayersRecord(step=step, **named))

    def _measured(self) -> dict[str, float | None]:
        """Return the host's measurements for a logged step, such as rates and memory."""
        dt, data_wait = self.timer.lap()
        used, peak = memory_in_use() or (None, None)
        slowest, hosts = {}, self._stragglers.own
        if hosts and (mean := sum(hosts) / len(hosts)) > 0:
            most = max(hosts)
            slowest = {"slowest_over_mean": most / mean, "slowest_rank": hosts.index(most)}
        return {
            **self._rates.of(dt),
            "data_wait": data_wait,
            "memory_bytes": used,
            "memory_peak_bytes": peak,
            **slowest,
            "skipped_steps": self._skipped,
            "nonfinite_steps": self._nonfinite,
        }

    def _by_corpus(self, step: int) -> dict[str, dict[str, Any]] | None:
        if not (means := self._corpora.take()):
            return None
        tokens = self._run.corpus_tokens(self._loader, step)
        return {name: {"tokens": tokens[name], "loss": loss} for name, loss in means.items()}

    def spike_record(self, reading: StepMetrics) -> SpikeRecord | None:
        """Return a record for a step with a spike or a non-finite value, else None.

        With spike.action=off, the result is always None.
        """
        return spike_record(*reading, self._config, self._loader, self._run.dataset)

    def restart(self, run: Run, records: Sequence[Record]) -> None:
        """Continue from `run.resume_step`, drop later steps from every tracker, and log `records`.

        The first call opens the trackers instead of rewinding them. `records` explain the restart.
        """
        self._run, self._config, self._evaluated = run, run.config, None
        if self._has_started:
            self._begin()
            self._console.progress(run.resume_step or 0)
        if self._trackers is not None:
            self._keep_config()
            self._trackers.rewind(run.resume_step or 0)
        elif self._cluster.is_main:
            self._trackers = Trackers(run, run.resume_step, say=self._console.info)
        self._goodput.continue_from(run.resume_step or 0)
        for record in records:
            self.log(record)
        if self._has_started:
            self._log_start()

    def log_rewind(self) -> None:
        """Log the run's newest rewind. There must be at least one."""
        if self._cluster.is_main:
            self.info(rewind_line(read_rewinds(self._run.directory)[-1]))

    def log(self, record: Record | None) -> None:
        """Send a record to every tracker and log it as text. Do nothing if `record` is None.

        Only process 0 has trackers. Other processes log the text only if train.log_all_ranks is
        set. `record` must be a `TrainRecord` or have a kind in `_LINES`. Call `restart` first,
        because it opens the trackers.
        """
        if record is None or not self._enabled:
            return
        if self._trackers is not None:
            self._trackers.log(record)
        values = record.to_dict()
        if isinstance(record, TrainRecord):
            if self._evaluated is not None and not record.skipped:
                losses = {"train_loss", "val_loss"}
                values |= {name: getattr(self._evaluated, name) for name in losses}
            line = functools.partial(
                train_line, values, self._shown_metrics, self._config.train.max_iters
            )
            self.info(line(self._console.width), full=line())
            return
        if isinstance(record, EvalRecord):
            self._evaluated = record
        text = _LINES[record.kind](values)
        self.info(text.replace(f"{self._run.directory.absolute()}/", ""), full=text)

    def show_spikes(self) -> None:
        """Log the table that `python -m jaxgpt.report spikes` prints."""
        if self._cluster.is_main:
            records = read_records(self._run.directory / METRICS)
            self.info(
                spikes_table(records, self._console.width or LOG_WIDTH), spikes_table(records)
            )

    def close(self, last_line: str, step: int | None = None, has_failed: bool = False) -> None:
        """Log how the run ended, and close every log and tracker.

        If the last evaluation was at `step`, its losses are appended to `last_line`. `has_failed`
        is False if the run finished or if a signal or the time limit stopped it.
        """
        self._console.end_progress()
        if self._evaluated is not None and self._evaluated.step == step:
            last_line = f"{last_line}: {_losses_text(self._evaluated.to_dict())}"
        self.info(last_line)
        self._goodput.write(is_last=not has_failed)
        if self._cluster.is_main:
            facts = {"step": self._goodput.last, "max_iters": self._config.train.max_iters}
            log_start(self._run.directory, "end", {**facts, "failed": has_failed})
        if self._trackers is not None:
            # The state is already saved, so an unreachable file system must not make the run fail.
            with contextlib.suppress(OSError):
                self.info(goodput_line(read_goodput(self._run.directory)))
                for line in ending_lines(self._run.directory, self._trackers.views()):
                    self.info(line)
        self.info(f"run directory: {self._run.directory}")
        if self._trackers is not None:
            self._trackers.close()
        self._console.close()

    def _first_step_done(self, step: int) -> None:
        own = startup_report(self.clock, self.compile_cache)
        of_all = self._cluster.combine(own, summary)
        if self._trackers is not None:
            found = {"model": self._model, **of_all}
            self._trackers.log(StartupRecord(step=step, values=startup_values(found)))
            path = self._run.directory / "startup.json"
            atomic_write_text(path, json.dumps(found, indent=1) + "\n")
            log_start(self._run.directory, "first_step", found)
            compilation = found["phases"]["compile"]["max"]
            cache = found["compile_cache"]
            work = "load the compiled step" if cache == "hit" else "compile the step"
            self.info(
                f"first step done after {found['total']['max']:.1f} s, including "
                f"{compilation:.1f} s to {work}",
                full=startup_line(found),
            )


def chosen_metrics(config: Config, n_processes: int) -> dict[str, MetricFormat]:
    """Return the `MetricFormat` of each metric in training lines, keyed by name.

    Metrics in train.log_columns have rank -1. A run with a single process has no
    `slowest_over_mean`. Raises `UsageError` if train.log_columns contains an unknown name.
    """
    metrics = {name: m.format for name, m in STEP_METRICS.items()} | HOST_METRICS
    names = {metric.short or name: name for name, metric in metrics.items()}
    for column in config.train.log_columns:
        name = names.get(column, column)
        if name not in metrics:
            raise UsageError(
                f"train.log_columns={column}: unknown column; choose from {', '.join(names)}"
            )
        metrics[name] = metrics[name]._replace(rank=-1)
    if n_processes == 1:
        del metrics["slowest_over_mean"]
    return metrics


def _data_line(sizes: BatchSizes, step: int) -> str:
    """Return a line about a change of batch size after `step`, which must be at least 1."""
    return (
        f"data: step {step + 1} begins at sequence {sizes.consumed(step):,}; "
        f"train.batch_size={sizes.at(step + 1)} (was {sizes.at(step)})"
    )


def _losses_text(record: dict[str, Any]) -> str:
    """Return the losses of an evaluation record as text."""
    return f"train_loss={record['train_loss']:.4f} val_loss={record['val_loss']:.4f}"


def _about_bytes(record: dict[str, Any]) -> str:
    """Return an explanation of the replacement character if a sample contains it, else ""."""
    return " (\ufffd: bytes that are not valid UTF-8)" if "\ufffd" in record["text"] else ""


_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "eval": lambda r: f"step={r['step']} {_losses_text(r)}",
    "sample": lambda r: f"sample at step {r['step']}{_about_bytes(r)}:\n{r['text']}\n",
    "spike": spike_line,
    "damage": lambda r: (
        f"warning: {r['reason']}; renamed to {r['path']}; the run continues from step {r['step']}"
    ),
    "corruption": lambda r: (
        f"warning: {', '.join(r['devices'])}: parameters differ from their replicas at step "
        f"{r['found']}; the run continues from step {r['step']}"
    ),
    "straggler": straggler_line,
    "checkpoint": lambda r: (
        f"step={r['step']} checkpoint complete after {r['seconds']:.2f}s "
        f"(training stalled {r['stalled']:.2f}s)"
    ),
    "checkpoint_failed": lambda r: (
        f"warning: {r['reason']}; the run continues and will try again when the next checkpoint is "
        f"due; the newest complete checkpoint is from step {r['latest_complete']}"
    ),
}
