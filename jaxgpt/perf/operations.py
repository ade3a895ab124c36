"""What the instructions of a compiled program are for: products, attention, copies and so on.

Names, fusions and the lines of Python that they come from are read out of the optimized HLO text.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

CATEGORIES = ("matmul", "attention", "elementwise", "collective", "copy", "other")
PACKAGE = Path(__file__).parents[1]
ATTENTION_FILE = "jaxgpt/models/attention.py"

_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast", "send", "recv",
)  # fmt: skip
_PRODUCTS = ("dot", "convolution", "ragged-dot", "scaled-dot")
# Of vendors' libraries: cuBLAS, cuDNN, oneDNN, ROCm's.
_PRODUCT_TARGET = re.compile(r"gemm|matmul|conv|\$lt\$", re.IGNORECASE)
_ATTENTION_TARGET = re.compile(r"fmha|attention", re.IGNORECASE)
_MOVES = {
    "copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad",
    "reverse", "gather", "copy-start", "copy-done",
}  # fmt: skip
_FREE = {"parameter", "constant", "iota", "bitcast", "broadcast", "reshape", "tuple",
         "get-tuple-element"}  # fmt: skip
# Their time is that of the instructions in them, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_NAMED = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_STACK = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")


class Operation(NamedTuple):
    """An instruction that a device runs."""

    category: str
    """One of CATEGORIES."""
    source: str
    """File, line and function of this package that it comes from; empty where not known."""


class _Instruction(NamedTuple):
    name: str
    opcode: str
    calls: str
    target: str
    frame: int
    """Where it comes from in Python; 0 if XLA has forgotten."""
    is_batched: bool
    """Whether it is a product of many pairs of matrices."""


@dataclass
class _Tables:
    """Where instructions come from in Python, as the program lists it."""

    files: dict[int, str] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    locations: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """File, function and line."""
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Location and the frame that called it."""

    def stack(self, frame: int) -> list[tuple[str, int, str]]:
        """File, line and function of a frame and of those that called it, the innermost first."""
        # Of the outermost frame, which nothing called, XLA 0.10 lists 1 and not 0.
        shift = self.frames[1][1] if 1 in self.frames else 0
        out = []
        while frame in self.frames:
            location, parent = self.frames[frame]
            file, function, line = self.locations[location]
            out.append((self.files[file], line, self.functions[function]))
            frame = parent - shift
        return out


def module_name(hlo: str) -> str:
    """The name of a program, as traces have it."""
    return re.match(r"HloModule ([\w.-]+)", hlo)[1]


def read_operations(hlo: str) -> dict[str, Operation]:
    """The instructions of a program by name, without loops, whose content is listed.

    Args:
        hlo: `compiled.as_text()`.
    """
    tables, computations = _parse(hlo)
    return {
        instruction.name: Operation(
            _category(instruction, computations, tables), _source(instruction, tables)
        )
        for instructions in computations.values()
        for instruction in instructions
        if instruction.opcode not in _CONTAINERS
    }


def _parse(hlo: str) -> tuple[_Tables, dict[str, list[_Instruction]]]:
    tables = _Tables()
    computations: dict[str, list[_Instruction]] = {}
    instructions: list[_Instruction] = []
    named: dict[int, str] = {}
    for line in hlo.split("\n"):
        if found := _INSTRUCTION.match(line):
            rest = found["rest"]
            calls, target, frame = (p.search(rest) for p in (_CALLS, _TARGET, _FRAME))
            instructions.append(
                _Instruction(
                    found["name"],
                    _OPCODE.search(f" {rest}")[1],
                    calls[1] if calls else "",
                    target[1] if target else "",
                    int(frame[1]) if frame else 0,
                    "lhs_batch_dims=" in rest,
                )
            )
        elif line.endswith("{"):
            name = line.removeprefix("ENTRY ").removeprefix("%").split(" ", 1)[0]
            instructions = computations[name] = []
        elif line in ("FileNames", "FunctionNames"):
            named = tables.files if line == "FileNames" else tables.functions
        elif found := _NAMED.match(line):
            named[int(found[1])] = found[2]
        elif found := _LOCATION.match(line):
            tables.locations[int(found[1])] = int(found[2]), int(found[3]), int(found[4])
        elif found := _STACK.match(line):
            tables.frames[int(found[1])] = int(found[2]), int(found[3])
    return tables, computations


def _category(
    instruction: _Instruction, computations: dict[str, list[_Instruction]], tables: _Tables
) -> str:
    """A fusion with a product in it is a product; one that only moves data is a copy."""
    parts = computations.get(instruction.calls, []) or [instruction]
    parts = [part for part in parts if part.opcode not in _FREE]
    opcodes = {part.opcode.removesuffix("-start").removesuffix("-done") for part in parts}
    if not opcodes.isdisjoint(_COLLECTIVES):
        return "collective"
    for part in parts:
        if part.opcode in _PRODUCTS or _PRODUCT_TARGET.search(part.target):
            return "attention" if _in_attention(part, tables) else "matmul"
    if any(_ATTENTION_TARGET.search(part.target) for part in parts):
        return "attention"
    if opcodes <= _MOVES:
        return "copy"
    if _in_attention(instruction, tables):
        return "attention"
    return "other" if "custom-call" in opcodes else "elementwise"


def _in_attention(instruction: _Instruction, tables: _Tables) -> bool:
    """XLA forgets where batched products come from; in this model only attention has them."""
    if not instruction.frame and instruction.is_batched:
        return True
    return any(file.endswith(ATTENTION_FILE) for file, *_ in tables.stack(instruction.frame))


def _is_own(file: str) -> bool:
    """Whether it is of this package, and not of a library in a folder named like it."""
    _, found, within = file.rpartition("/jaxgpt/")
    return bool(found) and (PACKAGE / within).is_file()


def _source(instruction: _Instruction, tables: _Tables) -> str:
    """What wanted the operation, and not what shares it out over devices."""
    own = [place for place in tables.stack(instruction.frame) if _is_own(place[0])]
    if not own:
        return ""
    wanted = [place for place in own if "/jaxgpt/parallel/" not in place[0]]
    file, line, function = (wanted or own)[0]
    return f"{file.rpartition('/jaxgpt/')[2]}:{line} {function.replace('<locals>.', '')}"
