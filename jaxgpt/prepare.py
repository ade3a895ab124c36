"""Turn text into token files: `python -m jaxgpt.prepare shakespeare_char|text|python`."""

import argparse
import glob
import os
import signal
import sys
from pathlib import Path

from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, DataConfig, UsageError, file_path, in_words, whole_number
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
            lines = prepare(arguments, directory)
        except OSError as error:
            raise UsageError(f"--out {directory}: cannot be written ({in_words(error)})") from None
        print("\n".join([*lines, f"wrote {directory}"]))


def prepare(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """Check the arguments and write the data set; return lines that say what was written."""
    if arguments.command != "text":
        if arguments.out is not None:  # elsewhere it replaces its own data set only
            check_new(directory, "nanogpt", arguments.overwrite)
        if arguments.command == "python":
            return prepare_python(directory)
        return prepare_shakespeare_char(directory, arguments.input)
    if arguments.name in ("", ".", "..") or Path(arguments.name).name != arguments.name:
        raise UsageError(f"--name {arguments.name}: must be a name; give a folder with --out")
    share, is_megatron = arguments.val_share, arguments.format == "megatron"
    if share is not None and (is_megatron or not 0 < share < 1):
        raise UsageError(
            f"--val-share {share}: must be between 0 and 1, such as 0.1, and is not for --format "
            "megatron, which writes all as one: split it with data.val_share or Megatron's --split"
        )
    if arguments.eos is not None and arguments.tokenizer in ("char", "byte"):
        raise UsageError(
            f"--eos {arguments.eos}: is for a tokenizer.json, not {arguments.tokenizer}"
        )
    check_new(directory, arguments.format, arguments.overwrite)
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)  # of the `tokenizers` package
    return prepare_text(
        directory,
        arguments.input,
        arguments.tokenizer,
        json_key=arguments.jsonl_key,
        chat_template=arguments.chat_template,
        val_share=share,
        megatron=is_megatron,
        end_of_text=arguments.eos,
    )


def check_new(directory: Path, format_: str, overwrite: bool) -> None:
    """Raise `UsageError` if data would be lost, which may have taken hours to encode."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--out {directory}: is a file; give a folder")
    pairs = sorted(directory.glob(f"{glob.escape(directory.name)}_*_document.*"))
    names = "train.bin", "val.bin", "train.mask.bin", "val.mask.bin", "meta.json"
    folder = [directory / name for name in names]
    own, other = (pairs, folder) if format_ == "megatron" else (folder, pairs)
    for path in [*other, *own, directory / "tokenizer.json"]:
        if path.exists() and (path in other or not overwrite):
            raise UsageError(
                f"--out {directory}: {path} is there already; give another --name or --out, or "
                "--overwrite to replace a data set of the same --format"
            )


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.prepare", description=__doc__)
    commands = out.add_subparsers(dest="command", required=True)
    shakespeare = commands.add_parser("shakespeare_char", help="Tiny Shakespeare by characters")
    shakespeare.add_argument("--input", type=file_path, help="the text, in place of a download")
    text = commands.add_parser("text", help="UTF-8 text or JSON lines of your own")
    add = text.add_argument
    files = "files, or folders of them: text, a document each, or .jsonl, a document a line; or .gz"
    add("--input", type=file_path, nargs="+", action="extend", required=True, help=files)
    key = (
        "what JSON lines have their text under: KEY, also of a list of messages, or two keys "
        "PROMPT,COMPLETION; default `text`, `messages` or `prompt,completion`, as the first line "
        "has it. Of the latter two only answers count in the loss"
    )
    add("--jsonl-key", metavar="KEY", help=key)
    template = "a chat template (Jinja) that makes text of messages; default the tokenizer's own"
    add("--chat-template", type=file_path, metavar="FILE", help=template)
    tokenizers = "char (the default), byte, a tokenizer.json, or a folder with it or GPT-2's files"
    add("--tokenizer", type=lambda given: str(file_path(given)), default="char", help=tokenizers)
    add("--eos", help="token between documents; default the tokenizer's own")
    threads = "threads that encode by a tokenizer.json; default one per CPU, here %(default)s"
    add("--workers", type=whole_number(), default=len(own_cpus()), help=threads)
    share = "validation: the last part of text (default 0.1), or of JSON lines at random (0.01)"
    add("--val-share", type=float, help=share)
    formats = "train.bin and val.bin, or one .bin and .idx of Megatron-LM"
    add("--format", choices=("nanogpt", "megatron"), default="nanogpt", help=formats)
    add("--name", default="text", help="name under which data.dataset=NAME finds it")
    python = commands.add_parser("python", help="the source of Python's standard library")
    for command in (shakespeare, text, python):
        home = "folder to write; default $JAXGPT_DATA or ~/.cache/jaxgpt"
        command.add_argument("--out", type=file_path, help=home)
        command.add_argument("--overwrite", action="store_true", help="replace what is there")
    return out


if __name__ == "__main__":
    main()
