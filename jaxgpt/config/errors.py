"""The error of everything that a user can put right, and the reading of JSON that may raise it."""

import json
import os
import typing
from pathlib import Path
from typing import Any

MAX_NAME, MAX_PATH = 255, 4000  # bytes, of Linux and macOS, about


class UsageError(ValueError):
    """Something a user gave is wrong: key, value and remedy, printed as one line; status 2."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # a value may have several


def expand_user(path: str, key: str = "") -> str:
    """Return a path with its ~ replaced, which shells leave in `key=~/...`, and YAML always."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise UsageError(f"{key}{path}: no home directory is known; give a whole path")
    sizes = [len(name.encode(errors="replace")) for name in found.split("/")]
    if max(sizes) > MAX_NAME or sum(sizes) > MAX_PATH or "\0" in found:
        raise UsageError(f"{key}{shorten(path)!r}: no file can have this name; give another")
    return found


def in_words(error: Exception) -> str:
    """Return what went wrong, without the number and the path of an `OSError`."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def read_json(path: Path, shape: Any) -> Any:
    """Return the JSON value of a file; `OSError`, or `ValueError` unless it has the shape."""
    try:
        value = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_shape(value, shape)
    return value


def check_shape(value: Any, shape: Any, name: str = "its content") -> None:
    """Raise a `ValueError` that names the first part of a JSON value without the right shape.

    A shape is `bool`, `str`, `int` (a count, below 2^63), `float` (a finite number), a union of
    these with None, `[shape]`, a tuple of the shapes of a list, `{str: shape}` for any keys, or a
    dict of keys; a key that ends in `?` may be missing.
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        if str in shape:
            shape = dict.fromkeys(value, shape[str])
        for key, part in shape.items():
            bare = key.removesuffix("?")
            if bare in value:
                check_shape(value[bare], part, bare)
            elif bare == key:
                raise ValueError(f"{key} is missing")
        return
    if isinstance(shape, list | tuple) and isinstance(value, list):
        parts = shape if isinstance(shape, tuple) else shape * len(value)
        if len(parts) == len(value):
            for one, part in zip(value, parts, strict=True):
                check_shape(one, part, f"an item of {name}")
            return
    kinds = () if isinstance(shape, dict | list | tuple) else typing.get_args(shape) or (shape,)
    if not any(_is_plain(value, kind) for kind in kinds):
        raise ValueError(f"{name} is {shorten(repr(value))}")


def _is_plain(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300
    return type(value) is kind


def shorten(text: str, most: int = 60) -> str:
    """Return a text that a sentence has room for."""
    return text if len(text) <= most else f"{text[:most]}..."
