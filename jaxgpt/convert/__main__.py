"""Weights from and to other programs: `python -m jaxgpt.convert KIND ... --out DIR`.

What comes from elsewhere becomes a checkpoint of step 0: `train.init_from=DIR` starts a run from
it, and `python -m jaxgpt.sample --run DIR` writes text with it.
"""

import argparse
import importlib
import sys

from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, whole_number

# KIND -> (module of this room, what --help says)
KINDS = {
    "from-hf": ("huggingface", "a folder of transformers: GPT-2, Llama, Mistral, Qwen2, Qwen3"),
    "to-hf": ("huggingface", "a folder that transformers reads, from a run"),
    "from-nanogpt": ("nanogpt", "nanoGPT's ckpt.pt"),
    "to-nanogpt": ("nanogpt", "safetensors by nanoGPT's names, and model_args.json, from a run"),
    "from-megatron": ("megatron", "GPT checkpoints of Megatron-LM and Megatron-DeepSpeed"),
}


def parser() -> CommandParser:
    """Return the parser; a kind's function has its options as arguments."""
    out = CommandParser(
        prog="python -m jaxgpt.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = out.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (_, about) in KINDS.items():
        kind = kinds.add_parser(name, help=about, description=about)
        if name.startswith("to-"):
            kind.add_argument("--run", type=file_path, required=True, help="run directory")
            step = whole_number(least=0)
            kind.add_argument("--step", type=step, help="checkpoint to take; default the newest")
            kind.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        else:
            kind.add_argument("path", type=file_path, help="what to read")
        if name == "from-hf":
            kind.add_argument(
                "--block-size", type=whole_number(bits=31), metavar="N",
                help="context length to keep, of models with rotary positions",
            )  # fmt: skip
        if name.startswith("from-"):
            own = "; default the folder's own" * (name == "from-hf")
            kind.add_argument(
                "--tokenizer", type=file_path, metavar="PATH",
                help="of its tokens: a folder of prepared data, or a tokenizer.json" + own,
            )  # fmt: skip
        kind.add_argument("--out", type=file_path, required=True, metavar="DIR", help="to make")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        options = vars(parser().parse_args(sys.argv[1:] if argv is None else argv))
        kind = options.pop("kind")
        module = importlib.import_module(f"jaxgpt.convert.{KINDS[kind][0]}")
        try:
            lines = getattr(module, kind.replace("-", "_"))(**options)
        except OSError as error:
            raise UsageError(f"convert: {error.filename}: {error.strerror}") from None
        print("\n".join(lines))


if __name__ == "__main__":
    main()
