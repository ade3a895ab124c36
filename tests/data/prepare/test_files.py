"""The files that `prepare text` reads, and how it divides them into splits."""

import gzip
import json
import random

import numpy as np
import pytest

from jaxgpt import prepare
from jaxgpt.config import UsageError
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.tokenizers import SentencePieceTokenizer, load_tokenizer
from jobs import load_config


def stories(count, seed=0):
    draw = random.Random(seed)
    return [f"story {seed} {n} " + "fjord æ " * draw.randrange(40) for n in range(count)]


def write_lines(path, texts):
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def bytes_of(folder, split):
    return np.fromfile(folder / f"{split}.bin", np.uint16).astype(np.uint8).tobytes()


def test_a_folder_may_mix_all_kinds_of_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    home = tmp_path / "mine"
    (home / "sub").mkdir(parents=True)
    (home / "a.txt").write_text("plain ä")
    (home / "b.md").write_text("# Title")
    with gzip.open(home / "c.txt.gz", "wt") as file:
        file.write("packed")
    table = {"id": list(range(3000)), "text": stories(3000, seed=2)}
    parquet.write_table(pyarrow.table(table), home / "d.parquet", row_group_size=700)
    write_lines(home / "sub" / "e.jsonl", stories(20))
    write_lines(home / "sub" / "f.jsonl.gz", stories(10, seed=1))
    (home / "notes.pdf").write_bytes(b"\xff")
    (home / "._a.txt").write_bytes(b"\xff")  # macOS makes such files
    more = tmp_path / "more.txt"
    more.write_text("one more file")
    *_, said = prepare_text(tmp_path / "d", [home, more], "byte", val_share=0.2)
    assert said == f"ignored 1 file with an unknown suffix, such as {home / 'notes.pdf'}"
    expected = ["plain ä", "# Title", "packed", *table["text"], *stories(20), *stories(10, seed=1)]
    expected = [text.encode() for text in [*expected, "one more file"]]
    train, val = (bytes_of(tmp_path / "d", split).split(b"\0") for split in ("train", "val"))
    assert sorted(train + val) == sorted(expected)
    assert train == sorted(train, key=expected.index) and val == sorted(val, key=expected.index)
    # A binomial with n = 3034 and p = 0.2 is within 5 standard deviations of its mean.
    assert abs(len(val) - 607) < 5 * (3034 * 0.2 * 0.8) ** 0.5


def test_a_share_of_0_means_no_validation_data(tmp_path):
    write_lines(tmp_path / "a.jsonl", stories(20))
    prepare_text(tmp_path / "d", [tmp_path / "a.jsonl"], "byte", val_share=0)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"train.bin", "meta.json"}


def test_rows_may_be_conversations_or_have_other_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = {
        "prompt": [f"{n}+1=" for n in range(30)],
        "completion": [f"{n + 1}" for n in range(30)],
    }
    parquet.write_table(pyarrow.table(table), path)
    prepare_text(tmp_path / "d", [path], "byte", val_share=0.3)
    for split in ("train", "val"):
        mask = np.fromfile(tmp_path / "d" / f"{split}.mask.bin", np.uint8)
        text = bytes_of(tmp_path / "d", split)
        counted = bytes(np.frombuffer(text, np.uint8)[mask == 1]).split(b"\0")
        assert [int(line.split(b"+")[0]) + 1 for line in text.split(b"\0")] == list(
            map(int, counted)
        )
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(UsageError, match="has the columns id, body; choose .*--jsonl-key NAME"):
        prepare_text(tmp_path / "e", [path], "byte")
    parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    with pytest.raises(UsageError, match="a.parquet: row 2 must be .*under 'text'"):
        prepare_text(tmp_path / "e", [path], "byte")
    latin = pyarrow.array(["caf\u00e9".encode("latin-1")]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": latin}), path)
    with pytest.raises(UsageError, match="a.parquet: cannot be read as Parquet .*decode"):
        prepare_text(tmp_path / "e", [path], "byte")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="a.parquet: cannot be read as Parquet"):
        prepare_text(tmp_path / "e", [path], "byte")


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("pyarrow", "a.parquet", "parquet"), ("sentencepiece", "a.txt", "sentencepiece")],
)
def test_a_missing_package_is_named(module, name, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    for file in (name, "tokenizer.model"):
        (tmp_path / file).write_bytes(b"x")
    tokenizer = "byte" if name == "a.parquet" else str(tmp_path)
    with pytest.raises(UsageError, match=rf"pip install 'jaxgpt\[{extra}\]'"):
        prepare_text(tmp_path / "d", [tmp_path / name], tokenizer)


@pytest.mark.parametrize("n", [1, 38])
def test_few_documents_are_cut_so_that_no_split_is_empty(n, tmp_path):
    texts = [f"document {i} " * 50 for i in range(n)]
    *_, said, _ = prepare_text(tmp_path / "d", [write_lines(tmp_path / "a.jsonl", texts)], "byte")
    assert said == (
        "validation: the last 10% of the tokens, cut within a document, because there are only "
        f"{n} documents"
    )
    whole = "\0".join(texts).encode()
    train, val = (bytes_of(tmp_path / "d", split) for split in ("train", "val"))
    assert len(train) == int(0.9 * len(whole))
    if n == 1:
        assert train + val == whole
    else:  # documents that were drawn for validation come last
        assert sorted((train + val).split(b"\0")) == sorted(whole.split(b"\0"))


def test_a_cut_keeps_masks_with_their_tokens(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"prompt": "p" * n, "completion": "c" * 3} for n in range(1, 20)]
    path.write_text("".join(map("{}\n".format, map(json.dumps, lines))))
    prepare_text(tmp_path / "d", [path], "byte")
    for split in ("train", "val"):
        mask = np.fromfile(tmp_path / "d" / f"{split}.mask.bin", np.uint8)
        text = np.frombuffer(bytes_of(tmp_path / "d", split), np.uint8)
        assert (mask == (text != ord("p"))).all()  # completions and end-of-text tokens


def test_text_that_is_not_divided_trains_and_is_a_test_split(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)

    def prepared(*options):
        words = ["text", "--input", tmp_path / "a.txt", "--tokenizer", "byte", *options]
        prepare.main([*map(str, words), "--out", str(tmp_path / "d"), "--overwrite"])
        return {path.name for path in (tmp_path / "d").iterdir()}

    def opened(*splits):
        config = load_config("tiny", "model.block_size=8", f"data.path={tmp_path / 'd'}")
        dataset = open_dataset(config.data, config.model, *splits)
        dataset.verify()
        return {split: tokens.size for split, tokens in dataset.sources[0].tokens.items()}

    assert prepared() == {"train.bin", "val.bin", "meta.json"}
    assert prepared("--val-share", "0") == {"train.bin", "meta.json"}
    assert opened() == {"train": 1881, "val": 19}  # data.val_share is 0.01
    assert opened(None) == {"train": 1900}
    for _ in range(2):  # even with --overwrite, a test split never replaces training data
        with pytest.raises(SystemExit):
            prepared("--split", "test")
        assert f"--split test: would delete {tmp_path}/d/train.bin; " in capsys.readouterr().err
        assert opened(None) == {"train": 1900}
    assert prepared("--split", "train") == {"train.bin", "meta.json"}
    assert f"; train on it with data.path={tmp_path}/d" in capsys.readouterr().out
    (tmp_path / "d" / "train.bin").unlink()
    for _ in range(2):
        assert prepared("--split", "test") == {"test.bin", "meta.json"}
        said = f"; evaluate on it with --split test data.path={tmp_path}/d\n"
        assert capsys.readouterr().out.endswith(said)
    assert opened(["test"]) == opened(None) == {"test": 1900}
    with pytest.raises(UsageError, match="has no split train, but only test; give other data, or"):
        opened()


def test_a_sentencepiece_model_has_that_packages_tokens(tmp_path, tiny_shakespeare):
    package = pytest.importorskip("sentencepiece")
    package.SentencePieceTrainer.train(
        input=str(tiny_shakespeare), model_prefix=str(tmp_path / "tokenizer"), vocab_size=400,
        model_type="bpe", byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    reference = package.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    texts = [f"To be, or not to be:  {n} ä\n漢" for n in range(30)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    for given in (tmp_path, tmp_path / "tokenizer.model"):
        tokenizer = load_tokenizer(given)
        assert isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.vocab_size == 400
        assert tokenizer.end_of_text == reference.eos_id()
        assert tokenizer.decode(tokenizer.encode(texts[1])) == reference.decode(
            reference.encode(texts[1])
        )
    prepare_text(tmp_path / "d", [path], str(tmp_path), split="train")
    expected = []
    for text in texts:
        expected += [*reference.encode(text), reference.eos_id()]
    assert np.fromfile(tmp_path / "d" / "train.bin", np.uint16).tolist() == expected[:-1]
    again = load_tokenizer(tmp_path / "d")  # the folder of a dataset names its tokenizer
    assert again.to_meta() == tokenizer.to_meta()
    n_bytes = sum(len(reference.decode(reference.encode(text)).encode()) for text in texts)
    assert again.count_bytes(np.array(expected)) == n_bytes
    with pytest.raises(UsageError, match="--eos <x>: is not a token of"):
        load_tokenizer(tmp_path, "<x>")


def test_a_tokenizer_model_that_is_none_is_one_sentence(tmp_path):
    pytest.importorskip("sentencepiece")
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"not a model")
    with pytest.raises(UsageError, match="tokenizer.model: cannot be read"):
        load_tokenizer(path)
    path.write_bytes(b"IQ== 0\nIg== 1\n")  # the first lines of Llama 3's file
    with pytest.raises(UsageError, match="is a file for tiktoken.*give the model's tokenizer.json"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a_text_document.bin", "a_text_document.idx"], "give data.path={}/a_text_document$"),
        (
            ["a.bin", "a.idx", "b.bin", "b.idx"],
            "it has 2 Megatron pairs; give one of them, such as data.path={}/a, or list them",
        ),
        (["fineweb_train_000001.bin"], "give data.path={}/fineweb_train_000001.bin$"),
        (["a.txt"], "run python -m jaxgpt.prepare text --input {} --name NAME, then set data.da"),
        ([], "give a folder with train.bin"),
    ],
)
def test_a_folder_without_its_own_format_says_what_to_give(names, words, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100)
    config = load_config("tiny", f"data.path={tmp_path}")
    with pytest.raises(UsageError, match=words.format(tmp_path)):
        open_dataset(config.data, config.model)
