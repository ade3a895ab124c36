"""Expected communication of a step, from the papers on ZeRO, Megatron-LM and sequence parallelism.

This is independent of compiled programs; `test_theory` compares the two.
"""

from dataclasses import dataclass

import jax

from jaxgpt.config import Config, MeshShape, axes_with
from jaxgpt.models.weights import Weight, layer_matrices, weights
from jaxgpt.parallel.sharding import fully_sharded_rules, partition_spec

FLOAT32 = 4  # bytes
FSDP, TENSOR = "fsdp", "tensor"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Traffic:
    """Communication of one part of a strategy in a step; fields as in `Collective`."""

    purpose: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


def sum_by_kind_and_axes(found):
    """Sum traffic to {(kind, axes): (count, bytes)}, in theory or as compiled."""
    out = {}
    for c in found:
        count, size = out.get((c.kind, c.axes), (0, 0))
        out[c.kind, c.axes] = count + c.count, size + c.bytes
    return out


@dataclass(frozen=True)
class _Parameter:
    """One array of parameters, stacked over layers or not."""

    layers: int
    """How many layers are stacked in it; 0 for one outside of the layers."""
    size: int
    """Elements on each device along `tensor`, before anything is split over `fsdp`."""
    over_tensor: bool
    over_fsdp: bool
    travels_in_dtype: bool
    is_vocabulary: bool


def expected_traffic(config: Config, mesh: MeshShape) -> tuple[Traffic, ...]:
    """Return all communication of one step.

    Args:
        config: with model.vocab_size set.
    """
    parameters = _parameters(config, mesh)
    found = (
        *_weights(config, mesh, parameters),
        *_gradients(config, mesh, parameters),
        *_activations(config, mesh),
        *_loss_and_norm(config, mesh, parameters),
    )
    return tuple(traffic for traffic in found if traffic.bytes)


def _parameters(config: Config, mesh: MeshShape) -> list[_Parameter]:
    def describe(weight: Weight) -> _Parameter:
        spec = partition_spec(weight.axes, weight.shape, fully_sharded_rules(), mesh)
        return _Parameter(
            layers=weight.n_layers,
            size=weight.size // (mesh[TENSOR] if TENSOR in spec else 1),
            over_tensor=TENSOR in spec,
            over_fsdp=FSDP in spec,
            travels_in_dtype=weight.gather_dtype is None,
            is_vocabulary="vocab" in weight.axes,
        )

    return [describe(weight) for weight in jax.tree.leaves(weights(config.model))]


def _weights(config: Config, mesh: MeshShape, parameters: list[_Parameter]) -> list[Traffic]:
    """Return the traffic of parameters on their way to the devices that compute with them.

    ZeRO-3 (arXiv 1910.02054, section 7.2.2) gathers a layer for its forward and once more for its
    backward pass; the two embeddings, which both ends of the network use, stay for both. ZeRO-1
    and 2 (section 7.2.1) gather what each device updated.
    """
    stage, parts = config.parallel.zero_stage, config.train.gradient_accumulation_steps
    over_fsdp = [p for p in parameters if p.over_fsdp]
    if stage == 0:
        return []
    if stage < 3:
        size = sum(p.size for p in over_fsdp) * FLOAT32
        return [Traffic("updated parameters", "all-gather", (FSDP,), len(over_fsdp), size)]

    def size(p: _Parameter) -> int:
        return p.size * (BYTES[config.train.dtype] if p.travels_in_dtype else FLOAT32)

    layers = [p for p in over_fsdp if p.layers]
    outside = [p for p in over_fsdp if not p.layers]
    count = parts * sum(p.layers for p in layers)
    bytes = parts * sum(map(size, layers))
    return [
        Traffic("weights, forward", "all-gather", (FSDP,), count, bytes),
        Traffic("weights, backward", "all-gather", (FSDP,), count, bytes),
        Traffic(
            "embeddings", "all-gather", (FSDP,),
            parts * len(outside), parts * sum(map(size, outside)),
        ),
    ]  # fmt: skip


def _gradients(config: Config, mesh: MeshShape, parameters: list[_Parameter]) -> list[Traffic]:
    """Return the traffic of gradients to the devices that update with them, reduced once a step.

    Data parallelism all-reduces them. ZeRO reduce-scatters them over `fsdp`, which with `data`
    leaves a part of each to all-reduce over that. With sequence parallelism the gradients of what
    each device along `tensor` has whole are sums over `tensor` as well; so are those of a
    vocabulary that `tensor` does not divide.
    """
    parallel, parts = config.parallel, config.train.gradient_accumulation_steps
    width = BYTES[parallel.grad_reduce_dtype]
    per_microbatch = parallel.zero_stage >= 2 and not config.reduces_once
    out = []
    for p in parameters:
        rest, axes = p.size, [a for a in axes_with("reduces_gradients") if mesh[a] > 1]
        if p.over_fsdp and parallel.zero_stage >= 1:
            times = parts if per_microbatch else 1
            count = times * (max(1, p.layers) if per_microbatch else 1)
            size = times * p.size * width
            out.append(Traffic("gradients", "reduce-scatter", (FSDP,), count, size))
            rest //= mesh[FSDP]
            axes.remove(FSDP)
        own_part = parallel.sequence_parallel or p.is_vocabulary
        if mesh[TENSOR] > 1 and not p.over_tensor and own_part:
            axes.append(TENSOR)
        if axes:
            out.append(Traffic("gradients", "all-reduce", tuple(axes), 1, rest * width))
    return out


def _activations(config: Config, mesh: MeshShape) -> list[Traffic]:
    """Return the traffic of Megatron-LM's f and g (arXiv 1909.08053), or of arXiv 2205.05198.

    Two all-reduces forward and two backward per layer, one each at the embedding and at the
    output layer. With sequence parallelism a reduce-scatter and an all-gather stand for each, and
    in the backward pass what was gathered is gathered again (section 4.2.2).
    """
    if mesh[TENSOR] == 1:
        return []
    L, parts = config.model.n_layer, config.train.gradient_accumulation_steps
    tokens = config.microbatch_size // mesh.split_of("splits_batch") * config.model.block_size
    size = tokens * config.model.n_embd * BYTES[config.train.dtype]
    matrices = layer_matrices(config.model)
    rows = L * len([w for w in matrices if w.axes[-1] == "embed"])  # a sum over devices each
    columns = L * len([w for w in matrices if w.axes[1] == "embed"])
    # A layer that is computed again needs its sums once more, but for the last.
    again = rows - L if config.parallel.remat == "full" else 0

    def times(purpose: str, kind: str, n: int) -> Traffic:
        return Traffic(purpose, kind, (TENSOR,), parts * n, parts * n * size)

    if not config.parallel.sequence_parallel:
        return [
            times("activations, forward", "all-reduce", rows + 1),
            times("activations, backward", "all-reduce", columns + 1),
            times("activations, computed again", "all-reduce", again),
        ]
    return [
        times("activations, forward", "all-gather", columns + 1),
        times("activations, forward", "reduce-scatter", rows + 1),
        times("activations, backward", "all-gather", rows + 1),
        times("activations, backward", "reduce-scatter", columns + 1),
        times("activations, gathered again", "all-gather", columns),
        times("activations, computed again", "reduce-scatter", again),
    ]


def _loss_and_norm(config: Config, mesh: MeshShape, parameters: list[_Parameter]) -> list[Traffic]:
    """Return the traffic behind the loss, the losses of rows, and the norm of the gradient.

    Of a vocabulary that is split: for each token the largest logit, the sum of exponentials and
    the target's logit (arXiv 1909.08053, section 3).
    """
    parts, out = config.train.gradient_accumulation_steps, []
    if mesh[TENSOR] > 1:
        rows = config.microbatch_size // mesh.split_of("splits_batch")
        tokens = rows * config.model.block_size
        chunk = min(tokens, config.train.loss_chunk) or tokens
        chunks = -(-tokens // chunk)
        padded = chunks * -(-tokens // chunks)  # all of one size
        size = 3 * parts * padded * FLOAT32
        out.append(Traffic("loss", "all-reduce", (TENSOR,), 3 * parts * chunks, size))
    batch_axes = tuple(a for a in axes_with("splits_batch") if mesh[a] > 1)
    if batch_axes:
        size = config.train.batch_size * FLOAT32  # the losses of all rows
        out.append(Traffic("loss", "all-reduce", batch_axes, 1, size))
    for p in parameters:
        over_fsdp = p.over_fsdp and config.parallel.zero_stage > 0
        for axis in (FSDP,) * over_fsdp + (TENSOR,) * p.over_tensor:
            out.append(Traffic("norm of the gradient", "all-reduce", (axis,), 1, FLOAT32))
    return out
