"""Finding a trained model's checkpoint, configuration and tokenizer, without starting JAX."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxgpt.checkpoint.metadata import WEIGHTS_ONLY, choose_checkpoint, read_meta
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import (
    Config,
    UsageError,
    config_from_dict,
    expand_user,
    mesh_shape,
    override_data,
    parse_mesh,
)
from jaxgpt.convert import TRANSFORMERS, convert_in_subprocess, transformers_folder
from jaxgpt.data.tokenizers import Tokenizer, tokenizer_from_meta


@dataclass(frozen=True)
class Trained:
    """Description of a trained model, without its parameters."""

    where: str  # run directory, or a name for messages if the parameters are already loaded
    step: int
    config: Config  # the run's configuration, adapted for evaluation
    tokenizer: Tokenizer | None
    block_size: int  # length T of the longest row to evaluate, at most the model's context length
    data: Literal["own", "given", "none"]
    """Where `config.data` comes from: the run, the user (at least in part), or nowhere (imported
    weights)."""

    def known_tokenizer(self, name: str, instead: str = "") -> Tokenizer:
        """Return the tokenizer. Raises `UsageError` if there is no tokenizer.

        The message begins with `name`, the name of the run, and ends with `instead`.
        """
        if self.tokenizer is None:
            raise UsageError(
                f"{name}: has no tokenizer; set data.tokenizer when training, or import the "
                f"weights with `python -m jaxgpt.convert from-hf --tokenizer`{instead}"
            )
        return self.tokenizer


@contextlib.contextmanager
def run_folder(where: str, cluster: ProcessGroup) -> Iterator[Path]:
    """Yield the run directory `where`, or a temporary run directory for a Transformers model.

    A Hugging Face Transformers model is given as hf:FOLDER, or as a folder with a config.json and
    no checkpoints. The first process of each host converts the model. All processes must call this.
    Raises `UsageError` if the folder does not exist.
    """
    if not where.startswith(TRANSFORMERS):
        given = Path(expand_user(where))
        if not given.is_dir():
            raise UsageError(
                f"{where}: no such folder; give a run directory or the folder of a Hugging Face "
                "model"
            )
        if (given / "checkpoints").exists() or not (given / "config.json").is_file():
            yield given
            return
        where = f"{TRANSFORMERS}{given}"
    source = transformers_folder(where)

    def convert(folder: Path) -> None:
        convert_in_subprocess(source, folder, where)

    with host_folder("weights", convert, cluster) as folder:
        yield folder


@contextlib.contextmanager
def host_folder(name: str, write: Callable[[Path], None], cluster: ProcessGroup) -> Iterator[Path]:
    """Yield the path of a temporary folder that the first process of each host writes.

    `write` gets the path, which ends with `name`, and must create the folder. The process that
    wrote the folder removes it at the end, without waiting for other processes. Each host has a
    separate folder, because hosts might not share temporary folders. All processes must call this.
    If `write` raises `UsageError` on any host, all processes raise `UsageError`. Raises `OSError`
    if no temporary folder can be created.
    """
    with contextlib.ExitStack() as at_end:

        def make() -> str | None:
            if cluster.local_rank > 0:
                return None
            made = tempfile.TemporaryDirectory(prefix="jaxgpt-", ignore_cleanup_errors=True)
            folder = at_end.enter_context(made)
            write(Path(folder, name))
            return folder

        folders = cluster.allgather(cluster.run_on_all(make))
        yield Path(folders[cluster.hosts[cluster.rank]], name)


def find_trained(
    where: Path,
    step: int | None = None,
    mesh: str = "1,-1,1",
    dtype: str | None = None,
    settings: Sequence[str] = (),
    block_size: int | None = None,
) -> Trained:
    """Find a checkpoint in a run directory, without reading its parameters.

    Args:
        where: run directory.
        step: step of the checkpoint; default the newest.
        mesh: value of `parallel.mesh` for the evaluation.
        dtype: compute dtype, float32 or bfloat16; default the run's.
        settings: data settings, "data.KEY=VALUE", which override the run's.
        block_size: length T of the longest row, at least 1; default the model's.

    Raises `UsageError` if `block_size` is larger than the model's.
    """
    step = choose_checkpoint(where, step)
    meta = read_meta(where, step)
    config = override_data(config_from_dict(meta["config"], str(where)), settings)
    # Use any attention kernel that runs here, because training may have used other devices.
    config = config.replace(
        parallel__mesh=mesh,
        model__attention="auto",
        train__dtype=dtype or config.train.dtype,
        train__matmul_dtype=None,
    )
    config = without_training(config)
    longest = config.model.block_size
    if block_size is not None and block_size > longest:
        raise UsageError(f"--block-size={block_size}: must be at most model.block_size={longest}")
    mesh_shape(config.replace(model__block_size=block_size or longest))
    # The table of learned position embeddings must keep its size.
    if block_size is not None and config.model.position == "rope":
        config = config.replace(model__block_size=block_size)
    data: Literal["own", "given", "none"]
    data = "given" if settings else "none" if meta.get(WEIGHTS_ONLY) else "own"
    tokenizer = meta["tokenizer"] and tokenizer_from_meta(meta["tokenizer"], where)

    return Trained(str(where), step, config, tokenizer, block_size or longest, data)


def without_training(config: Config) -> Config:
    """Return a configuration without dropout, and with one microbatch for each pipeline stage.

    A `stage` axis of size -1 counts as 1.
    """
    n_stages = parse_mesh(config.parallel.mesh).split_of("splits_layers")
    return config.replace(model__dropout=0.0, train__gradient_accumulation_steps=n_stages)
