"""Write text with a trained model: `python -m jaxgpt.sample --run DIR --prompt "..."`."""

import argparse
import sys

import numpy as np

from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.cluster.process_group import join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, config_from_dict, file_path, mesh_sizes
from jaxgpt.data.find_tokenizer import from_meta
from jaxgpt.data.tokenizer import continued
from jaxgpt.runtime.initialize import connect
from jaxgpt.train.run_directory import list_checkpoints

MOST = 10**6  # tokens, texts, and how far from 1 a temperature may be


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.sample", description=__doc__)
    out.add_argument("--run", type=file_path, required=True, help="run directory of a training")
    out.add_argument("--step", type=int, help="which checkpoint; default the newest")
    out.add_argument("--prompt", default="", help="text to go on from; default none")
    out.add_argument("--max-new-tokens", type=int, default=200)
    out.add_argument("--num-samples", type=int, default=1)
    out.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    out.add_argument("--top-k", type=int, default=200, help="draw from so many; 0 from all")
    out.add_argument("--seed", type=int, default=1337)
    out.add_argument("--mesh", default="1,-1,1", help="data,fsdp,tensor to load the model on")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        write(parser().parse_args(argv))


def write(arguments: argparse.Namespace) -> None:
    """Prints the samples that the command line asks for.

    Raises:
        UsageError: if the run has no such checkpoint, or an option cannot work.
    """
    if not 0 <= arguments.seed < 2**31:
        raise UsageError(f"--seed={arguments.seed}: must be at least 0 and less than 2^31")
    for option, least in (("max_new_tokens", 1), ("num_samples", 1), ("top_k", 0)):
        value = getattr(arguments, option)
        if not least <= value <= MOST:
            raise UsageError(
                f"--{option.replace('_', '-')}={value}: must be at least {least} and at most {MOST}"
            )
    heat = arguments.temperature
    if heat != 0 and not 1 / MOST <= heat <= MOST:
        raise UsageError(f"--temperature={heat}: must be 0, or between {1 / MOST} and {MOST}")
    if arguments.seed + arguments.num_samples > 2**31:
        raise UsageError(
            f"--seed={arguments.seed}: the seeds of --num-samples={arguments.num_samples} go on "
            "from it and must be less than 2^31"
        )
    steps = list_checkpoints(arguments.run)
    if not steps:
        raise UsageError(f"--run {arguments.run}: has no checkpoints; give a run directory")
    step = steps[-1] if arguments.step is None else arguments.step
    if step not in steps:
        raise UsageError(f"--step {step}: {arguments.run} has {', '.join(map(str, steps))}")
    meta = read_meta(arguments.run, step)
    config = config_from_dict(meta["config"], str(arguments.run))
    # Not on the devices that it was trained on: any kernel that runs here will do.
    config = config.replace(parallel__mesh=arguments.mesh, model__attention="auto")
    if meta["tokenizer"] is None:
        raise UsageError(f"--run {arguments.run}: its data had no meta.json with a tokenizer")
    tokenizer = from_meta(meta["tokenizer"], arguments.run)
    try:
        tokenizer.encode(arguments.prompt)
    except UsageError as error:
        raise UsageError(f"--prompt {arguments.prompt!r}: {error}") from None

    cluster = join_process_group()
    connect(cluster, mesh_sizes(config))
    import jax

    from jaxgpt.checkpoint.checkpointer import restore_params
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.generate import make_generate, prompt_window
    from jaxgpt.train.step import make_steps

    compiled = make_steps(config, make_mesh(mesh_sizes(config, jax.device_count()), cluster.hosts))
    params = restore_params(arguments.run, step, compiled.state_shapes.params)
    window, length = prompt_window(tokenizer, arguments.prompt, config.model.block_size)
    generate = jax.jit(
        make_generate(
            compiled.make_decoder,
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
        if cluster.is_main:
            sys.stdout.write(continued(tokenizer, arguments.prompt, tokens) + "\n")
            if number + 1 < arguments.num_samples:
                sys.stdout.write("---\n")


if __name__ == "__main__":
    main()
