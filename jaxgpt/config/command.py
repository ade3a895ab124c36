"""Argument parser and option types for all commands except jaxgpt.train."""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxgpt.config.errors import UsageError, expand_user
from jaxgpt.config.translate import translate


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` for mistakes and rejects abbreviated `--` options.

    Options may be written with underscores instead of dashes, as in nanoGPT. The message for an
    unknown option suggests a similar option, or shows the usage if no option is similar.
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
        is_plain = words and words[0][:1] not in ("", "-") and "=" not in words[0]
        if is_plain and not self._get_positional_actions():
            for option in "--run", "--input":
                is_given = any(word.startswith(option) for word in words)
                if option in self._option_string_actions and not is_given:
                    self._refuse(f"{words[0]}: use {option} {words[0]}")
        positionals = [action.metavar for action in self._get_positional_actions()]
        if "RUN" in positionals and "--run" in (word.partition("=")[0] for word in words):
            plain = [word.removeprefix("--run=") for word in words if word != "--run"]
            self._refuse(f"--run: not an option; use {self.prog} {shlex.join(plain)}")
        given, unknown = super().parse_known_args(words, namespace)
        for word in unknown:  # the caller may accept settings of jaxgpt.train
            name = word.partition("=")[0]
            if self._nearest(name) and translate([f"{name}=1"], {}).problems:
                self._refuse_unknown([word], given)
        return given, unknown

    def parse_args(self, args=None, namespace=None):
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown, given)
        return given

    def _refuse_unknown(self, unknown: list[str], given: argparse.Namespace) -> NoReturn:
        """Raise `UsageError` for arguments that this parser and its subcommand do not accept."""
        for action in self._get_positional_actions():
            if isinstance(action.choices, dict):  # commands and their parsers
                action.choices[getattr(given, action.dest)]._refuse_unknown(unknown, given)
        text = f"unknown argument {unknown[0]}"
        if near := self._nearest(unknown[0].partition("=")[0]):
            self._refuse(f"{text}; did you mean {near}?")
        self.error(text)

    def _nearest(self, name: str) -> str | None:
        """Return the option that is most similar to an unknown one, or None if none is similar."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        name = name.replace("_", "-")

        def likeness(option: str) -> tuple[float, int]:
            if len(name) > 3 and option.startswith(name):  # an abbreviation
                return 1.0, 0
            ratio = difflib.SequenceMatcher(None, name, option).ratio()
            return ratio, len(os.path.commonprefix([name, option]))

        best = max(options, key=likeness)
        return best if likeness(best)[0] > 0.7 else None

    def error(self, message: str) -> NoReturn:
        usage = f"; {' '.join(self.format_usage().split())}"
        if message.startswith("argument "):  # the message already names the option and its values
            usage = ""
        self._refuse(f"{message}; see --help{usage}")

    def _refuse(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('python -m ')}: {message}")


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
    """Return an argparse type for integers of at most 20 digits, from `least` to 2^bits - 1.

    `least` must not be negative. The type raises `ArgumentTypeError` for anything else.
    """

    def convert(given: str) -> int:
        # By default, Python refuses to convert numbers with thousands of digits.
        if given.isdecimal() and len(given) <= 20 and least <= int(given) < 2**bits:
            return int(given)
        text = f"{given}: must be a whole number, at least {least} and less than 2^{bits}"
        raise argparse.ArgumentTypeError(text)

    return convert
