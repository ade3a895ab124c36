"""A command that is killed continues with the files that are not complete."""

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from jaxgpt import prepare
from jaxgpt.config import UsageError
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.prepare import parts
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.prepare.writer import scratch_folder
from jaxgpt.data.source import PARTS
from jobs import command, environment, load_config

SMALL_PARTS = Path(__file__).parents[2] / "multiprocess" / "small_parts.py"


def write_corpus(folder):
    """Write six files of JSON lines and return their texts."""
    draw, texts = random.Random(0), []
    folder.mkdir()
    for n in range(6):
        texts.append([f"{n} " + "fjord æ " * draw.randrange(50) for _ in range(200)])
        lines = (f'{{"text": "{text}"}}\n' for text in texts[-1])
        (folder / f"{n}.jsonl").write_text("".join(lines))
    return texts


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def tokenized(monkeypatch):
    """A list that gets the name of each file that is tokenized; each file is a part."""
    names, write = [], parts._write_part

    def write_part(files, *rest):
        names.extend(file.path.name for file in files)
        return write(files, *rest)

    monkeypatch.setattr(parts, "_PART", 1)
    monkeypatch.setattr(parts, "_write_part", write_part)
    return names


@pytest.mark.parametrize("format_", ["nanogpt", "megatron"])
def test_a_killed_command_tokenizes_only_the_other_files(format_, tmp_path, tokenized):
    corpus, out = tmp_path / "in", tmp_path / "d"
    write_corpus(corpus)
    inputs = [str(corpus / f"{n}.jsonl") for n in range(6)]
    given = ["text", "--input", *inputs, "--tokenizer", "byte", "--format", format_, "--out"]
    prepare.main([*given, str(tmp_path / "other" / "d")])
    whole, last = files_of(tmp_path / "other" / "d"), corpus / "5.jsonl"
    content = last.read_bytes()
    last.unlink()
    os.mkfifo(last)  # the command waits for its text
    with subprocess.Popen(command(SMALL_PARTS, *given, out), env=environment()) as job:
        while len([*out.glob(f"{PARTS}/*")]) < 6:  # five parts, and one in progress
            assert job.poll() is None
            time.sleep(0.05)
        job.kill()
    last.unlink()
    last.write_bytes(content)
    with scratch_folder(out) as scratch:  # left by a command that was killed while joining parts
        (out / f"{scratch.name}0").mkdir()
        (out / f"{scratch.name}0" / "train.bin").write_bytes(content)
    changed = corpus / "2.jsonl"  # also tokenized again, because it may have other text
    changed.write_bytes(changed.read_bytes())
    tokenized.clear()
    prepare.main([*given, str(out)])
    assert tokenized == ["2.jsonl", "5.jsonl"]
    assert files_of(out) == whole


def test_another_tokenizer_or_share_uses_no_part(tmp_path, tokenized):
    texts = write_corpus(tmp_path / "in")
    bad = tmp_path / "z.jsonl"
    bad.write_text("{text}")
    inputs = [tmp_path / "in", bad]

    def fails(tokenizer="byte", share=0.2):
        tokenized.clear()
        with pytest.raises(UsageError, match="z.jsonl: line 1 must be"):
            prepare_text(tmp_path / "d", inputs, tokenizer, val_share=share)
        return len(tokenized)

    assert [fails(), fails(), fails(share=0.3), fails()] == [7, 1, 7, 1]
    config = load_config("tiny", f"data.path={tmp_path / 'd'}")
    with pytest.raises(UsageError, match="its preparation was interrupted; run the same jaxgpt.pr"):
        open_dataset(config.data, config.model)
    bad.write_text('{"text": "good"}')
    tokenized.clear()
    prepare_text(tmp_path / "d", inputs, "byte", val_share=0.2)
    assert tokenized == ["z.jsonl"]
    assert {path.name for path in (tmp_path / "d").iterdir()} == {
        "meta.json",
        "train.bin",
        "val.bin",
    }
    content = b"\0".join(
        (tmp_path / "d" / f"{split}.bin").read_bytes()[::2] for split in ("train", "val")
    )
    expected = [text.encode() for file in [*texts, ["good"]] for text in file]
    assert sorted(content.split(b"\0")) == sorted(expected)


def test_small_files_share_a_part(tmp_path, monkeypatch):
    write_corpus(tmp_path / "in")
    inputs = [tmp_path / "in"]
    prepare_text(tmp_path / "1", inputs, "byte")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "in").iterdir())]
    monkeypatch.setattr(parts, "_PART", sum(sizes[:3]))
    groups, write = [], parts._write_part

    def write_part(files, *rest):
        groups.append(len(files))
        return write(files, *rest)

    monkeypatch.setattr(parts, "_write_part", write_part)
    prepare_text(tmp_path / "2", inputs, "byte")
    assert groups[0] == 3 and sum(groups) == 6
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


@pytest.mark.parametrize("size", [1, 10**9])
def test_text_and_answers_do_not_mix(size, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PART", size)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    for _ in range(2):  # also if the parts are from an earlier command
        with pytest.raises(UsageError, match="differ, because only one of them has prompts or me"):
            prepare_text(tmp_path / "d", [tmp_path], "byte")


def test_a_file_that_is_given_twice_is_there_twice(tmp_path):
    write_corpus(tmp_path / "in")
    path = tmp_path / "in" / "0.jsonl"
    prepare_text(tmp_path / "once", [path], "byte", split="train")
    prepare_text(tmp_path / "twice", [path, path], "byte", split="train")
    once, twice = ((tmp_path / name / "train.bin").read_bytes() for name in ("once", "twice"))
    assert twice == once + b"\0\0" + once
