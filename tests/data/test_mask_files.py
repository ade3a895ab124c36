"""Loss masks on disk are read with the tokens, checked, fingerprinted and blended."""

import json

import numpy as np
import pytest

from jaxgpt.config import UsageError, load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader

N = 5000


def write(folder, mask=True, **meta):
    """Random tokens, and a mask that depends on each token's position."""
    folder.mkdir(exist_ok=True)
    for seed, split in enumerate(("train", "val")):
        tokens = np.random.default_rng(seed).integers(97, size=N).astype(np.uint16)
        tokens.tofile(folder / f"{split}.bin")
        if mask:
            mask_of(np.arange(N)).tofile(folder / f"{split}.mask.bin")
    if meta:
        meta = {"dtype": "uint16", "vocab_size": 97, "tokenizer": {"type": "byte"}} | meta
        (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def mask_of(numbers):
    return (numbers % 7 < 3).astype(np.uint8)


def config_of(*settings):
    return load_config(
        "tiny", "model.vocab_size=97", "model.block_size=64", "train.batch_size=16", *settings
    )


def opened(*settings):
    config = config_of(*settings)
    return open_dataset(config.data, config.model), config


def test_rows_have_the_weights_of_their_tokens(tmp_path):
    dataset, config = opened(f"data.path={write(tmp_path / 'd')}")
    loader = Loader.for_training(dataset, config)
    assert loader.has_masks and "loss mask: " in "\n".join(dataset.describe())
    tokens = np.fromfile(tmp_path / "d" / "train.bin", np.uint16)
    for step in (1, 12345):
        weights = loader.read_weights(step, range(3, 16))
        assert weights.dtype == np.uint8 and weights.shape == (13, 65)
        for row, found in zip(range(3, 16), weights, strict=True):
            offset = loader.row_location(step, row).offset
            assert (found == mask_of(offset + np.arange(65))).all()
            assert (loader.read(step, range(row, row + 1)) == tokens[offset : offset + 65]).all()


def test_the_end_of_a_lone_file_keeps_its_mask(tmp_path):
    dataset, _ = opened(f"data.path={write(tmp_path) / 'train.bin'}", "data.val_share=0.1")
    val = dataset.sources[0].tokens["val"]
    assert val.first == N * 9 // 10
    assert (val.read_weights(3, 50) == mask_of(val.first + 3 + np.arange(50))).all()


def test_all_tokens_of_a_source_without_a_mask_count(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", mask=False)
    lines = f"1 {tmp_path / 'a'}", f"1 {tmp_path / 'b'}"
    dataset, config = opened("--data.blend", *lines)
    loader = Loader.for_training(dataset, config)
    weights = loader.read_weights(5, range(16))
    for row, found in enumerate(weights):
        place = loader.row_location(5, row)
        expected = mask_of(place.offset + np.arange(65)) if place.source == 0 else np.ones(65)
        assert (found == expected).all()
    assert not Loader.for_training(*opened("--data.blend", lines[1])).has_masks


def test_meta_json_says_whether_there_is_a_mask(tmp_path):
    folder = write(tmp_path / "d", tokens={"train": N, "val": N})
    with pytest.raises(UsageError, match=r"train.mask.bin: meta.json does not list .*; add"):
        opened(f"data.path={folder}")
    write(folder, targets={"train": 1234, "val": 1})
    dataset, _ = opened(f"data.path={folder}")
    assert (
        dataset.has_masks
        and "in 1 of 1 sources; 1,234 of their 5,000 tokens count as targets"
        in "\n".join(dataset.describe())
    )
    (folder / "val.bin").unlink()  # the end of train.bin becomes the validation split
    text = "\n".join(opened(f"data.path={folder}", "data.val_share=0.1")[0].describe())
    assert "loss mask: in 1 of 1 sources" in text and "1,234" not in text
    write(folder, targets={"train": 1234, "val": 1})
    (folder / "val.mask.bin").unlink()
    with pytest.raises(UsageError, match=r"data.path=.*: .*val.mask.bin is missing; copy it"):
        opened(f"data.path={folder}")


def test_a_mask_that_does_not_fit_its_tokens_is_refused(tmp_path):
    folder = write(tmp_path / "d")
    np.ones(N - 1, np.uint8).tofile(folder / "train.mask.bin")
    with pytest.raises(
        UsageError, match=r"data.path=.*train.mask.bin has 4999 bytes, but train.bin has 5000 tok"
    ):
        opened(f"data.path={folder}")
    mask = np.ones(N, np.uint8)
    mask[4321] = ord("1")
    mask.tofile(folder / "train.mask.bin")
    with pytest.raises(UsageError, match=r"train.mask.bin: byte 4321 is 49, but must be 1 for"):
        opened(f"data.path={folder}")[0].verify()


def test_the_fingerprint_covers_the_mask(tmp_path):
    def fingerprint(folder):
        return opened(f"data.path={folder}")[0].fingerprints[0][1]

    folder = write(tmp_path / "d")
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    mask = mask_of(np.arange(N))
    mask[17] ^= 1
    mask.tofile(folder / "val.mask.bin")
    assert fingerprint(folder) != first
    for split in ("train", "val"):
        np.ones(N, np.uint8).tofile(folder / f"{split}.mask.bin")
    assert fingerprint(folder) != fingerprint(write(tmp_path / "bare", mask=False))
