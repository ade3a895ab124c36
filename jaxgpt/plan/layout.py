"""The plan of one layout: what each device holds and sends, and a bound on a step's time."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxgpt.config import Config, MeshShape, axes_with
from jaxgpt.models.weights import count_parameters, layer_matrices
from jaxgpt.parallel.mesh import hosts_spanned, tensor_crosses_hosts_warning
from jaxgpt.perf.collectives import Collective, ring_bytes
from jaxgpt.perf.flops import flops_per_token
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.memory import host_memory
from jaxgpt.plan.program import Memory, Program, compile_step
from jaxgpt.runtime.allocator import USABLE

MATMUL_EFFICIENCY = 0.6  # of the dense peak; Megatron-LM and llm.c train at 0.41-0.49 in all
LATENCY = {"link": 10e-6, "network": 30e-6}  # seconds before an operation's first byte arrives

ASSUMPTIONS = (
    f"matrix products reach {MATMUL_EFFICIENCY:.0%} of the dense peak",
    "collectives go around a ring, at the peak of its slowest link, "
    f"after {LATENCY['link'] * 1e6:.0f} us in a host and {LATENCY['network'] * 1e6:.0f} us across",
    "what travels over data and fsdp hides behind computation as far as that lasts; "
    "what travels over tensor does not",
    "the update reads and writes parameters, gradients and moments once",
    "computation waits for what comes from the host's memory, over the link of the device",
)


@dataclass(frozen=True)
class Estimate:
    """Times of one step in seconds, and the rates that follow: an upper bound, more or less."""

    step: float
    compute: float
    update: float
    tensor_communication: float
    other_communication: float
    tokens_per_sec: float
    tokens_per_sec_per_device: float
    mfu: float


@dataclass(frozen=True)
class Plan:
    """All that is known of a layout without running it."""

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
        """Sentences about what works, but is hardly ever wanted."""
        crossing = tensor_crosses_hosts_warning(self.mesh, self.hosts)
        return (*self.program.warnings, *crossing)

    @property
    def capacity(self) -> int:
        """Bytes of a device that a program may use; simulated devices share this machine's."""
        if self.device.memory is not None:
            return int(USABLE * self.device.memory)
        return host_memory() // self.mesh.n_devices

    @property
    def is_compiled(self) -> bool:
        """Whether its activations are known, or only its state."""
        return self.memory.activations_and_temporaries > 0

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def tokens(self) -> int:
        """Tokens of a step, whole job."""
        return self.config.train.batch_size * self.config.model.block_size

    @property
    def n_parameters(self) -> int:
        """The number of the model's parameters, without padding of the vocabulary."""
        return count_parameters(self.config.model)[0]

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.config.model, count_parameters(self.config.model)[1])

    @property
    def recomputed_flops_per_token(self) -> int:
        """FLOPs that parallel.remat adds: of attention's products, or of a forward pass."""
        model, remat = self.config.model, self.config.parallel.remat
        if remat == "none":
            return 0
        linear = 2 * sum(w.size for w in layer_matrices(model)) if remat == "full" else 0
        return 4 * model.n_layer * model.n_head * model.head_size * model.block_size + linear

    @property
    def hosts(self) -> list[int]:
        """The host of each device."""
        return [i // self.devices_per_host for i in range(self.mesh.n_devices)]

    def hosts_spanned(self, axes: Sequence[str]) -> int:
        """Return on how many hosts one group of devices along these axes is, at most."""
        return hosts_spanned(axes, self.mesh, self.hosts)

    def bytes_sent(self, c: Collective) -> float:
        """Return the bytes that each device sends around a ring."""
        return ring_bytes(c.kind, c.bytes, math.prod(self.mesh[axis] for axis in c.axes))

    def link(self, axes: Sequence[str]) -> str:
        """Return `link` if all devices of a group along these axes share a host, or `network`."""
        return "link" if self.hosts_spanned(axes) == 1 else "network"

    def seconds(self, c: Collective) -> float:
        """Return the time that a collective takes by itself."""
        bandwidth, n_hosts = self.device.link_bandwidth, self.hosts_spanned(c.axes)
        if n_hosts > 1:  # members on one host use their shares of its network together
            members = max(1, math.prod(self.mesh[axis] for axis in c.axes) // n_hosts)
            bandwidth = min(bandwidth, members * self.device.network_bandwidth)
        operations = c.count if c.bytes / c.count > 1024 else 1  # scalars travel together
        return self.bytes_sent(c) / bandwidth + operations * LATENCY[self.link(c.axes)]

    @property
    def host_traffic(self) -> int:
        """Bytes of a step between a device and the host's memory.

        The update reads and writes moments. Parameters come for each forward, backward pass and
        the update, which writes them; gradients go once and come back for their norm and the
        update, and several microbatches (with two sums, the last and the next) add to them.
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
        """The time of a step; None if rates of the device are not known, or nothing is compiled."""
        device, memory, n_devices = self.device, self.memory, self.mesh.n_devices
        peak = device.peak_flops.get(self.config.train.dtype)
        if peak is None or not self.is_compiled:
            return None
        share = self.flops_per_token * self.tokens / n_devices
        again = self.recomputed_flops_per_token * self.tokens / n_devices
        compute = (share + again) / (peak * MATMUL_EFFICIENCY)
        state = memory.parameters + memory.moments + memory.gradients
        update = 2 * state / device.memory_bandwidth
        update += self.host_traffic / device.host_bandwidth
        fastest = device.peak_flops.get("bfloat16", peak)  # which Muon computes in
        update += self.program.update_flops / (fastest * MATMUL_EFFICIENCY)
        collectives = self.program.collectives
        exposed = set(axes_with("splits_heads", "splits_sequence", "splits_layers"))
        tensor = sum(self.seconds(c) for c in collectives if exposed.issuperset(c.axes))
        other = sum(self.seconds(c) for c in collectives if not exposed.issuperset(c.axes))
        step = max(compute + tensor, other) + update
        return Estimate(
            step=step,
            compute=compute,
            update=update,
            tensor_communication=tensor,
            other_communication=other,
            tokens_per_sec=self.tokens / step,
            tokens_per_sec_per_device=self.tokens / step / n_devices,
            mfu=share / step / peak,
        )

    def summary(self) -> dict[str, Any]:
        """Return mesh, memory, fit and time for JSON: bytes and seconds."""
        sizes = {"total": self.memory.total, "capacity": self.capacity}
        return {
            "mesh": self.mesh,
            "memory": dataclasses.asdict(self.memory) | sizes,
            "fits": self.fits,
            "estimate": dataclasses.asdict(self.estimate) if self.estimate else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON: bytes, seconds and FLOPs."""
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
            "warnings": self.warnings,
            "collectives": collectives,
            "flops_per_token": self.flops_per_token,
            "flops_per_step": self.flops_per_token * self.tokens,
        }


def plan_layout(config: Config, mesh: MeshShape, device: Device, devices_per_host: int) -> Plan:
    """Compile the step for a layout; arguments as for `compile_step`."""
    return Plan(config, mesh, device, devices_per_host, compile_step(config, mesh, device))
