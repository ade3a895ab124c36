"""Plans and advice as a person reads them."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from jaxgpt.perf.hardware import DEVICES
from jaxgpt.plan.advise import STATE_ALONE, Candidate
from jaxgpt.plan.estimate import ASSUMPTIONS, recomputed_flops_per_token
from jaxgpt.plan.layout import USABLE, Plan

WIDTH = 112


def size(n: float) -> str:
    """Return bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:,.2f} GiB"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with its first column to the left and the others to the right."""
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
    """Return a plan in four parts: memory, communication, time, and how sure each number is."""
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
            *(f"warning: {warning}" for warning in plan.warnings),
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
        [(name, f"{n:,}", size(n)) for name, n in rows if n or "host" not in name],
    )


def verdict(plan: Plan) -> str:
    """Return one line: whether it fits."""
    memory = plan.device.memory
    room = (
        f"{USABLE:.0%} of the {size(memory)} of {plan.device.name}"
        if memory
        else f"a simulated device's share of {USABLE:.0%} of this machine's memory"
    )
    word = "fits" if plan.fits else "DOES NOT FIT"
    line = f"{word}: {size(plan.memory.total)} of {size(plan.capacity)} ({room})"
    if memory is None:
        state = plan.memory.total - plan.memory.activations_and_temporaries
        large = [d.name for d in DEVICES.values() if d.memory and state <= USABLE * d.memory]
        line += (
            f"\nparameters, gradients and moments alone, {size(state)}, would fit "
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
            size(row["bytes_sent"]),
            row["over"],
        )
        for row in plan.communication()
    ]
    columns = ("one step", "arrays", "bytes", "in theory", "bytes in theory", "sent", "over")
    return table(columns, rows) if rows else "one device: nothing is communicated"


def _time(plan: Plan) -> list[str]:
    tokens = plan.config.train.batch_size * plan.config.model.block_size
    again = recomputed_flops_per_token(plan.config)
    out = [
        f"FLOPs: {plan.flops_per_token:.4g} per token, "
        f"{plan.flops_per_token * tokens:.4g} per step of {tokens:,} tokens"
        + (f"; {again * tokens:.4g} more are computed again (remat)" if again else "")
    ]
    e, device = plan.estimate, plan.device
    if e is None:
        return [*out, f"time: no estimate, since the speed of {plan.device.name} is not known"]
    return [
        *out,
        f"ESTIMATE, a bound more than a forecast: step {e.step:.3g} s, "
        f"{e.tokens_per_sec:,.0f} tokens/s, {e.tokens_per_sec_per_device:,.0f} per device, "
        f"MFU {e.mfu:.0%}",
        f"  compute {e.compute:.3g} s, update {e.update:.2g} s, communication over tensor "
        f"{e.tensor_communication:.3g} s, over the other axes {e.other_communication:.3g} s",
        *(f"  assuming that {assumption}" for assumption in ASSUMPTIONS),
        f"  {device.name}: {device.peak_flops[plan.config.train.dtype] / 1e12:.4g} TFLOP/s; GB/s: "
        f"memory {device.memory_bandwidth / 1e9:.4g}, link {device.link_bandwidth / 1e9:.4g}, "
        f"network {device.network_bandwidth / 1e9:.4g}, host {device.host_bandwidth / 1e9:.4g}",
    ]


def _certainty(plan: Plan) -> list[str]:
    lines = [
        "exact: parameters and moments; arrays and bytes communicated; FLOPs",
        "a model: gradients and activations are what XLA's CPU compiler needs",
    ]
    if plan.device.name == "cpu":
        config = plan.config
        if "bfloat16" in (config.train.dtype, config.parallel.grad_reduce_dtype):
            lines.append(
                "on CPUs bfloat16 is computed and communicated as float32: twice the bytes"
            )
        return lines
    lines[-1] += f"; {plan.device.name}'s own compiler will need about as much, often less"
    return lines


def advice_report(found: Sequence[Candidate], n_devices: int, device: str, shown: int = 12) -> str:
    """Return the best layouts in a table, and the first in a sentence."""
    rows = [
        (
            ",".join(map(str, advice.mesh.values())),
            "yes" if advice.config.parallel.sequence_parallel else "-",
            advice.config.parallel.remat,
            ("> " if STATE_ALONE in advice.reason else "") + size(advice.memory.total),
            "yes" if advice.fits else "no",
            f"{advice.estimate.step:.3g} s" if advice.estimate else "-",
            f"{advice.estimate.mfu:.0%}" if advice.estimate else "-",
        )
        for advice in found[:shown]
    ]
    columns = ("mesh", "sequence_parallel", "remat", "memory", "fits", "step", "MFU at most")
    best = found[0]
    lines = [table(columns, rows)]
    if len(found) > shown:
        lines.append(f"{len(found) - shown} more were looked at")
    if best.fits:
        lines.append(f"take {best.options}: {best.reason}")
        if best.config.parallel.remat != "none":
            lines.append(
                "more train.gradient_accumulation_steps, with parallel.reduce_every=microbatch, "
                "leave room for less remat"
            )
    else:
        lines.append(
            f"nothing fits {n_devices} x {device}: the least is {best.options}, and {best.reason} "
            f"({size(best.memory.total)} of {size(best.capacity)}); {_remedy(best)}"
        )
    return "\n".join(lines)


def _remedy(advice: Candidate) -> str:
    if STATE_ALONE in advice.reason:
        return "take more devices"
    return "take more devices, or more train.gradient_accumulation_steps"
