"""Time to trace and to compile a training step, beside that of the same model with fewer layers.

No model is allocated: one that this machine could not hold can be compiled here.
"""

import statistics
import time
from collections.abc import Sequence

from jaxgpt.bench.harness import PROG, Result, Value, open_job
from jaxgpt.config import UsageError, parse_args
from jaxgpt.train.functions import make_steps

FEWER = 4  # times fewer layers beside the model's own


def run(settings: Sequence[str], layers: str | None = None, runs: int = 3) -> Result:
    """Compile the training step with several numbers of layers, in turns, without a cache.

    `runs` of each follow one that counts for nothing. Raises `UsageError` for several processes, or
    if the layers or the mesh cannot work.
    """
    config = parse_args(settings, PROG)
    n_layer = config.model.n_layer
    words = (layers if layers is not None else f"{max(1, n_layer // FEWER)},{n_layer}").split(",")
    counts = sorted({int(word) for word in words if word.isdecimal() and int(word)})
    if not len(words) == len(counts) >= 2:
        raise UsageError(
            f"--layers={','.join(words)}: must be two or more different numbers of layers, such "
            "as 12,48"
        )
    with open_job(config, alone=True) as job:
        config, mesh = job.start_jax(config)

        def trace_and_compile(n_layer: int) -> tuple[float, float]:
            began = time.perf_counter()
            lowered = make_steps(config.replace(model__n_layer=n_layer), mesh).lower_train_step()
            traced = time.perf_counter()
            lowered.compile()
            return traced - began, time.perf_counter() - traced

        job.log("warming up")
        _, first = trace_and_compile(counts[0])
        seconds: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
        for number in range(runs):
            for n in counts if number % 2 else reversed(counts):
                job.log(f"run {number + 1} of {runs}, {n} layers")
                seconds[n].append(trace_and_compile(n))
    device, (least, *_, most) = mesh.devices.flat[0], counts
    traced = {n: statistics.median(t for t, _ in seconds[n]) for n in counts}
    compiled = {n: statistics.median(c for _, c in seconds[n]) for n in counts}
    values = {
        "config": config.config,
        "mesh": dict(mesh.shape),
        "device_kind": device.device_kind,
        "scan_layers": config.scans_layers(device.platform == "cpu"),
        "runs": runs,
        "trace_seconds": Value(traced, "s"),
        "compile_seconds": Value(compiled, "s", "by the number of layers, as medians"),
        "first_compile_seconds": Value(first, "s", "on a GPU XLA tries kernels then"),
        "ratio": Value(compiled[most] / compiled[least], "x", f"{most} layers beside {least}"),
    }
    return Result(values)
