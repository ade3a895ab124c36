"""The kinds of records that a run writes. Each record is one line of metrics.jsonl."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of a run. Each kind is a subclass."""

    kind: ClassVar[str]
    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON: `values` is flattened, and optional fields may be absent."""
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
    """A training step, logged every train.log_interval steps and for every skipped step."""

    kind = "train"
    values: Mapping[str, float | None]  # metrics of the step, and rates; see `figures.py`
    consumed_tokens: int
    skipped: bool = False
    corpora: Mapping[str, Mapping[str, float | None]] | None = None
    """Corpus -> its tokens so far and its mean loss since the last record; None for one corpus."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord(Record):
    """Losses of an evaluation on both splits, in nats per token."""

    kind = "eval"
    train_loss: float
    val_loss: float
    corpora: Mapping[str, Mapping[str, float | None]] | None = None  # corpus -> the same two losses


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Record):
    """Text that the model generated."""

    kind = "sample"
    text: str


@dataclass(frozen=True, kw_only=True)
class SpikeRecord(Record):
    """A step whose loss or gradient norm is a spike or is not finite."""

    kind = "spike"
    loss: float
    grad_norm: float
    cause: str
    action: str
    median: float | None = None
    limit: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # those with the highest losses


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """The mesh, devices and batch size of the steps after this one."""

    kind = "start"
    mesh: str  # in the format of `parallel.mesh.describe`
    processes: int
    devices: str  # the device kind
    jax: str
    batch_size: int
    consumed_sequences: int  # total over the steps up to this one


@dataclass(frozen=True, kw_only=True)
class DamageRecord(Record):
    """A quarantined checkpoint; `step` is the older checkpoint that the run continues from."""

    kind = "damage"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CorruptionRecord(Record):
    """Devices whose parameters differed from their replicas; the run continues from `step`."""

    kind = "corruption"
    found: int  # the step after which the devices were compared
    devices: list[str]


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A checkpoint that is now complete."""

    kind = "checkpoint"
    path: str
    stalled: float  # seconds that training was stalled
    seconds: float  # from the start of the save until it was complete


@dataclass(frozen=True, kw_only=True)
class GoodputRecord(Record):
    """The time that one start of a run spent on each activity since its previous record.

    In that time, it ran the steps after `after`, up to `step`. See `train/reporting/goodput.py`.
    """

    kind = "goodput"
    after: int
    start: float  # Unix time at which the process started
    began: float  # Unix time at which the previous record ended, or `start`
    ended: float
    seconds: Mapping[str, float]  # by activity; they add up to `ended - began`
    is_last: bool  # whether the run then ended normally: done, or stopped with a checkpoint


@dataclass(frozen=True, kw_only=True)
class StragglerRecord(Record):
    """A process that slows down the others; see `train/reporting/stragglers.py`.

    All times are in seconds per step.
    """

    kind = "straggler"
    rank: int
    host: str
    own: float  # time of the process, without waiting for devices
    median: float  # of the `own` times of all processes
    data: float  # part of `own` that was spent waiting for data
    seconds: float  # total time of a step


@dataclass(frozen=True, kw_only=True)
class CheckpointFailedRecord(Record):
    """A checkpoint that could not be written."""

    kind = "checkpoint_failed"
    reason: str
    latest_complete: int  # step of the newest complete checkpoint


@dataclass(frozen=True, kw_only=True)
class StartupRecord(Record):
    """Seconds of each start-up phase on its slowest process, and the rank of that process."""

    kind = "startup"
    values: Mapping[str, float]


# Required fields of the kinds of records that are read back, in the format of `check_shape`.
NUMBER = float | None
ROW_SHAPE = {"row": int, "corpus": str, "offset": int}
SPIKE_SHAPE = {"cause": str, "loss": NUMBER, "grad_norm": NUMBER, "limit?": NUMBER}
SPIKE_SHAPE |= {"rows": [ROW_SHAPE]}
REWIND_SHAPE = SPIKE_SHAPE | {"spike": int, "skip": (int, int), "dropped": (int, int)}
GOODPUT_SHAPE = {"step": int, "after": int, "start": float, "began": float, "ended": float}
GOODPUT_SHAPE |= {"seconds": {str: float}, "is_last": bool}
STRAGGLER_SECONDS = ("own", "median", "data", "seconds")
SHAPES: dict[str, Any] = {
    "train": {"loss": NUMBER, "grad_norm?": NUMBER, "skipped": bool},
    "eval": {"train_loss": NUMBER, "val_loss": NUMBER},
    "sample": {"text": str},
    "spike": SPIKE_SHAPE | {"action": str},
    "rewind": REWIND_SHAPE | {"dropped_losses?": [(int, NUMBER)]},
    "checkpoint": {"seconds": float},
    "start": {"mesh": str, "processes": int, "devices": str, "jax": str, "batch_size": int},
    "goodput": GOODPUT_SHAPE,
    "straggler": {"rank": int, "host": str} | dict.fromkeys(STRAGGLER_SECONDS, float),
}
