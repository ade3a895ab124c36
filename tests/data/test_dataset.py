import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.config import DataConfig, UsageError, load_config
from jaxgpt.data.dataset import (
    dataset_directory,
    open_dataset,
    vocabulary_size,
    with_vocabulary,
)
from jaxgpt.data.prepare.builtin import SHAKESPEARE_SHA256, prepare_shakespeare_char
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.prepare.writer import write_dataset
from jaxgpt.data.tokenizers import ByteTokenizer

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


@pytest.fixture
def prepared(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    prepare_text(tmp_path / "data", [source], "char")
    return tmp_path / "data"


def opened(directory, *overrides):
    config = load_config("shakespeare_char_cpu", f"data.path={directory}", *overrides)
    dataset = open_dataset(config.data, config.model)
    dataset.verify()
    return dataset


def tokens_of(dataset, split):
    (source,) = dataset.sources
    return source.tokens[split].read(0, source.tokens[split].size)


def test_what_was_prepared_is_what_is_read(prepared):
    dataset = opened(prepared)
    n = int(0.9 * len(TEXT))
    assert dataset.tokenizer.decode(tokens_of(dataset, "train").tolist()) == TEXT[:n]
    assert dataset.tokenizer.decode(tokens_of(dataset, "val").tolist()) == TEXT[n:]
    assert dataset.vocab_size == len(set(TEXT))


def test_documents_end_with_the_tokenizers_token_or_the_one_given(tmp_path):
    tokens = {"train": np.arange(200), "val": np.arange(70)}
    write_dataset(tmp_path / "bytes", tokens, ByteTokenizer(), "test")
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "chars", [tmp_path / "text.txt"], "char")

    def found(folder, *settings):
        config = load_config("shakespeare_char_cpu", f"data.path={tmp_path / folder}", *settings)
        return with_vocabulary(config, open_dataset(config.data, config.model)).document_end

    assert found("bytes") is None
    assert found("bytes", "data.document_mask=True") == 0
    assert found("chars", "data.document_mask=True", "data.end_of_text=2") == 2
    with pytest.raises(UsageError, match="data.document_mask=True: .*its ID with data.end_of_te"):
        found("chars", "data.document_mask=True")
    with pytest.raises(UsageError, match="data.end_of_text=99: must be less than .*vocab_size=28"):
        found("chars", "data.document_mask=True", "data.end_of_text=99")


def test_nanogpts_files_are_read_once_the_vocabulary_is_given(tmp_path):
    for split in ("train", "val"):
        (np.arange(1000) % 50).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    with pytest.raises(UsageError, match="model.vocab_size=N"):
        opened(tmp_path)
    assert opened(tmp_path, "model.vocab_size=50").vocab_size == 50


def test_uint32_tokens_are_not_read_as_uint16_without_a_meta_json(tmp_path):
    tokens = np.arange(128_256 - 1000, 128_256, dtype=np.uint32)
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")

    def trained_on(path, *settings):
        config = load_config(
            "shakespeare_char_cpu", f"data.path={path}", "data.val_share=0.2", *settings
        )
        dataset = open_dataset(config.data, config.model)
        with_vocabulary(config, dataset)
        return tokens_of(dataset, "train")

    for path in (tmp_path, tmp_path / "train.bin"):
        with pytest.raises(UsageError, match=r"model.vocab_size=128256: .* has no meta.json, so "):
            trained_on(path, "model.vocab_size=128256")
    # uint16 tokens may have a larger vocabulary than they use.
    small = tmp_path / "small"
    small.mkdir()
    for split in ("train", "val"):
        np.arange(1000, dtype=np.uint16).tofile(small / f"{split}.bin")
    assert trained_on(small, "model.vocab_size=128256").size == 1000
    content = b"{}"  # the meta.json in jaxgpt/data/DETAILS.md
    (tmp_path / "tokenizer.json").write_bytes(content)
    facts = {"file": "tokenizer.json", "sha256": hashlib.sha256(content).hexdigest()}
    facts |= {"type": "huggingface", "vocab_size": 128_256, "end_of_text": 128_001}
    meta = {"dtype": "uint32", "vocab_size": 128_256, "tokenizer": facts}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert (trained_on(tmp_path) == tokens).all()


def test_large_vocabularies_take_uint32(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 100_000

    tokens = {"train": np.arange(99_900, 100_000), "val": np.arange(70)}
    write_dataset(tmp_path / "d", tokens, Large(), "test")
    assert json.loads((tmp_path / "d" / "meta.json").read_text())["dtype"] == "uint32"
    assert tokens_of(opened(tmp_path / "d"), "train")[-1] == 99_999


def rewrite(directory, change):
    tokens = np.fromfile(directory / "train.bin", np.uint16)
    change(tokens).tofile(directory / "train.bin")


def poison(tokens):
    tokens[1234] = 70
    return tokens


def swap(tokens):
    tokens[:10] = tokens[:10][::-1].copy()
    return tokens


@pytest.mark.parametrize(
    ("damage", "overrides", "words"),
    [
        (lambda d: (d / "train.bin").unlink(), [], "train.bin is missing; copy it"),
        (lambda d: (d / "val.bin").write_bytes(b""), [], "val.bin has 0 bytes, but"),
        (lambda d: os.truncate(d / "train.bin", 101), [], "train.bin has 101 bytes"),
        (
            lambda d: os.truncate(d / "train.bin", 128),
            [],
            "train.bin has 128 bytes, but",
        ),
        (lambda d: rewrite(d, poison), [], "holds token 70 at offset 1234"),
        (lambda d: rewrite(d, swap), [], "do not match the fingerprint in meta.json"),
        (
            lambda d: (d / "meta.json").write_text("{"),
            [],
            "meta.json is not valid .* again with python -m jaxgpt.prepare",
        ),
        (lambda d: (d / "meta.json").write_text("[]"), [], "meta.json is not valid"),
        (lambda d: (d / "meta.json").write_text('{"dtype": "f4"}'), [], "meta.json is not valid"),
        (lambda d: None, ["model.vocab_size=5"], "model.vocab_size=5"),
        (lambda d: None, ["data.path=None", "data.dataset=nope"], "prepare text --name nope"),
    ],
)
def test_damaged_data_is_refused_with_a_sentence(prepared, damage, overrides, words):
    damage(prepared)
    with pytest.raises(UsageError, match=words) as error:
        opened(prepared, *overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("use", [open_dataset, vocabulary_size])
def test_a_folder_that_may_not_be_entered_is_refused_with_a_sentence(tmp_path, monkeypatch, use):
    def deny(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    config = load_config("shakespeare_char_cpu", f"data.path={tmp_path}", "model.vocab_size=None")
    monkeypatch.setattr(Path, "is_file", deny)
    with pytest.raises(UsageError, match=f"data.path={tmp_path}: .* cannot be read .Permission"):
        use(config.data, config.model)


def test_a_dataset_without_a_home_directory_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.delenv("JAXGPT_DATA", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(UsageError, match="data.dataset=mine: .* no home directory is known"):
        dataset_directory(DataConfig(dataset="mine"))


def test_the_fingerprint_follows_the_data(prepared, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("fox", "cat"))
    prepare_text(tmp_path / "other", [other], "char")
    assert opened(prepared).fingerprints[0][1] == opened(prepared).fingerprints[0][1]
    assert opened(prepared).fingerprints[0][1] != opened(tmp_path / "other").fingerprints[0][1]


def test_tiny_shakespeare_is_prepared_as_nanogpt_does(tmp_path, tiny_shakespeare):
    import hashlib

    assert hashlib.sha256(tiny_shakespeare.read_bytes()).hexdigest() == SHAKESPEARE_SHA256
    lines = prepare_shakespeare_char(tmp_path / "s", tiny_shakespeare)
    assert lines[0] == "length of dataset in characters: 1,115,394"
    assert lines[1].endswith("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    assert lines[2:] == [
        "vocab size: 65",
        "train has 1,003,854 tokens",
        "val has 111,540 tokens",
    ]
    # nanoGPT's data/shakespeare_char/prepare.py gives these ids to "First Citizen:"
    assert tokens_of(opened(tmp_path / "s"), "train")[:14].tolist() == [
        18, 47, 56, 57, 58, 1, 15, 47, 58, 47, 64, 43, 52, 10,
    ]  # fmt: skip
