"""Time per step, rates, FLOPs and MFU of a run."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxgpt.config import ModelConfig
from jaxgpt.perf.clock import Clock
from jaxgpt.perf.hardware import find_device

MFU_FORMULA = "mfu = tokens/s/device x (6N + 12 L H K T) / peak FLOP/s (PaLM, arXiv 2204.02311, B)"
CPU_FLOPS = 1e11  # rough FLOP/s of one CPU device
SLOW_FLOPS = 5 * 60 * CPU_FLOPS  # FLOPs that a CPU device performs in five minutes


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return one device's dense peak FLOP/s for a dtype such as bfloat16, or None if unknown.

    `device_kind` is JAX's name for the device. On NVIDIA GPUs, the float32 peak is the TF32 peak.
    """
    device = find_device(device_kind)
    return device.peak_flops.get(dtype) if device else None


def flops_per_token(model: ModelConfig, n_parameters: int) -> int:
    """Return the forward and backward FLOPs per token, as in `MFU_FORMULA`.

    `n_parameters` (N) excludes embeddings used only for lookups. Attention is counted over the
    whole block, even with a sliding window or a document mask. Grouped-query attention changes only
    N.
    """
    heads = model.n_head * model.head_size
    return 6 * n_parameters + 12 * model.n_layer * heads * model.block_size


class HostTimes(NamedTuple):
    """Steps that a process has counted since its timer started, and the time spent on steps."""

    steps: int
    seconds: float  # spent on steps
    own: float  # part of `seconds` not spent waiting for devices; includes suspensions
    data: float  # part of `seconds` spent waiting for data


class StepTimer:
    """Times training steps. Only the activities `step` and `data` of the run's clock count."""

    def __init__(self, clock: Clock, stalled: Callable[[], float] = lambda: 0.0):
        """Start the timer. `stalled` returns how many seconds this process has been suspended."""
        self._clock, self._stalled = clock, stalled
        self._steps, self._waited_for_device = 0, 0.0
        self._start = self._last_lap = self._read()

    def count(self) -> None:
        """Count a step. It may still be running on the devices."""
        self._steps += 1

    @contextlib.contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Count the time in this block, except suspensions, as waiting for a device.

        If the block raises an error, its time is not counted.
        """
        start, stalled = time.perf_counter(), self._stalled()
        yield
        seconds = time.perf_counter() - start - (self._stalled() - stalled)
        self._waited_for_device += max(0.0, seconds)

    def host_times(self) -> HostTimes:
        """Return the count of steps since the timer started, and the time spent on steps."""
        steps, seconds, data = _difference(self._read(), self._start)
        return HostTimes(steps, seconds, seconds - self._waited_for_device, data)

    def lap(self) -> tuple[float, float] | tuple[None, None]:
        """End the lap. Return its seconds per step, and the fraction spent waiting for data.

        The first lap begins when the timer starts. Both values are None if the lap has no steps.
        """
        before, self._last_lap = self._last_lap, self._read()
        steps, seconds, data = _difference(self._last_lap, before)
        return (seconds / steps, data / seconds) if steps else (None, None)

    def _read(self) -> tuple[int, float, float]:
        return self._steps, self._clock.spent("step", "data"), self._clock.spent("data")


def _difference(now: tuple[int, float, float], then: tuple[int, float, float]) -> tuple:
    return tuple(a - b for a, b in zip(now, then, strict=True))


@dataclass(frozen=True)
class Rates:
    """Computes the rates in a training log line from the seconds per step."""

    batch_size: int  # number of sequences that the whole job processes in a step
    block_size: int  # tokens per sequence
    flops_per_token: int  # as returned by `flops_per_token`
    n_devices: int  # of the whole job
    peak: float | None  # FLOP/s of one device, if known

    def of(self, dt: float | None) -> dict[str, float | None]:
        """Return a dict of `dt` and all rates for a step that takes `dt` seconds.

        All values are None if `dt` is None. `tflops_per_device` is in TFLOP/s. `mfu` is a fraction,
        or None if the peak is unknown.
        """
        if dt is None:
            return dict.fromkeys(self.of(1.0))
        tokens_per_sec = self.batch_size * self.block_size / dt
        flops_per_device = tokens_per_sec / self.n_devices * self.flops_per_token
        return {
            "dt": dt,
            "tokens_per_sec": tokens_per_sec,
            "tokens_per_sec_per_device": tokens_per_sec / self.n_devices,
            "samples_per_sec": self.batch_size / dt,
            "tflops_per_device": flops_per_device / 1e12,
            "mfu": None if self.peak is None else flops_per_device / self.peak,
        }

    def slow_step_warnings(self) -> tuple[str, ...]:
        """Return a warning if a step on CPUs would take five minutes or more.

        The estimate assumes `CPU_FLOPS` per device, so call this only if the devices are CPUs.
        Returns an empty tuple if the step is faster, or if the peak is known.
        """
        flops = self.batch_size * self.block_size * self.flops_per_token / self.n_devices
        if self.peak is not None or flops < SLOW_FLOPS:
            return ()
        return (
            f"train.batch_size={self.batch_size}: a step needs {flops:.1e} FLOPs per device, or "
            f"{flops / CPU_FLOPS / 60:,.0f} minutes at {CPU_FLOPS:.0e} FLOP/s; nothing is logged "
            "before the first step ends; reduce train.batch_size or the batch size per device",
        )
