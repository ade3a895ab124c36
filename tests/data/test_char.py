import pytest

from jaxgpt.config import UsageError
from jaxgpt.data.tokenizers import ByteTokenizer, CharTokenizer, tokenizer_from_meta

TEXT = "Zwölf Boxkämpfer, \U0001d11e\n"


@pytest.mark.parametrize("tokenizer", [CharTokenizer(TEXT), ByteTokenizer()])
def test_text_survives_encoding_and_the_description(tokenizer, tmp_path):
    again = tokenizer_from_meta(tokenizer.to_meta(), tmp_path)
    tokens = tokenizer.encode(TEXT)
    assert tokens.max() < tokenizer.vocab_size
    assert (again.encode(TEXT) == tokens).all()
    assert again.decode(tokens.tolist()) == TEXT


def test_characters_are_numbered_in_order():
    assert CharTokenizer("banana\n").encode("\nabn").tolist() == [0, 1, 2, 3]


def test_an_unknown_character_is_named():
    with pytest.raises(UsageError, match=r"'é' \(position 1\).*5 characters"):
        CharTokenizer("abcde").encode("aé")


@pytest.mark.parametrize("tokenizer", [CharTokenizer(TEXT), ByteTokenizer()])
def test_a_byte_of_an_argument_that_is_not_utf8_is_named(tokenizer):
    with pytest.raises(UsageError, match=r"'.udcff' \(position 2\)"):
        tokenizer.encode("Zw\udcff")
