"""Which mesh to take for a number of devices, and why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxgpt.config import Config, MeshShape, UsageError, check_batch
from jaxgpt.perf.hardware import Device
from jaxgpt.plan.layout import Plan, plan_layout
from jaxgpt.plan.program import Program, state_memory

REMATS = ("none", "attention", "dots", "full")  # each keeps less than the one before
STATE_ALONE = "its state alone does not fit"
WORTH = 0.9  # a layout has to be this much faster than a simpler one to stand before it


@dataclass(frozen=True)
class Candidate:
    """One layout that was looked at."""

    plan: Plan
    reason: str

    @property
    def options(self) -> str:
        """What to give `jaxgpt.train` for it."""
        parallel = self.plan.config.parallel
        words = [f"--mesh {self.plan.mesh}"]
        if parallel.sequence_parallel:
            words.append("parallel.sequence_parallel=True")
        if parallel.remat != "none":
            words.append(f"parallel.remat={parallel.remat}")
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        return {"options": self.options} | self.plan.summary() | {"reason": self.reason}


def search_meshes(
    config: Config,
    n_devices: int,
    device: Device,
    devices_per_host: int,
    log: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Return the layouts that the model and the batch allow, the best first.

    Each comes with the least rematerialization that makes it fit. What fits stands before what
    does not; then the faster one, where a simpler layout wins near ties. Before all comes data
    parallelism, where it fits as it is: nothing is simpler to scale.

    Args:
        config: with model.vocab_size set; its mesh, sequence_parallel and remat are replaced.
        log: is told of every compilation.

    Raises:
        UsageError: if no mesh of so many devices suits the model and its batch.
    """
    plans = []
    for tensor in range(1, min(n_devices, devices_per_host) + 1):
        inside_a_host = min(n_devices, devices_per_host) % tensor == 0
        if not inside_a_host or n_devices % tensor or config.model.n_head % tensor:
            continue
        sequence_parallel = tensor > 1 and config.model.block_size % tensor == 0
        chosen = config.replace(parallel__sequence_parallel=sequence_parallel)
        remat = REMATS[0]
        for mesh in _meshes(chosen, n_devices, tensor):
            # The next mesh has more state on a device: it needs as much remat, or more.
            chosen = chosen.replace(
                parallel__mesh=str(mesh),
                parallel__remat=remat if mesh["fsdp"] > 1 else REMATS[0],
            )
            plan = _plan_with_least_remat(chosen, mesh, device, devices_per_host, log)
            remat = plan.config.parallel.remat
            plans.append(plan)
    if not plans:
        accumulation = config.train.gradient_accumulation_steps
        raise UsageError(
            f"--advise={n_devices}: no mesh of {n_devices} devices shares out "
            f"train.batch_size={config.train.batch_size}; make it a multiple of "
            f"{n_devices * accumulation}"
        )
    return [Candidate(plan, _reason(plan)) for plan in _ranked(plans)]


def _meshes(config: Config, n_devices: int, tensor: int) -> Iterator[MeshShape]:
    """Yield the meshes with so many devices along `tensor`, those with the largest `fsdp` first."""
    for fsdp in range(n_devices // tensor, 0, -1):
        if n_devices // tensor % fsdp or config.model.n_embd % fsdp:
            continue
        shape = MeshShape(n_devices // tensor // fsdp, fsdp, tensor)
        try:
            check_batch(config, shape)
        except UsageError:
            continue
        yield shape


def _plan_with_least_remat(
    config: Config,
    mesh: MeshShape,
    device: Device,
    devices_per_host: int,
    log: Callable[[str], None],
) -> Plan:
    """Plan a layout with `config.parallel.remat`, or more of it until it fits."""
    state = Program(state_memory(config, mesh, device))
    plan = Plan(config.replace(parallel__remat=REMATS[0]), mesh, device, devices_per_host, state)
    if not plan.fits:
        return plan
    for remat in REMATS[REMATS.index(config.parallel.remat) :]:
        log(f"compiling mesh {mesh} with remat={remat}")
        chosen = config.replace(parallel__remat=remat)
        plan = plan_layout(chosen, mesh, device, devices_per_host)
        if plan.fits:
            break
    return plan


def _ranked(plans: list[Plan]) -> Iterator[Plan]:
    def simplicity(plan: Plan) -> tuple[int, ...]:
        remat = REMATS.index(plan.config.parallel.remat)
        return plan.mesh["tensor"], plan.mesh["fsdp"], remat

    def seconds(plan: Plan) -> float:
        return plan.estimate.step if plan.estimate else 0.0

    plans = sorted(plans, key=simplicity)
    left = [plan for plan in plans if plan.fits]
    while left:
        fastest = min(map(seconds, left))
        best = next(
            plan
            for plan in left
            if simplicity(plan) == (1, 1, 0) or seconds(plan) * WORTH <= fastest
        )
        left.remove(best)
        yield best
    too_large = [plan for plan in plans if not plan.fits]
    yield from sorted(too_large, key=lambda plan: (not plan.is_compiled, plan.memory.total))


def _reason(plan: Plan) -> str:
    mesh, parallel = plan.mesh, plan.config.parallel
    data, fsdp, tensor = mesh["data"], mesh["fsdp"], mesh["tensor"]
    if not plan.fits:
        return "does not fit with remat=full" if plan.is_compiled else STATE_ALONE
    many_hosts = mesh.n_devices > plan.devices_per_host
    words = []
    if fsdp * tensor == 1:
        words.append("the whole state fits on a device")
    if tensor > 1:
        words.append(f"every layer is split over {tensor} devices of a host")
    if fsdp > 1:
        inside = plan.hosts_spanned(["fsdp"]) == 1
        where = ", across hosts" if not inside else " of a host" if many_hosts else ""
        words.append(f"ZeRO-{parallel.zero_stage} over {fsdp} devices{where}")
    if data > 1 and many_hosts and plan.hosts_spanned(["fsdp", "tensor"]) == 1:
        words.append("between hosts only gradients travel")
    elif data > 1 and fsdp * tensor == 1:
        words.append("only gradients travel")
    if parallel.remat != "none":
        words.append(f"activations need remat={parallel.remat}")
    return "; ".join(words)
