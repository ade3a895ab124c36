"""The run directory: found or made, checked against what is asked for, before JAX starts."""

import dataclasses
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgpt.config import (
    Config,
    UsageError,
    check_batch,
    config_from_dict,
    mesh_sizes,
    skip_ranges,
)
from jaxgpt.data.corpora import prepare_python
from jaxgpt.data.sources import Dataset, dataset_directory, open_dataset
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.distributed.cluster import (
    Cluster,
    accelerator_expected,
    cpu_devices_per_process,
)
from jaxgpt.training.spikes import SkipRanges

# What may differ between a checkpoint's model and the model that goes on from it.
_FREE_MODEL_KEYS = {"dropout", "attention"}
# What decides which tokens a step sees: a change is allowed, and said.
_ORDER_KEYS = (("train", "batch_size"), ("train", "seed"))


@dataclass(frozen=True)
class Run:
    """A run that is ready to start, the same on every process."""

    config: Config
    """With model.vocab_size, `out` and the skip ranges of earlier starts filled in."""
    directory: Path
    dataset: Dataset
    resume_step: int | None
    """The checkpoint to go on from."""
    resume_meta: dict[str, Any]
    notes: tuple[str, ...]
    """Lines for the log."""


def prepare_run(config: Config, cluster: Cluster) -> Run:
    """Opens the data and the run directory, and finds the checkpoint to go on from.

    Process 0 looks and decides; the others get its answer, and open the data for themselves.

    Raises:
        UsageError: on every process, if anything that the configuration asks for cannot be.
    """
    error, decided = None, None
    try:
        check_cpu_mesh(config, cluster)
        if cluster.is_main:
            decided = _decide(config)
    except UsageError as e:
        error = str(e)
    cluster.agree(error)
    decided = cluster.broadcast(decided)
    config = config_from_dict(decided["config"], "configuration of process 0")
    dataset = None
    try:
        dataset = open_dataset(config.data, config.model)
    except UsageError as e:
        error = f"process {cluster.rank}: {e}"
    cluster.agree(error)
    return Run(
        config=config,
        directory=Path(config.out),
        dataset=dataset,
        resume_step=decided["resume_step"],
        resume_meta=decided["resume_meta"],
        notes=tuple(decided["notes"]),
    )


def check_cpu_mesh(config: Config, cluster: Cluster) -> None:
    """Checks the mesh against the devices that a job on CPUs is going to have."""
    mesh = mesh_sizes(config)
    if not accelerator_expected():
        n_devices = cpu_devices_per_process(mesh, cluster) * cluster.size
        check_batch(config, mesh_sizes(config, n_devices))


def _decide(config: Config) -> dict[str, Any]:
    """Everything that process 0 finds out, as JSON for the others."""
    notes = []
    home = dataset_directory(config.data)
    if config.data.path is None and config.data.dataset == "python" and not home.exists():
        try:
            notes += [f"prepared {home}: {prepare_python(home)[0]}"]
        except OSError as e:
            raise UsageError(
                f"data.dataset=python: {home} cannot be written ({e.strerror}); "
                "set JAXGPT_DATA to a folder that can"
            ) from None
    dataset = open_dataset(config.data, config.model)
    dataset.verify()
    config = config.replace(model__vocab_size=dataset.vocab_size)
    check_prompt(config.train.sample_prompt, dataset.tokenizer)

    directory = _writable_directory(config)
    config = config.replace(out=str(directory))
    steps = saved_steps(directory)
    resume_step = steps[-1] if steps else None
    meta: dict[str, Any] = {}
    if resume_step is not None:
        meta = read_meta(directory, resume_step)
        notes += _check_resume(config, directory, resume_step, meta, dataset)
        earlier = config_from_dict(meta["config"], f"checkpoint {resume_step}")
        ranges = SkipRanges([*skip_ranges(earlier), *skip_ranges(config)])
        config = config.replace(train_range_to_skip=ranges.flat())
    (directory / "config.yaml").write_text(config.to_yaml())
    return {
        "config": config.to_dict(),
        "resume_step": resume_step,
        "resume_meta": meta,
        "notes": notes,
    }


def check_prompt(prompt: str, tokenizer: Tokenizer | None) -> None:
    """Refuses train.sample_prompt if the tokenizer cannot encode it."""
    if prompt and tokenizer is not None:
        try:
            tokenizer.encode(prompt)
        except UsageError as e:
            raise UsageError(f"train.sample_prompt={prompt!r}: {e}") from None


def _writable_directory(config: Config) -> Path:
    name = config.out or f"runs/{Path(config.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as e:
        reason = e.strerror or str(e)
        raise UsageError(
            f"out={directory}: cannot be written ({reason}); give --out a folder that can"
        ) from None
    return directory


def _check_resume(
    config: Config, directory: Path, step: int, meta: dict[str, Any], dataset: Dataset
) -> list[str]:
    """Refuses a checkpoint that the run cannot go on from; returns lines about what differs."""
    checkpoint = directory / "checkpoints" / str(step)
    if not config.checkpoint.resume:
        raise UsageError(
            f"checkpoint.resume=False: {checkpoint} exists; give another --out, "
            "or checkpoint.resume=True to go on from it"
        )
    saved = meta["config"]
    for key, value in dataclasses.asdict(config.model).items():
        if key not in _FREE_MODEL_KEYS and saved["model"].get(key) != value:
            raise UsageError(
                f"model.{key}={value}: {checkpoint} was trained with "
                f"model.{key}={saved['model'].get(key)}; use that, or another --out"
            )
    if meta["data_fingerprint"] != dataset.fingerprint:
        raise UsageError(
            f"data.dataset={config.data.dataset}: {dataset.directory} does not hold the tokens "
            f"that {checkpoint} was trained on; bring them back, or give another --out"
        )
    notes = []
    for section, key in _ORDER_KEYS:
        now, then = getattr(getattr(config, section), key), saved[section][key]
        if now != then:
            notes.append(
                f"warning: {section}.{key} was {then} and is {now} from step {step + 1} on: "
                "the order of the data changes"
            )
    return notes


def saved_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a run directory, oldest first."""
    names = [p.name for p in (directory / "checkpoints").glob("*") if p.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """The JSON that was saved beside the state of `step`."""
    return json.loads((directory / "checkpoints" / str(step) / "meta" / "metadata").read_text())
