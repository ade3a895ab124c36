"""The record of a spike, with the highest-loss rows."""

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
    """Return a step's spike record, or None if the cause in `metrics.detection` is `none`.

    `metrics` is the `Metrics` of the step, as NumPy arrays.
    """
    detection = metrics.detection
    cause = int(detection.cause)
    if cause == NONE:
        return None
    thresholds = {}
    if cause != NONFINITE:
        which = cause - LOSS
        thresholds["median"] = float(detection.medians[which])
        thresholds["limit"] = float(detection.limits[which])
    action = "skip_update" if cause == NONFINITE else config.spike.action
    return SpikeRecord(
        step=step,
        loss=float(metrics.loss),
        grad_norm=float(metrics.scalars["grad_norm"]),
        cause=CAUSES[cause],
        action="log" if action == "rewind" and cause != LOSS else action,
        rows=worst_rows(step, metrics.row_losses, loader, dataset),
        **thresholds,
    )


def worst_rows(
    step: int, row_losses: np.ndarray, loader: Loader, dataset: Dataset
) -> list[dict[str, Any]]:
    """Return up to `WORST_ROWS` rows with the highest losses in a step, highest first.

    `row_losses` has shape (B,); NaN counts as the highest loss. Each row is a dict with these keys:

    - `row`: the index of the row in the batch.
    - `loss`: the mean loss in nats per target token.
    - `corpus`: the name of the row's corpus.
    - `source`: the path of the row's source.
    - `offset`: the position of the row's first token in the source's training split, in tokens.
    """
    worst = np.argsort(row_losses)[::-1][:WORST_ROWS].tolist()  # NaN comes first
    places = [loader.row_location(step, row) for row in worst]
    return [
        {
            "row": row,
            "loss": float(row_losses[row]),
            "corpus": loader.names[place.corpus],
            "source": str(dataset.sources[place.source].entry.path),
            "offset": int(place.offset),
        }
        for row, place in zip(worst, places, strict=True)
    ]
