"""Evaluate a trained model on a full split of a dataset.

`python -m jaxgpt.evaluate --run DIR` predicts every token of the validation split except the first,
and prints nats per token, perplexity and bits per byte. If the data has a loss mask, only tokens
with a weight above 0 count. To evaluate on data other than the run's, add --input FILE for text, or
settings such as data.path=DIR for token files.

`python -m jaxgpt.evaluate lm-eval --model jaxgpt --model_args run=DIR --tasks ...` runs
EleutherAI's lm_eval with all its options.
"""

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, is_help, whole_number
from jaxgpt.data.prepare.corpus import Corpus, write_nanogpt
from jaxgpt.data.prepare.files import find_files
from jaxgpt.data.prepare.json_lines import LineFormat
from jaxgpt.data.source import ALL_SPLITS
from jaxgpt.data.tokenizers import load_tokenizer
from jaxgpt.evaluate.model import Model
from jaxgpt.evaluate.split import ALL, Loss, Split, corpus_losses, open_split, sum_losses
from jaxgpt.evaluate.trained import find_trained, host_folder, run_folder
from jaxgpt.tracking.jsonl import json_line

LM_EVAL = "lm-eval"
SOURCES = ("data.dataset", "data.path", "data.blend", "data.file_list")
DTYPES = ("float32", "bfloat16")


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = whole_number()
    out.add_argument(
        "--run", "--out", "--out-dir", required=True, metavar="DIR",
        help="run directory, or hf:FOLDER for a transformers model",
    )  # fmt: skip
    step = whole_number(least=0)
    out.add_argument("--step", type=step, metavar="N", help="checkpoint; default the newest")
    about = "split to use, or all tokens; default val, or all with --input"
    out.add_argument("--split", choices=(*ALL_SPLITS, ALL), help=about)
    about = "text, JSON lines or Parquet files to tokenize with the run's tokenizer and evaluate on"
    out.add_argument("--input", type=file_path, nargs="+", action="extend", help=about)
    about = "key or column of the text, as for jaxgpt.prepare"
    out.add_argument("--jsonl-key", metavar="KEY", help=about)
    out.add_argument("--dataset", metavar="NAME", help="a prepared dataset; default the run's")
    out.add_argument(
        "--stride", type=number, metavar="N",
        help="distance between row starts; default --block-size; a smaller N gives more context",
    )  # fmt: skip
    about = "tokens per row, and thus the longest context; default model.block_size"
    out.add_argument("--block-size", type=whole_number(bits=31), metavar="N", help=about)
    about = "rows to score at once; does not change the result; default 16"
    out.add_argument("--batch", type=whole_number(bits=20), default=16, metavar="N", help=about)
    out.add_argument("--mesh", default="1,-1,1", help="mesh to run the model on")
    out.add_argument("--dtype", choices=DTYPES, help="compute dtype; default the run's")
    out.add_argument("--json", action="store_true", help="print one line of JSON")
    out.epilog = "Data settings (data.KEY=VALUE) are the same as for jaxgpt.train."
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler():
        if argv[:1] == [LM_EVAL]:
            run_lm_eval(argv[1:])
            return
        if is_help(argv) and rank_from_env() > 0:
            return  # only rank 0 prints the help
        # Remove data settings first, because --input would treat them as files.
        settings = [word for word in argv if re.match(r"data\.\w+=", word)]
        words = [word for word in argv if word not in settings]
        arguments, others = parser().parse_known_args(words)
        settings += others
        if arguments.dataset is not None:
            settings.append(f"data.dataset={arguments.dataset}")
        with join_process_group() as cluster:
            with run_folder(arguments.run, cluster) as folder:
                record = evaluate(folder, arguments, settings, cluster) | {"run": arguments.run}
            if cluster.is_main:
                print(json_line(record).rstrip() if arguments.json else as_table(record))


def run_lm_eval(argv: list[str]) -> None:
    """Run EleutherAI's lm_eval with the command-line options `argv`.

    This sets sys.argv. Raises `SystemExit` for --help or an unknown option, and `UsageError` if
    lm_eval is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UsageError(f"{LM_EVAL}: is not installed; run pip install 'jaxgpt[eval]'") from None
    from lm_eval.__main__ import cli_evaluate

    import jaxgpt.evaluate.harness  # noqa: F401

    sys.argv = ["lm-eval", *argv]  # lm_eval takes its options from sys.argv only
    cli_evaluate()


@contextlib.contextmanager
def input_folder(
    arguments: argparse.Namespace, settings: list[str], run: Path, cluster: ProcessGroup
) -> Iterator[list[str]]:
    """Yield the data settings for the evaluation: `settings`, and data.path if --input is given.

    If --input is given, data.path is a temporary folder of tokens. The first process of each host
    writes these tokens, using data.tokenizer or, if `settings` do not contain it, the tokenizer
    saved with the run. All processes must call this. Raises `UsageError` if --input is combined
    with a split other than `ALL` or with another data source, or if the run's tokenizer is needed
    but unknown.
    """
    if arguments.input is None:
        yield settings
        return
    if arguments.split not in (None, ALL):
        raise UsageError(
            f"--split {arguments.split}: cannot be used with --input, which has no splits; remove "
            "one"
        )
    for word in settings:
        if word.lstrip("-").startswith(SOURCES):
            raise UsageError(f"--input: cannot be combined with {word}; leave one of them out")

    def tokenize(folder: Path) -> None:
        trained = find_trained(run, arguments.step, settings=settings)
        given, tokenizer = trained.config.data.tokenizer, trained.tokenizer
        is_new = any(word.lstrip("-").startswith("data.tokenizer") for word in settings)
        if given is not None and (is_new or tokenizer is None):
            tokenizer = load_tokenizer(given)
        if tokenizer is None:
            raise UsageError(
                f"--input: the tokenizer of {arguments.run} is unknown; set data.tokenizer=FOLDER"
            )
        lines = LineFormat(arguments.jsonl_key, str(given or run), None)
        files, _ = find_files(arguments.input)
        corpus = Corpus(files, lines, split="test")
        source = ", ".join(path.name for path in arguments.input)
        write_nanogpt(corpus, folder, tokenizer, source)

    with host_folder("input", tokenize, cluster) as folder:
        yield [*settings, f"data.path={folder}"]
        cluster.barrier()  # other processes of this host may still be reading


def evaluate(
    folder: Path, arguments: argparse.Namespace, settings: list[str], cluster: ProcessGroup
) -> dict[str, Any]:
    """Start JAX, evaluate a checkpoint in a run directory, and return its `loss_record`.

    All processes must call this. Process 0 prints warnings to stderr. `arguments` come from
    `parser`, and `settings` are data settings such as "data.path=DIR".
    """
    with input_folder(arguments, settings, folder, cluster) as settings:
        trained = cluster.run_on_all(
            find_trained, folder, arguments.step, arguments.mesh, arguments.dtype, settings,
            arguments.block_size,
        )  # fmt: skip
        name = arguments.split or ("val" if arguments.input is None else ALL)
        split = cluster.run_on_all(open_split, trained, name, arguments.stride)
        n_bytes = cluster.run_on_main(split.count_bytes)
        if cluster.is_main and split.warnings:
            print(*split.warnings, sep="\n", file=sys.stderr)
        model = Model(split.trained, arguments.batch, cluster)
        return loss_record(model, split, corpus_losses(model, split, n_bytes))


def loss_record(model: Model, split: Split, losses: dict[str, Loss]) -> dict[str, Any]:
    """Return the evaluation settings and the losses as a dict.

    The top level has the loss of the whole split in nats per token, its perplexity, its bits per
    byte, and the numbers of tokens and bytes. `corpora` maps each corpus name to the same five
    values. A value may be None, NaN or infinite; see `Loss`.
    """

    def figures(loss: Loss) -> dict[str, Any]:
        return {
            "loss": loss.mean,
            "perplexity": loss.perplexity,
            "bits_per_byte": loss.bits_per_byte,
            "tokens": loss.n_tokens,
            "bytes": loss.n_bytes,
        }

    return {
        "run": model.trained.where,
        "step": model.trained.step,
        "dtype": model.config.train.dtype,
        "mesh": str(model.mesh_shape),
        "batch": model.batch_size,
        "split": split.name,
        "block_size": model.block_size,
        "stride": split.windows[0].stride,
        **figures(sum_losses(list(losses.values()))),
        "corpora": {name: figures(loss) for name, loss in losses.items()},
    }


def as_table(record: dict[str, Any]) -> str:
    """Return a `loss_record` as text: a heading, and a table with one row per corpus and a total.

    If there is only one corpus, the table has only the total. If the number of bytes is unknown,
    the text ends with a note.
    """
    lines = [
        f"{record['run']}, step {record['step']}: split {record['split']}, rows of "
        f"{record['block_size']} tokens, {record['stride']} apart",
        f"{'corpus':<20}{'tokens':>16}{'nats/token':>14}{'perplexity':>14}{'bits/byte':>12}",
    ]
    corpora = record["corpora"] if len(record["corpora"]) > 1 else {}
    for name, found in [*corpora.items(), ("all", record)]:
        bits = "-" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.5f}"
        size = f"{found['perplexity']:,.4f}" if found["perplexity"] != math.inf else "inf"
        numbers = f"{found['tokens']:>16,}{found['loss']:>14.6f}{size:>14}{bits:>12}"
        lines.append(f"{name:<20}{numbers}")
    if record["bytes"] is None:
        lines.append("bits/byte: the tokenizer is unknown; set data.tokenizer=FOLDER")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
