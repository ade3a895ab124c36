"""Subword tokenizers: GPT-2's, compared with tiktoken's IDs, and other kinds of tokenizer.json."""

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.config import UsageError
from jaxgpt.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    SentencePieceTokenizer,
    continue_prompt,
    load_tokenizer,
    tokenizer_from_meta,
)
from odd_texts import odd_text

tokenizers = pytest.importorskip("tokenizers")

NASTY = (
    "a<|endoftext|>b  \n\n\n  don't 123 \u00a0\u3000x \r\n\t\tfoo\t\n 日本語 😀\u200d \x00 e\u0301 "
)
# The pattern of GPT-4 and Llama 3, in which punctuation includes the newlines that follow it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def gpt2(gpt2_folder):
    return load_tokenizer(gpt2_folder)


def nasty_texts(count, length):
    draw = random.Random(0)
    return [odd_text(draw, length) for _ in range(count)]


def test_gpt2_as_openai_and_nanogpt_have_it(gpt2):
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)
    # The example in tiktoken's README, and the IDs that nanoGPT's sample.py starts with.
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert gpt2.encode("\n").tolist() == [198]
    assert gpt2.decode([31373, 995, 50256]) == "hello world<|endoftext|>"


def test_special_tokens_in_a_text_are_text(gpt2):
    # tiktoken.get_encoding("gpt2").encode_ordinary("<|endoftext|>")
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.decode(gpt2.encode(NASTY)) == NASTY


def test_text_that_a_tokenizer_cannot_encode_is_refused_with_a_sentence(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(UsageError, match="tokenizer.json: cannot encode the text .*UNK"):
            encode("c")


def test_ids_are_those_of_tiktoken(gpt2, gpt2_folder, tiny_shakespeare):
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    files = (str(gpt2_folder / name) for name in ("vocab.bpe", "encoder.json"))
    ranks = data_gym_to_mergeable_bpe_ranks(*files)
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    theirs = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in [tiny_shakespeare.read_text(), NASTY, *nasty_texts(20, 2000)]:
        assert gpt2.encode(text).tolist() == theirs.encode_ordinary(text)


def split_by(pattern, gpt2_folder, folder):
    """GPT-2's vocabulary with a different pre-tokenization pattern."""
    load_tokenizer(gpt2_folder).save(folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    levels = content["pre_tokenizer"] | {"use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, levels]}
    return content


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "no words", "prefix"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(gpt2, gpt2_folder, kind, tmp_path):
    content = split_by(LLAMA3, gpt2_folder, tmp_path)
    if kind == "gpt2":
        content["pre_tokenizer"] = content["pre_tokenizer"]["pretokenizers"][1] | {
            "use_regex": True
        }
    elif kind == "no words":  # the whole text is one word, as in Llama 2
        content["pre_tokenizer"] = None
    elif kind == "prefix":
        content["normalizer"] = {"type": "Prepend", "prepend": "\u2581"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    splits = 0
    for text in nasty_texts(15, 2000):
        at = tokenizer.split_point(text)
        parts = tokenizer.encode_batch([text[:at], text[at:]] if at else [text])
        assert np.concatenate(parts).tolist() == whole.encode(text).ids
        splits += at > 0
    assert splits == (15 if kind in ("gpt2", "llama3") else 0)


def test_a_description_and_its_file_make_the_same_tokenizer(gpt2, tmp_path):
    gpt2.save(tmp_path)
    meta = json.loads(json.dumps(gpt2.to_meta()))
    assert meta["sha256"] == hashlib.sha256((tmp_path / meta["file"]).read_bytes()).hexdigest()
    again = tokenizer_from_meta(meta, tmp_path)
    assert again.to_meta() == gpt2.to_meta()
    assert (again.encode(NASTY) == gpt2.encode(NASTY)).all()
    with (tmp_path / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match="tokenizer.json: is missing, or is not the tokenizer th"):
        tokenizer_from_meta(meta, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="tokenizer.json: is missing, or"):
        tokenizer_from_meta(meta, tmp_path)


def test_a_tokenizer_that_may_not_be_read_is_refused_with_a_sentence(gpt2, tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    gpt2.save(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(UsageError, match="tokenizer.json: cannot be read .Permission denied"):
        tokenizer_from_meta(gpt2.to_meta(), tmp_path)


def test_a_missing_tokenizer_is_one_sentence_about_files_and_package(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"gpt2: .*no such file or folder.*vocab.bpe$"):
        load_tokenizer(tmp_path / "gpt2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    install = r"vocab.bpe, and run pip install 'jaxgpt\[hf\]'$"
    with pytest.raises(UsageError, match=rf"the folder has no tokenizer\); give .*{install}"):
        load_tokenizer(tmp_path)
    (tmp_path / "encoder.json").touch()
    with pytest.raises(UsageError, match=rf"vocab.bpe is missing\); .*{install}"):
        load_tokenizer(tmp_path)


def test_a_surrogate_is_named(gpt2):
    for tokenizer in gpt2, SentencePieceTokenizer(b"", 2, None):
        with pytest.raises(UsageError, match=r"'.udcff' \(position 1\)"):
            tokenizer.encode("a\udcff")


def test_a_tokenizer_is_found_under_all_its_names(gpt2, gpt2_folder, tmp_path):
    shutil.copy(gpt2_folder / "encoder.json", tmp_path / "vocab.json")
    shutil.copy(gpt2_folder / "vocab.bpe", tmp_path / "merges.txt")
    assert load_tokenizer(tmp_path).to_meta() == gpt2.to_meta()
    gpt2.save(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json").to_meta() == gpt2.to_meta()
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
    for tokenizer in (gpt2, CharTokenizer("ab")):  # of a prepared data set
        meta = {"dtype": "uint16", "vocab_size": 9, "tokenizer": tokenizer.to_meta()}
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        assert load_tokenizer(tmp_path).to_meta() == tokenizer.to_meta()


@pytest.mark.parametrize("kind", ["Metaspace", "WordPiece", "ByteLevel", "bytes"])
def test_what_continues_a_prompt_keeps_its_first_space(gpt2, tmp_path, kind):
    """The decoders of SentencePiece and WordPiece drop the prefix of the first token."""
    if kind in ("Metaspace", "WordPiece"):
        mark = "\u2581" if kind == "Metaspace" else ""
        words = {f"{mark}{word}": n for n, word in enumerate(["the", "mesh", "says", "how", "?"])}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=f"{mark}?"))
        metaspace = tokenizers.pre_tokenizers.Metaspace()
        made.pre_tokenizer = metaspace if mark else tokenizers.pre_tokenizers.WhitespaceSplit()
        made.decoder = getattr(tokenizers.decoders, kind)()
        made.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(tmp_path)
    else:
        tokenizer = gpt2 if kind == "ByteLevel" else ByteTokenizer()
    text = "the mesh says how"
    tokens = tokenizer.encode(text).tolist()
    assert continue_prompt(tokenizer, "", tokens) == text
    n_prompt = tokenizer.encode("the mesh").size
    assert continue_prompt(tokenizer, "the mesh", tokens[n_prompt:]) == text


def test_the_end_of_text_can_be_named(gpt2, tmp_path):
    gpt2.save(tmp_path)
    assert load_tokenizer(tmp_path, "!").end_of_text == 0
    for unknown in ("<stop>", ""):
        with pytest.raises(UsageError, match=f"--eos {unknown}: is not a token"):
            load_tokenizer(tmp_path, unknown)
    for token in ("!", {"content": "!"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert load_tokenizer(tmp_path).end_of_text == 0


def test_truncation_in_a_tokenizer_json_does_not_shorten_texts(tmp_path):
    package = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 7}, "a"))
    package.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    package.enable_truncation(3)
    package.enable_padding(length=8)
    package.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a a a a a").tolist() == [0] * 5
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (8, 7)
    assert tokenizer.encode("").dtype == np.int64


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "cannot be read .*GPT-2's encoder.json and vocab.bpe"),
        ({"tokenizer.json": "{}"}, "tokenizer .*: cannot be read"),
        ({"encoder.json": "[1]", "vocab.bpe": "a b"}, "tokenizer .*: cannot be read"),
        ({"encoder.json": "[1", "vocab.bpe": "a b"}, "tokenizer .*: cannot be read"),
        ({"meta.json": "{}"}, "meta.json is not valid .* again with python -m jaxgpt.prepare"),
    ],
)
def test_what_is_no_tokenizer_is_refused_with_a_sentence(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        load_tokenizer(tmp_path)


def test_without_the_package_the_remedy_is_said(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'jaxgpt\[hf\]'"):
        load_tokenizer(tmp_path)
