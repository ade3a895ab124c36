"""Programs of a run that are traced once and kept: the next start need not load flax and optax.

Tracing the network, its gradient and the optimizer takes longer than everything else in the start
of a small run. `jax.export` turns what was traced into StableHLO, which lies in the folder of the
compile cache, under a name that changes with whatever decides about it. The run that traces it
runs what it stored, so that later ones are bitwise the same. What is not needed for the first step
is traced, or read, when it is.
"""

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.export
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config
from jaxgpt.parallel.sharding import Params, batch_sharding, replicated
from jaxgpt.train.state import (
    CPU_INIT_OPTIONS,
    Metrics,
    StepFunctions,
    TrainState,
    step_options,
    training_batch,
)

# Keys of `train` that say what happens between steps.
INDIFFERENT = (
    "max_iters",
    "eval_interval",
    "eval_iters",
    "log_interval",
    "sample_tokens",
    "sample_prompt",
    "time_limit",
    "hang_timeout",
    "tensorboard",
)
# What of JAX's configuration changes what is traced, however it was set.
TRACING_FLAGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
PACKAGES = ("jax", "jaxlib", "flax", "optax")
KEPT_SECONDS = 30 * 86_400  # since a program was traced

Built = TypeVar("Built")


def load_steps(config: Config, mesh: Mesh, cluster: ProcessGroup) -> StepFunctions:
    """`make_steps`, or what it stored: on CPUs, where a compile cache is in use.

    Args:
        config: with model.vocab_size set.
    """
    folder = jax.config.jax_compilation_cache_dir
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not folder or not on_cpu or config.parallel.offload_optimizer:
        return _traced(config, mesh)
    store = Store(Path(folder), config, mesh, cluster)
    return store.load(
        "start",
        lambda: _export(_traced(config, mesh)),
        lambda stored: _steps(stored, config, mesh, store),
    )


class Store:
    """The files of a run's programs."""

    def __init__(self, folder: Path, config: Config, mesh: Mesh, cluster: ProcessGroup):
        self._folder, self._config, self._mesh, self._cluster = folder, config, mesh, cluster
        self._name = _name(config, mesh)

    def load(self, kind: str, export: Callable[[], Any], build: Callable[[Any], Built]) -> Built:
        """What an earlier run stored; if any process lacks it, process 0 reads or traces for all.

        Args:
            export: returns what is stored, as JSON has it.
            build: makes what is returned of that; a file that it cannot use is as none.
        """
        path = self._folder / f"programs-{self._name}-{kind}.json"
        text, built = _read(path, build)
        if all(self._cluster.allgather(text is not None)):
            return built
        is_main = self._cluster.is_main
        traced = self._cluster.run_on_all(
            lambda: (text or json.dumps(export())) if is_main else None
        )
        # What is traced late is of the source files as they are by then.
        if is_main and self._name == _name(self._config, self._mesh):
            _write(path, traced)
        return build(json.loads(self._cluster.broadcast(traced)))

    def jit(
        self,
        kind: str,
        function: Callable[..., jax.Array],
        shapes: tuple[Any, ...],
        sharding: NamedSharding,
    ) -> Callable[..., jax.Array]:
        """`jax.jit`, for operands of these shapes only; read or traced at the first call.

        Args:
            kind: changes with what decides about this function and not about all of a run.
            sharding: of the result.
        """

        def export() -> dict[str, Any]:
            exported = jax.export.export(jax.jit(function, out_shardings=sharding))(*shapes)
            return {"programs": {kind: _encode(exported)}}

        def build(stored: dict[str, Any]) -> Callable[..., jax.Array]:
            return jax.jit(_decode(stored["programs"][kind]).call, out_shardings=sharding)

        @functools.cache
        def program() -> Callable[..., jax.Array]:
            return self.load(kind, export, build)

        return lambda *operands: program()(*operands)


@functools.cache
def _traced(config: Config, mesh: Mesh) -> StepFunctions:
    from jaxgpt.train.step import make_steps

    return make_steps(config, mesh)


def _name(config: Config, mesh: Mesh) -> str:
    """Changes with all that decides what is traced."""
    package = Path(__file__).parents[1]
    devices = [(d.process_index, d.device_kind) for d in mesh.devices.flat]
    settings = {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_FLAGS"))}
    for irrelevant in ("JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES"):
        settings.pop(irrelevant, None)
    content = config.to_dict()
    decisive = [content[section] for section in ("model", "train", "optimizer", "parallel")]
    for key in INDIFFERENT:
        del content["train"][key]
    spike, faults = config.spike, config.faults
    if spike.action != "off":
        skips = spike.action == "skip_update"
        decisive += [skips, spike.window, spike.loss_threshold, spike.grad_norm_threshold]
    if faults.nan_step is not None:
        decisive.append({"faults": [faults.nan_step, faults.nan_device]})
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    flags = [str(getattr(jax.config, name)) for name in TRACING_FLAGS]
    decided = [decisive, dict(mesh.shape), devices, versions, settings, flags]
    text = json.dumps(decided, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _export(steps: StepFunctions) -> dict[str, Any]:
    """What is stored, as JSON."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(steps.state_shapes)
    shapes = [leaf for _, leaf in leaves]
    shardings = [leaf.sharding for leaf in shapes]

    # On lists of arrays: what is serialized should not know our classes. The functions under
    # jax.jit, because only the outermost one may have options of the compiler.
    init, train_step = steps.init.__wrapped__, steps.train_step.__wrapped__

    def flat_init() -> list[jax.Array]:
        return jax.tree.leaves(init())

    def flat_step(state: list[jax.Array], step: jax.Array, tokens: jax.Array) -> Any:
        state, metrics = train_step(jax.tree.unflatten(tree, state), step, tokens)
        return jax.tree.leaves(state), list(metrics)

    flat_init = jax.jit(flat_init, out_shardings=shardings)
    flat_step = jax.jit(
        flat_step,
        in_shardings=(shardings, steps.replicated, steps.batch_shape.sharding),
        out_shardings=(shardings, steps.replicated),
    )
    return {
        "attention": steps.attention,
        "warnings": list(steps.warnings),
        "n_parameters": list(steps.n_parameters),
        "state": [
            {
                "path": [getattr(key, "name", None) or key.key for key in path],
                "shape": list(leaf.shape),
                "dtype": leaf.dtype.name,
                "axes": list(leaf.sharding.spec),
            }
            for path, leaf in leaves
        ],
        "programs": {
            "init": _encode(jax.export.export(flat_init)()),
            "train_step": _encode(
                jax.export.export(flat_step)(shapes, np.int32(0), steps.batch_shape)
            ),
        },
    }


def _steps(stored: dict[str, Any], config: Config, mesh: Mesh, store: Store) -> StepFunctions:
    """The functions of a run from what `_export` returned."""
    whole, batch = replicated(mesh), batch_sharding(mesh)
    tree: dict[str, Any] = {}
    for leaf in stored["state"]:
        *parents, name = leaf["path"]
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        spec = PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in leaf["axes"]))
        place[name] = jax.ShapeDtypeStruct(
            tuple(leaf["shape"]), leaf["dtype"], sharding=NamedSharding(mesh, spec)
        )
    shapes = TrainState(**tree)
    at_rest = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    structure = jax.tree.structure(shapes)
    programs = stored["programs"]
    stored_init, stored_step = _decode(programs["init"]), _decode(programs["train_step"])
    # It would load SciPy for LAPACK, which no program here calls.
    jax._src.export._export._ensure_backends_initialized = lambda platforms: None

    def init() -> TrainState:
        return jax.tree.unflatten(structure, stored_init.call())

    def train_step(
        state: TrainState, step: jax.Array, tokens: jax.Array
    ) -> tuple[TrainState, Metrics]:
        leaves, metrics = stored_step.call(jax.tree.leaves(state), step, tokens)
        return jax.tree.unflatten(structure, leaves), Metrics(*metrics)

    def eval_step(params: Params, tokens: jax.Array) -> jax.Array:
        return _traced(config, mesh).eval_step(params, tokens)

    def jitted(kind: str, function: Callable[..., jax.Array], *operands: Any) -> Any:
        return store.jit(kind, function, (shapes.params, *operands), whole)

    train_batch = training_batch(config, batch)
    eval_batch = jax.ShapeDtypeStruct(
        (config.microbatch_size, *train_batch.shape[1:]), train_batch.dtype, sharding=batch
    )
    return StepFunctions(
        mesh=mesh,
        attention=stored["attention"],
        warnings=tuple(stored["warnings"]),
        n_parameters=tuple(stored["n_parameters"]),
        batch_shape=train_batch,
        replicated=whole,
        state_shapes=shapes,
        init=jax.jit(init, out_shardings=at_rest, compiler_options=CPU_INIT_OPTIONS),
        train_step=jax.jit(
            train_step,
            in_shardings=(at_rest, whole, batch),
            out_shardings=(at_rest, whole),
            donate_argnums=0,
            compiler_options=step_options("cpu", mesh.size),
        ),
        eval_step=jitted("evaluation", eval_step, eval_batch),
        reader=lambda params: _traced(config, mesh).reader(params),
        jitted=jitted,
    )


def _encode(program: jax.export.Exported) -> str:
    return base64.b64encode(program.serialize()).decode()


def _decode(text: str) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(base64.b64decode(text)))


def _read(path: Path, build: Callable[[Any], Built]) -> tuple[str, Built] | tuple[None, None]:
    """What was stored, as text and as `build` makes it; None if nothing was, or it is unusable."""
    try:
        text = path.read_text()
        return text, build(json.loads(text))
    except Exception:  # of JSON, base64 or JAX's own format: whatever it is, it is traced again
        return None, None


def _write(path: Path, text: str) -> None:
    """All of it or nothing; a folder that is full costs the next start, not this run."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        for old in path.parent.glob("programs-*"):
            with contextlib.suppress(OSError):  # another user's, or gone
                if old.stat().st_mtime < time.time() - KEPT_SECONDS:
                    old.unlink()
        try:
            scratch.write_text(text)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
