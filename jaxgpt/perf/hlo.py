"""Parser for XLA's optimized HLO that finds the category and source line of each operation."""

import functools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

CATEGORIES = ("matmul", "attention", "elementwise", "collective", "copy", "other")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Other operations that XLA may substitute for these collectives.
_SENDS = ("send", "recv", "collective-broadcast", "ragged-all-to-all")

_PACKAGE = Path(__file__).parents[1]
_PRODUCTS = {"dot", "convolution", "ragged-dot", "scaled-dot"}
# Targets of custom calls to vendor libraries: cuBLAS, cuDNN, oneDNN and the ROCm libraries.
_PRODUCT_TARGET = re.compile(r"gemm|matmul|conv|\$lt\$", re.IGNORECASE)
_ATTENTION_FILES = ("kernels/attention.py", "parallel/ring.py")
_ATTENTION_TARGET = re.compile(r"fmha|attention", re.IGNORECASE)
_MOVES = {"copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"}
_MOVES |= {"pad", "reverse", "gather"}
# Opcodes that are fused into other operations or take no time.
FREE = {"parameter", "constant", "iota", "bitcast", "broadcast", "reshape", "tuple"}
FREE |= {"get-tuple-element", "after-all"}
# Opcodes that only run other instructions, which have their own events.
_CONTAINERS = {"while", "conditional", "call"}

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
    r"|\bbranch_computations=\{([^}]*)\}"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,<=]*)\]")


class Instruction(NamedTuple):
    """One instruction in HLO text: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str  # everything after the opening parenthesis

    @property
    def kind(self) -> str:
        """The opcode, without the -start or -done suffix used for asynchronous operations."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments.partition(")")[0])

    @property
    def called(self) -> list[str]:
        """Names of the called computations.

        The list is empty for loops, custom calls and select-and-scatter.
        """
        found = (name or several for name, several in _CALLED.findall(self.arguments))
        return re.findall(r"[\w.-]+", " ".join(found))

    @property
    def array_bytes(self) -> list[int]:
        """Size in bytes of each array in the result."""
        arrays = _ARRAY.findall(self.shape)  # `pred` has 8 bits, but no number in its name
        return [-(-math.prod(_dims(dims)) * int(bits or 8) // 8) for bits, dims in arrays]

    @property
    def dims(self) -> list[int]:
        """Shape of the first array in the result. The result must contain an array."""
        return _dims(_ARRAY.search(self.shape)[2])

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a loop, or None if XLA does not know it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.arguments)
        return int(found[1]) if found else None

    def attribute(self, name: str) -> str:
        """Return the first word of the attribute `name`, or "" if it does not begin with a word."""
        found = re.search(rf'\b{name}=["%]?([\w.$-]+)', self.arguments)
        return found[1] if found else ""


def _dims(text: str) -> list[int]:
    return [int(dim.lstrip("<=")) for dim in text.split(",") if dim]


@dataclass
class HloProgram:
    """A compiled program."""

    name: str  # also the name of the program in traces
    n_devices: int
    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    instructions: dict[str, Instruction] = field(default_factory=dict)
    tables: dict[str, dict[int, str]] = field(default_factory=dict)  # FileNames etc. by ID

    def stack(self, instruction: Instruction) -> list[tuple[str, int, str]]:
        """Return the Python stack of an instruction: (file, line, function), innermost first.

        The list is empty if XLA has not recorded the stack.
        """
        frames = self.tables.get("StackFrames", {})
        number = int(instruction.attribute("stack_frame_id") or 0)
        # In JAX 0.10, caller IDs are too high by 1: the outermost frame's caller is 1, not 0.
        shift = _numbers(frames[1])[1] if 1 in frames else 0
        out = []
        while number in frames:
            location, caller = _numbers(frames[number])
            file, function, line = _numbers(self.tables["FileLocations"][location])[:3]
            names = self.tables["FileNames"][file], self.tables["FunctionNames"][function]
            out.append((names[0].strip('"'), line, names[1].strip('"')))
            number = caller - shift
        return out


@functools.cache
def _numbers(attributes: str) -> list[int]:
    return [int(number) for number in re.findall(r"=(\d+)", attributes)]


def parse_hlo(text: str) -> HloProgram:
    """Parse the text that `compiled.as_text()` returns."""
    name, partitions = re.search(
        r"^HloModule ([\w.-]+)(?:.*num_partitions=(\d+))?", text, re.MULTILINE
    ).groups()
    out = HloProgram(name, int(partitions or 1))
    computation: list[Instruction] = []
    table: dict[int, str] = {}
    for line in text.split("\n"):
        if found := _INSTRUCTION.match(line):
            instruction = Instruction(*found.groups())
            out.instructions[instruction.name] = instruction
            computation.append(instruction)
        elif line.endswith("{"):
            name = line.removeprefix("ENTRY ").removeprefix("%").split(" ", 1)[0]
            computation = out.computations[name] = []
            out.entry = name if line.startswith("ENTRY ") else out.entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = out.tables[line] = {}
        elif line[:1].isdigit():
            number, _, entry = line.partition(" ")
            table[int(number)] = entry
    return out


class Operation(NamedTuple):
    """The category and the source of an instruction that a device runs."""

    category: str  # one of CATEGORIES
    source: str  # "FILE:LINE FUNCTION" in this package, or empty if unknown


def read_operations(program: HloProgram) -> dict[str, Operation]:
    """Return a dict that maps names to operations, including the instructions inside fusions.

    Loops, conditionals and calls are left out, but the instructions inside them are included.
    """
    return {
        name: Operation(_category(instruction, program), _source(instruction, program))
        for name, instruction in program.instructions.items()
        if instruction.opcode not in _CONTAINERS
    }


def is_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a matmul or convolution, including library calls."""
    target = instruction.attribute("custom_call_target")
    return instruction.opcode in _PRODUCTS or bool(_PRODUCT_TARGET.search(target))


def _category(instruction: Instruction, program: HloProgram) -> str:
    """Return the category. A fusion has the category of the collective or matmul inside it."""
    fused = instruction.called if instruction.opcode.startswith(("fusion", "async")) else []
    parts = [part for name in fused for part in program.computations.get(name, [])]
    parts = [part for part in parts or [instruction] if part.opcode not in FREE]
    kinds = {part.kind for part in parts}
    if not kinds.isdisjoint(COLLECTIVES + _SENDS):
        return "collective"
    for part in parts:
        if is_product(part):
            return "attention" if _in_attention(part, program) else "matmul"
    if any(_ATTENTION_TARGET.search(part.attribute("custom_call_target")) for part in parts):
        return "attention"
    if kinds <= _MOVES:
        return "copy"
    if _in_attention(instruction, program):
        return "attention"
    return "other" if "custom-call" in kinds else "elementwise"


def _in_attention(instruction: Instruction, program: HloProgram) -> bool:
    stack = program.stack(instruction)
    if not stack and "lhs_batch_dims=" in instruction.arguments:
        return True  # XLA dropped the source, but only attention has batched matmuls
    return any(file.endswith(_ATTENTION_FILES) for file, _, _ in stack)


def _source(instruction: Instruction, program: HloProgram) -> str:
    """Return the innermost source line in this package, preferably outside `parallel/`."""
    own = []
    for file, line, function in program.stack(instruction):
        _, found, within = file.rpartition("/jaxgpt/")
        if found and (_PACKAGE / within).is_file():  # excludes libraries installed under jaxgpt/
            own.append(f"{within}:{line} {function.replace('<locals>.', '')}")
    return next((line for line in own if not line.startswith("parallel/")), (own or [""])[0])
