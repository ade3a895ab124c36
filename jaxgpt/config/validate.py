"""Checks that involve more than one setting. The types in the schema check single settings."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxgpt.config.errors import UsageError
from jaxgpt.config.mesh import MeshShape, axes_with
from jaxgpt.config.schedule import profile_range, skip_ranges, step_ranges
from jaxgpt.config.schema import Config, ModelConfig, OptimizerConfig, settings

MAX_UNROLLED_LAYERS = 512  # limit if layers are not scanned; GPT-3 has 96
MAX_ELEMENTS = 10**15  # limit on the number of weights in all matrices of a model


def validate(config: Config) -> None:
    """Raise `UsageError` if settings contradict each other.

    Also raises `UsageError` for some invalid values of the right type, such as a malformed mesh, an
    empty `out`, or a size that is too large. train.batch_size_per_device is ignored (see
    `with_batch_size`). Types, bounds, choices (see `check_choices`), and rules that depend on the
    data or the devices are checked elsewhere.
    """
    train, data, faults = config.train, config.data, config.faults
    skip_ranges(config)
    profile_range(config)
    step_ranges("faults.random_tokens", faults.random_tokens)
    tokens = train.batch_size * config.model.block_size
    _require(
        tokens < 2**31,
        f"train.batch_size={train.batch_size}: makes {tokens:,} tokens per step with "
        f"model.block_size={config.model.block_size}; a step must have fewer than 2^31 tokens",
    )
    _check_model(config.model)
    _require(
        config.parallel.scan_layers is not False or config.model.n_layer <= MAX_UNROLLED_LAYERS,
        f"model.n_layer={config.model.n_layer}: compiling more than {MAX_UNROLLED_LAYERS} layers "
        "one by one takes many minutes; set parallel.scan_layers=True",
    )
    _check_optimizer(config.optimizer)
    _require(
        train.batch_size % train.gradient_accumulation_steps == 0,
        f"train.gradient_accumulation_steps={train.gradient_accumulation_steps}: must divide "
        f"train.batch_size={train.batch_size}",
    )
    _require(
        train.init_from not in ("scratch", "resume"),
        f"train.init_from={train.init_from}: leave it out; a new run starts from random weights, "
        "and --out FOLDER resumes an existing run from its checkpoint",
    )
    paths = {
        "out": config.out,
        "train.init_from": train.init_from,
        "data.path": data.path,
        "data.dataset": data.dataset,
        "checkpoint.local": config.checkpoint.local,
    }
    for key, path in paths.items():
        _require(path != "", f"{key}=: is empty; set a name, or leave it out")
        _require(
            path is None or path.partition("=")[0] not in settings(),
            f"{key}={path}: is a setting, not a path; give {key} a value",
        )
    sources = [f"data.{key}" for key in ("path", "blend", "file_list") if getattr(data, key)]
    _require(len(sources) <= 1, f"{' and '.join(sources)}: are both given; set only one of them")
    _require(
        config.parallel.offload != "state" or len(set(config.model.layers)) < 2,
        f"parallel.offload=state: all layers must be of the same kind, but model.layers="
        f"{' '.join(config.model.layers)}; use parallel.offload=moments",
    )
    _require(
        config.parallel.offload != "state" or config.scans_layers(on_cpu=True),
        "parallel.offload=state: needs parallel.scan_layers=True, so that a loop can fetch one "
        "layer at a time from host memory",
    )
    _require(
        config.parallel.offload != "state" or train.layers_every == 0,
        f"train.layers_every={train.layers_every}: not possible with parallel.offload=state; leave "
        "it out, or use parallel.offload=moments",
    )
    _check_checkpoints(config)
    _require(
        faults.nan_step is not None or faults.nan_device == 0,
        f"faults.nan_device={faults.nan_device}: set faults.nan_step as well, or leave it out",
    )
    _require(
        faults.bit_flip_step is not None or faults.bit_flip_device == 0,
        f"faults.bit_flip_device={faults.bit_flip_device}: set faults.bit_flip_step as well, or "
        "leave it out",
    )
    check_batch(config, mesh_shape(config))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def _check_checkpoints(config: Config) -> None:
    checkpoint, margin = config.checkpoint, config.spike.rewind_margin
    interval, every, best = checkpoint.interval, checkpoint.keep_every, checkpoint.keep_best
    oldest = interval * (checkpoint.keep - 1)
    _require(
        config.spike.action != "rewind" or oldest >= margin,
        f"spike.rewind_margin={margin}: spike.action=rewind needs a checkpoint that is at least "
        f"this many steps old, but with checkpoint.keep={checkpoint.keep} and "
        f"checkpoint.interval={interval} the oldest may be only {oldest} steps old; increase "
        "checkpoint.keep or checkpoint.interval, or lower spike.rewind_margin",
    )
    _require(
        every is None or (interval > 0 and every % interval == 0),
        f"checkpoint.keep_every={every}: must be a multiple of checkpoint.interval={interval}, "
        "which must not be 0",
    )
    shorter, longer = sorted((interval, config.train.eval_interval))
    _require(
        best == 0 or (shorter > 0 and longer % shorter == 0),
        f"checkpoint.keep_best={best}: checkpoints must be evaluated, so checkpoint.interval="
        f"{interval} and train.eval_interval={config.train.eval_interval} must not be 0, and one "
        "must be a multiple of the other",
    )


def _check_model(model: ModelConfig) -> None:
    elements = model.matrix_elements + model.n_embd * (model.vocab_size or 0)
    _require(
        elements <= MAX_ELEMENTS,
        f"model.n_embd={model.n_embd}: makes {elements:.1e} parameters with model.n_layer="
        f"{model.n_layer} and the other sizes of the model; the limit is {MAX_ELEMENTS:.0e}",
    )
    _require(
        model.head_dim is not None or model.n_embd % model.n_head == 0,
        f"model.n_embd={model.n_embd}: must be a multiple of model.n_head={model.n_head}, unless "
        "model.head_dim is set",
    )
    _require(
        model.n_head % model.kv_heads == 0,
        f"model.n_kv_head={model.n_kv_head}: must divide model.n_head={model.n_head}",
    )
    is_rope, scaling = model.position == "rope", model.rope_scaling
    _require(
        not is_rope or model.head_size % 2 == 0,
        f"model.position=rope: rotates pairs of elements, so model.head_dim={model.head_size} must "
        "be even",
    )
    shown = f"model.rope_scaling={' '.join(map(str, scaling))}"
    if len(scaling) not in (0, 1, 4):
        raise UsageError(
            f"{shown}: must be one factor, or four values: factor, low_freq_factor, "
            "high_freq_factor and original_max_position"
        )
    _require(not scaling or scaling[0] >= 1, f"{shown}: the factor must be at least 1")
    if len(scaling) == 4:
        factor, low, high, original = scaling
        _require(
            0 < low < high and original >= 1,
            f"{shown}: needs 0 < low_freq_factor < high_freq_factor and original_max_position >= "
            "1, such as 8 1 4 8192",
        )
    rope_keys = ("rope_theta", "rope_scaling", "local_rope_theta")
    changed = [f"model.{key}" for key in rope_keys if is_changed(model, key)]
    _require(is_rope or not changed, f"{' and '.join(changed)}: need model.position=rope")
    pattern = f"model.layers={' '.join(model.layers)}"
    _require(
        len(model.layers) <= model.n_layer,
        f"{pattern}: has {len(model.layers)} layers, but at most model.n_layer={model.n_layer} are "
        "allowed",
    )
    _require(
        "local" not in model.layers or model.sliding_window is not None,
        f"{pattern}: local layers need a window; set model.sliding_window, for example to 512",
    )
    _require(
        model.local_rope_theta is None or model.sliding_window is not None,
        f"model.local_rope_theta={model.local_rope_theta}: needs local layers; set "
        "model.sliding_window",
    )
    _require(
        not (model.bias and model.qkv_bias),
        "model.qkv_bias=True: is included in model.bias=True; set only one of them",
    )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    peak, min_lr = optimizer.learning_rate, optimizer.min_lr
    _require(
        optimizer.schedule == "constant" or 0 <= (min_lr or 0) <= peak,
        f"optimizer.min_lr={min_lr}: must be between 0 and optimizer.learning_rate={peak}",
    )
    _require(
        optimizer.name != "muon" or peak > 0 or optimizer.adamw_learning_rate is None,
        f"optimizer.adamw_learning_rate={optimizer.adamw_learning_rate}: needs an "
        "optimizer.learning_rate above 0, because it is scaled by the same schedule",
    )
    if optimizer.schedule != "wsd":
        return
    end, warmup = optimizer.lr_decay_iters, optimizer.warmup_iters
    start, length = optimizer.wsd_decay_start, optimizer.wsd_decay_iters
    _require(
        start >= 0,
        f"optimizer.wsd_decay_iters={length}: must be at most optimizer.lr_decay_iters={end}",
    )
    shown = "a fifth of" if length is None else f"optimizer.wsd_decay_iters={length} before"
    shorter = f", or set optimizer.wsd_decay_iters={end - warmup} or less" if end > warmup else ""
    _require(
        warmup <= start,
        f"optimizer.warmup_iters={warmup}: must be at most {start}, the step at which wsd begins "
        f"to decay ({shown} optimizer.lr_decay_iters={end}); lower it, increase "
        f"optimizer.lr_decay_iters{shorter}",
    )


def is_changed(section: Any, key: str) -> bool:
    """Return whether a section's setting `key` differs from its default."""
    return getattr(section, key) != getattr(type(section)(), key)


def parse_mesh(text: str, n_devices: int | None = None) -> MeshShape:
    """Parse `text`, the value of parallel.mesh, into a mesh shape.

    `n_devices` is the job's number of devices. If it is None, a size of -1 is kept, and the number
    of devices is not checked. Raises `UsageError` if the text is malformed or does not fit the
    devices.
    """
    try:
        shape = MeshShape.parse(text)
        return shape if n_devices is None else shape.fill(n_devices)
    except ValueError as error:
        raise UsageError(f"parallel.mesh={text}: {error}") from None


def mesh_shape(config: Config, n_devices: int | None = None) -> MeshShape:
    """Return the mesh shape that parallel.mesh describes.

    `n_devices` is the job's number of devices. If it is None, a size of -1 is kept and counts as 1,
    and the number of devices is not checked. Raises `UsageError` if parallel.mesh is malformed, or
    if the parallel layout does not fit the devices, the model or other settings. The batch size is
    not checked (see `check_batch`).
    """
    model, key = config.model, f"parallel.mesh={config.parallel.mesh}"
    shape = parse_mesh(config.parallel.mesh, n_devices)
    tensor = shape.split_of("splits_heads")
    if model.n_head % tensor:
        divisors = [str(n) for n in range(1, min(model.n_head, 1024) + 1) if model.n_head % n == 0]
        raise UsageError(
            f"{key}: tensor={tensor} does not divide model.n_head={model.n_head}; "
            f"use one of {', '.join(divisors)}"
        )
    if model.mlp_width % tensor:
        raise UsageError(
            f"{key}: tensor={tensor} does not divide the width of the MLP, {model.mlp_width} "
            "(model.mlp_hidden, by default computed from model.n_embd); change one of them"
        )
    _check_pipeline(config, shape.split_of("splits_layers"))
    if config.parallel.sequence_parallel and model.block_size % tensor:
        raise UsageError(
            f"parallel.sequence_parallel=True: tensor={tensor} ({key}) must divide "
            f"model.block_size={model.block_size}"
        )
    if shape.split_of("splits_sequence") > 1:
        _check_sequence(config, shape)
    return shape


def _check_pipeline(config: Config, n_stages: int) -> None:
    """Raise `UsageError` if the model or other settings do not fit the pipeline stages."""
    parallel, layers, repeats = config.parallel, config.model.n_layer, config.parallel.stage_repeats
    _require(
        parallel.schedule == "circular" or repeats == 1,
        f"parallel.stage_repeats={repeats}: needs parallel.schedule=circular",
    )
    if n_stages == 1:
        return
    key = f"parallel.mesh={parallel.mesh}"
    pattern = len(config.model.layers) if len(set(config.model.layers)) > 1 else 1
    _require(
        layers % pattern == 0,
        f"{key}: stage={n_stages} needs whole layer patterns, but model.n_layer={layers} is not a "
        f"multiple of the {pattern} layers in model.layers",
    )
    shown, product = f"stage={n_stages}", "stage"
    if repeats > 1:
        shown += f" x parallel.stage_repeats={repeats}"
        product += " x parallel.stage_repeats"
    times = f" in patterns of {pattern} layers" if pattern > 1 else ""
    _require(
        n_stages * repeats <= layers // pattern,
        f"{key}: {shown} is more than model.n_layer={layers}{times} allows; use at most {product}="
        f"{layers // pattern}",
    )
    n = config.train.gradient_accumulation_steps
    _require(
        n >= n_stages,
        f"train.gradient_accumulation_steps={n}: a pipeline with stage={n_stages} needs at least "
        f"{n_stages} microbatches ({key}); use train.gradient_accumulation_steps={n_stages} or "
        "more, or fewer stages",
    )
    _require(
        parallel.reduce_every == "step",
        f"parallel.reduce_every=microbatch: a pipeline ({key}) reduces gradients once per step; "
        "leave it out",
    )
    _require(
        parallel.offload == "none",
        f"parallel.offload={parallel.offload}: is not supported with pipeline stages ({key}); use "
        "more stages, or fsdp",
    )


def _check_sequence(config: Config, shape: MeshShape) -> None:
    """Raise `UsageError` if sequences cannot be split evenly, or if attention does not allow it."""
    axes, parallel, T = axes_with("splits_sequence"), config.parallel, config.model.block_size
    if parallel.sequence_parallel:
        axes = axes_with("splits_sequence", "splits_heads")
    n = math.prod(max(1, shape[axis]) for axis in axes)
    _require(
        T % n == 0,
        f"parallel.mesh={parallel.mesh}: {' x '.join(axes)} = {n} must divide "
        f"model.block_size={T}; change one of them",
    )
    obstacles = {"ulysses": ulysses_obstacle(config, shape), "ring": ring_obstacle(config, shape)}
    chosen = obstacles.get(parallel.context_impl)
    _require(
        chosen is None,
        f"parallel.context_impl={parallel.context_impl}: {chosen}; change that, or use "
        "parallel.context_impl=auto",
    )
    _require(
        None in obstacles.values(),
        f"parallel.mesh={parallel.mesh}: attention is not possible with ulysses "
        f"({obstacles['ulysses']}), nor with ring ({obstacles['ring']})",
    )


def ulysses_obstacle(config: Config, shape: MeshShape) -> str | None:
    """Return the reason why ulysses attention is impossible, or None.

    A size of -1 in `shape` counts as 1. Rules that apply to both ulysses and ring attention are
    checked in `mesh_shape`.
    """
    roles, n_head = ("splits_sequence", "splits_heads"), config.model.n_head
    if n_head % (n := shape.split_of(*roles)):
        return f"{' x '.join(axes_with(*roles))} = {n} does not divide model.n_head={n_head}"
    return None


def ring_obstacle(config: Config, shape: MeshShape) -> str | None:
    """Return the reason why ring attention is impossible, or None.

    A size of -1 in `shape` counts as 1. Rules that apply to both ulysses and ring attention are
    checked in `mesh_shape`.
    """
    model, n_chunks = config.model, 2 * shape.split_of("splits_sequence")
    if model.block_size % n_chunks:
        axes = " x ".join(axes_with("splits_sequence"))
        return f"2 x {axes} = {n_chunks} does not divide model.block_size={model.block_size}"
    if model.dropout:
        return f"ring attention cannot use attention dropout, but model.dropout={model.dropout}"
    if model.attention not in ("auto", "blockwise"):
        return f"ring attention has its own blockwise kernel, but model.attention={model.attention}"
    return None


def devices_per_process(shape: MeshShape, n_processes: int) -> int:
    """Return the number of devices of each process. The mesh must not contain -1.

    Raises `UsageError` if the devices cannot be divided evenly among the processes.
    """
    n_devices, rest = divmod(shape.n_devices, n_processes)
    if rest:
        raise UsageError(
            f"parallel.mesh={shape}: its {shape.n_devices} devices cannot be divided evenly among "
            f"{n_processes} processes; the number of processes must divide the number of devices"
        )
    return n_devices


def check_batch(config: Config, shape: MeshShape) -> None:
    """Raise `UsageError` if a microbatch cannot be split evenly over the devices.

    Does nothing if an axis that splits the batch has size -1. train.batch_size_per_device is
    ignored.
    """
    axes, n = axes_with("splits_batch"), shape.split_of("splits_batch")
    if all(shape[axis] > 0 for axis in axes) and config.microbatch_size % n:
        accumulation = config.train.gradient_accumulation_steps
        split = f"/{accumulation} microbatches" if accumulation > 1 else ""
        raise UsageError(
            f"train.batch_size={config.train.batch_size}{split}: must be a multiple of "
            f"{' x '.join(axes)} = {n} (parallel.mesh={shape})"
        )


def with_batch_size(config: Config, shape: MeshShape) -> Config:
    """Return the configuration with train.batch_size_per_device replaced by train.batch_size.

    If train.batch_size_per_device is None, the configuration is returned unchanged. A size of -1 in
    `shape` counts as 1. Raises `UsageError` if the batch has 2^31 sequences or more.
    """
    size = config.train.batch_size_per_device
    if size is None:
        return config
    n = shape.split_of("splits_batch")
    total = size * n * config.train.gradient_accumulation_steps
    _require(
        total < 2**31,
        f"train.batch_size_per_device={size}: makes {total:,} sequences per step; the limit is "
        "2^31",
    )
    return config.replace(train__batch_size=total, train__batch_size_per_device=None)


def describe_batch_size(config: Config, shape: MeshShape) -> str:
    """Return a line that explains how `with_batch_size` computes train.batch_size.

    train.batch_size_per_device must be set. Raises `UsageError`, as `with_batch_size` does.
    """
    train, n = config.train, shape.split_of("splits_batch")
    devices, steps = "devices" if n > 1 else "device", train.gradient_accumulation_steps
    sequences = "sequences" if train.batch_size_per_device != 1 else "sequence"
    parts = f" x {steps} microbatches" if steps > 1 else ""
    total = with_batch_size(config, shape).train.batch_size
    return (
        f"train.batch_size={total}: {train.batch_size_per_device} {sequences} per device x {n} "
        f"{devices}{parts}; {total * config.model.block_size:,} tokens per step"
    )


# Maps each key to its allowed values, and each value to the keys of the same section that it uses.
# Keys that every value uses are omitted.
Choices = Mapping[str, Mapping[str, Sequence[str]]]
_SCHEDULES = {
    "cosine": ("min_lr", "lr_decay_iters"),
    "linear": ("min_lr", "lr_decay_iters"),
    "wsd": ("min_lr", "lr_decay_iters", "wsd_decay_iters", "wsd_decay"),
    "constant": (),
}


def check_choice(key: str, value: Any, allowed: Collection[str]) -> None:
    """Raise `UsageError` if a setting's value is not allowed."""
    if value not in allowed:
        raise UsageError(f"{key}={value}: must be one of {', '.join(allowed)}")


def check_choices(config: Config, given: Mapping[str, Sequence[str]], choices: Choices) -> None:
    """Raise `UsageError` if a choice is unknown, or if a setting in `given` has no effect.

    The values of optimizer.schedule and of the keys in `choices` are checked. A setting has no
    effect if the chosen value does not use it, but another value does. data.end_of_text has no
    effect unless data.document_mask is set. Other settings that have no effect are not detected.
    Also raises `UsageError` if `given` has both train.batch_size and train.batch_size_per_device.
    `given` holds the strings for each key on the command line.
    """
    if "data.end_of_text" in given and not config.data.document_mask:
        raise UsageError(
            f"data.end_of_text={config.data.end_of_text}: has no effect without "
            "data.document_mask=True; set that, or leave it out"
        )
    if {"train.batch_size", "train.batch_size_per_device"} <= given.keys():
        raise UsageError(
            f"train.batch_size_per_device={config.train.batch_size_per_device}: train.batch_size "
            "is also given; leave out one of them"
        )
    for key, uses in {"optimizer.schedule": _SCHEDULES, **choices}.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        check_choice(key, value, uses)
        for unused in sorted(set().union(*uses.values()) - set(uses[value])):
            if words := given.get(f"{section}.{unused}"):
                raise UsageError(
                    f"{section}.{unused}={' '.join(words)}: has no effect with {key}={value}; "
                    "leave it out"
                )
