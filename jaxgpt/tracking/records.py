"""The kinds of records that a run writes: one line of metrics.jsonl each."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of a run; each kind is a subclass."""

    kind: ClassVar[str]
    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. A mapping called `values` is spread; None defaults go."""
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
    values: Mapping[str, float | None]  # metrics of the step and rates, see `figures.py`
    consumed_tokens: int
    skipped: bool = False
    corpora: Mapping[str, Mapping[str, float | None]] | None = None
    """Corpus -> tokens so far and mean loss since the last record; None for a single corpus."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord(Record):
    """An evaluation on both splits."""

    kind = "eval"
    train_loss: float
    val_loss: float
    corpora: Mapping[str, Mapping[str, float | None]] | None = None  # corpus -> the same two losses


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Record):
    """Text that the model wrote."""

    kind = "sample"
    text: str


@dataclass(frozen=True, kw_only=True)
class SpikeRecord(Record):
    """A step whose loss or gradient norm is out of line, or not finite."""

    kind = "spike"
    loss: float
    grad_norm: float
    cause: str
    action: str
    median: float | None = None
    limit: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the highest losses, worst first


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """What the steps after this one run on."""

    kind = "start"
    mesh: str  # as `parallel.mesh.describe` writes it
    processes: int
    devices: str  # their kind
    jax: str
    batch_size: int
    consumed_sequences: int  # by the steps up to this one


@dataclass(frozen=True, kw_only=True)
class DamageRecord(Record):
    """A damaged checkpoint in quarantine; `step` is the checkpoint that the run continues from."""

    kind = "damage"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CorruptionRecord(Record):
    """Devices whose parameters were not those of their copies; `step` is that gone back to."""

    kind = "corruption"
    found: int  # the step after which they were compared
    devices: list[str]


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A complete checkpoint; seconds that training stalled, and that it took in all."""

    kind = "checkpoint"
    path: str
    stalled: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class GoodputRecord(Record):
    """How a start spent its time since its previous record, see `train/reporting/goodput.py`.

    The steps after `after`, up to `step`, were run in that time.
    """

    kind = "goodput"
    after: int
    start: float  # Unix time at which the process started
    began: float  # Unix time at which the previous record ended, or `start`
    ended: float
    seconds: Mapping[str, float]  # of each activity; they add up to `ended - began`
    is_last: bool  # whether the run then ended by itself: done, or stopped with a checkpoint


@dataclass(frozen=True, kw_only=True)
class StragglerRecord(Record):
    """A process that holds up the others, see `train/reporting/stragglers.py`; seconds per step."""

    kind = "straggler"
    rank: int
    host: str
    own: float  # of the process, without waiting for devices
    median: float  # of all processes' own
    data: float  # of `own`: waiting for data
    seconds: float  # that a step takes


@dataclass(frozen=True, kw_only=True)
class CheckpointFailedRecord(Record):
    """A checkpoint that could not be written, and the step of the newest complete one."""

    kind = "checkpoint_failed"
    reason: str
    latest_complete: int


@dataclass(frozen=True, kw_only=True)
class StartupRecord(Record):
    """Seconds of each start-up phase, over all processes."""

    kind = "startup"
    values: Mapping[str, float]


# What the kinds of records that are read again must have, as `check_shape` takes it.
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
