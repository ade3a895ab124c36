"""Generate text with a trained model: `python -m jaxgpt.sample --run DIR --prompt "..."`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, in_words, whole_number
from jaxgpt.data.tokenizers import Tokenizer
from jaxgpt.evaluate.model import Model, check_temperature, find_trained, run_folder
from jaxgpt.tracking.appended_file import printable


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.sample", description=__doc__)
    run = ("--run", "--out", "--out-dir")  # --out-dir and --start are nanoGPT's names
    about = "run directory, or hf:FOLDER for a transformers model"
    out.add_argument(*run, type=lambda given: str(file_path(given)), required=True, help=about)
    out.add_argument(
        "--step", type=whole_number(least=0), help="checkpoint to read; default the newest"
    )
    prompt, likeliest = "text to continue, or FILE:NAME", "0 always takes the most likely token"
    out.add_argument("--prompt", "--start", default="", help=f"{prompt}; default none")
    count, number = whole_number(bits=20), whole_number(least=0, bits=31)
    out.add_argument("--max-new-tokens", type=count, default=200, help="new tokens; default 200")
    out.add_argument("--num-samples", type=count, default=1, help="number of texts; default 1")
    out.add_argument("--temperature", type=float, default=0.8, help=f"{likeliest}; default 0.8")
    out.add_argument("--top-k", type=number, default=200, help="0 allows all tokens; default 200")
    out.add_argument("--seed", type=number, default=1337, help="random seed; default 1337")
    out.add_argument("--mesh", default="1,-1,1", help="mesh to run the model on")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        write(parser().parse_args(argv))


def write(arguments: argparse.Namespace) -> None:
    """Generate samples, and print them on process 0, separated by --- lines.

    Connects the processes of the job. Raises `UsageError` as `check_options` and `samples` do.
    """
    check_options(arguments)
    with join_process_group() as cluster:
        for number, text in enumerate(samples(arguments, cluster)):
            if cluster.is_main:
                sys.stdout.write("---\n" * (number > 0) + printable(text) + "\n")


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` if the temperature or the seed is out of range."""
    check_temperature(arguments.temperature, "--temperature")
    if arguments.seed + arguments.num_samples > 2**31:
        raise UsageError(
            f"--seed={arguments.seed}: must be at most {2**31 - arguments.num_samples}, because "
            f"sample i of --num-samples={arguments.num_samples} uses seed + i"
        )


def read_prompt(given: str, tokenizer: Tokenizer) -> str:
    """Return the prompt. As in nanoGPT, `FILE:NAME` reads it from a file.

    Raises `UsageError` if the file cannot be read or the tokenizer cannot encode the prompt.
    """
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


def samples(arguments: argparse.Namespace, cluster: ProcessGroup) -> Iterator[str]:
    """Yield generated texts, each preceded by its prompt.

    All processes must iterate over all texts. Raises `UsageError` if the run, its tokenizer, the
    mesh or the prompt cannot be used.
    """
    with run_folder(arguments.run, cluster) as folder:
        trained = cluster.run_on_all(find_trained, folder, arguments.step, arguments.mesh)
        tokenizer = trained.tokenizer
        if tokenizer is None:
            raise UsageError(
                f"--run {arguments.run}: has no tokenizer; set data.tokenizer in training, or "
                "import the weights with --tokenizer"
            )
        prompt = cluster.run_on_all(read_prompt, arguments.prompt, tokenizer)
        model = Model(trained, 1, cluster)
    for number in range(arguments.num_samples):
        yield model.generate(
            prompt,
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.top_k or None,
            arguments.seed + number,
        )


if __name__ == "__main__":
    main()
