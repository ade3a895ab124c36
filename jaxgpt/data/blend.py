"""The sources of a blend as a configuration names them: `WEIGHT PATH [CORPUS]` a line."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from jaxgpt.config import UsageError, expand_user
from jaxgpt.data.interleave import MIN_SHARE
from jaxgpt.data.megatron import prefix_of


@dataclass(frozen=True)
class BlendEntry:
    """A source as a configuration names it."""

    weight: Fraction
    weight_text: str
    """As it was given."""
    path: Path
    corpus: str
    """Without a name the last part of the path, or all of it where others end alike."""
    key: str
    """The setting that names it, for errors."""
    is_named: bool = False
    """Whether the corpus was."""

    @property
    def directory(self) -> Path:
        """The folder that it is, or is in."""
        return self.path if self.path.is_dir() else self.path.parent


def read_file_list(path: Path) -> list[str]:
    """Return the lines of data.file_list that name a source.

    Raises:
        UsageError: if it cannot be read, or there are none.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"data.file_list={path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"data.file_list={path}: is not text ({error})") from None
    lines = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise UsageError(f"data.file_list={path}: is empty; give a line `WEIGHT PATH` per source")
    return lines


def parse_lines(lines: Sequence[str], key: str) -> list[BlendEntry]:
    """Return the sources that the lines of a blend name.

    Args:
        key: the setting that they are of, for errors.

    Raises:
        UsageError: for a line that is not one, or a weight that is too small.
    """
    found = [_entry(line, key) for line in lines]
    paths: dict[str, set[Path]] = {}
    for entry in found:
        paths.setdefault(entry.corpus, set()).add(entry.path)
    found = [
        replace(entry, corpus=str(entry.path))
        if not entry.is_named and len(paths[entry.corpus]) > 1
        else entry
        for entry in found
    ]
    corpora: dict[str, Fraction] = {}
    for entry in found:
        corpora[entry.corpus] = corpora.get(entry.corpus, Fraction(0)) + entry.weight
    whole = sum(corpora.values())
    for entry in found:
        corpus = corpora[entry.corpus]
        if min(corpus / whole, entry.weight / corpus) < MIN_SHARE:
            raise UsageError(
                f"{key}: {entry.path} has the weight {entry.weight_text}, less than a millionth "
                f"of corpus {entry.corpus} or that of the blend; leave it out or give it more"
            )
    return found


def _entry(line: str, key: str) -> BlendEntry:
    try:
        text, path, *rest = shlex.split(line)
        weight = Fraction(text)
        if weight <= 0 or len(rest) > 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"{key}: the line {line!r} must be a weight above 0, a path (in quotes if it has "
            "spaces) and, if you like, the name of the corpus, such as "
            "`0.25 /data/wiki_text_document wiki`"
        ) from None
    corpus = rest[0] if rest else prefix_of(path).name
    return BlendEntry(weight, text, Path(expand_user(path, f"{key}: ")), corpus, key, bool(rest))


def blend_shares(entries: Sequence[BlendEntry]) -> tuple[tuple[Fraction, str], ...]:
    """Return what decides the order of a blend's data beside its sources: shares and corpora."""
    whole = sum(entry.weight for entry in entries)
    return tuple((entry.weight / whole, entry.corpus) for entry in entries)
