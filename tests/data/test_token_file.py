import os
import resource

import numpy as np
import pytest

from jaxgpt.config import UsageError
from jaxgpt.data.token_file import (
    OTHER_FILES,
    TokenFile,
    Tokens,
    allow_open_files,
    fingerprint,
)


def tokens_of(path, dtype, size):
    return Tokens(TokenFile(path, np.dtype(dtype), size))


@pytest.fixture
def path(tmp_path):
    np.arange(10_000, dtype="<u2").tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin"


def test_parts_of_a_file_are_read_from_their_place(path):
    part = tokens_of(path, np.uint16, 10_000).part(1000, 3000)
    assert part.size == 2000
    assert part.read(500, 3).tolist() == [1500, 1501, 1502]
    assert part.part(10, 20).read(0, 2).tolist() == [1010, 1011]


def test_a_read_that_the_system_splits_is_completed(path, monkeypatch):
    """Linux reads at most 2 GiB at a time."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, to, at: preadv(file, [to[0][:1001]], at))
    assert tokens_of(path, np.uint16, 10_000).read(2, 5000).tolist() == list(range(2, 5002))


def test_a_file_that_shrinks_while_it_is_read_is_named_with_the_offset(path):
    tokens = tokens_of(path, np.uint16, 10_000)
    tokens.read(9_990, 10)
    os.truncate(path, 3001)
    with pytest.raises(UsageError, match=r"tokens.bin: ends at byte 3001, before token 1509"):
        tokens.read(1490, 20)
    assert tokens.read(100, 20)[0] == 100  # what is there can still be read


def test_tokens_outside_the_vocabulary_are_named_in_every_type(tmp_path):
    for dtype, bad in (("u2", 300), ("i4", -1), ("i8", 2**32 + 5), ("u4", 2**31 + 1)):
        ids = np.arange(100).astype(dtype)
        ids[57] = bad
        ids.tofile(tmp_path / "x.bin")
        part = tokens_of(tmp_path / "x.bin", np.dtype(dtype), 100).part(20, 100)
        with pytest.raises(UsageError, match=rf"x.bin holds token {bad} at offset 57"):
            part.check_vocab_range(part.read(10, 50), 10, 256)
        part.check_vocab_range(part.read(0, 37), 0, 256)


def test_the_fingerprint_sees_sizes_types_and_pages(tmp_path, path):
    def of(file, vocab_size=256):
        return fingerprint({"train": file}, vocab_size, 16)

    whole = tokens_of(path, np.uint16, 10_000)
    same = of(whole)
    assert of(tokens_of(path, np.uint16, 10_000)) == same
    changed = np.fromfile(path, np.uint16)
    changed[-1] += 1
    changed.tofile(tmp_path / "other.bin")
    others = [
        of(whole, 257),
        of(whole.part(0, 9_999)),
        of(tokens_of(path, np.int16, 10_000)),
        of(tokens_of(tmp_path / "other.bin", np.uint16, 10_000)),
    ]
    assert same not in others and len(set(others)) == 4


def test_so_many_files_can_be_open_as_a_blend_has(path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        allow_open_files(many)
        whole = [tokens_of(path, np.uint16, 10_000) for _ in range(many)]
        for tokens in whole:
            for part in (tokens.part(0, 9000), tokens.part(9000, 10_000)):
                assert part.read(7, 1)[0] == part.first + 7
        assert len(os.listdir("/proc/self/fd")) < many + OTHER_FILES  # one for both parts
        with pytest.raises(
            UsageError, match=r"data: there are 10000000000 token files, but .* may"
        ):
            allow_open_files(10**10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
