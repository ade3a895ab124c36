"""The text of --help: every key with its type, default and line of documentation."""

import ast
import dataclasses
import inspect
import textwrap
import typing

from jaxgpt.config.schema import Config
from jaxgpt.config.values import options, symbol

USAGE = """\
usage: {prog} [--config NAME_OR_FILE] [--mesh D,F,T] [--out DIR]
           [--train-range-to-skip A B ...] [section.key=value ...]

section.key=value and --section.key value are the same; a YAML file has `section: {{key: value}}`.
The defaults are those of the preset tiny; --config NAME takes others.
"""


def help_text(prog: str) -> str:
    """Return the text that `--help` prints."""
    top, sections = [], []
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            sections += ["", f"{name}: {inspect.getdoc(kind)}", *_entries(kind, f"{name}.")]
        else:
            top.append(name)
    return "\n".join([USAGE.format(prog=prog), *_entries(Config, "", top), *sections])


def _entries(kind: type, prefix: str, names: list[str] | None = None) -> list[str]:
    """Return the lines about the fields of a dataclass, or about those in `names`."""
    lines, docs = [], field_docs(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if names is None or field.name in names:
            default = " ".join(map(str, field.default)) if field.default == () else field.default
            hint = hints[field.name]
            lines.append(f"  --{prefix}{field.name} {symbol(hint)}  (default: {default})")
            limits = [str(extra) for o in options(hint) for extra in getattr(o, "__metadata__", ())]
            doc = docs[field.name] + "".join(f" [{limit}]" for limit in limits)
            lines += textwrap.wrap(doc, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return lines


def field_docs(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    docs = {}
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs
