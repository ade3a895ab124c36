"""Whether a machine is fit to train on: `python -m jaxgpt.doctor`, alone or under `mpiexec`.

It looks at versions, the launcher, hosts, devices, the run directory and clocks, checks and times
every collective on each mesh axis, and trains a small model for ten steps. Every line says OK,
WARN or FAIL, and what to do. Exit status: 0, or 1 if anything failed.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.process_group import INIT_TIMEOUT, catch_usage_error, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, Config, file_path, is_help, mesh_sizes
from jaxgpt.config.schema import MAX_INIT_TIMEOUT
from jaxgpt.doctor.directory import check_writable
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.runtime.jax_internals import failure_board

OUT = Path("runs")  # where runs without --out are written


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--json", action="store_true", help="for programs: one object, at the end")
    out.add_argument(
        "--mesh",
        metavar="D,F,T",
        help="measure collectives on this mesh; default: data over hosts and tensor inside, on one "
        "host all devices along data; alone on a CPU 4,1,1 of simulated devices",
    )
    out.add_argument("--out", type=file_path, metavar="DIR", help=f"run directory; default: {OUT}")
    out.add_argument(
        "--init-timeout",
        type=seconds,
        default=INIT_TIMEOUT,
        metavar="S",
        help="seconds to wait for processes that do not come, or do not answer; default "
        f"{INIT_TIMEOUT:.0f}",
    )
    return out


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MAX_INIT_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} must be seconds, from 1 to {MAX_INIT_TIMEOUT}")
    return value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with `mesh` as a Config of that mesh, or None.

    Raises:
        UsageError: if one is unknown or cannot work.
    """
    arguments = parser().parse_args(argv)
    if arguments.mesh is not None:
        # No model, whose heads a tensor axis would have to divide.
        arguments.mesh = Config().replace(parallel__mesh=arguments.mesh, model__n_head=0)
        mesh_sizes(arguments.mesh)
    return arguments


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler(failure_board):
        if is_help(argv):
            if rank_from_env() == 0:
                parser().print_help()
            return
        arguments, error = catch_usage_error(parse, argv)
        cluster = join_process_group(arguments.init_timeout if arguments else INIT_TIMEOUT)
        cluster.raise_if_any(error)
        if arguments.out is not None:
            cluster.run_on_all(lambda: cluster.is_main and check_writable(arguments.out))
        alone = (4, 1, 1) if cluster.size == 1 else (-1, 1, 1)
        sizes = mesh_sizes(arguments.mesh) if arguments.mesh else alone
        found = initialize_jax(cluster, sizes, allow_cpu=True)
        from jaxgpt.doctor.examination import examine  # imports JAX, after initialize_jax

        sizes = mesh_sizes(arguments.mesh, found["devices"]) if arguments.mesh else None
        status = examine(cluster, found, sizes, arguments.out or OUT, arguments.json)
    sys.exit(status)


if __name__ == "__main__":
    main()
