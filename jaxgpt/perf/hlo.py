"""Collectives of a compiled program: kinds, mesh axes, counts and bytes.

XLA numbers the devices of a program by their row-major positions in the mesh, so a list of
device groups tells the mesh axes over which an operation communicates.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxgpt.perf.hlo_text import Instruction, Program, parse_hlo

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """All operations of one kind, over the same mesh axes and of the same dtype, in one step."""

    kind: str
    """One of KINDS."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices of a group differ."""
    dtype: str
    """XLA's name of the element type, such as f32 or bf16."""
    count: int
    """Arrays communicated; one operation may combine several."""
    bytes: int
    """Payload of one device, all arrays together: an array's size for all-reduce, all-to-all and
    collective-permute, and the larger of its two sizes for all-gather and reduce-scatter."""


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the collectives that each device takes part in when it runs a program once.

    An operation in a loop counts as often as the loop runs it, an asynchronous one once. Of a
    conditional, the branch that communicates most counts. A group over a part of an axis, which
    XLA makes in some changes of layout, is reported as over that axis.

    Args:
        hlo: `compiled.as_text()`.
        mesh: axis name -> size, in the order of the mesh.

    Raises:
        ValueError: if the program is for another number of devices than the mesh has, or does
            not tell how often a loop with collectives runs.
    """
    program = parse_hlo(hlo)
    if program.n_devices not in (None, math.prod(mesh.values())):
        raise ValueError(f"mesh={dict(mesh)}: the program is for {program.n_devices} devices")
    order = {name: i for i, name in enumerate(mesh)}
    totals = _Counter(program, dict(mesh)).totals(program.entry)
    return tuple(
        sorted(
            (Collective(*key, *sums) for key, sums in totals.items()),
            key=lambda c: (len(c.axes), [order[a] for a in c.axes], KINDS.index(c.kind), c.dtype),
        )
    )


def ring_bytes(kind: str, bytes: float, n: int) -> float:
    """Return the bytes that each of n devices sends for a collective done around a ring.

    Args:
        bytes: payload as in `Collective`.

    Thakur, Rabenseifner and Gropp 2005, section 4; the same factors turn time into the "bus
    bandwidth" of NVIDIA's nccl-tests (doc/PERFORMANCE.md).
    """
    if kind == "collective-permute":
        return bytes
    return bytes * (n - 1) / n * (2 if kind == "all-reduce" else 1)


_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,<=]*)\]")
_CALLERS = ("while", "call", "fusion", "conditional", "async")
_GROUPS = re.compile(
    r"\b(?:replica_groups|source_target_pairs)="
    r"(\{\}|\{\{[\d,{}]*\}\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

Totals = dict[tuple[str, tuple[str, ...], str], tuple[int, int]]  # kind, axes, dtype: count, bytes


class _Counter:
    """Adds up the collectives of a program's computations, each of them once."""

    def __init__(self, program: Program, mesh: dict[str, int]):
        self._program = program
        self._axes = functools.cache(functools.partial(_axes_and_group_size, mesh))
        self.totals = functools.cache(self._totals)

    def _totals(self, computation: str) -> Totals:
        out: Totals = {}
        for instruction in self._program.computations[computation]:
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                _add(out, self._collective(kind, instruction))
            elif kind in _CALLERS:
                _add(out, self._called(kind, instruction))
        return out

    def _collective(self, kind: str, instruction: Instruction) -> Totals:
        axes, n = self._axes(_GROUPS.search(instruction.arguments)[1])
        if not axes:
            return {}
        out: Totals = {}
        for dtype, size in _payload(instruction.opcode, instruction.shape):
            size *= n if kind == "reduce-scatter" else 1
            _add(out, {(kind, axes, dtype): (1, size)})
        if kind == "all-to-all" and " dimensions=" not in instruction.arguments:
            return {key: (count // n, size) for key, (count, size) in out.items()}  # in n pieces
        return out

    def _called(self, kind: str, instruction: Instruction) -> Totals:
        """Return the totals of what an instruction calls, as often as it does."""
        if kind == "while":
            return self._loop(instruction)
        parts = [self.totals(name) for name in instruction.called]
        if kind == "conditional":
            return max(parts, key=lambda part: sum(size for _, size in part.values()))
        out: Totals = {}
        for part in parts:
            _add(out, part)
        return out

    def _loop(self, instruction: Instruction) -> Totals:
        names = [instruction.attribute(name) for name in ("body", "condition")]
        body, condition = map(self.totals, names)
        if not body and not condition:
            return {}
        known = _TRIPS.search(instruction.arguments)
        if not known:
            raise ValueError(
                f"loop over {names[0]}: cannot tell how often it runs (XLA gives no "
                "known_trip_count); use lax.scan or fori_loop with constant bounds"
            )
        out = _times(body, int(known[1]))
        _add(out, _times(condition, int(known[1]) + 1))
        return out


def _add(totals: Totals, more: Totals) -> None:
    for key, (count, size) in more.items():
        old_count, old_size = totals.get(key, (0, 0))
        totals[key] = (old_count + count, old_size + size)


def _times(totals: Totals, n: int) -> Totals:
    return {key: (count * n, size * n) for key, (count, size) in totals.items()}


def _payload(opcode: str, shape: str) -> list[tuple[str, int]]:
    """Return (dtype, bytes) of each array that a collective returns.

    Args:
        shape: its type. An asynchronous start has (operands, results, ...), except that
            all-reduce-start may have the results alone.
    """
    if opcode.endswith("-start"):
        parts = _tuple_elements(shape)
        if parts[0].startswith("(") or opcode != "all-reduce-start":
            shape = parts[1]
    out = []
    for dtype, bits, dims in _ARRAY.findall(shape):
        size = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
        out.append((dtype, -(-size * int(bits or 8) // 8)))  # a pred takes a byte
    return out


def _tuple_elements(shape: str) -> list[str]:
    """Return the types of a tuple's elements; the type itself if it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    depth, parts = 0, [""]
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [re.sub(r"/\*.*?\*/", "", part).strip() for part in parts]


def _axes_and_group_size(mesh: dict[str, int], groups: str) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which devices of a group differ, and the devices in a group."""
    ids = _device_groups(groups, math.prod(mesh.values()))
    coordinates = np.stack(np.unravel_index(ids, tuple(mesh.values())))  # axis, group, member
    differs = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return tuple(itertools.compress(mesh, differs)), ids.shape[1]


def _device_groups(text: str, n_devices: int) -> np.ndarray:
    """Return the device ids of each group (a row), which XLA writes in one of four forms.

    {} is all devices together; {{0,1},{2,3}} lists them; [2,4]<=[4,2]T(1,0) is a range that is
    reshaped, transposed and reshaped; mesh['x'=2,'y'=4] {'y'} is along axes of a mesh of XLA's.
    """
    if text == "{}":
        return np.arange(n_devices)[None]
    if text.startswith("{{"):
        return np.array([group.split(",") for group in text[2:-2].split("},{")], dtype=int)
    if text.startswith("["):
        shape, source = text.split("<=")
        return _range(source).reshape(_numbers(shape))
    return _groups_along_axes(text)


def _groups_along_axes(text: str) -> np.ndarray:
    """Return the groups of the form mesh['x'=2,'y'=4] {'y'}.

    What stands in braces may be a part of an axis: 'y':(1)2 is the outer factor 2 of 'y'=4, and
    'y':(2)2 the inner one. `device_ids=(...)` after the mesh is the order of its devices, a list
    or a transposed range.
    """
    axes, order, along = re.fullmatch(
        r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text
    ).groups()
    parts = re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", along)
    shape, grouped = [], []
    for axis in axes.split(","):
        name, size = axis.rsplit("=", 1)
        spans = [
            (int(before or 1), int(before or 1) * int(part or size))
            for part_of, before, part in parts
            if part_of == name
        ]
        cuts = sorted({1, int(size), *itertools.chain(*spans)})
        for low, high in itertools.pairwise(cuts):
            if any(first <= low < last for first, last in spans):
                grouped.append(len(shape))
            shape.append(high // low)
    if order is None:
        devices = np.arange(math.prod(shape))
    else:
        devices = _range(order) if "T(" in order else np.array(_numbers(order))
    devices = np.moveaxis(devices.reshape(shape), grouped, range(-len(grouped), 0))
    return devices.reshape(-1, math.prod(shape[i] for i in grouped))


def _range(text: str) -> np.ndarray:
    """Return 0, 1, ... in the order of [4,2]T(1,0): reshaped to 4 x 2, then transposed."""
    shape, _, transposition = text.partition("T")
    dims = _numbers(shape)
    return np.arange(math.prod(dims)).reshape(dims).transpose(_numbers(transposition) or None)


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]
