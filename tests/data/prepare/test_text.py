"""Conversion of text and JSON lines to token files."""

import gzip
import http.client
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from jaxgpt import prepare
from jaxgpt.config import UsageError
from jaxgpt.data.megatron import read_index
from jaxgpt.data.prepare import files, text
from jaxgpt.data.prepare import writer as publishing
from jaxgpt.data.prepare.builtin import prepare_shakespeare_char
from jaxgpt.data.prepare.corpus import Corpus, write_nanogpt
from jaxgpt.data.prepare.json_lines import LineFormat
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.prepare.text import InputFile
from jaxgpt.data.tokenizers import ByteTokenizer, load_tokenizer
from odd_texts import odd_text


@pytest.fixture
def small_blocks(monkeypatch):
    """Small blocks and batches, so that files of a few KB need many of them."""
    monkeypatch.setattr(files, "_BLOCK", 3000)
    monkeypatch.setattr(text, "_BATCH", 9000)


def tokens_of(directory, dtype=np.uint16):
    return [np.fromfile(directory / f"{split}.bin", dtype) for split in ("train", "val")]


def json_lines(texts, **more):
    return "".join(json.dumps({"text": t} | more, ensure_ascii=False) + "\n" for t in texts)


def stories(count, seed=0):
    """Different texts of various lengths."""
    draw = random.Random(seed)
    return [f"story {seed} {n}\n\n" + "fjord æ " * draw.randrange(40) for n in range(count)]


def of_bytes(texts):
    return b"\0".join(t.encode() for t in texts)


def test_documents_are_kept_in_order(tmp_path, small_blocks):
    lines = json_lines(stories(400))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n" + json_lines(["", *stories(300, seed=1)]).rstrip("\n"))
    prepare_text(tmp_path / "1", [tmp_path], "byte", val_share=0.2)
    train, val = (bytes(t.astype(np.uint8)).split(b"\0") for t in tokens_of(tmp_path / "1"))
    documents = [t.encode() for t in stories(400) + stories(300, seed=1)]
    assert sorted(train + val) == sorted(documents)
    assert train == sorted(train, key=documents.index) and val == sorted(val, key=documents.index)


def test_validation_documents_are_drawn_by_their_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(stories(2000)))
    (tmp_path / "b.jsonl").write_text(json_lines(stories(1000, seed=1) + stories(2000)))
    found = []
    for name in ("a", "b"):
        prepare_text(tmp_path / name, [tmp_path / f"{name}.jsonl"], "byte", val_share=0.1)
        _, val = tokens_of(tmp_path / name)
        found.append(bytes(val.astype(np.uint8)).split(b"\0"))
    # A binomial with n = 2000 and p = 0.1 is within 5 standard deviations of its mean.
    assert abs(len(found[0]) - 200) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    assert found[1][-len(found[0]) :] == found[0]  # the same ones, with others before them


def test_the_last_characters_of_texts_are_for_validation(tmp_path, small_blocks):
    texts = ["äöü" * 2000, "", "x" * 3000 + "é" * 1001]
    files = [tmp_path / f"{n}.txt" for n in range(3)]
    for file, content in zip(files, texts, strict=True):
        file.write_text(content)
    prepare_text(tmp_path / "d", [tmp_path], "byte")
    whole = texts[0] + "\0" + texts[2]
    n_train = int(10_001 * 0.9) + 1
    train, val = tokens_of(tmp_path / "d")
    assert bytes(train.astype(np.uint8)).decode() == whole[:n_train]
    assert bytes(val.astype(np.uint8)).decode() == whole[n_train:]


def test_characters_of_all_files_are_the_vocabulary(tmp_path, small_blocks):
    (tmp_path / "a.txt").write_text("ab" * 4000)
    (tmp_path / "b.txt").write_text("cé" * 4000)
    lines = prepare_text(tmp_path / "d", [tmp_path], "char")
    assert lines[0] == "vocab size: 4"
    assert any("one token per character" in line and "--tokenizer" in line for line in lines)
    train, val = tokens_of(tmp_path / "d")
    assert np.concatenate([train, val]).tolist() == [0, 1] * 4000 + [2, 3] * 4000


@pytest.mark.parametrize("parallel", ["true", "false"])
def test_a_text_in_blocks_has_gpt2s_tokens_of_the_whole(
    tmp_path, small_blocks, gpt2_folder, parallel, monkeypatch
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    whole = odd_text(random.Random(0), 40_000)
    (tmp_path / "a.txt").write_bytes(whole.encode())
    prepare_text(tmp_path / "d", [tmp_path / "a.txt"], str(gpt2_folder))
    n_train = int(len(whole) * 0.9)
    tokenizer = load_tokenizer(gpt2_folder)
    for tokens, part in zip(
        tokens_of(tmp_path / "d"), (whole[:n_train], whole[n_train:]), strict=True
    ):
        assert tokens.tolist() == tokenizer.encode(part).tolist()


def test_tiny_shakespeare_has_nanogpts_number_of_tokens(tmp_path, tiny_shakespeare, gpt2_folder):
    lines = prepare_text(tmp_path / "d", [tiny_shakespeare], str(gpt2_folder))
    assert lines[1:3] == ["train has 301,966 tokens", "val has 36,059 tokens"]
    assert load_tokenizer(tmp_path / "d").to_meta() == load_tokenizer(gpt2_folder).to_meta()


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_megatrons_format_has_every_document_with_its_mark(tmp_path, small_blocks, suffix):
    texts = stories(40) + ["long " * 2000]
    if suffix == "jsonl":
        (tmp_path / "a.jsonl").write_text(json_lines(texts).replace('"text"', '"body"'))
    else:
        for n, content in enumerate(texts):
            (tmp_path / f"{n:02}.txt").write_text(content)
    out = tmp_path / "mine"
    lines = prepare_text(out, [tmp_path], "byte", megatron=True, json_key="body")
    prefix = out / f"mine_{'body' if suffix == 'jsonl' else 'text'}_document"
    assert f"data.path={prefix} data.tokenizer=byte" in lines[1]
    index = read_index(prefix)
    assert np.fromfile(index.bin_path, index.dtype).astype(np.uint8).tobytes() == (
        of_bytes(texts) + b"\0"
    )
    assert index.lengths.tolist() == [len(t.encode()) + 1 for t in texts]


def test_the_prefix_of_a_megatron_pair_may_be_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be")
    given = "text --input a.txt --tokenizer byte --format megatron --out X_text_document".split()
    prepare.main(given)
    names = ["X_text_document.bin", "X_text_document.idx"]
    assert sorted(path.name for path in (tmp_path / "X_text_document").glob("X*")) == names
    with pytest.raises(SystemExit):
        prepare.main(given)
    assert "X_text_document.bin already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.txt",
            b"\xc3\xa4" * 2500 + b"a\xff" + b"b" * 9000,
            "a.txt: is not UTF-8 text at byte 5001",
        ),
        ("a.txt", b"a" * 9000 + b"\xc3", "a.txt: is not UTF-8 text at byte 9000"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n' * 400 + b"{text}\n",
            "a.jsonl: line 801 must be a JSON object",
        ),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 must .* with UTF-8 text under 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 must .* with UTF-8 text under 'text'"),
        (
            "a.jsonl",
            b'{"id": 1, "body": "b"}',
            "line 1 must .* under 'text', but its keys are 'id', 'body'; choose keys with --json",
        ),
        ("a.jsonl", b'{"text": null}', "line 1 must .* under 'text', not .*null"),
        (
            "a.jsonl",
            b'{"text": "a',
            'line 1 must .* not \'{"text": "a\' \\(Unterminated string .*\\); correct or remove',
        ),
        ("a.jsonl", b'["text"]', "line 1 must .* under 'text', not .*text"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", b"{}", "a.jsonl.gz: cannot be read"),
        ("a.jsonl", b"", "0 tokens for train and 0 tokens for val"),
        (
            "a.txt",
            b"x" * 19,
            "17 tokens for train and 2 tokens for val .*vocabulary of 1",
        ),
    ],
    ids=lambda x: None if isinstance(x, str) else "",
)
def test_what_is_wrong_with_an_input_is_named(tmp_path, small_blocks, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        prepare_text(tmp_path / "d", [tmp_path / name], "char")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_text_without_a_split_point_is_read_in_linear_time(tmp_path, small_blocks, monkeypatch):
    (tmp_path / "a.txt").write_text("a" * 300_000)
    sizes = []
    monkeypatch.setattr(ByteTokenizer, "split_point", lambda _, text: sizes.append(len(text)) or 0)
    file = InputFile(tmp_path / "a.txt", LineFormat(None, "byte", None), n_train=200_000)
    texts = [(c.split, len(c.text)) for c in file.chunks(ByteTokenizer(), lambda size: None)]
    assert texts == [("train", 200_000), ("val", 100_000)]
    assert sum(sizes) < 3 * 300_000


def test_inputs_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="--input .*no.txt: cannot be read"):
        prepare_text(tmp_path / "d", [tmp_path / "no.txt"], "char")
    with pytest.raises(UsageError, match="empty: has no files ending in .txt, .*give the files"):
        prepare_text(tmp_path / "d", [tmp_path / "empty"], "char")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    for megatron, names in ((False, "`char`, `byte`, a"), (True, "`byte`, a")):
        words = f"tokenizer no: cannot be read .* give {names} tokenizer.json"
        with pytest.raises(UsageError, match=words):
            prepare_text(tmp_path / "d", [tmp_path / "a.txt"], "no", megatron=megatron)
    with pytest.raises(UsageError, match="differ, because only one of them has prompts"):
        prepare_text(tmp_path / "d", [tmp_path], "byte")
    for name, tokenizer in (("pipe.txt", "byte"), ("pipe.jsonl", "char")):
        os.mkfifo(tmp_path / name)
        with pytest.raises(
            UsageError, match=f"{name}: is not a regular file, but .* are read twice"
        ):
            prepare_text(tmp_path / "d", [tmp_path / name], tokenizer)


def test_an_input_that_cannot_be_accessed_is_named_in_the_error(tmp_path, monkeypatch):
    missing, packed = tmp_path / "no.txt", tmp_path / "a.ZST"
    packed.touch()
    with pytest.raises(UsageError, match="--input .*no.txt: cannot be read .No such file"):
        prepare_shakespeare_char(tmp_path / "d", missing)
    corpus = Corpus([tmp_path / "no.jsonl"], LineFormat(None, "byte", None))
    with pytest.raises(UsageError, match="--input .*no.jsonl: cannot be read .No such file"):
        write_nanogpt(corpus, tmp_path / "d", ByteTokenizer(), "none")
    with pytest.raises(UsageError, match="a.ZST: zstd is not supported"):
        prepare_text(tmp_path / "d", [packed], "char")

    def deny(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", deny)
    with pytest.raises(UsageError, match="--input .*no.txt: cannot be read .Permission"):
        prepare_text(tmp_path / "d", [missing], "char")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "0"], "--workers: 0: must be a whole number, at least 1"),
        (["--val-share", "1"], "--val-share 1.0: must be at least 0 and less than 1"),
        (["--val-share", "0", "--split", "test"], "--val-share 0.0: cannot be used with --split"),
        (["--split", "test"], "--split test: needs the tokenizer of the training data; give the"),
        (
            ["--split", "test", "--tokenizer", "byte", "--format", "megatron"],
            "--split test: cannot be used with --format megatron",
        ),
        (
            ["--val-share", "0.1", "--format", "megatron"],
            "--val-share 0.1: .*cannot be used with --format megatron",
        ),
        (["--eos", "</s>", "--tokenizer", "byte"], "--eos </s>: needs a tokenizer.json, not byte"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        prepare.check_options(prepare.parser().parse_args(["text", "--input", "a.txt", *options]))


@pytest.mark.parametrize("kind", ["nanogpt", "megatron"])
def test_a_data_set_is_replaced_only_where_that_is_asked_for(kind, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("big fjord\n" * 30)

    out = tmp_path / "d[1]"

    def prepared(*options):
        arguments = ["--input", tmp_path / "a.txt", "--tokenizer", "byte", "--out", out]
        words = ["text", *arguments, "--format", kind, "--workers", "1", *options]
        prepare.main(list(map(str, words)))
        return {path.name: path.read_bytes() for path in out.glob("*.bin")}

    first = prepared()
    (tmp_path / "a.txt").write_text("other words\n" * 30)
    with pytest.raises(SystemExit):
        prepared()
    file = out / {"nanogpt": "train.bin", "megatron": "d[1]_text_document.bin"}[kind]
    assert f"error: --out {out}: {file} already exists; " in capsys.readouterr().err
    with pytest.raises(SystemExit):  # training would find only one of the two datasets
        prepared("--overwrite", "--format", "megatron" if kind == "nanogpt" else "nanogpt")
    assert f"{file} already exists; give another" in capsys.readouterr().err
    second = prepared("--overwrite")
    assert first.keys() == second.keys() and first != second


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ("shakespeare_char", "train.bin"),
        ("shakespeare_char", "val.bin"),
        ("python", "meta.json"),
        ("text --tokenizer byte --input a.txt", "tokenizer.json"),
        ("text --tokenizer byte --input a.txt --format megatron", "d_text_document.bin"),
    ],
)
def test_no_file_of_anothers_is_replaced(words, there, tmp_path, tiny_shakespeare, capsys):
    (tmp_path / "d").mkdir()
    file = tmp_path / "d" / there
    file.write_text("precious")
    words = words.replace("a.txt", str(tiny_shakespeare)).split()
    if words[0] == "shakespeare_char":
        words += ["--input", str(tiny_shakespeare)]
    with pytest.raises(SystemExit) as end:
        prepare.main([*words, "--out", str(tmp_path / "d")])
    assert end.value.code == 2
    assert f"--out {tmp_path}/d: {file} already exists" in capsys.readouterr().err
    assert file.read_text() == "precious" and list(file.parent.iterdir()) == [file]


def test_a_data_set_of_a_command_is_replaced_in_its_own_place(
    tmp_path, tiny_shakespeare, monkeypatch
):
    monkeypatch.setenv("JAXGPT_DATA", str(tmp_path))
    command = ["shakespeare_char", "--input", str(tiny_shakespeare)]
    for _ in range(2):
        prepare.main(command)
        names = {path.name for path in (tmp_path / "shakespeare_char").iterdir()}
        assert names == {"train.bin", "val.bin", "meta.json"}
        (tmp_path / "shakespeare_char" / "train.bin").write_bytes(b"")


def test_an_existing_folder_is_written_from_within(tmp_path, monkeypatch):
    """The parent folder may belong to someone else or be on another file system."""
    homes, make = [], publishing.tempfile.mkdtemp
    monkeypatch.setattr(
        publishing.tempfile,
        "mkdtemp",
        lambda suffix, prefix, dir: homes.append(dir) or make(suffix, prefix, dir),
    )
    tokens = {"train": np.arange(9), "val": np.arange(5)}
    for _ in range(2):
        publishing.write_dataset(tmp_path / "d", tokens, ByteTokenizer(), "numbers")
        assert {path.name for path in tmp_path.iterdir()} == {"d"}
        assert len(list((tmp_path / "d").iterdir())) == 3
    assert homes == [tmp_path / "d"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing_behind(tmp_path, number):
    pipe, out = tmp_path / "a.jsonl", tmp_path / "out" / "d"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "jaxgpt.prepare", "text", "--input", pipe, "--out", out]
    with subprocess.Popen([*command, "--tokenizer", "byte"], stderr=subprocess.PIPE) as job:
        with open(pipe, "w") as file:
            file.write(json_lines(stories(10_000)))
            file.flush()
            while not (out.parent.is_dir() and any(out.parent.iterdir())):
                time.sleep(0.05)
            job.send_signal(number)
        assert job.wait(30) == 128 + number
        assert job.stderr.read() == b""
    assert not any(out.parent.iterdir())


def test_dolmas_files_are_json_lines(tmp_path):
    with gzip.open(tmp_path / "part.json.gz", "wt") as file:
        file.write('{"text": "hello"}\n{"text": "there"}\n' * 20)
    (tmp_path / "meta.json").write_text("{\n}")
    prepare_text(tmp_path / "d", [tmp_path], "byte", val_share=0.5)
    parts = [(tmp_path / "d" / f"{split}.bin").read_bytes() for split in ("train", "val")]
    assert b"text" not in b"".join(parts) and b"h\0e\0l\0l\0o\0" in b"".join(parts)


def test_a_download_that_breaks_off_is_reported(tmp_path, monkeypatch):
    class Broken(io.BytesIO):
        def read(self, *size):
            raise http.client.IncompleteRead(b"First Citizen", 1_000_000)

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Broken())
    with pytest.raises(UsageError, match="cannot download Tiny Shakespeare"):
        prepare_shakespeare_char(tmp_path / "data", None)
