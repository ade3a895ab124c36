"""The number of bytes in the text of some tokens."""

import random

import numpy as np
import pytest

from jaxgpt.data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer
from odd_texts import odd_text

TEXT = odd_text(random.Random(3), 400) + "naïve 日本語 😀 №€"


def byte_level(package, folder):
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    letters = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=letters
    )
    made.train_from_iterator(["a word 日本 and a word"], trainer)
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(params=["byte", "char", "byte-level BPE"])
def tokenizer(request, tmp_path):
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "char":
        return CharTokenizer(TEXT)
    return byte_level(pytest.importorskip("tokenizers"), tmp_path)


def test_bytes_are_those_of_the_text(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens.tolist()) == TEXT
    assert tokenizer.count_bytes(tokens) == len(TEXT.encode()) > len(TEXT)
    assert tokenizer.count_bytes(tokens[:0]) == 0
    if tokenizer.end_of_text is not None:
        two = np.concatenate([tokens, [tokenizer.end_of_text], tokens])
        assert tokenizer.count_bytes(two) == 2 * len(TEXT.encode())


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(TEXT)])
def test_bytes_of_parts_add_up_wherever_they_are_cut(tokenizer):
    tokens = tokenizer.encode(TEXT)
    for at in range(0, tokens.size, 7):
        parts = tokenizer.count_bytes(tokens[:at]) + tokenizer.count_bytes(tokens[at:])
        assert parts == len(TEXT.encode())


def test_a_tokenizer_of_words_is_decoded_a_document_at_a_time(tmp_path):
    package = pytest.importorskip("tokenizers")
    words = {f"\u2581{word}": n for n, word in enumerate(["the", "café", "says", "?"])}
    made = package.Tokenizer(package.models.WordLevel(words | {"</s>": 4}, unk_token="\u2581?"))
    made.pre_tokenizer = package.pre_tokenizers.Metaspace()
    made.decoder = package.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("the café says")
    assert tokenizer.count_bytes(tokens) == len("the café says".encode()) == 14
    two = np.concatenate([tokens, [tokenizer.end_of_text], tokens])
    assert tokenizer.count_bytes(two) == 28
