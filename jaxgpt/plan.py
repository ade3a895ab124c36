"""Memory, communication and time of a layout, before a node hour is spent on it.

`python -m jaxgpt.plan --config NAME --mesh D,F,T [--device NAME] [section.key=value ...]` compiles
the train step for as many simulated devices and says what each of them holds and sends.
`--advise N` ranks the meshes of N devices.
"""

import argparse
import json
import math
import sys
from typing import NoReturn

from jaxgpt.config import Config, UsageError, check_batch, is_help, mesh_sizes, parse_args
from jaxgpt.data.sources import vocabulary_size
from jaxgpt.distributed.exits import exits_together
from jaxgpt.telemetry.devices import DEVICES, Device

MAX_DEVICES = 16384


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser() -> Parser:
    out = Parser(prog="python -m jaxgpt.plan", description=__doc__, allow_abbrev=False)
    out.add_argument("--device", default="cpu", help=f"one of {', '.join(DEVICES)}")
    out.add_argument("--devices-per-host", type=int, help="default: as on machines that have it")
    out.add_argument("--advise", type=int, metavar="N", help="rank the meshes of N devices")
    out.add_argument("--json", action="store_true", help="for programs: bytes, seconds, FLOPs")
    out.epilog = "All else is as for jaxgpt.train, whose --help lists every key."
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with exits_together():
        if is_help(argv):
            parser().print_help()
            return
        arguments, rest = parser().parse_known_args(argv)
        print(run(arguments, rest))


def run(arguments: argparse.Namespace, rest: list[str]) -> str:
    """What the command prints.

    Raises:
        UsageError: if an option cannot work.
    """
    if arguments.device not in DEVICES:
        raise UsageError(
            f"--device={arguments.device}: unknown device; one of {', '.join(DEVICES)}"
        )
    device = DEVICES[arguments.device]
    config = parse_args(rest, prog="python -m jaxgpt.plan")
    config = config.replace(model__vocab_size=vocabulary_size(config.data, config.model))
    n_devices = number_of_devices(config, arguments.advise)
    per_host = arguments.devices_per_host or min(n_devices, device.devices_per_host)
    if device.name == "cpu" and arguments.devices_per_host is None:
        per_host = n_devices
    check_devices(n_devices, per_host, arguments)

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n_devices)
    if arguments.advise is not None:
        return advice(config, n_devices, device, per_host, arguments.json)
    sizes = mesh_sizes(config, n_devices)
    check_batch(config, sizes)
    from jaxgpt.planning.layout import plan_layout
    from jaxgpt.planning.report import plan_report

    plan = plan_layout(config, sizes, device, per_host)
    return json.dumps(plan.to_dict(), indent=1) if arguments.json else plan_report(plan)


def number_of_devices(config: Config, advise: int | None) -> int:
    """Devices of the job that is planned.

    Raises:
        UsageError: if neither the mesh nor --advise says.
    """
    if advise is not None:
        return advise
    sizes = mesh_sizes(config)
    if -1 in sizes:
        raise UsageError(
            f"parallel.mesh={config.parallel.mesh}: a plan needs every size, such as --mesh 2,4,1; "
            "or give --advise N for N devices"
        )
    return math.prod(sizes)


def check_devices(n_devices: int, per_host: int, arguments: argparse.Namespace) -> None:
    """Refuses numbers of devices that cannot be."""
    option = "--advise" if arguments.advise is not None else "parallel.mesh"
    if not 1 <= n_devices <= MAX_DEVICES:
        raise UsageError(f"{option}: {n_devices} devices; plans are for 1 to {MAX_DEVICES} of them")
    if per_host < 1 or (n_devices > per_host and n_devices % per_host):
        raise UsageError(
            f"--devices-per-host={per_host}: must divide the {n_devices} devices of the job"
        )


def advice(config: Config, n_devices: int, device: Device, per_host: int, as_json: bool) -> str:
    from jaxgpt.planning.advise import advise
    from jaxgpt.planning.report import advice_report

    found = advise(config, n_devices, device, per_host)
    if as_json:
        return json.dumps([advice.to_dict() for advice in found], indent=1)
    return advice_report(found, n_devices, device.name)


if __name__ == "__main__":
    main()
