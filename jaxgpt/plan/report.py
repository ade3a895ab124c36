"""Plans and advice, formatted as text for the terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich.table import Column

from jaxgpt.config import Config, mesh_shape
from jaxgpt.perf.hardware import DEVICES
from jaxgpt.perf.units import count, format_bytes
from jaxgpt.plan.advise import TIE_RATIO, Advice, is_simplest, reason, train_options
from jaxgpt.plan.layout import ASSUMPTIONS, CPU_EFFICIENCY, USABLE, Plan
from jaxgpt.tracking.console import table_text

WIDTH = 112


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = columns
    return table_text([first, *(Column(c, justify="right") for c in others)], rows, WIDTH)


def plan_report(plan: Plan, best: Plan | None = None) -> str:
    """Return a plan as text: a summary, then memory, communication and time.

    If `plan` does not fit, `best` is the best known layout for the same devices, or None. If `plan`
    fits, `best` must be None.
    """
    config = plan.config
    lines = [
        f"{config.config}, {plan.n_parameters:,} parameters, on {plan.mesh.n_devices} x "
        f"{plan.device.name}, {plan.mesh.describe()}, {plan.devices_per_host} per host",
        f"zero_stage={config.parallel.zero_stage} "
        f"sequence_parallel={config.parallel.sequence_parallel} "
        f"remat={config.parallel.remat} dtype={config.train.dtype}",
        f"attention: {plan.program.attention}",
        *(f"warning: {warning}" for warning in plan.warnings),
    ]
    if not mesh_shape(config).is_filled:
        lines.append(
            f"parallel.mesh={config.parallel.mesh}: -1 is planned as 1; give every size with "
            "--mesh, or let --advise N find a mesh for N devices"
        )
    parts = ["\n".join(lines), _memory(plan, best), _communication(plan), _time(plan)]
    return "\n\n".join(parts)


def _memory(plan: Plan, best: Plan | None) -> str:
    memory, device = plan.memory, plan.device
    rows = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("moments", memory.moments),
        ("  of these, in host memory", memory.in_host),
        ("activations and temporaries", memory.activations_and_temporaries),
        ("total on the device", memory.total),
    ]
    rows = [(name, f"{n:,}", format_bytes(n)) for name, n in rows if n or "host" not in name]
    of = f"{format_bytes(device.memory)} of {device.name}" if device.memory else "its share of RAM"
    room = f"{format_bytes(plan.capacity)} ({USABLE:.0%} of {of})"
    word = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        _table(("one device", "bytes", ""), rows),
        f"{word}: {format_bytes(memory.total)} of {room}",
    ]
    if best is not None:
        lines.append(_fit(plan, best))
    if memory.in_host:
        n = plan.devices_per_host
        held = format_bytes(n * memory.in_host)
        lines.append(f"host memory holds {held} for {n} devices")
    if device.memory is None:
        state = memory.total - memory.activations_and_temporaries
        large = [d.name for d in DEVICES.values() if d.memory and state <= USABLE * d.memory]
        lines.append(
            f"parameters, gradients and moments ({format_bytes(state)}) would fit on: "
            f"{', '.join(large) or 'none of the known devices'}; plan for one with --device NAME"
        )
    return "\n".join(lines)


def _fit(plan: Plan, best: Plan) -> str:
    """For a plan that does not fit, return a line about the best layout on the same devices."""
    options = f"{train_options(best, plan.config)} ({format_bytes(best.memory.total)})"
    if best.fits:
        return f"it fits with {options}"
    zero = "" if plan.config.parallel.zero_stage == 3 else " or parallel.zero_stage=3"
    n = plan.mesh.n_devices
    return (
        f"none of the layouts that were tried on {n} x {plan.device.name} fits; the best is "
        f"{options}; use more devices{zero}, or try more layouts with --advise {n}"
    )


def _communication(plan: Plan) -> str:
    rows = [
        (
            f"{c.kind} over {','.join(c.axes)}",
            f"{c.count:,}",
            f"{c.bytes:,}",
            format_bytes(plan.bytes_sent(c)),
            plan.link(c.axes),
        )
        for c in plan.program.collectives
    ]
    columns = ("one step", "arrays", "bytes", "sent", "over")
    return _table(columns, rows) if rows else "one device: nothing is communicated"


def _time(plan: Plan) -> str:
    again = plan.recomputed_flops_per_token
    flops = (
        f"FLOPs: {plan.flops_per_token:.4g} per token, "
        f"{plan.flops_per_token * plan.tokens:.4g} per step of {plan.tokens:,} tokens"
        + (f"; {again * plan.tokens:.4g} more are recomputed (remat)" if again else "")
    )
    e, device = plan.estimate, plan.device
    if e is None:
        return f"{flops}\ntime: no estimate, because the speed of {device.name} is unknown"
    if device.memory is None:
        peak = device.peak_flops[plan.config.train.dtype]
        return (
            f"{flops}\nESTIMATE: step {e.step:.3g} s, {e.tokens_per_sec:,.0f} tokens/s, assuming "
            f"that a step reaches {CPU_EFFICIENCY:.0%} of the {peak / 1e9:.3g} GFLOP/s of a large "
            "matmul on this machine, measured now"
        )
    lines = [
        flops,
        f"ESTIMATE (usually optimistic): step {e.step:.3g} s, "
        f"{e.tokens_per_sec:,.0f} tokens/s, {e.tokens_per_sec_per_device:,.0f} per device, "
        f"MFU {e.mfu:.0%}",
        f"  compute {e.compute:.3g} s"
        + (f" and bubble {e.bubble:.3g} s" if e.bubble else "")
        + f", update {e.update:.2g} s, communication {e.exposed_communication:.3g} s, overlapped "
        f"communication {e.overlapped_communication:.3g} s",
        *(f"  assuming that {assumption}" for assumption in ASSUMPTIONS),
        f"  {device.name}: {device.peak_flops[plan.config.train.dtype] / 1e12:.4g} TFLOP/s; GB/s: "
        f"memory {device.memory_bandwidth / 1e9:.4g}, link {device.link_bandwidth / 1e9:.4g}, "
        f"network {device.network_bandwidth / 1e9:.4g}, host {device.host_bandwidth / 1e9:.4g}",
    ]
    return "\n".join(lines)


def advice_report(advice: Advice, given: Config, always: Collection[str] = ()) -> str:
    """Return text with a table of the best layouts, and the first layout's warnings and options.

    `advice` comes from `search_layouts`, and must contain at least one layout. `given` holds the
    command-line settings. Options that `given` already contains are left out, except --mesh and
    the settings in `always`.
    """
    rows = []
    for plan in advice.plans:
        parallel, estimate = plan.config.parallel, plan.estimate
        microbatches = plan.config.train.gradient_accumulation_steps
        repeats = f" x {parallel.stage_repeats}" if parallel.stage_repeats > 1 else ""
        rows.append(
            (
                str(plan.mesh) + repeats,
                f"{microbatches} x {plan.config.microbatch_size}",
                parallel.remat,
                ("" if plan.is_complete else "> ") + format_bytes(plan.memory.total),
                "yes" if plan.fits else "no",
                f"{estimate.step:.3g} s" if estimate else "-",
                f"{estimate.mfu:.0%}" if estimate else "-",
            )
        )
    columns = ("mesh x repeats", "microbatches", "remat", "memory", "fits", "step", "MFU (max)")
    best = advice.plans[0]
    checked = "; the compiler checked these" if best.is_complete else ""
    lines = [
        _table(columns, rows),
        f"formulas compared {count(advice.n_meshes, 'mesh', 'es')}" + checked,
        *(f"warning: {warning}" for warning in best.warnings),
    ]
    times = [plan.estimate.step for plan in advice.plans if plan.fits and plan.estimate]
    if times and min(times) < times[0]:
        why = f"layouts whose times differ by at most {1 - TIE_RATIO:.0%} are sorted by simplicity"
        if is_simplest(best):
            why = "pure data parallelism comes first, because it is the simplest"
        lines.append(f"the first layout is not the fastest: {why}")
    if best.fits:
        lines.append(f"use {train_options(best, given, always)}: {reason(best)}")
    else:
        lines.append(
            f"none of these layouts fits on {best.mesh.n_devices} x {best.device.name} with "
            f"{format_bytes(best.device.memory or best.capacity)} each; the best is "
            f"{train_options(best, given, always)}: {reason(best)}; use more devices"
        )
    return "\n".join(lines)
