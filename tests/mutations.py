"""Hypothesis strategies that damage files: bytes, lines and JSON values."""

import json
import math

from hypothesis import strategies as st

NESTED = json.loads("[" * 200 + "]" * 200)
ABSURD = (
    None, True, False, -1, 0, 1.5, 2**31, 10**30, 10**400, -(10**30), 1e308, math.nan, math.inf,
    "", "x", "1", "\ud800", "a\nb", [], [1], [None], {}, {"a": 1}, [[]], NESTED,
)  # fmt: skip
GONE = object()


def damaged(content, is_json=False):
    """Return a strategy that draws damaged versions of a file's content."""
    kinds = [_flipped, _cut, _overwritten, _repeated]
    if is_json:
        kinds += [_changed_json] * len(kinds)  # half of all
    return st.one_of([kind(content) for kind in kinds])


def changed_value(value):
    """Return a strategy that makes one part of a JSON value absurd, or removes it."""
    paths = list(_paths(value))

    def change(drawn):
        path, new = drawn
        return _with(value, path, new)

    absurd = st.sampled_from([*ABSURD, GONE])
    return st.tuples(st.sampled_from(paths), absurd).map(change)


@st.composite
def _flipped(draw, content):
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        out[draw(st.integers(0, len(out) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(out)


def _cut(content):
    return st.integers(0, len(content) - 1).map(lambda end: content[:end])


@st.composite
def _overwritten(draw, content):
    at = draw(st.integers(0, len(content)))
    new = draw(st.one_of(st.binary(max_size=16), st.integers(1, 64).map(bytes)))
    return content[:at] + new + content[at + draw(st.integers(0, len(new))) :]


@st.composite
def _repeated(draw, content):
    """Repeat or leave out some lines."""
    lines = content.splitlines(keepends=True)
    first = draw(st.integers(0, len(lines)))
    last = draw(st.integers(0, len(lines)))
    return b"".join(lines[:first] + lines[last:])


@st.composite
def _changed_json(draw, content):
    """Change a value of a JSON file, or of one of its lines."""
    try:
        return json.dumps(draw(changed_value(json.loads(content)))).encode()
    except ValueError:
        lines = content.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = json.dumps(draw(changed_value(json.loads(lines[at])))).encode()
    return b"\n".join(lines) + b"\n"


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = list(enumerate(value))[:20] if isinstance(value, list) else items
    for key, part in items:
        yield from _paths(part, (*path, key))


def _with(value, path, new):
    if not path:
        return None if new is GONE else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if new is GONE and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _with(value[path[0]], path[1:], new)
    return copy
