"""What the commands besides jaxgpt.train share in reading their own options."""

import argparse
from typing import NoReturn

from jaxgpt.config.checks import UsageError


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`s, and which takes no abbreviations."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('python -m ')}: {message}; --help says more")


def whole_number(option: str, given: str | None) -> int | None:
    """An option's number; None if it is not given.

    Raises:
        UsageError: if it is not a whole number of at least 1.
    """
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"{option}={given}: must be a whole number, at least 1")
    return int(given)
