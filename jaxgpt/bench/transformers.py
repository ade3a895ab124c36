"""Training steps beside transformers: the same weights, batches and learning rates, in turns.

Hugging Face's models run eagerly in PyTorch, in a Python of their own: neither is part of jaxgpt.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, Result
from jaxgpt.bench.nanogpt import Other, side_by_side
from jaxgpt.config import ModelConfig, parse_args
from jaxgpt.convert.families import table_of, write_config
from jaxgpt.convert.layout import slots
from jaxgpt.models.weights import weights
from jaxgpt.parallel.sharding import Params
from jaxgpt.train.run.resume import initial_model


def run(
    settings: Sequence[str], torch: str, steps: int = 15, rounds: int = 15, compile: bool = False
) -> Result:
    """Time rounds of steps of the trainer's loop and of transformers, in turns.

    Raises `UsageError` if transformers cannot be run, or has no such model.
    """
    config = parse_args(settings, PROG, initial_model)
    other = Other("transformers", "torch and transformers", "transformers", transformers_model)
    return side_by_side(config, torch, other, steps, rounds, compile)


def transformers_model(
    params: Params, model: ModelConfig
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a config.json, and our parameters by the names of transformers.

    Raises `UsageError` if there is no model with these options there.
    """
    config = write_config(model, "float32", None)
    names = [weight.name for weight in jax.tree.leaves(weights(model))]
    ours = dict(zip(names, jax.tree.leaves(params), strict=True))
    arrays = {}
    for name, slot in slots(table_of(model), model).items():
        array = ours[slot.weight.name][slot.index]
        if slot.weight.axes[0] == "vocab":
            array = array[: model.vocab_size]  # without padding
        assert array.size == math.prod(slot.shape)
        arrays[f"transformer.{name}" if model.position == "learned" else name] = slot.theirs(array)
    return config, arrays
