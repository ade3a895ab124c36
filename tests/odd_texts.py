"""Random texts with many places at which a tokenizer might split them wrongly."""

import random

PARTS = [
    " ", "\n", "  ", "\n\n", "\r\n", "a", "1", ".", "'s", "\t", "\u00a0", "日本", "é", " word",
]  # fmt: skip


def odd_text(draw: random.Random, n_parts: int) -> str:
    return "".join(draw.choices(PARTS, k=n_parts))
