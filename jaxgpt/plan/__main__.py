"""Estimate the memory, communication and time of a layout before spending node hours on it.

`python -m jaxgpt.plan --config NAME --mesh D,F,T [--device NAME] [section.key=value ...]` compiles
the train step for simulated devices, and prints what each device stores and sends.
`--advise N` ranks the meshes for N devices.
"""

import argparse
import dataclasses
import json
import sys

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import (
    CommandParser,
    Config,
    UsageError,
    check_batch,
    is_help,
    mesh_shape,
    parse_args,
    whole_number,
)
from jaxgpt.config.parse import presets
from jaxgpt.config.translate import translate
from jaxgpt.data.dataset import with_planned_vocabulary
from jaxgpt.optim import CHOICES
from jaxgpt.perf.hardware import DEVICES, Device
from jaxgpt.runtime.devices import MAX_CPU_DEVICES
from jaxgpt.runtime.initialize import pin_settings
from jaxgpt.runtime.xla_flags import QUICK_FUSIONS, add_xla_flags
from jaxgpt.train.init_from import initial_model

MAX_DEVICES = 2**16
MICROBATCHES = "train.gradient_accumulation_steps"


def parser() -> CommandParser:
    usage = (
        "%(prog)s [--config NAME_OR_FILE] [--mesh D,F,T] [--device NAME] [--devices-per-host N] "
        "[--advise N] [--json] [section.key=value ...]"
    )
    out = CommandParser(prog="python -m jaxgpt.plan", usage=usage, description=__doc__)
    about = "device to plan for (default: cpu, this machine)"
    out.add_argument("--device", default="cpu", choices=DEVICES, help=about)
    hosts = ", ".join(f"{d.name} {d.devices_per_host}" for d in DEVICES.values() if d.memory)
    n = whole_number()
    out.add_argument("--devices-per-host", type=n, metavar="N", help=f"default: {hosts}")
    out.add_argument("--advise", type=n, metavar="N", help="rank the meshes for N devices")
    out.add_argument("--json", action="store_true", help="print JSON, in bytes, seconds and FLOPs")
    out.epilog = "All arguments of jaxgpt.train are also accepted; its --help lists every key."
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler():
        if is_help(argv):
            parser().print_help()
            return
        if rank_from_env() == 0:  # under a launcher, only process 0 prints
            print(run(*parser().parse_known_args(argv)))


def run(arguments: argparse.Namespace, rest: list[str]) -> str:
    """Start JAX with simulated CPU devices, and return the text that the command prints.

    `arguments` holds the options of `parser`, and `rest` holds settings for jaxgpt.train. JAX must
    not have started yet. This also sets XLA_FLAGS and JAX settings.

    Raises `UsageError` if an option or a setting is invalid or incompatible with the mesh or the
    device, or if --advise finds no mesh.
    """
    device, inherits = DEVICES[arguments.device], True
    if arguments.advise is not None:
        _check_advise(arguments.advise, rest)
    try:
        config = _parse(rest)
    except UsageError as error:
        if arguments.advise is None or not str(error).startswith(f"{MICROBATCHES}="):
            raise
        config, inherits = _parse([*rest, f"{MICROBATCHES}=1"]), False
    config = with_planned_vocabulary(config)
    n_devices = _number_of_devices(config) if arguments.advise is None else arguments.advise
    per_host = devices_per_host(arguments.devices_per_host, device, n_devices)
    if arguments.advise is None:
        shape = mesh_shape(config, n_devices)
        check_batch(config, shape)

    add_xla_flags(*QUICK_FUSIONS)
    import jax

    pin_settings()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", min(n_devices, MAX_CPU_DEVICES))
    from jaxgpt.plan.advise import reason, search_layouts, train_options
    from jaxgpt.plan.layout import plan_layout
    from jaxgpt.plan.report import advice_report, plan_report

    if arguments.advise is None:
        if device.name == "cpu" and n_devices == 1:
            from jaxgpt.perf.matmul import measured_peak

            peak = measured_peak(config.train.dtype)
            device = dataclasses.replace(device, peak_flops={config.train.dtype: peak})
        plan = plan_layout(config, shape, device, per_host)
        if arguments.json:
            return json.dumps(plan.to_dict(), indent=1)
        if plan.fits or device.memory is None:
            return plan_report(plan)
        found = search_layouts(config, n_devices, device, per_host, 2)
        return plan_report(plan, next(iter(found.plans), None))
    found = search_layouts(config, n_devices, device, per_host)
    if not found.plans:
        raise UsageError(
            f"--advise={n_devices}: no mesh that the search can choose works with "
            f"train.batch_size={config.train.batch_size}; make it a multiple of {n_devices}"
        )
    # The settings have an invalid number of microbatches, so every layout must set another number.
    always = () if inherits else (MICROBATCHES,)
    if arguments.json:
        advice = [
            {"options": train_options(plan, config, always), "reason": reason(plan)}
            | plan.summary()
            for plan in found.plans
        ]
        job = {"device": device.name, "devices": n_devices, "devices_per_host": per_host}
        return json.dumps(job | {"advice": advice}, indent=1)
    return advice_report(found, config, always)


def _parse(settings: list[str]) -> Config:
    return parse_args(settings, "python -m jaxgpt.plan", initial_model, choices=CHOICES)


def _check_advise(n_devices: int, rest: list[str]) -> None:
    """Check the value of --advise, and that `rest` leaves the layout to the search.

    Raises:
        UsageError: if there are too many devices, or if `rest` has an option that --advise chooses,
            also as another program's flag (but not as nanoGPT's --gradient_accumulation_steps,
            which mainly sets the batch size).
    """
    from jaxgpt.plan.advise import CHOSEN  # imports JAX

    line = translate(rest, presets())
    given = [line.shown[key] for key in ("parallel.mesh", *CHOSEN) if key in line.shown]
    given += [argument for flags in line.other.axes.values() for argument in flags.values()]
    if given:
        words = ", ".join(dict.fromkeys(given))  # a flag may set several keys
        raise UsageError(f"{words}: --advise chooses the layout; remove one or the other")
    if n_devices > MAX_DEVICES:
        raise UsageError(
            f"--advise={n_devices}: must be at most {MAX_DEVICES}; choose fewer devices"
        )


def _number_of_devices(config: Config) -> int:
    """Return the number of devices in the mesh. A mesh axis of size -1 counts as 1.

    Raises:
        UsageError: if there are too many devices, or if parallel.mesh does not fit the model.
    """
    from jaxgpt.plan.program import with_fewer_replicas  # imports JAX

    shape = mesh_shape(config)
    _, simulated = with_fewer_replicas(config, shape)
    if simulated.n_devices > MAX_CPU_DEVICES:
        raise UsageError(
            f"parallel.mesh={shape}: even with fewer replicas ({simulated}), it would need "
            f"{simulated.n_devices} simulated devices; the limit is {MAX_CPU_DEVICES}; choose "
            "a larger data axis"
        )
    return shape.n_devices


def devices_per_host(given: int | None, device: Device, n_devices: int) -> int:
    """Return the number of devices per host, at most `n_devices`.

    Args:
        given: the value of --devices-per-host. None means the device's default. The default for
            `cpu` is a single host.

    Raises:
        UsageError: if the devices cannot be divided equally among several hosts.
    """
    per_host = given or (n_devices if device.memory is None else device.devices_per_host)
    if n_devices > per_host and n_devices % per_host:
        raise UsageError(
            f"--devices-per-host={per_host} ({device.name}): does not divide the {n_devices} "
            "devices of the job; choose a number that does"
        )
    return min(per_host, n_devices)


if __name__ == "__main__":
    main()
