"""The parser of compiled programs: XLA's optimized HLO text as computations and instructions."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^ +(ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
    r"|\bbranch_computations=\{([^}]*)\}"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_NAMED = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_STACK = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")


class Instruction(NamedTuple):
    """`%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    """All after the opcode's parenthesis: operands, attributes, metadata."""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls, but for those of a loop."""
        names = []
        for name, several in _CALLED.findall(self.arguments):
            names += [name] if name else re.findall(r"[\w.-]+", several)
        return names

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = _TARGET.search(self.arguments)
        return found[1] if found else ""

    @property
    def frame(self) -> int:
        """The stack frame that it comes from in Python; 0 if XLA has forgotten."""
        found = _FRAME.search(self.arguments)
        return int(found[1]) if found else 0

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments[: self.arguments.index(")")])

    def attribute(self, name: str) -> str:
        """Return the word after `name=`."""
        return re.search(rf"\b{name}=%?([\w.-]+)", self.arguments)[1]


class Frame(NamedTuple):
    """A line of Python."""

    file: str
    line: int
    function: str


@dataclass
class Program:
    """A compiled program."""

    name: str
    """As traces have it."""
    n_devices: int | None
    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    roots: dict[str, Instruction] = field(default_factory=dict)
    """Computation -> the instruction of its result."""
    files: dict[int, str] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    locations: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)

    def stack(self, frame: int) -> list[Frame]:
        """Return a frame and those that called it, the innermost first."""
        # Of the outermost frame, which nothing called, XLA 0.10 lists 1 and not 0.
        shift = self.frames[1][1] if 1 in self.frames else 0
        out = []
        while frame in self.frames:
            location, parent = self.frames[frame]
            file, function, line = self.locations[location]
            out.append(Frame(self.files[file], line, self.functions[function]))
            frame = parent - shift
        return out


def parse_hlo(text: str) -> Program:
    """Return the program of an HLO text.

    Args:
        text: `compiled.as_text()`.
    """
    partitions = re.search(r"^HloModule .*num_partitions=(\d+)", text, re.MULTILINE)
    name = re.search(r"^HloModule ([\w.-]+)", text, re.MULTILINE)
    out = Program(name[1] if name else "", int(partitions[1]) if partitions else None)
    computation, named = "", out.files
    for line in text.split("\n"):
        if found := _INSTRUCTION.match(line):
            is_root, name, rest = found.groups()
            opcode = _OPCODE.search(f" {rest}")
            shape, arguments = rest[: max(0, opcode.start() - 1)], rest[opcode.end() - 1 :]
            instruction = Instruction(name, shape, opcode[1], arguments)
            out.computations[computation].append(instruction)
            if is_root:
                out.roots[computation] = instruction
        elif line.endswith("{"):
            computation = line.removeprefix("ENTRY ").removeprefix("%").split(" ", 1)[0]
            out.computations[computation] = []
            out.entry = computation if line.startswith("ENTRY ") else out.entry
        elif line in ("FileNames", "FunctionNames"):
            named = out.files if line == "FileNames" else out.functions
        elif found := _NAMED.match(line):
            named[int(found[1])] = found[2]
        elif found := _LOCATION.match(line):
            out.locations[int(found[1])] = int(found[2]), int(found[3]), int(found[4])
        elif found := _STACK.match(line):
            out.frames[int(found[1])] = int(found[2]), int(found[3])
    return out
