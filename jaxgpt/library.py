"""Python API for training, models and batches, available through `import jaxgpt`.

JAX is imported when a `Trainer` or a model is built.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxgpt.checkpoint.metadata import choose_checkpoint, list_checkpoints, read_meta
from jaxgpt.cluster.process_group import ProcessGroup, join_alone
from jaxgpt.config import (
    Config,
    MeshShape,
    UsageError,
    checked,
    expand_user,
    in_words,
    is_help,
    mesh_shape,
    parse_args,
    shorten,
    skip_ranges,
)
from jaxgpt.convert.families import COMPANIONS
from jaxgpt.data.dataset import with_vocabulary
from jaxgpt.data.loader import Loader
from jaxgpt.evaluate.model import (
    Model,
    check_exists,
    copied,
    is_count,
    is_integer,
)
from jaxgpt.evaluate.trained import Trained, find_trained, run_folder, without_training
from jaxgpt.optim import CHOICES
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.jsonl import METRICS, atomic_write_text, truncate_metrics
from jaxgpt.tracking.records import EvalRecord
from jaxgpt.train.init_from import initial_model, prepare_weights
from jaxgpt.train.resume import saved_settings
from jaxgpt.train.run_directory import (
    Run,
    open_run_data,
    prepare_default_data,
    resumed,
    with_absolute_paths,
    writable_directory,
)

if TYPE_CHECKING:
    from jaxgpt.train.state import TrainState

WITH_CLUSTER = ", or give cluster=CLUSTER in `with jaxgpt.join_process_group() as CLUSTER:`"


def load_config(config: str | Path = "tiny", *settings: str) -> Config:
    """Return the configuration that `python -m jaxgpt.train --config CONFIG SETTINGS` would use.

    Notes are printed to stderr.

    Args:
        config: name of a preset, or path of a YAML file, such as the config.yaml of a run.
        settings: arguments of the command, such as "train.max_iters=100", or the two arguments
            "--mesh", "2,1,4".

    Raises:
        UsageError: if the file or the initial weights cannot be read, if a setting is unknown or
            malformed, contradicts another setting, or is not used by the chosen optimizer or
            schedule, if `settings` contains `--help`, or if train.batch_size_per_device is used
            with a mesh that contains -1.
    """
    name = _path("config", config, "the name of a preset, such as 'tiny', or the path of a file")
    if not all(isinstance(word, str) for word in settings):
        raise UsageError(
            f"settings: must be strings, such as 'train.max_iters=100', not {settings!r}; write "
            "*LIST to pass a list"
        )
    if is_help(settings):
        raise UsageError("settings: run `python -m jaxgpt.train --help` to list all settings")
    for word in settings:
        option, _, value = word.partition(" ")
        if option.startswith("--") and value and "=" not in option:
            raise UsageError(f"settings: {word!r} is two arguments; write {option!r}, {value!r}")
    return parse_args(
        ["--config", name, *settings],
        "jaxgpt.load_config",
        initial_model=initial_model,
        saved_settings=saved_settings,
        choices=CHOICES,
    )


class StepBatch(NamedTuple):
    """The global batch of a step. Inputs are `tokens[:, :-1]`, and targets are `tokens[:, 1:]`."""

    step: int
    tokens: np.ndarray  # int32 (B, T+1): token IDs
    weights: np.ndarray  # uint8 (B, T): loss weight of each target; 0 masks it


def batches(config: Config, steps: Iterable[int]) -> Iterator[StepBatch]:
    """Yield the global batch of each step. Steps are counted from 1, and may be in any order.

    Every batch has train.batch_size rows. JAX is not imported. The default dataset is prepared if
    it is missing. Raises `UsageError` during the iteration if a setting or a step is invalid, or if
    the data cannot be prepared or read.
    """
    if not isinstance(steps, Iterable):
        raise UsageError(f"steps={steps}: must be a list of steps, such as [1, 2] or range(1, 3)")
    config = checked(config, CHOICES)
    prepare_default_data(config.data)
    dataset = open_run_data(config)
    loader = Loader.for_training(dataset, config)
    for step in steps:
        if not is_count(step):
            raise UsageError(f"steps: {step!r} is not a step; steps are integers, from 1")
        step = int(step)  # a NumPy integer might overflow
        rows = range(loader.batch_sizes.at(step))
        yield StepBatch(step, loader.read(step, rows), loader.read_weights(step, rows)[:, 1:])


def load_model(
    run: str | Path,
    step: int | None = None,
    mesh: str = "1,-1,1",
    dtype: str | None = None,
    batch_size: int = 1,
    cluster: ProcessGroup | None = None,
) -> Model:
    """Return a trained model with the methods `logits`, `generate`, `generate_tokens` and `score`.

    This starts JAX. All processes of the job must call this.

    Args:
        run: a run directory, or the folder of a Hugging Face model, with or without the prefix
            `hf:`.
        step: the step of the checkpoint to load; by default, the newest checkpoint.
        mesh: the mesh to run the model on, in the format of `--mesh`.
        dtype: compute dtype, float32 or bfloat16; by default, train.dtype of the run.
        batch_size: number of rows to compute at once. It is rounded up to a multiple of the number
            of devices that the rows are split over.
        cluster: the processes of the job; None means only this process.

    Raises:
        UsageError: if there is no such run, model or checkpoint, if a checkpoint or its tokenizer
            is damaged or cannot be read, if a model cannot be converted, if `step`, `dtype` or
            `batch_size` is invalid, if the mesh is malformed or does not fit the devices or the
            model, or if `cluster` is None in a job with several processes.
        OSError: if the folder is not accessible, or if no temporary folder can be created for the
            weights of a Hugging Face model.
        RuntimeError: if JAX fails. Also raises whatever `join_process_group` and `initialize_jax`
            raise.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"dtype={dtype}: must be float32 or bfloat16")
    if not is_count(batch_size):
        raise UsageError(f"batch_size={batch_size!r}: must be a whole number, at least 1")
    where = _path("run", run, "the path of a run directory or of a Hugging Face model")
    cluster = _cluster(cluster, "jaxgpt.load_model")
    with run_folder(where, cluster) as folder:
        trained = cluster.run_on_all(find_trained, folder, _step(step), mesh, dtype)
        model = Model(trained, batch_size, cluster)
    model.trained = dataclasses.replace(trained, where=where)  # the folder may be temporary
    return model


class Trainer:
    """A training run in Python, without the main loop, logging or recovery of `jaxgpt.train`.

    With the same configuration and devices, a trainer takes the same steps as `jaxgpt.train`, bit
    for bit (on GPUs, with train.deterministic). However, a trainer does not rewind after a loss
    spike, does not stop after non-finite steps, and ignores train.verify_interval, checkpoint.local
    and faults.bit_flip_step. The command can continue a run saved by a trainer, and vice versa. A
    trainer writes to a run directory only in `save`.

    All processes of a job must call a trainer's methods and read its properties together.
    """

    def __init__(self, config: Config, cluster: ProcessGroup | None = None):
        """Open the data, start JAX and build the mesh.

        The default dataset is prepared if it is missing.

        Args:
            config: the configuration, from `load_config`.
            cluster: the processes of the job, from `join_process_group`; None means only this
                process.

        Raises:
            UsageError: if a setting is invalid, if the data cannot be prepared or read, if the
                configuration does not fit the data, the devices or their memory, or if `cluster` is
                None in a job with several processes. Also raises whatever `join_process_group` and
                `initialize_jax` raise.
        """
        config = checked(config, CHOICES)
        self.cluster = cluster = _cluster(cluster, "jaxgpt.Trainer")
        cluster.run_on_all(lambda: cluster.is_main and prepare_default_data(config.data))
        self.dataset = cluster.run_on_all(open_run_data, config)
        config = with_vocabulary(config, self.dataset)
        config = config.replace(data=with_absolute_paths(config.data))
        self._run = Run(
            config, Path(), self.dataset, self.dataset.fingerprints, resume_step=None,
            resume_meta={}, asked_to_skip=config.train_range_to_skip, notes=[],
        )  # fmt: skip
        initialize_jax(cluster, mesh_shape(config))
        use_compile_cache(config.compile_cache, cluster)
        from jaxgpt.parallel.mesh import job_mesh
        from jaxgpt.perf.memory import check_memory
        from jaxgpt.spikes.faults import check_faults
        from jaxgpt.train.jitted import make_steps

        mesh = job_mesh(config, cluster.hosts)
        check_faults(config, mesh.size)
        check_memory(config, MeshShape(**mesh.shape), cluster.local_size)
        self.steps = make_steps(config, mesh, has_masks=self.dataset.has_masks, hosts=cluster.hosts)
        for line in self.steps.warnings:
            warnings.warn(line, stacklevel=2)
        self.loader = Loader.for_training(self.dataset, config, self.steps.batch_sharding)
        self._step = 0
        self._state: TrainState | None = None
        self._companions: dict[str, bytes] = {}  # of the initial weights or the restored run
        self._lock = threading.RLock()  # held while `_state` is used or replaced
        self._in_train = threading.Lock()
        self._folders: dict[Path, int] = {}  # run directory -> last step saved or restored there
        self._history: list[dict[str, Any]] = []
        self._n_on_host = 0  # number of records in `_history` that have been copied to the host

    def __repr__(self) -> str:
        config, at = self.config, f"step {self.step} of {self.config.train.max_iters}"
        return f"<jaxgpt.Trainer: {config.config}, {self.steps.describe()}, at {at}>"

    @property
    def config(self) -> Config:
        """The configuration in use.

        It differs from the configuration passed to `Trainer` in these settings:

        - Data paths are absolute.
        - data.file_list is converted to data.blend, and each line of data.blend names its corpus.
        - model.vocab_size is set. If data.document_mask is set, data.end_of_text is also set.
        - train.batch_size_per_device is converted to train.batch_size.
        - After the initial weights are loaded, the path in train.init_from is absolute.
        - After `restore`, train_range_to_skip includes the ranges that the restored run skips.
        """
        return self._run.config

    @property
    def step(self) -> int:
        """The last step that was trained, skipped or restored; 0 before the first step."""
        return self._step

    @property
    def state(self) -> "TrainState":
        """A copy of the state after `step`. Later steps do not change it.

        Raises `UsageError` if the initial weights cannot be read or do not match the configuration
        or the data, or if JAX failed during the last step. Raises `OSError` if train.init_from is
        set and a temporary folder cannot be created, or a file cannot be copied to it. Raises
        `RuntimeError` if JAX fails.
        """
        with self._lock:
            return copied(self._current_state())

    def _current_state(self) -> "TrainState":
        """Return the state itself, which the next step may delete.

        Raises the same errors as `state`.
        """
        if self._state is None:
            self._state = self._first_state()
        check_exists(self._state.params, "failed; call restore, or make a new Trainer")
        return self._state

    def _first_state(self) -> "TrainState":
        """Return the state before the first step, initialized from train.seed or train.init_from.

        Raises the same errors as `state`.
        """
        from jaxgpt.train.restart import initial_state, load_weights

        if self.config.train.init_from is None:
            return initial_state(self.steps, self.cluster)
        with tempfile.TemporaryDirectory(prefix="jaxgpt-weights-") as scratch:
            weights = self.cluster.run_on_all(
                prepare_weights, self.config, self.dataset, Path(scratch)
            )
            dataset = self.cluster.run_on_all(open_run_data, weights.config)
            companions = self.cluster.run_on_all(_read_companions, Path(scratch))
            _warn(weights.notes)
            state = load_weights(weights.folder, weights.step, self.steps, self.cluster)
        # data.tokenizer may be `scratch`. From now on, only `dataset` holds this tokenizer.
        config = weights.config.replace(data__tokenizer=self.config.data.tokenizer)
        self._run = dataclasses.replace(
            self._run, config=config, dataset=dataset, init_folder=str(weights.folder),
            init_step=weights.step,
        )  # fmt: skip
        self._companions = companions
        return state

    def train(
        self,
        n_steps: int | None = None,
        report: Callable[[dict[str, float | None]], object] | None = None,
    ) -> list[dict[str, float | None]]:
        """Train the next `n_steps` steps. Return a dict for each step, with `step` and the metrics.

        `report` is a function, such as `print`, that is called with each step's dict as soon as the
        step has finished.

        By default, train the remaining steps up to train.max_iters, and return an empty list if
        there are none. If `n_steps` (at least 1) is given, training may continue beyond
        train.max_iters. The metrics are `loss` (nats per token; 0 if no target counts), `grad_norm`
        (before clipping) and `lr`. For a skipped step, `loss` and `grad_norm` are None. If any
        values are not finite, a Python warning is issued at the end. Raises `UsageError` if an
        argument is invalid, if the data is invalid or cannot be read, or if `train` or `restore` is
        already running. Also raises the same errors as `state`, and whatever `report` raises.
        """
        with self._alone():
            return self._train(n_steps, report)

    def _train(
        self, n_steps: int | None, report: Callable[[dict[str, float | None]], object] | None
    ) -> list[dict[str, float | None]]:
        if n_steps is None:
            n_steps = max(0, self.config.train.max_iters - self.step)
        elif not is_count(n_steps):
            raise UsageError(f"n_steps={n_steps!r}: must be a whole number, at least 1")
        if not (report is None or callable(report)):
            raise UsageError(
                f"report={report!r}: must be a function of one argument, such as print"
            )
        from jaxgpt.runtime.dispatch import DispatchLimiter
        from jaxgpt.train.step import STEP_METRICS

        todo = range(self.step + 1, self.step + int(n_steps) + 1)
        skips = SkipRanges(skip_ranges(self.config))
        first = len(self._history)
        train_step, dispatched = self._train_step, DispatchLimiter()
        with contextlib.closing(self.loader.batches(s for s in todo if s not in skips)) as loaded:
            for step in todo:
                lr = learning_rate(self.config.optimizer, step)
                record: dict[str, Any] = {"step": step, **dict.fromkeys(STEP_METRICS), "lr": lr}
                batch = None if step in skips else next(loaded)
                with self._lock, _interrupts_deferred():  # the step deletes the old state
                    if batch is not None:
                        state = self._current_state()
                        self._state, metrics = train_step(state, np.int32(step), lr, batch)
                        record |= {name: metrics.scalars[name] for name in STEP_METRICS}
                    self._step = step
                    self._history.append(record)
                    self._update_model()
                dispatched.add(record["loss"])  # None for a skipped step
                if report:
                    self._read_history()
                    report(dict(self._history[-1]))
        self._read_history()
        found = [dict(record) for record in self._history[first:]]
        values = {r["step"]: [x or 0 for x in (r["loss"], r["grad_norm"])] for r in found}
        bad = [step for step, numbers in values.items() if not np.isfinite(numbers).all()]
        if bad:
            warnings.warn(
                f"steps with a non-finite loss or gradient: {len(bad)}, up to step {bad[-1]}; "
                "lower optimizer.learning_rate, or restore a checkpoint",
                stacklevel=3,
            )
        return found

    @property
    def history(self) -> list[dict[str, float | None]]:
        """The metrics of all steps since this trainer was created or restored; see `train`.

        Steps of interrupted calls are included. Raises `RuntimeError` if JAX fails.
        """
        self._read_history()
        return [dict(record) for record in self._history]

    def _read_history(self) -> None:
        """Copy the metrics of new records in `_history` from the devices to the host."""
        import jax

        with self._lock:
            first, end = self._n_on_host, len(self._history)
            records = self._history[first:end]
            # JAX returns dicts with sorted keys, so update the records in place.
            for record, on_host in zip(records, jax.device_get(records), strict=True):
                for name, value in on_host.items():
                    record[name] = None if value is None else np.asarray(value).item()
            self._n_on_host = end

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise `UsageError` if any thread is already running `train` or `restore`."""
        if not self._in_train.acquire(blocking=False):
            raise UsageError(
                "this trainer is busy; call train and restore after the current call ends"
            )
        try:
            yield
        finally:
            self._in_train.release()

    @functools.cached_property
    def _train_step(self) -> Any:
        compiled = self.steps.lower_train_step().compile()
        self.cluster.barrier()
        return compiled

    def evaluate(self) -> EvalRecord:
        """Return each split's mean loss in nats per token, over train.eval_iters microbatches.

        A split's loss is NaN if no target counts toward it. Raises `UsageError` if the data cannot
        be read. Also raises the same errors as `state`.
        """
        with self._lock:
            return self._evaluator(self.step, self._current_state().params)

    @functools.cached_property
    def _evaluator(self) -> Any:
        from jaxgpt.train.evaluate import make_evaluator

        heartbeat = self.cluster.monitor.heartbeat
        return make_evaluator(self.dataset, self.config, self.steps, heartbeat)

    @property
    def model(self) -> Model:
        """The model after `step`, with methods such as `generate` and `logits`.

        `train` and `restore` update it. Raises the same errors as `state`.
        """
        with self._lock:
            params = self._current_state().params
            tokenizer = self._run.dataset.tokenizer  # known once the initial weights are loaded
            self._model.trained = dataclasses.replace(self._model.trained, tokenizer=tokenizer)
            self._model.update(params, self.step)
            return self._model

    def _update_model(self) -> None:
        """Update `model` if the user has accessed it."""
        if "_model" in self.__dict__:
            _ = self.model

    @functools.cached_property
    def _model(self) -> Model:
        # Replace -1 in the mesh, because `without_training` counts a stage axis of size -1 as 1.
        mesh = str(MeshShape(**self.steps.mesh.shape))
        config = without_training(self.config.replace(parallel__mesh=mesh))
        # `model` sets the tokenizer.
        trained = Trained("the data", self.step, config, None, config.model.block_size, "own")
        return Model(trained, 1, self.cluster, self._current_state().params, self._lock)

    def save(self, run: str | Path) -> None:
        """Save a checkpoint of this step in a run directory, and wait until it is complete.

        `python -m jaxgpt.train --out RUN` continues the run. Commands that do not need
        metrics.jsonl, such as jaxgpt.sample, can read the run. Older checkpoints are removed
        according to the retention settings. Without a metrics.jsonl, checkpoint.keep_best has no
        effect. If the run had trained further than the restored step, its records of these steps
        and its checkpoints in checkpoint.local are removed.

        Raises:
            UsageError: if `run` is not a valid path, if the directory contains another run, a
                checkpoint of this step or a later step, or a checkpoint that another trainer or
                command has added to this run, or if the directory is in use by another job,
                unsuitable (see `writable_directory`) or cannot be written.
            OSError: on process 0, if metrics.jsonl or the tokenizer's file cannot be read, or if
                this file or the other files of its Hugging Face model cannot be written.
            RuntimeError: if JAX fails. Also raises the same errors as `state`.
        """
        from jaxgpt.checkpoint.checkpointer import Checkpoints
        from jaxgpt.train.state import checkpoint_json, checkpoint_tree

        directory = Path(expand_user(_path("run", run))).absolute()
        with self._lock, contextlib.ExitStack() as at_end:
            state = self._current_state()  # loads the initial weights and their tokenizer
            config, tokenizer = self.config.replace(out=str(directory)), self._run.dataset.tokenizer
            if self.dataset.tokenizer is None and tokenizer is not None:
                config = config.replace(data__tokenizer=str(directory))

            def prepare() -> None:
                if self.cluster.is_main:
                    self._check_folder(directory)
                    writable_directory(config, at_end)
                    if directory in self._folders:
                        since = self._folders[directory]  # this trainer trained the steps after it
                        if (directory / METRICS).exists():
                            truncate_metrics(directory / METRICS, since)
                        Checkpoints(directory, config, self.cluster).remove_local_after(since)
                    else:
                        for name, content in self._companions.items():
                            (directory / name).write_bytes(content)
                    if tokenizer is not None:
                        tokenizer.save(directory)
                    atomic_write_text(directory / "config.yaml", config.to_yaml())

            self.cluster.run_on_all(prepare)
            self._folders[directory] = self.step
            meta = {
                **dataclasses.replace(self._run, config=config).checkpoint_meta(
                    self.loader, self.step
                ),
                **checkpoint_json(state, self.steps.mesh, self.cluster.size),
            }
            settings = config.replace(checkpoint__local=None)
            checkpoints = Checkpoints(directory, settings, self.cluster)
            checkpoints.save(self.step, checkpoint_tree(state), meta)
            checkpoints.close()

    def _check_folder(self, directory: Path) -> None:
        """Raise `UsageError` if saving to this run directory would mix two runs."""
        saved = list_checkpoints(directory)
        if directory not in self._folders and (saved or (directory / METRICS).exists()):
            raise UsageError(
                f"{directory}: holds another run; restore that run first, or give another folder"
            )
        if saved and self._folders[directory] < saved[-1] < self.step:
            raise UsageError(
                f"{directory}: has a newer checkpoint, of step {saved[-1]}; restore it first, or "
                "give another folder"
            )
        if saved and saved[-1] >= self.step:
            raise UsageError(
                f"{directory}: already has a checkpoint of step {saved[-1]}, and this trainer is "
                f"at step {self.step}; train further, or give another folder"
            )

    def restore(self, run: str | Path, step: int | None = None) -> None:
        """Continue from a checkpoint of a run, on this trainer's mesh. This clears `history`.

        Args:
            run: the run directory.
            step: the step of the checkpoint; by default, the newest checkpoint.

        Raises:
            UsageError: if `run` or `step` is invalid or there is no such checkpoint, if the
                checkpoint, the run's tokenizer, rewinds.json or a file of the weights' Hugging Face
                model is damaged or cannot be read, if the checkpoint does not fit the configuration
                or the data (see `check_resume`), if checkpoint.resume is False, or if `train` or
                `restore` is running.
            RuntimeError: if JAX fails.
        """
        with self._alone():
            self._restore(run, step)

    def _restore(self, run: str | Path, step: int | None) -> None:
        from jaxgpt.checkpoint.checkpointer import Checkpoints
        from jaxgpt.train.state import restore_state

        directory = Path(expand_user(_path("run", run))).absolute()
        step = self.cluster.run_on_all(choose_checkpoint, directory, _step(step))
        step = self.cluster.broadcast(step)
        meta = self.cluster.run_on_all(read_meta, directory, step)
        # The ranges of this trainer (without those of a run restored earlier) and of the run.
        own = self.config.replace(train_range_to_skip=self._run.asked_to_skip)
        config, dataset, _, notes = self.cluster.run_on_all(
            resumed, own, self.dataset, directory, step, meta
        )
        _warn(notes)
        companions = self.cluster.run_on_all(_read_companions, directory)
        checkpoints = Checkpoints(directory, self.config, self.cluster)
        state = restore_state(checkpoints, step, self.steps.state_shapes)
        init_folder, init_step = meta.get("init_from") or (None, None)
        restored = dataclasses.replace(
            self._run, config=config.replace(data=self.config.data), dataset=dataset,
            resume_step=step, resume_meta=meta, init_folder=init_folder, init_step=init_step,
        )  # fmt: skip
        with self._lock, _interrupts_deferred():
            self._state, self._run, self._step = state, restored, step
            self._companions = companions
            self._folders, self._history, self._n_on_host = {directory: step}, [], 0
            self.loader.batch_sizes = restored.batch_sizes
            self._update_model()


def _path(name: str, value: str | Path, what: str = "the path of a run directory") -> str:
    """Return a path argument as a string. Raise `UsageError` if the value is not a path."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise UsageError(f"{name}={shorten(repr(value))}: must be {what}")
    return str(value)


def _step(step: int | None) -> int | None:
    """Return `step`. Raise `UsageError` if it is neither an integer nor None."""
    if not (step is None or is_integer(step)):
        raise UsageError(f"step={step!r}: must be a whole number; None means the newest")
    return step


def _cluster(cluster: ProcessGroup | None, caller: str) -> ProcessGroup:
    """Return `cluster` or, if it is None, the result of `join_alone`.

    Raises `UsageError` if `cluster` has the wrong type. Also raises whatever `join_alone` raises.
    """
    if not isinstance(cluster, ProcessGroup | None):
        raise UsageError(
            f"cluster={cluster!r}: must be None or the result of jaxgpt.join_process_group()"
        )
    return cluster or join_alone(caller, WITH_CLUSTER)


def _read_companions(folder: Path) -> dict[str, bytes]:
    """Return the contents of the `COMPANIONS` in a folder. Raises `UsageError` if reading fails."""
    files = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    try:
        return {file.name: file.read_bytes() for file in files}
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({in_words(error)})") from None


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block. Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received and callable(handler):
        handler(*received[0])


def _warn(notes: Iterable[str]) -> None:
    """Issue a Python warning for each log line that begins with `warning: `."""
    for line in notes:
        if line.startswith("warning: "):
            warnings.warn(line.removeprefix("warning: "), stacklevel=4)
