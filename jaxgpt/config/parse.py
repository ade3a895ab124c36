"""YAML files and command lines become words by `section.key`, and words become a `Config`."""

import difflib
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxgpt.config import aliases
from jaxgpt.config.errors import UsageError, expand_user, in_words, shorten
from jaxgpt.config.schema import Config
from jaxgpt.config.validate import Choices, check_choices, validate
from jaxgpt.config.values import convert, describe, help_text, settings, takes_many

_DATA_KEYS = {"data.dataset", "data.path", "data.blend", "data.file_list"}
_FOR_ONE_START = {"data.accept_changes", "checkpoint.resume"}
# (train.init_from, out) -> the options of the model by name
ModelOf = Callable[[str, str | None], Mapping[str, Any]]
# A run directory -> the settings that its newest checkpoint has, or None
SettingsOf = Callable[[Path], Mapping[str, Any] | None]
_PATHS = {"config", "out", "train.init_from"}
_PATHS |= {f"data.{key}" for key in ("dataset", "path", "file_list", "tokenizer")}


def load_config(config: str = "tiny", *overrides: str) -> Config:
    """Return the configuration of a preset with `section.key=value` overrides, validated.

    >>> load_config("shakespeare_char_cpu", "train.max_iters=100").model.n_layer
    4
    """
    return parse_args(["--config", config, *overrides])


def is_help(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return "-h" in argv or "--help" in argv


def parse_args(
    argv: Sequence[str],
    prog: str = "python -m jaxgpt.train",
    initial_model: ModelOf | None = None,
    saved_settings: SettingsOf = lambda run: None,
    choices: Choices | None = None,
) -> Config:
    """Return the configuration that a command line describes, validated.

    The base is `--config`; without it the config.yaml of an existing `--out`, or if that is lost
    what `saved_settings` finds there, else `tiny`. With train.init_from, `initial_model` gives the
    options of the model that are not set otherwise. `choices` has the values of keys that a higher
    layer defines, such as the names of the optimizers.
    `--help` prints every key and exits 0. `UsageError` for what cannot work.
    """
    choices = choices or {}
    if is_help(argv):
        print(help_text(prog, choices))
        sys.exit(0)
    given = _split_arguments(argv)
    base, content = _base(given, saved_settings)
    left_out = {"out"}  # another run's settings are welcome, its directory is not
    if "config" not in given:  # consent, or a refusal, is for the start that it was given to
        left_out |= _FOR_ONE_START
    if _DATA_KEYS & given.keys():  # that is where the data is, not where the file says
        left_out |= _DATA_KEYS
    values = _flatten(content, str(base))
    values = {key: words for key, words in values.items() if key not in left_out}
    model = {}
    if initial_model is not None:
        model = _initial_model(initial_model, {**values, **given})
        if model and "config" not in given and base in _presets().values():  # tiny, not asked for
            values = {key: words for key, words in values.items() if not key.startswith("model.")}
    try:
        config = _build({"config": ["tiny"], **model, **values, **given})
        validate(config)
        check_choices(config, given, choices)
    except UsageError as error:
        key = str(error).partition("=")[0]
        if key in given or key not in values or base in _presets().values():
            raise
        raise UsageError(f"{error} (it is in {base})") from None
    return config


def override_data(config: Config, argv: Sequence[str]) -> Config:
    """Return a configuration with settings of its data changed by a command line, validated.

    Raises `UsageError` for any other setting.
    """
    given = _split_arguments(argv)
    for key in given:
        if not key.startswith("data."):
            raise UsageError(f"{key}={' '.join(given[key])}: only settings of data can be changed")
    left_out = _FOR_ONE_START | (_DATA_KEYS if _DATA_KEYS & given.keys() else set())
    values = _flatten(config.to_dict(), "configuration")
    values = {key: words for key, words in values.items() if key not in left_out}
    config = _build({**values, **given})
    validate(config)
    return config


def _initial_model(model_of: ModelOf, words: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the words of the model of train.init_from, if that is given."""
    config = _build({key: words[key] for key in ("train.init_from", "out") if key in words})
    if config.train.init_from is None:
        return {}
    validate(Config().replace(train__init_from=config.train.init_from))
    options = model_of(config.train.init_from, config.out)
    return _flatten({"model": options}, f"train.init_from={config.train.init_from}")


def config_from_dict(values: Mapping[str, Any], origin: str) -> Config:
    """Return the configuration that `Config.to_dict` wrote; `origin` is named in errors."""
    return _build(_flatten(values, origin))


def config_from_file(path: Path) -> Config:
    """Return the configuration in a run directory's config.yaml."""
    return config_from_dict(_read_yaml(path), str(path))


def _presets() -> dict[str, Path]:
    """Return the files of presets, of the installed package and of a source checkout."""
    package = Path(__file__).parent.parent
    folders = (package / "configs", package.parent / "configs")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def _base(given: Mapping[str, Sequence[str]], saved: SettingsOf) -> tuple[Path, Mapping[str, Any]]:
    """Return the file that a command line begins with, and its content."""
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
    raise UsageError(f"config={name}: no such file or preset; presets are {', '.join(presets)}")


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key that is there twice, of which PyYAML's takes the last, and
    aliases, by which a small file can be endless."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"*{self.peek_event().anchor} is an alias; write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is there twice")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.load(path.read_text(), _Loader)
        if isinstance(values, Mapping):
            return values
        problem = "it has no sections such as `train:`"
    except RecursionError:
        problem = "it is nested too deeply"
    # PyYAML's own types of values raise what Python's do: of dates, or numbers of many digits.
    except (OSError, ValueError, ArithmeticError, TypeError, LookupError, yaml.YAMLError) as error:
        problem = in_words(error)
    raise UsageError(
        f"config={path}: not readable as YAML ({problem}); correct it, or remove it and give the "
        "settings with --config NAME and section.key=value"
    )


def _flatten(values: Mapping[str, Any], origin: str, prefix: str = "") -> dict[str, list[str]]:
    """Return the words of each `section.key` in a nested mapping."""
    out = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and not prefix:
            out |= _flatten(value, origin, f"{name}.")
            continue
        kind = settings().get(name := f"{prefix}{name}")
        if kind is None:
            raise UsageError(f"{origin}: {unknown_key(name)}")
        if name == "parallel.mesh" and isinstance(value, list):
            value = ",".join(map(str, value))  # YAML's way to write several numbers
        if value is False and bool not in (kind, *typing.get_args(kind)):
            value = "off"  # which YAML takes for False
        out[name] = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return out


def _split_arguments(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each `section.key` on a command line."""
    out: dict[str, list[str]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if word.endswith((".py", ".toml")) and not equals:  # nanoGPT's, torchtitan's
            name = Path(word).stem.removeprefix("train_")
            raise UsageError(f"{word}: is not YAML; type --config {name}, or --config FILE.yaml")
        if not key or not (word.startswith("--") or equals):
            raise UsageError(f"{word!r}: give section.key=value or --section.key value")
        key = key.replace("-", "_")
        key = key if key in settings() else aliases.find(aliases.SAME, key) or key
        if key not in settings():
            raise UsageError(unknown_key(word.partition("=")[0], key))
        several = takes_many(settings()[key])
        if key in out and several:
            raise UsageError(f"{word}: is given twice; give all its values after one --{key}")
        out[key] = [value] if equals else []
        next_setting = r"--|[\w.-]+=" if several else "--"
        while words and (not out[key] or several) and not re.match(next_setting, words[0]):
            out[key].append(words.pop(0))
        if not out[key]:
            raise UsageError(f"--{key}: needs a value: {describe(settings()[key])}")
    return out


def unknown_key(shown: str, key: str | None = None) -> str:
    """Return one sentence: the line to type instead, or the key that was meant, by its last part,
    another program's word, or the nearest spelling."""
    key = key or shown
    last = key.rpartition(".")[2]
    lasts = {name.rpartition(".")[2]: name for name in settings()}
    found = aliases.find(aliases.ANSWERS, key) or aliases.find(aliases.ANSWERS, last)
    if found and not ("." in key and last in lasts):
        return f"{shown}: is not a setting of jaxgpt; {found}"
    near = [
        lasts.get(last) or aliases.find(aliases.SAME, last),
        *difflib.get_close_matches(key, settings(), 1, 0.8),
        *(lasts[close] for close in difflib.get_close_matches(last, lasts, 1, 0.75)),
    ]
    hint = next((f"did you mean {name}?" for name in near if name), "--help lists every key")
    return f"{shown}: unknown key; {hint}"


def _build(words: Mapping[str, Sequence[str]]) -> Config:
    """Return the configuration that the words of each `section.key` say."""
    values = {name.replace(".", "__"): _value(name, given) for name, given in words.items()}
    return Config().replace(**values)


def _value(name: str, words: Sequence[str]) -> Any:
    """Return the value of one setting."""
    if name in _PATHS:
        words = [expand_user(word, f"{name}=") for word in words]
    words = [aliases.VALUES.get(name, {}).get(word, word) for word in words]
    answer = aliases.find(aliases.VALUE_ANSWERS, f"{name}={words[0]}") if words else ""
    if answer:
        raise UsageError(f"{name}={words[0]}: {answer}")
    if "dtype" in name:
        words = [aliases.DTYPES.get(word, word) for word in words]
        if set(words) & set(aliases.HALVES.split()):
            raise UsageError(f"{name}={words[0]}: {aliases.ANSWERS[aliases.HALVES]}")
    try:
        return convert(settings()[name], words)
    except (KeyError, ValueError):
        must = describe(settings()[name])
        raise UsageError(f"{name}={shorten(' '.join(words))}: must be {must}") from None
