"""Compare two ways to write a parallel step: `python tests/parallel/forms.py [h100]`.

Written: `jax.shard_map` with collectives, as in `jaxgpt.parallel`. Plain: `jax.jit`, shardings of
the state from the same rule table, and constraints on activations and weights where the table
changes; XLA's partitioner writes the collectives. Both share the layers and differ in the context
that these are given. The table goes to jaxgpt/parallel/DETAILS.md.

`h100` compiles for eight H100 ahead of time: no GPU is needed, but pip install 'jax[cuda12]', and
JAX_PLATFORMS=cpu in the environment.
"""

import dataclasses
import functools
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxgpt.config import load_config, mesh_shape
from jaxgpt.data.batch import make_batch
from jaxgpt.models import transformer
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.models.weights import weights as model_weights
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.optim.update import clip_by_norm, gate_by_where
from jaxgpt.parallel import sharding
from jaxgpt.parallel.schedule import merge_microbatches, run_all_blocks, split_microbatches
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.perf.collectives import read_collectives
from jaxgpt.train.jitted import make_steps, step_options, training_batch
from jaxgpt.train.state import init_state, optimizer_of, state_shapes
from jaxgpt.train.step import weighted_mean

LAYOUTS = {
    "ZeRO-0": ("--mesh", "2,4,1", "parallel.zero_stage=0"),
    "ZeRO-1": ("--mesh", "2,4,1", "parallel.zero_stage=1"),
    "ZeRO-2": ("--mesh", "2,4,1", "parallel.zero_stage=2"),
    "ZeRO-3": ("--mesh", "2,4,1"),
    "tensor 2, ZeRO-3": ("--mesh", "2,2,2"),
    "tensor 4": ("--mesh", "2,1,4"),
    "tensor 4, sequence parallel": ("--mesh", "2,1,4", "parallel.sequence_parallel=True"),
    "4 microbatches, reduce_every=step": (
        "--mesh", "2,4,1", "parallel.zero_stage=2", "train.gradient_accumulation_steps=4",
    ),
    "4 microbatches, reduce_every=microbatch": (
        "--mesh", "2,4,1", "train.gradient_accumulation_steps=4",
        "parallel.reduce_every=microbatch",
    ),
    "tensor 2, remat=full": ("--mesh", "2,2,2", "parallel.remat=full"),
}  # fmt: skip
SMALL = ("tiny", "model.vocab_size=256", "train.batch_size=32", "spike.action=off")
LARGE = (
    "gpt2", "model.n_layer=4", "model.vocab_size=50257", "model.attention=xla",
    "train.batch_size=64", "train.gradient_accumulation_steps=1", "train.loss_chunk=0",
    "parallel.scan_layers=False", "spike.action=off",
)  # fmt: skip
# XLA's description of the device, as its tests have it (xla/backends/gpu, H100 80GB HBM3).
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } runtime_version: "12.9.0" registers_per_core_limit: 65536
registers_per_block_limit: 65536 } platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3" """


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class Placed:
    """A weight, and where it lies while it is used: whole over fsdp."""

    array: jax.Array
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintContext(ParallelContext):
    """What layers are given in the plain form: no collective, constraints only."""

    mesh: Mesh
    batch: tuple[str, ...] | None
    sequence: str | None
    dtype: jnp.dtype

    def constrain(self, x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def param(self, stored):
        array = stored.array if stored.array.ndim == 1 else stored.array.astype(self.dtype)
        return self.constrain(array, *stored.spec)

    def column_parallel_matmuls(self, x, kernels, n, splits):
        x = self.copy_to_tensor_region(x)

        def product(kernel, split):
            y = self.constrain(
                jnp.tensordot(x, self.param(kernel), n), self.batch, None, *kernel.spec[n:]
            )
            return tuple(jnp.unstack(y, axis=x.ndim - n)) if split else (y,)

        return tuple(map(product, kernels, splits))

    def row_parallel_matmul(self, x, kernel, n):
        return self.reduce_from_tensor_region(jnp.tensordot(x, self.param(kernel), n))

    def copy_to_tensor_region(self, x_BTD):
        return self.constrain(x_BTD, self.batch, None, None)

    def reduce_from_tensor_region(self, x_BTD):
        return self.constrain(x_BTD, self.batch, self.sequence, None)


def make_plain_step(config, mesh, options):
    """Return the plain step: ((params, opt_state), step, rows) -> (the same, (loss, norm))."""
    model, train, stage = config.model, config.train, config.parallel.zero_stage
    described = model_weights(model)

    def placed(rules):
        return sharding.weight_shardings(described, rules, mesh)

    summed_at = placed(sharding.gradient_rules(stage, config.reduces_once))
    used = jax.tree.map(lambda s: s.spec, placed(sharding.parameter_rules(0)))
    used["layers"] = jax.tree.map(lambda s: PartitionSpec(*s[1:]), used["layers"])
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    context = ConstraintContext(
        mesh=mesh,
        batch=tuple(a for a in ("data", "fsdp") if mesh.shape[a] > 1) or None,
        sequence="tensor" if config.parallel.sequence_parallel else None,
        dtype=jnp.dtype(train.dtype),
        on_cpu=on_cpu,
    )
    graph = gpt_graph(
        model, dtype=context.dtype,
        parallel=context, scan_layers=config.scans_layers(on_cpu), remat=config.parallel.remat,
        loss_chunk=train.loss_chunk,
    )  # fmt: skip
    optimizer = optimizer_of(config)
    constrain, n = jax.lax.with_sharding_constraint, train.gradient_accumulation_steps

    def loss_of(params, rows):
        network, batch = nnx.merge(graph, jax.tree.map(Placed, params, used)), make_batch(rows)
        x_BTD, _ = run_all_blocks(network, batch)
        parts = network.head_loss(x_BTD, batch)
        losses_B = weighted_mean(parts.rows["loss"], batch.weights.sum(axis=1))
        return parts.loss / batch.weights.sum(), losses_B

    def gradients_of(params, rows):
        (_, losses_B), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, rows)
        return losses_B, constrain(gradients, summed_at)

    def train_step(state, step, lr, rows):
        params, opt_state = state
        if n == 1:
            losses_B, gradients = gradients_of(params, rows)
        else:

            def add(total, part):
                losses_B, gradients = gradients_of(params, part)
                return jax.tree.map(jnp.add, total, gradients), losses_B

            zeros = constrain(jax.tree.map(jnp.zeros_like, params), summed_at)
            parts = context.constrain(split_microbatches(rows, n), None, context.batch, None)
            gradients, losses = jax.lax.scan(add, zeros, parts)
            losses_B = merge_microbatches(losses)
            gradients = jax.tree.map(lambda g: g / n, gradients)
        gradients = constrain(gradients, placed(sharding.opt_state_rules(stage)))
        norm = optax.tree.norm(gradients)
        clipped = clip_by_norm(gradients, norm, config.optimizer.grad_clip)

        def update(params, opt_state):
            directions, opt_state = optimizer.update(clipped, opt_state, params)
            return jax.tree.map(lambda p, u: p - lr * u, params, directions), opt_state

        return gate_by_where(None, update, params, opt_state), (losses_B.mean(), norm)

    at = jax.tree.map(lambda s: s.sharding, tuple(state_shapes(config, mesh)[:2]))
    whole, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh)
    return jax.jit(
        train_step, in_shardings=(at, whole, whole, rows), out_shardings=(at, whole),
        donate_argnums=0, compiler_options=options,
    )  # fmt: skip


def describe(compiled, mesh):
    """Return collectives by kind, bytes that a device sends in rings, and bytes of memory."""
    counts, sent = Counter(), 0
    for found in read_collectives(compiled.as_text(), dict(mesh.shape)):
        counts[found.kind] += found.count
        sent += found.bytes * (2 if found.kind == "all-reduce" else 1)
    m = compiled.memory_analysis()
    memory = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return {
        "counts": counts, "sent": sent, "memory": memory + m.temp_size_in_bytes,
        "flops": (compiled.cost_analysis() or {}).get("flops", float("nan")),
    }  # fmt: skip


def timed(config, steps, plain, written):
    """Return the ratio of step times, plain over written, and the largest difference of losses."""
    draw = np.random.default_rng(0).integers
    rows = jax.device_put(
        draw(0, 256, steps.batch_shape.shape).astype(np.int32), steps.batch_shape.sharding
    )
    states = {written: steps.init(), plain: tuple(init_state(config)[:2])}
    losses, seconds = {written: [], plain: []}, {written: [], plain: []}
    for step in range(1, 16):
        for form in states:
            began = time.perf_counter()
            lr = learning_rate(config.optimizer, step)
            states[form], metrics = form(states[form], np.int32(step), lr, rows)
            losses[form].append(float(metrics[0] if form is plain else metrics.loss))
            seconds[form].append(time.perf_counter() - began)
    pairs = zip(seconds[plain][3:], seconds[written][3:], strict=True)
    far = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    return median(a / b for a, b in pairs), far


def compare(name, arguments, on_h100):
    config = load_config(*(LARGE if on_h100 else SMALL), *arguments)
    devices = jax.devices()
    if on_h100:
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(
            "h100", "cuda", topology="1x1x8", target_config=H100
        ).devices
    sizes = mesh_shape(config)
    mesh = Mesh(
        np.array(devices).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    options = {"xla_gpu_autotune_level": 0} if on_h100 else None
    steps = make_steps(config, mesh, slices=1)
    written = steps.lower_train_step().compile(options)
    constraint = transformer.with_layout_constraint
    transformer.with_layout_constraint = lambda x, _: x  # which the partitioner would gather for
    batch = training_batch(config, sharding.batch_sharding(mesh), has_masks=False)
    state = tuple(steps.state_shapes[:2])
    plain_options = options or step_options(config, "cpu", mesh.size)
    plain_step = make_plain_step(config, mesh, plain_options)
    plain = plain_step.lower(state, np.int32(0), np.float32(0), batch).compile()
    transformer.with_layout_constraint = constraint
    a, b = describe(written, mesh), describe(plain, mesh)
    kinds = sorted(a["counts"] | b["counts"])
    counts = ", ".join(f"{kind} {a['counts'][kind]} : {b['counts'][kind]}" for kind in kinds)
    row = [name, counts, f"{a['sent'] / 1e6:.1f} MB", f"{b['sent'] / a['sent']:.2f} x"]
    row += [f"{b['memory'] / a['memory']:.2f} x"]
    if not on_h100:
        ratio, far = timed(config, steps, plain, written)
        row += [f"{b['flops'] / a['flops']:.3f} x", f"{ratio:.2f} x", f"{far:.0e}"]
    print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    on_h100 = sys.argv[1:] == ["h100"]
    for name, arguments in LAYOUTS.items():
        compare(name, arguments, on_h100)
