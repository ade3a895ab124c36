"""Convert text to token files: `python -m jaxgpt.prepare shakespeare_char|text|python`."""

import argparse
import glob
import os
import signal
import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, DataConfig, UsageError, file_path, in_words, whole_number
from jaxgpt.data.dataset import dataset_directory
from jaxgpt.data.prepare.builtin import prepare_python, prepare_shakespeare_char
from jaxgpt.data.prepare.own_text import megatron_name, prepare_text
from jaxgpt.data.prepare.pool import job_workers
from jaxgpt.data.source import ALL_SPLITS, PARTS
from jaxgpt.data.tokenizers import SENTENCEPIECE, TOKENIZER_FILE


def main(argv: list[str] | None = None) -> None:
    # Exit as on Ctrl-C, so that incomplete files are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with job_exit_handler():
        arguments = parser().parse_args(argv)
        if arguments.command != "text":
            if rank_from_env() == 0:
                _run(arguments, None)
            return
        check_options(arguments)
        with job_workers(arguments.workers) as workers:
            if workers.is_main:
                _run(arguments, workers.pool)


def _run(arguments: argparse.Namespace, pool: Executor | None) -> None:
    """Write a dataset and print a summary.

    Raises `UsageError` if `prepare` raises `UsageError` or `OSError`.
    """
    name = arguments.name if arguments.command == "text" else arguments.command
    directory = arguments.out or dataset_directory(DataConfig(dataset=name))
    directory = Path(os.path.abspath(directory))  # absolute, because the path `.` has no name
    try:
        lines = prepare(arguments, directory, pool)
    except OSError as error:
        path = Path(error.filename or directory)  # reads and writes lack a name
        if directory not in (path, *path.parents) and path not in directory.parents:
            raise UsageError(f"{path}: cannot be accessed ({in_words(error)})") from None
        raise UsageError(
            f"--out {directory}: cannot be written ({in_words(error)}); give another folder"
        ) from None
    finally:
        if (parts := directory / PARTS).is_dir():
            print(f"finished files are in {parts}; run again to continue", file=sys.stderr)
    written = f"wrote {directory}"
    if arguments.command == "text" and arguments.format == "nanogpt":
        use, more = "train", ""
        if arguments.split in ("val", "test"):
            use, more = "evaluate", f"--split {arguments.split} "
        written += f"; {use} on it with {more}data.path={directory}"
    print("\n".join([*lines, written]))


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for some invalid or conflicting options of `prepare text`.

    `prepare` raises the error for the others.
    """
    if arguments.name in ("", ".", "..") or Path(arguments.name).name != arguments.name:
        raise UsageError(
            f"--name {arguments.name}: must be a name without a path; give a folder with --out"
        )
    share, split, is_megatron = arguments.val_share, arguments.split, arguments.format == "megatron"
    if share is not None and not 0 <= share < 1:
        raise UsageError(
            f"--val-share {share}: must be at least 0 and less than 1; to put all text into one "
            "split, use --split"
        )
    if share is not None and split is not None:
        raise UsageError(f"--val-share {share}: cannot be used with --split {split}; remove one")
    if is_megatron and (share or split):
        given = f"--split {split}" if split else f"--val-share {share}"
        raise UsageError(
            f"{given}: cannot be used with --format megatron; split Megatron data later with "
            "data.val_share or Megatron's --split"
        )
    if split in ("val", "test") and arguments.tokenizer == "char":
        raise UsageError(
            f"--split {split}: needs the tokenizer of the training data; give the folder of that "
            "dataset with --tokenizer FOLDER"
        )
    if arguments.eos is not None and arguments.tokenizer in ("char", "byte"):
        raise UsageError(
            f"--eos {arguments.eos}: needs a {TOKENIZER_FILE}, not {arguments.tokenizer}; remove "
            "one"
        )


def prepare(
    arguments: argparse.Namespace, directory: Path, pool: Executor | None = None
) -> list[str]:
    """Write the dataset and return the lines of a summary.

    `arguments` come from `parser()`, and `directory` is an absolute path. Without --out, a built-in
    dataset overwrites the data in `directory`. The arguments of the command `text` must have passed
    `check_options`. For `text`, the processes in `pool` help to tokenize the files. If `pool` is
    None, this process tokenizes them alone.

    Raises:
        OSError: if `directory` or a temporary file cannot be accessed or written, or if Python's
            source code cannot be read.
    """
    if arguments.command != "text":
        if arguments.out is not None:  # the default folder is reserved for this dataset
            check_new(directory, "nanogpt", arguments.overwrite)
        if arguments.command == "python":
            return prepare_python(directory)
        return prepare_shakespeare_char(directory, arguments.input)
    check_new(directory, arguments.format, arguments.overwrite, arguments.split)
    return prepare_text(
        directory,
        arguments.input,
        arguments.tokenizer,
        json_key=arguments.jsonl_key,
        chat_template=arguments.chat_template,
        val_share=arguments.val_share,
        split=arguments.split,
        megatron=arguments.format == "megatron",
        end_of_text=arguments.eos,
        pool=pool,
    )


def check_new(directory: Path, format_: str, overwrite: bool, split: str | None = None) -> None:
    """Raise `UsageError` if `directory` contains files that a dataset there could consist of.

    If `overwrite` is True, tokenizer files and data in the same format may be replaced, but data in
    the other format still raises the error. If `split` is given, other splits also raise the error,
    because writing a single split would delete them. Also raises `UsageError` if `directory` is a
    file, and `OSError` if it cannot be accessed. `format_` is "nanogpt" or "megatron".
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--out {directory}: is a file; give a folder")
    pairs = sorted(directory.glob(f"{glob.escape(megatron_name(directory))}_*_document.*"))
    folder = [directory / f"{name}{end}" for name in ALL_SPLITS for end in (".bin", ".mask.bin")]
    for path in folder if split else ():
        if path.exists() and path.name.partition(".")[0] != split:
            command = "train" if split == "train" else f"evaluate --split {split}"
            raise UsageError(
                f"--split {split}: would delete {path}; give another --name or --out, and use that "
                f"folder with jaxgpt.{command} data.path=FOLDER"
            )
    folder.append(directory / "meta.json")
    own, other = (pairs, folder) if format_ == "megatron" else (folder, pairs)
    for path in [*other, *own, directory / TOKENIZER_FILE, directory / SENTENCEPIECE]:
        if path.exists() and (path in other or not overwrite):
            raise UsageError(
                f"--out {directory}: {path} already exists; give another --name or --out, or "
                "--overwrite to replace a dataset of the same --format"
            )


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.prepare", description=__doc__)
    commands = out.add_subparsers(dest="command", required=True)
    shakespeare = _add_command(commands, "shakespeare_char", "character-level Tiny Shakespeare")
    shakespeare.add_argument("--input", type=file_path, help="local text file; default: a download")
    text = _add_command(commands, "text", "your own text, JSON lines or Parquet files")
    add = text.add_argument
    files = (
        "files or folders: UTF-8 text (one document per file), .jsonl (one per line) or .parquet "
        "(one per row; needs pyarrow); text and .jsonl may be compressed (.gz)"
    )
    add("--input", type=file_path, nargs="+", action="extend", required=True, help=files)
    key = (
        "key or column with the text or the messages, or two keys PROMPT,COMPLETION; "
        "default: `text`, `messages` or `prompt,completion`, detected from a file's first line. "
        "With messages or PROMPT,COMPLETION, only the answers count toward the loss"
    )
    add("--jsonl-key", metavar="KEY", help=key)
    template = "Jinja chat template that converts messages to text; default: the tokenizer's own"
    add("--chat-template", type=file_path, metavar="FILE", help=template)
    tokenizers = (
        "char (default), byte, a tokenizer.json, a SentencePiece tokenizer.model (needs "
        "sentencepiece), the folder of a prepared dataset, or a folder with one of these files or "
        "with GPT-2's encoder.json and vocab.bpe"
    )
    add("--tokenizer", type=lambda given: str(file_path(given)), default="char", help=tokenizers)
    add("--eos", help="name of the token between documents; default: the tokenizer's own")
    threads = "threads for encoding with a tokenizer.json; default: one per CPU"
    add("--workers", type=whole_number(), help=threads)
    share = (
        "share of the data for validation; 0 for none. If all files are text, this is the end of "
        "the text (default 0.1). Otherwise, documents are drawn at random (default 0.01), or the "
        "last 0.1 of the tokens is used if there are few documents"
    )
    add("--val-share", type=float, help=share)
    splits = "put all text into one split; only jaxgpt.evaluate uses the test split"
    add("--split", choices=ALL_SPLITS, help=splits)
    formats = "write train.bin and val.bin, or one .bin and .idx pair for Megatron-LM"
    add("--format", choices=("nanogpt", "megatron"), default="nanogpt", help=formats)
    add("--name", default="text", help="name of the dataset, for data.dataset=NAME")
    python = _add_command(commands, "python", "the source code of Python's standard library")
    for command in (shakespeare, text, python):
        home = "output folder; default: a subfolder of $JAXGPT_DATA or ~/.cache/jaxgpt"
        command.add_argument("--out", type=file_path, help=home)
        command.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    return out


def _add_command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=about, description=f"Convert {about} to token files.")


if __name__ == "__main__":
    main()
