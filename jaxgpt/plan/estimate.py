"""Formulas for the memory that a step needs and the bytes that it moves. Nothing is compiled.

`--advise` uses these formulas to choose which layouts to compile. Evaluating them takes less than a
millisecond.
"""

import operator

import jax

from jaxgpt.config import Config, MeshShape, axes_with
from jaxgpt.models.layers import padded_vocab_size
from jaxgpt.models.weights import layer_matrices, weights
from jaxgpt.perf.memory import FLOAT32
from jaxgpt.plan.program import Memory
from jaxgpt.plan.traffic import BYTES, local_parameters, step_work
from jaxgpt.train.sharded_model import layer_groups

SCORE_COPIES = 3  # number of float32 copies of the scores, if the kernel stores them


def estimate_memory(
    config: Config, mesh: MeshShape, n_moments: tuple[int, int], stores_scores: bool
) -> Memory:
    """Return an estimate of a step's memory on each device.

    `mesh` must fit `config`; see `mesh_shape`. Unlike `state_memory`, this does not set `in_host`
    to 0 on CPUs.

    Args:
        n_moments: number of moments per parameter, in the layers and outside them.
        stores_scores: whether the attention kernel keeps T x T scores.
    """
    parallel, model, zero = config.parallel, config.model, config.parallel.zero_stage
    parameters, work = local_parameters(model, mesh), step_work(config, mesh)
    shards, over = mesh.split_of("shards_parameters"), axes_with("shards_parameters")
    each_whole = [p.size for p in parameters]
    each_sharded = [p.size // (shards if p.axes.intersection(over) else 1) for p in parameters]
    whole, sharded = sum(each_whole), sum(each_sharded)
    moments = [n_moments[0] if p.layers else n_moments[1] for p in parameters]
    of_moments = each_sharded if zero >= 1 else each_whole
    in_layers = sum(p.size for p in parameters if p.layers)
    n_layers = max(p.layers for p in parameters)
    is_away, n = parallel.offload == "state", config.train.gradient_accumulation_steps
    shards_gradients = zero >= 1 if is_away else zero >= 2 and not config.reduces_once
    sets = 2 if is_away and n > 1 else 1  # the old and the new accumulators
    at_rest = {
        "parameters": FLOAT32 * (sharded if zero >= 3 else whole),
        "gradients": sets * FLOAT32 * (sharded if shards_gradients else whole),
        "moments": FLOAT32 * sum(map(operator.mul, moments, of_moments)),
    }
    away = {"none": 0, "moments": at_rest["moments"], "state": sum(at_rest.values())}
    in_host = away[parallel.offload]

    width, tensor = BYTES[config.train.dtype], mesh.split_of("splits_heads")
    saved, working = layer_activations(config, mesh, work.tokens, stores_scores)
    table = padded_vocab_size(model.vocab_size) * model.n_embd // tensor
    chunk = min(work.tokens, config.train.loss_chunk) or work.tokens
    logits = 2 * FLOAT32 * chunk * padded_vocab_size(model.vocab_size) // tensor
    if work.ticks:
        groups = layer_groups(config, mesh)
        M, S, v = n, groups.n_stages, groups.n_repeats
        waiting = max(M, S) - S if v > 1 else 0
        split = tensor if parallel.sequence_parallel else 1
        boundary = work.tokens * model.n_embd * width // split
        copies = 1 if groups.is_contiguous else 2
        other = (work.ticks + M + waiting) * boundary
        other += (width + copies * FLOAT32) * whole
        other += max(logits, max(groups.sizes) * saved + working)  # the head runs after all ticks
    else:
        layer = in_layers // n_layers
        other = n_layers * saved + working + logits + 2 * (width + FLOAT32) * layer
        if n > 1 and not is_away:  # the gradients of one microbatch
            other += at_rest["gradients"]
    return Memory(
        **at_rest,
        activations_and_temporaries=other + (width + FLOAT32) * table,
        in_host=in_host,
        host_at_once=2 * in_host // n_layers,
    )


def layer_activations(
    config: Config, mesh: MeshShape, tokens: int, stores_scores: bool
) -> tuple[int, int]:
    """Return the size of a layer's saved activations, and the backward pass's working memory.

    Both are in bytes per device, for a microbatch with `tokens` tokens on each device. Both depend
    on parallel.remat. The working memory includes recomputed activations. Without remat, stored
    scores or sequence parallelism, the saved size is close to equation 2 of arXiv 2205.05198 for
    GPT-2 in bfloat16 without dropout. Only sequence parallelism splits norms and residuals over
    `tensor`.
    """
    model, remat = config.model, config.parallel.remat
    width, tensor = BYTES[config.train.dtype], mesh.split_of("splits_heads")
    has_parts = config.parallel.sequence_parallel
    residual = width * tokens * model.n_embd // (tensor if has_parts else 1)
    per_head = width * tokens * model.head_size
    queries = per_head * model.n_head // tensor
    keys = 2 * per_head * max(1, model.kv_heads // tensor)
    hidden = width * tokens * model.mlp_width // tensor
    mlp_inputs = hidden * (2 if model.has_gated_mlp else 1)
    scores = 0
    if stores_scores:  # each query has a score for every position
        scores = SCORE_COPIES * FLOAT32 * tokens * (model.n_head // tensor) * model.block_size
    everything = (3 if has_parts else 4) * residual + 3 * queries + keys + hidden + mlp_inputs
    kept = {
        "none": everything + scores,
        "attention": everything,
        "dots": 2 * residual + queries + keys + mlp_inputs,
        "full": residual,
    }
    again = 0 if remat == "none" else everything + scores
    return kept[remat], again + 8 * residual + 4 * (hidden + mlp_inputs)


def memory_traffic(config: Config, mesh: MeshShape) -> int:
    """Return the bytes that a GPU reads and writes in the forward and backward passes of a step.

    The formula assumes that elementwise operations are fused with each other, but not with matmuls.
    It does not include recomputed layers, attention scores or the optimizer update. `mesh` must fit
    `config`; see `mesh_shape`.
    """
    model, D = config.model, config.model.n_embd
    width, tensor = BYTES[config.train.dtype], mesh.split_of("splits_heads")
    matrices = layer_matrices(model)
    other_dims = sum(w.size // w.n_layers // D for w in matrices)
    # Each matmul reads its input and its output's gradient twice, and writes its output and its
    # input's gradient once. One of the matrix's two dims is D, which `tensor` does not split.
    matmuls = 3 * (D * len(matrices) + other_dims // tensor)
    # Two pairs of a norm and a residual addition: 5 accesses per pair in the forward pass, and 7 in
    # the backward pass.
    norms = 24 * D // (tensor if config.parallel.sequence_parallel else 1)
    # GELU: 2 accesses in the forward pass, and 3 in the backward pass. A gated MLP: 3 and 5.
    activation = (8 if model.has_gated_mlp else 5) * model.mlp_width // tensor
    # Attention: the forward pass accesses queries, keys, values and outputs once. The backward pass
    # accesses each of them and its gradient once.
    heads = 6 * model.head_size * (model.n_head + model.kv_heads) // tensor
    # Logits: 3 accesses by matmuls, 1 for the sum of exponentials, and 2 for the gradient.
    logits = 6 * padded_vocab_size(model.vocab_size) // tensor
    per_token = model.n_layer * (matmuls + norms + activation + heads) + logits
    stages = mesh.split_of("splits_layers")
    n_microbatches = config.train.gradient_accumulation_steps
    tokens = step_work(config, mesh).tokens * n_microbatches
    # Each microbatch reads the weights, writes a copy in train.dtype, reads the copy twice, and
    # writes the gradients.
    n_weights = sum(w.size for w in jax.tree.leaves(weights(model))) // (tensor * stages)
    of_weights = n_microbatches * n_weights * (3 * width + 2 * FLOAT32)
    return width * per_token * tokens // stages + of_weights
