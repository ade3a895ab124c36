"""Checks that concern several settings; the bounds of a single one stand in the schema.

Each refusal is one sentence with the key, the value and the remedy.
"""

import functools

from jaxgpt.config.errors import UsageError
from jaxgpt.config.schedule import profile_range, skip_ranges, step_ranges
from jaxgpt.config.schema import Config

MESH_AXES = ("data", "fsdp", "tensor")


def validate(config: Config) -> None:
    """Check everything that needs neither the data nor the devices.

    Raises:
        UsageError: naming the key, its value, and the remedy.
    """
    if config.out == "":
        raise UsageError("out=: is empty; name a folder, or leave it out for one in runs/")
    skip_ranges(config)
    profile_range(config)
    check_sizes(config)
    check_data(config)
    check_spikes(config)
    check_batch(config, mesh_sizes(config))


def check_sizes(config: Config) -> None:
    """Check sizes and rates that depend on each other.

    Raises:
        UsageError: naming both.
    """
    model, train, optimizer = config.model, config.train, config.optimizer
    if train.batch_size * model.block_size >= 2**31:
        raise UsageError(
            f"train.batch_size={train.batch_size}: makes {train.batch_size * model.block_size:,} "
            f"tokens with model.block_size={model.block_size}; a step has less than 2^31"
        )
    if model.n_embd % model.n_head:
        raise UsageError(
            f"model.n_embd={model.n_embd}: must be a multiple of model.n_head={model.n_head}"
        )
    if optimizer.min_lr is not None and not 0 <= optimizer.min_lr <= optimizer.learning_rate:
        raise UsageError(
            f"optimizer.min_lr={optimizer.min_lr}: must lie between 0 and "
            f"optimizer.learning_rate={optimizer.learning_rate}"
        )
    if train.batch_size % train.gradient_accumulation_steps:
        raise UsageError(
            f"train.gradient_accumulation_steps={train.gradient_accumulation_steps}: must divide "
            f"train.batch_size={train.batch_size}"
        )


def check_data(config: Config) -> None:
    """Check that at most one key says where the data is, and that none is empty."""
    data = config.data
    given = [key for key in ("path", "blend", "file_list") if getattr(data, key)]
    if len(given) > 1:
        both = " and ".join(f"data.{key}" for key in given)
        raise UsageError(f"{both}: are both given; give one of them")
    if data.path == "":
        raise UsageError("data.path=: is empty; name the data, or leave it out")
    if data.dataset == "":
        raise UsageError("data.dataset=: is empty; name a prepared data set, such as python")


def check_spikes(config: Config) -> None:
    """Check that a rewind finds a checkpoint, and that rehearsed faults can happen."""
    spike, checkpoint, faults = config.spike, config.checkpoint, config.faults
    if spike.action == "rewind" and checkpoint.interval == 0:
        raise UsageError(
            "checkpoint.interval=0: spike.action=rewind goes back to checkpoints at fixed steps; "
            "give the steps between them"
        )
    kept = checkpoint.interval * (checkpoint.keep - 1)
    if spike.action == "rewind" and kept < spike.rewind_margin:
        raise UsageError(
            f"spike.rewind_margin={spike.rewind_margin}: the oldest of checkpoint.keep="
            f"{checkpoint.keep} checkpoints, checkpoint.interval={checkpoint.interval} steps "
            f"apart, may be only {kept} steps old; keep more of them, or take a smaller margin"
        )
    step_ranges("faults.random_tokens", faults.random_tokens)
    if faults.nan_step is None and faults.nan_device:
        raise UsageError(
            f"faults.nan_device={faults.nan_device}: needs faults.nan_step, the step at which that "
            "device fails"
        )


def mesh_sizes(config: Config, n_devices: int | None = None) -> tuple[int, ...]:
    """Sizes of the axes (data, fsdp, tensor), checked against the model.

    Args:
        n_devices: devices of the whole job; None leaves a -1 as it is, with the checks that
            need its size left for later.

    Raises:
        UsageError: if the sizes are malformed, their product is not `n_devices`, or they do
            not divide what they split.
    """
    text = config.parallel.mesh
    key = f"parallel.mesh={text}"
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if (
        len(sizes) != len(MESH_AXES)
        or any(size < 1 and size != -1 for size in sizes)
        or sizes.count(-1) > 1
    ):
        raise UsageError(
            f"{key}: must be three sizes {','.join(MESH_AXES)}, each at least 1, "
            "at most one of them -1; for example 2,1,4"
        )
    if n_devices is not None and -1 in sizes:
        known = -functools.reduce(int.__mul__, sizes)
        if n_devices % known:
            raise UsageError(f"{key}: {known} does not divide the job's {n_devices} devices")
        sizes[sizes.index(-1)] = n_devices // known
    data, fsdp, tensor = sizes
    if n_devices is not None and data * fsdp * tensor != n_devices:
        raise UsageError(
            f"{key}: the product is {data * fsdp * tensor} but the job has {n_devices} devices; "
            "they must be equal (-1 fills one axis)"
        )
    if tensor > 0 and config.model.n_head % tensor:
        raise UsageError(
            f"{key}: tensor={tensor} does not divide model.n_head={config.model.n_head}; "
            f"it can be {', '.join(map(str, _divisors(config.model.n_head)))}"
        )
    if config.parallel.sequence_parallel and tensor > 0 and config.model.block_size % tensor:
        raise UsageError(
            f"parallel.sequence_parallel=True: tensor={tensor} ({key}) must divide "
            f"model.block_size={config.model.block_size}"
        )
    return tuple(sizes)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def check_batch(config: Config, sizes: tuple[int, ...]) -> None:
    """Checks that every device along data and fsdp gets equally many rows of a microbatch.

    Args:
        sizes: what `mesh_sizes` returned; an axis of -1 is left for later.

    Raises:
        UsageError: if the rows cannot be shared out.
    """
    data, fsdp, _ = sizes
    if data > 0 and fsdp > 0 and config.microbatch_size % (data * fsdp):
        accumulation = config.train.gradient_accumulation_steps
        split = f"/{accumulation} microbatches" if accumulation > 1 else ""
        raise UsageError(
            f"train.batch_size={config.train.batch_size}{split}: must be a multiple of "
            f"data x fsdp = {data * fsdp} (parallel.mesh={','.join(map(str, sizes))})"
        )
