import pytest

from jaxgpt.config import UsageError
from jaxgpt.data.tokenizers.char import ByteTokenizer, CharTokenizer
from jaxgpt.data.tokenizers.registry import tokenizer_from_meta

TEXT = "Zwölf Boxkämpfer, \U0001d11e\n"


@pytest.mark.parametrize("tokenizer", [CharTokenizer.of_text(TEXT), ByteTokenizer()])
def test_text_survives_encoding_and_the_description(tokenizer, tmp_path):
    again = tokenizer_from_meta(tokenizer.to_meta(), tmp_path)
    tokens = tokenizer.encode(TEXT)
    assert tokens.max() < tokenizer.vocab_size
    assert (again.encode(TEXT) == tokens).all()
    assert again.decode(tokens.tolist()) == TEXT


def test_characters_are_numbered_in_order():
    assert CharTokenizer.of_text("banana\n").encode("\nabn").tolist() == [0, 1, 2, 3]


def test_an_unknown_character_is_named():
    with pytest.raises(UsageError, match=r"'é' \(position 1\).*5 characters"):
        CharTokenizer.of_text("abcde").encode("aé")
