"""The error of everything that a user can put right."""

import os


class UsageError(ValueError):
    """Something a user gave is wrong: key, value and remedy, printed as one line; status 2."""


def expand_user(path: str, key: str = "") -> str:
    """Return a path with its ~ replaced, which shells leave in `key=~/...`, and YAML always."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise UsageError(f"{key}{path}: no home directory is known; give a whole path")
    return found
