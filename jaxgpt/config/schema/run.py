"""Settings of how a run goes: length, layout, checkpoints, spikes; and all sections together."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from jaxgpt.config.schema.bounds import (
    AtLeastOne,
    Count,
    CountOrZero,
    InitTimeout,
    LogInterval,
    Minutes,
    SampleSize,
    Window,
)
from jaxgpt.config.schema.model import DataConfig, ModelConfig, OptimizerConfig


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
    """Also save when so many minutes have passed since the last save."""
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
