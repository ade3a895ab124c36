"""Checks that concern several settings; the bounds of a single one stand in the schema.

Each refusal is one sentence with the key, the value and the remedy.
"""

from jaxgpt.config.errors import UsageError
from jaxgpt.config.mesh_shape import MeshShape, axes_with
from jaxgpt.config.schedule import profile_range, skip_ranges, step_ranges
from jaxgpt.config.schema import Config


def validate(config: Config) -> None:
    """Check everything that needs neither the data nor the devices.

    Raises:
        UsageError: naming the key, its value, and the remedy.
    """
    skip_ranges(config)
    profile_range(config)
    step_ranges("faults.random_tokens", config.faults.random_tokens)
    _check_sizes(config)
    _check_paths(config)
    _check_spikes(config)
    check_batch(config, mesh_shape(config))


def _check_sizes(config: Config) -> None:
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


def _check_paths(config: Config) -> None:
    data = config.data
    paths = {"out": config.out, "data.path": data.path, "data.dataset": data.dataset}
    for key, path in paths.items():
        if path == "":
            raise UsageError(f"{key}=: is empty; give a name, or leave it out")
    given = [f"data.{key}" for key in ("path", "blend", "file_list") if getattr(data, key)]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: are both given; give one of them")


def _check_spikes(config: Config) -> None:
    spike, checkpoint, faults = config.spike, config.checkpoint, config.faults
    kept = checkpoint.interval * (checkpoint.keep - 1)
    if spike.action == "rewind" and kept < spike.rewind_margin:
        raise UsageError(
            f"spike.rewind_margin={spike.rewind_margin}: spike.action=rewind needs a checkpoint so "
            f"old, but the oldest of checkpoint.keep={checkpoint.keep} at intervals of "
            f"checkpoint.interval={checkpoint.interval} may be {kept} steps old; raise one of them"
        )
    if faults.nan_step is None and faults.nan_device:
        raise UsageError(f"faults.nan_device={faults.nan_device}: needs faults.nan_step, its step")


def mesh_shape(config: Config, n_devices: int | None = None) -> MeshShape:
    """Return parallel.mesh as a shape, checked against the model.

    Args:
        n_devices: devices of the whole job; None leaves a -1 as it is, and the checks that need
            its size for later.

    Raises:
        UsageError: if the sizes are malformed, their product is not `n_devices`, or they do not
            divide what they split.
    """
    model, key = config.model, f"parallel.mesh={config.parallel.mesh}"
    try:
        shape = MeshShape.parse(config.parallel.mesh)
        if n_devices is not None:
            shape = shape.fill(n_devices)
    except ValueError as error:
        raise UsageError(f"{key}: {error}") from None
    tensor = shape.split_of("splits_layers")
    if model.n_head % tensor:
        divisors = [str(n) for n in range(1, model.n_head + 1) if model.n_head % n == 0]
        raise UsageError(
            f"{key}: tensor={tensor} does not divide model.n_head={model.n_head}; "
            f"it can be {', '.join(divisors)}"
        )
    if config.parallel.sequence_parallel and model.block_size % tensor:
        raise UsageError(
            f"parallel.sequence_parallel=True: tensor={tensor} ({key}) must divide "
            f"model.block_size={model.block_size}"
        )
    return shape


def check_batch(config: Config, shape: MeshShape) -> None:
    """Check that every device along axes that split the batch gets equally many rows.

    Args:
        shape: as `mesh_shape` returns it; an axis of -1 is left for later.

    Raises:
        UsageError: if the rows of a microbatch cannot be shared out.
    """
    axes, n = axes_with("splits_batch"), shape.split_of("splits_batch")
    if all(shape[axis] > 0 for axis in axes) and config.microbatch_size % n:
        accumulation = config.train.gradient_accumulation_steps
        split = f"/{accumulation} microbatches" if accumulation > 1 else ""
        raise UsageError(
            f"train.batch_size={config.train.batch_size}{split}: must be a multiple of "
            f"{' x '.join(axes)} = {n} (parallel.mesh={shape})"
        )
