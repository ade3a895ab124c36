"""How long a step would take: a roofline with few, stated assumptions, not a measurement."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxgpt.config import Config, MeshShape
from jaxgpt.models.weights import count_parameters, layer_matrices
from jaxgpt.parallel.mesh import hosts_spanned
from jaxgpt.perf.flops import flops_per_token
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.hlo import Collective, ring_bytes
from jaxgpt.plan.program import Memory
from jaxgpt.plan.theory import Traffic, sum_by_kind_and_axes

MATMUL_EFFICIENCY = 0.6  # of the dense peak; Megatron-LM and llm.c train at 0.41-0.49 in all
LATENCY = {"link": 10e-6, "network": 30e-6}  # seconds before an operation's first byte arrives

ASSUMPTIONS = (
    f"matrix products reach {MATMUL_EFFICIENCY:.0%} of the dense peak",
    "collectives go around a ring, at the peak of its slowest link, "
    f"after {LATENCY['link'] * 1e6:.0f} us in a host and {LATENCY['network'] * 1e6:.0f} us across",
    "what travels over data and fsdp hides behind computation as far as that lasts; "
    "what travels over tensor does not",
    "the update reads and writes parameters, gradients and moments once, moments that are in the "
    "host's memory through its link",
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


def recomputed_flops_per_token(config: Config) -> int:
    """Return the FLOPs that parallel.remat adds: of attention's products, or of a forward pass."""
    L, D, T = config.model.n_layer, config.model.n_embd, config.model.block_size
    attention, linear = 4 * L * D * T, 2 * sum(w.size for w in layer_matrices(config.model))
    return {"none": 0, "attention": attention, "dots": attention, "full": attention + linear}[
        config.parallel.remat
    ]


def link_of(axes: tuple[str, ...], mesh: MeshShape, devices_per_host: int) -> str:
    """Return `link` if all devices that talk along these mesh axes share a host, else `network`."""
    return "link" if planned_hosts_spanned(axes, mesh, devices_per_host) == 1 else "network"


def planned_hosts_spanned(axes: tuple[str, ...], mesh: MeshShape, devices_per_host: int) -> int:
    """Return on how many hosts of so many devices one group along these axes is, at most."""
    return hosts_spanned(axes, mesh, [i // devices_per_host for i in range(mesh.n_devices)])


def bandwidth(
    axes: tuple[str, ...], mesh: MeshShape, device: Device, devices_per_host: int
) -> float:
    """Return bytes/s that each device of a ring along `axes` can send.

    The members of a group on one host use their shares of the host's network together.
    """
    assert device.link_bandwidth and device.network_bandwidth, device
    if link_of(axes, mesh, devices_per_host) == "link":
        return device.link_bandwidth
    size = math.prod(mesh[axis] for axis in axes)
    members = size // planned_hosts_spanned(axes, mesh, devices_per_host)
    return min(device.link_bandwidth, max(1, members) * device.network_bandwidth)


def estimate(
    config: Config,
    mesh: MeshShape,
    device: Device,
    devices_per_host: int,
    memory: Memory,
    communicated: Iterable[Traffic | Collective],
) -> Estimate | None:
    """Return the estimate for one step; None for a device whose rates are not known.

    Args:
        communicated: in a step, as compiled or in theory.
    """
    peak = device.peak_flops.get(config.train.dtype)
    if peak is None or not device.memory_bandwidth or not device.network_bandwidth:
        return None
    n_devices = mesh.n_devices
    tokens = config.train.batch_size * config.model.block_size
    per_token = flops_per_token(config.model, count_parameters(config.model)[1])
    share = per_token * tokens / n_devices
    again = recomputed_flops_per_token(config) * tokens / n_devices
    compute = (share + again) / (peak * MATMUL_EFFICIENCY)
    update = 2 * (memory.parameters + memory.moments + memory.gradients) / device.memory_bandwidth
    update += 2 * memory.host_moments / device.host_bandwidth
    times = {"tensor": 0.0, "other": 0.0}
    for (kind, axes), (count, size) in sum_by_kind_and_axes(communicated).items():
        sent = ring_bytes(kind, size, math.prod(mesh[axis] for axis in axes))
        seconds = sent / bandwidth(axes, mesh, device, devices_per_host)
        operations = count if size / count > 1024 else 1  # scalars travel together
        seconds += operations * LATENCY[link_of(axes, mesh, devices_per_host)]
        times["tensor" if axes == ("tensor",) else "other"] += seconds
    step = max(compute + times["tensor"], times["other"]) + update
    return Estimate(
        step=step,
        compute=compute,
        update=update,
        tensor_communication=times["tensor"],
        other_communication=times["other"],
        tokens_per_sec=tokens / step,
        tokens_per_sec_per_device=tokens / step / n_devices,
        mfu=share / step / peak,
    )
