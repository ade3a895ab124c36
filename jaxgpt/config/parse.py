"""Parsing of YAML files and command lines into a `Config`.

Files and command lines are first converted to lists of strings, such as {"model.n_layer": ["3"]}.
The strings are then converted to the types in the schema.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxgpt.config import aliases
from jaxgpt.config.command_line import CommandLine
from jaxgpt.config.errors import UsageError, expand_user, in_words, nearest, parse_yaml, shorten
from jaxgpt.config.help import is_help, requested_help
from jaxgpt.config.schema import Config, sections, settings
from jaxgpt.config.translate import translate, unknown_key
from jaxgpt.config.validate import (
    Choices,
    check_choice,
    check_choices,
    describe_batch_size,
    mesh_shape,
    validate,
    with_batch_size,
)
from jaxgpt.config.values import parse_value, strings_of, takes_many

TRAIN = "python -m jaxgpt.train"
_DATA_KEYS = {"data.dataset", "data.path", "data.blend", "data.file_list"}
# Advice for keys in files that only the command line can set.
_ONLY_GIVEN = {
    "config": "a file cannot extend a preset; copy the preset's settings into the file",
    "out": "has no effect in a file; give --out on the command line",
}
_QUOTES = 'put quotes around values with commas, such as {mesh: "2,4,1"}'
_FOR_ONE_START = {"data.accept_changes", "checkpoint.resume"}

Words = Mapping[str, Sequence[str]]  # the strings for each `section.key`
# Takes train.init_from and out; returns model options by name
ModelOf = Callable[[str, str | None], Mapping[str, Any]]
# Takes a run directory; returns the settings in its newest checkpoint, or None
SettingsOf = Callable[[Path], Mapping[str, Any] | None]


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def load_config(config: str = "tiny", *overrides: str) -> Config:
    """Return the validated configuration of a preset or YAML file, with overrides applied.

    `overrides` are command-line arguments for `parse_args`, which is called with its default
    options. Therefore, settings whose choices are defined in higher layers, such as
    `optimizer.name`, are not checked, and model options are not read from train.init_from. Notes
    are printed to stderr. Raises `UsageError`, as `parse_args` does.

    >>> load_config("shakespeare_char_cpu", "train.max_iters=100").model.n_layer
    4
    """
    return parse_args(["--config", config, *overrides])


def parse_args(
    argv: Sequence[str],
    prog: str = TRAIN,
    initial_model: ModelOf | None = None,
    saved_settings: SettingsOf = lambda run: None,
    choices: Choices | None = None,
    note: Callable[[str], None] = _print_note,
    counts_devices_later: bool = False,
) -> Config:
    """Return the validated configuration that a command line describes.

    `--help` or `-h` prints all keys and exits with status 0. If the next word is a key (`--help
    model.n_layer`), only this key is printed. Otherwise, if the first word without a leading dash
    is a group (`--help model`) or a key, only that group or key is printed. A misspelled group
    after `--help` raises `UsageError`.
    `train.batch_size_per_device` is converted to `train.batch_size` and set to None, unless
    `counts_devices_later` keeps it.

    Args:
        argv: The command-line arguments. They override the settings of the preset or file in
            `--config`. Without `--config`, the settings come from the first available source:
            config.yaml in `--out` if it is not damaged, `saved_settings`, or, if there is no
            config.yaml, a preset (`tiny`, or another program's preset if `argv` has that program's
            flags). The file's `out` is ignored. If `argv` sets a data source, the file's data
            sources are ignored. If `argv` sets `train.batch_size`, the file's
            `train.batch_size_per_device` is ignored. If the settings come from `--out`,
            `data.accept_changes` and `checkpoint.resume` are also ignored.
        prog: Name of the command, for `--help` and for corrected commands.
        initial_model: Takes `train.init_from` and `out`, and returns the model options of the
            initial weights, by name, including `block_size`. These options override the defaults
            and a preset, but not the user's YAML file, the run directory or the command line.
            However, a preset in `--config` can reduce model.block_size. Called only if
            train.init_from is set.
        saved_settings: Returns the settings in the newest checkpoint of a run directory, or None.
            Called if `--config` is not given and the folder in `--out` has no undamaged
            config.yaml.
        choices: The values that higher layers allow for keys such as `optimizer.name`, and the keys
            that each value uses; see `validate.Choices`. If None, these keys are not checked.
        note: Called with each remark, such as a note about another program's flags or the computed
            batch size. By default, remarks are printed to stderr.
        counts_devices_later: Keep `train.batch_size_per_device` if parallel.mesh contains -1. By
            default, this combination is an error.

    Raises:
        UsageError: If a file is missing or unreadable, if a setting is unknown or malformed, if
            settings contradict each other, or if `check_choices` rejects a setting. Errors from
            `initial_model` and `saved_settings` are propagated, but an `OSError` may become a
            `UsageError`.
    """
    choices = choices or {}
    if is_help(argv):
        print(requested_help(argv, prog, choices, presets()))
        sys.exit(0)
    line = translate(argv, presets())
    given = line.words
    base, content = _base_of(line, saved_settings)
    # The file may be the config.yaml of another run; do not write to that run's directory.
    left_out = {"out"} if "config" in given else {"out"} | _FOR_ONE_START
    values, in_file = _flatten(content, str(base))
    if "config" in given and _is_cut_short(content):  # not the config.yaml of a run
        in_file += [
            f"{base}: {key}={values[key][0]}: {advice}"
            for key, advice in _ONLY_GIVEN.items()
            if values.get(key, []) not in ([], ["None"])
        ]
    values = _without(values, left_out, given)
    in_file += [
        f"{error} (set in {base})"
        for key, words in values.items()
        if key not in given and (error := _error_in(key, words, choices))
    ]
    is_preset = base in presets().values()
    model = {}
    if initial_model is not None and not line.problems and not in_file:
        model = _initial_model(initial_model, {**values, **given})
        if model and is_preset:  # the weights override the preset's model
            kept = _kept_of_preset(values, model) if "config" in given else set()
            if "config" in given and any(values[k] != model[k] for k in values if k not in kept):
                line.notes.append(
                    f"the weights override the model options of --config {given['config'][0]}"
                )
            values = {k: v for k, v in values.items() if k in kept or not k.startswith("model.")}

    def build(given: Words) -> Config:
        config = _build({"config": ["tiny"], **model, **values, **given})
        filled = with_batch_size(config, mesh_shape(config))
        validate(filled)
        check_choices(config, given, choices)
        return config

    wrong = {key: text for key, words in given.items() if (text := _error_in(key, words, choices))}
    if in_file:  # no command works until the file is corrected
        raise UsageError(*_in_lines([*in_file, *line.problems, *wrong.values()]))
    if line.problems or wrong:
        raise UsageError(*_report(prog, line, wrong, build))
    try:
        config = build(given)
    except UsageError as error:
        key = str(error).partition("=")[0]
        if key in given or key not in values or is_preset:
            raise
        raise UsageError(f"{error} (set in {base})") from None
    if unused := _unused_dataset(given):
        line.notes.append(unused)
    if mesh_shape(config).is_filled or not counts_devices_later:
        config = _with_known_batch_size(config, line.notes)
    for text in line.notes:
        note(text)
    return config


def _base_of(line: CommandLine, saved: SettingsOf) -> tuple[Path, Mapping[str, Any]]:
    """Return the path and content of the YAML file that a command line overrides.

    If the file is another program's default preset, that program's settings are added to `line`.
    Raises `UsageError` if the file is missing or unreadable. If `line` already has problems, an
    invalid --config is added to these problems instead of raising an error.
    """
    given, default = line.words, line.default
    try:
        base, content = _base(given, saved, default.config)
    except UsageError as error:
        if not line.problems or "config" not in given:
            raise
        line.leave_out(f"--config {given.pop('config')[0]}", str(error))
        base, content = _base(given, saved, default.config)
    is_other = default.config != "tiny" and base == presets()[default.config]
    if is_other and "config" not in given:
        given |= {"config": [default.config], **default.words}
        line.notes.append(default.note)
    return base, content


def _with_known_batch_size(config: Config, notes: list[str]) -> Config:
    """Convert train.batch_size_per_device to train.batch_size, and add a remark to `notes`.

    If train.batch_size_per_device is None, `config` is returned unchanged. Raises `UsageError` if
    it is set and parallel.mesh contains -1.
    """
    size, shape = config.train.batch_size_per_device, mesh_shape(config)
    if size is None:
        return config
    if not shape.is_filled:
        raise UsageError(
            f"train.batch_size_per_device={size}: the number of devices is unknown; give the size "
            "of every axis in --mesh, or set the global batch size with train.batch_size=N"
        )
    notes.append(describe_batch_size(config, shape))
    return with_batch_size(config, shape)


def _error_in(key: str, words: Sequence[str], choices: Choices) -> str:
    """Return the error message for a setting's value, or an empty string if the value is valid."""
    try:
        value = parse_value(key, settings()[key], words)
        if key in choices:
            check_choice(key, value, choices[key])
    except UsageError as error:
        return str(error)
    return ""


def _report(
    prog: str, line: CommandLine, wrong: Mapping[str, str], build: Callable[[Words], Config]
) -> list[str]:
    """Return the lines of an error message with all problems and a corrected command.

    For commands other than jaxgpt.train, only the corrected settings are listed.

    `wrong` maps settings with invalid values to error messages. `build` raises `UsageError` if
    settings contradict each other.
    """
    problems = [*line.problems, *wrong.values()]
    given, left_out = _corrected(line, wrong)
    without = f" (without {', '.join(map(shorten, left_out))})" if left_out else ""
    # The options of other commands are not known here.
    kind, start = ("command", [prog]) if prog.endswith(TRAIN) else ("settings", [])
    corrected = [f"corrected {kind}{without}:", f"  {_join(start, given)}"] if given else []
    try:
        build(given)
    except UsageError as error:
        # If train.init_from is set, the model may be unknown, and the error a false one.
        if "train.init_from" not in given:
            corrected = []
            if not left_out:  # if left_out, an omitted argument may have caused the error
                problems.append(str(error))
    lines = _in_lines(problems)
    is_useful = len(lines) > 1 or (given and not (wrong and left_out))
    return [*lines, *corrected] if is_useful else lines


def _in_lines(problems: Sequence[str]) -> list[str]:
    """Return the lines of an error message with all problems."""
    problems = _join_same(problems)
    if len(problems) == 1:
        return problems
    return [f"{len(problems)} problems", *(f"  {each}" for each in problems)]


def _corrected(line: CommandLine, wrong: Mapping[str, str]) -> tuple[Words, list[str]]:
    """Return the settings with corrected values, and the arguments to leave out."""
    given, left_out = {}, list(line.left_out)
    for key, words in line.words.items():
        fix = aliases.VALUE_FIXES.get(words[0]) if key in wrong and words else None
        fix = None if fix and _error_in(key, [fix], {}) else fix
        if key not in wrong or fix:
            own = aliases.VALUE_ALIASES.get(key, {})
            given[key] = [fix] if fix else [own.get(word, word) for word in words]
        else:
            left_out.append(f"{key}={' '.join(words)}")
    return given, left_out


def train_command(
    argv: Sequence[str],
    config: str | None = None,
    quote: Callable[[str], str] = shlex.quote,
    n_devices: int | None = None,
) -> tuple[str, list[str], list[str]]:
    """Translate another program's arguments.

    Returns the jaxgpt.train command, a list of remarks, and a list of the arguments and values that
    could not be translated. Arguments that have no effect in jaxgpt appear at most in the remarks.
    `config` is the preset to use if the arguments neither select a preset nor identify the other
    program. None means no preset. `quote` quotes an argument for the shell. `n_devices` is the
    number of devices, or None if it is unknown. A value with a shell variable, such as $SIZE, is
    copied unchecked unless it needs conversion. Preset names, lines of data.blend, settings whose
    choices are defined in higher layers (such as `optimizer.name`), and the rules in `validate` are
    not checked. Misspelled keys, and invalid values with a known fix, are corrected. The remarks
    explain most corrections and omissions, but not, for example, flags of other programs that are
    set to false, arguments that are overridden by later ones, or MaxText's base.yml. If `argv`
    refers to a DeepSpeed configuration, that file is read.
    """
    line = translate(argv, presets(), guesses=False, n_devices=n_devices, preset=config)
    fixed = {key: words for key, words in line.words.items() if "$" not in " ".join(words)}
    wrong = {key: error for key, words in fixed.items() if (error := _error_in(key, words, {}))}
    given, left_out = _corrected(line, wrong)
    default = line.default
    if (config is not None or default.config != "tiny") and "config" not in given:
        given = {"config": [default.config], **given, **default.words}
    remarks = [*line.notes, *_join_same([*line.problems, *wrong.values()])]
    if line.corrected:
        remarks.append(f"corrected: {', '.join(line.corrected)}")
    return _join([TRAIN], given, quote), remarks, left_out


def _join_same(problems: Sequence[str]) -> list[str]:
    """Merge the messages about flags that are rejected for the same reason."""
    flags: dict[str, list[str]] = {}
    for problem in problems:
        flag, middle, reason = problem.partition(": not a setting of jaxgpt; ")
        flags.setdefault(middle + reason or flag, []).append(flag if middle else "")
    return [", ".join(same) + reason for reason, same in flags.items()]


def _join(start: list[str], given: Words, quote: Callable[[str], str] = shlex.quote) -> str:
    """Return a command line: the words in `start`, followed by settings."""
    parts = start
    for key in sorted(given, key=lambda key: (key != "config", key != "out")):
        words = given[key]
        short = key.removeprefix("parallel.")
        if short in ("config", "out", "mesh") or (takes_many(settings()[key]) and any(words)):
            parts = [*parts, f"--{short}", *map(quote, words)]
        else:
            parts = [*parts, quote(f"{key}={' '.join(words)}")]
    return " ".join(parts)


def override_data(config: Config, argv: Sequence[str]) -> Config:
    """Return a validated copy of the configuration, with the `data.*` settings in `argv` applied.

    A data source in `argv` replaces all data sources of `config`. checkpoint.resume is reset to its
    default. data.accept_changes is also reset, unless `argv` sets it. Raises `UsageError` if `argv`
    contains a setting that is unknown, malformed or outside `data`, or both data.dataset and
    another data source, or if the result is invalid.
    """
    line = translate(argv, presets())
    if line.problems:
        raise UsageError(line.problems[0])
    given = line.words
    for key in given:
        if not key.startswith("data."):
            raise UsageError(
                f"{key}={' '.join(given[key])}: only data.* settings can be changed here; leave it "
                "out"
            )
    if unused := _unused_dataset(given):
        raise UsageError(f"{unused}; leave one of them out")
    values = _without(_settings_in(config.to_dict(), "configuration"), _FOR_ONE_START, given)
    config = _build({**values, **given})
    validate(config)
    return config


def checked(config: Config, choices: Choices | None = None) -> Config:
    """Validate a configuration, and return the validated copy.

    train.batch_size_per_device is converted to train.batch_size. For `choices`, see `parse_args`.
    Settings that the chosen optimizer or schedule does not use are accepted. Raises `UsageError` if
    `config` is not a `Config`, if a value is malformed or not one of the choices, if settings
    contradict each other, or if train.batch_size_per_device is set and parallel.mesh contains -1.
    """
    if not isinstance(config, Config):
        raise UsageError(
            "config: must be a configuration, such as jaxgpt.load_config('tiny'), not "
            f"{shorten(repr(config))}"
        )
    config = _with_known_batch_size(config_from_dict(config.to_dict(), "config"), [])
    validate(config)
    check_choices(config, {}, choices or {})
    return config


def config_from_dict(values: Mapping[str, Any], origin: str) -> Config:
    """Rebuild a configuration from the output of `Config.to_dict`.

    Missing keys get their default values. Does not check whether settings contradict each other.
    Raises `UsageError` if a key is unknown or a value is malformed. Messages about unknown keys
    contain `origin`, such as a file name.
    """
    return _build(_settings_in(values, origin))


def config_from_file(path: Path) -> Config:
    """Return the configuration from a run's config.yaml.

    Missing keys get their default values. Does not check whether settings contradict each other.
    Raises `UsageError` if the file is missing, unreadable or cut short, a key is unknown, or a
    value is malformed.
    """
    values = _read_yaml(path)
    if _is_cut_short(values):
        raise UsageError(f"{path}: its last sections are missing; restore the file")
    return config_from_dict(values, str(path))


def _is_cut_short(values: Mapping[str, Any]) -> bool:
    """Return whether the content of a run's config.yaml lacks the last section."""
    return [*sections()][-1] not in values


def _base(given: Words, saved: SettingsOf, default: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the path and content of the YAML file that the command line overrides.

    `default` is the preset to use if --config is not given and --out contains no run.
    """
    if "config" not in given and "out" in given:
        kept = Path(expand_user(given["out"][0], "out=")) / "config.yaml"
        try:
            content = _read_yaml(kept) if kept.is_file() else saved(kept.parent)
            if content is not None and _is_cut_short(content):  # damaged, or written by the user
                content = saved(kept.parent) or content
        except UsageError:
            if (content := saved(kept.parent)) is None:
                raise
        except OSError as error:
            raise UsageError(
                f"out={kept.parent}: {error.strerror}; give a folder that you may read and write"
            ) from None
        if content is not None:
            return kept, content
    name = expand_user(given.get("config", [default])[0], "config=")
    known = presets()
    if name in known or os.path.isfile(name):  # Path.is_file may raise OSError
        path = known.get(name, Path(name))
        return path, _read_yaml(path)
    if os.path.isdir(name):
        raise UsageError(f"config={name}: is a folder; give a YAML file, such as its config.yaml")
    near = nearest(name, known)
    hint = f"did you mean {near}? The" if near else "the"
    raise UsageError(
        f"config={name}: no such file or preset; {hint} presets are {', '.join(known)}"
    )


def presets() -> dict[str, Path]:
    """Return a dict that maps preset names to the paths of the preset files.

    The files are in the installed package or the source checkout.
    """
    package = Path(__file__).parent.parent
    folders = (package / "configs", package.parent / "configs")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def _initial_model(model_of: ModelOf, words: Words) -> Words:
    """Return the model options from train.init_from as strings, or {} if it is not set."""
    config = _build({key: words[key] for key in ("train.init_from", "out") if key in words})
    if config.train.init_from is None:
        return {}
    validate(Config().replace(train__init_from=config.train.init_from))
    try:
        options = model_of(config.train.init_from, config.out)
    except OSError as error:
        raise UsageError(
            f"train.init_from={config.train.init_from}: {error.strerror}; give a folder or file "
            "that you may read"
        ) from None
    return _settings_in({"model": options}, f"train.init_from={config.train.init_from}")


def _kept_of_preset(values: Words, model: Words) -> set[str]:
    """Return the preset's keys that the weights do not override."""
    kept = {key for key in values if key not in model}  # such as model.dropout
    key = "model.block_size"
    if key in values and int(values[key][0]) <= int(model[key][0]):
        kept.add(key)
    return kept


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects aliases and duplicate keys. PyYAML would keep the last duplicate."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias, *NAME; write out the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                hint = "" if isinstance(key, str) else f"; {_QUOTES}"
                raise yaml.YAMLError(f"{key} is given twice{hint}")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = parse_yaml(path.read_text(), _Loader)
        if isinstance(values, Mapping):
            return values
        problem = "it has no sections such as `train:`"
    except (OSError, ValueError) as error:
        problem = in_words(error)
    raise UsageError(
        f"config={path}: not readable as YAML ({problem}); correct the file, or remove it and set "
        "--config NAME and section.key=value"
    )


def _settings_in(values: Mapping[str, Any], origin: str) -> Words:
    """Return the settings from `_flatten`, or raise `UsageError` if it reports problems."""
    out, problems = _flatten(values, origin)
    if problems:
        raise UsageError(*_in_lines(problems))
    return out


def _flatten(
    values: Mapping[str, Any], origin: str, prefix: str = ""
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the strings for each `section.key`, and messages about malformed input.

    The messages are about unknown keys and malformed sections, and begin with `origin`.
    """
    out, problems = {}, []
    for name, value in values.items():
        if prefix and not isinstance(name, str):
            problems.append(f"{origin}: {prefix}{name}: unknown key; {_QUOTES}")
            continue
        if isinstance(value, Mapping) and not prefix:
            inner, inner_problems = _flatten(value, origin, f"{name}.")
            out, problems = out | inner, problems + inner_problems
            continue
        if name in sections() and not prefix:
            if value is not None:  # None if all lines of a section are commented out
                text = "must be a section with lines such as `key: value`"
                problems.append(f"{origin}: {name}={shorten(str(value))}: {text}")
            continue
        kind = settings().get(name := f"{prefix}{name}")
        if kind is None:
            problems.append(f"{origin}: {unknown_key(name)}")
            continue
        out[name] = strings_of(name, kind, value)
    return out, problems


def _without(values: Words, keys: set[str], given: Words) -> Words:
    """Return `values` without `keys`, and without what `given` replaces.

    New data also replaces data.end_of_text, which may come from the tokenizer of the old data.
    """
    if "train.batch_size" in given:
        keys = keys | {"train.batch_size_per_device"}
    if _DATA_KEYS & given.keys():
        keys = keys | _DATA_KEYS | {"data.end_of_text"}
    return {key: words for key, words in values.items() if key not in keys}


def _unused_dataset(given: Words) -> str | None:
    """Return a note if the command line sets data.dataset and a source that overrides it."""
    keys = _DATA_KEYS & given.keys() - {"data.dataset"}
    others = sorted(key for key in keys if list(given[key]) not in ([], [""], ["None"]))
    if "data.dataset" not in given or not others:
        return None
    return f"data.dataset={given['data.dataset'][0]}: has no effect, because {others[0]} is given"


def _build(words: Words) -> Config:
    config, problems = Config(), []
    for name, given in words.items():
        try:
            config = config.replace(**{name.replace(".", "__"): list(given)})
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError(*_in_lines(problems))
    return config
