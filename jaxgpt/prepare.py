"""Turn text into token files: `python -m jaxgpt.prepare shakespeare_char|text|python`."""

import argparse
from pathlib import Path

from jaxgpt.config import DataConfig, UsageError
from jaxgpt.data.corpora import prepare_python, prepare_shakespeare_char, prepare_text
from jaxgpt.data.sources import dataset_directory
from jaxgpt.distributed.exits import exits_together


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxgpt.prepare", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shakespeare = commands.add_parser("shakespeare_char", help="Tiny Shakespeare by characters")
    shakespeare.add_argument("--input", type=Path, help="the text, in place of a download")
    text = commands.add_parser("text", help="UTF-8 text files of your own")
    text.add_argument("--input", type=Path, nargs="+", required=True, help="files, in this order")
    text.add_argument("--tokenizer", choices=("char", "byte"), default="char")
    text.add_argument("--name", default="text", help="what data.dataset=NAME will find")
    python = commands.add_parser("python", help="the source of Python's standard library")
    for command in (shakespeare, text, python):
        command.add_argument(
            "--out", type=Path, help="folder to write; default $JAXGPT_DATA or ~/.cache/jaxgpt"
        )
    arguments = parser.parse_args()
    with exits_together():
        name = arguments.name if arguments.command == "text" else arguments.command
        directory = arguments.out or dataset_directory(DataConfig(dataset=name))
        try:
            if arguments.command == "shakespeare_char":
                lines = prepare_shakespeare_char(directory, arguments.input)
            elif arguments.command == "text":
                lines = prepare_text(directory, arguments.input, arguments.tokenizer)
            else:
                lines = prepare_python(directory)
        except OSError as error:
            raise UsageError(f"--out {directory}: cannot be written ({error})") from None
        print("\n".join([*lines, f"wrote {directory}"]))


if __name__ == "__main__":
    main()
