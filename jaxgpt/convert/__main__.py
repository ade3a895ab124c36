"""Import and export weights, and convert commands: `python -m jaxgpt.convert KIND ... --out DIR`.

Imported weights are saved as the checkpoint of step 0. Start a run from them with
`train.init_from=DIR`, or generate text with `python -m jaxgpt.sample --run DIR`.
"""

import argparse
import importlib
import sys

from jaxgpt.cluster.shutdown import FAILED, job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, in_words, whole_number

# Maps each KIND to its module in this folder and its help text.
KINDS = {
    "from-hf": (
        "huggingface",
        "import a Transformers checkpoint: GPT-2, Llama, Mistral, Qwen2, Qwen3 or Gemma 3",
    ),
    "to-hf": ("huggingface", "export a run as a Hugging Face Transformers checkpoint"),
    "from-nanogpt": ("nanogpt", "import a nanoGPT ckpt.pt"),
    "to-nanogpt": ("nanogpt", "export a run as safetensors with nanoGPT's tensor names"),
    "from-megatron": ("megatron", "import a Megatron-LM or Megatron-DeepSpeed GPT checkpoint"),
    "command": (
        "command",
        "print the jaxgpt command that replaces a command line or shell script for nanoGPT, "
        "wordplay, Megatron, torchtitan, MaxText or levanter. The exit status is 1 if the command "
        "lacks arguments that change the run; a note on stderr lists them",
    ),
}


def parser() -> CommandParser:
    """Return the parser. Each argument of a KIND is a parameter of its function."""
    out = CommandParser(
        prog="python -m jaxgpt.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = out.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (_, about) in KINDS.items():
        kind = kinds.add_parser(name, help=about, description=about)
        if name == "command":
            kind.add_argument(
                "words", nargs=argparse.REMAINDER, metavar="SCRIPT_OR_LINE",
                help="a shell script, which is read but not run, or a command line",
            )  # fmt: skip
            continue
        if name.startswith("to-"):
            kind.add_argument("--run", type=file_path, required=True, help="run directory")
            step = whole_number(least=0)
            kind.add_argument("--step", type=step, help="checkpoint to export; default the newest")
            kind.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        else:
            kind.add_argument("path", type=file_path, help="file or folder to import")
        if name == "from-hf":
            kind.add_argument(
                "--block-size", type=whole_number(bits=31), metavar="N",
                help="context length in tokens, for a model with rotary positions",
            )  # fmt: skip
        if name.startswith("from-"):
            own = "; default: the tokenizer in the imported folder" * (name == "from-hf")
            kind.add_argument(
                "--tokenizer", type=file_path, metavar="PATH",
                help="the model's tokenizer: a folder of prepared data or a tokenizer.json" + own,
            )  # fmt: skip
        kind.add_argument("--out", type=file_path, required=True, metavar="DIR", help="new folder")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        options = vars(parser().parse_args(sys.argv[1:] if argv is None else argv))
        kind = options.pop("kind")
        module = importlib.import_module(f"jaxgpt.convert.{KINDS[kind][0]}")
        try:
            result = getattr(module, kind.replace("-", "_"))(**options)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""  # reads and writes lack names
            raise UsageError(f"convert: {where}{in_words(error)}") from None
        lines, left_out = result if kind == "command" else (result, [])
        print("\n".join(lines))
    if left_out:
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
