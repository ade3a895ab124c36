"""Every setting of a run: frozen dataclasses, filled from a YAML preset and the command line.

A setting is named `section.key` everywhere: in a YAML file, in `section.key=value`, in
`--section.key value`, and in every error. All values pass through tyro, so a preset and the
command line accept the same spellings.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

MESH_AXES = ("data", "fsdp", "tensor")


class UsageError(ValueError):
    """Something a user gave is wrong. The message names the key, the value and what would do.

    Commands print it as one line and exit with status 2.
    """


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: GPT-2 (pre-norm, learned positions, tied embedding)."""

    n_layer: int = 4
    """Number of transformer layers, L."""
    n_head: int = 4
    """Number of attention heads, H."""
    n_embd: int = 128
    """Width of the residual stream, D."""
    block_size: int = 128
    """Context length in tokens, T."""
    bias: bool = False
    """Biases in linear layers and layer norms, as GPT-2 has them; without is a bit faster."""
    dropout: float = 0.0
    """Dropout rate of embeddings, attention and residuals; 0 for pre-training."""
    vocab_size: int | None = None
    """Number of tokens, V; None takes it from the data's meta.json."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto picks cudnn where it can run, and the log says which."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run: length, batch, evaluation, logging."""

    max_iters: int = 600
    """Number of optimizer steps in all, counted from 1."""
    batch_size: int = 16
    """Global batch: sequences per step, whole job, whatever the mesh."""
    gradient_accumulation_steps: int = 1
    """Equal microbatches that the global batch is split into."""
    eval_interval: int = 200
    """Steps between evaluations (and samples); 0 evaluates only at the end."""
    eval_iters: int = 20
    """Batches per split in an evaluation; the same ones every time."""
    log_interval: int = 10
    """Steps between log lines."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, optimizer state, logits and loss stay float32."""
    seed: int = 1337
    """Seed of the initial parameters, the data order and dropout."""
    sample_tokens: int = 200
    """Tokens that the model writes at each evaluation; 0 writes none."""
    sample_prompt: str = ""
    """Text that the samples at evaluations begin with; empty is token 0, which begins a document
    in byte data and is the first character in char data."""
    time_limit: float | None = None
    """Minutes after which the run saves a checkpoint and stops with exit status 75."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with linear warm-up and cosine decay."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    min_lr: float | None = None
    """Learning rate at and after lr_decay_iters; None is a tenth of the peak."""
    warmup_iters: int = 100
    """Steps of linear warm-up."""
    lr_decay_iters: int = 600
    """Step at which the cosine reaches min_lr; mostly train.max_iters, but not tied to it, so
    that a run made longer or shorter keeps its learning rates."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings; never of biases and norms."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment; 0.99 suits small batches."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    dataset: str = "python"
    """Name of a prepared data set: a folder of $JAXGPT_DATA (default ~/.cache/jaxgpt)."""
    path: str | None = None
    """Folder with train.bin, val.bin and meta.json, in place of a named data set."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the job is laid out over devices: speed and memory, never the results."""

    mesh: str = "-1,1,1"
    """Sizes of the mesh axes data,fsdp,tensor (also --mesh); -1 fills one axis."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """What is sharded over fsdp (arXiv 1910.02054): 0 nothing, 1 optimizer state, 2 also
    gradients, 3 also parameters."""
    scan_layers: bool = False
    """Compile one block and loop over it: much shorter compilation of deep models."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved, and whether a run goes on from it."""

    interval: int = 500
    """Steps between checkpoints; 0 saves only at the end. The last step is always saved."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    resume: bool = True
    """Go on from the newest checkpoint in --out; False refuses a folder that has one."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    config: str = "tiny"
    """Preset (a file of configs/) or a path to a YAML file."""
    out: str | None = None
    """Run directory; None is runs/<config>-<time>. One that exists is gone on with."""
    train_range_to_skip: tuple[int, ...] = ()
    """Ranges of steps to skip, `A B C D` for [A,B] and [C,D]; from 1, ends included."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def microbatch_size(self) -> int:
        return self.train.batch_size // self.train.gradient_accumulation_steps

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dict, ready for YAML and JSON."""
        out = dataclasses.asdict(self)
        out["train_range_to_skip"] = list(self.train_range_to_skip)
        return out

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def replace(self, **changes: Any) -> "Config":
        """A copy with `section__key=value` (or top-level `key=value`) changed."""
        config = self
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                value = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: value})
        return config


def load_config(config: str = "tiny", *overrides: str) -> Config:
    """The configuration of a preset with `section.key=value` overrides, validated.

    >>> load_config("shakespeare_char_cpu", "train.max_iters=100").model.n_layer
    4
    """
    return parse_args(["--config", config, *overrides])


def parse_args(argv: Sequence[str], prog: str = "python -m jaxgpt.train") -> Config:
    """The configuration that a command line describes, validated.

    The base is `--config`; without it the config.yaml of an existing `--out`, else `tiny`.
    `--help` prints every key and exits 0.

    Raises:
        UsageError: for an unknown key, a value of the wrong type, or one that cannot work.
    """
    import tyro

    given = _split_arguments(argv)
    if "help" in given:
        tyro.cli(Config, args=["--help"], prog=prog, use_underscores=True, config=_TYRO_FLAGS())
    base = _base_file(given)
    values = {**_flatten(_read_yaml(base), origin=str(base)), **given}
    if "config" not in given:
        values.setdefault("config", ["tiny"])
    config = _build(values)
    validate(config)
    return config


def config_from_dict(values: Mapping[str, Any], origin: str) -> Config:
    """The configuration that `Config.to_dict` wrote, from a checkpoint or a run directory."""
    return _build(_flatten(values, origin))


def validate(config: Config) -> None:
    """Checks everything that needs neither the data nor the devices.

    Raises:
        UsageError: naming the key, its value, and what would do.
    """
    model, train, optimizer = config.model, config.train, config.optimizer
    for section, keys, least in (
        ("model", ("n_layer", "n_head", "n_embd", "block_size"), 1),
        ("train", ("max_iters", "batch_size", "gradient_accumulation_steps"), 1),
        ("train", ("eval_iters", "log_interval"), 1),
        ("train", ("eval_interval", "sample_tokens", "seed"), 0),
        ("optimizer", ("learning_rate", "warmup_iters", "weight_decay", "grad_clip"), 0),
        ("optimizer", ("lr_decay_iters",), 1),
        ("checkpoint", ("keep",), 1),
        ("checkpoint", ("interval",), 0),
    ):
        for key in keys:
            value = getattr(getattr(config, section), key)
            if not value >= least:  # also refuses nan
                raise UsageError(f"{section}.{key}={value}: must be at least {least}")
    if train.seed >= 2**31:
        raise UsageError(f"train.seed={train.seed}: must be less than 2^31 = {2**31}")
    if model.vocab_size is not None and model.vocab_size < 2:
        raise UsageError(f"model.vocab_size={model.vocab_size}: must be at least 2, or None")
    if model.n_embd % model.n_head:
        raise UsageError(
            f"model.n_embd={model.n_embd}: must be a multiple of model.n_head={model.n_head}"
        )
    if not 0 <= model.dropout < 1:
        raise UsageError(f"model.dropout={model.dropout}: must be at least 0 and below 1")
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, key) < 1:
            raise UsageError(
                f"optimizer.{key}={getattr(optimizer, key)}: must be at least 0 and below 1"
            )
    if optimizer.min_lr is not None and not 0 <= optimizer.min_lr <= optimizer.learning_rate:
        raise UsageError(
            f"optimizer.min_lr={optimizer.min_lr}: must lie between 0 and "
            f"optimizer.learning_rate={optimizer.learning_rate}"
        )
    if train.time_limit is not None and not train.time_limit > 0:
        raise UsageError(f"train.time_limit={train.time_limit}: must be more than 0 minutes")
    if train.batch_size % train.gradient_accumulation_steps:
        raise UsageError(
            f"train.gradient_accumulation_steps={train.gradient_accumulation_steps}: must divide "
            f"train.batch_size={train.batch_size}"
        )
    skip_ranges(config)
    mesh_sizes(config)


def skip_ranges(config: Config) -> tuple[tuple[int, int], ...]:
    """`train_range_to_skip` as (first, last) pairs of steps, both included.

    Raises:
        UsageError: for an odd count, a step below 1, or a first step after its last.
    """
    steps = config.train_range_to_skip
    shown = " ".join(map(str, steps))
    if len(steps) % 2:
        raise UsageError(
            f"train_range_to_skip={shown}: has {len(steps)} numbers; give pairs of "
            "first and last step, such as 10 20 25 30"
        )
    pairs = tuple(zip(steps[::2], steps[1::2], strict=True))
    for first, last in pairs:
        if first < 1 or first > last:
            raise UsageError(
                f"train_range_to_skip={shown}: the range {first} {last} must have "
                "1 <= first <= last"
            )
    return pairs


def mesh_sizes(config: Config, n_devices: int | None = None) -> tuple[int, ...]:
    """Sizes of the axes (data, fsdp, tensor), checked against the model and the batch.

    Args:
        n_devices: devices of the whole job; None leaves a -1 as it is, with the checks that
            need its size left for later.

    Raises:
        UsageError: if the sizes are malformed, their product is not `n_devices`, or they do
            not divide what they split.
    """
    text = config.parallel.mesh
    key = f"parallel.mesh={text}"
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if (
        len(sizes) != len(MESH_AXES)
        or any(size < 1 and size != -1 for size in sizes)
        or sizes.count(-1) > 1
    ):
        raise UsageError(
            f"{key}: must be three sizes {','.join(MESH_AXES)}, each at least 1, "
            "at most one of them -1; for example 2,1,4"
        )
    if n_devices is not None and -1 in sizes:
        known = -functools.reduce(int.__mul__, sizes)
        if n_devices % known:
            raise UsageError(f"{key}: {known} does not divide the job's {n_devices} devices")
        sizes[sizes.index(-1)] = n_devices // known
    data, fsdp, tensor = sizes
    if n_devices is not None and data * fsdp * tensor != n_devices:
        raise UsageError(
            f"{key}: the product is {data * fsdp * tensor} but the job has {n_devices} devices; "
            "they must be equal (-1 fills one axis)"
        )
    if tensor > 0 and config.model.n_head % tensor:
        raise UsageError(
            f"{key}: tensor={tensor} does not divide model.n_head={config.model.n_head}"
        )
    if data > 0 and fsdp > 0 and config.microbatch_size % (data * fsdp):
        accumulation = config.train.gradient_accumulation_steps
        split = f"/{accumulation} microbatches" if accumulation > 1 else ""
        raise UsageError(
            f"train.batch_size={config.train.batch_size}{split}: must be a multiple of "
            f"data x fsdp = {data * fsdp} (parallel.mesh={data},{fsdp},{tensor})"
        )
    return tuple(sizes)


# --- from text to dataclasses ---------------------------------------------------------------

_ALIASES = {"mesh": "parallel.mesh", "h": "help"}


def _TYRO_FLAGS():
    import tyro

    return (tyro.conf.FlagConversionOff,)


@functools.cache
def _fields() -> dict[str, Any]:
    """`section.key` -> type, for every setting."""
    out = {}
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            out |= {f"{name}.{f.name}": hints[f.name] for f in dataclasses.fields(kind)}
        else:
            out[name] = kind
    return out


def config_directories() -> list[Path]:
    """Where presets are looked for: the installed package, then a source checkout."""
    package = Path(__file__).parent
    return [package / "configs", package.parent / "configs"]


def _base_file(given: Mapping[str, Sequence[str]]) -> Path:
    if "config" not in given and "out" in given:
        kept = Path(given["out"][0]) / "config.yaml"
        if kept.is_file():
            return kept
    name = given.get("config", ["tiny"])[0]
    presets = {f.stem: f for d in config_directories() for f in sorted(d.glob("*.yaml"))}
    if name in presets:
        return presets[name]
    if Path(name).is_file():
        return Path(name)
    raise UsageError(f"config={name}: no such file or preset; presets are {', '.join(presets)}")


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"config={path}: not readable as YAML ({problem})") from None
    if not isinstance(values, Mapping):
        raise UsageError(f"config={path}: must be a mapping of sections such as `train:`")
    return values


def _flatten(values: Mapping[str, Any], origin: str) -> dict[str, list[str]]:
    """Nested mapping -> {`section.key`: [words]}, the form that a command line has."""
    out = {}
    for section, content in values.items():
        nested = isinstance(content, Mapping)
        for key, value in content.items() if nested else [(None, content)]:
            name = f"{section}.{key}" if nested else str(section)
            if name not in _fields():
                raise UsageError(f"{origin}: {_unknown(name)}")
            out[name] = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return out


def _split_arguments(argv: Sequence[str]) -> dict[str, list[str]]:
    """Command line -> {`section.key`: [words]}; `key=value` and `--key value` alike."""
    out: dict[str, list[str]] = {}
    name = None  # the flag that following words belong to
    for word in argv:
        if word in ("-h", "--help"):
            return {"help": []}
        key, equals, value = word.removeprefix("--").partition("=")
        key = _ALIASES.get(key, key).replace("-", "_")
        is_flag = word.startswith("--")
        if is_flag or (equals and (name is None or key in _fields() or "." in key)):
            if key not in _fields():
                raise UsageError(_unknown(word if not equals else key, key))
            out[key] = [value] if equals else []
            name = None if equals else key
        elif name is None:
            raise UsageError(f"{word}: not understood; give section.key=value or --section.key value")
        else:
            out[name].append(word)
            if "tuple" not in str(_fields()[name]):
                name = None
    for key, words in out.items():
        if not words and "tuple" not in str(_fields()[key]):
            raise UsageError(f"--{key}: needs a value: {_expected(_fields()[key])}")
    return out


def _unknown(shown: str, key: str | None = None) -> str:
    """One sentence about an unknown key, with the nearest known one."""
    key = key or shown
    known = list(_fields())
    tails = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(key, known, 1, 0.6)
    near = near or [tails[t] for t in difflib.get_close_matches(key.rpartition(".")[2], tails, 1)]
    hint = f"did you mean {near[0]}?" if near else "--help lists every key"
    return f"{shown}: unknown key; {hint}"


def _build(values: Mapping[str, Sequence[str]]) -> Config:
    """Turns words into typed values with tyro.

    Raises:
        UsageError: naming the first key whose value has the wrong type.
    """
    import tyro

    def parse(names: Sequence[str]) -> Config:
        words = []
        for name in names:
            value = list(values[name])
            if _fields()[name] is bool:
                value = [v.capitalize() for v in value]
            # `--key=value` keeps a value that begins with a dash from looking like a flag.
            words += [f"--{name}={value[0]}"] if len(value) == 1 else [f"--{name}", *value]
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                Config,
                args=words,
                use_underscores=True,
                config=_TYRO_FLAGS(),
                console_outputs=False,
            )

    names = list(values)
    try:
        return parse(names)
    except SystemExit:
        for name in names:
            try:
                parse([name])
            except SystemExit:
                shown = " ".join(values[name])
                expected = _expected(_fields()[name])
                raise UsageError(f"{name}={shown}: must be {expected}") from None
        raise AssertionError(f"tyro refused {values} but none of its parts") from None


def _expected(kind: Any) -> str:
    """A type in a user's words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if isinstance(kind, types.UnionType):
        return " or ".join(_expected(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "whole numbers"
    return {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        types.NoneType: "None",
    }[kind]
