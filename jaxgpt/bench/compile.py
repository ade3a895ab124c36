"""Time to trace and to compile a training step, beside that of the same model with fewer layers.

No model is allocated: one that this machine could not hold can be compiled here.
"""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from jaxgpt.bench.alone import join_alone
from jaxgpt.bench.progress import tell
from jaxgpt.config import Config, UsageError, check_batch, mesh_sizes
from jaxgpt.data.dataset import vocabulary_size
from jaxgpt.runtime.initialize import initialize_jax

FEWER = 4  # times fewer layers beside the model's own


def layer_counts(option: str, given: str | None, n_layer: int) -> list[int]:
    """Numbers of layers, ascending: those given, or a quarter of the model's and the model's.

    Raises:
        UsageError: if they are not at least two.
    """
    if given is None:
        counts = {max(1, n_layer // FEWER), n_layer}
        if len(counts) == 1:
            raise UsageError(
                f"model.n_layer={n_layer}: there are not fewer to compare with; give {option} 1,4"
            )
        return sorted(counts)
    words = given.split(",")
    counts = {int(word) for word in words if word.isdecimal() and int(word)}
    if not len(words) == len(counts) >= 2:
        raise UsageError(
            f"{option}={given}: must be two or more different numbers of layers, such as 12,48"
        )
    return sorted(counts)


def measure(config: Config, layers: Sequence[int], n_runs: int) -> dict[str, Any]:
    """Compiles the training step with each of these numbers of layers, in turns, without a cache.

    Args:
        config: of the model, but for its layers.
        layers: ascending.
        n_runs: of each, after one of the fewest layers that counts for nothing.

    Returns:
        Seconds to trace and to compile by number of layers, as medians over the runs, and the
        time to compile with the most layers over that with the fewest.

    Raises:
        UsageError: for several processes, or if the mesh cannot work.
    """
    cluster = join_alone("compile", config.init_timeout)
    config = config.replace(model__vocab_size=vocabulary_size(config.data, config.model))
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # what is compiled is timed
    initialize_jax(cluster, mesh_sizes(config))
    import jax

    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.step import make_steps

    sizes = mesh_sizes(config, jax.device_count())
    check_batch(config, sizes)
    mesh = make_mesh(sizes, cluster.hosts)

    def trace_and_compile(n_layer: int) -> tuple[float, float]:
        began = time.perf_counter()
        lowered = make_steps(config.replace(model__n_layer=n_layer), mesh).lower_train_step()
        traced = time.perf_counter()
        lowered.compile()
        return traced - began, time.perf_counter() - traced

    tell(cluster, "warming up")
    _, first = trace_and_compile(layers[0])
    seconds: dict[int, list[tuple[float, float]]] = {n: [] for n in layers}
    for run in range(n_runs):
        for n in layers if run % 2 else reversed(layers):
            tell(cluster, f"run {run + 1} of {n_runs}, {n} layers")
            seconds[n].append(trace_and_compile(n))
    found = []
    for n, runs in seconds.items():
        traces, compiles = zip(*runs, strict=True)
        found.append(
            {
                "n_layer": n,
                "trace_seconds": statistics.median(traces),
                "compile_seconds": statistics.median(compiles),
                "compile_seconds_least": min(compiles),
                "compile_seconds_most": max(compiles),
            }
        )
    return {
        "config": config.config,
        "runs": n_runs,
        "mesh": dict(mesh.shape),
        "device_kind": mesh.devices.flat[0].device_kind,
        "scan_layers": config.scans_layers(mesh.devices.flat[0].platform == "cpu"),
        "layers": found,
        "first_compile_seconds": first,
        "ratio": found[-1]["compile_seconds"] / found[0]["compile_seconds"],
    }


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    of_layers = [
        f"{of['n_layer']} layers: {of['compile_seconds']:.2f} s to compile "
        f"({of['compile_seconds_least']:.2f} to {of['compile_seconds_most']:.2f}), after "
        f"{of['trace_seconds']:.2f} s of tracing"
        for of in found["layers"]
    ]
    fewest, most = found["layers"][0]["n_layer"], found["layers"][-1]["n_layer"]
    return "\n".join(
        [
            f"compile: {found['config']}, parallel.scan_layers={found['scan_layers']}, mesh {mesh} "
            f"of {found['device_kind']}; medians over {found['runs']}, in turns, without a cache",
            f"first: {found['first_compile_seconds']:.2f} s with {found['layers'][0]['n_layer']} "
            "layers; what XLA tries out on a GPU then, the others need not",
            *of_layers,
            f"ratio: {most} layers take {found['ratio']:.2f} times as long to compile as {fewest}",
        ]
    )
