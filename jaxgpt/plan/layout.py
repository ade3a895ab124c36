"""The plan of one layout: what each device holds, what it says, and how long a step takes."""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from jaxgpt.config import Config, MeshShape
from jaxgpt.models.weights import count_parameters
from jaxgpt.parallel.mesh import tensor_crosses_hosts_warning
from jaxgpt.perf.flops import flops_per_token
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.hlo import Collective, ring_bytes
from jaxgpt.plan.estimate import ASSUMPTIONS, Estimate, estimate, link_of
from jaxgpt.plan.program import Memory, compile_step
from jaxgpt.plan.theory import Traffic, expected_traffic, sum_by_kind_and_axes
from jaxgpt.runtime.allocator import USABLE


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a layout needs."""

    config: Config
    mesh: MeshShape
    memory: Memory
    capacity: int
    """Bytes that a program may use of a device's memory."""
    estimate: Estimate | None

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON: bytes, seconds and FLOPs."""
        return {
            "mesh": self.mesh,
            "memory": dataclasses.asdict(self.memory)
            | {"total": self.memory.total, "capacity": self.capacity},
            "fits": self.fits,
            "estimate": dataclasses.asdict(self.estimate) if self.estimate else None,
        }


@dataclass(frozen=True, kw_only=True)
class Plan(Layout):
    """All that is known of a layout without running it."""

    device: Device
    devices_per_host: int
    attention: str
    collectives: tuple[Collective, ...]
    theory: tuple[Traffic, ...]
    warnings: tuple[str, ...]
    """One line for each thing that works, and that hardly anyone wants."""

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.config.model, count_parameters(self.config.model)[1])

    def communication(self) -> list[dict[str, Any]]:
        """Return every kind of collective: as compiled, as theory has it, and what a ring sends."""
        compiled, theory = sum_by_kind_and_axes(self.collectives), sum_by_kind_and_axes(self.theory)
        rows = []
        for kind, axes in compiled | theory:
            row: dict[str, Any] = {"kind": kind, "axes": axes}
            row["count"], row["bytes"] = compiled[kind, axes]
            row["theory_count"], row["theory_bytes"] = theory[kind, axes]
            n = math.prod(self.mesh[axis] for axis in axes)
            row["bytes_sent"] = round(ring_bytes(kind, row["bytes"], n))
            row["over"] = link_of(axes, self.mesh, self.devices_per_host)
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        tokens = self.config.train.batch_size * self.config.model.block_size
        return super().to_dict() | {
            "config": self.config.to_dict(),
            "devices": self.mesh.n_devices,
            "device": self.device.name,
            "devices_per_host": self.devices_per_host,
            "attention": self.attention,
            "warnings": self.warnings,
            "collectives": self.communication(),
            "flops_per_token": self.flops_per_token,
            "flops_per_step": self.flops_per_token * tokens,
            "assumptions": list(ASSUMPTIONS),
            "exact": ["memory.parameters", "memory.moments", "collectives", "flops_per_token"],
        }


def plan_layout(config: Config, mesh: MeshShape, device: Device, devices_per_host: int) -> Plan:
    """Compile the step for a layout and add up what it means.

    Args:
        config: with model.vocab_size set.
        mesh: JAX has been told to simulate that many devices.
    """
    hosts = [i // devices_per_host for i in range(mesh.n_devices)]
    program = compile_step(config, mesh, device)
    return Plan(
        config=config,
        mesh=mesh,
        device=device,
        devices_per_host=devices_per_host,
        attention=program.attention,
        memory=program.memory,
        capacity=capacity(device, mesh.n_devices),
        collectives=program.collectives,
        theory=expected_traffic(config, mesh),
        warnings=(*program.warnings, *tensor_crosses_hosts_warning(mesh, hosts)),
        estimate=estimate(
            config, mesh, device, devices_per_host, program.memory, program.collectives
        ),
    )


def capacity(device: Device, n_devices: int) -> int:
    """Return the bytes of a device that a program may use; simulated ones share this machine's."""
    if device.memory is not None:
        return int(USABLE * device.memory)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(USABLE * machine / n_devices)
