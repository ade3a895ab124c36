"""Time to trace and to compile a training step, beside that of the same model with fewer layers.

No model is allocated: one that this machine could not hold can be compiled here.
"""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from jaxgpt.bench.harness import PROG, Result, join_alone, log_progress
from jaxgpt.config import UsageError, mesh_shape, parse_args
from jaxgpt.data.dataset import vocabulary_size
from jaxgpt.runtime.initialize import initialize_jax

FEWER = 4  # times fewer layers beside the model's own


def run(settings: Sequence[str], layers: str | None = None, runs: int = 3) -> Result:
    """Compile the training step with several numbers of layers, in turns, without a cache.

    Args:
        settings: as for jaxgpt.train.
        layers: the numbers, as in "12,48"; None takes a quarter of the model's, and the model's.
        runs: of each, after one of the fewest layers that counts for nothing.

    Returns:
        Seconds to trace and to compile by number of layers, as medians over the runs, and the
        time to compile with the most layers over that with the fewest.

    Raises:
        UsageError: for several processes, or if the layers or the mesh cannot work.
    """
    config = parse_args(settings, PROG)
    counts = layer_counts(layers, config.model.n_layer)
    cluster = join_alone("compile", config.init_timeout)
    config = config.replace(model__vocab_size=vocabulary_size(config.data, config.model))
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # compilation is timed
    initialize_jax(cluster, mesh_shape(config))

    from jaxgpt.parallel.mesh import job_mesh
    from jaxgpt.train.functions import make_steps

    mesh = job_mesh(config, cluster.hosts)

    def trace_and_compile(n_layer: int) -> tuple[float, float]:
        began = time.perf_counter()
        lowered = make_steps(config.replace(model__n_layer=n_layer), mesh).lower_train_step()
        traced = time.perf_counter()
        lowered.compile()
        return traced - began, time.perf_counter() - traced

    log_progress(cluster, "warming up")
    _, first = trace_and_compile(counts[0])
    seconds: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
    for number in range(runs):
        for n in counts if number % 2 else reversed(counts):
            log_progress(cluster, f"run {number + 1} of {runs}, {n} layers")
            seconds[n].append(trace_and_compile(n))
    by_layers = [medians(n, *zip(*seconds[n], strict=True)) for n in counts]
    values = {
        "config": config.config,
        "runs": runs,
        "mesh": dict(mesh.shape),
        "device_kind": mesh.devices.flat[0].device_kind,
        "scan_layers": config.scans_layers(mesh.devices.flat[0].platform == "cpu"),
        "layers": by_layers,
        "first_compile_seconds": first,
        "ratio": by_layers[-1]["compile_seconds"] / by_layers[0]["compile_seconds"],
    }
    return Result(values, rows(values))


def layer_counts(given: str | None, n_layer: int) -> list[int]:
    """Return numbers of layers, ascending: those given, or a quarter of the model's and its own.

    Raises:
        UsageError: if they are not at least two.
    """
    if given is None:
        counts = {max(1, n_layer // FEWER), n_layer}
        if len(counts) == 1:
            raise UsageError(
                f"model.n_layer={n_layer}: there are not fewer to compare with; give --layers 1,4"
            )
        return sorted(counts)
    words = given.split(",")
    counts = {int(word) for word in words if word.isdecimal() and int(word)}
    if not len(words) == len(counts) >= 2:
        raise UsageError(
            f"--layers={given}: must be two or more different numbers of layers, such as 12,48"
        )
    return sorted(counts)


def medians(n_layer: int, traces: Sequence[float], compiles: Sequence[float]) -> dict[str, Any]:
    return {
        "n_layer": n_layer,
        "trace_seconds": statistics.median(traces),
        "compile_seconds": statistics.median(compiles),
        "compile_seconds_least": min(compiles),
        "compile_seconds_most": max(compiles),
    }


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words."""
    mesh = " ".join(f"{axis}={size}" for axis, size in values["mesh"].items())
    fewest, most = values["layers"][0]["n_layer"], values["layers"][-1]["n_layer"]
    return [
        ("compile", f"{values['config']}, parallel.scan_layers={values['scan_layers']}, mesh "
         f"{mesh} of {values['device_kind']}; medians of {values['runs']}, in turns, no cache"),
        ("first", f"{values['first_compile_seconds']:.2f} s with {fewest} layers; on a GPU XLA "
         "tries kernels then, which the others need not"),
        *(
            (f"{one['n_layer']} layers", f"{one['compile_seconds']:.2f} s to compile "
             f"({one['compile_seconds_least']:.2f} to {one['compile_seconds_most']:.2f}), after "
             f"{one['trace_seconds']:.2f} s of tracing")
            for one in values["layers"]
        ),
        ("ratio", f"{most} layers take {values['ratio']:.2f} times as long to compile as {fewest}"),
    ]  # fmt: skip
