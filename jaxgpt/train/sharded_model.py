"""The network on a mesh: how parameters, gradients and work are divided among devices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config, MeshShape
from jaxgpt.data.batch import Batch, batch_specs
from jaxgpt.kernels.attention import Attention
from jaxgpt.kernels.float8 import float8_matmul
from jaxgpt.kernels.linear import matmul
from jaxgpt.models.layers import layer_pattern
from jaxgpt.models.transformer import GPT, gpt_graph
from jaxgpt.models.weights import Weight, activation_bytes, count_parameters, weights
from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel import sharding
from jaxgpt.parallel.context import split_sequence
from jaxgpt.parallel.mesh import devices_per_host, mesh_axes_with
from jaxgpt.parallel.pipeline import LayerGroups, Pipeline
from jaxgpt.parallel.schedule import ACCUMULATE, Schedule
from jaxgpt.parallel.sharding import Params
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.parallel.zero import ParamLayout, ShardedParam

SLICE_BYTES = 2**29  # target for a slice's activations; larger or much smaller slices are slower
GRADIENTS_PER_SLICE = 4  # the target is at least this many times the size of the gradients


class ShardedModel(NamedTuple):
    """The network on a mesh, built by `shard_model`."""

    config: Config  # with model.vocab_size set
    mesh: Mesh
    layouts: Any  # tree with the `ParamLayout` of every parameter
    context: ParallelContext
    graph: nnx.GraphDef  # the network without parameters
    n_slices: int  # each device's part of a microbatch is split into this many slices
    schedule: Schedule = ACCUMULATE
    warnings: tuple[str, ...] = ()
    context_note: str = ""  # for the log: how attention is computed if an axis splits the sequence

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Mesh axes larger than 1 that split the layers."""
        return mesh_axes_with("splits_layers", self.mesh)

    @property
    def param_specs(self) -> Any:
        """Tree with the `PartitionSpec` of every parameter."""
        return jax.tree.map(lambda layout: layout.param, self.layouts)

    @property
    def parameters(self) -> Parameters:
        """The weights and their gradient shardings, in the form that the optimizer expects."""
        shardings = jax.tree.map(lambda one: NamedSharding(self.mesh, one.grad), self.layouts)
        return Parameters(weights(self.config.model), shardings)

    def network(self, grad_accumulators: Params, params: Params) -> GPT:
        """Return the network with this device's parameter shards, for use inside `jax.shard_map`.

        Args:
            grad_accumulators: zeros from `local_params` or, with parallel.offload=state, the sum of
                earlier gradients. Differentiating with respect to these arrays gives the
                parameters' gradients plus that sum; see `parallel.zero.all_gather_param`.
            params: this device's shards, from `local_params`.
        """
        return nnx.merge(
            self.graph, jax.tree.map(ShardedParam, params, grad_accumulators, self.layouts)
        )

    def run_on_shards(
        self, local: Callable[[Params, Batch], Any], params: Params, batch: Batch
    ) -> Any:
        """Run `local` on each device's shards of `params` and `batch`, and return the result.

        The result must be the same on all devices. This applies `jax.shard_map`.
        """
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self.param_specs, batch_specs(self.mesh)),
            out_specs=PartitionSpec(),
            check_vma=not self.layer_axes,  # JAX cannot infer that all stages have the same results
        )(params, batch)

    def with_whole_layers(self) -> "ShardedModel":
        """Return the model with every layer stored on every stage.

        In each `ParamLayout`, only `param` changes.
        """

        def kept(over: Any) -> tuple[str, ...] | None:
            return tuple(a for a in jax.tree.leaves(over) if a not in self.layer_axes) or None

        def whole(layout: ParamLayout) -> ParamLayout:
            return dataclasses.replace(layout, param=PartitionSpec(*map(kept, layout.param)))

        return self._replace(layouts=jax.tree.map(whole, self.layouts))


def shard_model(
    config: Config,
    mesh: Mesh,
    attend: Attention,
    n_slices: int = 1,
    on_cpu: bool = False,
    hosts: Sequence[int] | None = None,
) -> ShardedModel:
    """Shard the network over a mesh as `config` specifies.

    Args:
        config: with model.vocab_size set.
        mesh: a mesh that fits the configuration; see `job_mesh`.
        attend: the attention function.
        n_slices: number of slices that each device's part of a microbatch is split into.
        on_cpu: whether the devices are CPUs.
        hosts: the host number of each process, by rank. None means that all devices share a host.
    """
    parallel = config.parallel
    tensor_axes = mesh_axes_with("splits_heads", mesh)
    sequence_parallel = parallel.sequence_parallel and bool(tensor_axes)
    is_sharded = parallel.zero_stage == 3 and bool(mesh_axes_with("shards_parameters", mesh))
    layer_axes = mesh_axes_with("splits_layers", mesh)
    gathers = sequence_parallel or is_sharded or parallel.offload == "state"
    # With the other values of parallel.remat, gathered arrays are never kept for the backward pass.
    keeps_all = parallel.remat in ("none", "attention")
    context = ParallelContext(
        tensor=MeshShape(**mesh.shape).split_of("splits_heads"),
        tensor_axes=tensor_axes,
        sequence_axes=mesh_axes_with("splits_sequence", mesh),
        sequence_parallel=sequence_parallel,
        regather_in_backward=gathers and keeps_all,
        on_cpu=on_cpu,
        matmul=matmul if config.train.matmul_dtype is None else float8_matmul,
    )
    per_host = None if hosts is None else devices_per_host(mesh, hosts)
    split = split_sequence(config, MeshShape(**mesh.shape), context, attend, per_host)
    graph = gpt_graph(
        config.model,
        dtype=np.dtype(config.train.dtype),
        attend=split.attend,
        parallel=context,
        scan_layers=config.scans_layers(on_cpu),
        remat=parallel.remat,
        end_of_text=config.document_end,
        loss_chunk=config.train.loss_chunk,
        keeps_tables=not layer_axes,  # a pipeline gathers all weights before its loop
    )
    layout = functools.partial(param_layout, config, mesh, sequence_parallel, n_slices)
    layouts = jax.tree.map(layout, weights(config.model))
    schedule, warnings = ACCUMULATE, ()
    if layer_axes:
        pipeline = make_pipeline(config, mesh)
        schedule, warnings = pipeline.schedule, pipeline.groups.warnings
    return ShardedModel(
        config,
        mesh,
        layouts,
        context,
        graph,
        n_slices,
        split.wrap_schedule(schedule),
        warnings,
        split.note,
    )


def make_pipeline(config: Config, mesh: Mesh) -> Pipeline:
    """Return the pipeline over the mesh axes that split the layers."""
    groups = layer_groups(config, MeshShape(**mesh.shape))
    axes = mesh_axes_with("splits_layers", mesh)
    return Pipeline(groups, config.train.gradient_accumulation_steps, axes)


def layer_groups(config: Config, mesh: MeshShape) -> LayerGroups:
    """Return the division of the layers into pipeline stages.

    Without a pipeline, one group has all layers, and parallel.stage_repeats is ignored.
    """
    stages, n_layers = mesh.split_of("splits_layers"), config.model.n_layer
    if stages == 1:
        return LayerGroups(n_layers, 1, 1, 1)
    pattern = len(layer_pattern(config.model))
    return LayerGroups(n_layers, stages, config.parallel.stage_repeats, pattern)


def param_layout(
    config: Config, mesh: Mesh, sequence_parallel: bool, n_slices: int, weight: Weight
) -> ParamLayout:
    """Return a weight's `ParamLayout` for the ZeRO stage and the other parallel options.

    Args:
        sequence_parallel: `ParallelContext.sequence_parallel`.
        n_slices: see `shard_model`.
    """
    zero_stage, train = config.parallel.zero_stage, config.train
    in_host = config.parallel.offload == "state"
    param, accum, grad = (
        sharding.partition_spec(weight.axes, weight.shape, rules, mesh.shape)
        for rules in (
            sharding.parameter_rules(zero_stage),
            sharding.gradient_rules(zero_stage, config.reduces_once, in_host),
            sharding.opt_state_rules(zero_stage),
        )
    )
    partial_axes = mesh_axes_with("reduces_gradients", mesh)
    # With sequence parallelism, a device applies replicated weights (norms, position embeddings and
    # biases) only to its own positions, so their gradients are partial.
    has_own_part = sequence_parallel or sharding.has_partial_gradient(weight.axes, param)
    tensor_axes = mesh_axes_with("splits_heads", mesh)
    if has_own_part and sharding.split_dim(param, tensor_axes) is None:
        partial_axes = (*partial_axes, *tensor_axes)
    layer_axes = mesh_axes_with("splits_layers", mesh)
    if sharding.split_dim(param, layer_axes) is None:  # each stage computes part of the gradient
        partial_axes = (*partial_axes, *layer_axes)
    return ParamLayout(
        param=param,
        accum=accum,
        grad=grad,
        partial_axes=frozenset(partial_axes),
        gather_dtype=weight.gather_dtype or train.dtype,
        reduce_dtype=config.parallel.grad_reduce_dtype,
        host_terms=train.gradient_accumulation_steps * n_slices if in_host else 0,
    )


def choose_n_slices(config: Config, mesh: Mesh) -> int:
    """Return how many equal slices each CPU's part of a microbatch is split into.

    Slices are processed one after another, like microbatches. Slicing saves memory and is faster on
    CPUs. The result divides the number of rows. On a logarithmic scale, it brings the size of a
    slice's activations as close as possible to `SLICE_BYTES` or to `GRADIENTS_PER_SLICE` times the
    size of the gradients, whichever is larger. If any axis except `data` is larger than 1, the
    result is 1, because each slice would add communication. model.vocab_size must be set.
    """
    shape = MeshShape(**mesh.shape)
    if not shape.splits_only_batch:
        return 1
    rows = config.microbatch_size // shape.split_of("splits_batch")
    gradient_bytes = 4 * count_parameters(config.model)[0]
    target = max(SLICE_BYTES, GRADIENTS_PER_SLICE * gradient_bytes) / activation_bytes(
        config.model, with_logits=not config.train.loss_chunk
    )
    if rows <= max(1, target):
        return 1
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return min(divisors, key=lambda n: abs(math.log(rows / n / target)))
