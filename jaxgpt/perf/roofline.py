"""Roofline model: the minimum time of each operation in a compiled step, from its bytes and FLOPs.

Williams, Waterman and Patterson, Communications of the ACM 52, 4 (2009).
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

from jaxgpt.perf.hlo import FREE, HloProgram, Instruction, is_product

_SLICES = ("dynamic-slice", "slice", "gather")
# In an HLO dot: `lhs_batch_dims={0,1}`. In a cuBLAS call: `lhs_batch_dimensions":["0"]`.
_BATCH_DIMS = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')


class Work(NamedTuple):
    """Execution count, bytes and FLOPs of one operation in a step, on one device."""

    times: int  # executions per step
    read: int  # bytes per execution
    written: int  # bytes per execution
    flops: int  # of matmuls, per execution; 0 for vendor attention kernels

    @property
    def moved(self) -> int:
        """Bytes read and written per step."""
        return self.times * (self.read + self.written)

    def least_seconds(self, bandwidth: float, peak: float) -> float:
        """Return the minimum time per step in seconds, at `bandwidth` bytes/s and `peak` FLOP/s."""
        return self.times * max((self.read + self.written) / bandwidth, self.flops / peak)


def read_work(program: HloProgram) -> dict[str, Work]:
    """Return the `Work` of each operation in a step, keyed by the operation's name.

    Opcodes in `FREE`, opcodes that end with -done, and loop conditions are left out. Each operation
    is assumed to read its operands once and to write its result once. If an operation only slices
    an array, gathers from it or updates a slice of it, only the slice is counted. A scatter counts
    the whole array. Caches are ignored. All branches of a conditional are counted. A loop with an
    unknown trip count is counted as one iteration.
    """
    out: dict[str, Work] = {}

    def walk(computation: str, times: int) -> None:
        for one in program.computations[computation]:
            if one.opcode == "while":
                trips = 1 if one.trip_count is None else one.trip_count
                walk(one.attribute("body"), times * trips)
            elif one.opcode in ("call", "conditional", "async-start"):
                for name in one.called:
                    walk(name, times)
            elif one.opcode not in FREE and not one.opcode.endswith("-done"):
                out[one.name] = Work(times, *_bytes_moved(one, program), _flops(one, program))

    walk(program.entry, 1)
    return out


def _bytes_moved(one: Instruction, program: HloProgram) -> tuple[int, int]:
    """Return the bytes that one execution of an operation reads and writes."""
    if one.opcode == "fusion":
        return _fusion_bytes(program.computations[one.called[0]], program)
    sizes = [_size(program.instructions[name]) for name in one.operands]
    if one.opcode == "dynamic-update-slice":
        return sizes[1], sizes[1]
    written = one.array_bytes
    if one.attribute("custom_call_target").startswith("__cublas") and len(written) > 1:
        written.pop()  # the last result is a workspace, which is not part of the product
    return (_size(one) if one.opcode in _SLICES else sum(sizes)), sum(written)


def _flops(one: Instruction, program: HloProgram) -> int:
    """Return the FLOPs of matmuls: 2 B M K N for (B, M, K) x (B, K, N) -> (B, M, N)."""
    if one.opcode == "fusion":
        return sum(_flops(part, program) for part in program.computations[one.called[0]])
    if not is_product(one):
        return 0
    arrays = [one, *(program.instructions[name] for name in one.operands[:2])]
    found = _BATCH_DIMS.search(one.arguments)
    batch_dims = re.findall(r"\d+", found[1]) if found else []
    batch = math.prod(arrays[1].dims[int(dim)] for dim in batch_dims)
    return 2 * math.isqrt(math.prod(math.prod(array.dims) for array in arrays) // batch)


def _fusion_bytes(body: list[Instruction], program: HloProgram) -> tuple[int, int]:
    """Return the bytes that a fusion reads from its parameters and writes to its result."""
    users = defaultdict(list)
    for one in body:
        for operand in one.operands:
            users[operand].append(one)

    def touched(array: Instruction, whole: int) -> int:
        taken = 0
        for user in users[array.name]:
            if user.opcode == "bitcast":
                taken += touched(user, whole)
            elif user.opcode in _SLICES and user.operands[0] == array.name:
                taken += _size(user)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != array.name:
                return whole
        return min(taken, whole)

    def written(one: Instruction) -> int:
        operands = [program.instructions[name] for name in one.operands]
        if one.opcode == "tuple":
            return sum(written(operand) for operand in operands)
        if one.opcode == "bitcast":
            return written(operands[0])
        return _size(operands[1] if one.opcode == "dynamic-update-slice" else one)

    parameters = [one for one in body if one.opcode == "parameter"]
    return sum(touched(one, _size(one)) for one in parameters), written(body[-1])


def _size(instruction: Instruction) -> int:
    return sum(instruction.array_bytes)
