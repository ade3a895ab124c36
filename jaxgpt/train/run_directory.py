"""Preparation of a run before JAX starts: its directory, its data and its skip ranges."""

import contextlib
import dataclasses
import itertools
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgpt import __version__
from jaxgpt.checkpoint.local import local_folder
from jaxgpt.checkpoint.metadata import newest_undamaged
from jaxgpt.cluster.file_lock import lock_file
from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import (
    Config,
    DataConfig,
    UsageError,
    check_batch,
    config_from_dict,
    config_from_file,
    in_words,
    mesh_shape,
    skip_ranges,
)
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.data.dataset import (
    Dataset,
    dataset_directory,
    entries,
    open_dataset,
    with_vocabulary,
)
from jaxgpt.data.loader import Loader
from jaxgpt.data.prepare.builtin import prepare_python
from jaxgpt.runtime.devices import cpu_devices_per_process
from jaxgpt.spikes.policy import pending_rewind, skipped_by_rewinds
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking import check_trackers
from jaxgpt.tracking.jsonl import METRICS
from jaxgpt.tracking.starts import log_start
from jaxgpt.train.init_from import prepare_weights
from jaxgpt.train.resume import (
    check_resume,
    missing_records,
    ranges_to_skip,
    rate_after_decay,
    rate_in_warmup,
    resumed_batch_sizes,
    source_hashes,
    with_moved_tokenizer,
)

MIN_FREE_BYTES = 2**16  # disk space required for a run's first files
FILES = (METRICS, "train.log", "samples.txt", "rewinds.json")  # existing files that a run updates


@dataclass(frozen=True)
class Run:
    """A run that is ready to start.

    All processes hold the same values, but the paths of the data may differ between hosts.
    """

    config: Config  # including model.vocab_size, `out` and the skip ranges of earlier commands
    directory: Path
    dataset: Dataset
    fingerprints: list[list[str]]  # [path, hash] of each data source
    resume_step: int | None  # step of the checkpoint to resume from; None for a new run
    resume_meta: dict[str, Any]  # JSON of that checkpoint; empty for a new run
    asked_to_skip: tuple[int, ...]  # train_range_to_skip of this command and earlier ones
    notes: list[str]  # lines for the log
    damaged: Sequence[tuple[int, str]] = ()  # (step, reason) of checkpoints after `resume_step`
    missing_records: Sequence[str] = ()  # `EVAL_RECORDS` due at `resume_step` but not logged
    init_folder: str | None = None  # folder of the initial weights; may no longer exist
    init_step: int | None = None  # step of the initial weights; may not be the folder's newest

    @property
    def batch_sizes(self) -> BatchSizes:
        """The batch sizes in the checkpoint, then train.batch_size for all later steps."""
        return resumed_batch_sizes(self.resume_step, self.resume_meta, self.config)

    def config_yaml(self) -> str:
        """Return the content of config.yaml.

        The ranges that rewinds skip after `resume_step` are left out, because they are in
        rewinds.json, and their steps change if the batch size does. They are kept if they come from
        an older config.yaml or, because config.yaml was lost, from a checkpoint.
        """
        asked = skip_ranges(self.config.replace(train_range_to_skip=tuple(self.asked_to_skip)))
        skip, _ = ranges_to_skip(asked, (), self.resume_step, self.resume_meta)
        return self.config.replace(train_range_to_skip=skip).to_yaml()

    def consumed_tokens(self, step: int) -> int:
        """Return the number of tokens in all batches up to `step`, including skipped ones."""
        return self.batch_sizes.consumed(step) * self.config.model.block_size

    def checkpoint_meta(self, rows: Loader, step: int) -> dict[str, Any]:
        """Return the JSON for a checkpoint of `step`, except for keys that are added later.

        For the arguments, see `corpus_tokens`.
        """
        return {
            "step": step,
            "batch_sizes": self.batch_sizes.changes,
            "corpus_tokens": self.corpus_tokens(rows, step),
            "data_fingerprint": self.fingerprints,
            "tokenizer": self.dataset.tokenizer_meta,
            "config": self.config.to_dict(),
            "jaxgpt": __version__,
        } | ({} if self.init_folder is None else {"init_from": [self.init_folder, self.init_step]})

    def corpus_tokens(self, rows: Loader, step: int) -> dict[str, int]:
        """Return the number of tokens consumed from each current corpus, keyed by name.

        The counts cover all steps up to `step`. data.blend may have changed at `resume_step`, so
        the counts up to that step come from the checkpoint, if it has them. `step` must not be
        before `resume_step`. `rows` is the training loader, with this run's `batch_sizes`.
        """
        now, then = rows.tokens_consumed(step), rows.tokens_consumed(self.resume_step or 0)
        before = self.resume_meta.get("corpus_tokens", dict(zip(rows.names, then, strict=True)))
        return {
            name: int(before.get(name, 0) + n - n_then)
            for name, n, n_then in zip(rows.names, now, then, strict=True)
        }


def prepare_run(config: Config, cluster: ProcessGroup) -> Run:
    """Open the data and the run directory, and find the checkpoint to resume from.

    Process 0 makes all decisions and broadcasts them. It creates the run directory and, if the file
    system supports locks, locks it until the job ends. If necessary, it prepares the dataset
    `python` and the initial weights, and copies checkpoints from checkpoint.local. The other
    processes then open the same data. All processes must call this. Any `UsageError` is raised on
    every process.
    """
    decided = cluster.run_on_main(_decide, config, cluster)

    def open_same() -> Run:
        final = config_from_dict(decided["config"], "configuration of process 0")
        dataset = open_run_data(final)
        if not cluster.is_main:
            _check_same_data(dataset, decided, cluster.local_rank == 0)
        return Run(final, Path(final.out), dataset, **decided["run"])

    return cluster.run_on_all(open_same)


def _check_same_data(dataset: Dataset, decided: dict[str, Any], is_first_of_host: bool) -> None:
    """Raise `UsageError` if process 0 has different data or a different tokenizer."""
    differ = dataset.sources[:1] if dataset.tokenizer_meta != decided["tokenizer"] else ()
    # The first process of each host compares hashes, and so does any process whose paths differ
    # from those of process 0.
    if not differ and (is_first_of_host or _paths(dataset) != decided["paths"]):
        hashes = zip(
            dataset.sources,
            source_hashes(dataset.fingerprints),
            source_hashes(decided["run"]["fingerprints"]),
            strict=True,
        )
        differ = [source for source, found, expected in hashes if found != expected]
    for source in differ:
        raise UsageError(
            f"{source.entry.key}: {source.entry.path} or its tokenizer on host {platform.node()} "
            "differs from the copy that process 0 reads; all hosts need the same files"
        )


def _decide(config: Config, cluster: ProcessGroup) -> dict[str, Any]:
    """Return the decisions that process 0 makes for all processes, as a JSON-serializable dict."""
    if not accelerator_expected():
        n_devices = cpu_devices_per_process(mesh_shape(config), cluster) * cluster.size
        check_batch(config, mesh_shape(config, n_devices))
    check_trackers(config.train.trackers)
    notes = prepare_default_data(config.data)
    dataset = open_run_data(config)
    dataset.verify()
    config = with_vocabulary(config, dataset)
    config = config.replace(data=with_absolute_paths(config.data))
    _check_prompt(config.train.sample_prompt, dataset)

    directory = writable_directory(config, cluster.on_close)
    config = config.replace(out=str(directory))
    log_start(directory, "start", _start_facts(cluster))
    if (local := local_folder(config, directory)) is not None:
        notes += local.recover(config.train.log_interval)
    rewind = pending_rewind(directory)
    resume_step, meta, damaged = newest_undamaged(
        directory, config.checkpoint.on_damage, rewind and rewind["to"]
    )
    if resume_step is None and (directory / METRICS).exists():
        notes.append(f"no checkpoint in {directory}: the run starts again at step 1")
    config, dataset, asked, lines = resumed(config, dataset, directory, resume_step, meta)
    notes += lines
    init_folder, init_step = meta.get("init_from") or (None, None)
    if resume_step is None and config.train.init_from is not None:
        weights = prepare_weights(config, dataset, directory)
        config, dataset = weights.config, open_run_data(weights.config)
        init_folder, init_step = str(weights.folder), weights.step
        notes += weights.notes
    if dataset.tokenizer is not None:
        dataset.tokenizer.save(directory)  # for jaxgpt.sample, in case the data is moved
    notes += rate_after_decay(config, resume_step) + rate_in_warmup(config)
    return {
        "config": config.to_dict(),
        "paths": _paths(dataset),
        "tokenizer": dataset.tokenizer_meta,
        "run": {
            "fingerprints": dataset.fingerprints,
            "resume_step": resume_step,
            "resume_meta": meta,
            "asked_to_skip": asked,
            "notes": notes,
            "damaged": [(step, error.reason) for step, error in damaged.items()],
            "missing_records": missing_records(config, dataset, resume_step),
            "init_folder": init_folder,
            "init_step": init_step,
        },
    }


def _start_facts(cluster: ProcessGroup) -> dict[str, Any]:
    """Return the facts about the job that are known before JAX starts."""
    return {
        "processes": cluster.size,
        "hosts": list(dict.fromkeys(cluster.host_names)),
        "machine": cluster.machine.name if cluster.machine else None,
        "launcher": cluster.launcher,
    }


def resumed(
    config: Config, dataset: Dataset, directory: Path, step: int | None, meta: dict[str, Any]
) -> tuple[Config, Dataset, tuple[int, ...], list[str]]:
    """Return the config, the data, the ranges that commands skip, and log lines.

    In the returned config, train_range_to_skip also has the ranges of earlier commands and of
    rewinds. Earlier commands are read from config.yaml, or from the checkpoint if that file is
    missing or damaged. If the data has no tokenizer, it gets the tokenizer of the run.

    `step` and `meta` are the step and the JSON of the checkpoint, or None and {} for a new run.
    """
    asked, kept, lines = list(skip_ranges(config)), directory / "config.yaml", []
    try:
        asked += skip_ranges(config_from_file(kept))
    except UsageError:
        if step is not None:
            asked += skip_ranges(config_from_dict(meta["config"], "checkpoint"))
            lines = [f"warning: {kept} is missing or damaged, and will be rewritten"]
    if step is not None:
        lines += check_resume(config, directory, step, meta, dataset)
        config, dataset = with_tokenizer_of_run(config, dataset, directory, meta)
    rewound = skipped_by_rewinds(directory, resumed_batch_sizes(step, meta, config))
    skip, warnings = ranges_to_skip(asked, rewound, step, meta)
    config = config.replace(train_range_to_skip=skip)
    return config, dataset, SkipRanges(asked).flat(), lines + warnings


def _check_prompt(prompt: str, dataset: Dataset) -> None:
    if prompt and dataset.tokenizer is not None:
        try:
            dataset.tokenizer.encode(prompt)
        except UsageError as e:
            raise UsageError(f"train.sample_prompt={prompt!r}: {e}") from None


def open_run_data(config: Config) -> Dataset:
    """Open the data of a run.

    If train.init_from is set and the data's vocabulary is larger than model.vocab_size, raises a
    `UsageError` whose message starts with train.init_from instead of model.vocab_size.
    """
    if config.out:
        config = with_moved_tokenizer(config, Path(config.out))
    try:
        return open_dataset(config.data, config.model)
    except UsageError as error:
        key = f"model.vocab_size={config.model.vocab_size}: "
        if config.train.init_from is None or not str(error).startswith(key):
            raise
        raise UsageError(
            f"train.init_from={config.train.init_from}: the model has a vocabulary of "
            f"{config.model.vocab_size}; {str(error).removeprefix(key).partition(';')[0]}; prepare "
            "the data with the tokenizer that belongs to the weights, and do not set "
            "model.vocab_size"
        ) from None


def with_tokenizer_of_run(
    config: Config, dataset: Dataset, directory: Path, meta: dict[str, Any]
) -> tuple[Config, Dataset]:
    """Return the config and the dataset, with a tokenizer if the run directory has one.

    If the data has no tokenizer, the run uses the tokenizer file that was copied from the initial
    weights.
    """
    file = (meta["tokenizer"] or {}).get("file")
    if dataset.tokenizer is not None or file is None or not (directory / file).exists():
        return config, dataset
    config = config.replace(data__tokenizer=str(directory.absolute()))
    return config, open_run_data(config)


def prepare_default_data(data: DataConfig) -> list[str]:
    """Prepare the default dataset `python` if it is needed but missing; return log lines.

    Raises `UsageError` if it cannot be prepared.
    """
    is_default = data.dataset == "python" and not (data.path or data.blend or data.file_list)
    if not is_default:
        return []
    home = dataset_directory(data)
    try:
        if (home / "meta.json").exists():
            return []
        return [f"prepared {home}: {prepare_python(home)[0]}"]
    except OSError as e:
        raise UsageError(
            f"data.dataset=python: {home} cannot be written ({in_words(e)}); "
            "set JAXGPT_DATA to a writable folder"
        ) from None


def _paths(dataset: Dataset) -> list[str]:
    return [str(source.entry.path.absolute()) for source in dataset.sources]


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """Return the data settings with absolute paths, and with any file list converted to `blend`.

    Each line of `blend` also names its corpus. If data.tokenizer is not the path of an existing
    file or folder, it stays unchanged.
    """
    if data.path is not None:
        data = dataclasses.replace(data, path=str(Path(data.path).absolute()))
    if data.tokenizer is not None and os.path.exists(data.tokenizer):
        data = dataclasses.replace(data, tokenizer=str(Path(data.tokenizer).absolute()))
    if data.blend or data.file_list:
        lines = [
            shlex.join([e.weight_text, str(e.path.absolute()), e.corpus]) for e in entries(data)
        ]
        data = dataclasses.replace(data, blend=tuple(lines), file_list=None)
    return data


def writable_directory(config: Config, at_end: contextlib.ExitStack) -> Path:
    """Return the run directory, created if necessary and locked until `at_end` is closed.

    The lock belongs to the process: if this process calls this twice for a directory, both calls
    succeed, and closing either `at_end` releases the lock. On file systems without locks, the
    directory is not locked. If config.out is None, this creates a new directory,
    runs/<config>-<time>, with a suffix if that name is taken. Raises `UsageError` if the directory
    is in use by another job, is a file, cannot be written, is the checkpoints folder of a run or
    inside it, or contains a file named checkpoints or a folder with a name in `FILES`.
    """
    given = Path(config.out or "").absolute()
    try:
        # A run may delete anything in its checkpoints folder, so another run must not write there.
        for folder in (given, *given.parents) if config.out else ():
            run = folder.parent
            if folder.name == "checkpoints" and (run / ".lock").exists():
                raise UsageError(
                    f"out={config.out}: is inside the checkpoints folder of a run; give "
                    f"{run} to continue from its newest checkpoint, or another folder"
                )
        if given.exists() and not given.is_dir():
            raise UsageError(
                f"out={config.out}: is a file, not a folder; give another run directory"
            )
        directory = Path(config.out) if config.out else _new_directory(config)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(MIN_FREE_BYTES))
        lock = at_end.enter_context((directory / ".lock").open("a+"))
        found = lock_file(lock)
        if found == "taken":
            lock.seek(0)
            raise UsageError(
                f"out={directory}: is in use by {lock.read().strip() or 'another job'}; "
                "wait for it to end, or give another run directory"
            )
        if found != "unsupported":
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on host {platform.node()}\n")
            lock.flush()
    except OSError as e:
        raise UsageError(
            f"out={config.out or 'runs'}: cannot be written ({in_words(e)}); give a writable folder"
        ) from None
    for name in ("checkpoints", *FILES):
        path = directory / name
        if path.exists() and path.is_dir() != (name == "checkpoints"):
            kind = "folder" if path.is_dir() else "file"
            raise UsageError(
                f"out={directory}: contains a {kind} named {name}; remove it, or give another run "
                "directory"
            )
    return directory


def _new_directory(config: Config) -> Path:
    """Create and return runs/<config>-<time>, with a suffix if the name is taken.

    Raises `OSError` if the folder cannot be created.
    """
    stem = f"{Path(config.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        directory = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):  # another run started in the same second
            directory.mkdir(parents=True)
            return directory
    raise AssertionError("unreachable")
