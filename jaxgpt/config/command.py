"""Options of the commands besides jaxgpt.train: a parser, and types of options."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxgpt.config.errors import UsageError, expand_user


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`s, and which takes no abbreviations.

    An option may have underscores in place of dashes, as in nanoGPT.
    """

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        words = list(sys.argv[1:] if args is None else args)
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") in self._option_string_actions:
                words[i] = f"{name.replace('_', '-')}{equals}{value}"
        if "--mesh" in words[:-1]:  # or -1,1,1 would be taken for an option
            i = words.index("--mesh")
            words[i : i + 2] = [f"--mesh={words[i + 1]}"]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('python -m ')}: {message}; --help says more")


def file_path(given: str) -> Path:
    """Return the path that an option names."""
    if not given:  # Path("") is the working directory
        raise argparse.ArgumentTypeError("is empty; name a file or folder")
    try:
        return Path(expand_user(given))
    except UsageError as error:  # of which argparse would drop the text
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(least: int = 1, bits: int = 63) -> Callable[[str], int]:
    """Return the type of an option that is a whole number within bounds."""

    def convert(given: str) -> int:
        if given.isdecimal() and least <= int(given) < 2**bits:
            return int(given)
        text = f"{given}: must be a whole number, at least {least} and less than 2^{bits}"
        raise argparse.ArgumentTypeError(text)

    return convert
