"""Argument parser and option types for all commands except jaxgpt.train."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxgpt.config.errors import UsageError, expand_user


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` for mistakes and rejects abbreviated options.

    Options may be written with underscores instead of dashes, as in nanoGPT.
    """

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        words = list(sys.argv[1:] if args is None else args)
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") in self._option_string_actions:
                words[i] = f"{name.replace('_', '-')}{equals}{value}"
        if "--mesh" in words[:-1]:  # argparse would treat -1,1,1 as an option
            i = words.index("--mesh")
            words[i : i + 2] = [f"--mesh={words[i + 1]}"]
        if "--run" in self._option_string_actions and words and words[0][:1] not in ("", "-"):
            is_setting, is_given = "=" in words[0], any(w.startswith("--run") for w in words)
            if not (is_setting or is_given or self._get_positional_actions()):
                self.error(f"{words[0]}: use --run {words[0]}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('python -m ')}: {message}; see --help")


def file_path(given: str) -> Path:
    """Return an option's value as a path, with ~ expanded. Used as an argparse type.

    Raises `ArgumentTypeError` if the value is empty or not a valid file name, or if the home
    directory is unknown.
    """
    if not given:  # Path("") is the working directory
        raise argparse.ArgumentTypeError("is empty; give the path of a file or folder")
    try:
        return Path(expand_user(given))
    except UsageError as error:  # argparse would drop a UsageError's message
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(least: int = 1, bits: int = 63) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` to 2^bits - 1.

    The type raises `ArgumentTypeError` for anything else.
    """

    def convert(given: str) -> int:
        # By default, Python refuses to convert numbers with thousands of digits.
        if given.isdecimal() and len(given) <= 20 and least <= int(given) < 2**bits:
            return int(given)
        text = f"{given}: must be a whole number, at least {least} and less than 2^{bits}"
        raise argparse.ArgumentTypeError(text)

    return convert
