"""Types of settings: their bounds, their values from text, and their description."""

import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Bounds:
    """Where a number has to lie. It is finite in any case."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    unit: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            abs(value) < float("inf")  # also refuses nan
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (
            ("at least", self.at_least),
            ("more than", self.above),
            ("at most", self.at_most),
            ("less than", self.below),
        )
        parts = [f"{words} {_number(limit)}" for words, limit in limits if limit is not None]
        return " and ".join(parts) + (f" {self.unit}" if self.unit else "")


def _number(limit: float) -> str:
    return "2^31" if limit == 2**31 else str(limit)


Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Count31 = Annotated[int, Bounds(at_least=1, below=2**31)]  # where JAX counts in 32 bits
CountOrZero31 = Annotated[int, Bounds(at_least=0, below=2**31)]
NonNegative = Annotated[float, Bounds(at_least=0)]
AtLeastOne = Annotated[float, Bounds(at_least=1)]
Rate = Annotated[float, Bounds(at_least=0, below=1)]
Minutes = Annotated[float, Bounds(above=0, at_most=10**6, unit="minutes")]


def options(kind: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union such as `int | None`, or the type alone."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def takes_many(kind: Any) -> bool:
    """Return whether a setting takes several words."""
    return typing.get_origin(kind) is tuple


def has_bool(kind: Any) -> bool:
    """Return whether True and False are values of a type."""
    return bool in options(kind)


def convert(kind: Any, words: Sequence[str]) -> Any:
    """Return the value of type `kind` that words say.

    Raises:
        ValueError: if they say none, or one that is out of its bounds.
    """
    if takes_many(kind):
        words = [] if list(words) == [""] else words  # `key=` is none
        return tuple(_convert_word(typing.get_args(kind)[0], word) for word in words)
    (word,) = words
    for option in sorted(options(kind), key=lambda option: option is not types.NoneType):
        try:
            return _convert_word(option, word)
        except ValueError as error:
            problem = error
    raise problem


def _convert_word(kind: Any, word: str) -> Any:
    if typing.get_origin(kind) is Annotated:
        kind, bounds = typing.get_args(kind)
        value = kind(word)
        if value not in bounds:
            raise ValueError(f"{value} is not {bounds}")
        return value
    allowed = {
        bool: {"true": True, "false": False},
        types.NoneType: {"None": None},
    }.get(kind, {str(option): option for option in typing.get_args(kind)})
    if not allowed:
        return kind(word)
    word = word.lower() if kind is bool else word
    if word not in allowed:
        raise ValueError(f"{word} is none of {', '.join(allowed)}")
    return allowed[word]


def describe(kind: Any) -> str:
    """Return what a value must be, in a user's words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is Annotated:
        number, bounds = typing.get_args(kind)
        finite = number is float and bounds.at_most is None and bounds.below is None
        return f"{'a finite number' if finite else describe(number)}, {bounds}"
    if takes_many(kind):
        return "whole numbers" if typing.get_args(kind)[0] is int else "a list of texts"
    if len(options(kind)) > 1:
        return " or ".join(map(describe, options(kind)))
    return {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        types.NoneType: "None",
    }[kind]


def symbol(kind: Any) -> str:
    """Return the type as --help shows it."""
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is Annotated:
        return symbol(typing.get_args(kind)[0])
    if takes_many(kind):
        return f"{symbol(typing.get_args(kind)[0])} ..."
    if len(options(kind)) > 1:
        return "|".join(map(symbol, options(kind)))
    return {bool: "True|False", types.NoneType: "None"}.get(kind, kind.__name__.upper())
