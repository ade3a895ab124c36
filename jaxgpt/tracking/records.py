"""The kinds of records that a run writes. Each record is a line in metrics.jsonl."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base class of a run's records. Each kind of record except `rewind` has a subclass."""

    kind: ClassVar[str]
    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the fields of the record as a JSON-serializable dict.

        The entries of `values` become entries of this dict. Optional fields that are None are left
        out.
        """
        out: dict[str, Any] = {"kind": self.kind}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "values":
                out |= value
            elif value is not None or f.default is dataclasses.MISSING:
                out[f.name] = value
        return out


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """A logged training step. Skipped steps are always logged."""

    kind = "train"
    values: Mapping[str, float | None]  # metrics of the step, and rates; see `train_line.py`
    consumed_tokens: int
    skipped: bool = False
    skipped_range: tuple[int, int] | None = None  # first and last step of the skipped range
    corpora: Mapping[str, Mapping[str, float | None]] | None = None
    """For each corpus, the `tokens` so far and the mean `loss` in nats since the last record that
    has this field, or since the run started or restarted. The loss is None if the corpus had no
    targets. The field is None for skipped steps and if there is only one corpus."""


@dataclass(frozen=True, kw_only=True)
class LayersRecord(Record):
    """Per-layer metrics, logged every train.layers_every steps, except skipped steps.

    Keys are layer numbers such as `000`.
    """

    kind = "layers"
    grad_norm: Mapping[str, float]  # of the gradient before clipping
    weight_norm: Mapping[str, float]  # of the weights before the update
    activation_rms: Mapping[str, float]  # of the residual stream after the layer


@dataclass(frozen=True, kw_only=True)
class EvalRecord(Record):
    """Evaluation losses on both splits, in nats per token; NaN if all loss weights are 0."""

    kind = "eval"
    train_loss: float
    val_loss: float
    # `train_loss` and `val_loss` of each corpus, or None if there is only one corpus. The loss of a
    # corpus is None if none of its targets were evaluated.
    corpora: Mapping[str, Mapping[str, float | None]] | None = None


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Record):
    """A prompt, followed by generated text."""

    kind = "sample"
    text: str


@dataclass(frozen=True, kw_only=True)
class SpikeRecord(Record):
    """A step with a spike in the loss or gradient norm, or with a non-finite value.

    `loss` is in nats per token. `median` is the median of the detector's window before this step,
    and `limit` is the value above which a step is a spike. Both are losses or gradient norms,
    depending on `cause`, and are None if the cause is `nonfinite`.
    """

    kind = "spike"
    loss: float
    grad_norm: float
    cause: str  # loss, grad_norm or nonfinite
    action: str  # log, skip_update or rewind
    median: float | None = None
    limit: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # from `spikes.record.worst_rows`


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """The mesh, devices and batch size of the steps after `step`."""

    kind = "start"
    mesh: str  # in the format of `parallel.mesh.describe`
    processes: int
    devices: str  # device kind, as reported by JAX
    jax: str
    batch_size: int
    consumed_sequences: int  # total of all steps up to `step`


@dataclass(frozen=True, kw_only=True)
class DamageRecord(Record):
    """A quarantined checkpoint. The run continues after `step`, which is 0 for a fresh start."""

    kind = "damage"
    path: str  # path after the checkpoint was renamed
    reason: str


@dataclass(frozen=True, kw_only=True)
class CorruptionRecord(Record):
    """Devices whose parameters differ from those of their replicas.

    The run continues after `step`.
    """

    kind = "corruption"
    found: int  # step after which the devices were compared
    devices: list[str]  # such as `device 3 of the mesh (process 1 on host a)`


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A complete checkpoint."""

    kind = "checkpoint"
    path: str
    stalled: float  # seconds during which training was stalled
    seconds: float  # seconds from the start of the save to its completion


@dataclass(frozen=True, kw_only=True)
class GoodputRecord(Record):
    """Time spent on each activity since the process's previous goodput record.

    The record covers steps `after` + 1 to `step`, including skipped steps. See
    `train/reporting/goodput.py`.
    """

    kind = "goodput"
    after: int
    start: float  # Unix time at which the process started
    began: float  # `ended` of this process's previous record, or `start` if there is none
    ended: float
    seconds: Mapping[str, float]  # seconds spent on each activity; they add up to `ended - began`
    is_last: bool  # True if the run finished or was told to stop


@dataclass(frozen=True, kw_only=True)
class StragglerRecord(Record):
    """A process that slows down the other processes; see `train/reporting/stragglers.py`.

    All times are in seconds per step, measured over the last interval.
    """

    kind = "straggler"
    rank: int
    host: str
    own: float  # time of the process, excluding waits for devices
    median: float  # median of `own` over all processes
    data: float  # part of `own` spent waiting for data
    seconds: float  # total step time, median over all processes


@dataclass(frozen=True, kw_only=True)
class CheckpointFailedRecord(Record):
    """A checkpoint that could not be written."""

    kind = "checkpoint_failed"
    reason: str
    latest_complete: int  # step of the newest complete checkpoint


@dataclass(frozen=True, kw_only=True)
class StartupRecord(Record):
    """Start-up times in seconds and their spread across processes; see `perf/startup.py`."""

    kind = "startup"
    values: Mapping[str, float]  # as returned by `startup_values`


# Fields of the records that are read from disk, by kind, in the format of `check_shape`.
NUMBER = float | None
ROW_SHAPE = {"row": int, "corpus": str, "offset": int}
SPIKE_SHAPE = {"cause": str, "loss": NUMBER, "grad_norm": NUMBER, "limit?": NUMBER}
SPIKE_SHAPE |= {"rows": [ROW_SHAPE]}
REWIND_SHAPE = SPIKE_SHAPE | {"spike": int, "skip": (int, int), "dropped": (int, int)}
GOODPUT_SHAPE: dict[str, Any] = {"step": int, "after": int, "start": float, "began": float}
GOODPUT_SHAPE |= {"ended": float, "seconds": {str: float}, "is_last": bool}
SHAPES: dict[str, Any] = {
    "train": {"loss": NUMBER, "grad_norm?": NUMBER, "lr?": NUMBER, "skipped": bool},
    "eval": {"train_loss": NUMBER, "val_loss": NUMBER},
    "sample": {"text": str},
    "spike": SPIKE_SHAPE | {"action": str},
    "rewind": REWIND_SHAPE | {"dropped_losses": [(int, NUMBER)]},
    "checkpoint": {"seconds": float},
    "start": {"mesh": str, "processes": int, "devices": str, "jax": str, "batch_size": int},
    "goodput": GOODPUT_SHAPE,
    "corruption": {"found": int, "devices": [str]},
    "damage": {"reason": str},
    "straggler": {
        "rank": int,
        "host": str,
        "own": float,
        "median": float,
        "data": float,
        "seconds": float,
    },
}
