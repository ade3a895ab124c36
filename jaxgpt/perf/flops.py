"""Time per step, rates, FLOPs and MFU of a run."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxgpt.config import ModelConfig
from jaxgpt.perf.hardware import find_device

MFU_FORMULA = "mfu = tokens/s/device x (6N + 12 L H K T) / peak FLOP/s (PaLM, arXiv 2204.02311, B)"
CPU_FLOPS = 1e11  # per second: what one CPU device gives, about
SLOW_FLOPS = 5 * 60 * CPU_FLOPS  # of a step that takes minutes


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the dense peak of one device in FLOP/s; None where it is not known."""
    device = find_device(device_kind)
    return device.peak_flops.get(dtype) if device else None


def flops_per_token(model: ModelConfig, n_parameters: int) -> int:
    """Return forward and backward FLOPs of a token, as `MFU_FORMULA`.

    `n_parameters`, N, leaves out embeddings that are only looked up. Attention counts as full, also
    with a window or documents; keys and values of grouped queries are fewer weights in N.
    """
    heads = model.n_head * model.head_size
    return 6 * n_parameters + 12 * model.n_layer * heads * model.block_size


class HostTimes(NamedTuple):
    """What a process has done in its steps until now, in seconds, but for `steps`."""

    steps: int
    seconds: float  # all, without what is excluded
    own: float  # of these: not waiting for devices, or not run while it waited
    data: float  # of these: waiting for data


class StepTimer:
    """Seconds per training step, without what a run does between steps."""

    def __init__(
        self,
        within: Callable[[str], AbstractContextManager[None]],
        stalled: Callable[[], float] = lambda: 0.0,
    ):
        """Begin.

        Args:
            within: counts a block as a phase of the run, see `excluded`.
            stalled: returns the seconds in which this process was not run, see `Stalls`.
        """
        self._within, self._stalled = within, stalled
        self._began = self._all_began = time.perf_counter()  # moved on by what does not count
        self._steps = self._all_steps = 0
        self._waited_for_data = self._all_data = self._all_idle = 0.0

    def count(self) -> None:
        """Count one more step that is under way."""
        self._steps += 1
        self._all_steps += 1

    @contextlib.contextmanager
    def excluded(self, pending: Any, phase: str) -> Iterator[None]:
        """Leave out the work in this block, which is of that phase of the run.

        Waits first for `pending` results of steps.
        """
        jax.block_until_ready(pending)
        start = time.perf_counter()
        with self._within(phase):
            yield
        seconds = time.perf_counter() - start
        self._began += seconds
        self._all_began += seconds

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the time in this block as waiting for `data` or for a `device`."""
        start, stalled = time.perf_counter(), self._stalled()
        with self._within("data") if what == "data" else contextlib.nullcontext():
            yield
        seconds = time.perf_counter() - start
        if what == "data":
            self._waited_for_data += seconds
            self._all_data += seconds
        else:
            self._all_idle += max(0.0, seconds - (self._stalled() - stalled))

    def host_times(self) -> HostTimes:
        """Return what this process has done until now, without waiting for devices."""
        seconds = time.perf_counter() - self._all_began
        return HostTimes(self._all_steps, seconds, seconds - self._all_idle, self._all_data)

    def lap(self) -> tuple[float, float] | tuple[None, None]:
        """Return seconds per step since the last lap, and the share that waited for data."""
        now = time.perf_counter()
        seconds, steps = now - self._began, self._steps
        share = self._waited_for_data / seconds if seconds > 0 else 0.0
        self._began, self._steps, self._waited_for_data = now, 0, 0.0
        return (seconds / steps, share) if steps else (None, None)


@dataclass(frozen=True)
class Rates:
    """Rates of a training line from seconds per step."""

    batch_size: int  # sequences per step, whole job
    block_size: int
    flops_per_token: int
    n_devices: int
    peak: float | None  # FLOP/s of one device, if known

    def of(self, dt: float | None) -> dict[str, float | None]:
        """Return the fields for `dt` seconds per step; all None where that was not measured."""
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
        """Return a sentence if a step of a CPU, whose peak is not known, takes minutes."""
        flops = self.batch_size * self.block_size * self.flops_per_token / self.n_devices
        if self.peak is not None or flops < SLOW_FLOPS:
            return ()
        return (
            f"train.batch_size={self.batch_size}: a step is {flops:.1e} FLOPs on each device, "
            f"{flops / CPU_FLOPS / 60:,.0f} minutes at {CPU_FLOPS:.0e} FLOP/s, and nothing is "
            "logged before the first has ended; give fewer rows",
        )
