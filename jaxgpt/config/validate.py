"""Checks that concern several settings; the bounds of a single one stand in the schema."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxgpt.config.errors import UsageError
from jaxgpt.config.mesh import MeshShape, axes_with
from jaxgpt.config.schedule import profile_range, skip_ranges, step_ranges
from jaxgpt.config.schema import CheckpointConfig, Config, ModelConfig, OptimizerConfig

MAX_APART = 512  # layers without a loop over them: GPT-3 has 96
MAX_ELEMENTS = 10**15  # of a model's matrices


def validate(config: Config) -> None:
    """Check everything that needs neither the data nor the devices; else raise `UsageError`."""
    skip_ranges(config)
    profile_range(config)
    step_ranges("faults.random_tokens", config.faults.random_tokens)
    for is_wrong, sentence in _checks(config):
        if is_wrong:
            raise UsageError(sentence)
    check_batch(config, mesh_shape(config))


def _checks(config: Config) -> Iterator[tuple[bool, str]]:
    """Yield what must not be, and the sentence that refuses it."""
    model, train, optimizer, data = config.model, config.train, config.optimizer, config.data
    spike, checkpoint, faults = config.spike, config.checkpoint, config.faults
    tokens = train.batch_size * model.block_size
    yield (
        tokens >= 2**31,
        f"train.batch_size={train.batch_size}: makes {tokens:,} tokens with "
        f"model.block_size={model.block_size}; a step has less than 2^31",
    )
    yield from _model_checks(model)
    yield (
        config.parallel.scan_layers is False and model.n_layer > MAX_APART,
        f"model.n_layer={model.n_layer}: more than {MAX_APART} layers would compile one by one for "
        "many minutes; give parallel.scan_layers=True",
    )
    yield from _optimizer_checks(optimizer)
    yield (
        train.batch_size % train.gradient_accumulation_steps > 0,
        f"train.gradient_accumulation_steps={train.gradient_accumulation_steps}: must divide "
        f"train.batch_size={train.batch_size}",
    )
    yield (
        train.init_from in ("scratch", "resume"),
        f"train.init_from={train.init_from}: leave it out: a run starts from new weights, and with "
        "--out FOLDER it goes on from its checkpoint",
    )
    paths = {
        "out": config.out,
        "train.init_from": train.init_from,
        "data.path": data.path,
        "data.dataset": data.dataset,
        "checkpoint.stage": checkpoint.stage,
    }
    for key, path in paths.items():
        yield path == "", f"{key}=: is empty; give a name, or leave it out"
    given = [f"data.{key}" for key in ("path", "blend", "file_list") if getattr(data, key)]
    yield len(given) > 1, f"{' and '.join(given)}: are both given; give one of them"
    parallel = config.parallel
    yield (
        parallel.offload == "state" and not config.scans_layers(on_cpu=True),
        "parallel.offload=state: needs parallel.scan_layers=True, whose loop gets one layer at a "
        "time from the host's memory",
    )
    kept = checkpoint.interval * (checkpoint.keep - 1)
    yield (
        spike.action == "rewind" and kept < spike.rewind_margin,
        f"spike.rewind_margin={spike.rewind_margin}: spike.action=rewind needs a checkpoint so "
        f"old, but the oldest of checkpoint.keep={checkpoint.keep} at intervals of "
        f"checkpoint.interval={checkpoint.interval} may be {kept} steps old; raise one of them",
    )
    yield from _retention_checks(checkpoint, train.eval_interval)
    yield (
        faults.nan_step is None and faults.nan_device > 0,
        f"faults.nan_device={faults.nan_device}: needs faults.nan_step, its step",
    )
    yield (
        faults.bit_flip_step is None and faults.bit_flip_device > 0,
        f"faults.bit_flip_device={faults.bit_flip_device}: needs faults.bit_flip_step, its step",
    )


def _retention_checks(
    checkpoint: CheckpointConfig, eval_interval: int
) -> Iterator[tuple[bool, str]]:
    """Yield the same of the checkpoints that stay."""
    interval, every, best = checkpoint.interval, checkpoint.keep_every, checkpoint.keep_best
    yield (
        every is not None and (interval == 0 or every % interval > 0),
        f"checkpoint.keep_every={every}: must be a multiple of checkpoint.interval={interval}, or "
        "there are no checkpoints of such steps",
    )
    shorter, longer = sorted((interval, eval_interval))
    yield (
        best > 0 and (shorter == 0 or longer % shorter > 0),
        f"checkpoint.keep_best={best}: needs evaluations at the steps of checkpoints: of "
        f"checkpoint.interval={interval} and train.eval_interval={eval_interval} one must be a "
        "multiple of the other",
    )


def _model_checks(model: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Yield the same of the model's options."""
    heads = f"model.n_head={model.n_head}"
    elements = model.matrix_elements + model.n_embd * (model.vocab_size or 0)
    yield (
        elements > MAX_ELEMENTS,
        f"model.n_embd={model.n_embd}: makes {elements:.1e} parameters with model.n_layer="
        f"{model.n_layer} and the other sizes of the model; give less",
    )
    yield (
        model.head_dim is None and model.n_embd % model.n_head > 0,
        f"model.n_embd={model.n_embd}: must be a multiple of {heads}, or give model.head_dim",
    )
    yield (
        model.n_head % model.kv_heads > 0,
        f"model.n_kv_head={model.n_kv_head}: must divide {heads}",
    )
    is_rope, scaling = model.position == "rope", model.rope_scaling
    shown = f"model.rope_scaling={' '.join(map(str, scaling))}"
    yield (
        is_rope and model.head_size % 2 > 0,
        f"model.position=rope: turns pairs of a head's numbers, and model.head_dim="
        f"{model.head_size} is odd; give an even one",
    )
    yield (
        len(scaling) not in (0, 4),
        f"{shown}: must be factor, low_freq_factor, high_freq_factor and original_max_position",
    )
    yield (
        len(scaling) == 4
        and not (scaling[0] >= 1 and 0 < scaling[1] < scaling[2] and scaling[3] >= 1),
        f"{shown}: needs factor >= 1, 0 < low_freq_factor < high_freq_factor and "
        "original_max_position >= 1, as in 8 1 4 8192",
    )
    changed = [f"model.{key}" for key in ("rope_theta", "rope_scaling") if is_changed(model, key)]
    yield (
        not is_rope and bool(changed),
        f"{' and '.join(changed)}: need model.position=rope",
    )
    yield (
        model.bias and model.qkv_bias,
        "model.qkv_bias=True: is part of model.bias=True; give one of them",
    )


def is_changed(section: Any, key: str) -> bool:
    """Return whether a setting differs from its default."""
    return getattr(section, key) != getattr(type(section)(), key)


def mesh_shape(config: Config, n_devices: int | None = None) -> MeshShape:
    """Return parallel.mesh as a shape, checked against the model; else raise `UsageError`.

    Without the number of `n_devices` of the job a -1 stays, and is checked later.
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
        divisors = [str(n) for n in range(1, min(model.n_head, 1024) + 1) if model.n_head % n == 0]
        raise UsageError(
            f"{key}: tensor={tensor} does not divide model.n_head={model.n_head}; "
            f"it can be {', '.join(divisors)}"
        )
    if model.mlp_width % tensor:
        raise UsageError(
            f"{key}: tensor={tensor} does not divide the width of the MLP, {model.mlp_width} "
            "(model.mlp_hidden, or what follows from model.n_embd); change one of them"
        )
    if config.parallel.sequence_parallel and model.block_size % tensor:
        raise UsageError(
            f"parallel.sequence_parallel=True: tensor={tensor} ({key}) must divide "
            f"model.block_size={model.block_size}"
        )
    return shape


def check_batch(config: Config, shape: MeshShape) -> None:
    """Raise `UsageError` unless a microbatch's rows can be shared out; a -1 is left for later."""
    axes, n = axes_with("splits_batch"), shape.split_of("splits_batch")
    if all(shape[axis] > 0 for axis in axes) and config.microbatch_size % n:
        accumulation = config.train.gradient_accumulation_steps
        split = f"/{accumulation} microbatches" if accumulation > 1 else ""
        raise UsageError(
            f"train.batch_size={config.train.batch_size}{split}: must be a multiple of "
            f"{' x '.join(axes)} = {n} (parallel.mesh={shape})"
        )


def _optimizer_checks(optimizer: OptimizerConfig) -> Iterator[tuple[bool, str]]:
    """Yield the same of the optimizer's settings."""
    yield (
        optimizer.schedule != "constant"
        and not 0 <= (optimizer.min_lr or 0) <= optimizer.learning_rate,
        f"optimizer.min_lr={optimizer.min_lr}: must lie between 0 and "
        f"optimizer.learning_rate={optimizer.learning_rate}",
    )
    yield (
        optimizer.name == "muon"
        and optimizer.learning_rate == 0
        and optimizer.adamw_learning_rate is not None,
        f"optimizer.adamw_learning_rate={optimizer.adamw_learning_rate}: needs an "
        "optimizer.learning_rate above 0, whose schedule it follows",
    )
    end, warmup = optimizer.lr_decay_iters, optimizer.warmup_iters
    start, given = optimizer.wsd_decay_start, optimizer.wsd_decay_iters
    is_wsd = optimizer.schedule == "wsd"
    yield (
        is_wsd and start < 0,
        f"optimizer.wsd_decay_iters={given}: must be at most optimizer.lr_decay_iters={end}",
    )
    length = "a fifth of" if given is None else f"optimizer.wsd_decay_iters={given} before"
    shorter = f"; or give optimizer.wsd_decay_iters={end - warmup} or less" if end > warmup else ""
    yield (
        is_wsd and warmup > start,
        f"optimizer.warmup_iters={warmup}: must be at most {start}, the step at which wsd begins "
        f"to decay ({length} optimizer.lr_decay_iters={end}); lower it, or raise "
        f"optimizer.lr_decay_iters{shorter}",
    )


# Keys of `optimizer` without an effect, by the setting that ignores them.
_UNUSED = {
    ("name", "adamw"): ("momentum", "adamw_learning_rate"),
    ("name", "lion"): ("momentum", "adamw_learning_rate"),
    ("name", "adafactor"): ("beta1", "beta2", "momentum", "adamw_learning_rate"),
    ("name", "sgd"): ("beta1", "beta2", "adamw_learning_rate"),
    ("schedule", "cosine"): ("wsd_decay_iters", "wsd_decay"),
    ("schedule", "constant"): ("min_lr", "lr_decay_iters", "wsd_decay_iters", "wsd_decay"),
}


def check_used(config: Config, given: Mapping[str, Sequence[str]]) -> None:
    """Raise `UsageError` if a setting that was typed does nothing beside the others."""
    if "data.end_of_text" in given and not config.data.document_mask:
        raise UsageError(
            f"data.end_of_text={config.data.end_of_text}: needs data.document_mask=True"
        )
    for (choice, value), keys in _UNUSED.items():
        for key in keys if getattr(config.optimizer, choice) == value else ():
            if words := given.get(f"optimizer.{key}"):
                raise UsageError(
                    f"optimizer.{key}={' '.join(words)}: does nothing with "
                    f"optimizer.{choice}={value}; leave it out"
                )
