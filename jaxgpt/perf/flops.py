"""What is measured of a run: time per step, rates, FLOPs and their share of the peak."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxgpt.config import ModelConfig
from jaxgpt.perf.hardware import find_device

RATE_FIELDS = ("dt", "tokens_per_sec", "tokens_per_sec_per_device", "samples_per_sec", "mfu")

MFU_FORMULA = "mfu = tokens/s/device x (6N + 12 L H K T) / peak FLOP/s (PaLM, arXiv 2204.02311, B)"


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s; None where it is not known."""
    device = find_device(device_kind)
    return device.peak_flops.get(dtype) if device else None


def flops_per_token(model: ModelConfig, n_parameters: int) -> int:
    """FLOPs of forward and backward for one token, full attention: 6N + 12 L H K T.

    Args:
        n_parameters: N, without position embeddings.

    PaLM (arXiv 2204.02311), appendix B.
    """
    return 6 * n_parameters + 12 * model.n_layer * model.n_embd * model.block_size


class StepTimer:
    """Seconds per training step, without what a run does between steps."""

    def __init__(self):
        self._last = time.perf_counter()
        self._excluded = 0.0
        self._steps = 0

    def count(self) -> None:
        """One more step is under way."""
        self._steps += 1

    @contextlib.contextmanager
    def excluded(self, pending: Any) -> Iterator[None]:
        """Work in this block is not counted; waits first for `pending` results of steps."""
        jax.block_until_ready(pending)
        start = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - start

    def lap(self) -> float | None:
        """Seconds per step since the last lap, once the device is done; None without a step."""
        now = time.perf_counter()
        seconds, steps = now - self._last - self._excluded, self._steps
        self._last, self._excluded, self._steps = now, 0.0, 0
        return seconds / steps if steps else None


@dataclass(frozen=True)
class Rates:
    """Turns seconds per step into the rate fields of a training line."""

    batch_size: int
    """Sequences per step, whole job."""
    block_size: int
    flops_per_token: int
    n_devices: int
    peak: float | None
    """FLOP/s of one device, if known."""

    def of(self, dt: float | None) -> dict[str, float | None]:
        """The fields for `dt` seconds per step; all None where that was not measured."""
        if dt is None:
            return dict.fromkeys(RATE_FIELDS)
        tokens_per_sec = self.batch_size * self.block_size / dt
        mfu = None
        if self.peak is not None:
            mfu = tokens_per_sec * self.flops_per_token / (self.peak * self.n_devices)
        per_device, samples = tokens_per_sec / self.n_devices, self.batch_size / dt
        values = (dt, tokens_per_sec, per_device, samples, mfu)
        return dict(zip(RATE_FIELDS, values, strict=True))
