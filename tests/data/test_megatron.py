"""Indexed datasets, compared with the format that Megatron-LM documents and with its own code."""

import struct

import numpy as np
import pytest

from blends import write_pair
from jaxgpt.config import UsageError
from jaxgpt.data.megatron import read_index
from jaxgpt.data.prepare.writer import scratch_folder, write_index

# Four documents of uint16 tokens, with 2, 0, 1 (empty) and 1 sequences.
TOKENS = [7, 8, 9, 10, 11, 12]
IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 4, 5)
    + struct.pack("<4i", 2, 3, 0, 1)
    + struct.pack("<4q", 0, 4, 10, 10)
    + struct.pack("<5q", 0, 2, 2, 3, 4)
)
POINTERS, DOCUMENTS = 34 + 16, 34 + 16 + 32
# Megatron's DType code -> the NumPy dtype that can hold token IDs
CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "c.bin").write_bytes(struct.pack("<6H", *TOKENS))
    (tmp_path / "c.idx").write_bytes(IDX)
    return tmp_path / "c"


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_an_index_is_read(pair, suffix):
    index = read_index(f"{pair}{suffix}")
    assert index.dtype == np.uint16 and index.total_tokens == 6 and len(index.documents) == 5
    assert index.lengths.tolist() == [2, 3, 0, 1]
    assert [index.document_start(d) for d in range(5)] == [0, 5, 5, 5, 6]
    assert [index.find(token).number for token in range(6)] == [0, 0, 0, 0, 0, 3]


def test_what_is_written_is_the_format_byte_for_byte(tmp_path):
    # The sequences of `IDX`, each of them a document.
    write_index(tmp_path / "d.idx", np.dtype("<u2"), np.array([2, 3, 0, 1]))
    documents = struct.pack("<5q", 0, 1, 2, 3, 4)
    assert (tmp_path / "d.idx").read_bytes() == IDX[:DOCUMENTS] + documents


@pytest.mark.parametrize(("code", "dtype"), CODES.items())
def test_every_integer_of_megatron_is_known(tmp_path, code, dtype):
    largest = np.iinfo(dtype).max
    write_pair(tmp_path / "c", [[0, largest]], dtype)
    index = read_index(tmp_path / "c")
    assert (tmp_path / "c.idx").read_bytes()[17] == code
    assert np.fromfile(index.bin_path, index.dtype).tolist() == [0, largest]


def test_multimodal_data_is_read_where_it_is_text(pair):
    pair.with_suffix(".idx").write_bytes(IDX + bytes(4))
    assert read_index(pair).total_tokens == 6
    pair.with_suffix(".idx").write_bytes(IDX + bytes([0, 0, 1, 0]))
    with pytest.raises(UsageError, match=f"mode 1 of sequence 2 at byte {len(IDX) + 2}"):
        read_index(pair)


def changed(at, new):
    return IDX[:at] + new + IDX[at + len(new) :]


@pytest.mark.parametrize(
    ("idx", "words"),
    [
        (None, "c.idx: cannot be read"),
        (b"MMIDIDX\x00\x00" + bytes(3), "end of file at byte 12, expected a header of 34 bytes"),
        (b"TNTIDX\x00\x00" + bytes(80), "--dataset-impl mmap"),
        (b"{}" * 50, "at byte 0"),
        (changed(9, struct.pack("<Q", 2)), "version 2 at byte 9"),
        (changed(17, b"\x07"), r"dtype code 7 at byte 17, expected one of \[1, 2"),
        (changed(17, b"\x63"), "dtype code 99 at byte 17"),
        (IDX[:-1], f"end of file at byte {len(IDX) - 1}, expected it at byte {len(IDX)}"),
        (changed(18, b"\xff" * 7), f"end of file at byte {len(IDX)}, expected it at byte"),
        (
            changed(POINTERS + 8, b"\x02"),
            f"start 2 of sequence 1 at byte {POINTERS + 8}, expected 4",
        ),
        (changed(DOCUMENTS + 8, b"\x09"), f"invalid documents at byte {DOCUMENTS}"),
        (
            changed(DOCUMENTS - 8, b"\x08"),
            f"start 8 of sequence 3 at byte {DOCUMENTS - 8}, expected 10",
        ),
        (changed(17, b"\x04"), f"start 4 of sequence 1 at byte {POINTERS + 8}, expected 8"),
    ],
    ids=lambda x: None if isinstance(x, str) else "",
)
def test_a_damaged_index_is_refused_with_file_and_offset(pair, idx, words):
    if idx is None:
        pair.with_suffix(".idx").unlink()
    else:
        pair.with_suffix(".idx").write_bytes(idx)
    with pytest.raises(UsageError, match=words):
        read_index(pair)


def test_a_truncated_token_file_is_refused(pair):
    pair.with_suffix(".bin").write_bytes(bytes(11))
    with pytest.raises(
        UsageError, match="c.bin: found end of file at byte 11, expected it at .* 12"
    ):
        read_index(pair)


def test_a_crash_leaves_the_old_pair_and_nothing_else(pair):
    with pytest.raises(KeyboardInterrupt), scratch_folder(pair.parent) as scratch:
        (scratch / "c.bin").write_bytes(bytes(6))
        raise KeyboardInterrupt
    assert sorted(f.name for f in pair.parent.iterdir()) == ["c.bin", "c.idx"]
    assert read_index(pair).total_tokens == 6


@pytest.mark.long
@pytest.mark.parametrize("dtype", CODES.values(), ids=lambda d: d.__name__)
def test_megatron_core_reads_and_writes_the_same(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    random = np.random.default_rng(0)
    documents = [0, 3, 1, 70_000]  # their lengths
    tokens = [random.integers(0, np.iinfo(dtype).max, size, dtype) for size in documents]

    theirs = str(tmp_path / "theirs")
    builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
    for ids in tokens:
        builder.add_document(torch.from_numpy(ids.astype(np.int64)), [len(ids)])
    builder.finalize(f"{theirs}.idx")
    write_pair(tmp_path / "ours", tokens, dtype)
    for suffix in ("bin", "idx"):
        ours = (tmp_path / f"ours.{suffix}").read_bytes()
        assert ours == (tmp_path / f"theirs.{suffix}").read_bytes()

    index = read_index(theirs)
    read = np.fromfile(index.bin_path, index.dtype)
    bounds = [index.document_start(d) for d in range(len(documents) + 1)]
    for d, ids in enumerate(tokens):
        assert (read[bounds[d] : bounds[d + 1]] == ids).all()
    dataset = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert (np.concatenate([dataset[i] for i in range(len(dataset))]) == read).all()


def test_a_document_that_is_too_long_for_the_index_is_one_sentence(tmp_path):
    """The index stores lengths as int32."""
    with pytest.raises(UsageError, match="a document has 2,147,483,648 tokens, but .* divide this"):
        write_index(tmp_path / "a.idx", np.dtype("<u2"), np.array([5, 2**31]))
    write_index(tmp_path / "a.idx", np.dtype("<u2"), np.array([5, 2**31 - 1]))
