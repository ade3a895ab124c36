"""Conversion of strings to setting values, and descriptions of their types."""

import math
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from jaxgpt.config import aliases
from jaxgpt.config.errors import UsageError, expand_user, shorten

_PATHS = {"config", "out", "train.init_from", "checkpoint.local"}
_PATHS |= {f"data.{key}" for key in ("dataset", "path", "file_list", "tokenizer")}
_KINDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "text"}


def takes_many(kind: Any) -> bool:
    """Return whether a setting of this type takes a list."""
    return typing.get_origin(kind) is tuple


def strings_of(name: str, kind: Any, value: Any) -> list[str]:
    """Convert `value`, which belongs to the setting `name`, to command-line strings."""
    many = isinstance(value, list | tuple)
    if name == "parallel.mesh" and many:
        return [",".join(map(str, value))]
    if value is False and bool not in (kind, *typing.get_args(kind)):
        return ["off"]  # YAML reads `off` as False
    if value is None and (takes_many(kind) or kind is str):
        return [""] if kind is str else []
    return [str(each) for each in value] if many else [str(value)]


def parse_value(name: str, kind: Any, words: Sequence[str]) -> Any:
    """Return the value of the setting `name`, parsed from `words`.

    Expands ~ in the settings listed in `_PATHS`, and accepts aliases from other programs, such as
    bf16 for bfloat16. Raises `UsageError` if the setting does not allow the value, or if ~ cannot
    be expanded.
    """
    if name in _PATHS:
        words = [expand_user(word, f"{name}=") for word in words]
    words = [aliases.VALUE_ALIASES.get(name, {}).get(word, word) for word in words]
    answer = aliases.VALUE_SUGGESTIONS.get(f"{name}={words[0]}") if words else None
    if answer:
        raise UsageError(f"{name}={words[0]}: {answer}")
    try:
        return convert(kind, words)
    except (KeyError, ValueError):
        raise UsageError(f"{name}={shorten(' '.join(words))}: must be {describe(kind)}") from None


def convert(kind: Any, words: Sequence[str]) -> Any:
    """Convert the strings of one setting to `kind`, the setting's type from `settings`.

    Raises `ValueError` or `KeyError` if the strings cannot be converted or the value is out of
    range.
    """
    arguments = typing.get_args(kind)
    if takes_many(kind):
        if arguments[0] is not str:  # strings may contain spaces
            words = " ".join(words).split()
        return tuple(convert(arguments[0], [word]) for word in words if word)  # `key=` is ()
    (word,) = words
    if types.NoneType in arguments:
        named = _named_values(arguments)
        return named[word] if word in named else convert(arguments[0], words)
    if typing.get_origin(kind) is Literal:
        return {str(option): option for option in arguments}[word]
    if typing.get_origin(kind) is Annotated:
        number, bounds = arguments
        value = convert(number, words)
        if not bounds.contain(value):
            raise ValueError
        return value
    if kind is int:
        return whole(word)
    value = {"true": True, "false": False}[word.lower()] if kind is bool else kind(word)
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def whole(word: str) -> int:
    """Convert a string such as 1000, 1e3 or 1000.0 to an integer.

    Raises `ValueError` if the string is not a whole number, or has thousands of digits.
    """
    if not word.isdecimal() and float(word).is_integer():
        word = f"{float(word):.0f}"
    return int(word)


def describe(kind: Any) -> str:
    """Return a description of the values that a type from `settings` allows.

    The text, such as "a finite number", can follow the words "must be".
    """
    arguments = typing.get_args(kind)
    if takes_many(kind):
        if typing.get_origin(arguments[0]) is Literal:
            return f"a list of {' and '.join(typing.get_args(arguments[0]))}, separated by spaces"
        numbers = {int: "whole numbers, separated by spaces", float: "numbers, separated by spaces"}
        return numbers.get(arguments[0], "a list of strings, separated by spaces")
    if types.NoneType in arguments:
        return ", or ".join([describe(arguments[0]), *_named_values(arguments)])
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is Annotated:
        return f"{_KINDS[arguments[0]]}, {arguments[1].text}"
    return _KINDS[kind]


def _named_values(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return a dict that maps the spelling of None and of each literal in a union to its value."""
    literals = {str(w): w for kind in arguments[1:-1] for w in typing.get_args(kind)}
    return literals | {"None": None}


def words_of(kind: Any) -> list[str]:
    """Return the literals that a type allows, such as True and False.

    Returns an empty list if the type allows no literals, or only None.
    """
    if kind is bool:
        return ["True", "False"]
    if typing.get_origin(kind) is Literal:
        return [str(option) for option in typing.get_args(kind)]
    if takes_many(kind):
        return words_of(typing.get_args(kind)[0])
    arguments = typing.get_args(kind)
    if types.NoneType not in arguments:
        return []
    words = [*words_of(arguments[0]), *_named_values(arguments)]
    return words if len(words) > 1 else []
