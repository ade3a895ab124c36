"""Write text with a trained model: `python -m jaxgpt.sample --run DIR --prompt "..."`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxgpt.checkpoint.metadata import choose_checkpoint, read_meta
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import (
    CommandParser,
    Config,
    UsageError,
    config_from_dict,
    file_path,
    in_words,
    mesh_shape,
    whole_number,
)
from jaxgpt.data.tokenizers import Tokenizer, continue_prompt, tokenizer_from_meta
from jaxgpt.runtime.initialize import initialize_jax

MOST = 10**6  # how far from 1 a temperature may be


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.sample", description=__doc__)
    run = ("--run", "--out", "--out-dir")  # the last is nanoGPT's, as --start
    out.add_argument(*run, type=file_path, required=True, help="run directory")
    out.add_argument(
        "--step", type=whole_number(least=0), help="checkpoint to read; default the newest"
    )
    prompt, likeliest = "text to continue, or FILE:NAME for a file's", "0 takes the likeliest token"
    out.add_argument("--prompt", "--start", default="", help=f"{prompt}; default none")
    count, number = whole_number(bits=20), whole_number(least=0, bits=31)
    out.add_argument("--max-new-tokens", type=count, default=200, help="default 200")
    out.add_argument("--num-samples", type=count, default=1, help="texts to write; default 1")
    out.add_argument("--temperature", type=float, default=0.8, help=f"{likeliest}; default 0.8")
    out.add_argument("--top-k", type=number, default=200, help="0 draws from all; default 200")
    out.add_argument("--seed", type=number, default=1337, help="of the draws; default 1337")
    out.add_argument("--mesh", default="1,-1,1", help="mesh to load the model on")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        write(parser().parse_args(argv))


def write(arguments: argparse.Namespace) -> None:
    """Print the samples that a command line asks for."""
    check_options(arguments)
    config, step, tokenizer = open_run(arguments)
    prompt = read_prompt(arguments.prompt, tokenizer)
    with join_process_group() as cluster:
        for number, text in enumerate(samples(config, step, tokenizer, prompt, arguments, cluster)):
            if cluster.is_main:
                sys.stdout.write("---\n" * (number > 0) + text + "\n")


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` if a number cannot work."""
    temperature = arguments.temperature
    if temperature != 0 and not 1 / MOST <= temperature <= MOST:
        raise UsageError(
            f"--temperature={temperature}: must be 0, or between {1 / MOST} and {MOST}"
        )
    if arguments.seed + arguments.num_samples > 2**31:
        raise UsageError(
            f"--seed={arguments.seed}: the seeds of --num-samples={arguments.num_samples} go on "
            "from it and must be less than 2^31"
        )


def open_run(arguments: argparse.Namespace) -> tuple[Config, int, Tokenizer]:
    """Return the configuration of a run, the step of the checkpoint to read, and the tokenizer."""
    run = arguments.run
    step = choose_checkpoint(run, arguments.step)
    meta = read_meta(run, step)
    if meta["tokenizer"] is None:
        raise UsageError(f"--run {run}: has no tokenizer; its data or weights came without one")
    config = config_from_dict(meta["config"], str(run))
    # The devices are not those of the training: any attention kernel that runs here will do.
    config = config.replace(parallel__mesh=arguments.mesh, model__attention="auto")
    return config, step, tokenizer_from_meta(meta["tokenizer"], run)


def read_prompt(given: str, tokenizer: Tokenizer) -> str:
    """Return the prompt, read from a file where it is `FILE:NAME`, as for nanoGPT."""
    prompt = given
    if given.startswith("FILE:"):
        try:
            prompt = Path(given.removeprefix("FILE:")).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt {given}: cannot be read ({in_words(error)})") from None
    try:
        tokenizer.encode(prompt)
    except UsageError as error:
        raise UsageError(f"--prompt {given!r}: {error}") from None
    return prompt


def samples(
    config: Config,
    step: int,
    tokenizer: Tokenizer,
    prompt: str,
    arguments: argparse.Namespace,
    cluster: ProcessGroup,
) -> Iterator[str]:
    """Yield texts, each with its prompt; all processes take part in each."""
    initialize_jax(cluster, mesh_shape(config))
    import jax

    from jaxgpt.checkpoint.checkpointer import restore_params
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.evaluate import make_generate, prompt_window
    from jaxgpt.train.functions import make_steps

    compiled = make_steps(config, make_mesh(mesh_shape(config, jax.device_count()), cluster.hosts))
    params = restore_params(arguments.run, step, compiled.state_shapes.params)
    window, length = prompt_window(tokenizer, prompt, config.model.block_size)
    generate = jax.jit(
        make_generate(
            compiled.make_decoder,
            config.model.n_positions,
            tokenizer.vocab_size,
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.top_k or None,
        ),
        out_shardings=compiled.replicated,
    )
    for number in range(arguments.num_samples):
        seed = np.int32(arguments.seed + number)
        tokens = np.asarray(generate(params, window, np.int32(length), seed)).tolist()
        yield continue_prompt(tokenizer, prompt, tokens)


if __name__ == "__main__":
    main()
