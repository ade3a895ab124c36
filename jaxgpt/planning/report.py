"""Plans and advice as a person reads them."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from jaxgpt.planning.advise import Advice
from jaxgpt.planning.estimate import ASSUMPTIONS
from jaxgpt.planning.layout import USABLE, Plan
from jaxgpt.telemetry.devices import DEVICES

WIDTH = 112
GIB = 2**30


def gib(n: float) -> str:
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 100 else f"{n / 2**20:,.2f} MiB"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    out = Table(*columns)
    for column in out.columns:
        column.no_wrap = True
    for column in out.columns[1:]:
        column.justify = "right"
    for row in rows:
        out.add_row(*row)
    text = Console(width=WIDTH)
    with text.capture() as captured:
        text.print(out)
    return captured.get().rstrip("\n")


def plan_report(plan: Plan) -> str:
    """A plan in four parts: memory, communication, time, and how sure each number is."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    config = plan.config
    return "\n".join(
        [
            f"{config.config} on {math.prod(plan.mesh.values())} x {plan.device.name}, {mesh}, "
            f"{plan.devices_per_host} devices per host",
            f"zero_stage={config.parallel.zero_stage} "
            f"sequence_parallel={config.parallel.sequence_parallel} "
            f"remat={config.parallel.remat} dtype={config.train.dtype}",
            f"attention: {plan.attention}",
            *plan.warnings(),
            "",
            _memory(plan),
            verdict(plan),
            "",
            _communication(plan),
            "",
            *_time(plan),
            "",
            *_certainty(plan),
        ]
    )


def _memory(plan: Plan) -> str:
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("moments", memory.moments),
        ("  of these in the host's memory", memory.host_moments),
        ("activations and temporaries", memory.activations_and_temporaries),
        ("total on the device", memory.total),
    ]
    return table(
        ("one device", "bytes", ""),
        [(name, f"{n:,}", gib(n)) for name, n in rows if n or "host" not in name],
    )


def verdict(plan: Plan) -> str:
    """One line: whether it fits."""
    memory = plan.device.memory
    room = (
        f"{USABLE:.0%} of the {gib(memory)} of {plan.device.name}"
        if memory
        else f"a simulated device's share of {USABLE:.0%} of this machine's memory"
    )
    word = "fits" if plan.fits else "DOES NOT FIT"
    line = f"{word}: {gib(plan.memory.total)} of {gib(plan.capacity)} ({room})"
    if memory is None:
        state = plan.memory.total - plan.memory.activations_and_temporaries
        large = [d.name for d in DEVICES.values() if d.memory and state <= USABLE * d.memory]
        line += (
            f"\nparameters, gradients and moments alone, {gib(state)}, would fit "
            f"{', '.join(large) or 'no device of the table'}; --device NAME plans for one"
        )
    return line


def _communication(plan: Plan) -> str:
    rows = [
        (
            f"{row['kind']} over {','.join(row['axes'])}",
            f"{row['count']:,}",
            f"{row['bytes']:,}",
            f"{row['theory_count']:,}",
            f"{row['theory_bytes']:,}",
            gib(row["bytes_sent"]),
            row["over"],
        )
        for row in plan.communication()
    ]
    columns = ("one step", "arrays", "bytes", "theory", "bytes", "sent", "over")
    return table(columns, rows) if rows else "one device: nothing is communicated"


def _time(plan: Plan) -> list[str]:
    tokens = plan.config.train.batch_size * plan.config.model.block_size
    out = [
        f"FLOPs: {plan.flops_per_token:.4g} per token, "
        f"{plan.flops_per_token * tokens:.4g} per step of {tokens:,} tokens"
    ]
    e = plan.estimate
    if e is None:
        return [*out, f"time: no estimate, since the speed of {plan.device.name} is not known"]
    return [
        *out,
        f"ESTIMATE, not a measurement: step {e.step:.3g} s, {e.tokens_per_sec:,.0f} tokens/s, "
        f"{e.tokens_per_sec_per_device:,.0f} per device, MFU {e.mfu:.0%}",
        f"  compute {e.compute:.3g} s, update {e.update:.2g} s, communication over tensor "
        f"{e.tensor_communication:.3g} s, over the other axes {e.other_communication:.3g} s",
        *(f"  assuming that {assumption}" for assumption in ASSUMPTIONS),
    ]


def _certainty(plan: Plan) -> list[str]:
    lines = [
        "exact: parameters and moments; arrays and bytes communicated; FLOPs",
        "a model: gradients and activations are what XLA's CPU compiler needs",
    ]
    if plan.device.name == "cpu":
        if plan.config.train.dtype == "bfloat16":
            lines.append(
                "on CPUs bfloat16 is computed and communicated as float32: twice the bytes"
            )
        return lines
    lines[-1] += f"; {plan.device.name}'s own compiler will need about as much, often less"
    return lines


def advice_report(found: Sequence[Advice], n_devices: int, device: str, shown: int = 10) -> str:
    """The best layouts in a table, and the first in a sentence."""
    rows = [
        (
            str(rank),
            advice.options,
            gib(advice.memory.total),
            "yes" if advice.fits else "no",
            f"{advice.estimate.step:.3g} s" if advice.estimate else "-",
            f"{advice.estimate.mfu:.0%}" if advice.estimate else "-",
            advice.reason,
        )
        for rank, advice in enumerate(found[:shown], 1)
    ]
    out = Table("", "options", "memory", "fits", "step", "MFU", "why")
    for row in rows:
        out.add_row(*row)
    text = Console(width=WIDTH)
    with text.capture() as captured:
        text.print(out)
    best = found[0]
    conclusion = (
        f"take {best.options}: {best.reason}"
        if best.fits
        else f"nothing fits {n_devices} x {device}; the least is {best.options} with "
        f"{gib(best.memory.total)} of {gib(best.capacity)}: more devices, or a smaller "
        "train.batch_size or more train.gradient_accumulation_steps"
    )
    more = f"{len(found) - shown} more were looked at\n" if len(found) > shown else ""
    return f"{captured.get()}{more}{conclusion}"
