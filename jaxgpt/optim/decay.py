"""Which parameters weight decay applies to."""

from typing import Any

import jax

DECAYED = ("kernel", "embedding")  # matrices; biases and the scales of norms are not decayed


def is_decayed(params: Any) -> Any:
    """Return the tree of booleans that says which parameters decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)
