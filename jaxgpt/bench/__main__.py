"""How fast jaxgpt is here: `python -m jaxgpt.bench KIND [--config NAME] [section.key=value ...]`.

Under `mpiexec -n N` the N processes are one job. All options that are not listed are those of
jaxgpt.train, such as --mesh 2,1,4 or train.batch_size=512.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.bench.harness import PROG
from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, file_path, is_help, whole_number
from jaxgpt.runtime.jax_internals import failure_board


class Option(NamedTuple):
    """An option of a bench: a keyword argument of its `run`."""

    name: str
    type: type
    """int: a whole number of at least 1; bool: a flag; Path: a file or folder; str: a word."""
    metavar: str
    help: str
    required: bool = False

    def add_to(self, parser: CommandParser) -> None:
        if self.type is bool:
            parser.add_argument(f"--{self.name}", action="store_true", help=self.help)
            return
        parser.add_argument(
            f"--{self.name}",
            type=file_path if self.type is Path else str,
            metavar=self.metavar,
            help=self.help,
            required=self.required,
        )


# Name: its help, and its options. A bench is the module of its name in this folder, whose
# `run(settings of jaxgpt.train, **options)` returns a `Result`.
BENCHES: dict[str, tuple[str, tuple[Option, ...]]] = {
    "step": (
        "time, rates and memory of training steps, beside a large matrix product",
        (
            Option("steps", int, "N", "in each of seven rounds; default 1.5 seconds"),
            Option("synthetic", bool, "", "random tokens, not the data"),
            Option("profile", Path, "DIR", "trace a few steps, and list what is expensive"),
        ),
    ),
    "nanogpt": (
        "training steps beside nanoGPT's, which runs in a Python with torch",
        (
            Option("nanogpt", Path, "DIR", "a clone of nanoGPT", required=True),
            Option("torch", str, "PYTHON", "a Python with torch", required=True),
            Option("steps", int, "N", "in each round; default 15"),
            Option("rounds", int, "N", "of both; default 15"),
            Option("compile", bool, "", "let nanoGPT use torch.compile"),
        ),
    ),
    "loader": (
        "tokens per second from files to global arrays, beside rows of a memory map",
        (
            Option("batches", int, "N", "in each of five rounds; default 40"),
            Option("cpus", int, "N", "CPUs to use; default all"),
        ),
    ),
    "checkpoint": (
        "time to save and restore a state, beside plain files",
        (
            Option("size", str, "1GB", "of the state, by the number of layers; default 1GB of "
                   "gpt2 where no --config is given, else the config's own"),
            Option("out", Path, "DIR", "write there; default where temporary files are"),
        ),
    ),
    "collectives": (
        "time and bandwidth of collectives over each mesh axis, beside a copy in memory",
        (
            Option("mesh", str, "D,F,T", "default: as jaxgpt.doctor; alone on a CPU 4,1,1 of "
                   "simulated devices"),
        ),
    ),
    "sample": (
        "time to write a text, beside reading all of it for each token",
        (Option("tokens", int, "N", "to write; default 200, or what fits"),),
    ),
    "compile": (
        "time to compile a training step, beside that of fewer layers",
        (
            Option("layers", str, "N,M", "default a quarter of model.n_layer, and model.n_layer"),
            Option("runs", int, "N", "of each; default 3"),
        ),
    ),
    "startup": (
        "time to the first step, with and without a compile cache, beside the imports",
        (
            Option("runs", int, "N", "cold and warm; default 3 each"),
            Option("processes", int, "N", "started by mpiexec; default without it"),
        ),
    ),
}  # fmt: skip


def parser() -> CommandParser:
    out = CommandParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = out.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (about, options) in BENCHES.items():
        kind = kinds.add_parser(name, help=about, description=about)
        for option in options:
            option.add_to(kind)
        kind.add_argument("--json", action="store_true", help="one line of JSON")
        if name != "collectives":  # which trains nothing
            kind.epilog = "All else is as for jaxgpt.train, whose --help lists every key."
    return out


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, as keyword arguments of the bench's `run`.

    Raises:
        UsageError: if one is not a whole number that has to be.
    """
    given = {}
    for option in BENCHES[arguments.kind][1]:
        value = getattr(arguments, option.name)
        if option.type is int:
            value = whole_number(f"--{option.name}", value)
        if value is not None:
            given[option.name] = value
    return given


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler(failure_board):
        if is_help(argv) and rank_from_env() > 0:
            return  # once is enough
        arguments, settings = parser().parse_known_args(argv)
        options = given_options(arguments)
        bench = importlib.import_module(f"jaxgpt.bench.{arguments.kind}")
        result = bench.run(settings, **options)
        if rank_from_env() == 0:
            print(json.dumps(result.to_dict()) if arguments.json else result.table())


if __name__ == "__main__":
    main()
