"""Every setting of a run, as frozen dataclasses: its type, its default, and a line about it.

The defaults are those of the preset `tiny`; --help shows them.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import yaml

from jaxgpt.config.values import (
    AtLeastOne,
    Bounds,
    Count,
    Count31,
    CountOrZero,
    CountOrZero31,
    Minutes,
    NonNegative,
    Rate,
)

MAX_INIT_TIMEOUT = 86_400  # seconds: a day


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: GPT-2 (pre-norm, learned positions, tied embedding)."""

    n_layer: Count = 3
    """Number of transformer layers, L."""
    n_head: Count = 4
    """Number of attention heads, H."""
    n_embd: Count = 128
    """Width of the residual stream, D."""
    block_size: Count = 128
    """Context length in tokens, T."""
    bias: bool = False
    """Biases in linear layers and layer norms, as in GPT-2; False is a bit faster."""
    dropout: Rate = 0.0
    """Dropout rate of embeddings, attention and residuals; 0 for pre-training."""
    vocab_size: Annotated[int, Bounds(at_least=2, below=2**31)] | None = None
    """Number of tokens, V; None takes it from the data's meta.json."""
    mlp: str = "gelu"
    """Kind of MLP, one of models.layers.MLPS."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto picks cudnn where it can run, and the log says which."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run: length, batch, evaluation, logging."""

    max_iters: Count31 = 300
    """Number of optimizer steps in all, counted from 1."""
    batch_size: Count = 24
    """Global batch: sequences per step, whole job, whatever the mesh."""
    gradient_accumulation_steps: Count = 1
    """Number of equal microbatches in the global batch."""
    eval_interval: CountOrZero = 150
    """Steps between evaluations (and samples); 0 evaluates only at the end."""
    eval_iters: Count = 10
    """Batches per split in an evaluation; the same ones every time."""
    log_interval: Count = 10
    """Steps between log lines."""
    loss_chunk: CountOrZero = 0
    """Chunk size of the cross-entropy, in tokens per device: at most about this many tokens' logits
    are materialised. 0 computes all at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, optimizer state, softmax and loss stay float32."""
    seed: CountOrZero31 = 1337
    """Seed of the initial parameters, the data order and dropout."""
    sample_tokens: CountOrZero = 200
    """Tokens of the sample at each evaluation; 0 writes none."""
    sample_prompt: str = ""
    """Prompt of the samples at evaluations; empty is the end of a document or, in char data, the
    first character."""
    time_limit: Minutes | None = None
    """Minutes after the start of process 0 at which the run saves a checkpoint and stops with exit
    status 75."""
    hang_timeout: Minutes | None = 30
    """Minutes without a step, an evaluation or a checkpoint after which the job ends with exit
    status 70; restoring and compiling get at least 30. None waits for ever."""
    eval_at_start: bool = False
    """Also evaluate, and write a sample, before the first step."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers that repeat metrics.jsonl, which is always written; `train.trackers=` for none."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, with linear warm-up and cosine decay of its learning rate."""

    name: str = "adamw"
    """The optimizer: adamw (arXiv 1711.05101)."""
    learning_rate: NonNegative = 3e-3
    """Peak learning rate."""
    min_lr: float | None = None
    """Learning rate at and after lr_decay_iters; None is a tenth of the peak."""
    warmup_iters: CountOrZero31 = 50
    """Steps of linear warm-up."""
    lr_decay_iters: Count31 = 300
    """Step at which the cosine reaches min_lr; mostly train.max_iters, but not tied to it, so
    that a run made longer or shorter keeps its learning rates."""
    weight_decay: NonNegative = 0.1
    """Decay of matrices and embeddings; never of biases and norms."""
    beta1: Rate = 0.9
    """Decay rate of the first moment."""
    beta2: Rate = 0.99
    """Decay rate of the second moment; 0.95 suits large batches."""
    grad_clip: NonNegative = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    dataset: str = "python"
    """Name of a prepared data set: a folder of $JAXGPT_DATA (default ~/.cache/jaxgpt)."""
    path: str | None = None
    """In place of a named data set: a folder with train.bin, val.bin and meta.json; or PREFIX of
    Megatron-LM's PREFIX.bin and PREFIX.idx; or one nanoGPT .bin file."""
    blend: tuple[str, ...] = ()
    """Corpora to mix, in place of one data set: `WEIGHT PATH [CORPUS]` each, with paths as in
    data.path, in quotes if they have spaces. Weights are normalised; lines of the same CORPUS are
    counted together."""
    file_list: str | None = None
    """File with the lines of data.blend, as ALCF's Megatron-DeepSpeed reads them. Paths in it are
    relative to the working directory."""
    val_share: Annotated[float, Bounds(above=0, below=1)] = 0.01
    """Share of a corpus, its last documents, kept for validation where it has no val.bin."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder with it, for data that came without one."""
    accept_changes: bool = False
    """Resume from a checkpoint although its data has changed: for this start only."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout over devices: changes speed and memory, never the results."""

    mesh: str = "-1,1,1"
    """Sizes of the mesh axes data,fsdp,tensor (also --mesh), or by name: data=2,tensor=4; -1 fills
    one."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage (arXiv 1910.02054): over fsdp, 0 shards nothing, 1 optimizer state, 2 also
    gradients, 3 also parameters."""
    sequence_parallel: bool = False
    """Sequence parallelism (arXiv 2205.05198): norms and residuals are split over tensor by
    position; same traffic, less memory."""
    remat: Literal["none", "full", "dots", "attention"] = "none"
    """Rematerialization in the backward pass: nothing; the whole layer (full); all but the results
    of linear layers (dots); only the attention scores (attention)."""
    scan_layers: bool | None = False
    """Compile one block and loop over it, which shortens the compilation of deep models. On GPUs
    the loop's copies for the backward pass cost a good part of a step: None loops on CPUs only."""
    reduce_every: Literal["step", "microbatch"] = "step"
    """Gradient accumulation: reduce gradients over devices once per step, each device keeping them
    whole until then; or, for ZeRO stages 2 and 3, after each microbatch, in less memory."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients between devices; bfloat16 halves the traffic."""
    offload_optimizer: bool = False
    """Keep optimizer state in the host's memory (pinned_host) between updates."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, and resuming from them."""

    interval: CountOrZero = 150
    """Steps between checkpoints; 0 saves only at the end. The last step is always saved."""
    keep: Count = 2
    """Number of checkpoints kept, the newest."""
    resume: bool = True
    """Resume from the newest checkpoint in --out; False refuses a folder that has one, for this
    start only."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Loss spikes: detection and reaction."""

    action: Literal["off", "log", "skip_update", "rewind"] = "log"
    """Reaction to a spike: off watches nothing; log records it; skip_update leaves its update out;
    rewind goes back to a checkpoint and skips the batches around it (arXiv 2204.02311, section
    5.1), but only records a spike of the gradient norm alone. Unless off, a step that is not
    finite never changes parameters or optimizer state."""
    window: Annotated[int, Bounds(at_least=4, at_most=10**5, unit="steps")] = 128
    """Number of recent steps that a step is compared with; detection begins once it is full."""
    loss_threshold: AtLeastOne = 6.0
    """Threshold of a loss spike: robust standard deviations above the window's median."""
    grad_norm_threshold: AtLeastOne = 20.0
    """Threshold of the gradient norm, likewise. Its distribution has a long tail: small clean runs
    reach 14 (the loss 4)."""
    rewind_margin: Count = 100
    """Least number of steps between the checkpoint that a rewind goes back to and the spike."""
    skip_before: CountOrZero = 10
    """Steps before the spike that a rewind skips."""
    skip_after: CountOrZero = 50
    """Steps after the spike that a rewind skips (PaLM: 200 to 500 of some 255,000)."""
    max_rewinds: CountOrZero = 3
    """Largest number of rewinds; at the next spike the run stops with a report."""
    max_consecutive_nonfinite: Count = 10
    """Number of consecutive non-finite steps that stops the run."""


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Rehearsed faults."""

    random_tokens: tuple[int, ...] = ()
    """Ranges of steps, as in train_range_to_skip, that train on random tokens."""
    nan_step: Count | None = None
    """Step at which one device's gradient is NaN."""
    nan_device: CountOrZero = 0
    """Index of that device in the flattened mesh."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    config: str = "tiny"
    """Preset (a file of configs/) or a path to a YAML file."""
    out: str | None = None
    """Run directory; None is runs/<config>-<time>. An existing run directory is resumed."""
    compile_cache: str = "~/.cache/jaxgpt/compiled"
    """Folder where compiled programs are kept for the next start; `off` keeps none."""
    init_timeout: Annotated[float, Bounds(at_least=1, at_most=MAX_INIT_TIMEOUT, unit="seconds")] = (
        300
    )
    """Seconds for all processes of a job to find each other; then the job ends, naming the missing
    ones."""
    train_range_to_skip: tuple[int, ...] = ()
    """Ranges of steps to skip, `A B C D` for [A,B] and [C,D]; from 1, ends included."""
    profile_steps: str | None = None
    """Steps to profile, `A:B`, both included: the trace (TensorBoard, Perfetto) goes to profile/ in
    the run directory, the most expensive operations to the log."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    @property
    def microbatch_size(self) -> int:
        return self.train.batch_size // self.train.gradient_accumulation_steps

    @property
    def reduces_once(self) -> bool:
        """Return whether microbatches add up to whole gradients that are reduced once."""
        once = self.parallel.reduce_every == "step"
        return once and self.train.gradient_accumulation_steps > 1

    def scans_layers(self, on_cpu: bool) -> bool:
        """Return whether layers are scanned; None of parallel.scan_layers is decided here."""
        chosen = self.parallel.scan_layers
        return on_cpu if chosen is None else chosen

    def to_dict(self) -> dict[str, Any]:
        """Return a nested plain dict, ready for YAML and JSON."""
        out = dataclasses.asdict(self)
        for section in (out, *(value for value in out.values() if isinstance(value, dict))):
            section |= {k: list(v) for k, v in section.items() if isinstance(v, tuple)}
        return out

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with `section__key=value` (or top-level `key=value`) changed."""
        config = self
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                value = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: value})
        return config
