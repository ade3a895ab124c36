"""Rank the meshes for a number of devices."""

import bisect
import sys
from collections.abc import Iterator

from jaxgpt.config import Config, MeshShape, UsageError, check_batch
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.units import count
from jaxgpt.plan.layout import Plan, plan_layout
from jaxgpt.plan.program import Program, state_memory

REMATS = ("none", "attention", "dots", "full")  # in order of decreasing memory
# A layout ranks before a simpler one only if it takes less than this fraction of that one's time.
TIE_RATIO = 0.9


def search_meshes(
    config: Config, n_devices: int, device: Device, devices_per_host: int
) -> list[Plan]:
    """Return the layouts that the model and the batch allow, best first.

    Each layout uses the least rematerialization that makes it fit. Layouts that fit come first,
    sorted by step time. However, a simpler layout comes before one that is only slightly faster
    (`TIE_RATIO`) or whose time is unknown. Pure data parallelism is always the first layout if it
    fits without remat, because it is the simplest to scale.

    The mesh, sequence_parallel and remat of `config` are ignored. Progress is printed on stderr.
    The requirements are the same as for `compile_step`.

    Raises:
        UsageError: if no mesh divides the batch, or if `compile_step` raises it.
    """
    plans = []
    for tensor, chosen in _tensor_sizes(config, devices_per_host):
        remat = REMATS[0]
        for mesh in _meshes(chosen, n_devices, tensor):
            # The next mesh has more state per device, so it needs at least as much remat.
            remat = remat if mesh["fsdp"] > 1 else REMATS[0]
            chosen = chosen.replace(parallel__mesh=str(mesh), parallel__remat=remat)
            plan = _plan_with_least_remat(chosen, mesh, device, devices_per_host)
            remat = plan.config.parallel.remat
            plans.append(plan)
    if not plans:
        multiple = n_devices * config.train.gradient_accumulation_steps
        raise UsageError(
            f"--advise={n_devices}: no mesh of {n_devices} devices divides "
            f"train.batch_size={config.train.batch_size}; make it a multiple of {multiple}"
        )
    return list(_ranked(plans))


def _tensor_sizes(config: Config, devices_per_host: int) -> Iterator[tuple[int, Config]]:
    """Yield the possible sizes of `tensor` within a host, each with its sequence parallelism."""
    for tensor in range(1, devices_per_host + 1):
        splits_heads = config.model.n_head % tensor == config.model.mlp_width % tensor == 0
        if devices_per_host % tensor == 0 and splits_heads:
            sequence_parallel = tensor > 1 and config.model.block_size % tensor == 0
            yield tensor, config.replace(parallel__sequence_parallel=sequence_parallel)


def _meshes(config: Config, n_devices: int, tensor: int) -> Iterator[MeshShape]:
    """Yield the meshes with this `tensor` size, the largest `fsdp` first."""
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
    config: Config, mesh: MeshShape, device: Device, devices_per_host: int
) -> Plan:
    """Plan a layout, starting with `config.parallel.remat` and increasing remat until it fits."""
    plan = _plan_state(config.replace(parallel__remat=REMATS[0]), mesh, device, devices_per_host)
    if not plan.fits:
        return plan
    for remat in REMATS[REMATS.index(config.parallel.remat) :]:
        print(f"compiling mesh {mesh} with remat={remat}", file=sys.stderr)
        chosen = config.replace(parallel__remat=remat)
        plan = plan_layout(chosen, mesh, device, devices_per_host)
        if plan.fits:
            break
    return plan


def _plan_state(config: Config, mesh: MeshShape, device: Device, devices_per_host: int) -> Plan:
    """Return a plan that contains only the size of the state, without compiling."""
    return Plan(config, mesh, device, devices_per_host, Program(state_memory(config, mesh, device)))


def find_fit(plan: Plan) -> Plan | None:
    """Return the plan of a layout that fits on the same devices, or None if none is found.

    It differs from `plan` in its mesh and sequence parallelism and, only if necessary, in
    `parallel.remat`, and then in the number of microbatches and `parallel.reduce_every`. Its mesh
    has only the axes `data`, `fsdp` and `tensor`, with the smallest `tensor` (within a host) and
    then the smallest `fsdp` that fit. Progress is printed on stderr. The requirements and errors
    are the same as for `compile_step`.
    """
    job = plan.device, plan.devices_per_host
    n_devices = plan.mesh.n_devices
    plans: dict[str, Plan] = {}

    def planned(layout: tuple[Config, MeshShape]) -> Plan:
        state = _plan_state(*layout, *job)
        options = train_options(state, plan.config)
        if options not in plans:
            print(f"compiling {options}", file=sys.stderr)
            plans[options] = plan_layout(*layout, *job)
        return plans[options]

    def first_fit(layouts: list[tuple[Config, MeshShape]]) -> Plan | None:
        """Return the first plan that fits, given layouts in order of decreasing memory."""
        i = bisect.bisect_left(layouts, True, key=lambda layout: planned(layout).fits)
        return planned(layouts[i]) if i < len(layouts) else None

    for tensor, config in _tensor_sizes(plan.config, plan.devices_per_host):
        changes = list(_changes(config, n_devices // tensor))
        meshes = list(_meshes(config, n_devices, tensor))[::-1]
        meshes = [mesh for mesh in meshes if _plan_state(changes[-1], mesh, *job).fits]
        if meshes and (found := first_fit([(change, meshes[-1]) for change in changes])):
            return first_fit([(found.config, mesh) for mesh in meshes])
    return None


def _changes(config: Config, n_splits: int) -> Iterator[Config]:
    """Yield `config`, then with full remat, then also with more microbatches, up to the maximum.

    `n_splits` is the number of devices that split a microbatch.
    """
    yield config
    if config.parallel.remat != REMATS[-1]:
        config = config.replace(parallel__remat=REMATS[-1])
        yield config
    rows = config.train.batch_size // n_splits
    for n in range(max(2, config.train.gradient_accumulation_steps), rows + 1):
        change = config.replace(
            train__gradient_accumulation_steps=n, parallel__reduce_every="microbatch"
        )
        if rows % n == 0 and change != config:
            yield change


def _ranked(plans: list[Plan]) -> Iterator[Plan]:
    def simplicity(plan: Plan) -> tuple[int, ...]:
        remat = REMATS.index(plan.config.parallel.remat)
        return plan.mesh["tensor"], plan.mesh["fsdp"], remat

    def seconds(plan: Plan) -> float:
        return plan.estimate.step if plan.estimate else 0.0

    plans = sorted(plans, key=simplicity)
    left = [plan for plan in plans if plan.fits]
    while left:
        limit = min(map(seconds, left)) / TIE_RATIO
        best = next(p for p in left if simplicity(p) == (1, 1, 0) or seconds(p) <= limit)
        left.remove(best)
        yield best
    too_large = [plan for plan in plans if not plan.fits]
    yield from sorted(too_large, key=lambda plan: (not plan.is_compiled, plan.memory.total))


def train_options(plan: Plan, given: Config) -> str:
    """Return the options that change `given`, the settings of a command, to the layout's."""
    parallel, n = plan.config.parallel, plan.config.train.gradient_accumulation_steps
    words = [f"--mesh {plan.mesh}"]
    for key in ("sequence_parallel", "remat"):
        if getattr(parallel, key) != getattr(given.parallel, key):
            words.append(f"parallel.{key}={getattr(parallel, key)}")
    if n != given.train.gradient_accumulation_steps:
        words.append(f"train.gradient_accumulation_steps={n}")
    if parallel.reduce_every != given.parallel.reduce_every:
        words.append(f"parallel.reduce_every={parallel.reduce_every}")
    return " ".join(words)


def reason(plan: Plan) -> str:
    """Return a one-line explanation of a layout: what it splits, or why it does not fit."""
    mesh, parallel = plan.mesh, plan.config.parallel
    data, fsdp, tensor = mesh["data"], mesh["fsdp"], mesh["tensor"]
    if not plan.fits:
        return (
            f"{'even with remat=full, it' if plan.is_compiled else 'its state alone'} does not fit"
        )
    words = []
    if fsdp * tensor == 1:
        words.append("the whole state fits on one device")
    if tensor > 1:
        words.append(f"every layer is split over {tensor} devices of one host")
    if fsdp > 1:
        where = count(plan.hosts_spanned(["fsdp"]), "host")
        words.append(f"ZeRO-{parallel.zero_stage} over {fsdp} devices on {where}")
    if data > 1:
        words.append(f"only gradients are sent over data={data}")
    if parallel.remat != "none":
        words.append(f"activations need remat={parallel.remat}")
    return "; ".join(words)
