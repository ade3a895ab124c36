"""Which mesh to take for a number of devices, and why."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxgpt.config import Config, MeshShape, UsageError, check_batch
from jaxgpt.perf.hardware import Device
from jaxgpt.plan.estimate import estimate, planned_hosts_spanned
from jaxgpt.plan.layout import Layout, capacity
from jaxgpt.plan.program import Memory, compile_step, state_memory
from jaxgpt.plan.theory import expected_traffic

REMATS = ("none", "attention", "dots", "full")  # each keeps less than the one before
STATE_ALONE = "its state alone"
WORTH = 0.9  # a layout has to be this much faster than a simpler one to stand before it


@dataclass(frozen=True, kw_only=True)
class Candidate(Layout):
    """One layout that was looked at."""

    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"options": self.options} | super().to_dict() | {"reason": self.reason}

    @property
    def options(self) -> str:
        """What to give `jaxgpt.train` for it."""
        parallel = self.config.parallel
        words = [f"--mesh {self.mesh}"]
        if parallel.sequence_parallel:
            words.append("parallel.sequence_parallel=True")
        if parallel.remat != "none":
            words.append(f"parallel.remat={parallel.remat}")
        return " ".join(words)


def search_meshes(
    config: Config,
    n_devices: int,
    device: Device,
    devices_per_host: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Candidate, ...]:
    """Return the layouts that the model and the batch allow, the best first.

    Each comes with the least rematerialization that makes it fit. State and traffic follow from
    formulas; activations are taken from a step compiled for one of the layouts with as many rows
    on a device, with `fsdp` or without.

    Args:
        config: with model.vocab_size set; its mesh, sequence_parallel and remat are replaced.
        say: is told of every compilation.

    Raises:
        UsageError: if no mesh of so many devices suits the model and its batch.
    """
    found: list[Candidate] = []
    for tensor in _tensor_sizes(config, n_devices, devices_per_host):
        chosen = config.replace(
            parallel__sequence_parallel=tensor > 1 and config.model.block_size % tensor == 0
        )
        meshes = list(_meshes(chosen, n_devices, tensor))
        for alike in ([m for m in meshes if m["fsdp"] == 1], [m for m in meshes if m["fsdp"] > 1]):
            found += _evaluate(chosen, alike, device, devices_per_host, say)
    if not found:
        accumulation = config.train.gradient_accumulation_steps
        raise UsageError(
            f"--advise={n_devices}: no mesh of {n_devices} devices shares out "
            f"train.batch_size={config.train.batch_size}; make it a multiple of "
            f"{n_devices * accumulation}"
        )
    return _ranked(found, devices_per_host)


def _tensor_sizes(config: Config, n_devices: int, devices_per_host: int) -> Iterator[int]:
    for tensor in range(1, min(n_devices, devices_per_host) + 1):
        inside_a_host = min(n_devices, devices_per_host) % tensor == 0
        if inside_a_host and n_devices % tensor == 0 and config.model.n_head % tensor == 0:
            yield tensor


def _meshes(config: Config, n_devices: int, tensor: int) -> Iterator[MeshShape]:
    for fsdp in range(1, n_devices // tensor + 1):
        if n_devices // tensor % fsdp or config.model.n_embd % fsdp:
            continue
        shape = MeshShape(n_devices // tensor // fsdp, fsdp, tensor)
        try:
            check_batch(config, shape)
        except UsageError:
            continue
        yield shape


def _evaluate(
    config: Config,
    meshes: list[MeshShape],
    device: Device,
    devices_per_host: int,
    say: Callable[[str], None],
) -> Iterator[Candidate]:
    """Evaluate layouts that differ only in how `data` and `fsdp` share the devices."""

    def advice(config: Config, mesh: MeshShape, memory: Memory) -> Candidate:
        config = config.replace(parallel__mesh=str(mesh))
        return Candidate(
            config=config,
            mesh=mesh,
            memory=memory,
            capacity=capacity(device, mesh.n_devices),
            estimate=estimate(
                config, mesh, device, devices_per_host, memory, expected_traffic(config, mesh)
            ),
        )

    left = []
    for mesh in meshes:
        state = advice(config, mesh, state_memory(config, mesh, device))
        if state.fits:
            left.append(mesh)
        else:
            yield dataclasses.replace(state, reason=f"{STATE_ALONE} does not fit")
    for remat in REMATS:
        if not left:
            return
        chosen, example = config.replace(parallel__remat=remat), left[0]
        say(f"compiling mesh {example} with remat={remat}")
        compiled = compile_step(chosen, example, device).memory.activations_and_temporaries
        for mesh in list(left):
            memory = state_memory(chosen, mesh, device)
            memory = dataclasses.replace(memory, activations_and_temporaries=compiled)
            made = advice(chosen, mesh, memory)
            if made.fits or remat == REMATS[-1]:
                left.remove(mesh)
                yield made


def _ranked(found: list[Candidate], devices_per_host: int) -> tuple[Candidate, ...]:
    """Rank what fits before what does not; then by time, where a simpler layout wins near ties.

    Before all comes data parallelism, where it fits as it is: nothing is simpler to scale.
    """

    def simplicity(advice: Candidate) -> tuple[int, ...]:
        remat = REMATS.index(advice.config.parallel.remat)
        return advice.mesh["tensor"], advice.mesh["fsdp"], remat

    def seconds(advice: Candidate) -> float:
        return advice.estimate.step if advice.estimate else 0.0

    left = sorted(found, key=simplicity)
    ranked: list[Candidate] = []
    while left:
        fitting = [a for a in left if a.fits]
        if fitting:
            fastest = min(map(seconds, fitting))
            whole = [a for a in fitting if simplicity(a) == (1, 1, 0)]
            best = next(iter(whole), None) or next(
                a for a in fitting if seconds(a) * WORTH <= fastest
            )
        else:
            best = min(left, key=lambda a: (STATE_ALONE in a.reason, a.memory.total))
        left.remove(best)
        reason = best.reason or _reason(best, devices_per_host)
        ranked.append(dataclasses.replace(best, reason=reason))
    return tuple(ranked)


def _reason(advice: Candidate, devices_per_host: int) -> str:
    mesh = advice.mesh
    data, fsdp, tensor = mesh["data"], mesh["fsdp"], mesh["tensor"]
    if not advice.fits:
        return "does not fit with remat=full"
    many_hosts = mesh.n_devices > devices_per_host
    words = []
    if fsdp * tensor == 1:
        words.append("the whole state fits on a device")
    if tensor > 1:
        words.append(f"every layer is split over {tensor} devices of a host")
    if fsdp > 1:
        inside = planned_hosts_spanned(("fsdp",), advice.mesh, devices_per_host) == 1
        stage = advice.config.parallel.zero_stage
        where = " of a host" if inside and many_hosts else "" if inside else ", across hosts"
        words.append(f"ZeRO-{stage} over {fsdp} devices{where}")
    if data > 1:
        inside = planned_hosts_spanned(("fsdp", "tensor"), advice.mesh, devices_per_host) == 1
        if many_hosts and inside:
            words.append("between hosts only gradients travel")
        elif fsdp * tensor == 1:
            words.append("only gradients travel")
    if advice.config.parallel.remat != "none":
        words.append(f"activations need remat={advice.config.parallel.remat}")
    return "; ".join(words)
