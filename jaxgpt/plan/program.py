"""Memory and collectives of the train step, compiled for simulated devices."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import DictKey

from jaxgpt.config import Config, MeshShape, axes_with
from jaxgpt.kernels.float8 import float8_warnings
from jaxgpt.models.attention import KERNELS, AttentionSetting, choose_attention
from jaxgpt.models.weights import weights
from jaxgpt.optim.muon import update_flops
from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel import sharding as partition
from jaxgpt.parallel.context import choose_implementation, split_sequence
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.collectives import Collective, read_collectives
from jaxgpt.perf.hardware import Device
from jaxgpt.perf.memory import compiled_bytes
from jaxgpt.runtime.devices import MAX_CPU_DEVICES
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.state import state_shapes

# Compiler options for programs that are never run. They disable LLVM's optimizations, because XLA
# assigns buffers and collectives before it calls LLVM.
COMPILE_ONLY = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Memory:
    """Memory of one device and its share of host memory, in bytes.

    `activations_and_temporaries` is 0 if it is unknown. The parameters, gradients and moments
    include the part in host memory.
    """

    parameters: int
    gradients: int
    moments: int
    activations_and_temporaries: int = 0  # everything else at the peak, including the batch
    in_host: int = 0  # the part of parameters, gradients and moments in host memory
    host_at_once: int = 0  # largest part of in_host that is on the device at once

    @property
    def total(self) -> int:
        """Peak bytes on the device. Host arrays are copied into memory that held activations.

        Unknown activations count as 0.
        """
        at_rest = self.parameters + self.gradients + self.moments - self.in_host
        return at_rest + max(self.activations_and_temporaries, self.host_at_once)


@dataclass(frozen=True)
class Program:
    """A train step, compiled or estimated from formulas.

    An estimated program has no `attention` and no `warnings`.
    """

    memory: Memory
    collectives: tuple[Collective, ...] = ()
    attention: str = ""
    stores_scores: bool = True  # whether the attention kernel keeps T x T scores
    warnings: tuple[str, ...] = ()  # deviations from the requested layout
    update_flops: int = 0  # FLOPs of the optimizer's matmuls on each device


def compile_step(
    config: Config, shape: MeshShape, device: Device, devices_per_host: int
) -> Program:
    """Compile the train step as it would run on `device`, without allocating arrays.

    XLA's CPU compiler is used instead of the device's compiler. The CPU compiler would compute
    bfloat16 in float32, so bfloat16 is replaced by float16, which has the same size. FP8 matmuls
    are replaced by matmuls in train.dtype, and cuDNN attention by another kernel with O(T) memory.
    Layers are scanned. If the device is `cpu`, only `with_fewer_replicas` and the choice of
    parallel.context_impl for `devices_per_host` (see `choose_implementation`) change the step. The
    data's loss masks are ignored.

    `shape` must fit `config`; see `mesh_shape` and `check_batch`. JAX must already simulate the
    devices of the mesh that `with_fewer_replicas` returns, and config.model.vocab_size must be set.

    Raises:
        UsageError: if the attention kernel or train.matmul_dtype cannot be used with these settings
            on the device, or if an option names an unknown kernel, layer or optimizer.
        ValueError: if a loop with collectives has an unknown number of iterations.
    """
    kernel, reason = attention_kernel(config, device)
    warnings = _matmul_warnings(config, device)
    stand_in = _stand_in(config, shape, device, devices_per_host)
    stand_in, simulated = with_fewer_replicas(stand_in, shape)
    attend = None
    if (make_kernel := KERNELS[kernel].stand_in) is not None:
        attend = make_kernel()
        stand_in = stand_in.replace(model__attention="auto")  # the kernel itself cannot run here
    steps = make_steps(stand_in, _simulated_mesh(simulated), attend, on_cpu=device.name == "cpu")
    compiled = steps.lower_train_step().compile(COMPILE_ONLY)
    total, memory = compiled_bytes(compiled), state_memory(config, shape, device)
    state = memory.parameters + memory.moments
    split = split_sequence(config, shape, steps.model.context, attend, devices_per_host)
    gradients = min(memory.gradients, total - state)
    return Program(
        memory=dataclasses.replace(
            memory, gradients=gradients, activations_and_temporaries=total - state - gradients
        ),
        collectives=read_collectives(compiled.as_text(), simulated),
        attention="; ".join(filter(None, [f"{kernel} ({reason})", split.note])),
        stores_scores=KERNELS[kernel].stores_scores,
        warnings=(*warnings, *steps.warnings),
        update_flops=optimizer_flops(config, shape),
    )


def _stand_in(config: Config, shape: MeshShape, device: Device, devices_per_host: int) -> Config:
    """Return the configuration to compile for simulated CPU devices instead of `config`."""
    if shape.split_of("splits_sequence") > 1:  # the simulated devices share a host
        impl, _ = choose_implementation(config, shape, devices_per_host)
        config = config.replace(parallel__context_impl=impl)
    if device.name == "cpu":
        return config
    # Compiling without FP8 gives a better estimate than emulating FP8 on a CPU. On an H100, FP8
    # changes the memory for activations by -16% to +17%.
    config = config.replace(train__matmul_dtype=None)
    # For GPT-2 XL, unrolled layers compiled for an H100 need as much memory as scanned layers
    # compiled for a CPU. Unrolled layers compiled for a CPU need twice as much.
    config = config.replace(parallel__scan_layers=True)
    # Whole sections are replaced, because float16 is not a value that users may choose.
    if config.train.dtype == "bfloat16":
        config = config.replace(train=dataclasses.replace(config.train, dtype="float16"))
    if config.parallel.grad_reduce_dtype == "bfloat16":
        parallel = dataclasses.replace(config.parallel, grad_reduce_dtype="float16")
        config = config.replace(parallel=parallel)
    return config


def _matmul_warnings(config: Config, device: Device) -> tuple[str, ...]:
    """Return warnings about train.matmul_dtype, which the simulated devices do not use."""
    if device.name == "cpu" or config.train.matmul_dtype is None:
        return ()
    return (
        *float8_warnings(device.platform, device.cuda_capability),
        f"train.matmul_dtype={config.train.matmul_dtype}: memory and times are estimated for "
        f"matmuls in {config.train.dtype}",
    )


def attention_kernel(config: Config, device: Device) -> tuple[str, str]:
    """Return the name of the attention kernel for `device`, and the reason for this choice.

    Ring attention uses its own kernel instead. Raises `UsageError` if model.attention selects a
    kernel that is unknown or cannot run.
    """
    setting = AttentionSetting(
        config.model,
        config.train.dtype,
        device.platform,
        device.cuda_capability,
        config.data.document_mask,
    )
    return choose_attention(setting)


def optimizer_flops(config: Config, shape: MeshShape) -> int:
    """Return the FLOPs that each device spends on the optimizer's matmuls in one step.

    The result is 0 for every optimizer except Muon. With parallel.offload, the result can be too
    low; see `update_flops`.
    """
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    rules, described = partition.opt_state_rules(config.parallel.zero_stage), weights(config.model)
    shardings = partition.weight_shardings(described, rules, mesh)
    return update_flops(config.optimizer, Parameters(described, shardings))


def with_fewer_replicas(config: Config, shape: MeshShape) -> tuple[Config, MeshShape]:
    """Return an equivalent layout with at most `MAX_CPU_DEVICES` devices, if possible.

    Only the number of replicas and the batch size change, so the size of the state on each device
    stays the same. The config's parallel.mesh is set to the returned shape. If the layout has two
    or more replicas, at least two remain. If the replicas divide the batch evenly, each replica
    processes the same number of rows as before. A size of -1 for the replica axis counts as 1.
    Raises `UsageError` if the new batch size would be 0.
    """
    axis = next(a for a in axes_with("splits_batch") if a not in axes_with("shards_parameters"))
    n = max(1, shape[axis])
    room = MAX_CPU_DEVICES * n // shape.n_devices
    left = [m for m in range(min(2, n), n + 1) if n % m == 0]
    left = max((m for m in left if m <= room), default=min(left))
    smaller = MeshShape(**(shape | {axis: left}))
    batch_size = config.train.batch_size * left // n
    return config.replace(parallel__mesh=str(smaller), train__batch_size=batch_size), smaller


def _simulated_mesh(shape: MeshShape) -> Mesh:
    return make_mesh(shape, devices=jax.devices()[: shape.n_devices])


def state_memory(config: Config, shape: MeshShape, device: Device) -> Memory:
    """Return the bytes of parameters, gradients and moments per device, without compiling.

    Activations are not included. With parallel.offload=state and several microbatches, two sets of
    gradients are included. The requirements are the same as for `compile_step`. Raises `UsageError`
    if an option names an unknown layer or optimizer. `in_host` and `host_at_once` are 0 for `cpu`,
    because a CPU has no separate device memory.
    """
    mesh = _simulated_mesh(with_fewer_replicas(config, shape)[1])
    state, is_away = state_shapes(config, mesh), config.parallel.offload == "state"
    rules = partition.gradient_rules(config.parallel.zero_stage, config.reduces_once, is_away)
    where = partition.weight_shardings(
        weights(config.model), rules, mesh, "pinned_host" if is_away else None
    )
    gradients = jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), state.params, where
    )
    if is_away and config.train.gradient_accumulation_steps > 1:
        gradients = [gradients] * 2  # the old and the new accumulators
    all_of_it = jax.tree.leaves_with_path((state.params, gradients, state.opt_state))
    in_host = [(path, a) for path, a in all_of_it if a.sharding.memory_kind == "pinned_host"]
    outside = [a for path, a in in_host if DictKey("layers") not in path]
    stacked = bytes_on_a_device([a for _, a in in_host]) - bytes_on_a_device(outside)
    memory = Memory(
        parameters=bytes_on_a_device(state.params),
        gradients=bytes_on_a_device(gradients),
        moments=bytes_on_a_device(state.opt_state),
    )
    if device.name == "cpu":
        return memory
    return dataclasses.replace(
        memory,
        in_host=bytes_on_a_device([a for _, a in in_host]),
        host_at_once=max(bytes_on_a_device(outside), 2 * stacked // config.model.n_layer),
    )


def bytes_on_a_device(shapes: Any) -> int:
    """Return the total size of one device's shards of the arrays in a tree, in bytes.

    The leaves may also be `jax.ShapeDtypeStruct`s. Each leaf must have a sharding that divides its
    shape. Shards in host memory are included.
    """
    return sum(
        math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize
        for s in jax.tree.leaves(shapes)
    )
