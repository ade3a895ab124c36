"""Plan of one layout: per-device memory and communication, and the estimated step time."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxgpt.config import Config, MeshShape, axes_with
from jaxgpt.models.weights import count_parameters, layer_matrices
from jaxgpt.parallel.mesh import hosts_spanned, tensor_crosses_hosts_warning
from jaxgpt.perf.collectives import Collective, ring_bytes
from jaxgpt.perf.flops import Rates, flops_per_token
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.memory import host_memory
from jaxgpt.plan.estimate import memory_traffic
from jaxgpt.plan.program import Memory, Program, compile_step
from jaxgpt.runtime.allocator import USABLE
from jaxgpt.train.sharded_model import layer_groups

# A step reaches these fractions of the dense peak FLOP/s and of the memory bandwidth. A large
# matmul on an H100 reaches 0.8 of its peak, and copies reach 0.77 to 0.9 of the bandwidth of an
# H100 or H200. plan/DETAILS.md compares the resulting estimates with measured speeds.
MATMUL_EFFICIENCY = 0.7
MEMORY_EFFICIENCY = 0.85
# On a CPU device, whole steps reach this fraction of a large matmul's FLOP/s. Measured: 0.38 to
# 0.52 for `tiny`, `shakespeare_char_cpu` and `llama-tiny` (two cores of an AMD EPYC, JAX 0.10.2).
CPU_EFFICIENCY = 0.44
# Seconds to start a collective, and seconds per hop of its ring. NCCL uses these numbers to choose
# an algorithm (baseLat and hwLat for `Simple` in its src/graph/tuning.cc).
LATENCY = {"start": 8.4e-6, "link": 3.4e-6, "network": 9.6e-6}

# Devices along these axes wait for each other in every layer.
_EXPOSED_AXES = axes_with("splits_heads", "splits_sequence", "splits_layers")
ASSUMPTIONS = (
    f"matmuls reach {MATMUL_EFFICIENCY:.0%} of the dense peak",
    "the time to read and write activations and weights at "
    f"{MEMORY_EFFICIENCY:.0%} of the memory bandwidth adds to the time of matmuls",
    "collectives use a ring at the peak rate of its slowest link, and a hop takes "
    f"{LATENCY['link'] * 1e6:.1f} us within a host and "
    f"{LATENCY['network'] * 1e6:.1f} us between hosts",
    f"communication over {' and '.join(axes_with('splits_batch'))} overlaps with computation, "
    "except in a pipeline",
    "the transfers of ring attention overlap with its matmuls, and other communication does not "
    "overlap",
    "the update reads and writes parameters, gradients and moments once",
    "computation waits for transfers from host memory, which use the device's host link",
)


@dataclass(frozen=True)
class Estimate:
    """Estimated times of one step in seconds, and the resulting rates. `mfu` is a fraction.

    For the device `cpu`, `compute` equals `step`.
    """

    step: float
    compute: float
    tokens_per_sec: float
    tokens_per_sec_per_device: float
    mfu: float
    # Idle time of a pipeline stage before its first and after its last microbatch
    bubble: float = 0.0
    update: float = 0.0
    exposed_communication: float = 0.0  # excludes ring attention's overlapped transfers
    overlapped_communication: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A layout, its program, and the quantities that are known without running the program.

    The program is either compiled or estimated. If `is_complete` is False, `program` holds only
    the size of the state.
    """

    config: Config
    mesh: MeshShape
    device: Device
    devices_per_host: int
    program: Program

    @property
    def memory(self) -> Memory:
        return self.program.memory

    @property
    def warnings(self) -> tuple[str, ...]:
        """The program's warnings, and a warning if a `tensor` group spans hosts."""
        crossing = tensor_crosses_hosts_warning(self.mesh, self.hosts)
        return (*self.program.warnings, *crossing)

    @property
    def capacity(self) -> int:
        """Bytes that a program may use on a device. CPU devices share this machine's RAM."""
        if self.device.memory is not None:
            return int(USABLE * self.device.memory)
        return host_memory() // self.mesh.n_devices

    @property
    def is_complete(self) -> bool:
        """True if the memory for activations is known, False if only the size of the state is."""
        return self.memory.activations_and_temporaries > 0

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def tokens(self) -> int:
        """Number of tokens in a global batch."""
        return self.config.train.batch_size * self.config.model.block_size

    @property
    def n_parameters(self) -> int:
        """Number of model parameters, not counting vocabulary padding."""
        return count_parameters(self.config.model)[0]

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.config.model, count_parameters(self.config.model)[1])

    @property
    def recomputed_flops_per_token(self) -> int:
        """Estimate of the FLOPs per token that pipeline stages and remat recompute.

        In a pipeline, all matmuls of the layers are counted. In addition, remat=attention and
        remat=dots count the matmuls of attention. remat=full counts all matmuls of the layers,
        except the MLP's last one, whose result only a following norm (model.post_norm) needs.
        remat=attention has no effect if the kernel does not keep the scores.
        """
        model, remat = self.config.model, self.config.parallel.remat
        attention = 4 * model.n_layer * model.n_head * model.head_size * model.block_size
        matrices = layer_matrices(model)
        linear = 2 * sum(w.size for w in matrices)
        last = 2 * sum(w.size for w in matrices if "mlp" in w.axes and w.axes[-1] == "embed")
        stages = attention + linear if self.n_stages > 1 else 0
        if remat == "none" or (remat == "attention" and not self.program.stores_scores):
            return stages
        again = linear - (0 if model.post_norm else last) if remat == "full" else 0
        return stages + attention + again

    @property
    def n_stages(self) -> int:
        return self.mesh.split_of("splits_layers")

    @property
    def bubble_fraction(self) -> float:
        """The pipeline bubble as a fraction of compute time, or 0 without a pipeline.

        It is (S - 1) / (v M) for S stages, M microbatches and v groups of layers on each stage
        (arXiv 2104.04473, section 2.2).
        """
        repeats = self.config.parallel.stage_repeats
        return (self.n_stages - 1) / (repeats * self.config.train.gradient_accumulation_steps)

    @property
    def imbalance(self) -> float:
        """The size of the largest layer group, relative to an even split."""
        groups = layer_groups(self.config, self.mesh)
        return max(groups.sizes) * len(groups.sizes) / groups.n_layers

    @property
    def hosts(self) -> list[int]:
        """The host number of each device, in mesh order."""
        return [i // self.devices_per_host for i in range(self.mesh.n_devices)]

    def hosts_spanned(self, axes: Sequence[str]) -> int:
        """Return the largest number of hosts spanned by a group of devices along these axes."""
        return _hosts_spanned(tuple(axes), tuple(self.mesh.items()), self.devices_per_host)

    def overlap(self, c: Collective) -> Literal["attention", "computation", "nothing"]:
        """Return what a collective overlaps with.

        The transfers of ring attention overlap with the matmuls of attention. In a pipeline, all
        other collectives are exposed, because weights are gathered before the loop and gradients
        are reduced after it. Without a pipeline, collectives over `data` or `fsdp` overlap with all
        computation.
        """
        if c.kind == "collective-permute" and c.axes == axes_with("splits_sequence"):
            return "attention"
        exposed = self.n_stages > 1 or set(_EXPOSED_AXES).issuperset(c.axes)
        return "nothing" if exposed else "computation"

    def bytes_sent(self, c: Collective) -> float:
        """Return the bytes that each device sends in a ring implementation of the collective."""
        return ring_bytes(c.kind, c.bytes, math.prod(self.mesh[axis] for axis in c.axes))

    def link(self, axes: Sequence[str]) -> str:
        """Return `link` if all devices of a group along these axes share a host, else `network`."""
        return "link" if self.hosts_spanned(axes) == 1 else "network"

    def seconds(self, c: Collective) -> float:
        """Return the time of a collective in seconds, assuming no overlap.

        The device's bandwidths must be known.
        """
        bandwidth, n_hosts = self.device.link_bandwidth, self.hosts_spanned(c.axes)
        n = math.prod(self.mesh[axis] for axis in c.axes)
        if n_hosts > 1:  # group members on one host combine their network bandwidth
            members = max(1, n // n_hosts)
            bandwidth = min(bandwidth, members * self.device.network_bandwidth)
        operations = c.count if c.bytes / c.count > 1024 else 1  # XLA combines small arrays
        if c.kind == "collective-permute":
            hops = LATENCY[self.link(c.axes)]
        else:
            hops = (n - n_hosts) * LATENCY["link"] + (n_hosts - 1) * LATENCY["network"]
        rounds = 2 if c.kind == "all-reduce" else 1
        latency = LATENCY["start"] + rounds * hops
        return self.bytes_sent(c) / bandwidth + operations * latency

    @property
    def host_traffic(self) -> int:
        """Bytes copied between a device and host memory per step; 0 if `memory.in_host` is 0.

        With offload=moments, the update reads and writes the moments. With offload=state, each
        forward pass, each backward pass and the update also read the parameters, and the update
        writes them. Gradients are written once, and read for their norm and for the update. With
        several microbatches, each microbatch reads and writes the accumulators. In that case,
        `memory.gradients` includes two sets of accumulators.
        """
        memory, n = self.memory, self.config.train.gradient_accumulation_steps
        if not memory.in_host:
            return 0
        if self.config.parallel.offload == "moments":
            return 2 * memory.in_host
        gradients = (n + 1 if n > 1 else 3) * memory.gradients
        return 2 * memory.moments + (2 * n + 2) * memory.parameters + gradients

    @functools.cached_property
    def estimate(self) -> Estimate | None:
        """Estimated times; None if the memory for activations or the device's peak is unknown.

        The peak is the device's peak FLOP/s in train.dtype. A device with a known peak must also
        have known bandwidths. A `cpu` with a known peak must instead be the only device.
        """
        device, memory, n_devices = self.device, self.memory, self.mesh.n_devices
        peak = device.peak_flops.get(self.config.train.dtype)
        if peak is None or not self.is_complete:
            return None
        share = self.flops_per_token * self.tokens / n_devices
        again = self.recomputed_flops_per_token * self.tokens / n_devices
        if device.name == "cpu":
            return self._estimate_on_cpu(peak)
        bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY
        passes = 1 + again / share  # recomputation repeats part of the step
        matmuls = passes * share / (peak * MATMUL_EFFICIENCY)
        transfers = passes * memory_traffic(self.config, self.mesh) / bandwidth
        compute = (matmuls + transfers) * self.imbalance
        bubble = self.bubble_fraction * compute
        state = memory.parameters + memory.moments + memory.gradients
        update = 2 * state / bandwidth
        update += self.host_traffic / device.host_bandwidth
        fastest = device.peak_flops.get("bfloat16", peak)  # Muon's matmuls use bfloat16
        update += self.program.update_flops / (fastest * MATMUL_EFFICIENCY)
        communication: Counter[str] = Counter()
        for c in self.program.collectives:
            communication[self.overlap(c)] += self.seconds(c)
        model = self.config.model
        scores = 12 * model.n_layer * model.n_head * model.head_size * model.block_size
        attention = matmuls * scores / self.flops_per_token
        exposed = communication["nothing"] + max(0.0, communication["attention"] - attention)
        overlapped = communication["computation"]
        return self._estimate(
            peak,
            step=max(compute + bubble + exposed, overlapped) + update,
            compute=compute,
            bubble=bubble,
            update=update,
            exposed_communication=exposed,
            overlapped_communication=overlapped,
        )

    def _estimate_on_cpu(self, peak: float) -> Estimate:
        """Return the estimate for one CPU device whose large matmuls reach `peak` FLOP/s."""
        flops = (self.flops_per_token + self.recomputed_flops_per_token) * self.tokens
        step = flops / (peak * CPU_EFFICIENCY)
        return self._estimate(peak, step=step, compute=step)

    def _estimate(self, peak: float, step: float, **parts: float) -> Estimate:
        """Return the estimate for a step that takes `step` seconds, on devices with this peak."""
        train, model = self.config.train, self.config.model
        rates = Rates(
            train.batch_size, model.block_size, self.flops_per_token, self.mesh.n_devices, peak
        ).of(step)
        names = ("tokens_per_sec", "tokens_per_sec_per_device", "mfu")
        return Estimate(step, **parts, **{name: rates[name] for name in names})

    def summary(self) -> dict[str, Any]:
        """Return `mesh`, `memory`, `fits`, `warnings` and `estimate`, in bytes and seconds.

        `estimate` is None if the times are unknown.
        """
        sizes = {"total": self.memory.total, "capacity": self.capacity}
        return {
            "mesh": self.mesh,
            "memory": dataclasses.asdict(self.memory) | sizes,
            "fits": self.fits,
            "warnings": self.warnings,
            "estimate": dataclasses.asdict(self.estimate) if self.estimate else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON. The units are bytes, seconds and FLOPs.

        It contains everything in `summary`, plus the configuration, the number of parameters, the
        devices, the attention kernel and the FLOPs. `collectives` holds the fields of each
        `Collective`, with `bytes_sent` and `over` (see `link`).
        """
        collectives = [
            dataclasses.asdict(c)
            | {"bytes_sent": round(self.bytes_sent(c)), "over": self.link(c.axes)}
            for c in self.program.collectives
        ]
        return self.summary() | {
            "config": self.config.to_dict(),
            "n_parameters": self.n_parameters,
            "devices": self.mesh.n_devices,
            "device": self.device.name,
            "devices_per_host": self.devices_per_host,
            "attention": self.program.attention,
            "collectives": collectives,
            "flops_per_token": self.flops_per_token,
            "flops_per_step": self.flops_per_token * self.tokens,
        }


@functools.cache
def _hosts_spanned(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], per_host: int) -> int:
    shape = MeshShape(**dict(mesh))
    return hosts_spanned(axes, shape, np.arange(shape.n_devices) // per_host)


def plan_layout(config: Config, mesh: MeshShape, device: Device, devices_per_host: int) -> Plan:
    """Compile the step for a layout and return its plan. See `compile_step` for requirements."""
    program = compile_step(config, mesh, device, devices_per_host)
    return Plan(config, mesh, device, devices_per_host, program)
