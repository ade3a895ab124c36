"""Turn text into token files: `python -m jaxgpt.prepare shakespeare_char|text|python`."""

import argparse
import glob
import os
import signal
import sys
from pathlib import Path

from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, DataConfig, UsageError, file_path
from jaxgpt.data.dataset import dataset_directory
from jaxgpt.data.prepare.builtin import prepare_python, prepare_shakespeare_char, prepare_text


def main(argv: list[str] | None = None) -> None:
    # As on Ctrl-C: what is half written is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with job_exit_handler():
        arguments = parser().parse_args(argv)
        name = arguments.name if arguments.command == "text" else arguments.command
        directory = arguments.out or dataset_directory(DataConfig(dataset=name))
        directory = Path(os.path.abspath(directory))  # whose name is its own, also of `.`
        try:
            if arguments.command == "text":
                _check(arguments)
            _check_new(arguments, directory)
            if arguments.command == "shakespeare_char":
                lines = prepare_shakespeare_char(directory, arguments.input)
            elif arguments.command == "text":
                lines = prepare_text(
                    directory,
                    arguments.input,
                    arguments.tokenizer,
                    json_key=arguments.jsonl_key,
                    workers=arguments.workers,
                    val_share=arguments.val_share,
                    megatron=arguments.format == "megatron",
                    end_of_text=arguments.eos,
                )
            else:
                lines = prepare_python(directory)
        except OSError as error:
            raise UsageError(f"--out {directory}: cannot be written ({error})") from None
        print("\n".join([*lines, f"wrote {directory}"]))


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.prepare", description=__doc__)
    commands = out.add_subparsers(dest="command", required=True)
    shakespeare = commands.add_parser("shakespeare_char", help="Tiny Shakespeare by characters")
    shakespeare.add_argument("--input", type=file_path, help="the text, in place of a download")
    text = commands.add_parser("text", help="UTF-8 text or JSON lines of your own")
    text.add_argument(
        "--input",
        type=file_path,
        nargs="+",
        action="extend",
        required=True,
        help="files, in this order, or folders of them: text, a document each, or .jsonl, a "
        "document a line; also .gz, and .zst from Python 3.14 on",
    )
    text.add_argument("--jsonl-key", default="text", help="what a JSON line calls its text")
    text.add_argument(
        "--tokenizer",
        type=lambda given: str(file_path(given)),
        default="char",
        help="char, byte, a tokenizer.json, or a folder with it or with GPT-2's encoder.json and "
        "vocab.bpe; default char",
    )
    text.add_argument("--eos", help="token between documents; default the tokenizer's own")
    text.add_argument(
        "--workers",
        type=int,
        default=len(own_cpus()),
        help="processes that encode; default one per CPU, here %(default)s",
    )
    text.add_argument(
        "--val-share",
        type=float,
        help="part for validation: the last characters of text (default 0.1), or JSON lines drawn "
        "by a hash of their text (default 0.01)",
    )
    text.add_argument(
        "--format",
        choices=("nanogpt", "megatron"),
        default="nanogpt",
        help="train.bin and val.bin, or one .bin and .idx of Megatron-LM, for it to part",
    )
    text.add_argument("--name", default="text", help="what data.dataset=NAME will find")
    python = commands.add_parser("python", help="the source of Python's standard library")
    for command in (shakespeare, text, python):
        command.add_argument(
            "--out", type=file_path, help="folder to write; default $JAXGPT_DATA or ~/.cache/jaxgpt"
        )
        command.add_argument(
            "--overwrite", action="store_true", help="replace the data set that is there"
        )
    for command in (shakespeare, python):
        command.set_defaults(format="nanogpt")
    return out


def _check(arguments: argparse.Namespace) -> None:
    if arguments.name in ("", ".", "..") or Path(arguments.name).name != arguments.name:
        raise UsageError(f"--name {arguments.name}: must be a name; give a folder with --out")
    if arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: must be at least 1")
    if arguments.val_share is not None and not 0 < arguments.val_share < 1:
        raise UsageError(f"--val-share {arguments.val_share}: must be between 0 and 1, such as 0.1")
    if arguments.val_share is not None and arguments.format == "megatron":
        raise UsageError(
            f"--val-share {arguments.val_share}: --format megatron writes all as one; part it with "
            "data.val_share, or Megatron's --split"
        )
    if arguments.eos is not None and arguments.tokenizer in ("char", "byte"):
        raise UsageError(
            f"--eos {arguments.eos}: is for a tokenizer.json, not {arguments.tokenizer}"
        )


def _check_new(arguments: argparse.Namespace, directory: Path) -> None:
    """Check that no data would be lost, which may have taken hours to encode.

    Raises:
        UsageError: if files are there, and are not to be replaced by those of the same format.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--out {directory}: is a file; give a folder")
    if arguments.command != "text" and arguments.out is None:
        return  # what this command has made
    option = f"--name {arguments.name}" if arguments.out is None else f"--out {directory}"
    name = glob.escape(directory.name)
    pairs = [f"{name}_*_document.bin", f"{name}_*_document.idx"]
    patterns = {"nanogpt": ["train.bin", "val.bin", "meta.json"], "megatron": pairs}
    there = {
        format_: [path for pattern in files for path in directory.glob(pattern)]
        for format_, files in patterns.items()
    }
    for format_, files in there.items():
        if files and format_ != arguments.format:
            raise UsageError(
                f"{option}: {files[0]} is of a data set in another format, --format {format_}; "
                "give another name or folder"
            )
    files = [*there[arguments.format], *directory.glob("tokenizer.json")]
    if files and not arguments.overwrite:
        raise UsageError(
            f"{option}: {files[0]} is there already; give another name or folder, or --overwrite "
            "to replace the data set"
        )


if __name__ == "__main__":
    main()
