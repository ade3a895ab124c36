"""Check whether a machine is fit to train on: `python -m jaxgpt.doctor`, alone or under `mpiexec`.

The doctor checks versions, the launcher, hosts, devices, clocks and the run directory. Then it
checks and times every collective on each mesh axis, and trains a small model for ten steps. Each
check is reported as OK, WARN or FAIL, with a remedy for any problem. The exit status is 0 if no
check failed, 1 if a check failed, 2 if an argument is wrong, and 70 if a process hangs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxgpt.cluster import shutdown
from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.monitor import HangLimit
from jaxgpt.cluster.process_group import INIT_TIMEOUT, catch_usage_error, join_process_group
from jaxgpt.config import (
    CommandParser,
    MeshShape,
    file_path,
    is_help,
    parse_mesh,
    whole_number,
)
from jaxgpt.doctor.directory import check_writable
from jaxgpt.runtime.initialize import initialize_jax

OUT = Path("runs")  # parent folder of run directories if --out is not given


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    out.add_argument(
        "--mesh",
        metavar="D,F,T",
        help="measure collectives on this mesh. By default, the data axis spans the hosts, and the "
        "tensor axis spans the devices of each host. On a single host, all devices are on the data "
        "axis. A single process on a CPU simulates four devices.",
    )
    out.add_argument("--out", type=file_path, metavar="DIR", help=f"run directory; default: {OUT}")
    out.add_argument(
        "--init-timeout",
        type=whole_number(bits=17),
        default=int(INIT_TIMEOUT),
        metavar="S",
        help="seconds to wait for processes that have not connected or do not respond; default "
        f"{INIT_TIMEOUT:.0f}",
    )
    return out


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises `UsageError` if an argument is unknown or malformed. Process 0 also raises `UsageError`
    if `--out` is not writable.
    """
    arguments = parser().parse_args(argv)
    if arguments.mesh is not None:
        parse_mesh(arguments.mesh)
    if arguments.out is not None and rank_from_env() == 0:
        check_writable(arguments.out)
    return arguments


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["prove"]:
        from jaxgpt.doctor.prove.command import main as prove

        prove(argv[1:])
    with shutdown.job_exit_handler():
        if is_help(argv):
            if rank_from_env() == 0:
                parser().print_help()
            return
        arguments, error = catch_usage_error(parse, argv)
        timeout = arguments.init_timeout if arguments else INIT_TIMEOUT
        limit = HangLimit(timeout, f"--init-timeout={timeout:.0f}")
        with join_process_group(timeout, limit) as cluster:
            cluster.raise_if_any(error)
            mesh = arguments.mesh
            simulated = parse_mesh(mesh) if mesh else MeshShape(4 if cluster.size == 1 else -1)
            found = initialize_jax(cluster, simulated, allow_cpu=True)
            shape = parse_mesh(mesh, found["devices"]) if mesh else None
            from jaxgpt.doctor.report import run_checks  # imports JAX

            status = run_checks(cluster, found, shape, arguments.out or OUT, arguments.json)
    sys.exit(status)


if __name__ == "__main__":
    main()
