"""Collectives of a compiled program, with their kinds, mesh axes, counts and bytes.

XLA numbers devices by their row-major position in the mesh, so the device numbers in a group reveal
its mesh axes.
"""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgpt.perf.hlo import COLLECTIVES, HloProgram, Instruction, parse_hlo

_CALLERS = ("call", "fusion", "async-start")
_GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=(.+?)(?=, (?!device_ids)[a-z]|$)")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same mesh axes in one step."""

    kind: str
    axes: tuple[str, ...]  # mesh axes that the devices of a group span
    count: int  # number of arrays; one operation may communicate several arrays
    bytes: int  # per device, summed over arrays: the input or the output, whichever is larger


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the collectives in one execution of a program.

    The collectives are sorted by number of mesh axes, then by axes, then by kind. `hlo` is
    `compiled.as_text()`, and `mesh` maps axis names to sizes, outermost axis first. Only the kinds
    in `COLLECTIVES` are counted. Operations in a loop body are counted once per iteration, and
    those in a loop condition are not counted. Operations within a single device are left out. In a
    conditional, only the branch with the most communication is counted. For a layout change, XLA
    may use groups that span part of an axis. These groups are reported as if they spanned the whole
    axis.

    Raises `ValueError` if the program and the mesh have different numbers of devices, or if the
    number of iterations of a loop with collectives in its body is unknown.
    """
    program = parse_hlo(hlo)
    if program.n_devices != math.prod(mesh.values()):
        raise ValueError(f"mesh={dict(mesh)}: the program is for {program.n_devices} devices")
    counts: Counter[Any] = Counter()
    total_bytes: Counter[Any] = Counter()
    for (kind, axes, size), n in _count_arrays(program, mesh).items():
        counts[kind, axes] += n
        total_bytes[kind, axes] += n * size

    order = list(mesh)

    def sort_key(c: Collective) -> tuple[Any, ...]:
        return len(c.axes), [order.index(axis) for axis in c.axes], COLLECTIVES.index(c.kind)

    return tuple(sorted((Collective(*k, counts[k], total_bytes[k]) for k in counts), key=sort_key))


def ring_bytes(kind: str, bytes: float, n: int) -> float:
    """Return the bytes that each device sends in a collective over `n` devices.

    `kind` and `bytes` are fields of a `Collective`. The factors for ring all-reduce, all-gather
    and reduce-scatter are from Thakur, Rabenseifner and Gropp 2005, section 4. All factors match
    the "bus bandwidth" of nccl-tests.
    """
    if kind == "collective-permute":
        return bytes
    return bytes * (n - 1) / n * (2 if kind == "all-reduce" else 1)


def _count_arrays(program: HloProgram, mesh: Mapping[str, int]) -> Counter[Any]:
    """Count the arrays in a program's collectives, grouped by (kind, axes, bytes)."""
    axes_and_group_size = functools.cache(functools.partial(_axes_and_group_size, mesh))

    @functools.cache
    def count(computation: str) -> Counter[Any]:
        return sum(map(count_in, program.computations[computation]), Counter())

    def count_in(instruction: Instruction) -> Counter[Any]:
        opcode, kind = instruction.opcode, instruction.kind
        if opcode == "while":
            body, trips = instruction.attribute("body"), instruction.trip_count
            if count(body) and trips is None:
                raise ValueError(
                    f"loop over {body}: the number of iterations is unknown (XLA gives no "
                    "known_trip_count); use lax.scan or fori_loop with constant bounds"
                )
            return Counter({array: n * trips for array, n in count(body).items()})
        if opcode == "conditional":
            branches = map(count, instruction.called)
            return max(branches, key=lambda found: sum(n * size for (*_, size), n in found.items()))
        if opcode in _CALLERS:
            return sum(map(count, instruction.called), Counter())
        if kind not in COLLECTIVES or opcode.endswith("-start"):  # counted at its -done instruction
            return Counter()
        done = opcode.endswith("-done")
        start = program.instructions[instruction.operands[0]] if done else instruction
        axes, n = axes_and_group_size(_GROUPS.search(start.arguments)[1])
        sizes = instruction.array_bytes
        if kind == "all-to-all" and " dimensions=" not in start.arguments:
            sizes = [n * size for size in sizes[::n]]  # each array is returned as n parts
        elif kind == "reduce-scatter":
            sizes = [n * size for size in sizes]
        return Counter((kind, axes, size) for size in sizes if axes)

    return count(program.entry)


def _axes_and_group_size(mesh: Mapping[str, int], groups: str) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that the devices of a group span, and the group size."""
    ids = _device_groups(groups, math.prod(mesh.values()))
    coordinates = np.stack(np.unravel_index(ids, tuple(mesh.values())))  # axis, group, member
    differs = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return tuple(itertools.compress(mesh, differs)), ids.shape[1]


def _device_groups(text: str, n_devices: int) -> np.ndarray:
    """Return the device IDs of each group, as an array of shape (groups, group size).

    XLA writes groups in one of four forms:
    - {} is one group of all devices.
    - {{0,1},{2,3}} lists the groups.
    - [2,4]<=[4,2]T(1,0) is a range that is reshaped to 4 x 2, transposed and reshaped to 2 x 4.
    - mesh['x'=2,'y'=4] {'y'} lists the axes that each group spans in a mesh defined by XLA.
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
    """Parse groups in the form mesh['x'=2,'y'=4] {'y'}; see `_device_groups`.

    The braces may contain part of an axis: 'y':(1)2 is the outer factor 2 of 'y'=4, and 'y':(2)2 is
    the inner factor. `device_ids=(...)` gives the order of the mesh's devices, as a list or as a
    transposed range.
    """
    axes, order, along = re.fullmatch(
        r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text
    ).groups()
    mesh = {axis: int(size) for axis, size in re.findall(r"'(.*?)'=(\d+)", axes)}
    shape, n = tuple(mesh.values()), 1
    coordinates = dict(zip(mesh, np.unravel_index(np.arange(math.prod(shape)), shape), strict=True))
    group = dict(coordinates)  # becomes the coordinates of the first device in each group
    for axis, outer, part in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", along):
        size = int(part or mesh[axis])
        stride, n = mesh[axis] // (int(outer or 1) * size), n * size
        group[axis] = group[axis] - coordinates[axis] // stride % size * stride
    members = np.ravel_multi_index(tuple(group.values()), shape).argsort(kind="stable")
    if order:
        members = (_range(order).ravel() if "T(" in order else np.array(_numbers(order)))[members]
    return members.reshape(-1, n)


def _range(text: str) -> np.ndarray:
    """Parse a transposed range: [4,2]T(1,0) means 0 to 7, reshaped to 4 x 2 and transposed."""
    shape, _, transposition = text.partition("T")
    dims = _numbers(shape)
    return np.arange(math.prod(dims)).reshape(dims).transpose(_numbers(transposition) or None)


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]
