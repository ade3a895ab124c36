"""Measure speed and memory: `python -m jaxgpt.bench KIND [--config NAME] [section.key=value ...]`.

Under `mpiexec -n N`, the N processes form one job. All options of jaxgpt.train also work, such as
--mesh 2,1,4 or train.batch_size=512.
"""

import argparse
import importlib
import sys

from jaxgpt.bench.harness import as_json, as_table
from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, file_path, is_help, whole_number

PROG = "python -m jaxgpt.bench"


def parser() -> CommandParser:
    """Return the parser. Each KIND is a module in this folder.

    The module's `run` takes the settings and all options except --json.
    """
    out = CommandParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = out.add_subparsers(dest="kind", required=True, metavar="KIND")

    def bench(name: str, about: str) -> CommandParser:
        kind = kinds.add_parser(name, help=about, description=about)
        kind.add_argument("--json", action="store_true", help="print one line of JSON")
        kind.epilog = "All options of jaxgpt.train also work; its --help lists every key."
        return kind

    def number(kind: CommandParser, option: str, about: str) -> None:
        kind.add_argument(option, type=whole_number(), metavar="N", help=about)

    kind = bench(
        "step", "time, rates and memory of training steps, compared with a large matrix product"
    )
    number(kind, "--steps", "steps in each round; by default a round takes about 1.5 seconds")
    number(kind, "--rounds", "number of rounds; default 7")
    kind.add_argument(
        "--synthetic", action="store_true", help="use random tokens instead of the data"
    )
    kind.add_argument(
        "--profile",
        type=file_path,
        metavar="DIR",
        help="trace a few steps and list the most expensive operations",
    )
    kind = bench("ab", "time per step under each of several changes, compared with no change")
    kind.add_argument(
        "--change",
        action="append",
        required=True,
        metavar="CHANGE",
        help="settings, XLA options (xla_...) and JAX options (jax_...), such as "
        '"parallel.remat=dots xla_gpu_enable_triton_gemm=false"; repeat --change for more changes',
    )
    number(kind, "--steps", "steps in each round; by default a round takes about 1.5 seconds")
    number(kind, "--rounds", "number of rounds; default 7")
    kind = bench(
        "loader", "tokens/s from files to global arrays, compared with rows of a memory map"
    )
    number(kind, "--batches", "batches in each of five rounds; default 40")
    kind = bench("checkpoint", "time to save and restore a checkpoint, compared with plain files")
    kind.add_argument(
        "--out",
        type=file_path,
        metavar="DIR",
        help="where to write; default: the system's temporary folder",
    )
    kind = bench("sample", "time to generate text, per token")
    number(kind, "--tokens", "tokens to generate; default 200, or fewer if they do not fit")
    kind = bench(
        "startup", "time to the first step, cold and warm, compared with the imports alone"
    )
    number(kind, "--runs", "number of cold starts, each followed by a warm start; default 3")
    number(
        kind,
        "--processes",
        "number of processes that mpiexec starts; by default one process, without mpiexec",
    )
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler():
        if is_help(argv) and rank_from_env() > 0:
            return  # only process 0 prints the help
        arguments, settings = parser().parse_known_args(argv)
        options = {name: value for name, value in vars(arguments).items() if value is not None}
        kind, in_json = options.pop("kind"), options.pop("json")
        bench = importlib.import_module(f"jaxgpt.bench.{kind}")
        result = bench.run(settings, **options)
        if rank_from_env() == 0:
            print(as_json(result) if in_json else as_table(result))


if __name__ == "__main__":
    main()
