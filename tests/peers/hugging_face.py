"""Time training steps beside Hugging Face's model in PyTorch, on the same weights and batches.

    python tests/peers/hugging_face.py --torch PYTHON [--config NAME] [section.key=value …]

PYTHON needs torch and transformers.
"""

from typing import Any

from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import ModelConfig
from jaxgpt.convert.families import table_of, write_config
from jaxgpt.convert.names import Table
from side_by_side import Peer, compare, parser


def describe(model: ModelConfig) -> tuple[dict[str, Any], Table]:
    """Return the model's config.json and the names of its weights; `UsageError` if it has none."""
    prefix = "transformer." if model.position == "learned" else ""  # GPT-2's
    table = {f"{prefix}{name}": place for name, place in table_of(model).items()}
    return write_config(model, "float32", None), table


def main() -> None:
    with job_exit_handler():
        options, settings = parser(__file__, __doc__).parse_known_args()
        compare(Peer("transformers", "transformers", describe), options, settings)


if __name__ == "__main__":
    main()
