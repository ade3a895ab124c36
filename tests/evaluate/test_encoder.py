"""For weights from transformers, texts get the same special tokens as in transformers."""

import json

import pytest

from jaxgpt.data.tokenizers import ByteTokenizer, load_tokenizer
from jaxgpt.evaluate.encoder import Encoder, encoder_of

BOS, EOS = 0, 1  # of `llama_tokenizer`


def llama_tokenizer(folder, adds=True):
    """Write a byte-level tokenizer.json, which puts <s> before a text like Llama's if `adds`."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=letters
    )
    made.train_from_iterator(["the cat sat"], trainer)
    if adds:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    made.save(str(folder / "tokenizer.json"))


NAMED = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("settings", "adds", "prefix", "before", "after"),
    [
        (None, True, EOS, (), ()),  # a run's own tokenizer
        (NAMED, True, BOS, (BOS,), ()),  # Llama 3: tokenizer.json says so
        (NAMED, False, BOS, (), ()),
        # transformers 5 ignores these settings if there is a tokenizer.json.
        (NAMED | {"add_bos_token": True, "add_eos_token": True}, False, BOS, (), ()),
        (NAMED | {"add_bos_token": False}, True, BOS, (BOS,), ()),
        ({"bos_token": None, "eos_token": "</s>"}, False, EOS, (), ()),  # Qwen
        ({"model_max_length": 1024}, False, EOS, (), ()),  # GPT-2
    ],
)
def test_the_tokens_around_a_text(settings, adds, prefix, before, after, tmp_path):
    llama_tokenizer(tmp_path, adds)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    encoder = encoder_of(tmp_path, tokenizer)
    assert encoder[1:] == (prefix, before, after)
    words = tokenizer.encode("the cat").tolist()
    assert encoder.encode("the cat") == [*before, *words, *after]
    assert encoder.encode("the cat", add_special_tokens=False) == words


def test_other_tokenizers_add_nothing(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED))
    tokenizer = ByteTokenizer()
    assert encoder_of(tmp_path, tokenizer) == Encoder(tokenizer, tokenizer.end_of_text)
