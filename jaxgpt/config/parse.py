"""Parsing of YAML files and command lines into a `Config`, and the text of `--help`.

Both are first converted to a list of strings for each key, such as {"model.n_layer": ["3"]}. The
key's type in the schema then determines how these strings are converted to a value.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from jaxgpt.config import aliases
from jaxgpt.config.errors import UsageError, expand_user, in_words, shorten
from jaxgpt.config.schema import Config
from jaxgpt.config.validate import Choices, check_choices, validate

USAGE = """\
usage: {prog} [--config NAME_OR_FILE] [--mesh D,F,T] [--out DIR]
           [--train-range-to-skip A B ...] [section.key=value ...]

section.key=value and --section.key value mean the same. A YAML file contains lines such as
`section: {{key: value}}`. The defaults are those of the preset tiny; --config NAME selects another.
"""
_DATA_KEYS = {"data.dataset", "data.path", "data.blend", "data.file_list"}
_FOR_ONE_START = {"data.accept_changes", "checkpoint.resume"}
_PATHS = {"config", "out", "train.init_from"}
_PATHS |= {f"data.{key}" for key in ("dataset", "path", "file_list", "tokenizer")}
_KINDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "text"}

Words = Mapping[str, Sequence[str]]  # the strings for each `section.key`
# (train.init_from, out) -> model options by name
ModelOf = Callable[[str, str | None], Mapping[str, Any]]
# Run directory -> settings in its newest checkpoint, or None
SettingsOf = Callable[[Path], Mapping[str, Any] | None]


def load_config(config: str = "tiny", *overrides: str) -> Config:
    """Return the validated configuration of a preset or YAML file, with overrides.

    Settings whose values higher layers define, such as `optimizer.name`, are not checked. Raises
    `UsageError` if there is no such file or preset or it is unreadable, or if a setting is unknown
    or malformed, has no effect, or contradicts another setting.

    >>> load_config("shakespeare_char_cpu", "train.max_iters=100").model.n_layer
    4
    """
    return parse_args(["--config", config, *overrides])


def is_help(argv: Sequence[str]) -> bool:
    """Return whether a command line contains `-h` or `--help`."""
    return "-h" in argv or "--help" in argv


def parse_args(
    argv: Sequence[str],
    prog: str = "python -m jaxgpt.train",
    initial_model: ModelOf | None = None,
    saved_settings: SettingsOf = lambda run: None,
    choices: Choices | None = None,
) -> Config:
    """Return the validated configuration that a command line describes.

    `--help` prints every key and exits with status 0.

    Args:
        argv: The command-line arguments. They override the settings of the preset or file in
            `--config`. The default for `--config` is the config.yaml in `--out` if that exists, or
            else the result of `saved_settings`, or else the `tiny` preset. Its key `out` is
            ignored, and so are its data sources if `argv` sets one. From `--out`,
            `data.accept_changes` and `checkpoint.resume` are ignored, too.
        prog: The name of the command in the text of `--help`.
        initial_model: Takes `train.init_from` and `out`, and returns the model options found in
            the former, by name. They take precedence over the defaults, but not over the settings
            of `--config`, of the run directory or of the command line. Called only if
            train.init_from is set.
        saved_settings: Returns the settings in the newest checkpoint of a run directory, or None.
            It is called if the directory has no readable config.yaml.
        choices: Allowed values of keys such as `optimizer.name`, which higher layers define, and
            the keys that each value uses; see `validate.Choices`. None does not check them.

    Raises:
        UsageError: If a file is missing or unreadable, or if a setting is unknown or malformed, has
            no effect, or contradicts another setting.
    """
    choices = choices or {}
    if is_help(argv):
        print(help_text(prog, choices))
        sys.exit(0)
    given = _split_arguments(argv)
    base, content = _base(given, saved_settings)
    # The file may be the config.yaml of another run; do not write to that run's directory.
    left_out = {"out"} if "config" in given else {"out"} | _FOR_ONE_START
    values = _without(_flatten(content, str(base)), left_out, given)
    is_preset = base in _presets().values()
    model = {}
    if initial_model is not None:
        model = _initial_model(initial_model, {**values, **given})
        if model and "config" not in given and is_preset:  # tiny is only a fallback
            values = {key: words for key, words in values.items() if not key.startswith("model.")}
    try:
        config = _build({"config": ["tiny"], **model, **values, **given})
        validate(config)
        check_choices(config, given, choices)
    except UsageError as error:
        key = str(error).partition("=")[0]
        if key in given or key not in values or is_preset:
            raise
        raise UsageError(f"{error} (set in {base})") from None
    return config


def override_data(config: Config, argv: Sequence[str]) -> Config:
    """Return a validated copy of the configuration, with the `data.*` settings in `argv` applied.

    A data source in `argv` replaces all data sources of `config`. Unless `argv` sets them,
    data.accept_changes and checkpoint.resume are reset to their defaults. Raises `UsageError` if
    `argv` contains any other setting or a malformed one, or if the result is not valid.
    """
    given = _split_arguments(argv)
    for key in given:
        if not key.startswith("data."):
            raise UsageError(
                f"{key}={' '.join(given[key])}: only data.* settings can be changed here; leave it "
                "out"
            )
    values = _without(_flatten(config.to_dict(), "configuration"), _FOR_ONE_START, given)
    config = _build({**values, **given})
    validate(config)
    return config


def config_from_dict(values: Mapping[str, Any], origin: str) -> Config:
    """Rebuild a configuration from the output of `Config.to_dict`, without validating it.

    Missing keys have their default values. Raises `UsageError` if a key is unknown or a value is
    malformed. For an unknown key, the message begins with `origin`, for example the name of a file.
    """
    return _build(_flatten(values, origin))


def config_from_file(path: Path) -> Config:
    """Return the configuration from a run's config.yaml, without validating it.

    Missing keys have their default values. Raises `UsageError` if the file is unreadable, a key is
    unknown, or a value is malformed.
    """
    return config_from_dict(_read_yaml(path), str(path))


@functools.cache
def settings() -> dict[str, Any]:
    """Return the type of every setting, keyed by `section.key` or, at the top level, `key`."""
    out = {}
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            out |= {f"{name}.{key}": hint for key, hint in hints.items()}
        else:
            out[name] = kind
    return out


def _base(given: Words, saved: SettingsOf) -> tuple[Path, Mapping[str, Any]]:
    """Return the path and content of the YAML file that the command line overrides."""
    if "config" not in given and "out" in given:
        kept = Path(expand_user(given["out"][0], "out=")) / "config.yaml"
        try:
            content = _read_yaml(kept) if kept.is_file() else saved(kept.parent)
        except UsageError:
            if (content := saved(kept.parent)) is None:
                raise
        if content is not None:
            return kept, content
    name = expand_user(given.get("config", ["tiny"])[0], "config=")
    presets = _presets()
    if name in presets or Path(name).is_file():
        path = presets.get(name, Path(name))
        return path, _read_yaml(path)
    raise UsageError(f"config={name}: no such file or preset; the presets are {', '.join(presets)}")


def _presets() -> dict[str, Path]:
    """Return the preset files by name, from the installed package or a source checkout."""
    package = Path(__file__).parent.parent
    folders = (package / "configs", package.parent / "configs")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def _initial_model(model_of: ModelOf, words: Words) -> Words:
    """Return the model options from train.init_from as strings, or {} if it is not set."""
    config = _build({key: words[key] for key in ("train.init_from", "out") if key in words})
    if config.train.init_from is None:
        return {}
    validate(Config().replace(train__init_from=config.train.init_from))
    options = model_of(config.train.init_from, config.out)
    return _flatten({"model": options}, f"train.init_from={config.train.init_from}")


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
                raise yaml.YAMLError(f"{key} is given twice")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.load(path.read_text(), _Loader)
        if isinstance(values, Mapping):
            return values
        problem = "it has no sections such as `train:`"
    except RecursionError:
        problem = "it is nested too deeply"
    # PyYAML converts dates and numbers with Python functions that raise other errors.
    except (OSError, ValueError, ArithmeticError, TypeError, LookupError, yaml.YAMLError) as error:
        problem = in_words(error)
    raise UsageError(
        f"config={path}: not readable as YAML ({problem}); correct the file, or remove it and set "
        "--config NAME and section.key=value"
    )


def _flatten(values: Mapping[str, Any], origin: str, prefix: str = "") -> dict[str, list[str]]:
    """Return the value strings of each `section.key` of a nested mapping; errors name `origin`."""
    out = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and not prefix:
            out |= _flatten(value, origin, f"{name}.")
            continue
        kind = settings().get(name := f"{prefix}{name}")
        if kind is None:
            raise UsageError(f"{origin}: {unknown_key(name)}")
        if name == "parallel.mesh" and isinstance(value, list):
            value = ",".join(map(str, value))
        if value is False and bool not in (kind, *typing.get_args(kind)):
            value = "off"  # YAML reads `off` as False
        out[name] = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return out


def _without(values: Words, keys: set[str], given: Words) -> Words:
    """Drop `keys` from `values`, plus all data sources if `given` sets one."""
    keys = keys | (_DATA_KEYS if _DATA_KEYS & given.keys() else set())
    return {key: words for key, words in values.items() if key not in keys}


def _split_arguments(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the value strings given for each `section.key` on the command line."""
    out: dict[str, list[str]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if word.endswith((".py", ".toml")) and not equals:  # a config file of nanoGPT or torchtitan
            name = Path(word).stem.removeprefix("train_")
            raise UsageError(f"{word}: not a YAML file; use --config {name}, or --config FILE.yaml")
        if not key or not (word.startswith("--") or equals):
            raise UsageError(f"{word!r}: must be section.key=value or --section.key value")
        key = key.replace("-", "_")
        key = key if key in settings() else aliases.find(aliases.KEY_ALIASES, key) or key
        if key not in settings():
            raise UsageError(unknown_key(word.partition("=")[0], key))
        several = _takes_many(settings()[key])
        if key in out and several:
            raise UsageError(f"{word}: given twice; put all values after a single --{key}")
        out[key] = [value] if equals else []
        next_setting = r"--|[\w.-]+=" if several else "--"
        while words and (not out[key] or several) and not re.match(next_setting, words[0]):
            out[key].append(words.pop(0))
        if not out[key]:
            raise UsageError(f"--{key}: needs a value, {_describe(settings()[key])}")
    return out


def unknown_key(shown: str, key: str | None = None) -> str:
    """Return an error message for an unknown key, with a suggestion.

    `shown` is the key as typed, and `key` is the key to look up, if that differs.
    """
    key = key or shown
    last = key.rpartition(".")[2]
    lasts = {name.rpartition(".")[2]: name for name in settings()}
    found = aliases.find(aliases.KEY_SUGGESTIONS, key) or aliases.find(
        aliases.KEY_SUGGESTIONS, last
    )
    if found and not ("." in key and last in lasts):
        return f"{shown}: not a setting of jaxgpt; {found}"
    near = [
        lasts.get(last) or aliases.find(aliases.KEY_ALIASES, last),
        *difflib.get_close_matches(key, settings(), 1, 0.8),
        *(lasts[close] for close in difflib.get_close_matches(last, lasts, 1, 0.75)),
    ]
    hint = next((f"did you mean {name}?" for name in near if name), "--help lists every key")
    return f"{shown}: unknown key; {hint}"


def _build(words: Words) -> Config:
    values = {name.replace(".", "__"): _value(name, given) for name, given in words.items()}
    return Config().replace(**values)


def _value(name: str, words: Sequence[str]) -> Any:
    """Return the value of one setting, or raise `UsageError`."""
    if name in _PATHS:
        words = [expand_user(word, f"{name}=") for word in words]
    words = [aliases.VALUE_ALIASES.get(name, {}).get(word, word) for word in words]
    answer = aliases.find(aliases.VALUE_SUGGESTIONS, f"{name}={words[0]}") if words else ""
    if answer:
        raise UsageError(f"{name}={words[0]}: {answer}")
    try:
        return _convert(settings()[name], words)
    except (KeyError, ValueError):
        must = _describe(settings()[name])
        raise UsageError(f"{name}={shorten(' '.join(words))}: must be {must}") from None


def _takes_many(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _convert(kind: Any, words: Sequence[str]) -> Any:
    """Convert strings to the given type. Raises `ValueError` or `KeyError` if they do not fit."""
    arguments = typing.get_args(kind)
    if _takes_many(kind):
        if arguments[0] is not str:  # strings may contain spaces
            words = " ".join(words).split()
        return tuple(_convert(arguments[0], [word]) for word in words if word)  # `key=` is ()
    (word,) = words
    if types.NoneType in arguments:
        named = _named_values(arguments)
        return named[word] if word in named else _convert(arguments[0], words)
    if typing.get_origin(kind) is Literal:
        return {str(option): option for option in arguments}[word]
    if typing.get_origin(kind) is Annotated:
        number, bounds = arguments
        value = _convert(number, words)
        if not bounds.contain(value):
            raise ValueError
        return value
    value = {"true": True, "false": False}[word.lower()] if kind is bool else kind(word)
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def _describe(kind: Any) -> str:
    """Return a description of the values that a type allows, such as "a finite number"."""
    arguments = typing.get_args(kind)
    if _takes_many(kind):
        if typing.get_origin(arguments[0]) is Literal:
            return f"a list of {' and '.join(typing.get_args(arguments[0]))}, separated by spaces"
        numbers = {int: "whole numbers", float: "numbers, separated by spaces"}
        return numbers.get(arguments[0], "a list of strings")
    if types.NoneType in arguments:
        return ", or ".join([_describe(arguments[0]), *_named_values(arguments)])
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is Annotated:
        return f"{_KINDS[arguments[0]]}, {arguments[1].text}"
    return _KINDS[kind]


def _named_values(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the literals and None in a union, keyed by the string that a user types for them."""
    literals = {str(w): w for kind in arguments[1:-1] for w in typing.get_args(kind)}
    return literals | {"None": None}


def help_text(prog: str, choices: Mapping[str, Iterable[str]]) -> str:
    """Return the text of --help: every key with its type, bounds, default and description.

    `choices` lists the allowed values of keys whose type does not list them.
    """
    lines = [USAGE.format(prog=prog), *_entries(Config, "", choices)]
    for name, section in inspect.get_annotations(Config).items():
        if dataclasses.is_dataclass(section):
            lines += ["", f"{name}: {section.__doc__}", *_entries(section, f"{name}.", choices)]
    return "\n".join(lines)


def _entries(section: type, prefix: str, choices: Mapping[str, Iterable[str]]) -> list[str]:
    """Return help lines for the documented fields of a dataclass."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    lines = []
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            name, default = f"{prefix}{node.target.id}", getattr(section, node.target.id)
            default = " ".join(map(str, default)) if isinstance(default, tuple) else default
            kind = Literal[*choices[name]] if name in choices else settings()[name]
            lines.append(f"  --{name}: {_describe(kind)} (default: {default})")
            doc = " ".join(ast.literal_eval(below.value).split())
            lines += textwrap.wrap(doc, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return lines
