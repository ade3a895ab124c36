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
    values: Mapping[str, float | None]  # metrics of the step and rates, see `metrics.FIGURES`
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
class DamageRecord(Record):
    """A damaged checkpoint that was set aside; `step` is that of the one gone on from."""

    kind = "damage"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A checkpoint that is being written, and the seconds for which training stalled."""

    kind = "checkpoint"
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StartupRecord(Record):
    """Seconds of each start-up phase, over all processes."""

    kind = "startup"
    values: Mapping[str, float]
