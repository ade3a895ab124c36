"""Types of settings: their values from text, their descriptions, and the text of --help."""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from jaxgpt.config.schema import Config

USAGE = """\
usage: {prog} [--config NAME_OR_FILE] [--mesh D,F,T] [--out DIR]
           [--train-range-to-skip A B ...] [section.key=value ...]

section.key=value and --section.key value are the same; a YAML file has `section: {{key: value}}`.
The defaults are those of the preset tiny; --config NAME takes others.
"""
_NAMES = {int: "a whole number", float: "a finite number", bool: "True or False", str: "text"}


@functools.cache
def settings() -> dict[str, Any]:
    """Return the type of every setting, by `section.key`."""
    out = {}
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            out |= {f"{name}.{key}": hint for key, hint in hints.items()}
        else:
            out[name] = kind
    return out


def takes_many(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def convert(kind: Any, words: Sequence[str]) -> Any:
    """Return the value of type `kind` that words say; `ValueError` or `KeyError` if they do not."""
    arguments = typing.get_args(kind)
    if takes_many(kind):
        return tuple(_plain(arguments[0], word) for word in words if word)  # `key=` is none
    (word,) = words
    if types.NoneType in arguments:  # a type, perhaps words beside it, or None
        named = {str(w): w for k in arguments[1:-1] for w in typing.get_args(k)} | {"None": None}
        return named[word] if word in named else convert(arguments[0], words)
    if typing.get_origin(kind) is Literal:
        return {str(option): option for option in arguments}[word]
    if typing.get_origin(kind) is Annotated:
        number, bounds = arguments
        value = _plain(number, word)
        if not bounds.hold(value):
            raise ValueError
        return value
    return {"true": True, "false": False}[word.lower()] if kind is bool else _plain(kind, word)


def _plain(kind: type, word: str) -> Any:
    """Return a text, a whole number or a number, which must be finite."""
    value = kind(word)
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def describe(kind: Any) -> str:
    """Return what a value must be, in a user's words."""
    arguments = typing.get_args(kind)
    if takes_many(kind):
        numbers = {int: "whole numbers", float: "numbers, separated by spaces"}
        return numbers.get(arguments[0], "a list of texts")
    if types.NoneType in arguments:
        named = [str(w) for k in arguments[1:-1] for w in typing.get_args(k)]
        return ", or ".join([describe(arguments[0]), *named, "None"])
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is Annotated:
        return f"{_NAMES[arguments[0]]}, {arguments[1].text}"
    return _NAMES[kind]


def help_text(prog: str, choices: Mapping[str, Iterable[str]]) -> str:
    """Return the text of --help: every key with its type, bounds, default and documentation.

    `choices` has the values of keys whose type does not list them.
    """
    lines = [USAGE.format(prog=prog), *_entries(Config, "", choices)]
    for name, section in inspect.get_annotations(Config).items():
        if dataclasses.is_dataclass(section):
            lines += ["", f"{name}: {section.__doc__}", *_entries(section, f"{name}.", choices)]
    return "\n".join(lines)


def _entries(section: type, prefix: str, choices: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the lines about the fields of a dataclass that have a text below them."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    lines = []
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            name, default = f"{prefix}{node.target.id}", getattr(section, node.target.id)
            default = " ".join(map(str, default)) if isinstance(default, tuple) else default
            kind = Literal[*choices[name]] if name in choices else settings()[name]
            lines.append(f"  --{name}: {describe(kind)} (default: {default})")
            doc = " ".join(ast.literal_eval(below.value).split())
            lines += textwrap.wrap(doc, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return lines
