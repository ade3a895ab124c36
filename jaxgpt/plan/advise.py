"""Rank the meshes for a given number of devices."""

import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from jaxgpt.config import Config, MeshShape, UsageError, check_batch, mesh_shape
from jaxgpt.models.attention import KERNELS
from jaxgpt.models.layers import layer_pattern
from jaxgpt.optim.state import n_moments
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.units import count
from jaxgpt.plan.estimate import estimate_memory
from jaxgpt.plan.layout import Plan, plan_layout
from jaxgpt.plan.program import Program, attention_kernel, optimizer_flops, with_fewer_replicas
from jaxgpt.plan.traffic import expected_traffic, sum_traffic
from jaxgpt.runtime.devices import MAX_CPU_DEVICES

REMATS = ("none", "attention", "dots", "full")  # in order of decreasing memory
# The fastest layout ranks before a simpler layout only if it takes less than this fraction of the
# simpler layout's time.
TIE_RATIO = 0.96
COMPILED = 5  # number of layouts to compile
MIN_SLICE = 2048  # minimum number of tokens in a `context` slice of a row
# The search chooses these settings. They are printed in this order.
CHOSEN = (
    "parallel.sequence_parallel",
    "parallel.remat",
    "parallel.schedule",
    "parallel.stage_repeats",
    "train.gradient_accumulation_steps",
    "parallel.reduce_every",
)
_SPLITS = ("splits_layers", "splits_sequence", "splits_heads")  # roles of mesh axes


class Advice(NamedTuple):
    """The best layouts, and the number of meshes compared."""

    plans: list[Plan]  # best first; empty if none of the meshes works with the configuration
    n_meshes: int


def search_layouts(
    config: Config, n_devices: int, device: Device, devices_per_host: int, n: int = COMPILED
) -> Advice:
    """Return up to `n` of the best layouts for the model and the batch size.

    All `tensor` groups stay within a host. If `context` splits a row, each slice has at least
    `MIN_SLICE` tokens. Formulas (`estimate.py`) rank the meshes. For each mesh, the formulas select
    the fastest schedule and number of microbatches, using the least remat that fits. The best `n`
    layouts are then compiled and ranked again. If a compiled layout does not fit, it is compiled
    again with more remat. At most two meshes that differ only in `data` and `fsdp` are compiled.
    Layouts that fit come first. The next one is the simplest of the remaining layouts that are at
    most slightly slower (`TIE_RATIO`) than the fastest of them. If step times are unknown, simpler
    layouts come first. Among layouts that fit, pure data parallelism without remat always comes
    first. Layouts that do not fit are compared by memory. A layout whose state alone does not fit
    is not compiled and comes last.

    The mesh of `config` and the settings in `CHOSEN` are ignored. Progress is printed to stderr.
    JAX must simulate at least min(`n_devices`, `MAX_CPU_DEVICES`) devices. `devices_per_host` must
    divide `n_devices`, and config.model.vocab_size must be set.
    """
    estimator = Estimator(config, device, devices_per_host)
    found = []
    for mesh in _meshes(config, n_devices, devices_per_host):
        variants = [estimator.with_least_remat(mesh, v) for v in _variants(config, mesh)]
        if variants:
            found.append(min(variants, key=_order))
    best = [_compile(plan) for plan in itertools.islice(_different(_ranked(found)), n)]
    return Advice(list(_ranked(best)), len(found))


class Estimator:
    """Makes plans from formulas, without compiling.

    Raises `UsageError` if the attention kernel or the optimizer is unknown, or if the kernel cannot
    run with these settings on the device. The mesh must fit the configuration; see `mesh_shape`.
    """

    def __init__(self, config: Config, device: Device, devices_per_host: int):
        kernel, _ = attention_kernel(config, device)
        self.device, self.devices_per_host = device, devices_per_host
        self.stores_scores = KERNELS[kernel].stores_scores
        self.n_moments = (
            n_moments(config.optimizer),
            n_moments(config.optimizer, for_embedding=True),
        )

    def with_least_remat(self, mesh: MeshShape, config: Config) -> Plan:
        """Return the plan with the least remat among the plans that fit.

        If full remat does not fit, this returns the plan with full remat. `config.parallel.remat`
        is ignored.
        """
        smallest = self.plan(mesh, config.replace(parallel__remat=REMATS[-1]))
        if not smallest.fits:
            return smallest
        plans = (self.plan(mesh, config.replace(parallel__remat=remat)) for remat in REMATS[:-1])
        return next((plan for plan in plans if plan.fits), smallest)

    def plan(self, mesh: MeshShape, config: Config) -> Plan:
        """Return the plan for a layout.

        If the layout does not fit, the collectives and the optimizer's FLOPs are left out.
        """
        memory = estimate_memory(config, mesh, self.n_moments, self.stores_scores)
        program = Program(memory, stores_scores=self.stores_scores)
        plan = Plan(config, mesh, self.device, self.devices_per_host, program)
        if not plan.fits:
            return plan
        traffic = sum_traffic(expected_traffic(config, mesh, self.devices_per_host))
        program = dataclasses.replace(
            program, collectives=traffic, update_flops=optimizer_flops(config, mesh)
        )
        return dataclasses.replace(plan, program=program)


def _meshes(config: Config, n_devices: int, devices_per_host: int) -> Iterator[MeshShape]:
    """Yield the candidate meshes for `n_devices` devices, simplest first.

    `tensor` groups stay within a host, because every layer waits for their communication.
    """
    most = max(1, config.model.block_size // MIN_SLICE)
    for tensor in _divisors(devices_per_host):
        for context in _divisors(n_devices // tensor):
            if context > most:
                break
            for stage in _divisors(n_devices // tensor // context):
                replicas = n_devices // tensor // context // stage
                for fsdp in _divisors(replicas):
                    if config.model.n_embd % fsdp or config.train.batch_size % replicas:
                        continue
                    inner = {"context": context, "tensor": tensor}
                    mesh = MeshShape(replicas // fsdp, fsdp, stage=stage, **inner)
                    if with_fewer_replicas(config, mesh)[1].n_devices <= MAX_CPU_DEVICES:
                        yield mesh


def _variants(config: Config, mesh: MeshShape) -> Iterator[Config]:
    """Yield a config for each valid combination of schedule and gradient accumulation settings.

    Simpler configs come first.
    """
    T, tensor = config.model.block_size, mesh.split_of("splits_heads")
    config = config.replace(
        parallel__mesh=str(mesh),
        parallel__sequence_parallel=tensor > 1
        and T % mesh.split_of("splits_heads", "splits_sequence") == 0,
    )
    n_stages = mesh.split_of("splits_layers")
    patterns = config.model.n_layer // len(layer_pattern(config.model))
    is_even = n_stages > 1 and patterns % n_stages == 0
    shards = mesh.split_of("shards_parameters") > 1 and config.parallel.zero_stage >= 2
    for n in _divisors(config.train.batch_size // mesh.split_of("splits_batch")):
        for repeats in _divisors(patterns // n_stages) if is_even else (1,):
            for reduce_every in ("step", "microbatch")[: 1 + (n > 1 and shards and n_stages == 1)]:
                layout = config.replace(
                    parallel__schedule="circular" if repeats > 1 else "gpipe",
                    parallel__stage_repeats=repeats,
                    parallel__reduce_every=reduce_every,
                    train__gradient_accumulation_steps=n,
                )
                if _is_possible(layout, mesh):
                    yield layout


def _is_possible(config: Config, mesh: MeshShape) -> bool:
    try:
        check_batch(config, mesh_shape(config))
    except UsageError:
        return False
    return True


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def _compile(estimated: Plan) -> Plan:
    """Compile a layout, increasing remat until the layout fits or remat is full.

    If the state alone does not fit, nothing is compiled.
    """
    memory = dataclasses.replace(estimated.memory, activations_and_temporaries=0)
    plan = dataclasses.replace(estimated, program=Program(memory))
    if not plan.fits:
        return plan
    first = REMATS.index(estimated.config.parallel.remat)
    for remat in REMATS[first:]:
        if remat == "attention" and not estimated.program.stores_scores:
            continue
        config = estimated.config.replace(parallel__remat=remat)
        print(f"compiling for mesh {plan.mesh} with remat={remat}", file=sys.stderr)
        plan = plan_layout(config, plan.mesh, plan.device, plan.devices_per_host)
        if plan.fits:
            break
    return plan


def _different(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield at most two plans from each set whose meshes differ only in `data` and `fsdp`."""
    seen: Counter[tuple[int, ...]] = Counter()
    for plan in plans:
        others = tuple(plan.mesh.split_of(role) for role in _SPLITS)
        seen[others] += 1
        if seen[others] <= 2:
            yield plan


def _seconds(plan: Plan) -> float:
    return plan.estimate.step if plan.estimate else 0.0


def _order(plan: Plan) -> tuple[bool, float]:
    """Sort key that puts layouts that fit first (by step time), then the others (by memory)."""
    return not plan.fits, _seconds(plan) if plan.fits else plan.memory.total


def is_simplest(plan: Plan) -> bool:
    """Return whether a layout is pure data parallelism without remat."""
    return plan.mesh.splits_only_batch and plan.config.parallel.remat == "none"


def _ranked(plans: Iterable[Plan]) -> Iterator[Plan]:
    def simplicity(plan: Plan) -> tuple[int, ...]:
        parallel = plan.config.parallel
        sizes = (plan.mesh.split_of(role) for role in (*_SPLITS, "shards_parameters"))
        return *sizes, REMATS.index(parallel.remat), parallel.stage_repeats

    plans = sorted(plans, key=simplicity)
    left = [plan for plan in plans if plan.fits]
    while left:
        limit = min(map(_seconds, left)) / TIE_RATIO
        best = next(p for p in left if is_simplest(p) or _seconds(p) <= limit)
        left.remove(best)
        yield best
    too_large = [plan for plan in plans if not plan.fits]
    yield from sorted(too_large, key=lambda plan: (not plan.is_complete, plan.memory.total))


def train_options(plan: Plan, given: Config, always: Collection[str] = ()) -> str:
    """Return the command-line options that select this layout if they are added to `given`.

    The options are --mesh, and the settings in `CHOSEN` that differ from `given` or are listed in
    `always`. All other settings of `plan.config` must be the same as in `given`.
    """
    words = [f"--mesh {plan.mesh}"]
    for key in CHOSEN:
        section, _, name = key.partition(".")
        value = getattr(getattr(plan.config, section), name)
        if key in always or value != getattr(getattr(given, section), name):
            words.append(f"{key}={value}")
    return " ".join(words)


def reason(plan: Plan) -> str:
    """Return a one-line explanation of a layout: what it splits, or why it does not fit.

    `plan` is one of the plans that `search_layouts` returns.
    """
    mesh, parallel = plan.mesh, plan.config.parallel
    stage, context, tensor = (mesh[axis] for axis in ("stage", "context", "tensor"))
    data, fsdp = mesh["data"], mesh["fsdp"]
    if not plan.fits:
        return (
            f"{'even with remat=full, it' if plan.is_complete else 'its state alone'} does not fit"
        )
    words = []
    if fsdp * tensor * stage == 1:
        words.append("the whole state fits on one device")
    if stage > 1:
        times = f" in {parallel.stage_repeats} repeats" if parallel.stage_repeats > 1 else ""
        words.append(f"the layers are split over {stage} stages{times}")
    if tensor > 1:
        words.append(f"every layer is split over {tensor} devices of one host")
    if context > 1:
        words.append(f"every row is split over {context} devices")
    if fsdp > 1:
        where = count(plan.hosts_spanned(["fsdp"]), "host")
        words.append(f"ZeRO-{parallel.zero_stage} over {fsdp} devices on {where}")
    if data > 1:
        words.append(f"only gradients are sent over data={data}")
    if parallel.remat != "none":
        words.append(f"activations need remat={parallel.remat}")
    return "; ".join(words)
