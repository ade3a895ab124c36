"""Every setting of a run, as frozen dataclasses: its type, its default, and a line about it.

The defaults are those of the preset `tiny`; --help shows them.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import yaml


class Bounds(NamedTuple):
    """A bound on a number: its description, and a test of it."""

    text: str
    hold: Callable[[Any], bool]


# JAX counts steps, seeds and places in arrays in 32 bits.
Count = Annotated[int, Bounds("at least 1 and less than 2^31", lambda n: 1 <= n < 2**31)]
CountOrZero = Annotated[int, Bounds("at least 0 and less than 2^31", lambda n: 0 <= n < 2**31)]
# float32, of which sums and squares are made, ends at 3e38.
NonNegative = Annotated[float, Bounds("at least 0 and at most 1e18", lambda x: 0 <= x <= 1e18)]
Positive = Annotated[float, Bounds("more than 0, at most 1e18", lambda x: 0 < x <= 1e18)]
AtLeastOne = Annotated[float, Bounds("1 to 1e18", lambda x: 1 <= x <= 1e18)]
Rate = Annotated[float, Bounds("at least 0 and less than 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Bounds("more than 0 and less than 1", lambda x: 0 < x < 1)]
Minutes = Annotated[float, Bounds("more than 0, at most 1000000 minutes", lambda x: 0 < x <= 10**6)]
VocabSize = Annotated[int, Bounds("at least 2 and less than 2^31", lambda n: 2 <= n < 2**31)]
Window = Annotated[int, Bounds("at least 4 and at most 100000 steps", lambda n: 4 <= n <= 10**5)]
LogInterval = Annotated[int, Bounds("1 to 100000 steps", lambda n: 1 <= n <= 10**5)]
SampleSize = Annotated[int, Bounds("0 to 1000000 tokens", lambda n: 0 <= n <= 10**6)]
MAX_INIT_TIMEOUT = 86_400  # seconds: a day
InitTimeout = Annotated[float, Bounds("1 to 86400 seconds", lambda x: 1 <= x <= MAX_INIT_TIMEOUT)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a pre-norm transformer. The defaults are GPT-2's; presets set the others."""

    n_layer: Count = 3
    """Number of transformer layers, L."""
    n_head: Count = 4
    """Number of attention heads, H."""
    n_kv_head: Count | None = None
    """Number of key-value heads, G: fewer than n_head is grouped-query attention (arXiv
    2305.13245), 1 multi-query; None is n_head."""
    head_dim: Count | None = None
    """Size of a head, K; None is n_embd / n_head."""
    n_embd: Count = 128
    """Width of the residual stream, D."""
    block_size: Count = 128
    """Context length in tokens, T."""
    bias: bool = False
    """Biases in linear layers and layer norms, as in GPT-2; False is a bit faster."""
    qkv_bias: bool = False
    """Biases of queries, keys and values without `bias`, as in Qwen2."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before positions, as in Qwen3."""
    query_pre_attn_scalar: Count | None = None
    """Divide attention's scores by the square root of this number (Gemma); None is head_dim."""
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_1p"] = "layernorm"
    """Norm of the residual stream: layernorm (GPT-2), rmsnorm (arXiv 1910.07467), or rmsnorm_1p,
    which scales by 1 + scale (Gemma)."""
    post_norm: bool = False
    """Also normalize the outputs of attention and MLP, before they are added (Gemma 3)."""
    norm_eps: Positive = 1e-5
    """Epsilon of the norms, added to the variance."""
    position: Literal["learned", "rope"] = "learned"
    """Positions: a learned embedding (GPT-2), or rotary embeddings of queries and keys (rope, arXiv
    2104.09864)."""
    rope_theta: Positive = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: tuple[float, ...] = ()
    """Scaling of the rotary wavelengths: one factor, or Llama 3.1's factor, low_freq_factor,
    high_freq_factor and original_max_position, such as `8 1 4 8192`; none by default."""
    local_rope_theta: Positive | None = None
    """Base of the rotary wavelengths in local layers, which then have no rope_scaling (Gemma 3);
    None gives them those of the other layers."""
    mlp: str = "gelu"
    """Kind of MLP: gelu, gelu_tanh (GPT-2's own weights), swiglu (arXiv 2002.05202), geglu_tanh
    (the same with gelu_tanh, Gemma), relu2 (arXiv 2109.08668)."""
    mlp_hidden: Count | None = None
    """Width of the MLP, F; None is 4 n_embd, for swiglu Llama's rule: 8/3 n_embd, rounded up to a
    multiple of 256."""
    dropout: Rate = 0.0
    """Dropout rate of embeddings, attention and residuals; 0 for pre-training."""
    vocab_size: VocabSize | None = None
    """Number of tokens, V; None takes it from the data's meta.json."""
    tie_embeddings: bool = True
    """Use the token embedding as output layer too; False gives that weights of its own."""
    scale_embeddings: bool = False
    """Multiply the token embeddings by the square root of n_embd (Gemma)."""
    layers: tuple[Literal["local", "global"], ...] = ()
    """Pattern of layers that repeats over the depth of the model: global layers attend to all
    tokens before, local layers to sliding_window of them, as in `local local global`. By default,
    all layers are local if there is a sliding_window."""
    sliding_window: Count | None = None
    """Number of tokens, its own included, that a token attends to in local layers (Mistral)."""
    logit_softcap: Positive | None = None
    """Bound of the logits, c tanh(logits / c) (Gemma 2); None is no bound."""
    attention: str = "auto"
    """Attention kernel. auto picks the fastest one that can run, and the log says which; the error
    for an unknown name lists all of them."""

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads, G."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """The size of a head, K."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def n_positions(self) -> int | None:
        """The number of learned positions, T; None where positions are rotary."""
        return self.block_size if self.position == "learned" else None

    @property
    def mlp_width(self) -> int:
        """The width of the MLP, F."""
        if self.mlp_hidden is None and self.mlp == "swiglu":
            return -(-8 * self.n_embd // 3 // 256) * 256
        return self.mlp_hidden or 4 * self.n_embd

    @property
    def matrix_elements(self) -> int:
        """The number of elements of all matrices of the layers."""
        mlp = (3 if self.mlp in ("swiglu", "geglu_tanh") else 2) * self.mlp_width
        attention = 2 * self.head_size * (self.n_head + self.kv_heads)
        return self.n_layer * self.n_embd * (attention + mlp)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and the schedule of its learning rate."""

    name: str = "adamw"
    """The optimizer (jaxgpt/optim/README.md)."""
    learning_rate: NonNegative = 3e-3
    """Peak learning rate; for adafactor relative to the RMS of each matrix."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: a cosine to min_lr; the peak and a short decay to min_lr (wsd:
    warm-up, stable, decay; arXiv 2404.06395); or the peak."""
    min_lr: float | None = None
    """Learning rate at and after lr_decay_iters; None is a tenth of the peak. Not for constant."""
    warmup_iters: CountOrZero = 50
    """Steps of linear warm-up."""
    lr_decay_iters: Count = 300
    """Step at which cosine or wsd reach min_lr: mostly train.max_iters, but a run made longer keeps
    its learning rates."""
    wsd_decay_iters: Count | None = None
    """Length of wsd's decay, which ends at lr_decay_iters; None is a fifth of lr_decay_iters."""
    wsd_decay: Literal["linear", "sqrt"] = "linear"
    """Shape of wsd's decay, x from 0 to 1: 1 - x (linear) or 1 - sqrt(x) (arXiv 2405.18392)."""
    weight_decay: NonNegative = 0.1
    """Decay of matrices and embeddings, times the learning rate; never of biases and norms."""
    beta1: Rate = 0.9
    """Decay rate of the first moment, of adamw, lion, and the part of muon that is adamw."""
    beta2: Rate = 0.99
    """Decay rate of the second moment (of lion: of the average); 0.95 suits adamw's large
    batches. Not for adafactor, whose decay rate grows, and sgd."""
    momentum: Rate = 0.95
    """Momentum of muon (Nesterov's) and sgd; 0 is sgd without."""
    adamw_learning_rate: NonNegative | None = None
    """Peak learning rate of what muon leaves to adamw: embeddings, output layer, norms, biases. It
    follows the same schedule, in proportion. None is learning_rate, which muon's scale suits."""
    grad_clip: NonNegative = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    @property
    def wsd_decay_length(self) -> int:
        """Return the number of steps of wsd's decay."""
        return self.wsd_decay_iters or max(1, self.lr_decay_iters // 5)

    @property
    def wsd_decay_start(self) -> int:
        """Return the last step before wsd's decay; negative if that is too long."""
        return self.lr_decay_iters - self.wsd_decay_length


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    dataset: str = "python"
    """Name of a prepared data set: a folder of $JAXGPT_DATA (default ~/.cache/jaxgpt)."""
    path: str | None = None
    """In place of a named data set: a folder with train.bin, val.bin and meta.json; or PREFIX of
    Megatron-LM's PREFIX.bin and PREFIX.idx; or one nanoGPT .bin file."""
    blend: tuple[str, ...] = ()
    """Corpora to mix: `WEIGHT PATH [CORPUS]` each, with paths as in data.path, in quotes if they
    have spaces. Weights are normalised; lines of the same CORPUS are counted together."""
    file_list: str | None = None
    """File with lines of data.blend (ALCF's Megatron-DeepSpeed); paths from the working folder."""
    val_share: Share = 0.01
    """Share of a corpus, its last documents, kept for validation where it has no val.bin."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder with it, for data that came without one."""
    document_mask: bool = False
    """Keep attention inside a document, with positions from its begin; the order of the data stays.
    A document ends with its end-of-text token."""
    end_of_text: CountOrZero | None = None
    """Id of the end-of-text token, for data.document_mask; None takes the tokenizer's."""
    accept_changes: bool = False
    """Resume from a checkpoint although its data has changed: for this start only."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run: length, batch, evaluation, logging."""

    max_iters: Count = 300
    """Number of optimizer steps in all, counted from 1."""
    batch_size: Count = 24
    """Global batch: sequences per step, whole job, whatever the mesh."""
    gradient_accumulation_steps: Count = 1
    """Number of equal microbatches in the global batch."""
    eval_interval: CountOrZero = 150
    """Steps between evaluations (and samples); 0 evaluates only at the end."""
    eval_iters: Count = 10
    """Batches per split in an evaluation; the same ones every time."""
    log_interval: LogInterval = 10
    """Steps between log lines."""
    loss_chunk: CountOrZero = 0
    """Tokens per device whose logits are in memory at a time, about; 0 computes all at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, optimizer state, softmax and loss stay float32."""
    deterministic: bool = False
    """Repeat runs bit for bit with cuDNN's attention too; steps of gpt2 take 1.34 times as long."""
    seed: CountOrZero = 1337
    """Seed of the initial parameters, the data order and dropout."""
    sample_tokens: SampleSize = 200
    """Tokens of the sample at each evaluation; 0 writes none."""
    sample_prompt: str = ""
    """Prompt of samples; empty is the end of a document, in char data the first character."""
    time_limit: Minutes | Literal["auto"] | None = "auto"
    """Minutes after which the run saves a checkpoint and stops with exit status 75. `auto` asks PBS
    or Slurm when the job ends, and leaves time to save; None never stops."""
    hang_timeout: Minutes | None = 30
    """Minutes without progress after which the job ends with exit status 70; starting, restoring
    and compiling get at least 30. None waits for ever."""
    verify_interval: CountOrZero = 0
    """Steps between comparisons of the copies that devices hold of parameters, which find one that
    computes wrongly; also before each checkpoint. 0 compares none."""
    eval_at_start: bool = False
    """Also evaluate, and write a sample, before the first step."""
    init_from: str | None = None
    """Weights to start a run from: a run directory, the --out of jaxgpt.convert, or hf:FOLDER of
    transformers. The model's options come from them; a resumed run ignores them."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers that repeat metrics.jsonl, which is always written; `train.trackers=` for none."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout over devices: changes speed and memory, never the results."""

    mesh: str = "-1,1,1"
    """Sizes of the axes data,fsdp,tensor (also --mesh), or data=2,tensor=4; -1 fills one."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO (arXiv 1910.02054) over fsdp: 1 shards optimizer state, 2 also gradients, 3 also
    parameters."""
    sequence_parallel: bool = False
    """Split norms and residuals over tensor by position (arXiv 2205.05198): saves memory."""
    remat: Literal["none", "full", "dots", "attention"] = "none"
    """What the backward pass computes again: the whole layer (full), all but the results of linear
    layers (dots), or the attention scores."""
    scan_layers: bool | None = False
    """Compile one layer and loop over it: deep models compile faster, but on GPUs the loop's copies
    for the backward pass slow the step. None loops on CPUs only."""
    reduce_every: Literal["step", "microbatch"] = "step"
    """When accumulated gradients are reduced over devices: once per step, or after each microbatch,
    which saves memory in ZeRO stages 2 and 3."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients between devices; bfloat16 halves the traffic."""
    offload: Literal["none", "moments", "state"] = "none"
    """State kept in the host's memory (pinned_host): the optimizer's, or parameters and gradients
    as well. A device gets one layer's at a time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, and resuming from them."""

    interval: CountOrZero = 150
    """Steps between checkpoints; 0 saves only at the end. The last step is always saved."""
    keep: Count = 2
    """Number of checkpoints kept, the newest."""
    keep_every: Count | None = None
    """Also keep, for ever, checkpoints of steps that this number divides."""
    keep_best: CountOrZero = 0
    """Also keep so many checkpoints, those with the lowest validation loss."""
    interval_minutes: Minutes | None = None
    """Also save once so many minutes have passed without a save, at a logged step."""
    on_error: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint cannot be written: continue as long as an older one is complete,
    or stop. The run also stops if no other save would follow."""
    timeout_minutes: Minutes = 20
    """Minutes after which a save has failed. If one process fails, the others notice then."""
    local: str | None = None
    """Fast folder that all processes share (the disk of the only host, a burst buffer), to save to
    first. Process 0 copies checkpoints from there to the run directory in the background."""
    resume: bool = True
    """Resume from the newest checkpoint in --out; for this start, False refuses one."""
    on_damage: Literal["quarantine", "refuse"] = "quarantine"
    """Continue from the checkpoint before a damaged one, which is renamed to STEP.damaged, or
    stop."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Loss spikes: detection and reaction."""

    action: Literal["off", "log", "skip_update", "rewind"] = "log"
    """Reaction to a spike: log records it; skip_update leaves its update out; rewind goes back to a
    checkpoint and skips the batches around a spike of the loss (arXiv 2204.02311, section 5.1).
    Unless off, a step that is not finite never changes parameters or optimizer state."""
    window: Window = 128
    """Number of recent steps that a step is compared with; detection begins once it is full."""
    loss_threshold: AtLeastOne = 6.0
    """Threshold of a loss spike: robust standard deviations above the window's median."""
    grad_norm_threshold: AtLeastOne = 20.0
    """The same for the gradient norm, whose tail is long: small clean runs reach 14 (loss: 4)."""
    rewind_margin: Count = 100
    """Least number of steps between the checkpoint that a rewind goes back to and the spike."""
    skip_before: CountOrZero = 10
    """Steps before the spike that a rewind skips."""
    skip_after: CountOrZero = 50
    """Steps after the spike that a rewind skips (PaLM: 200 to 500 of some 255,000)."""
    max_rewinds: CountOrZero = 3
    """Largest number of rewinds in a row that do not reach a later checkpoint; at the next spike
    the run stops with a report."""
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
    bit_flip_step: Count | None = None
    """Step after which a bit of one device's parameters is flipped, once."""
    bit_flip_device: CountOrZero = 0
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
    init_timeout: InitTimeout = 300
    """Seconds in which all processes of a job have to find each other."""
    train_range_to_skip: tuple[int, ...] = ()
    """Ranges of steps to skip, `A B C D` for [A,B] and [C,D]; from 1, ends included."""
    profile_steps: str | None = None
    """Steps `A:B` to profile, both included: a trace in profile/ of the run directory (TensorBoard,
    Perfetto), the most expensive operations in the log."""
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    spike: SpikeConfig = SpikeConfig()
    faults: FaultsConfig = FaultsConfig()

    @property
    def document_end(self) -> int | None:
        """The id of the token that ends a document, if attention stays inside documents."""
        return self.data.end_of_text if self.data.document_mask else None

    @property
    def microbatch_size(self) -> int:
        return self.train.batch_size // self.train.gradient_accumulation_steps

    @property
    def reduces_once(self) -> bool:
        """Return whether microbatches add up to whole gradients that are reduced once."""
        many = self.train.gradient_accumulation_steps > 1
        return many and self.parallel.reduce_every == "step" and self.parallel.offload != "state"

    def scans_layers(self, on_cpu: bool) -> bool:
        """Return whether layers are scanned; None of parallel.scan_layers is decided here."""
        if self.parallel.scan_layers is None:
            return on_cpu or self.parallel.offload == "state"
        return self.parallel.scan_layers

    def to_dict(self) -> dict[str, Any]:
        """Return a nested plain dict, ready for YAML and JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists

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
