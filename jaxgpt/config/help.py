"""The text of `--help`, from the docstrings and types of the schema."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from jaxgpt.config.errors import UsageError, nearest
from jaxgpt.config.schema import Config, sections, settings
from jaxgpt.config.values import describe

USAGE = """\
usage: {prog} [--config NAME_OR_FILE] [--mesh D,F,T] [--out DIR]
           [--train-range-to-skip A B ...] [section.key=value ...]

Examples:
  {prog}
      the default: a small GPT on text that needs no download, in less than a minute
  {prog} --config shakespeare_char train.dtype=bfloat16
      a preset, with one setting changed
  mpiexec -n 8 {prog} --config gpt2 --mesh 2,4,1 data.path=DIR
      8 processes: 2 groups (data) of 4 devices that shard the parameters (fsdp)
  {prog} --out runs/a train.max_iters=1000
      a run in a folder of your choice; the same --out continues it
  {prog} train.init_from=hf:FOLDER data.path=DIR optimizer.learning_rate=3e-5
      fine-tuning of a model from Hugging Face

section.key=value and --section.key value mean the same. A YAML file contains lines such as
`section: {{key: value}}`. The defaults are those of the preset tiny; --config NAME selects another.
Presets: {presets}

Groups of settings; --help GROUP shows one group:
{groups}
"""


def is_help(argv: Sequence[str]) -> bool:
    """Return whether a command line contains `-h` or `--help`."""
    return "-h" in argv or "--help" in argv


def requested_help(
    argv: Sequence[str],
    prog: str,
    choices: Mapping[str, Iterable[str]],
    presets: Iterable[str],
) -> str:
    """Return the text that a command line with --help asks for.

    It has all keys, the keys of one group, or one key; see `parse_args`.

    Args:
        argv: The command-line arguments.
        prog: Name of the command.
        choices: Allowed values of keys whose types do not list them.
        presets: Names of the presets.

    Raises:
        UsageError: If the word after `--help` is not a setting or a group of settings.
    """
    _check_group(argv, presets)
    after = [word for flag, word in itertools.pairwise(argv) if is_help([flag])]
    keys = [word for word in after if word in settings()]
    words = [word for word in argv if not word.startswith("-")]
    return _text(prog, choices, presets, *(keys or words)[:1])


def _check_group(argv: Sequence[str], presets: Iterable[str]) -> None:
    """Raise `UsageError` if the word after `--help` is not a setting or a group of settings.

    Options, `key=value` and presets are also accepted, because `--help` may appear anywhere on a
    command line.
    """
    groups = sorted(sections())
    known = {*groups, *presets, *settings()}
    for flag, word in itertools.pairwise(argv):
        if is_help([flag]) and not (word.startswith("-") or "=" in word or word in known):
            near = nearest(word, [*groups, *settings()])
            hint = f"did you mean {near}?" if near else f"use one of {', '.join(groups)}"
            raise UsageError(f"--help {word}: unknown setting or group; {hint}")


def _text(
    prog: str, choices: Mapping[str, Iterable[str]], presets: Iterable[str], group: str = ""
) -> str:
    """Return every key with its type, bounds, default and description.

    If `group` is a section, the text contains only the keys of that section. If it is a key, the
    text contains only that key. Otherwise, the text contains the usage, the names of the presets
    and all keys.
    """
    if group in settings():
        name = group.rpartition(".")[0]
        return "\n".join(
            _entries(sections().get(name, Config), f"{name}.".lstrip("."), choices, group)
        )
    shown = [name for name in sections() if name == group] or list(sections())
    lines = []
    if len(shown) > 1:
        names = textwrap.fill(
            ", ".join(presets), 92, subsequent_indent=" " * 9, break_on_hyphens=False
        )
        groups = "\n".join(
            f"  {name:<11} {inspect.getdoc(kind).split('. ')[0].rstrip('.')}"
            for name, kind in sections().items()
        )
        lines = [USAGE.format(prog=prog, presets=names, groups=groups)]
        lines += _entries(Config, "", choices)
    for name in shown:
        section = sections()[name]
        lines += ["", f"{name}: {section.__doc__}", *_entries(section, f"{name}.", choices)]
    return "\n".join(lines)


def _entries(
    section: type, prefix: str, choices: Mapping[str, Iterable[str]], only: str = ""
) -> list[str]:
    """Return help for the documented fields of a dataclass or, if `only` is set, for that key."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    lines = []
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            name, default = f"{prefix}{node.target.id}", getattr(section, node.target.id)
            if only not in ("", name):
                continue
            default = " ".join(map(str, default)) if isinstance(default, tuple) else default
            kind = Literal[*choices[name]] if name in choices else settings()[name]
            values = describe(kind)
            if default is None:  # shown as the default
                values = values.removesuffix(", or None")
            lines.append(f"  --{name}: {values} (default: {'empty' if default == '' else default})")
            doc = " ".join(ast.literal_eval(below.value).split())
            lines += textwrap.wrap(doc, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return lines
