"""From text to dataclasses: YAML presets, `section.key=value` and `--section.key value`.

All values pass through tyro, so a preset and the command line accept the same spellings.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxgpt.config import aliases
from jaxgpt.config.schema import Config
from jaxgpt.config.validate import UsageError, expand_user, validate


def load_config(config: str = "tiny", *overrides: str) -> Config:
    """The configuration of a preset with `section.key=value` overrides, validated.

    >>> load_config("shakespeare_char_cpu", "train.max_iters=100").model.n_layer
    4
    """
    return parse_args(["--config", config, *overrides])


def is_help(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return "-h" in argv or "--help" in argv


def names_config(argv: Sequence[str]) -> bool:
    """Whether a command line says which configuration it starts from."""
    return any(word.removeprefix("--").partition("=")[0] == "config" for word in argv)


def parse_args(argv: Sequence[str], prog: str = "python -m jaxgpt.train") -> Config:
    """The configuration that a command line describes, validated.

    The base is `--config`; without it the config.yaml of an existing `--out`, else `tiny`.
    `--help` prints every key and exits 0.

    Raises:
        UsageError: for an unknown key, a value of the wrong type, or one that cannot work.
    """
    import tyro

    if is_help(argv):
        tyro.cli(Config, args=["--help"], prog=prog, use_underscores=True, config=_tyro_options())
    given = _split_arguments(argv)
    base = _base_file(given)
    values = _flatten(_read_yaml(base), origin=str(base))
    values.pop("out", None)  # another run's settings are welcome, its directory is not
    if "config" not in given:  # consent, or a refusal, is for the start that it was given to
        for key in ("data.accept_changes", "checkpoint.resume"):
            values.pop(key, None)
    if _SAYING_WHERE & set(given):  # that is where the data is, not where the file says
        values = {key: value for key, value in values.items() if key not in _SAYING_WHERE}
    try:
        config = _build({"config": ["tiny"], **values, **given})
        validate(config)
    except UsageError as error:
        key = str(error).partition("=")[0]
        if key in given or key not in values or base.parent in config_directories():
            raise
        raise UsageError(f"{error} (it is in {base})") from None
    return config


def config_from_dict(values: Mapping[str, Any], origin: str) -> Config:
    """The configuration that `Config.to_dict` wrote, from a checkpoint or a run directory."""
    return _build(_flatten(values, origin))


def config_from_file(path: Path) -> Config:
    """The configuration in a run directory's config.yaml.

    Raises:
        UsageError: if the file is not one.
    """
    return config_from_dict(_read_yaml(path), str(path))


_SAYING_WHERE = {"data.dataset", "data.path", "data.blend", "data.file_list"}
_PATHS = {"config", "out", "data.path", "data.file_list", "data.tokenizer"}


def _tyro_options() -> tuple[Any, ...]:
    import tyro

    return (tyro.conf.FlagConversionOff,)  # --model.bias True, as in YAML; no --no-bias


@functools.cache
def _fields() -> dict[str, Any]:
    """`section.key` -> type, for every setting."""
    out = {}
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            out |= {f"{name}.{f.name}": hints[f.name] for f in dataclasses.fields(kind)}
        else:
            out[name] = kind
    return out


def config_directories() -> list[Path]:
    """Where presets are looked for: the installed package, then a source checkout."""
    package = Path(__file__).parent.parent
    return [package / "configs", package.parent / "configs"]


def _base_file(given: Mapping[str, Sequence[str]]) -> Path:
    if "config" not in given and "out" in given:
        kept = Path(expand_user(given["out"][0], "out=")) / "config.yaml"
        if kept.is_file():
            return kept
    name = expand_user(given.get("config", ["tiny"])[0], "config=")
    presets = {f.stem: f for d in config_directories() for f in sorted(d.glob("*.yaml"))}
    if name in presets:
        return presets[name]
    if Path(name).is_file():
        return Path(name)
    raise UsageError(f"config={name}: no such file or preset; presets are {', '.join(presets)}")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is there twice")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"config={path}: not readable as YAML ({problem})") from None
    if not isinstance(values, Mapping):
        raise UsageError(f"config={path}: must be a mapping of sections such as `train:`")
    return values


def _flatten(values: Mapping[str, Any], origin: str) -> dict[str, list[str]]:
    """Nested mapping -> {`section.key`: [words]}, the form that a command line has."""
    out = {}
    for section, content in values.items():
        nested = isinstance(content, Mapping)
        for key, value in content.items() if nested else [(None, content)]:
            name = f"{section}.{key}" if nested else str(section)
            if name not in _fields():
                raise UsageError(f"{origin}: {unknown_key(name)}")
            kind = _fields()[name]
            if name == "parallel.mesh" and isinstance(value, list):
                value = ",".join(map(str, value))  # YAML's way to write several numbers
            if value is False and bool not in (kind, *typing.get_args(kind)):
                value = "off"  # which YAML takes for False
            out[name] = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return out


def _split_arguments(argv: Sequence[str]) -> dict[str, list[str]]:
    """Command line -> {`section.key`: [words]}; `key=value` and `--key value` alike."""
    out: dict[str, list[str]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not key or not (word.startswith("--") or equals):
            remedy = aliases.answer_to_file(word) or "give section.key=value or --section.key value"
            raise UsageError(f"{word or repr(word)}: not understood; {remedy}")
        key = key.replace("-", "_")
        key = key if key in _fields() else aliases.SAME.get(key, key)
        if key not in _fields():
            raise UsageError(unknown_key(word.partition("=")[0], key))
        takes_many = typing.get_origin(_fields()[key]) is tuple
        if key in out and takes_many:
            raise UsageError(f"{word}: is given twice; give all its values after one --{key}")
        out[key] = [value] if equals else []
        while words and (not out[key] or takes_many) and not _is_setting(words[0], takes_many):
            out[key].append(words.pop(0))
        if not out[key]:
            raise UsageError(f"--{key}: needs a value: {_expected(_fields()[key])}")
    return out


def _is_setting(word: str, takes_many: bool) -> bool:
    """Whether a word begins the next setting. A flag of one value takes any word as that."""
    return word.startswith("--") or (takes_many and re.match(r"[\w.-]+=", word) is not None)


def unknown_key(shown: str, key: str | None = None) -> str:
    """Return one sentence about an unknown key, with the line to type instead.

    That is another program's word for a setting, a key of the same name in another section, or the
    nearest key.
    """
    key = key or shown
    last = key.rpartition(".")[2]
    known = list(_fields())
    same = [name for name in known if name.rpartition(".")[2] == last]
    if "." in key and len(same) == 1:
        return f"{shown}: unknown key; did you mean {same[0]}?"
    if found := aliases.answer(key):
        return f"{shown}: is not a setting of jaxgpt; {found}"
    if last in aliases.SAME:
        return f"{shown}: unknown key; did you mean {aliases.SAME[last]}?"
    lasts = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(key, known, 1, 0.8)
    near = near or [lasts[t] for t in difflib.get_close_matches(last, lasts, 1, 0.75)]
    hint = f"did you mean {near[0]}?" if near else "--help lists every key"
    return f"{shown}: unknown key; {hint}"


def _build(values: Mapping[str, Sequence[str]]) -> Config:
    """Turns words into typed values with tyro.

    Raises:
        UsageError: naming the first key whose value has the wrong type.
    """
    import tyro

    def parse(names: Sequence[str]) -> Config:
        words = []
        for name in names:
            value = list(values[name])
            if bool in (_fields()[name], *typing.get_args(_fields()[name])):
                value = [v.capitalize() for v in value]
            # `--key=value` keeps a value that begins with a dash from looking like a flag.
            words += [f"--{name}={value[0]}"] if len(value) == 1 else [f"--{name}", *value]
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                Config,
                args=words,
                use_underscores=True,
                config=_tyro_options(),
                console_outputs=False,
            )

    values = {name: _translated(name, words) for name, words in values.items()}
    paths = _PATHS & set(values)
    values = {**values, **{k: [expand_user(path, f"{k}=") for path in values[k]] for k in paths}}
    names = list(values)
    try:
        return parse(names)
    except SystemExit:
        for name in names:
            try:
                parse([name])
            except SystemExit:
                shown = " ".join(values[name])
                expected = _expected(_fields()[name])
                raise UsageError(f"{name}={shown}: must be {expected}") from None
        raise AssertionError(f"tyro refused {values} but none of its parts") from None


def _translated(name: str, words: Sequence[str]) -> Sequence[str]:
    """Return the words of a setting, other programs' names of dtypes replaced by ours."""
    if "dtype" not in name:
        return words
    if set(words) & set(aliases.HALVES):
        raise UsageError(f"{name}={words[0]}: {aliases.ANSWERS['fp16']}")
    return [aliases.DTYPES.get(word, word) for word in words]


def _expected(kind: Any) -> str:
    """A type in a user's words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if isinstance(kind, types.UnionType):
        return " or ".join(_expected(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "whole numbers" if typing.get_args(kind)[0] is int else "a list of texts"
    return {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        types.NoneType: "None",
    }[kind]
