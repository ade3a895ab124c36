"""Generate text with a trained model: `python -m jaxgpt.sample --run DIR --prompt "..."`."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, Sampling, UsageError, file_path, in_words, whole_number
from jaxgpt.data.tokenizers import Tokenizer
from jaxgpt.evaluate.model import Model
from jaxgpt.evaluate.stop_strings import Written
from jaxgpt.evaluate.trained import find_trained, run_folder
from jaxgpt.tracking.appended_file import printable

STREAMED_AT_ONCE = 8  # tokens to generate between updates with --stream


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.sample", description=__doc__)
    run = ("--run", "--out", "--out-dir")  # --out-dir and --start are nanoGPT's names
    about = "run directory, or hf:FOLDER for a Hugging Face model"
    out.add_argument(*run, type=lambda given: str(file_path(given)), required=True, help=about)
    out.add_argument(
        "--step", type=whole_number(least=0), help="checkpoint to read; default the newest"
    )
    prompts = out.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", "--start", default="", help="text to continue, or FILE:NAME; default none"
    )
    prompts.add_argument(
        "--prompts",
        type=file_path,
        metavar="FILE",
        help="file with one prompt per line; in a .jsonl file, each line is a JSON string or an "
        "object with a prompt",
    )
    count, number = whole_number(bits=20), whole_number(least=0, bits=31)
    out.add_argument("--max-new-tokens", type=count, default=200, help="new tokens; default 200")
    out.add_argument("--num-samples", type=count, default=1, help="samples per prompt; default 1")
    out.add_argument(
        "--batch-size", type=count, default=64, help="samples to generate at once; default 64"
    )
    likeliest = "0 always takes the most likely token"
    out.add_argument("--temperature", type=float, default=0.8, help=f"{likeliest}; default 0.8")
    out.add_argument("--top-k", type=number, default=200, help="0 keeps all tokens; default 200")
    nucleus = "keep the most likely tokens whose total probability reaches this; default all"
    out.add_argument("--top-p", type=float, help=nucleus)
    relative = "keep tokens at least this many times as likely as the likeliest one; default all"
    out.add_argument("--min-p", type=float, help=relative)
    out.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this string; may be repeated",
    )
    out.add_argument("--stream", action="store_true", help="print samples as they are generated")
    about = "random seed; default 1337. Sample i of each prompt uses seed + i"
    out.add_argument("--seed", type=number, default=1337, help=about)
    out.add_argument("--mesh", default="1,-1,1", help="mesh to run the model on")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        write(parser().parse_args(argv))


def write(arguments: argparse.Namespace) -> None:
    """Generate samples. Process 0 prints them, separated by `---` lines.

    This connects the processes of the job. In a single-process job, raises `BrokenPipeError` if the
    output pipe is closed. In a job with several processes, an error ends the job.
    """
    check_options(arguments)
    with join_process_group() as cluster:
        for part in new_parts(samples(arguments, cluster)):
            if cluster.is_main:
                sys.stdout.write(printable(part))
                sys.stdout.flush()


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` if a sampling option or stop string is invalid or --seed is too large."""
    sampling(arguments).check("--")
    if "" in arguments.stop:
        raise UsageError("--stop: is empty; give the string to stop at")
    if arguments.seed + arguments.num_samples > 2**31:
        raise UsageError(
            f"--seed={arguments.seed}: must be at most {2**31 - arguments.num_samples}, because "
            f"sample i of --num-samples={arguments.num_samples} uses seed + i"
        )


def sampling(arguments: argparse.Namespace) -> Sampling:
    """Return the sampling options in the arguments, without checking them."""
    top_k = arguments.top_k or None
    return Sampling(arguments.temperature, top_k, arguments.top_p, arguments.min_p)


def read_prompts(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[str]:
    """Return the prompts to continue, by default one empty prompt.

    As in nanoGPT, `--prompt FILE:NAME` reads the prompt from the file NAME. Raises `UsageError` if
    the tokenizer cannot encode a prompt.
    """
    if arguments.prompts is not None:
        prompts = read_prompt_file(arguments.prompts)
    elif arguments.prompt.startswith("FILE:"):
        where = f"--prompt {arguments.prompt}"
        prompts = {where: read_text(Path(arguments.prompt.removeprefix("FILE:")), where)}
    else:
        prompts = {f"--prompt {arguments.prompt!r}": arguments.prompt}
    for where, prompt in prompts.items():
        try:
            tokenizer.encode(prompt)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return list(prompts.values())


def read_text(path: Path, where: str) -> str:
    """Return a file's text. Raises `UsageError` if the file cannot be read or decoded.

    The message begins with `where`.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: cannot be read ({in_words(error)})") from None


def read_prompt_file(path: Path) -> dict[str, str]:
    """Return the prompts in a file, one per non-blank line.

    The keys of the dict name the file and the line, for use in error messages. In a .jsonl file,
    each line must be a JSON string, or an object with a `prompt` string. Raises `UsageError` if a
    line is invalid, or if the file has no prompts.
    """
    prompts = {}
    for number, line in enumerate(read_text(path, f"--prompts {path}").split("\n"), 1):
        where = f"--prompts {path}, line {number}"
        if not line.strip():
            continue
        prompt = line
        if path.suffix == ".jsonl":
            try:
                prompt = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}: is not JSON ({in_words(error)})") from None
            prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(prompt, str):
            raise UsageError(f'{where}: must be a JSON string, or an object with a "prompt" string')
        prompts[where] = prompt
    if not prompts:
        raise UsageError(f"--prompts {path}: has no prompts; write one per line")
    return prompts


def samples(arguments: argparse.Namespace, cluster: ProcessGroup) -> Iterator[list[Written]]:
    """After each batch, yield all samples so far, in the order of the prompts.

    With --stream, partial samples are also yielded as they are generated. The same list object is
    yielded after each batch, with the new samples appended. All processes must exhaust the
    iterator.
    """
    with run_folder(arguments.run, cluster) as folder:
        trained = cluster.run_on_all(find_trained, folder, arguments.step, arguments.mesh)
        tokenizer = trained.known_tokenizer(f"--run {arguments.run}")
        prompts = cluster.run_on_all(read_prompts, arguments, tokenizer)
        model = Model(trained, 1, cluster)
    seeds = range(arguments.seed, arguments.seed + arguments.num_samples)
    todo = [(prompt, seed) for prompt in prompts for seed in seeds]
    done: list[Written] = []
    at_once = STREAMED_AT_ONCE if arguments.stream else None
    for first in range(0, len(todo), arguments.batch_size):
        batch, batch_seeds = zip(*todo[first : first + arguments.batch_size], strict=True)
        for texts in model.stream(
            batch,
            arguments.max_new_tokens,
            sampling(arguments),
            batch_seeds,
            arguments.stop,
            at_once,
        ):
            if arguments.stream:
                yield [*done, *texts]
        done += texts
        yield done


def new_parts(snapshots: Iterable[list[Written]]) -> Iterator[str]:
    """Convert the output of `samples` to the text to print, and yield it in parts.

    Each part is yielded as soon as its text and all text before it are final.
    """
    number, written = 0, None  # the current sample, and the part of it that has been yielded
    for texts in snapshots:
        while number < len(texts):
            text, is_done = texts[number]
            if written is None:
                yield "---\n" if number else ""
            yield text.removeprefix(written or "")
            written = text
            if not is_done:
                break
            yield "\n"
            number, written = number + 1, None


if __name__ == "__main__":
    main()
