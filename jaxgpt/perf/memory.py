"""Memory in use, and a lower bound on the memory that a step needs."""

import os
import re
import resource
import sys
from pathlib import Path

import jax

from jaxgpt.config import Config, MeshShape, UsageError
from jaxgpt.models.attention import stores_scores
from jaxgpt.optim.state import n_moments
from jaxgpt.perf.units import format_bytes
from jaxgpt.runtime.allocator import USABLE

FLOAT32 = 4  # bytes per element; parameters, gradients and moments are float32


def memory_in_use() -> tuple[int, int] | None:
    """Return (bytes in use, peak bytes in use), or None if the platform does not report them.

    On accelerators, both are the maximum over local devices. On CPUs, they are the current and the
    peak RSS of the process.
    """
    if jax.default_backend() == "cpu":
        try:
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # not Linux
            return None
        return now, max(now, peak_rss())  # the kernel updates the two counters at different times
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if not all("bytes_in_use" in one and "peak_bytes_in_use" in one for one in stats):
        return None
    return max(s["bytes_in_use"] for s in stats), max(s["peak_bytes_in_use"] for s in stats)


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the memory that a compiled program needs on each device, without its code."""
    found = compiled.memory_analysis()
    arguments_and_results = found.argument_size_in_bytes + found.output_size_in_bytes
    return arguments_and_results - found.alias_size_in_bytes + found.temp_size_in_bytes


def peak_rss() -> int:
    """Return the peak RSS of this process so far, in bytes."""
    # On Linux, ru_maxrss includes the peak of the program that started this one, because exec does
    # not reset it.
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:  # not Linux
        found = None
    peak = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)  # macOS reports bytes, Linux KiB


def host_memory() -> int:
    """Return how many bytes of memory a job may use on this host: a fixed share of the RAM.

    Memory limits of containers and of Slurm are ignored.
    """
    return int(USABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def check_memory(config: Config, shape: MeshShape, processes_on_host: int) -> None:
    """Raise `UsageError` if a lower bound on a step's memory exceeds what a device may use.

    No size in `shape` may be -1. No arrays are allocated. CPU devices share the host's memory. If
    the platform does not report a device's memory, there is no limit.
    """
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    if on_cpu:
        room = host_memory() // (jax.local_device_count() * processes_on_host)
    else:
        room = (device.memory_stats() or {}).get("bytes_limit")
    require_memory(config, shape, room, on_cpu)


def require_memory(config: Config, shape: MeshShape, room: int | None, on_cpu: bool) -> None:
    """Raise `UsageError` if a lower bound on a step's memory exceeds `room` bytes per device.

    The lower bound is the sum of `state_bytes` and `score_bytes`. If `room` is None, there is no
    limit.
    """
    state, scores = state_bytes(config, shape), score_bytes(config, shape, on_cpu)
    if room is None or state + scores <= room:
        return
    model, train = config.model, config.train
    keys = {"model.n_layer": model.n_layer, "model.n_embd": model.n_embd}
    if scores > state:
        keys = {"train.batch_size": train.batch_size, "model.block_size": model.block_size}
    raise UsageError(
        f"{' '.join(f'{key}={value}' for key, value in keys.items())}: a step needs at least "
        f"{format_bytes(state + scores)} on each device, but only {format_bytes(room)} is "
        "available; lower these settings or use more devices; python -m jaxgpt.plan "
        "shows what needs the memory"
    )


def state_bytes(config: Config, shape: MeshShape) -> int:
    """Return a lower bound on the bytes of parameters, gradients and moments on a device.

    Only the layers' matrices and the token embedding are counted. Moments are left out if
    parallel.offload=moments. The bound is 0 if parallel.offload=state. No size in `shape` may be
    -1. Raises `UsageError` if moments are counted and optimizer.name is unknown.
    """
    model, zero_stage, offload = config.model, config.parallel.zero_stage, config.parallel.offload
    if offload == "state":
        return 0
    elements = model.matrix_elements // shape.split_of("splits_layers")
    elements += model.n_embd * (model.vocab_size or 0)
    elements //= shape.split_of("splits_heads")
    moments = 0 if offload == "moments" else n_moments(config.optimizer)
    shards = shape.split_of("shards_parameters")
    if model.n_embd % shards:  # then the weights are replicated
        shards = 1
    # Parameters, gradients, moments: (number of copies, lowest ZeRO stage that shards them).
    copies = ((1, 3), (1, 2), (moments, 1))
    parts = {least: shards if zero_stage >= least else 1 for _, least in copies}
    return sum(n * FLOAT32 * elements // parts[least] for n, least in copies)


def score_bytes(config: Config, shape: MeshShape, on_cpu: bool) -> int:
    """Return a lower bound on the bytes of a device's attention scores.

    There are T x T scores per row, layer and head. The `xla` kernel stores at least half of them,
    with at least two bytes per score. With rematerialization, only one layer is counted. In a
    pipeline, only one group of layers is counted. With pure data parallelism on CPUs, only one row
    is counted, because rows may be processed one at a time. The bound is 0 if the model has a
    sliding window, if ring attention may replace the kernel, or if the kernel might not store
    scores. No size in `shape` may be -1. Raises `UsageError` if model.attention is unknown.
    """
    model, remat = config.model, config.parallel.remat
    is_certain = stores_scores(model) and (on_cpu or model.attention != "auto")
    may_use_ring = (  # ring attention requires model.attention=auto or blockwise
        model.attention == "auto"
        and shape.split_of("splits_sequence") > 1
        and config.parallel.context_impl != "ulysses"
    )
    if model.sliding_window or may_use_ring or not is_certain:
        return 0
    one_by_one = on_cpu and shape.splits_only_batch
    rows = 1 if one_by_one else config.microbatch_size // shape.split_of("splits_batch")
    groups = shape.split_of("splits_layers") * config.parallel.stage_repeats
    layers = model.n_layer // groups if remat == "none" else 1
    parts = shape.split_of("splits_heads", "splits_sequence")
    return rows * layers * model.n_head * model.block_size**2 // parts
