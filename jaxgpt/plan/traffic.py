"""Communication of one step, computed from formulas in papers, without compiling.

Sources: ZeRO (arXiv 1910.02054), Megatron-LM (1909.08053), sequence parallelism (2205.05198),
pipeline parallelism (2104.04473), Ulysses (2309.14509) and ring attention (2310.01889). Tests
compare the results with compiled programs.
"""

import functools
import math
from dataclasses import dataclass

import jax

from jaxgpt.config import Config, MeshShape, ModelConfig, axes_with
from jaxgpt.models.weights import Weight, layer_matrices, weights
from jaxgpt.parallel.context import choose_implementation
from jaxgpt.parallel.sharding import fully_sharded_rules, has_partial_gradient, partition_spec
from jaxgpt.perf.collectives import Collective
from jaxgpt.perf.memory import FLOAT32
from jaxgpt.train.sharded_model import layer_groups

BYTES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Traffic(Collective):
    """Collectives of one kind, over the same mesh axes, for one purpose."""

    purpose: str


@dataclass(frozen=True)
class Parameter:
    """One device's part of a parameter array, stacked over this device's layers.

    `size` is the number of elements before sharding over `fsdp`.
    """

    layers: int  # layers per device, rounded down; 0 if the weight is not part of a layer
    size: int
    axes: frozenset[str]  # mesh axes that shard the array if the ZeRO stage shards parameters
    is_gathered_in_dtype: bool  # ZeRO-3 gathers it in the compute dtype, not in float32
    has_partial_gradient: bool  # see `sharding.has_partial_gradient`


def local_parameters(model: ModelConfig, mesh: MeshShape) -> tuple[Parameter, ...]:
    """Return the parameters of one device."""
    roles = ("splits_layers", "shards_parameters", "splits_heads")
    return _local_parameters(model, *map(mesh.split_of, roles))


@functools.cache
def _local_parameters(
    model: ModelConfig, stage: int, fsdp: int, tensor: int
) -> tuple[Parameter, ...]:
    mesh = MeshShape(stage=stage, fsdp=fsdp, tensor=tensor)

    def describe(weight: Weight) -> Parameter:
        spec = partition_spec(weight.axes, weight.shape, fully_sharded_rules(), mesh)
        axes = frozenset(jax.tree.leaves(tuple(spec)))
        holders = stage if axes.intersection(axes_with("splits_layers")) else 1
        parts = math.prod(mesh[axis] for axis in axes.difference(axes_with("shards_parameters")))
        return Parameter(
            layers=weight.n_layers // holders,
            size=weight.size // parts,
            axes=axes,
            is_gathered_in_dtype=weight.gather_dtype is None,
            has_partial_gradient=has_partial_gradient(weight.axes, spec),
        )

    return tuple(describe(weight) for weight in jax.tree.leaves(weights(model)))


@dataclass(frozen=True)
class StepWork:
    """Number of times that a device runs each part of the network in a step."""

    tokens: int  # tokens of a microbatch on one device; all other fields count executions
    heads: int  # the output layer and the loss
    embeddings: int  # the forward pass of the embedding
    layers: int  # the forward pass of one layer, without recomputation
    layers_again: int  # the recomputation of layers in a pipeline
    ticks: int  # the transfer of activations to the next stage; 0 without a pipeline


def step_work(config: Config, mesh: MeshShape) -> StepWork:
    """Return the work of each device in a step. `mesh` must fit `config`; see `mesh_shape`."""
    n, stages = config.train.gradient_accumulation_steps, mesh.split_of("splits_layers")
    rows = config.microbatch_size // mesh.split_of("splits_batch")
    tokens = rows * config.model.block_size // mesh.split_of("splits_sequence")
    if stages == 1:
        return StepWork(tokens, n, n, n * config.model.n_layer, 0, 0)
    groups = layer_groups(config, mesh)
    ticks = groups.n_repeats * n + stages - 1
    layers = ticks * max(groups.sizes)
    return StepWork(tokens, -(-n // stages), 2 * ticks, layers, layers, ticks)


def expected_traffic(
    config: Config, mesh: MeshShape, devices_per_host: int | None = None
) -> tuple[Traffic, ...]:
    """Return the communication of one step, with bytes per device as in `Collective`.

    The formulas leave out the communication in Muon and Adafactor updates and for
    train.layers_every, and some small arrays, such as positions. Savings of ring attention from
    sliding windows are ignored. In a pipeline with sequence parallelism, XLA may drop one
    reduce-scatter per tick if each stage has one layer or the layers are not scanned.

    `mesh` must fit `config`; see `mesh_shape`. See `choose_implementation` for `devices_per_host`.
    """
    parameters = local_parameters(config.model, mesh)
    work = step_work(config, mesh)
    found = (
        *_weights(config, mesh, parameters),
        *_gradients(config, mesh, parameters),
        *_tensor_parallelism(config, mesh, work),
        *_pipeline(config, mesh, parameters, work),
        *_context_parallelism(config, mesh, work, devices_per_host),
        *_loss_and_norm(config, mesh, parameters, work),
    )
    return tuple(traffic for traffic in found if traffic.bytes)


def _weights(config: Config, mesh: MeshShape, parameters: tuple[Parameter, ...]) -> list[Traffic]:
    """Return the all-gathers of parameters.

    For each microbatch, ZeRO-3 (arXiv 1910.02054, section 7.2.2) gathers each layer twice (for the
    forward and the backward pass) and the embeddings once. A pipeline gathers everything once per
    step. ZeRO-1 and 2 (section 7.2.1) gather the updated parameters.
    """
    stage, n = config.parallel.zero_stage, config.train.gradient_accumulation_steps
    axes = axes_with("shards_parameters")
    sharded = [p for p in parameters if p.axes.intersection(axes)]
    if stage == 0:
        return []
    if stage < 3:
        size = sum(p.size for p in sharded) * FLOAT32
        return [Traffic("all-gather", axes, len(sharded), size, "updated parameters")]
    in_pipeline = mesh.split_of("splits_layers") > 1

    def gathers(purpose: str, which: list[Parameter], times: int) -> Traffic:
        dtypes = (config.train.dtype if p.is_gathered_in_dtype else "float32" for p in which)
        size = sum(p.size * BYTES[dtype] for p, dtype in zip(which, dtypes, strict=True))
        count = sum(1 if in_pipeline else max(1, p.layers) for p in which)
        return Traffic("all-gather", axes, times * count, times * size, purpose)

    layers = [p for p in sharded if p.layers]
    outside = [p for p in sharded if not p.layers]
    if in_pipeline:
        return [gathers("weights", sharded, 1)]
    return [
        gathers("weights, forward", layers, n),
        gathers("weights, backward", layers, n),
        gathers("embeddings", outside, n),
    ]


def _gradients(config: Config, mesh: MeshShape, parameters: tuple[Parameter, ...]) -> list[Traffic]:
    """Return the traffic for reducing gradients.

    Data parallelism all-reduces gradients. ZeRO reduce-scatters them over `fsdp`, and all-reduces
    the shards over the other axes. The gradient of a weight that `tensor` does not split is also
    all-reduced over `tensor` if sequence parallelism is used or each rank's gradient is partial.
    Pipeline stages all-reduce the gradients of weights that they do not split. With
    parallel.offload=state, each microbatch reduces all gradients, one layer at a time.
    """
    parallel, n = config.parallel, config.train.gradient_accumulation_steps
    is_away = parallel.offload == "state"
    width = BYTES[parallel.grad_reduce_dtype]
    fsdp, tensor = axes_with("shards_parameters"), axes_with("splits_heads")
    per_microbatch = is_away or (parallel.zero_stage >= 2 and not config.reduces_once)
    out = []
    for p in parameters:
        rest, axes = p.size, {a for a in axes_with("reduces_gradients") if mesh[a] > 1}
        if p.axes.intersection(fsdp) and parallel.zero_stage >= 1:
            times = n if per_microbatch else 1
            count = times * (max(1, p.layers) if per_microbatch else 1)
            out.append(Traffic("reduce-scatter", fsdp, count, times * p.size * width, "gradients"))
            rest //= mesh.split_of("shards_parameters")
            axes.difference_update(fsdp)
        is_partial = parallel.sequence_parallel or p.has_partial_gradient
        if mesh.split_of("splits_heads") > 1 and not p.axes.intersection(tensor) and is_partial:
            axes.update(tensor)
        stage = axes_with("splits_layers")
        if mesh.split_of("splits_layers") > 1 and not p.axes.intersection(stage):
            axes.update(stage)
        if axes:
            ordered = tuple(axis for axis in mesh if axis in axes)
            times = n if is_away else 1
            count = times * (max(1, p.layers) if is_away else 1)
            out.append(Traffic("all-reduce", ordered, count, times * rest * width, "gradients"))
    return out


def _tensor_parallelism(config: Config, mesh: MeshShape, work: StepWork) -> list[Traffic]:
    """Return the traffic of tensor and sequence parallelism (arXiv 1909.08053 and 2205.05198).

    Each pass has two all-reduces per layer. The forward pass has one more for the embedding, and
    the backward pass has one more for the output layer. With sequence parallelism, a reduce-scatter
    and an all-gather replace each all-reduce, and the backward pass repeats the all-gathers of the
    forward pass (section 4.2.2). Without it, see `ParallelContext.keep_replicated` for position
    embeddings.
    """
    axes = axes_with("splits_heads")
    if mesh.split_of("splits_heads") == 1:
        return []
    size = work.tokens * config.model.n_embd * BYTES[config.train.dtype]
    regions = len([w for w in layer_matrices(config.model) if w.axes[-1] == "embed"])  # per layer
    forward = work.layers + work.layers_again
    # A recomputed layer repeats its reductions, but only a following norm needs the last one.
    repeated = regions if config.model.post_norm else regions - 1
    again = repeated if config.parallel.remat == "full" else 0

    def times(purpose: str, kind: str, n: int) -> Traffic:
        return Traffic(kind, axes, n, n * size, f"activations, {purpose}")

    embeddings = work.ticks or work.embeddings  # in the backward pass
    if not config.parallel.sequence_parallel:
        table = 0
        if config.data.document_mask and config.model.position == "learned":
            table = FLOAT32 * config.model.block_size * config.model.n_embd
        return [
            Traffic("all-reduce", axes, embeddings, embeddings * table, "position embeddings"),
            times("forward", "all-reduce", forward * regions + work.embeddings),
            times("backward", "all-reduce", work.layers * regions + work.heads),
            times("computed again", "all-reduce", work.layers * again),
        ]
    return [
        times("forward", "all-gather", forward * regions + work.heads),
        times("forward", "reduce-scatter", forward * regions + work.embeddings),
        times("backward", "all-gather", work.layers * regions + embeddings),
        times("backward", "reduce-scatter", work.layers * regions + work.heads),
        times("gathered again", "all-gather", work.layers * regions),
        times("computed again", "reduce-scatter", work.layers * again),
    ]


def _pipeline(
    config: Config, mesh: MeshShape, parameters: tuple[Parameter, ...], work: StepWork
) -> list[Traffic]:
    """Return the traffic between the stages of a pipeline (arXiv 2104.04473, section 2.2).

    Activations move to the next stage in each tick, and their gradients move back. The outputs of
    the last stage are scattered, and their gradients are gathered. If stages run layers that other
    stages store, they exchange weights and gradients: once if each stage stores a slice of all
    layers, and twice if it stores whole layers. In the last exchange, the layers of all groups are
    padded to those of the largest group.
    """
    axes = axes_with("splits_layers")
    if not work.ticks:
        return []
    parts = mesh.split_of("splits_heads") if config.parallel.sequence_parallel else 1
    size = work.tokens * config.model.n_embd * BYTES[config.train.dtype] // parts
    outputs = work.heads * mesh.split_of("splits_layers") * size
    out = [
        Traffic("collective-permute", axes, 2 * work.ticks, 2 * work.ticks * size, "activations"),
        Traffic("reduce-scatter", axes, 1, outputs, "outputs"),
        Traffic("all-gather", axes, 1, outputs, "outputs, backward"),
    ]
    groups, L = layer_groups(config, mesh), config.model.n_layer
    if not groups.is_contiguous:
        layers = [p for p in parameters if p.layers and p.axes.intersection(axes)]
        dtypes = (config.train.dtype if p.is_gathered_in_dtype else "float32" for p in layers)
        widths = (BYTES[dtype] + FLOAT32 for dtype in dtypes)
        size = sum(p.size * width for p, width in zip(layers, widths, strict=True))
        is_whole = L % groups.n_stages == 0  # whether each stage stores whole layers
        count = (4 if is_whole else 2) * len(layers)
        size = is_whole * size + size * groups.layers.size // L
        out.append(Traffic("all-to-all", axes, count, size, "weights and gradients"))
    return out


def _context_parallelism(
    config: Config, mesh: MeshShape, work: StepWork, devices_per_host: int | None
) -> list[Traffic]:
    """Return the traffic of context parallelism.

    Ulysses exchanges queries, keys, values and outputs (arXiv 2309.14509, section 3.2). Ring
    attention rotates keys and values in both passes (arXiv 2310.01889, section 3). The backward
    pass also rotates their float32 gradients. Savings from windows shorter than half a row are
    ignored.
    """
    axes, n = axes_with("splits_sequence"), mesh.split_of("splits_sequence")
    if n == 1:
        return []
    model, width = config.model, BYTES[config.train.dtype]
    tensor = mesh.split_of("splits_heads")
    H, G = model.n_head // tensor, model.kv_heads
    G = G // tensor if G % tensor == 0 else H
    per_head = work.tokens * model.head_size
    is_recomputed = config.parallel.remat in ("dots", "full")
    forward = work.layers + work.layers_again + is_recomputed * work.layers
    if choose_implementation(config, mesh, devices_per_host)[0] == "ring":
        kv, d_kv = 2 * per_head * G * width, 2 * per_head * G * FLOAT32
        moves = (n - 1) * (forward + work.layers)
        back = (n - 1) * work.layers
        return [
            Traffic("collective-permute", axes, moves, moves * kv, "keys and values"),
            Traffic("collective-permute", axes, back, back * d_kv, "their gradients"),
        ]
    G *= n // math.gcd(G, n)  # key-value heads are repeated until n divides the number of heads
    count = 2 if G == H else 3
    runs = forward + work.layers
    size = runs * per_head * width * (2 * H + 2 * G)
    return [Traffic("all-to-all", axes, runs * count, size, "heads and tokens")]


def _loss_and_norm(
    config: Config, mesh: MeshShape, parameters: tuple[Parameter, ...], work: StepWork
) -> list[Traffic]:
    """Return the traffic for the loss and the gradient norm.

    If the vocabulary is split, devices communicate three numbers per token (arXiv 1909.08053,
    section 3): the largest logit, the sum of exponentials, and the target's logit.
    """
    out = []
    tensor = axes_with("splits_heads")
    if mesh.split_of("splits_heads") > 1:
        chunk = min(work.tokens, config.train.loss_chunk) or work.tokens
        chunks = -(-work.tokens // chunk)
        padded = chunks * -(-work.tokens // chunks)  # all chunks have the same size
        size = 3 * work.heads * padded * FLOAT32
        out.append(Traffic("all-reduce", tensor, 3 * work.heads * chunks, size, "loss"))
    batch_axes = tuple(a for a in axes_with("splits_batch", "splits_sequence") if mesh[a] > 1)
    if batch_axes:
        size = config.train.batch_size * FLOAT32  # the losses of all rows
        out.append(Traffic("all-reduce", batch_axes, 1, size, "loss"))
    for p in parameters:
        if config.parallel.zero_stage == 0:
            axes = p.axes.difference(axes_with("shards_parameters"))
        else:
            axes = p.axes
        count = max(1, p.layers) if config.parallel.offload == "state" else 1
        out += [
            Traffic("all-reduce", (axis,), count, count * FLOAT32, "norm of the gradient")
            for axis in mesh
            if axis in axes
        ]
    return out


def sum_traffic(found: tuple[Traffic, ...]) -> tuple[Collective, ...]:
    """Add up all traffic of the same kind over the same axes."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in found:
        count, size = sums.get((c.kind, c.axes), (0, 0))
        sums[c.kind, c.axes] = count + c.count, size + c.bytes
    return tuple(Collective(*key, *sizes) for key, sizes in sums.items())
