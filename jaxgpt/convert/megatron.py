"""Import of GPT checkpoints from Megatron-LM and Megatron-DeepSpeed, with all ranks merged.

A Megatron-LM folder `iter_0001000` has a file `mp_rank_TT[_PPP]/model_optim_rng.pt` for each
tensor-parallel rank TT and pipeline rank PPP. A Megatron-DeepSpeed folder `global_step1000` has
`mp_rank_TT_model_states.pt`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig, UsageError, in_words
from jaxgpt.convert import torch_file
from jaxgpt.convert.families import checked_model
from jaxgpt.convert.huggingface import read_tokenizer, write_weights
from jaxgpt.convert.layout import match_tensors
from jaxgpt.convert.names import MEGATRON, MEGATRON_SPELLINGS
from jaxgpt.convert.tensors import Tensor
from jaxgpt.convert.torch_file import Inert, TorchTensor

RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_model_states\.pt)?")
MAX_DEPTH = 20
MAX_NAME = 200  # maximum length of a key
# Name prefixes of the last pipeline stage's copy of the token embedding.
HEADS = ("word_embeddings_for_head.", "output_layer.")
FILES = ("model_optim_rng.pt", "model_rng.pt")
# Objects of these classes, and of all classes in these packages, are replaced with `Inert`.
HARMLESS_PACKAGES = ("megatron", "deepspeed", "transformer_engine")
HARMLESS_NAMES = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
    "signal.Signals",
    "_io.BytesIO",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",  # NumPy 2
    "numpy._core.multiarray.scalar",
    "torch.torch_version.TorchVersion",
}
# Supported values of Megatron's arguments. The first value is the default. Other values raise an
# error.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("LayerNorm", "layernorm"),  # Megatron-LM, Megatron-DeepSpeed
    "swiglu": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "position_embedding_type": ("learned_absolute",),
    "use_rotary_position_embeddings": (False,),
    "use_alibi_position_embeddings": (False,),
    "alibi": (False,),
    "window_size": (None,),
    "group_query_attention": (False,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "add_bias_linear": (True,),
    "multi_latent_attention": (False,),
    "virtual_pipeline_model_parallel_size": (None, 1),
}


@dataclass(frozen=True)
class Merged:
    """A tensor that tensor-parallel ranks either replicate or shard along one dimension."""

    parts: tuple[Tensor, ...]  # one for each tensor-parallel rank
    axis: int | None  # sharded dimension; None if the tensor is replicated
    # Number of rows without vocabulary padding, or None to keep all rows. If `axis` is not 0, this
    # must be None.
    most_rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        if self.axis is not None:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        if self.most_rows is not None:
            shape[0] = min(shape[0], self.most_rows)
        return tuple(shape)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) as float32, like `Tensor.read`.

        Raises `UsageError` if the rows cannot be read.
        """
        if self.axis is None:
            return self.parts[0].read(start, stop)
        if self.axis > 0:
            return np.concatenate([part.read(start, stop) for part in self.parts], self.axis)
        first, found = 0, []
        stop = self.shape[0] if stop is None else stop
        for part in self.parts:
            rows = part.shape[0]
            begin, end = max(start - first, 0), min(stop - first, rows)
            if begin < end:
                found.append(part.read(begin, end))
            first += rows
        return np.concatenate(found)


def from_megatron(path: Path, out: Path, tokenizer: Path | None = None) -> list[str]:
    """Import a checkpoint as initial weights for a run. Return the lines to print.

    Args:
        path: folder that `rank_files` accepts.
        out: run directory to create.
        tokenizer: path that `read_tokenizer` accepts, or None. Rows of the embedding and the
            output layer beyond the tokenizer's vocabulary are dropped as padding.

    Raises `UsageError` if a file is missing or damaged, if the model is not supported, if the
    tensors do not match the model, if the tokenizer cannot be read or does not fit the model, or if
    torch is missing or too old. Also raises whatever `rank_files` and `write_weights` raise.
    """
    files = rank_files(path)
    loaded = {rank: load(file) for rank, file in files.items()}
    arguments = loaded[0, 0][0]
    found = merged(files, {rank: tensors for rank, (_, tensors) in loaded.items()}, arguments)
    model = model_of(path, arguments, found)
    made = read_tokenizer(tokenizer, model.vocab_size)
    if made is not None:
        model = replace(model, vocab_size=made.vocab_size)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in found:
            found[name] = replace(found[name], most_rows=model.vocab_size)
    table = {name: ref for name, (ref, _) in MEGATRON.items()}
    wanted = match_tensors(found, table, model, str(path))
    return write_weights(path, out, found, wanted, model, made)


def rank_files(path: Path) -> dict[tuple[int, int], Path]:
    """Return a dict that maps each (tensor rank, pipeline rank) to its checkpoint file.

    `path` is a checkpoint folder, or a parent folder with a file that names the latest checkpoint.
    Raises `UsageError` if the folder is missing, if it has no checkpoint in a supported format, if
    a file is missing for a rank up to the largest ranks found, or if the name of the latest
    checkpoint cannot be read. Raises `OSError` if a folder cannot be accessed.
    """
    for name, form in (("latest_checkpointed_iteration.txt", "iter_{:0>7}"), ("latest", "{}")):
        if (path / name).is_file():
            try:
                newest = (path / name).read_text(errors="replace").strip()
            except OSError as error:
                raise UsageError(f"{path / name}: cannot be read ({in_words(error)})") from None
            folder = newest if newest == "release" else form.format(newest)
            if Path(folder).name != folder or not (path / folder).is_dir():
                raise UsageError(f"{path / name}: refers to {folder}, which is not in this folder")
            path = path / folder
            break
    if not path.is_dir():
        raise UsageError(f"{path}: is not a folder; give one with mp_rank_00 or mp_rank_00_000")
    files = {}
    for entry in sorted(path.glob("mp_rank_*")):
        match = RANK.fullmatch(entry.name)
        inside = [entry] if entry.is_file() else [entry / name for name in FILES]
        if match and (file := next((f for f in inside if f.is_file()), None)):
            files[int(match[1]), int(match[2] or 0)] = file
    if not files:
        hint = "; give the folder that Megatron's --save named, or one of its checkpoints"
        if next(path.glob("*.distcp"), None) or (path / ".metadata").exists():
            hint = "; this is a distributed checkpoint: save it with --ckpt-format torch"
        elif next(path.glob("layer_*-model_states.pt"), None):
            hint = "; this is a DeepSpeed pipeline checkpoint: save with --no-pipeline-parallel"
        raise UsageError(f"{path}: has no mp_rank_*/{FILES[0]} or mp_rank_*_model_states.pt{hint}")
    tensor, pipeline = (1 + max(rank[i] for rank in files) for i in (0, 1))
    missing = [
        f"mp_rank_{t:02}_{p:03}"
        for p in range(pipeline)
        for t in range(tensor)
        if (t, p) not in files
    ]
    if missing:
        raise UsageError(f"{path}: has no {', '.join(missing)}; all ranks are needed")
    return files


def is_harmless(name: str) -> bool:
    """Return whether the class or function with this full name is replaced with `Inert`."""
    return name in HARMLESS_NAMES or name.partition(".")[0] in HARMLESS_PACKAGES


def load(file: Path) -> tuple[dict[str, Any], dict[str, TorchTensor]]:
    """Load one rank's file. Return Megatron's arguments and a dict of tensors (see `flat`).

    An argument is a bool, a number, a string, None, or a list of these. Enum members are replaced
    with their values. Raises `UsageError` if the file cannot be read or is not a supported
    checkpoint, or if torch is missing or too old.
    """
    state = torch_file.load(file, is_harmless)
    if not isinstance(state, dict):
        raise UsageError(f"{file}: does not hold a dictionary; give a Megatron checkpoint")
    version = _plain(state.get("checkpoint_version", 0))
    model = state.get("model", state.get("module"))
    arguments = state.get("args")
    if "model0" in state:
        raise UsageError(f"{file}: has an interleaved pipeline; save it without virtual stages")
    if not isinstance(model, dict) or not isinstance(arguments, Inert):
        raise UsageError(f"{file}: has no model or args; give a Megatron checkpoint")
    if not isinstance(version, int | float) or version < 2:
        raise UsageError(f"{file}: has checkpoint_version {version}; it must be 2 or later")
    values = {key: _argument(value) for key, value in arguments.fields.items()}
    return values, flat(model, file)


def _argument(value: Any) -> Any:
    """Apply `_plain` to a value, or to each item of a list or tuple."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a number, a string or an enum member's value. Return None for other objects."""
    if isinstance(value, Inert) and value.arguments:
        value = value.arguments[0]
    return value if isinstance(value, str | int | float) else None


def flat(tree: Mapping[Any, Any], file: Path) -> dict[str, TorchTensor]:
    """Return a dict that maps names in `MEGATRON` to the tensors in nested dictionaries.

    In these names, {} is replaced by the layer number within the pipeline stage. Tensors that are
    not in `MEGATRON` are also returned. Tensors whose names end in _extra_state are left out.

    Raises `UsageError` if the key of a tensor or dictionary is not a string of at most `MAX_NAME`
    characters, or if a dictionary is nested too deeply or appears twice. If shared dictionaries
    were allowed, a small file could expand to exponentially many tensors.
    """
    out: dict[str, TorchTensor] = {}
    seen: set[int] = set()

    def add(tree: Mapping[Any, Any], prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH or id(tree) in seen:
            fault = "appears twice" if id(tree) in seen else "is nested too deeply"
            raise UsageError(f"{file}: the dictionary {prefix[:50]} {fault}; save the model again")
        seen.add(id(tree))
        for key, value in tree.items():
            if not (isinstance(value, dict) or torch_file.is_tensor(value)):
                continue
            if type(key) is not str or len(key) > MAX_NAME:
                raise UsageError(f"{file}: holds a tensor with a name that Megatron does not use")
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                add(value, f"{name}.", depth + 1)
            elif not name.endswith("_extra_state"):
                for found, spelling in MEGATRON_SPELLINGS.items():
                    name = name.replace(found, spelling)
                out[name] = TorchTensor(file, name, value)

    add(tree, "", 0)
    return out


def merged(
    files: Mapping[tuple[int, int], Path],
    ranks: Mapping[tuple[int, int], Mapping[str, TorchTensor]],
    arguments: Mapping[str, Any],
) -> dict[str, Merged]:
    """Return the full model's tensors in a dict, with layers numbered across pipeline stages.

    Args:
        files: file of each (tensor rank, pipeline rank), for error messages.
        ranks: tensors of each rank, by name.
        arguments: Megatron's arguments.

    The last stage's copy of a tied token embedding is left out.

    Raises `UsageError` if a tensor of tensor rank 0 is missing or has a different shape on another
    tensor rank of the same stage, if num_layers is missing or cannot be split into equal stages, or
    if a sharded tensor has too few dimensions.
    """
    n_tensor, n_pipeline = (1 + max(rank[i] for rank in ranks) for i in (0, 1))
    n_layer = arguments.get("num_layers")
    if type(n_layer) is not int or n_layer % n_pipeline:
        raise UsageError(
            f"{files[0, 0]}: num_layers={n_layer} cannot be split into {n_pipeline} equal stages"
        )
    is_tied = not arguments.get("untie_embeddings_and_output_weights")
    axes = {re.sub(r"\{\}", "#", name): axis for name, (_, axis) in MEGATRON.items()}
    out: dict[str, Merged] = {}
    for stage in range(n_pipeline):
        for name in ranks[0, stage]:
            if stage and is_tied and name.startswith(HEADS):
                continue  # a copy of the first stage's token embedding
            parts = [ranks[t, stage].get(name) for t in range(n_tensor)]
            if None in parts:
                rank = parts.index(None)
                raise UsageError(f"{files[rank, stage]}: has no {name}, which rank 0 has")

            def renumbered(match: re.Match[str], first: int = stage * n_layer // n_pipeline) -> str:
                return f"layers.{int(match[1]) + first}."

            axis = axes.get(re.sub(r"layers\.\d+\.", "layers.#.", name))
            if axis is not None and any(len(part.shape) <= axis for part in parts):
                raise UsageError(
                    f"{files[0, stage]}: {name} has shape {parts[0].shape}, but no dim {axis}"
                )
            if len({part.shape for part in parts}) > 1:
                raise UsageError(f"{files[0, stage]}: {name} has a different shape on another rank")
            out[re.sub(r"layers\.(\d+)\.", renumbered, name)] = Merged(tuple(parts), axis)
    return out


def model_of(path: Path, arguments: Mapping[str, Any], found: Mapping[str, Tensor]) -> ModelConfig:
    """Return the model that a checkpoint's arguments and token embedding describe.

    The vocabulary size is the number of rows of the token embedding, including padding. The
    model has no dropout.

    Raises `UsageError` if an argument is missing, invalid or not supported, or if `found` has no
    token embedding with two dimensions.
    """
    for key, values in SUPPORTED.items():
        value = arguments.get(key, values[0])
        if value not in values:
            raise UsageError(f"{path}: {key}={value} is not supported, only {values[0]}")
    experts = arguments.get("num_experts") or 0  # a list in Megatron-DeepSpeed; [1] means none
    if (set(experts) - {1}) if isinstance(experts, list) else experts:
        raise UsageError(f"{path}: num_experts={experts} is not supported (mixture of experts)")
    words = found.get("embedding.word_embeddings.weight")
    if words is None or len(words.shape) != 2:
        raise UsageError(f"{path}: has no embedding.word_embeddings.weight")
    keys = ("num_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
    missing = [key for key in keys if type(arguments.get(key)) is not int or arguments[key] < 1]
    if missing:
        raise UsageError(f"{path}: its args have no {', '.join(missing)}")
    n_layer, n_head, n_embd, block_size = (arguments[key] for key in keys)
    is_tanh = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu", False)
    size, width = arguments.get("kv_channels"), arguments.get("ffn_hidden_size")
    options = {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_embd": n_embd,
        "head_dim": None if size is None or size * n_head == n_embd else size,
        "block_size": block_size,
        "bias": True,
        "mlp": "gelu_tanh" if is_tanh else "gelu",
        "mlp_hidden": None if width == 4 * n_embd else width,
        "norm_eps": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        "vocab_size": words.shape[0],
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
    }
    return checked_model(options, path)
