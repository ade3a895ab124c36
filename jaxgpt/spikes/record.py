"""The record of a spike, with the rows that had the highest losses."""

from typing import Any

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.loader import Loader
from jaxgpt.spikes.detector import CAUSES, LOSS, NONE, NONFINITE
from jaxgpt.tracking.records import SpikeRecord

WORST_ROWS = 8


def spike_record(
    step: int, metrics: Any, config: Config, loader: Loader, dataset: Dataset
) -> SpikeRecord | None:
    """Return the record of a spike, from a step's `Metrics` on the host; None if it is none."""
    m, cause = metrics, int(metrics.detection.cause)
    if cause == NONE:
        return None
    which = None if cause == NONFINITE else cause - LOSS
    action = "skip_update" if cause == NONFINITE else config.spike.action
    if action == "rewind" and cause != LOSS:
        action = "log"
    return SpikeRecord(
        step=step,
        loss=float(m.loss),
        grad_norm=float(m.scalars["grad_norm"]),
        cause=CAUSES[cause],
        action=action,
        median=None if which is None else float(m.detection.medians[which]),
        limit=None if which is None else float(m.detection.limits[which]),
        rows=worst_rows(step, m.row_losses, loader, dataset),
    )


def worst_rows(
    step: int, row_losses: np.ndarray, loader: Loader, dataset: Dataset
) -> list[dict[str, Any]]:
    """Return the rows of a step with the highest losses and their sources, the worst first.

    `offset` counts the tokens of the training split of `source`.
    """
    out = []
    for row in map(int, np.argsort(row_losses)[::-1][:WORST_ROWS]):  # nan comes first
        location = loader.row_location(step, row)
        out.append(
            {
                "row": row,
                "loss": float(row_losses[row]),
                "corpus": loader.names[location.corpus],
                "source": str(dataset.sources[location.source].entry.path),
                "offset": int(location.offset),
            }
        )
    return out
