"""All settings of a run, as frozen dataclasses with a type, a default and a help text for each key.

`--help` prints the text below each key. The defaults are those of the preset `tiny`.
"""

import dataclasses
import functools
import json
import operator
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import yaml

from jaxgpt.config.errors import UsageError, nearest, shorten
from jaxgpt.config.values import parse_value, strings_of


class Bounds(NamedTuple):
    """Bounds of a number: their description, and a function that checks a value."""

    text: str
    contain: Callable[[Any], bool]


# JAX uses 32-bit integers for steps, seeds and array indices.
Count = Annotated[int, Bounds("at least 1 and less than 2^31", lambda n: 1 <= n < 2**31)]
CountOrZero = Annotated[int, Bounds("at least 0 and less than 2^31", lambda n: 0 <= n < 2**31)]
# Squares and sums of these values must not overflow float32, whose maximum is 3e38.
NonNegative = Annotated[float, Bounds("at least 0 and at most 1e18", lambda x: 0 <= x <= 1e18)]
Positive = Annotated[float, Bounds("more than 0 and at most 1e18", lambda x: 0 < x <= 1e18)]
AtLeastOne = Annotated[float, Bounds("from 1 to 1e18", lambda x: 1 <= x <= 1e18)]
Rate = Annotated[float, Bounds("at least 0 and less than 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Bounds("more than 0 and less than 1", lambda x: 0 < x < 1)]
Minutes = Annotated[float, Bounds("more than 0, at most 1000000 minutes", lambda x: 0 < x <= 10**6)]
VocabSize = Annotated[int, Bounds("at least 2 and less than 2^31", lambda n: 2 <= n < 2**31)]
Window = Annotated[int, Bounds("at least 4 and at most 100000 steps", lambda n: 4 <= n <= 10**5)]
LogInterval = Annotated[int, Bounds("from 1 to 100000 steps", lambda n: 1 <= n <= 10**5)]
SampleSize = Annotated[int, Bounds("from 0 to 1000000 tokens", lambda n: 0 <= n <= 10**6)]
MAX_INIT_TIMEOUT = 86_400  # seconds: a day
InitTimeout = Annotated[float, Bounds("1 to 86400 seconds", lambda x: 1 <= x <= MAX_INIT_TIMEOUT)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm transformer. By default, it is nanoGPT's variant of GPT-2, without biases."""

    n_layer: Count = 3
    """Number of transformer layers, L."""
    n_head: Count = 4
    """Number of attention heads, H."""
    n_kv_head: Count | None = None
    """Number of key-value heads, G. A number below n_head selects grouped-query attention (arXiv
    2305.13245), and 1 selects multi-query attention. None means n_head."""
    head_dim: Count | None = None
    """Size of each head, K. None means n_embd / n_head."""
    n_embd: Count = 128
    """Width of the residual stream, D."""
    block_size: Count = 128
    """Context length in tokens, T."""
    bias: bool = False
    """Use biases in linear layers and layer norms, as GPT-2 does. False is slightly faster."""
    qkv_bias: bool = False
    """Use biases for queries, keys and values only, as Qwen2 does."""
    qk_norm: bool = False
    """Apply RMSNorm to each query and key head before the rotary embeddings, as Qwen3 does."""
    query_pre_attn_scalar: Count | None = None
    """Divide attention scores by the square root of this number (Gemma). None means head_dim."""
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_1p"] = "layernorm"
    """Norm layer: layernorm (GPT-2), rmsnorm (arXiv 1910.07467), or rmsnorm_1p, which multiplies by
    1 + scale (Gemma)."""
    post_norm: bool = False
    """Also normalize the outputs of attention and MLP before the residual addition (Gemma 3)."""
    norm_eps: Positive = 1e-5
    """Epsilon that norm layers add to the variance or, for RMSNorm, to the mean square."""
    position: Literal["learned", "rope"] = "learned"
    """Position encoding: learned embeddings (learned, as in GPT-2), or rotary embeddings of queries
    and keys (rope, arXiv 2104.09864)."""
    rope_theta: Positive = 10000.0
    """Base (theta) of the rotary embeddings."""
    rope_scaling: tuple[float, ...] = ()
    """RoPE scaling: one factor that divides all frequencies, or Llama 3.1's four values (factor,
    low_freq_factor, high_freq_factor and original_max_position), such as `8 1 4 8192`. By default,
    frequencies are not scaled."""
    local_rope_theta: Positive | None = None
    """Base of the rotary embeddings in local layers (Gemma 3). If it is set, rope_scaling applies
    to global layers only. If None, all layers use the same rotary embeddings."""
    mlp: str = "gelu"
    """Kind of MLP: gelu (exact), gelu_tanh (the tanh approximation, as in OpenAI's GPT-2), swiglu
    (arXiv 2002.05202), geglu_tanh (gated gelu_tanh, as in Gemma), or relu2 (arXiv 2109.08668)."""
    mlp_hidden: Count | None = None
    """Width of the MLP, F. None means 4 n_embd or, for swiglu, 8/3 n_embd rounded up to a multiple
    of 256, as in Llama."""
    dropout: Rate = 0.0
    """Dropout rate for embeddings, attention weights and residuals; usually 0 for pre-training."""
    vocab_size: VocabSize | None = None
    """Vocabulary size, V. If None, it is taken from data.tokenizer or the data's meta.json."""
    tie_embeddings: bool = True
    """Share weights between the token embedding and the output layer."""
    scale_embeddings: bool = False
    """Multiply the token embeddings by the square root of n_embd (Gemma)."""
    layers: tuple[Literal["local", "global"], ...] = ()
    """Pattern of layers, such as `local local global`, that repeats over the depth of the model.
    Global layers attend to all previous tokens, local layers to the last sliding_window tokens. By
    default, all layers are local if sliding_window is set, and global otherwise."""
    sliding_window: Count | None = None
    """Number of tokens that a token attends to in local layers, including itself (Mistral)."""
    logit_softcap: Positive | None = None
    """Soft cap c of the logits, which become c tanh(logits / c) (Gemma 2). None disables it."""
    attention: str = "auto"
    """Attention kernel. auto picks the first kernel that can run and suits the sequence length, and
    logs its name. The error for an unknown name lists all kernels."""

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads, G."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """The size of a head, K."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def explicit(self) -> "ModelConfig":
        """The same model, with numbers for the options whose None stands for another option."""
        return dataclasses.replace(
            self,
            n_kv_head=self.kv_heads,
            head_dim=self.head_size,
            query_pre_attn_scalar=self.query_pre_attn_scalar or self.head_size,
            mlp_hidden=self.mlp_width,
        )

    @property
    def n_positions(self) -> int | None:
        """The number of learned position embeddings, T; None for rotary embeddings."""
        return self.block_size if self.position == "learned" else None

    @property
    def mlp_width(self) -> int:
        """The width of the MLP, F."""
        if self.mlp_hidden is None and self.mlp == "swiglu":
            return -(-8 * self.n_embd // 3 // 256) * 256
        return self.mlp_hidden or 4 * self.n_embd

    @property
    def has_gated_mlp(self) -> bool:
        """True if the MLP multiplies its hidden values by gates from a second input matrix."""
        return self.mlp in ("swiglu", "geglu_tanh")

    @property
    def matrix_elements(self) -> int:
        """The number of elements in the weight matrices of all layers.

        Embeddings and the output layer are excluded.
        """
        mlp = (3 if self.has_gated_mlp else 2) * self.mlp_width
        attention = 2 * self.head_size * (self.n_head + self.kv_heads)
        return self.n_layer * self.n_embd * (attention + mlp)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: str = "adamw"
    """Optimizer; jaxgpt/optim/README.md compares the choices."""
    learning_rate: NonNegative = 3e-3
    """Peak learning rate; for adafactor, relative to the RMS of each parameter."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning-rate schedule after warm-up: a cosine or linear decay to min_lr (cosine, linear); a
    constant rate with a short decay to min_lr at the end (wsd: warm-up, stable, decay; arXiv
    2404.06395); or a constant rate (constant)."""
    min_lr: float | None = None
    """Final learning rate. None means a tenth of the peak. The constant schedule ignores it."""
    warmup_iters: CountOrZero = 50
    """Number of steps of linear warm-up."""
    lr_decay_iters: Count = 300
    """Step at which the schedule reaches min_lr, if it is after warm-up; usually train.max_iters.
    The two are separate settings, so that a longer run does not change the learning rates of
    earlier steps."""
    wsd_decay_iters: Count | None = None
    """Number of steps of wsd's decay, which ends at lr_decay_iters. None means a fifth of
    lr_decay_iters."""
    wsd_decay: Literal["linear", "sqrt"] = "linear"
    """Shape of wsd's decay for x from 0 to 1: 1 - x (linear), or 1 - sqrt(x) (sqrt, arXiv
    2405.18392)."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices and embeddings, multiplied by the learning rate. Biases
    and norm scales are not decayed."""
    beta1: Rate = 0.9
    """Decay rate of the first moment in adamw; in lion, weight of the momentum in the update. It
    also applies to the parameters that muon leaves to adamw."""
    beta2: Rate = 0.99
    """Decay rate of the second moment or, in lion, of the momentum. For adamw with large batches,
    0.95 works well. sgd and adafactor ignore it; adafactor's decay rate increases with the step
    number."""
    eps: Positive = 1e-8
    """Added to the square root of adamw's second moment, as in PyTorch. It also applies to the
    parameters that muon leaves to adamw."""
    momentum: Rate = 0.95
    """Momentum of muon (Nesterov) and sgd; 0 disables it."""
    adamw_learning_rate: NonNegative | None = None
    """Peak learning rate of the parameters that muon leaves to adamw: embeddings, output layer,
    norms and biases. It is scaled by the same schedule. None means learning_rate, because muon's
    updates are scaled to match adamw's."""
    grad_clip: NonNegative = 1.0
    """Clip gradients to this global norm; 0 disables clipping."""

    @property
    def wsd_decay_length(self) -> int:
        """The length of wsd's decay in steps."""
        return self.wsd_decay_iters or max(1, self.lr_decay_iters // 5)

    @property
    def wsd_decay_start(self) -> int:
        """The last step before wsd's decay; negative if the decay is longer than lr_decay_iters."""
        return self.lr_decay_iters - self.wsd_decay_length


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    dataset: str = "python"
    """Name of a prepared dataset: a folder in $JAXGPT_DATA (default ~/.cache/jaxgpt)."""
    path: str | None = None
    """Data to use instead of a named dataset: a folder with train.bin, val.bin and meta.json; the
    PREFIX of Megatron-LM's PREFIX.bin and PREFIX.idx; or one nanoGPT .bin file."""
    blend: tuple[str, ...] = ()
    """Sources to mix, each `WEIGHT PATH [CORPUS]`. PATH has the same form as data.path; quote it if
    it contains spaces. Weights are normalized. Sources with the same CORPUS are mixed and reported
    as one corpus."""
    file_list: str | None = None
    """File with one data.blend entry per line, as in ALCF's Megatron-DeepSpeed. Paths are relative
    to the working directory."""
    val_share: Share = 0.01
    """Fraction to use for validation, at the end of each source that has no val.bin."""
    tokenizer: str | None = None
    """A tokenizer.json or tokenizer.model, or a folder that contains one, for data that comes
    without a tokenizer."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document, and count positions from the start of the
    document. A document ends with its end-of-text token. The order of the data does not change."""
    end_of_text: CountOrZero | None = None
    """ID of the end-of-text token, for data.document_mask. None means the ID from the tokenizer."""
    accept_changes: bool = False
    """Resume from a checkpoint even if the data has changed. This applies only to the current
    launch."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, batches, evaluation and logging."""

    max_iters: Count = 300
    """Total number of optimizer steps."""
    batch_size: Count = 24
    """Global batch size: sequences per step over the whole job, whatever the mesh."""
    batch_size_per_device: Count | None = None
    """Sequences per device per microbatch, in place of batch_size. The global batch size is this
    number x the number of devices that split the batch (data x fsdp) x
    gradient_accumulation_steps."""
    gradient_accumulation_steps: Count = 1
    """Number of equal microbatches that the global batch is split into."""
    eval_interval: CountOrZero = 150
    """Steps between evaluations, each with a text sample; 0 evaluates only after the last step."""
    eval_iters: Count = 10
    """Number of batches per split in an evaluation. A batch is as large as a microbatch. All
    evaluations of a run use the same batches, unless the run resumes with different data, a
    different data.blend, a different train.seed or a different microbatch size."""
    log_interval: LogInterval = 10
    """Steps between log lines."""
    log_columns: tuple[str, ...] = ()
    """Numbers, such as `tokens` (the tokens consumed so far), that every training line shows, even
    if the terminal is narrow. The legend at the top of train.log lists all names."""
    log_all_ranks: bool = False
    """Also write a log for each process except process 0: `train-<rank>.log` in the run directory.
    Its training lines show the times and the memory of that process. Only process 0 writes to the
    terminal and to train.log."""
    verbose: bool = False
    """Print the whole header: the value of every key, and the host and devices of every process.
    train.log always contains the whole header."""
    loss_chunk: CountOrZero = 0
    """Compute the logits of at most this many tokens per device at a time; 0 computes all logits
    at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. Parameters, optimizer state, softmax and loss are always float32. Logits are
    rounded to the compute dtype before the loss."""
    matmul_dtype: Literal["float8"] | None = None
    """Dtype of matmul operands in training. float8 uses FP8 in all linear layers, which can speed
    up models of 1B parameters or more on an H100 or newer. Attention scores, embeddings, the output
    layer and evaluations always use train.dtype. CPUs emulate FP8, and older GPUs do not support
    it. None uses train.dtype."""
    deterministic: bool = False
    """Make runs bitwise reproducible even with cuDNN attention. Steps of the gpt2 preset then take
    1.34 times as long (H200, November 2026)."""
    seed: CountOrZero = 1337
    """Seed for the initial parameters, the data order and dropout."""
    sample_tokens: SampleSize = 200
    """Number of tokens to generate at each evaluation; 0 generates no sample."""
    sample_prompt: str = ""
    """Prompt for generated samples. If it is empty, the prompt is the end-of-text token or, for
    tokenizers without one, token 0."""
    time_limit: Minutes | Literal["auto"] | None = "auto"
    """Minutes after which the run saves a checkpoint and stops with exit status 75. auto asks PBS
    or Slurm for the job's end time, and stops early enough to save. None means no limit."""
    hang_timeout: Minutes | None = 30
    """Minutes without progress after which the job ends with exit status 70. For startup,
    restoring, compilation, evaluation, samples and saving, the limit is at least 30 minutes. None
    waits forever."""
    verify_interval: CountOrZero = 0
    """Steps between comparisons of parameter replicas across devices, which detect a device with
    corrupted parameters. The replicas are also compared before each checkpoint. 0 disables all
    comparisons."""
    layers_every: CountOrZero = 0
    """Steps between records of each layer's gradient norm (before clipping), weight norm (before
    the update) and activation scale (the RMS of the layer's output, the residual stream, over the
    batch without dropout). Each recorded step needs an extra forward pass. 0 disables
    the records."""
    eval_at_start: bool = False
    """Also evaluate and generate a sample before the first step."""
    init_from: str | None = None
    """Weights to start a run from: a run directory, the --out of jaxgpt.convert, or hf:FOLDER, a
    Hugging Face Transformers checkpoint. The model options are read from there, too. A resumed run
    ignores this setting."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers that mirror metrics.jsonl, which is always written. `--train.trackers tensorboard
    wandb` selects two, and `train.trackers=` selects none. The choices are tensorboard, csv, wandb
    and trackio. The last two need the pip extra of the same name."""
    tracker_project: str = "jaxgpt"
    """Project of the run in wandb and trackio."""
    tracker_name: str | None = None
    """Name of the run in wandb and trackio. None means the name of the run directory."""
    tracker_group: str | None = None
    """Group of the run in wandb and trackio."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout. It affects speed and memory, but not results (up to rounding).

    There is one exception: with train.batch_size_per_device, the mesh determines the batch size.
    """

    mesh: str = "-1,1,1"
    """Mesh shape: the sizes of the axes data, fsdp and tensor, such as 2,1,4, or sizes by name,
    such as data=2,tensor=4. -1 infers one size from the number of devices. --mesh is short for this
    key."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage (arXiv 1910.02054). 0 shards nothing over fsdp, 1 shards the optimizer state, 2
    also the gradients, and 3 also the parameters."""
    sequence_parallel: bool = False
    """Shard the activations of norms and the residual stream over the tensor axis, by position in
    the sequence (arXiv 2205.05198). This saves memory."""
    context_impl: Literal["auto", "ulysses", "ring"] = "auto"
    """How attention works if the context axis splits each sequence: all-to-alls give each device
    the whole sequence for some of the heads (ulysses, arXiv 2309.14509), or blocks of keys and
    values are passed around (ring, arXiv 2310.01889). auto chooses, and logs why."""
    remat: Literal["none", "full", "dots", "attention"] = "none"
    """What the backward pass recomputes: nothing (none), whole layers (full), everything except the
    outputs of linear layers (dots), or the attention scores (attention)."""
    scan_layers: bool | None = False
    """Compile one layer and loop over it. This compiles deep models faster, but on GPUs a step is
    slower, because the loop copies activations for the backward pass. None loops on CPUs, and with
    parallel.offload=state."""
    reduce_every: Literal["step", "microbatch"] = "step"
    """When to reduce accumulated gradients over devices: once per step, or after each microbatch.
    The latter saves memory with ZeRO stages 2 and 3, and has no effect with stages 0 and 1.
    parallel.offload=state always reduces gradients after each microbatch."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over devices; bfloat16 halves this traffic."""
    schedule: Literal["gpipe", "circular"] = "gpipe"
    """Pipeline schedule with stage > 1: each stage holds one group of consecutive layers (gpipe,
    arXiv 1811.06965), or stage_repeats groups, which shortens the bubble (circular, arXiv
    2104.04473). train.gradient_accumulation_steps is the number of microbatches."""
    stage_repeats: Count = 1
    """Number of groups of layers, v, that each stage holds with the circular schedule."""
    offload: Literal["none", "moments", "state"] = "none"
    """What to keep in host memory (pinned_host): nothing (none), the optimizer state (moments), or
    also parameters and gradients (state). Devices fetch one layer at a time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving checkpoints and resuming from them."""

    interval: CountOrZero = 150
    """Steps between regular checkpoints; 0 disables them. A run also saves its last step, and the
    current step if a signal or the time limit stops it."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count | None = None
    """Also keep every checkpoint whose step is a multiple of this number."""
    keep_best: CountOrZero = 0
    """Also keep this many checkpoints with the lowest validation losses."""
    interval_minutes: Minutes | None = None
    """Also save at the first logged step after this many minutes without a save."""
    on_error: Literal["continue", "stop"] = "continue"
    """What to do if a checkpoint cannot be written: continue training if an older checkpoint is
    complete (continue), or stop (stop). If the run's last checkpoint cannot be written, the run
    always fails."""
    timeout_minutes: Minutes = 20
    """Minutes after which an incomplete save counts as failed. If one process fails to write, the
    others notice it after this time."""
    local: str | None = None
    """Folder on fast storage to save to first. All processes must share it, so use a burst buffer
    or, on a single host, a local disk. Process 0 then copies the checkpoints to the run directory
    in the background."""
    resume: bool = True
    """Resume from the newest checkpoint in --out. If False, refuse to start if --out contains a
    checkpoint; this applies only to the current launch."""
    on_damage: Literal["quarantine", "refuse"] = "quarantine"
    """What to do with a damaged checkpoint: rename it to STEP.damaged and continue from the
    checkpoint before it (quarantine), or stop (refuse)."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Detection of loss spikes, and the response to them."""

    action: Literal["off", "log", "skip_update", "rewind"] = "log"
    """What to do after a spike: record it (log), discard its update (skip_update), or, for a spike
    in the loss, go back to a checkpoint and skip the batches around the spike (rewind; arXiv
    2204.02311, section 5.1). Unless this is off, updates with a non-finite loss or gradient are
    discarded, too."""
    window: Window = 128
    """Number of recent steps that each step is compared with. Detection begins once this many
    finite steps have run."""
    loss_threshold: AtLeastOne = 6.0
    """A loss this many robust standard deviations above the median of the window is a spike."""
    grad_norm_threshold: AtLeastOne = 20.0
    """The same threshold for the gradient norm. It is higher because gradient norms have a long
    tail: in small runs without spikes, they exceeded the median by up to 14 deviations,
    compared with 4 for losses."""
    rewind_margin: Count = 100
    """Minimum number of steps between the spike and the checkpoint that a rewind goes back to."""
    skip_before: CountOrZero = 10
    """Number of steps that a rewind skips before the spike."""
    skip_after: CountOrZero = 50
    """Number of steps that a rewind skips after the spike. PaLM skipped 200 to 500 batches per
    spike."""
    max_rewinds: CountOrZero = 3
    """Maximum number of consecutive rewinds without reaching a later checkpoint. At the next spike,
    the run stops with a report."""
    max_consecutive_nonfinite: Count = 10
    """Stop the run after this many consecutive steps with a non-finite loss or gradient, unless
    spike.action is off."""


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Fault injection, to test recovery."""

    random_tokens: tuple[int, ...] = ()
    """Ranges of steps that train on random tokens, in the format of train_range_to_skip."""
    nan_step: Count | None = None
    """Step at which the gradient of one device's rows is NaN."""
    nan_device: CountOrZero = 0
    """Index, in the flattened mesh, of a device that processes these rows."""
    bit_flip_step: Count | None = None
    """Step after which one bit in the parameters of one device is flipped."""
    bit_flip_device: CountOrZero = 0
    """Index, in the flattened mesh, of the device with the flipped bit."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    config: str = "tiny"
    """Name of a preset (a file in configs/), or path of a YAML file."""
    out: str | None = None
    """Run directory. None means runs/<config>-<time>. If the directory contains a run, that run is
    resumed."""
    compile_cache: str = "~/.cache/jaxgpt/compiled"
    """Folder in which compiled programs are cached for later runs; off disables the cache."""
    init_timeout: InitTimeout = 300
    """Seconds to wait at startup for all processes of the job to connect."""
    train_range_to_skip: tuple[int, ...] = ()
    """Ranges of steps to skip: `A B C D` skips steps A to B and C to D, inclusive. Steps are
    counted from 1."""
    profile_steps: str | None = None
    """Profile steps A to B, inclusive, given as `A:B`. The trace (for TensorBoard or Perfetto) is
    written to profile/ in the run directory, and the most expensive operations are logged."""
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    spike: SpikeConfig = SpikeConfig()
    faults: FaultsConfig = FaultsConfig()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if dataclasses.is_dataclass(kind) and not isinstance(value, kind):
                raise UsageError(
                    f"{field.name}={shorten(repr(value))}: must be a {kind.__name__}; to change "
                    f"one setting, write config.replace({field.name}__KEY=VALUE)"
                )

    @property
    def document_end(self) -> int | None:
        """ID of the end-of-text token, or None if attention crosses document boundaries.

        If data.document_mask is set, the ID is None until the user or
        `data.dataset.with_vocabulary` sets data.end_of_text.
        """
        return self.data.end_of_text if self.data.document_mask else None

    @property
    def microbatch_size(self) -> int:
        """The number of sequences in a microbatch, summed over all devices of the job.

        train.batch_size_per_device must have been converted to train.batch_size.
        """
        return self.train.batch_size // self.train.gradient_accumulation_steps

    @property
    def reduces_once(self) -> bool:
        """True if a step has several microbatches and reduces their gradients only once.

        This applies to ZeRO stages 2 and 3, but parallel.zero_stage is not checked. With
        parallel.reduce_every=microbatch or parallel.offload=state, gradients are reduced after
        every microbatch.
        """
        many = self.train.gradient_accumulation_steps > 1
        return many and self.parallel.reduce_every == "step" and self.parallel.offload != "state"

    def scans_layers(self, on_cpu: bool) -> bool:
        """Return whether to scan over layers.

        If parallel.scan_layers is None, layers are scanned only if `on_cpu` is True or
        parallel.offload=state.
        """
        if self.parallel.scan_layers is None:
            return on_cpu or self.parallel.offload == "state"
        return self.parallel.scan_layers

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dicts that YAML and JSON can represent.

        Tuples become lists, and objects that JSON cannot represent, such as paths, become strings.
        """
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def __repr__(self) -> str:
        """Return a Python expression with only the settings that differ from their defaults."""
        own = {name: operator.attrgetter(name)(self) for name in settings()}
        changes = [
            f"{name.replace('.', '__')}={value!r}"
            for name, value in own.items()
            if value != operator.attrgetter(name)(Config)
        ]
        return f"Config().replace({', '.join(changes)})" if changes else "Config()"

    def to_yaml(self) -> str:
        """Return all settings as YAML, in the format of a run's config.yaml."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with changed values: `section__key=value`, or `key=value` at the top level.

        Values are converted to the key's type, so strings are accepted, as on a command line.
        Raises `UsageError` if a key is unknown, or if a value cannot be converted or is out of
        range. Does not check whether settings contradict each other. If a whole section is
        replaced, as in `model=ModelConfig(...)`, its values are not checked.
        """
        config = self
        for name, value in changes.items():
            section, _, key = name.partition("__")
            setting = f"{section}.{key}" if key else section
            kind = None if "." in name else settings().get(setting)
            if kind is not None:
                value = parse_value(setting, kind, strings_of(setting, kind, value))
            elif name not in {field.name for field in dataclasses.fields(Config)}:
                raise UsageError(f"{name}: unknown key; {_hint(name)}")
            if key:
                value = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: value})
        return config


@functools.cache
def sections() -> dict[str, type]:
    """Return the dataclass of each section, keyed by the section's name, such as `train`."""
    hints = typing.get_type_hints(Config)
    return {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


@functools.cache
def settings() -> dict[str, Any]:
    """Return the type of every setting, keyed by `section.key` or, at the top level, `key`."""
    out: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            out |= {f"{name}.{key}": hint for key, hint in hints.items()}
        else:
            out[name] = kind
    return out


def _hint(name: str) -> str:
    """Return a suggestion for an unknown keyword argument."""
    keys = {setting.rpartition(".")[2]: setting.replace(".", "__") for setting in settings()}
    near = nearest(name.replace(".", "__").rpartition("__")[2], keys)
    return f"did you mean {keys[near]}?" if near else "write section__key=value"
