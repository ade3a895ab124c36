"""Which mesh to take for a number of devices, and why."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxgpt.config import MESH_AXES, Config, UsageError, check_batch
from jaxgpt.planning.collectives import Collective
from jaxgpt.planning.estimate import Estimate, estimate
from jaxgpt.planning.layout import capacity
from jaxgpt.planning.program import Memory, compile_step, state_memory
from jaxgpt.planning.theory import expected_traffic
from jaxgpt.telemetry.devices import Device

REMATS = ("none", "attention", "dots", "full")  # each keeps less than the one before
WORTH = 0.9  # a layout has to be this much faster than a simpler one to stand before it


@dataclass(frozen=True)
class Advice:
    """One layout that was looked at."""

    config: Config
    mesh: dict[str, int]
    memory: Memory
    capacity: int
    estimate: Estimate | None
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes and seconds."""
        return {
            "options": self.options,
            "mesh": self.mesh,
            "memory": dataclasses.asdict(self.memory)
            | {"total": self.memory.total, "capacity": self.capacity},
            "fits": self.fits,
            "estimate": dataclasses.asdict(self.estimate) if self.estimate else None,
            "reason": self.reason,
        }

    @property
    def options(self) -> str:
        """What to give `jaxgpt.train` for it."""
        parallel = self.config.parallel
        words = [f"--mesh {','.join(map(str, self.mesh.values()))}"]
        if parallel.sequence_parallel:
            words.append("parallel.sequence_parallel=True")
        if parallel.remat != "none":
            words.append(f"parallel.remat={parallel.remat}")
        return " ".join(words)


def advise(
    config: Config, n_devices: int, device: Device, devices_per_host: int
) -> tuple[Advice, ...]:
    """All layouts that the model and the batch allow, the best first.

    State and traffic of each follow from formulas; activations are taken from a compiled step for
    each size of `tensor`, since they depend on how many rows a device has and on nothing else.

    Args:
        config: with model.vocab_size set; its mesh, sequence_parallel and remat are replaced.

    Raises:
        UsageError: if no mesh of so many devices suits the model and its batch.
    """
    found: list[Advice] = []
    tensors = list(_tensor_sizes(config, n_devices, devices_per_host))
    for tensor in tensors:
        meshes = list(_meshes(config, n_devices, tensor))
        for remat in REMATS if meshes else ():
            chosen = config.replace(
                parallel__zero_stage=3,
                parallel__sequence_parallel=_sequence_parallel(config, tensor),
                parallel__remat=remat,
            )
            found_now = list(_measured(chosen, meshes, device, devices_per_host))
            found += found_now
            if any(advice.fits for advice in found_now):
                break
    if not found:
        raise UsageError(
            f"--advise={n_devices}: train.batch_size={config.train.batch_size} in "
            f"{config.train.gradient_accumulation_steps} microbatches cannot be shared out over "
            f"{n_devices} devices with tensor up to {max(tensors)}; change train.batch_size"
        )
    return _ranked(found, devices_per_host)


def _tensor_sizes(config: Config, n_devices: int, devices_per_host: int) -> Iterator[int]:
    for tensor in range(1, min(n_devices, devices_per_host) + 1):
        if n_devices % tensor == 0 and config.model.n_head % tensor == 0:
            yield tensor


def _meshes(config: Config, n_devices: int, tensor: int) -> Iterator[tuple[int, int, int]]:
    for fsdp in range(1, n_devices // tensor + 1):
        if n_devices // tensor % fsdp:
            continue
        sizes = (n_devices // tensor // fsdp, fsdp, tensor)
        try:
            check_batch(config, sizes)
        except UsageError:
            continue
        yield sizes


def _sequence_parallel(config: Config, tensor: int) -> bool:
    return tensor > 1 and config.model.block_size % tensor == 0


def _measured(
    config: Config, meshes: list[tuple[int, int, int]], device: Device, devices_per_host: int
) -> Iterator[Advice]:
    """The layouts of one size of `tensor`: activations compiled once, the rest by formula."""
    most_sharded = max(meshes, key=lambda sizes: sizes[1])
    compiled = compile_step(_with_mesh(config, most_sharded), most_sharded, device)
    for sizes in meshes:
        mesh = dict(zip(MESH_AXES, sizes, strict=True))
        chosen = _with_mesh(config, sizes)
        if sizes[1] == 1:
            chosen = chosen.replace(parallel__zero_stage=0)
        memory = dataclasses.replace(
            state_memory(chosen, sizes, device),
            activations_and_temporaries=compiled.memory.activations_and_temporaries,
        )
        traffic = tuple(
            Collective(t.kind, t.axes, "", t.count, t.bytes) for t in expected_traffic(chosen, mesh)
        )
        yield Advice(
            config=chosen,
            mesh=mesh,
            memory=memory,
            capacity=capacity(device, math.prod(sizes)),
            estimate=estimate(chosen, mesh, device, devices_per_host, memory, traffic),
        )


def _with_mesh(config: Config, sizes: tuple[int, int, int]) -> Config:
    return config.replace(parallel__mesh=",".join(map(str, sizes)))


def _ranked(found: list[Advice], devices_per_host: int) -> tuple[Advice, ...]:
    """What fits before what does not; then by time, where a simpler layout wins a near tie."""

    def simplicity(advice: Advice) -> tuple[int, ...]:
        return (
            advice.mesh["tensor"],
            advice.mesh["fsdp"],
            REMATS.index(advice.config.parallel.remat),
        )

    def seconds(advice: Advice) -> float:
        return advice.estimate.step if advice.estimate else 0.0

    left = sorted(found, key=simplicity)
    ranked: list[Advice] = []
    while left:
        fitting = [a for a in left if a.fits]
        if fitting:
            fastest = min(map(seconds, fitting))
            best = next(a for a in fitting if seconds(a) * WORTH <= fastest)
        else:
            best = min(left, key=lambda a: a.memory.total)
        left.remove(best)
        ranked.append(dataclasses.replace(best, reason=_reason(best, devices_per_host)))
    return tuple(ranked)


def _reason(advice: Advice, devices_per_host: int) -> str:
    data, fsdp, tensor = advice.mesh.values()
    if not advice.fits:
        return "does not fit"
    if fsdp * tensor == 1:
        return "the whole state fits on each device: only gradients travel, once per step"
    words = []
    if tensor > 1:
        words.append(f"every layer is split over {tensor} devices of one host")
    if fsdp > 1:
        inside = fsdp * tensor <= devices_per_host
        words.append(
            f"ZeRO-3 splits the state over {fsdp} devices"
            + (" of one host" if inside else ", across hosts")
        )
    if data > 1 and fsdp * tensor <= devices_per_host:
        words.append("between hosts only gradients travel")
    if advice.config.parallel.remat != "none":
        words.append(f"activations fit with remat={advice.config.parallel.remat}")
    return "; ".join(words)
