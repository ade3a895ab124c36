import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from blends import write_corpora, write_pair
from jaxgpt.config import UsageError, load_config
from jaxgpt.data.dataset import open_dataset, vocabulary_size
from jaxgpt.data.loader import Loader
from jaxgpt.data.megatron import read_index
from jaxgpt.data.prepare.writer import write_dataset
from jaxgpt.data.tokenizers import ByteTokenizer

SETTINGS = (
    "model.vocab_size=97",
    "model.block_size=64",
    "train.batch_size=16",
    "data.val_share=0.05",
)


class LargeTokenizer(ByteTokenizer):
    vocab_size = 70_000


@pytest.fixture
def lines(tmp_path):
    return write_corpora(tmp_path)


def configured(lines, *settings):
    return load_config("tiny", *SETTINGS, *settings, "--data.blend", *lines)


def opened(lines, *settings):
    config = configured(lines, *settings)
    dataset = open_dataset(config.data, config.model)
    dataset.verify()
    return dataset, Loader.for_training(dataset, config)


def test_rows_of_every_kind_of_source_are_the_tokens_at_their_place(lines):
    dataset, rows = opened(lines)
    assert rows.names == tuple(f"name{c}" for c in range(5))
    assert (
        "5 sources of 5 corpora (Megatron uint16, nanoGPT file uint16, nanoGPT folder uint16)"
        in dataset.describe()[0]
    )
    seen = set()
    for step in range(1, 40):
        for row, tokens in enumerate(rows.read(step, range(16))):
            place = rows.row_location(step, row)
            first = dataset.sources[place.source].tokens["train"].first + place.offset
            assert (tokens == (31 * (first + np.arange(65)) + place.corpus) % 97).all()
            seen.add(place.corpus)
    assert seen == set(range(5))


def test_every_corpus_has_its_share_after_every_step(lines):
    _, rows = opened(lines)
    counts = np.zeros(5)
    for step in range(1, 300):
        counts += np.bincount(rows.corpora(step), minlength=5)
        assert np.abs(counts - 16 * step * np.array([0.5, 0.25, 0.15, 0.07, 0.03])).max() <= 1
        assert rows.tokens_consumed(step) == [64 * count for count in counts]


def test_a_file_list_is_the_same_blend(lines, tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# weight path corpus\n\n" + "\n".join(lines) + "\n")
    config = load_config("tiny", *SETTINGS, f"data.file_list={path}")
    dataset = open_dataset(config.data, config.model)
    assert dataset.fingerprints == opened(lines)[0].fingerprints
    assert (Loader.for_training(dataset, config).read(7, range(16)) == opened(lines)[1].read(
        7, range(16)
    )).all()  # fmt: skip


def test_documents_are_not_shared_between_training_and_validation(lines, tmp_path):
    dataset, _ = opened(lines, "data.val_share=0.2")
    index = read_index(tmp_path / "corpus2")
    source = dataset.sources[2]
    boundary = source.tokens["val"].first
    assert boundary == index.find(boundary).start
    assert source.tokens["val"].size == pytest.approx(0.2 * 4000, abs=250)
    assert source.tokens["train"].size + source.tokens["val"].size == 4000
    assert dataset.sources[1].tokens["val"].size == round(0.2 * 3001)


def test_the_same_corpus_of_several_files_counts_as_one(lines):
    lines = [line.rsplit(maxsplit=1)[0] + f" {'ab'[c > 2]}" for c, line in enumerate(lines)]
    dataset, rows = opened(lines)
    assert rows.names == ("a", "b")
    counts = np.array([np.bincount(rows.corpora(s), minlength=2) for s in range(1, 200)])
    shares = 16 * np.arange(1, 200)[:, None] * np.array([0.9, 0.1])
    assert np.abs(counts.cumsum(axis=0) - shares).max() <= 1


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_pair_of_megatrons_is_named_by_its_prefix_or_one_of_its_files(lines, tmp_path, suffix):
    dataset, _ = opened([f"1 {tmp_path}/corpus2{suffix}"])
    assert dataset.corpora == ("corpus2",) and dataset.sources[0].format == "Megatron"


def test_sources_without_a_name_are_corpora_of_their_own(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        np.arange(3000, dtype=np.uint16).tofile(tmp_path / folder / "data.bin")
    dataset, _ = opened(
        [f"1 {tmp_path}/a/data.bin", f"2 {tmp_path}/b/data.bin"], "model.vocab_size=3000"
    )
    assert dataset.corpora == (f"{tmp_path}/a/data.bin", f"{tmp_path}/b/data.bin")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: ["x /data/a"], r"data.blend: the line 'x /data/a' must be a weight above"),
        (lambda lines: ["0 /data/a"], "must be a weight above 0"),
        (lambda lines: ["1"], "must be a weight above 0, a path"),
        (lambda lines: ["1 a b c"], r"in quotes if it has spaces\) and, optionally, the name of"),
        (lambda lines: ["1 'a"], "must be a weight above 0, a path"),
        (
            lambda lines: [lines[1].replace(".bin", "")],
            r"corpus1.idx: cannot be read .*for a nanoGPT file, include the suffix .bin",
        ),
        (
            lambda lines: ["1 /nowhere/a"],
            r"there is no token data at /nowhere/a; give",
        ),
        (lambda lines: [*lines, "1e-9 " + lines[0].split()[1]], "less than a millionth"),
    ],
)
def test_what_is_wrong_with_a_blend_is_said(lines, change, words):
    with pytest.raises(UsageError, match=words):
        opened(change(lines))


def test_a_truncated_corpus_is_named(lines, tmp_path):
    os.truncate(tmp_path / "corpus1.bin", 3001)
    with pytest.raises(
        UsageError, match=r"corpus1.bin has 3001 bytes, but 1500 tokens of uint16 take 3000"
    ):
        opened(lines)


def test_a_copy_that_is_cut_off_is_named(lines, tmp_path):
    meta = {"dtype": "uint16", "vocab_size": 97, "tokenizer": {"type": "byte"}}
    meta["tokens"] = {"train": 2500, "val": 700}
    (tmp_path / "corpus3" / "meta.json").write_text(json.dumps(meta))
    opened(lines)
    os.truncate(tmp_path / "corpus3" / "train.bin", 3000)
    with pytest.raises(
        UsageError, match=r"train.bin has 3000 bytes, but 2500 tokens of uint16 take 5000"
    ):
        opened(lines)


@pytest.mark.parametrize(
    ("documents", "tokens", "remedy"),
    [
        ([30], 0, "prepare the text as several documents"),
        ([2000], 0, "prepare the text as several documents"),
        ([30, 2000], 30, "or change data.val_share"),
    ],
)
def test_a_split_that_is_too_short_for_a_row_is_named(lines, documents, tokens, remedy, tmp_path):
    with pytest.raises(UsageError, match=r"corpus1.bin has 30 tokens for split val .* at least 65"):
        opened(lines, "data.val_share=0.01")
    write_pair(tmp_path / "small", [np.arange(size) % 97 for size in documents])
    with pytest.raises(
        UsageError, match=rf"small.bin has {tokens} tokens for split train with data.*{remedy}"
    ):
        opened([f"1 {tmp_path / 'small'}"], "data.val_share=0.01")


def test_paths_with_spaces_are_quoted(lines, tmp_path):
    os.rename(tmp_path / "corpus0", tmp_path / "my corpus")
    path = tmp_path / "my corpus"
    assert opened([f"1 '{path}' mine"])[1].names == ("mine",)
    assert opened([f'1 "{path}"'])[1].names == ("my corpus",)


def test_a_lone_file_has_the_type_that_is_described_beside_it(tmp_path):
    tokens = np.arange(60_000, 70_000)
    write_dataset(tmp_path / "d", {"train": tokens, "val": tokens}, LargeTokenizer(), "test")
    path = tmp_path / "d" / "train.bin"
    config = load_config("tiny", "model.block_size=64", f"data.path={path}")
    assert vocabulary_size(config.data, config.model) == 70_000
    (source,) = open_dataset(config.data, config.model).sources
    assert (source.tokens["train"].read(0, 9900) == tokens[:9900]).all()


def test_files_of_others_are_named(lines, tmp_path, monkeypatch):
    def forbidden(path, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    config = configured(lines, "model.vocab_size=None")
    monkeypatch.setattr(Path, "read_text", forbidden)
    for opening in (open_dataset, vocabulary_size):
        with pytest.raises(UsageError, match=r"data.blend: .*meta.json cannot be read \(Permiss"):
            opening(config.data, config.model)


def test_only_one_key_says_where_the_data_is(lines, tmp_path):
    with pytest.raises(UsageError, match=r"data.path and data.blend: are both given"):
        configured(lines, f"data.path={tmp_path}")


def test_the_vocabulary_comes_from_the_sources(lines):
    config = configured(lines, "model.vocab_size=None")
    assert vocabulary_size(config.data, config.model) == 97
    assert open_dataset(config.data, config.model).vocab_size == 97
    with pytest.raises(UsageError, match=r"model.vocab_size=50: .*corpus0 has a vocabulary of 97"):
        opened(lines, "model.vocab_size=50")


def test_sources_with_different_tokenizers_are_refused(lines, tmp_path):
    meta = tmp_path / "corpus3" / "meta.json"
    meta.write_text(meta.read_text().replace('"byte"', '"char", "characters": "ab"'))
    with pytest.raises(UsageError, match=r"corpus3 has a different tokenizer from .*corpus0"):
        opened(lines)


def test_random_tokens_are_a_rehearsal(lines):
    _, clean = opened(lines)
    _, rows = opened(lines, "--faults.random_tokens", "5", "6")
    assert (rows.read(4, range(16)) == clean.read(4, range(16))).all()
    assert (rows.read(7, range(16)) == clean.read(7, range(16))).all()
    poisoned = rows.read(5, range(16))
    assert len(np.unique(poisoned)) == 97
    assert (poisoned[3:5] == rows.read(5, range(3, 5))).all()  # whoever reads them
    for others in (rows, clean):  # step 6 is the last step of the range
        assert (others.read(6, range(16)) != poisoned).mean() > 0.9
    assert (rows.read(6, range(16)) != clean.read(6, range(16))).mean() > 0.9


def test_a_file_of_200_gb_is_read_without_growing(tmp_path):
    directory = Path(tmp_path / "sparse")
    directory.mkdir()
    with open(directory / "train.bin", "wb") as file:
        file.truncate(200 * 10**9)
    (directory / "val.bin").write_bytes(bytes(10_000))
    config = load_config(
        "tiny", "model.vocab_size=50257", "model.block_size=1024", "train.batch_size=512",
        f"data.path={directory}",
    )  # fmt: skip
    dataset = open_dataset(config.data, config.model)
    dataset.verify()
    rows = Loader.for_training(dataset, config)

    def resident():
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    rows.read(1, range(512))
    before = resident()
    for step in range(2, 30):
        rows.read(10**6 * step, range(512))
    assert resident() - before < 50_000  # kB
