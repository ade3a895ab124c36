"""Categories of the instructions of a compiled program, and the Python that they come from."""

import re
from pathlib import Path
from typing import NamedTuple

from jaxgpt.perf.hlo_text import Instruction, Program

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


class Operation(NamedTuple):
    """An instruction that a device runs."""

    category: str
    """One of CATEGORIES."""
    source: str
    """File, line and function of this package that it comes from; empty where not known."""


def read_operations(program: Program) -> dict[str, Operation]:
    """Return the instructions of a program by name, without loops, whose content is listed."""
    return {
        instruction.name: Operation(_category(instruction, program), _source(instruction, program))
        for instructions in program.computations.values()
        for instruction in instructions
        if instruction.opcode not in _CONTAINERS
    }


def _category(instruction: Instruction, program: Program) -> str:
    """A fusion with a product in it is a product; one that only moves data is a copy."""
    parts = [part for name in _calls(instruction) for part in program.computations.get(name, [])]
    parts = [part for part in parts or [instruction] if part.opcode not in _FREE]
    opcodes = {part.opcode.removesuffix("-start").removesuffix("-done") for part in parts}
    if not opcodes.isdisjoint(_COLLECTIVES):
        return "collective"
    for part in parts:
        if part.opcode in _PRODUCTS or _PRODUCT_TARGET.search(part.target):
            return "attention" if _in_attention(part, program) else "matmul"
    if any(_ATTENTION_TARGET.search(part.target) for part in parts):
        return "attention"
    if opcodes <= _MOVES:
        return "copy"
    if _in_attention(instruction, program):
        return "attention"
    return "other" if "custom-call" in opcodes else "elementwise"


def _calls(instruction: Instruction) -> list[str]:
    """Return the computations that are part of an instruction, not those of a reduction."""
    return instruction.called if instruction.opcode.startswith(("fusion", "async")) else []


def _in_attention(instruction: Instruction, program: Program) -> bool:
    """Find batched products, whose source XLA forgets: in this model only attention has them."""
    if not instruction.frame and "lhs_batch_dims=" in instruction.arguments:
        return True
    return any(f.file.endswith(ATTENTION_FILE) for f in program.stack(instruction.frame))


def _is_own(file: str) -> bool:
    """Return whether a file is of this package, not of a library in a folder named like it."""
    _, found, within = file.rpartition("/jaxgpt/")
    return bool(found) and (PACKAGE / within).is_file()


def _source(instruction: Instruction, program: Program) -> str:
    """Return what wanted the operation, and not what shares it out over devices."""
    own = [frame for frame in program.stack(instruction.frame) if _is_own(frame.file)]
    if not own:
        return ""
    wanted = [frame for frame in own if "/jaxgpt/parallel/" not in frame.file]
    file, line, function = (wanted or own)[0]
    return f"{file.rpartition('/jaxgpt/')[2]}:{line} {function.replace('<locals>.', '')}"
