"""`UsageError` for mistakes that the user can fix, and functions that read YAML and JSON."""

import difflib
import json
import os
import traceback
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

MAX_NAME, MAX_PATH = 255, 4000  # bytes; approximately the limits of Linux


class UsageError(ValueError):
    """An error that the user can fix. Commands report it and exit with status 2.

    The message explains what is wrong and how to fix it. Each argument is one line of the message.
    """

    def __str__(self) -> str:
        # Values may contain line breaks.
        return "\n".join(" ".join(str(line).splitlines()) for line in self.args)

    def _render_traceback_(self) -> list[str]:
        """Return lines for IPython and Jupyter to show: the user's stack frames and the message."""
        frames = traceback.extract_tb(self.__traceback__)
        hidden = f"{Path(__file__).parents[1]}{os.sep}", f"{os.sep}site-packages{os.sep}"
        own = [f for f in frames if not any(part in f.filename for part in hidden)]
        lines = "".join(traceback.format_list(own)).splitlines()
        return [*lines, *f"UsageError: {self}".splitlines()]


def nearest(name: str, choices: Iterable[str], least: float = 0.6) -> str | None:
    """Return the choice that is most similar to a mistyped name, or None if none is similar.

    `least` is the smallest `difflib.SequenceMatcher` ratio (0 to 1) that counts as similar.
    """
    return next(iter(difflib.get_close_matches(name, list(choices), 1, least)), None)


def expand_user(path: str, key: str = "") -> str:
    """Expand ~ or ~USER at the start of a path. Most shells do not expand `data.path=~/...`.

    Raises `UsageError` if the home directory is unknown, if the path or a name in it is too long
    (see `MAX_PATH` and `MAX_NAME`), or if the path contains a null character. The message begins
    with `key`.
    """
    found = path if "\0" in path else os.path.expanduser(path)
    sizes = [len(name.encode(errors="replace")) for name in found.split("/")]
    if max(sizes) > MAX_NAME or sum(sizes) + len(sizes) > MAX_PATH or "\0" in found:
        raise UsageError(f"{key}{shorten(path)!r}: not a valid file name; use another name")
    if found.startswith("~"):
        raise UsageError(f"{key}{path}: no home directory is known; use an absolute path")
    return found


def in_words(error: Exception) -> str:
    """Return an error's message. For an `OSError`, return only its `strerror` if that is set.

    If there is no message, return the name of the error's type. The message of a `KeyError` is only
    the missing key, so the type is added.
    """
    if isinstance(error, KeyError):
        return f"{type(error).__name__}: {error}"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def parse_yaml(text: str, loader: type = yaml.SafeLoader) -> Any:
    """Parse a YAML string and return its value. Raises `ValueError` if the string is invalid."""
    try:
        return yaml.load(text, loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # PyYAML converts tagged values with Python functions that raise many types of errors, such as
    # IndexError for `!!int`.
    except Exception as error:
        raise ValueError(in_words(error)) from error


def read_json(path: Path, shape: Any) -> Any:
    """Parse a JSON file and return its value.

    Raises `OSError` if the file is not readable, and `ValueError` if its content cannot be parsed
    or does not have the given shape (see `check_shape`).
    """
    try:
        value = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_shape(value, shape)
    return value


def check_shape(value: Any, shape: Any, name: str = "its content") -> None:
    """Raise `ValueError` at the first mismatch between a JSON value and its expected shape.

    Args:
        value: The JSON value.
        shape: The expected shape, one of:
            `bool`, `str`, `int` (from 0 to 2^63 - 1), `float` (a number below 1e300 in absolute
            value), `list` or `dict` (with any content), or a union of them that may include None;
            `[shape]` for a list of any length, or a tuple with one shape for each item of a list;
            `{str: shape}` for a dict with any keys, or a dict with one shape for each key. A key
            that ends in `?` may be missing. Keys that are not listed are ignored.
        name: Name of the value in the error message.
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        if str in shape:
            for key, part in value.items():
                check_shape(part, shape[str], key)
            return
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
    """Return the text. If it has more than `most` characters, replace the rest with `...`."""
    return text if len(text) <= most else f"{text[:most]}..."
