"""Time training steps beside nanoGPT's, on the same weights and batches.

python tests/peers/nanogpt.py --repo CLONE --torch PYTHON [--config NAME] [section.key=value …]
"""

from typing import Any

from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import ModelConfig, UsageError, file_path, is_changed
from jaxgpt.convert.names import NANOGPT, Table
from side_by_side import Peer, compare, parser

OPTIONS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
GPT2_VOCABULARY, PADDED = 50257, 50304  # nanoGPT pads GPT-2's vocabulary for speed


def describe(model: ModelConfig) -> tuple[dict[str, Any], Table]:
    """Return the arguments of nanoGPT's GPTConfig, and the names of its weights."""
    for key in sorted(vars(model).keys() - {*OPTIONS, "vocab_size", "attention"}):
        if is_changed(model, key):
            raise UsageError(f"model.{key}={getattr(model, key)}: nanoGPT has no such model")
    vocab_size = PADDED if model.vocab_size == GPT2_VOCABULARY else model.vocab_size
    return {key: getattr(model, key) for key in OPTIONS} | {"vocab_size": vocab_size}, NANOGPT


def main() -> None:
    command = parser(__file__, __doc__)
    command.add_argument("--repo", type=file_path, required=True, help="a clone of nanoGPT")
    with job_exit_handler():
        options, settings = command.parse_known_args()
        if not (options.repo / "model.py").is_file():
            raise UsageError(f"--repo={options.repo}: has no model.py; give a clone of nanoGPT")
        compare(Peer("nanoGPT", str(options.repo.absolute()), describe), options, settings)


if __name__ == "__main__":
    main()
