"""Flags of other programs whose meaning depends on other settings, and the programs' defaults."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxgpt.config import aliases
from jaxgpt.config.command_line import CommandLine, Default, flag_name
from jaxgpt.config.errors import in_words, parse_yaml, shorten
from jaxgpt.config.mesh import MeshShape, axes_with
from jaxgpt.config.values import whole

PADDING = 128  # Megatron pads the vocabulary to a multiple of 128 times the tensor-parallel size
WORDPLAY_STAGE = 1  # the ZeRO stage in wordplay's conf/ds_config.yaml
BATCH_SIZES = ("train.batch_size_per_device", "train.batch_size")
ACCUMULATION = "train.gradient_accumulation_steps"
# Defaults of command lines without --config. If several apply, the first one is used.
DEFAULTS = (
    Default(
        "megatron",
        "this is a Megatron command line, because it has --micro-batch-size: settings that are not "
        "given have Megatron's defaults (--config megatron)",
    ),
    Default(
        "maxtext",
        "a MaxText command line without model_name=NAME selects MaxText's default model, with 1.1B "
        "parameters (--config maxtext)",
    ),
    Default(
        "wordplay",
        "a wordplay command line without +experiment=NAME selects wordplay's default: an 85M "
        "character-level model with GPT-2's shape (--config wordplay)",
        {"train.batch_size_per_device": ["12"]},
    ),
)
# Names of programs that decay until the last step, and their default warm-up fractions:
# warmup_steps_fraction in MaxText's base.yml, and warmup in levanter's OptimizerConfig.
WARMUPS = {"maxtext": ("MaxText", "0.1"), "levanter": ("levanter", "0.01")}


def put_all(line: CommandLine, text: str, values: list[str], argument: str) -> None:
    """Apply `text`, an entry of the SETTINGS or KEY_FIXES table."""
    other = line.other
    for piece in text.split():
        key, _, value = piece.partition("=")
        kind, _, name = key.partition(".")
        words = values if value == "{}" else [value]
        if key == "mesh.rest":
            other.rest = other.rest or value
        elif kind == "mesh":
            other.axes.setdefault(name, {})[flag_name(argument)] = argument
            line.shown.setdefault(key, argument)
        elif kind in ("later", "samples", "tokens"):
            name = name if kind == "later" else key
            other.later[name], line.shown[name] = words, argument
        else:
            line.put(key, words, argument)


def finish(line: CommandLine, presets: Mapping[str, Path], n_devices: int | None) -> None:
    """Apply the flags in `line.other`, and the defaults of other programs."""
    later = line.other.later
    if "experiment" in later:
        _set_experiment(line)
    if "config" in line.words:
        _set_config(line, presets)
    programs = _programs(line)
    if "config" not in line.words:
        line.default = next((new for new in DEFAULTS if new.config in programs), line.default)
        if line.words.keys() & BATCH_SIZES:
            line.default = line.default._replace(words={})
        if line.default.config == aliases.NANOGPT:
            programs.add("nanogpt")
    _set_data(line)
    if "split" in later:
        _set_split(line)
    _set_folder(line)
    weights = " ".join(line.words.get("train.init_from", ()))
    shown = line.shown.get("train.init_from", "")
    if flag_name(shown) == "init_from" and weights in aliases.NANOGPT_WEIGHTS:
        del line.words["train.init_from"]
        line.leave_out(shown, f"{shown}: {aliases.NANOGPT_WEIGHTS[weights]}")
    for key, name, effect in aliases.BROADER:
        if flag_name(line.shown.get(key, "")) == name:
            line.notes.append(f"{line.shown[key]}: means {key}={line.words[key][0]}, {effect}")
    _set_strategy(line)
    _set_mesh(line)
    if {"per_device", "pipeline_microbatches"} & later.keys():
        _set_maxtext_batch(line)
    if "micro_batch_size" in later:
        _set_megatron_batch(line, n_devices)
    _set_nanogpt_batch(line, programs, n_devices)
    _set_schedule(line, programs)
    _set_sizes(line, programs)


def _set_experiment(line: CommandLine) -> None:
    """Set the preset and the batch size of one of wordplay's experiments."""
    shown, known = line.shown["experiment"], aliases.WORDPLAY_EXPERIMENTS
    name = line.other.later["experiment"][0]
    if name not in known:
        line.leave_out(shown, f"{shown}: unknown experiment; use one of {', '.join(known)}")
        return
    preset, size = known[name]
    line.put("config", [preset], shown)
    if not line.words.keys() & BATCH_SIZES:
        line.put("train.batch_size_per_device", [str(size)], shown)
    n = line.words.setdefault(ACCUMULATION, ["1"])[0]
    rows = next(f"{key}={line.words[key][0]}" for key in BATCH_SIZES if key in line.words)
    line.notes.append(f"{shown}: means --config {preset} {rows} {ACCUMULATION}={n}")


def _set_config(line: CommandLine, presets: Mapping[str, Path]) -> None:
    """Replace the name of another program's configuration with a preset."""
    name = line.words["config"][0]
    is_own = os.path.isfile(name) or flag_name(line.shown["config"]) == "config"  # else levanter's
    if name in presets or (is_own and name.endswith((".yaml", ".yml"))):
        return
    stem = Path(name).stem
    if name.endswith(".py") and stem not in aliases.NANOGPT_BATCHES:
        why = "a nanoGPT .py file is not read; give its settings as flags"
        if stem.startswith("eval_"):
            why = "use python -m jaxgpt.evaluate --run FOLDER, or --run hf:FOLDER for GPT-2"
        line.leave_out(line.shown["config"], f"{line.shown['config']}: {why}")
        line.words["config"] = [aliases.NANOGPT]
        return
    plain = {re.sub("[-_]", "", preset): preset for preset in presets}
    same = plain.get(re.sub("[-_]", "", stem.removeprefix("train_")))
    text = aliases.CONFIGS.get(stem) or (f"config={same}" if same else "")
    if not text:
        return
    line.notes.append(f"{line.shown['config']}: means {text.replace('config=', '--config ', 1)}")
    named = {key: [value] for key, value in (piece.split("=") for piece in text.split())}
    line.words |= {**named, **line.words, "config": named["config"]}


def _programs(line: CommandLine) -> set[str]:
    """Return the programs whose flags are on a command line.

    Returns an empty set if --config is jaxgpt's own YAML file.
    """
    config, later = line.words.get("config"), line.other.later
    if config and config[0].endswith((".yaml", ".yml")):
        return set()
    names = {flag_name(argument) for argument in line.shown.values()}
    size_flag = flag_name(line.shown.get("micro_batch_size", ""))  # may be misspelled
    has_micro = bool(size_flag) and not size_flag.startswith("trainer.")
    has_flags = {
        "megatron": has_micro if config is None else config == ["megatron"],
        "maxtext": {"maxtext", "per_device", "output"} & later.keys(),
        "wordplay": {"data", "backend"} & later.keys()
        or {"model.batch_size", "optimizer.gas"} & names,
        "levanter": "config_path" in names or any(name.startswith("trainer.") for name in names),
        "nanogpt": line.shown.get("config", "").endswith(".py"),
    }
    return {program for program, has_any in has_flags.items() if has_any}


def _set_data(line: CommandLine) -> None:
    """Set the data sources from wordplay's or Megatron's flags."""
    later = line.other.later
    if "data" in later:
        name = " ".join(later["data"])
        shown, dataset = line.shown["data"], aliases.WORDPLAY_DATA.get(name, name)
        line.put("data.dataset", [dataset], shown)
        line.notes.append(f"{shown}: means data.dataset={dataset}")
    if "data_path" in later:
        sources, shown = later["data_path"], line.shown["data_path"]
        if len(sources) == 1:
            line.put("data.path", sources, shown)
        elif len(sources) % 2:
            line.leave_out(shown, f"{shown}: must be one path, or pairs of a weight and a path")
        else:
            pairs = zip(sources[::2], sources[1::2], strict=True)
            line.put("data.blend", [" ".join(pair) for pair in pairs], shown)


def _set_split(line: CommandLine) -> None:
    """Set data.val_share from Megatron's split into training, validation and test data."""
    shown, split = line.shown["split"], " ".join(line.other.later["split"])
    try:
        shares = [float(share) for share in split.strip("'\"").split(",")]
        share = 1 - shares[0] / sum(shares)
    except (ValueError, ZeroDivisionError):
        line.leave_out(shown, f"{shown}: use data.val_share=X, the share for validation")
        return
    if share > 0:
        line.put("data.val_share", [f"{share:.4g}"], shown)
        line.notes.append(
            f"{shown}: the last {share:.4g} of the data is for validation; there is no test split"
        )
    else:
        line.notes.append(f"{shown}: ignored; evaluation needs a share of the data")


def _set_folder(line: CommandLine) -> None:
    """Set the run directory from MaxText's or Megatron's flags."""
    later = line.other.later
    if "output" in later:
        folder, shown = Path(*later["output"], *later.get("run_name", ())), line.shown["output"]
        if "://" in " ".join(later["output"]):
            text = aliases.KEY_SUGGESTIONS["base_output_directory"]
            line.leave_out(shown, f"{shown}: not a folder; {text}")
        else:
            line.put("out", [str(folder)], shown)
    elif "run_name" in later:
        line.put("out", [f"runs/{' '.join(later['run_name'])}"], line.shown["run_name"])
    if "load" in later and later["load"] != line.words.get("out"):
        shown, text = line.shown["load"], aliases.KEY_SUGGESTIONS["load"]
        line.leave_out(shown, f"{shown}: not a setting of jaxgpt; {text}")
    elif "load" in later:
        line.notes.append(f"{line.shown['load']}: means --out, which also resumes the run")


def _set_strategy(line: CommandLine) -> None:
    """Set the ZeRO stage, and the axis for remaining devices, from wordplay or DeepSpeed flags."""
    later = line.other.later
    in_file = _stage_of(line, " ".join(later["ds_config"])) if "ds_config" in later else None
    stage = in_file
    if "backend" in later:
        shown, backend = line.shown["backend"], later["backend"][0].lower()
        known = {"ddp": 0, "fsdp": 3}
        if backend in ("deepspeed", "ds", "dspeed"):
            known[backend] = WORDPLAY_STAGE if stage is None else stage
        if backend not in known:
            line.leave_out(shown, f"{shown}: must be DDP, deepspeed or FSDP")
            return
        stage = known[backend]
        axis = "fsdp" if stage else "data"
        line.notes.append(
            f"{shown}: means parallel.zero_stage={stage}, with all devices on the mesh axis {axis}"
        )
    if "zero_stage" in later:
        if in_file is not None and later["zero_stage"] != [str(in_file)]:
            later["zero_stage"] = line.words["parallel.zero_stage"] = [str(in_file)]
            line.notes.append(
                f"{line.shown['zero_stage']}: ignored, because DeepSpeed takes the ZeRO stage from "
                "its configuration file"
            )
        stage = 1 if later["zero_stage"] != ["0"] else 0
    elif stage is not None:
        line.words.setdefault("parallel.zero_stage", [str(stage)])
    if stage is not None:
        line.other.rest = line.other.rest or ("fsdp" if stage else "data")


def _stage_of(line: CommandLine, file: str) -> int | None:
    """Return the ZeRO stage in a DeepSpeed configuration, or 0 if it does not set one.

    If the file cannot be read or its stage is invalid, add a note or a problem to `line`, and
    return None.
    """
    shown = line.shown["ds_config"]
    try:
        text = Path(file).expanduser().read_text().replace("\t", " ")  # YAML forbids tabs
        content = parse_yaml(text)
        strategy = content.get("zero_optimization") if isinstance(content, dict) else None
        if not isinstance(strategy, dict) or "stage" not in strategy:
            return 0  # DeepSpeed's default
        stage = strategy["stage"]
        if type(stage) is not int or stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage is {shorten(str(stage))}")
        line.notes.append(f"{shown}: only its ZeRO stage, {stage}, is used")
        return stage
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown home directory
        reason = " ".join(in_words(error).split())
        if "zero_stage" in line.other.later:
            line.notes.append(f"{shown}: ignored; it is not readable ({reason})")
        else:
            line.leave_out(shown, f"{shown}: not readable ({reason}); use parallel.zero_stage=N")
        return None


def _set_mesh(line: CommandLine) -> None:
    """Set parallel.mesh from other programs' flags for axis sizes."""
    sizes = {}
    for axis, flags in line.other.axes.items():
        factors = {shown: _size(shown) for shown in flags.values()}
        for shown in [shown for shown, size in factors.items() if not size]:
            text = f"must be a whole number, at least 1, or -1; add {axis}=N to --mesh"
            line.leave_out(shown, f"{shown}: {text}")
        if all(factors.values()):  # MaxText has two flags per axis
            sizes[axis] = -1 if -1 in factors.values() else math.prod(factors.values())
    if "parallel.mesh" in line.words:
        try:
            typed = MeshShape.parse(line.words["parallel.mesh"][0])
        except ValueError:  # reported when the value is checked
            return
        for axis, size in sizes.items():
            if typed[axis] != size:
                shown = line.shown[f"mesh.{axis}"]
                line.leave_out(shown, f"{shown}: --mesh is also given; leave out one of them")
        return
    is_chosen = bool(line.other.rest or {"data", "fsdp"} & sizes.keys())
    if not {"data", "fsdp"} & sizes.keys():
        sizes[line.other.rest or "data"] = -1
    shape = MeshShape(**sizes)
    if list(shape.values()).count(-1) > 1:  # MaxText's default is -1 for two axes
        shape["data"] = 1
    if is_chosen or shape != MeshShape(data=-1):
        line.words["parallel.mesh"] = [str(shape)]


def _size(argument: str) -> int | None:
    """Return the axis size that a flag sets, or None if it is neither -1 nor a whole number."""
    word = re.split("[= ]", argument, maxsplit=1)[1]
    return -1 if word == "-1" else _whole(word)


def _unknown_axes(line: CommandLine) -> dict[str, str]:
    """Return a dict that maps mesh axes whose size is invalid to the invalid argument."""
    arguments = [(axis, each) for axis, flags in line.other.axes.items() for each in flags.values()]
    return {axis: argument for axis, argument in arguments if not _size(argument)}


def _set_maxtext_batch(line: CommandLine) -> None:
    """Set the batch size and the microbatches from MaxText's flags.

    MaxText multiplies per_device_batch_size by the total number of devices, even if devices share
    rows. With a pipeline, MaxText splits this batch into microbatches, by default one per stage.
    """
    key, later = ACCUMULATION, line.other.later
    try:
        shape = MeshShape.parse(line.words.get("parallel.mesh", ["-1,1,1"])[0])
    except ValueError:  # reported when the value is checked
        return
    stages, n = shape.split_of("splits_layers"), 1
    microbatches = later.get("pipeline_microbatches", ["-1"])[0]
    if stages > 1:
        if microbatches != "-1":
            line.put(key, [microbatches], line.shown["pipeline_microbatches"])
        n = _number(line, key) or stages
        line.words.setdefault(key, [str(n)])
    elif microbatches != "-1":
        shown = line.shown["pipeline_microbatches"]
        line.notes.append(f"{shown}: ignored, because the mesh has no stage axis")
    if "per_device" not in later:
        return
    shown, size = line.shown["per_device"], _whole(later["per_device"][0])
    sharing = [axis for axis in shape if axis not in axes_with("splits_batch")]
    rows = (size or 0) * math.prod(shape[axis] for axis in sharing)
    if rows > 0 and rows % n == 0 and not _unknown_axes(line):
        line.put("train.batch_size_per_device", [str(rows // n)], shown)
    else:
        line.leave_out(shown, f"{shown}: use train.batch_size=N, the size for the whole job")


def _set_megatron_batch(line: CommandLine, n_devices: int | None) -> None:
    """Set the batch size per device or, if the global batch size is given, the microbatches.

    If the number of microbatches depends on an unknown number of devices, add a note with
    Megatron's formula instead.
    """
    key, shown = ACCUMULATION, line.shown["micro_batch_size"]
    words = line.other.later["micro_batch_size"]
    size, total = _whole(words[0]), _number(line, "train.batch_size")
    if "train.batch_size" not in line.words:
        line.put("train.batch_size_per_device", words, shown)
        return
    try:
        shape = MeshShape.parse(line.words.get("parallel.mesh", ["-1,1,1"])[0])
        shape = shape.fill(n_devices) if n_devices else shape
    except ValueError:
        size = None

    def ignore(why: str, remedy: str = f"; {key}=N splits the batch into N microbatches") -> None:
        line.notes.append(f"{shown}: ignored, because {why}{remedy}")

    if key in line.words:
        ignore(f"{key}={' '.join(line.words[key])} is given", "")
    elif not size or not total:
        ignore("the global batch size is given")
    elif unknown_axes := _unknown_axes(line):
        ignore(f"the mesh lacks {', '.join(unknown_axes.values())}")
    elif total % size:
        ignore(f"the global batch size, {total}, is not a multiple of {size}")
    elif any(shape[axis] == -1 for axis in axes_with("splits_batch")):
        n = total // size * (shape.n_devices // shape.split_of("splits_batch"))
        ignore(
            "the number of devices is unknown",
            f"; to get Megatron's microbatches, set {key}=N, where N is {n} divided by the "
            "number of devices",
        )
    elif total % (size * (n_groups := shape.split_of("splits_batch"))):
        ignore(
            f"the global batch size, {total}, is not a multiple of {size} x {n_groups} (the "
            "data-parallel size)"
        )
    else:
        n = total // (size * n_groups)
        line.put(key, [str(n)], shown)
        line.notes.append(
            f"{shown}: means {key}={n}, which is {total} / ({size} x {n_groups}), where "
            f"{n_groups} is the data-parallel size"
        )


def _set_nanogpt_batch(line: CommandLine, programs: set[str], n_devices: int | None) -> None:
    """Set the global batch size from nanoGPT's batch size and number of microbatches.

    If only one of them is given, the other one is from nanoGPT's configuration or train.py.
    """
    later, shown, words = line.other.later, line.shown, line.words
    file, batches, batch = shown.get("config", ""), aliases.NANOGPT_BATCHES, None
    if "nanogpt" in programs:
        file = file if Path(file).stem in batches else "train.py"
        batch = batches.get(Path(file).stem, batches["train_gpt2"])
    is_given = "nanogpt_accumulation" in later
    if batch and is_given and "train.batch_size" not in words:
        line.put("train.batch_size", [batch[0]], f"batch_size={batch[0]} in {file}")
    is_nanogpt = flag_name(shown.get("train.batch_size", "")) == "batch_size"
    if batch and batch[1] != "1" and is_nanogpt and not is_given:
        later["nanogpt_accumulation"] = [batch[1]]
        shown["nanogpt_accumulation"] = f"gradient_accumulation_steps={batch[1]} in {file}"
    if "nanogpt_accumulation" not in later:
        return
    argument, n = shown["nanogpt_accumulation"], _whole(later["nanogpt_accumulation"][0])
    rows = _number(line, "train.batch_size")
    if is_nanogpt and n and rows:
        words["train.batch_size"] = [str(n * rows)]
        each, remainder = divmod(n, n_devices or 8)  # by default nanoGPT's 8 GPUs
        words.setdefault(ACCUMULATION, [str(1 if remainder else each)])
        line.notes.append(
            f"{argument}: means train.batch_size={n * rows}, which is {n} times "
            f"{shown['train.batch_size']}, and {ACCUMULATION}={words[ACCUMULATION][0]}; if memory "
            "is short, use more microbatches"
        )
    elif is_given:
        line.leave_out(
            argument,
            f"{argument}: use {ACCUMULATION}=N to split the global batch of train.batch_size "
            "sequences into N microbatches",
        )
    else:
        line.notes.append(
            f"{argument}: ignored; nanoGPT would train on {n} times {shown['train.batch_size']}"
        )


def _whole(word: str) -> int | None:
    """Convert a string to a whole number from 0 to 10^18 - 1. Return None for other strings."""
    try:
        number = whole(word)
    except ValueError:
        return None
    return number if 0 <= number < 10**18 else None


def _number(line: CommandLine, key: str) -> int | None:
    return _whole(line.words.get(key, [""])[0])


def _set_schedule(line: CommandLine, programs: set[str]) -> None:
    """Convert lengths given in sequences, in tokens or as a warm-up fraction to steps."""
    words, later, unknown = line.words, line.other.later, set()
    for name in [name for name in later if name.startswith(("samples.", "tokens."))]:
        unit, _, key = name.partition(".")
        factors = ["train.batch_size"] + ["model.block_size"] * (unit == "tokens")
        shown, total = line.shown[name], _whole(later[name][0])
        per_step = math.prod(_number(line, factor) or 0 for factor in factors)
        if per_step and total is not None:
            line.put(key, [str(total // per_step)], shown)
            sizes = " ".join(f"{factor}={words[factor][0]}" for factor in factors)
            line.notes.append(f"{shown}: means {key}={total // per_step} with {sizes}")
        else:
            unknown.add(key)
            line.leave_out(shown, f"{shown}: use {key}=N, a number of steps")
    if "decay_lr" in later:
        _set_no_decay(line)
    program, fraction = next((WARMUPS[name] for name in WARMUPS if name in programs), ("", ""))
    end_key, warmup_key = "optimizer.lr_decay_iters", "optimizer.warmup_iters"
    decays = words.get("optimizer.schedule") != ["constant"] and end_key not in unknown
    if ("megatron" in programs or program) and "train.max_iters" in words and decays:
        words.setdefault(end_key, words["train.max_iters"])  # the default of all three programs
        if program and warmup_key not in words and "warmup_fraction" not in later:
            later["warmup_fraction"] = [fraction]
            line.shown["warmup_fraction"] = f"{program}'s default warm-up fraction {fraction}"
        if program and "optimizer.learning_rate" in words and "optimizer.min_lr" not in words:
            later.setdefault("final_fraction", ["0.1"])
            line.shown.setdefault("final_fraction", f"{program}'s default final fraction 0.1")
    if "final_fraction" in later:
        shown, rate = line.shown["final_fraction"], words.get("optimizer.learning_rate", [""])[0]
        try:
            least = f"{float(later['final_fraction'][0]) * float(rate):g}"
        except ValueError:
            line.leave_out(shown, f"{shown}: use optimizer.min_lr=X, the final learning rate")
        else:
            line.put("optimizer.min_lr", [least], shown)
            line.notes.append(f"{shown}: means optimizer.min_lr={least}")
    if "warmup_fraction" in later:
        shown, fraction = line.shown["warmup_fraction"], later["warmup_fraction"][0]
        given = end_key if end_key in words else "train.max_iters"
        end = None if end_key in unknown else _number(line, given)
        try:
            steps = int(float(fraction) * end)
        except (ValueError, TypeError, OverflowError):
            line.leave_out(shown, f"{shown}: use optimizer.warmup_iters=N, a number of steps")
        else:
            line.put("optimizer.warmup_iters", [str(steps)], shown)
            line.notes.append(f"{shown}: means optimizer.warmup_iters={steps}")


def _set_no_decay(line: CommandLine) -> None:
    """Set a constant learning rate for nanoGPT's --decay_lr=False.

    As in nanoGPT, there is no warm-up, and the options for warm-up and decay are ignored.
    """
    shown = line.shown["decay_lr"]
    if line.other.later["decay_lr"][0].lower() != "false":
        line.leave_out(shown, f"{shown}: must be True or False")
        return
    unused = [f"optimizer.{name}" for name in ("warmup_iters", "lr_decay_iters", "min_lr")]
    ignored = [line.shown.pop(key) for key in unused if line.words.pop(key, None)]
    line.put("optimizer.schedule", ["constant"], shown)
    line.put("optimizer.warmup_iters", ["0"], shown)
    without = f"; ignored: {', '.join(ignored)}" if ignored else ""
    line.notes.append(
        f"{shown}: means optimizer.schedule=constant optimizer.warmup_iters=0{without}"
    )


def _set_sizes(line: CommandLine, programs: set[str]) -> None:
    """Set the padded vocabulary size and the width of a SwiGLU MLP as Megatron computes them."""
    words, later = line.words, line.other.later
    if "exact_gelu" in later:
        words.setdefault("model.mlp", ["gelu"])
    if "merges" in later and ("tokenizer" in later or "model.vocab_size" in words):
        text = aliases.KEY_SUGGESTIONS["merge_file"]
        line.notes.append(f"{line.shown['merges']}: ignored; {text}")
    elif "merges" in later:
        later["tokenizer"], line.shown["tokenizer"] = ["GPT2BPETokenizer"], line.shown["merges"]
    if "tokenizer" in later:
        shown, name = line.shown["tokenizer"], " ".join(later["tokenizer"])
        size = aliases.MEGATRON_VOCABULARIES.get(name)
        if size is None:
            line.notes.append(f"{shown}: ignored; use data.tokenizer=FOLDER")
        elif "tensor" in _unknown_axes(line) and "model.vocab_size" not in words:
            line.leave_out(shown, f"{shown}: use model.vocab_size=N, the padded size")
        elif "model.vocab_size" not in words:
            arguments = line.other.axes.get("tensor", {}).values()
            multiple = PADDING * math.prod(abs(_size(argument)) for argument in arguments)
            padded = -(-size // multiple) * multiple
            words["model.vocab_size"] = [str(padded)]
            line.notes.append(
                f"{shown}: means model.vocab_size={padded}; for readable samples, use "
                "data.tokenizer=FOLDER"
            )
    width = _number(line, "model.n_embd")
    is_swiglu = "megatron" in programs and words.get("model.mlp") == ["swiglu"]
    if is_swiglu and width and "model.mlp_hidden" not in words:
        hidden = width * 8 // 3 // 64 * 64
        words["model.mlp_hidden"] = [str(hidden)]
        line.notes.append(
            f"Megatron's default, --ffn-hidden-size {hidden}: means model.mlp_hidden={hidden}"
        )
