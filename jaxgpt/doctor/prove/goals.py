"""What a machine should reach: the one list of goals.

Goals of speed are for one H100 or H200; llm.c's and nanoGPT's figures are their authors'.
"""

from typing import Any, NamedTuple


class Goal(NamedTuple):
    """A bound on one row of a stage."""

    bound: float
    at_most: bool = False
    source: str = ""

    def is_met(self, value: Any) -> bool:
        if not isinstance(value, int | float):
            return False
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        bound = f"{self.bound:,.0f}" if self.bound >= 1000 else f"{self.bound:g}"
        source = f" ({self.source})" if self.source else ""
        return f"{'at most' if self.at_most else 'at least'} {bound}{source}"


# (stage, row) -> the goal, on any device and on a GPU alone.
EVERYWHERE = {
    ("numerics", "bfloat16 against float32, losses"): Goal(0.02, at_most=True),
    **{
        ("numerics", f"{name}, {part}"): Goal(0.02, at_most=True)
        for name in (
            "attention",
            "attention with dropout 0.2",
            "attention inside documents",
            "attention of grouped queries in a window",
        )
        for part in ("forward", "gradient")
    },
    ("resume", "20 + 20 steps against 40"): Goal(0, at_most=True, source="bitwise"),
    ("resume", "killed and started again"): Goal(0, at_most=True, source="bitwise"),
    ("resume", "stopped by SIGTERM and started again"): Goal(0, at_most=True, source="bitwise"),
    ("spikes", "step made NaN against step skipped"): Goal(1e-5, at_most=True),
    ("spikes", "rewinds from random tokens"): Goal(1),
    ("tests", "failed"): Goal(0, at_most=True),
}
ON_GPU = {
    ("speed-gpt2", "tokens/s"): Goal(470_000, source="llm.c: 468,000"),
    ("nanogpt", "gpt2"): Goal(1.15, source="nanoGPT, torch.compile"),
    ("nanogpt", "shakespeare_char"): Goal(1.5, source="nanoGPT, torch.compile"),
    ("speed-gpt2-xl", "MFU"): Goal(0.55, source="llm.c: 49 %"),
    ("shakespeare", "best validation loss"): Goal(1.48, at_most=True, source="nanoGPT: 1.47"),
    ("memory", "largest error of a plan"): Goal(0.10, at_most=True),
}
ON_CPU = {
    ("nanogpt", "shakespeare_char_cpu"): Goal(1.5, source="nanoGPT, eager"),
    ("nanogpt", "shakespeare_char"): Goal(1.5, source="nanoGPT, eager"),
}


def goal_of(stage: str, row: str, on_gpu: bool) -> Goal | None:
    """Return the goal of a row on this kind of device; None where nothing is asked for."""
    table = EVERYWHERE | (ON_GPU if on_gpu else ON_CPU)
    return table.get((stage, row))
