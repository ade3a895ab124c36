"""Corpora in every data format, whose tokens reveal their corpus and position."""

import json

import numpy as np

from jaxgpt.data.prepare.writer import megatron_writer

KINDS = ("folder", "flat", "indexed")


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
            with megatron_writer(path, np.uint16) as add:
                for first in range(0, size, 250):
                    add(tokens[first : first + 250])
        suffix = ".bin" if kind == "flat" else ""
        lines.append(f"{weight} {path}{suffix} name{c}")
    return lines
