"""The error of everything that a user can put right."""

import os


class UsageError(ValueError):
    """Something a user gave is wrong. The message names the key, the value and the remedy.

    Commands print it as one line and exit with status 2.
    """


def expand_user(path: str, key: str = "") -> str:
    """Return a path with its ~ replaced, which shells leave in `key=~/...`, and YAML always.

    Raises:
        UsageError: beginning with `key`, if that home directory is not known.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise UsageError(f"{key}{path}: no home directory is known; give a whole path")
    return found
