"""Checks of settings, each refusal one sentence with the key, the value and what would do."""

import functools
import math
import os
import re

from jaxgpt.config.schema import Config

MAX_TIME_LIMIT = 10**6  # minutes: two years
MAX_INIT_TIMEOUT = 86_400  # seconds: a day
MAX_WINDOW = 10**5  # losses and gradient norms that every device keeps and sorts
MESH_AXES = ("data", "fsdp", "tensor")


class UsageError(ValueError):
    """Something a user gave is wrong. The message names the key, the value and what would do.

    Commands print it as one line and exit with status 2.
    """


def validate(config: Config) -> None:
    """Checks everything that needs neither the data nor the devices.

    Raises:
        UsageError: naming the key, its value, and what would do.
    """
    model, train, optimizer = config.model, config.train, config.optimizer
    for section, keys, least in (
        ("model", ("n_layer", "n_head", "n_embd", "block_size"), 1),
        ("train", ("max_iters", "batch_size", "gradient_accumulation_steps"), 1),
        ("train", ("eval_iters", "log_interval"), 1),
        ("train", ("eval_interval", "sample_tokens", "seed", "loss_chunk"), 0),
        ("optimizer", ("learning_rate", "warmup_iters", "weight_decay", "grad_clip"), 0),
        ("optimizer", ("lr_decay_iters",), 1),
        ("checkpoint", ("keep",), 1),
        ("checkpoint", ("interval",), 0),
        ("spike", ("window",), 4),
        ("spike", ("loss_threshold", "grad_norm_threshold", "max_consecutive_nonfinite"), 1),
        ("spike", ("rewind_margin",), 1),
        ("spike", ("skip_before", "skip_after", "max_rewinds"), 0),
        ("faults", ("nan_device",), 0),
    ):
        for key in keys:
            value = getattr(getattr(config, section), key)
            if not least <= value < math.inf:  # also refuses nan
                raise UsageError(f"{section}.{key}={value}: must be finite and at least {least}")
    if config.spike.window > MAX_WINDOW:
        raise UsageError(f"spike.window={config.spike.window}: must be at most {MAX_WINDOW} steps")
    for key, value in (
        ("train.max_iters", train.max_iters),
        ("train.seed", train.seed),
        ("optimizer.warmup_iters", optimizer.warmup_iters),
        ("optimizer.lr_decay_iters", optimizer.lr_decay_iters),
        ("model.vocab_size", model.vocab_size),
    ):
        if value is not None and value >= 2**31:
            raise UsageError(f"{key}={value}: must be less than 2^31 = {2**31}")
    if train.batch_size * model.block_size >= 2**31:
        raise UsageError(
            f"train.batch_size={train.batch_size}: makes {train.batch_size * model.block_size:,} "
            f"tokens with model.block_size={model.block_size}; a step has less than 2^31"
        )
    if model.vocab_size is not None and model.vocab_size < 2:
        raise UsageError(f"model.vocab_size={model.vocab_size}: must be at least 2, or None")
    if model.n_embd % model.n_head:
        raise UsageError(
            f"model.n_embd={model.n_embd}: must be a multiple of model.n_head={model.n_head}"
        )
    if not 0 <= model.dropout < 1:
        raise UsageError(f"model.dropout={model.dropout}: must be at least 0 and below 1")
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, key) < 1:
            raise UsageError(
                f"optimizer.{key}={getattr(optimizer, key)}: must be at least 0 and below 1"
            )
    if optimizer.min_lr is not None and not 0 <= optimizer.min_lr <= optimizer.learning_rate:
        raise UsageError(
            f"optimizer.min_lr={optimizer.min_lr}: must lie between 0 and "
            f"optimizer.learning_rate={optimizer.learning_rate}"
        )
    if not 1 <= config.init_timeout <= MAX_INIT_TIMEOUT:
        raise UsageError(
            f"init_timeout={config.init_timeout}: must be at least 1 and at most "
            f"{MAX_INIT_TIMEOUT} seconds"
        )
    if train.time_limit is not None and not 0 < train.time_limit <= MAX_TIME_LIMIT:
        raise UsageError(
            f"train.time_limit={train.time_limit}: must be more than 0 and at most "
            f"{MAX_TIME_LIMIT} minutes, or None"
        )
    if train.hang_timeout is not None and not 0 < train.hang_timeout <= MAX_TIME_LIMIT:
        raise UsageError(
            f"train.hang_timeout={train.hang_timeout}: must be more than 0 and at most "
            f"{MAX_TIME_LIMIT} minutes, or None"
        )
    if train.batch_size % train.gradient_accumulation_steps:
        raise UsageError(
            f"train.gradient_accumulation_steps={train.gradient_accumulation_steps}: must divide "
            f"train.batch_size={train.batch_size}"
        )
    if config.out == "":
        raise UsageError("out=: is empty; name a folder, or leave it out for one in runs/")
    skip_ranges(config)
    profile_range(config)
    check_data(config)
    check_spikes(config)
    check_batch(config, mesh_sizes(config))


def expand_user(path: str, key: str = "") -> str:
    """A path with its ~ replaced, which shells do not do in `key=~/...`, and YAML never does.

    Args:
        key: with its `=`, for the error.

    Raises:
        UsageError: if the home directory that is meant is not known.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise UsageError(f"{key}{path}: no home directory is known; give a whole path")
    return found


def check_data(config: Config) -> None:
    """Checks that at most one key says where the data is, and how much of it validates."""
    data = config.data
    given = [key for key in ("path", "blend", "file_list") if getattr(data, key)]
    if len(given) > 1:
        both = " and ".join(f"data.{key}" for key in given)
        raise UsageError(f"{both}: are both given; give one of them")
    if data.path == "":
        raise UsageError("data.path=: is empty; name the data, or leave it out")
    if data.dataset == "":
        raise UsageError("data.dataset=: is empty; name a prepared data set, such as python")
    if not 0 < data.val_share < 1:
        raise UsageError(f"data.val_share={data.val_share}: must be above 0 and below 1")


def check_spikes(config: Config) -> None:
    """Checks that a rewind finds a checkpoint, and that rehearsed faults can happen."""
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
    if faults.nan_step is not None and faults.nan_step < 1:
        raise UsageError(f"faults.nan_step={faults.nan_step}: must be at least 1, or None")


def should_run_every(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps does at `step`; never if it is 0."""
    return interval > 0 and step % interval == 0


def should_evaluate(config: Config, step: int) -> bool:
    """Whether a run evaluates after this step."""
    train = config.train
    return step == train.max_iters or should_run_every(step, train.eval_interval)


def skip_ranges(config: Config) -> tuple[tuple[int, int], ...]:
    """`train_range_to_skip` as (first, last) pairs of steps, both included."""
    return step_ranges("train_range_to_skip", config.train_range_to_skip)


def profile_range(config: Config) -> range:
    """The steps of `profile_steps`, empty for None.

    Raises:
        UsageError: if it is not `A:B`, or those are no steps of the run.
    """
    text, end = config.profile_steps, config.train.max_iters
    if text is None:
        return range(0)
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]) <= end:
        raise UsageError(
            f"profile_steps={text}: must be A:B, the first and the last step to trace, with "
            f"1 <= A <= B <= train.max_iters={end}; for example 11:15 (in YAML, in quotes)"
        )
    return range(int(found[1]), int(found[2]) + 1)


def step_ranges(key: str, steps: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The ranges of steps that a setting lists, as (first, last) pairs, both included.

    Raises:
        UsageError: for an odd count, a step below 1, or a first step after its last.
    """
    shown = " ".join(map(str, steps))
    if len(steps) % 2:
        raise UsageError(
            f"{key}={shown}: has {len(steps)} numbers; give pairs of "
            "first and last step, such as 10 20 25 30"
        )
    pairs = tuple(zip(steps[::2], steps[1::2], strict=True))
    for first, last in pairs:
        if first < 1 or first > last:
            raise UsageError(
                f"{key}={shown}: the range {first} {last} must have 1 <= first <= last"
            )
    return pairs


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
