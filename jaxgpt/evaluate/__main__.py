"""Loss of a whole split, or multiple choice, of a trained model.

`python -m jaxgpt.evaluate --run DIR` predicts every token of the validation split once: nats a
token, perplexity, bits a byte. Settings such as data.path=DIR name other data than the run's.
`python -m jaxgpt.evaluate lm-eval --model jaxgpt --model_args run=DIR --tasks ...` is EleutherAI's
lm_eval, with all its options.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, is_help, whole_number
from jaxgpt.data.source import SPLITS
from jaxgpt.evaluate.encoder import encoder_of
from jaxgpt.evaluate.model import Model, Trained, find_trained, run_folder
from jaxgpt.evaluate.multiple_choice import Question, read_questions, score_questions
from jaxgpt.evaluate.report import as_json, as_table, choice_record, loss_record
from jaxgpt.evaluate.split import corpus_losses, open_split
from jaxgpt.runtime.jax_internals import failure_board

LM_EVAL = "lm-eval"
DTYPES = ("float32", "bfloat16")


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = whole_number()
    out.add_argument(
        "--run", "--out", required=True, metavar="DIR",
        help="run directory, or hf:FOLDER of a model of transformers",
    )  # fmt: skip
    step = whole_number(least=0)
    out.add_argument("--step", type=step, metavar="N", help="checkpoint; default the newest")
    out.add_argument("--split", choices=SPLITS, default="val", help="default val")
    out.add_argument("--dataset", metavar="NAME", help="a prepared data set; default the run's")
    out.add_argument(
        "--stride", type=number, metavar="N",
        help="tokens between rows; less than the default, --block-size, gives more context",
    )  # fmt: skip
    about = "tokens of a row, and the longest context; default model.block_size"
    out.add_argument("--block-size", type=whole_number(bits=31), metavar="N", help=about)
    out.add_argument(
        "--multiple-choice", type=file_path, metavar="FILE",
        help="JSON lines with question, choices, answer, or HellaSwag's, instead of a split",
    )  # fmt: skip
    about = "rows that are scored at once; never changes the result; default 16"
    out.add_argument("--batch", type=whole_number(bits=20), default=16, metavar="N", help=about)
    out.add_argument("--mesh", default="1,-1,1", help="mesh to load the model on")
    out.add_argument("--dtype", choices=DTYPES, help="of the computation; default the run's")
    out.add_argument("--json", action="store_true", help="one line of JSON")
    out.epilog = "Settings of data, section.key=value, are those of jaxgpt.train."
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler(failure_board):
        if argv[:1] == [LM_EVAL]:
            run_lm_eval(argv[1:])
            return
        if is_help(argv) and rank_from_env() > 0:
            return  # once is enough
        arguments, settings = parser().parse_known_args(argv)
        if arguments.dataset is not None:
            settings.append(f"data.dataset={arguments.dataset}")
        cluster = join_process_group()
        with run_folder(arguments.run, cluster) as folder:
            record = evaluate(folder, arguments, settings, cluster) | {"run": arguments.run}
        if cluster.is_main:
            print(as_json(record) if arguments.json else as_table(record))


def run_lm_eval(argv: list[str]) -> None:
    """Run EleutherAI's command with jaxgpt's models among its own; `UsageError` without it."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UsageError(f"{LM_EVAL}: is not installed: pip install 'jaxgpt[eval]'") from None
    from jaxgpt.evaluate.harness import run_command

    run_command(argv)


def evaluate(
    folder: Path, arguments: argparse.Namespace, settings: list[str], cluster: ProcessGroup
) -> dict[str, Any]:
    """Return what a command line asks for. All processes take part."""
    trained = cluster.run_on_all(
        find_trained, folder, arguments.step, arguments.mesh, arguments.dtype, settings,
        arguments.block_size,
    )  # fmt: skip
    if arguments.multiple_choice is not None:
        return evaluate_choices(trained, arguments, settings, cluster)
    split = cluster.run_on_all(open_split, trained, arguments.split, arguments.stride)
    n_bytes = cluster.broadcast(
        cluster.run_on_all(lambda: split.count_bytes() if cluster.is_main else None)
    )
    if cluster.is_main and split.warnings:
        print(*split.warnings, sep="\n", file=sys.stderr)
    model = Model(split.trained, arguments.batch, cluster)
    return loss_record(model, split, corpus_losses(model, split, n_bytes))


def evaluate_choices(
    trained: Trained, arguments: argparse.Namespace, settings: list[str], cluster: ProcessGroup
) -> dict[str, Any]:
    """Return the accuracies in a file of questions."""
    path = arguments.multiple_choice
    if settings or arguments.stride:
        option = settings[0] if settings else f"--stride={arguments.stride}"
        raise UsageError(f"{option}: is for the loss of a split; leave it out or --multiple-choice")

    def read() -> list[Question]:
        encoder = trained.tokenizer and encoder_of(Path(trained.where), trained.tokenizer)
        return read_questions(path, encoder, trained.block_size)

    questions = cluster.run_on_all(read)
    model = Model(trained, arguments.batch, cluster)
    found = score_questions(model, questions)
    return choice_record(model, str(path), len(questions), found)


if __name__ == "__main__":
    main()
