"""Corpora in every data format, whose tokens reveal their corpus and position."""

import json
from pathlib import Path

import numpy as np

from jaxgpt.data.prepare.writer import write_index

KINDS = ("folder", "flat", "indexed")


def write_pair(prefix, documents, dtype=np.uint16):
    """Write PREFIX.bin and PREFIX.idx from the token IDs of each document."""
    np.concatenate(documents).astype(dtype).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), np.dtype(dtype), np.array([len(ids) for ids in documents]))


def write_corpora(directory, n_tokens=(5000, 3001, 4000, 2500, 1999), vocab_size=97):
    """Write five corpora and return the lines of a file list.

    Token i of corpus c is (31 i + c) % `vocab_size`.
    """
    lines = []
    for c, (weight, size) in enumerate(
        zip(("0.5", "0.25", "0.15", "0.07", "0.03"), n_tokens, strict=True)
    ):
        tokens = ((31 * np.arange(size) + c) % vocab_size).astype(np.uint16)
        path = directory / f"corpus{c}"
        kind = KINDS[c % 3]
        if kind == "folder":
            path.mkdir()
            tokens.tofile(path / "train.bin")
            tokens[:700].tofile(path / "val.bin")
            meta = {"dtype": "uint16", "vocab_size": vocab_size, "tokenizer": {"type": "byte"}}
            (path / "meta.json").write_text(json.dumps(meta))
        elif kind == "flat":
            tokens.tofile(f"{path}.bin")
        else:
            write_pair(path, [tokens[first : first + 250] for first in range(0, size, 250)])
        suffix = ".bin" if kind == "flat" else ""
        lines.append(f"{weight} {path}{suffix} name{c}")
    return lines
