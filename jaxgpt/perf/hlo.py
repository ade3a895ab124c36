"""What a compiled program communicates, read out of its optimized HLO text.

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
    """The collectives that each device takes part in when it runs a program once.

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
    n_devices = math.prod(mesh.values())
    partitions = re.search(r"^HloModule .*num_partitions=(\d+)", hlo)
    if partitions and int(partitions[1]) != n_devices:
        raise ValueError(f"mesh={dict(mesh)}: the program is for {partitions[1]} devices")
    program = _Program(hlo, dict(mesh))
    order = {name: i for i, name in enumerate(mesh)}
    found = (Collective(*key, *sums) for key, sums in program.totals(program.entry).items())
    return tuple(
        sorted(
            found,
            key=lambda c: (len(c.axes), [order[a] for a in c.axes], KINDS.index(c.kind), c.dtype),
        )
    )


def ring_bytes(kind: str, bytes: float, n: int) -> float:
    """Bytes that each of n devices sends for a collective done around a ring.

    Args:
        bytes: payload as in `Collective`.

    Thakur, Rabenseifner and Gropp 2005, section 4; the same factors turn time into the "bus
    bandwidth" of NVIDIA's nccl-tests (doc/PERFORMANCE.md).
    """
    if kind == "collective-permute":
        return bytes
    return bytes * (n - 1) / n * (2 if kind == "all-reduce" else 1)


_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,<=]*)\]")
_CALLERS = ("while", "call", "fusion", "conditional", "async")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
    r"|\bbranch_computations=\{([^}]*)\}"
)
_GROUPS = re.compile(
    r"\b(?:replica_groups|source_target_pairs)="
    r"(\{\}|\{\{[\d,{}]*\}\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CARRY = "carry"  # stands for the tuple that a loop hands from turn to turn

Totals = dict[tuple[str, tuple[str, ...], str], tuple[int, int]]  # kind, axes, dtype: count, bytes


class _Program:
    """The computations of an HLO text, each a list of lines, and what they add up to."""

    def __init__(self, hlo: str, mesh: dict[str, int]):
        self.entry = ""
        self._computations: dict[str, list[str]] = {}
        self._axes = functools.cache(functools.partial(_axes_and_group_size, mesh))
        self.totals = functools.cache(self._totals)
        self._instructions = functools.cache(self._parse_instructions)
        lines: list[str] = []
        for line in hlo.split("\n"):
            if line.startswith("  "):
                lines.append(line)
            elif line.endswith("{"):
                is_entry = line.startswith("ENTRY ")
                name = line.removeprefix("ENTRY ").removeprefix("%").split(" ", 1)[0]
                lines = self._computations[name] = []
                self.entry = name if is_entry else self.entry

    def _totals(self, computation: str) -> Totals:
        out: Totals = {}
        for line in self._computations[computation]:
            opcode = _OPCODE.search(line)[1]
            base = opcode.removesuffix("-start")
            if base in KINDS:
                _add(out, self._collective(base, opcode, line))
            elif base in _CALLERS:
                _add(out, self._called(base, computation, line))
        return out

    def _collective(self, kind: str, opcode: str, line: str) -> Totals:
        axes, n = self._axes(_GROUPS.search(line)[1])
        if not axes:
            return {}
        out: Totals = {}
        shape = line[line.index(" = ") + 3 : line.index(f" {opcode}(")]
        for dtype, size in _payload(opcode, shape):
            size *= n if kind == "reduce-scatter" else 1
            _add(out, {(kind, axes, dtype): (1, size)})
        if kind == "all-to-all" and " dimensions=" not in line:  # one array, in n pieces
            return {key: (count // n, size) for key, (count, size) in out.items()}
        return out

    def _called(self, opcode: str, computation: str, line: str) -> Totals:
        """Totals of what an instruction calls, as often as it does."""
        if opcode == "while":
            body, condition = (self.totals(_attribute(line, a)) for a in ("body", "condition"))
            if not body and not condition:
                return {}
            n = self._trip_count(computation, line)
            out = _times(body, n)
            _add(out, _times(condition, n + 1))
            return out
        names = []
        for name, several in _CALLED.findall(line):
            names += [name] if name else re.findall(r"[\w.-]+", several)
        parts = [self.totals(name) for name in names]
        if opcode == "conditional":
            return max(parts, key=lambda part: sum(size for _, size in part.values()))
        out: Totals = {}
        for part in parts:
            _add(out, part)
        return out

    def _trip_count(self, computation: str, line: str) -> int:
        """How often a loop's body runs: told by XLA, or by a condition `counter < constant`."""
        known = _TRIPS.search(line)
        if known:
            return int(known[1])
        condition, body = _attribute(line, "condition"), _attribute(line, "body")
        match self._value(condition, "ROOT", [_CARRY]):
            case ("LT", (_, index), int(limit)) | ("GT", int(limit), (_, index)):
                start = self._element(computation, _operands(line)[0], index, [])
                match self._element(body, "ROOT", index, [_CARRY]):
                    case ("add", (_, i), int(step)) | ("add", int(step), (_, i)):
                        if i == index and isinstance(start, int) and step > 0:
                            return max(0, -((start - limit) // step))
        raise ValueError(
            f"loop over {body}: cannot tell how often it runs; XLA gives no known_trip_count and "
            f"{condition} does not compare a counter with a constant. Use lax.scan or fori_loop "
            "with constant bounds"
        )

    def _value(self, computation: str, name: str, arguments: list[object]) -> object:
        """What a scalar instruction is: an int, (_CARRY, index), (operation, left, right), None.

        Args:
            arguments: values of the computation's parameters; _CARRY for a loop's.
        """
        line = self._instructions(computation)[name]
        opcode, operands = _OPCODE.search(line)[1], _operands(line)
        value = functools.partial(self._value, computation, arguments=arguments)
        if opcode == "constant":
            number = re.search(r" constant\((-?\d+)\)", line)
            return int(number[1]) if number else None
        if opcode == "parameter":
            number = int(re.search(r" parameter\((\d+)\)", line)[1])
            return arguments[number] if number < len(arguments) else None
        if opcode in ("copy", "bitcast", "convert"):
            return value(operands[0])
        if opcode == "get-tuple-element":
            index = int(re.search(r"\bindex=(\d+)", line)[1])
            return self._element(computation, operands[0], index, arguments)
        if opcode in ("fusion", "call"):
            called = _CALLED.search(line)[1]
            return self._value(called, "ROOT", [value(operand) for operand in operands])
        if opcode in ("add", "compare"):
            direction = re.search(r"\bdirection=(\w+)", line)
            return (direction[1] if direction else opcode, *map(value, operands))
        return None

    def _element(self, computation: str, name: str, index: int, arguments: list[object]) -> object:
        """The value of one element of a tuple."""
        line = self._instructions(computation)[name]
        opcode, operands = _OPCODE.search(line)[1], _operands(line)
        if opcode == "tuple":
            return self._value(computation, operands[index], arguments)
        if opcode == "parameter" and arguments == [_CARRY]:
            return (_CARRY, index)
        return None

    def _parse_instructions(self, computation: str) -> dict[str, str]:
        """Name -> line; the result also as ROOT."""
        out = {}
        for line in self._computations[computation]:
            name = line[: line.index(" = ")].strip()
            out[name.removeprefix("ROOT ").removeprefix("%")] = line
            if name.startswith("ROOT "):
                out["ROOT"] = line
        return out


def _attribute(line: str, name: str) -> str:
    return re.search(rf"\b{name}=%?([\w.-]+)", line)[1]


def _operands(line: str) -> list[str]:
    start = _OPCODE.search(line).end()
    return re.findall(r"%([\w.-]+)", line[start : line.index(")", start)])


def _add(totals: Totals, more: Totals) -> None:
    for key, (count, size) in more.items():
        old_count, old_size = totals.get(key, (0, 0))
        totals[key] = (old_count + count, old_size + size)


def _times(totals: Totals, n: int) -> Totals:
    return {key: (count * n, size * n) for key, (count, size) in totals.items()}


def _payload(opcode: str, shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array that a collective returns.

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
    """Types of a tuple's elements; the type itself if it is no tuple."""
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
    """Mesh axes along which any two devices of a group differ, and the devices in a group."""
    ids = _device_groups(groups, math.prod(mesh.values()))
    coordinates = np.stack(np.unravel_index(ids, tuple(mesh.values())))  # axis, group, member
    differs = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return tuple(itertools.compress(mesh, differs)), ids.shape[1]


def _device_groups(text: str, n_devices: int) -> np.ndarray:
    """The device ids of each group (one row) that XLA writes in one of four forms.

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
    """Groups of the form mesh['x'=2,'y'=4] {'y'}.

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
    """0, 1, ... in the order of [4,2]T(1,0): reshaped to 4 x 2, then transposed."""
    shape, _, transposition = text.partition("T")
    dims = _numbers(shape)
    return np.arange(math.prod(dims)).reshape(dims).transpose(_numbers(transposition) or None)


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]
