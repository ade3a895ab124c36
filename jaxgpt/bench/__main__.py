"""How fast jaxgpt is here: `python -m jaxgpt.bench KIND [--config NAME] [section.key=value ...]`.

Under `mpiexec -n N` the N processes are one job. All options that are not listed are those of
jaxgpt.train, such as --mesh 2,1,4 or train.batch_size=512.
"""

import argparse
import json
import sys
from typing import Any

from jaxgpt.bench.environment import describe, environment
from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import (
    CommandParser,
    UsageError,
    file_path,
    is_help,
    names_config,
    parse_args,
    whole_number,
)
from jaxgpt.runtime.jax_internals import failure_board

PROG = "python -m jaxgpt.bench"


def parser() -> CommandParser:
    out = CommandParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = out.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(name: str, about: str) -> CommandParser:
        added = kinds.add_parser(name, help=about, description=about)
        added.add_argument("--json", action="store_true", help="one line of JSON")
        added.epilog = "All else is as for jaxgpt.train, whose --help lists every key."
        return added

    loader = kind("loader", "tokens per second from files to global arrays")
    loader.add_argument(
        "--batches", default="40", metavar="N", help="in each of five rounds; default 40"
    )
    loader.add_argument("--cpus", metavar="N", help="CPUs to use; default all")

    step = kind("step", "time, rates and memory of training steps, beside a large matrix product")
    step.add_argument("--steps", metavar="N", help="in each of seven rounds; default 1.5 seconds")
    step.add_argument("--synthetic", action="store_true", help="random tokens, not the data")
    step.add_argument(
        "--profile",
        type=file_path,
        metavar="DIR",
        help="trace a few steps for TensorBoard; list what is expensive",
    )

    nanogpt = kind("nanogpt", "training steps beside nanoGPT's, which runs in a Python with torch")
    nanogpt.add_argument(
        "--nanogpt", type=file_path, required=True, metavar="DIR", help="a clone of nanoGPT"
    )
    nanogpt.add_argument("--torch", required=True, metavar="PYTHON", help="a Python with torch")
    nanogpt.add_argument("--steps", default="15", metavar="N", help="in each round; default 15")
    nanogpt.add_argument("--rounds", default="15", metavar="N", help="of both; default 15")
    nanogpt.add_argument("--compile", action="store_true", help="let nanoGPT use torch.compile")

    goals = kind("goals", "the speeds that jaxgpt sets itself here, each measured, as a table")
    goals.add_argument("--only", metavar="NAME", help="of one configuration; default all")
    goals.add_argument("--nanogpt", type=file_path, metavar="DIR", help="a clone of nanoGPT")
    goals.add_argument("--torch", metavar="PYTHON", help="a Python with torch")

    checkpoint = kind("checkpoint", "time to save and restore a state, beside plain files")
    checkpoint.add_argument(
        "--size",
        metavar="1GB",
        help="of the state, by the number of layers; default 1GB of gpt2 where no --config is "
        "given, else the config's own",
    )
    checkpoint.add_argument(
        "--out",
        type=file_path,
        metavar="DIR",
        help="write there; default where temporary files are",
    )

    sample = kind("sample", "time to write a text, beside reading all of it for each token")
    sample.add_argument("--tokens", metavar="N", help="to write; default 200, or what fits")

    compilation = kind("compile", "time to compile a training step, beside that of fewer layers")
    compilation.add_argument(
        "--layers", metavar="N,M", help="default a quarter of model.n_layer, and model.n_layer"
    )
    compilation.add_argument("--runs", default="3", metavar="N", help="of each; default 3")

    startup = kind("startup", "time to the first step, with and without a compile cache")
    startup.add_argument("--runs", default="3", metavar="N", help="cold and warm; default 3 each")
    startup.add_argument("--processes", metavar="N", help="started by mpiexec; default without it")

    collectives = kind("collectives", "time and bandwidth of collectives over each mesh axis")
    collectives.add_argument(
        "--mesh",
        metavar="D,F,T",
        help="default: as jaxgpt.doctor; alone on a CPU 4,1,1 of simulated devices",
    )
    collectives.epilog = None
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler(failure_board):
        if is_help(argv) and rank_from_env() > 0:
            return  # once is enough
        arguments, rest = parser().parse_known_args(argv)
        found, described = RUN[arguments.kind](arguments, rest)
        if rank_from_env() == 0:
            found |= environment()
            print(json.dumps(found) if arguments.json else f"{described}\n{describe(found)}")


# Each takes its options and those of jaxgpt.train; it returns what it found, and that in words.


def run_loader(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import loader

    batches = whole_number("--batches", arguments.batches)
    config = parse_args(rest, PROG)
    loader.use_cpus(whole_number("--cpus", arguments.cpus))
    found = loader.measure(config, batches)
    return found, loader.describe(found)


def run_step(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import step

    n_steps = whole_number("--steps", arguments.steps)
    config = parse_args(rest, PROG)
    found = step.measure(config, n_steps, arguments.synthetic, arguments.profile)
    return found, step.describe(found)


def run_nanogpt(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import nanogpt

    n_steps = whole_number("--steps", arguments.steps)
    n_rounds = whole_number("--rounds", arguments.rounds)
    found = nanogpt.measure(
        parse_args(rest, PROG),
        arguments.nanogpt,
        arguments.torch,
        n_steps,
        n_rounds,
        arguments.compile,
    )
    return found, nanogpt.describe(found)


def run_goals(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import goals

    found = goals.measure(rest, arguments.only, arguments.nanogpt, arguments.torch)
    return found, goals.describe(found)


def run_checkpoint(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import checkpoint

    if not names_config(rest):
        arguments.size = arguments.size or "1GB"
        rest = ["--config", "gpt2", *rest]
    size = checkpoint.bytes_of("--size", arguments.size)
    found = checkpoint.measure(parse_args(rest, PROG), size, arguments.out)
    return found, checkpoint.describe(found)


def run_sample(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import sample

    n_tokens = whole_number("--tokens", arguments.tokens)
    found = sample.measure(parse_args(rest, PROG), n_tokens)
    return found, sample.describe(found)


def run_compile(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import compile

    n_runs = whole_number("--runs", arguments.runs)
    config = parse_args(rest, PROG)
    layers = compile.layer_counts("--layers", arguments.layers, config.model.n_layer)
    found = compile.measure(config, layers, n_runs)
    return found, compile.describe(found)


def run_startup(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import startup

    n_runs = whole_number("--runs", arguments.runs)
    # What is wrong with them is said before anything starts.
    startup.refuse_without_a_first_step(parse_args(rest, PROG))
    found = startup.measure(rest, n_runs, whole_number("--processes", arguments.processes))
    return found, startup.describe(found)


def run_collectives(arguments: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], str]:
    from jaxgpt.bench import collectives

    if rest:
        raise UsageError(f"bench collectives: {rest[0]}: unknown; it takes --mesh and --json")
    found = collectives.measure(arguments.mesh)
    return found, collectives.describe(found)


RUN = {
    "loader": run_loader,
    "step": run_step,
    "nanogpt": run_nanogpt,
    "goals": run_goals,
    "checkpoint": run_checkpoint,
    "sample": run_sample,
    "compile": run_compile,
    "startup": run_startup,
    "collectives": run_collectives,
}


if __name__ == "__main__":
    main()
