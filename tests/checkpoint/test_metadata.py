"""The JSON of a checkpoint is read only if it is undamaged and belongs to that step."""

import json

import pytest

from jaxgpt.checkpoint.metadata import (
    add_checksum,
    is_step,
    list_checkpoints,
    newest_undamaged,
    quarantine,
    read_meta,
    remove_temporary,
)
from jaxgpt.config import Config, UsageError

META = {
    "step": 40, "batch_sizes": [[1, 12288]], "config": Config().to_dict(), "mesh": "data=1",
    "jax": "0.10",
    "processes": 1, "data_fingerprint": [["a", "b"]], "tokenizer": None,
    "checksums": {"params/a": 7}, "watch": {"limits": [float("inf"), 1e-45]},
    "skip": (1, 2), "prompt": "äöü",
}  # fmt: skip


def written(run, step, text):
    path = run / "checkpoints" / str(step) / "meta" / "metadata"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_what_was_saved_is_read(tmp_path):
    written(tmp_path, 40, json.dumps(add_checksum(META)))
    assert read_meta(tmp_path, 40) == json.loads(json.dumps(META))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"checksums"', '"checksumr"'),
        ("12288", "92288"),
        ('"params/a": 7', '"params/a": 6'),
        ('"config": {', '"config": {}, "other": {'),
        ('"sha256"', '"sha255"'),
        ("{", "[{"),
        (": 1,", ": 1"),
    ],
)
def test_a_change_is_noticed(old, new, tmp_path):
    text = json.dumps(add_checksum(META))
    assert old in text
    written(tmp_path, 40, text.replace(old, new, 1))
    with pytest.raises(UsageError, match="40/meta/metadata: is damaged .*; remove .*points/40 to"):
        read_meta(tmp_path, 40)


def test_a_renamed_checkpoint_is_not_that_of_another_step(tmp_path):
    written(tmp_path, 41, json.dumps(add_checksum(META)))
    with pytest.raises(UsageError, match="points/41: .* saved after step 40; rename it"):
        read_meta(tmp_path, 41)
    assert [n for n in ("41", "0041", "²", "foo", "41.tmp", "0") if is_step(n)] == ["41", "0"]


def test_a_folder_that_cannot_be_read_does_not_count_as_empty(tmp_path):
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(UsageError, match=r"checkpoints: cannot be read \(File name too long\)"):
        list_checkpoints(tmp_path / (300 * "x"))


def test_an_inaccessible_folder_is_a_usage_error_or_ignored(tmp_path):
    inaccessible = tmp_path / (300 * "x")
    with pytest.raises(UsageError, match=r"damaged; .*5 cannot be renamed \(File name too long\)"):
        quarantine(inaccessible, 5, "damaged")
    remove_temporary(inaccessible)


def test_the_newest_checkpoint_up_to_a_step_may_be_of_that_step(tmp_path):
    for step in (10, 20, 30):
        written(tmp_path, step, json.dumps(add_checksum(META | {"step": step})))
    found = {last: newest_undamaged(tmp_path, "refuse", last)[0] for last in (9, 19, 20, None)}
    assert found == {9: None, 19: 10, 20: 20, None: 30}
