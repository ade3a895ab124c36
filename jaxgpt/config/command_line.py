"""`CommandLine`, the result of translating a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Default(NamedTuple):
    """Preset for command lines without --config."""

    config: str
    note: str = ""
    words: Mapping[str, list[str]] = {}  # settings to add to the preset


@dataclass
class OtherFlags:
    """Flags of other programs whose meaning depends on other settings; see `aliases.SETTINGS`."""

    later: dict[str, list[str]] = field(default_factory=dict)  # NAME in later.NAME -> values
    axes: dict[str, dict[str, str]] = field(default_factory=dict)  # mesh axis -> flag -> argument
    rest: str | None = None  # mesh axis that gets the remaining devices, if a flag sets it


@dataclass
class CommandLine:
    """Settings from a command line, and messages about its other arguments."""

    words: dict[str, list[str]] = field(default_factory=dict)  # strings for each `section.key`
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # arguments left out of the corrected command
    corrected: list[str] = field(default_factory=list)  # arguments with a misspelled key
    shown: dict[str, str] = field(default_factory=dict)  # key -> argument that set it
    other: OtherFlags = field(default_factory=OtherFlags)
    default: Default = Default("tiny")

    def put(self, key: str, words: Sequence[str], argument: str) -> None:
        """Set a key. If another flag has set a different value, leave the argument out."""
        other = self.shown.get(key, "")
        if other and flag_name(other) != flag_name(argument) and not _same(self.words[key], words):
            why = f"{other} also sets {key}, to another value; keep one of them"
            self.leave_out(argument, f"{argument}: {why}")
        else:
            self.words[key], self.shown[key] = list(words), argument

    def leave_out(self, argument: str, problem: str) -> None:
        """Record a problem, and leave `argument` out of the corrected command."""
        self.problems.append(problem)
        self.left_out.append(argument)


def flag_name(argument: str) -> str:
    """Return the flag in an argument, with underscores and without leading dashes."""
    return re.split(r"[= ]", argument)[0].lstrip("-+").replace("-", "_")


def _same(one: list[str], other: list[str]) -> bool:
    try:
        return one == other or [float(word) for word in one] == [float(word) for word in other]
    except ValueError:
        return False
