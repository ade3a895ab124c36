"""train.batch_size changes on resume, and every row of the data is still read exactly once."""

import json

import numpy as np
import pytest

from blends import write_corpora
from jaxgpt import inspect, replay
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.train import loop
from jobs import SMALL, checkpoint_arrays, limited_devices, losses, records, train_here

T = 64
N_TOKENS = 200 * T + 37
PER_EPOCH = 202  # windows that begin T apart and cover N_TOKENS from any phase: ceil((N-1)/T) + 1
SETTINGS = (
    *SMALL, "model.n_embd=32", "model.vocab_size=97", "data.val_share=0.05", "checkpoint.keep=9",
    "optimizer.warmup_iters=2", "optimizer.learning_rate=0.01",
)  # fmt: skip
MESH = ("--mesh", "2,1,1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Random tokens in which any 3 consecutive ones identify their offset."""
    home = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        np.random.default_rng(0).integers(97, size=N_TOKENS).astype(np.uint16).tofile(
            home / f"{split}.bin"
        )
    return f"data.path={home}"


def train(out, end, size, *settings, mesh=MESH):
    words = (f"train.max_iters={end}", f"train.batch_size={size}", *settings)
    return train_here(*SETTINGS, *mesh, *words, "--out", out)


def rows_of(capsys, run, steps, *settings):
    """Return what `inspect` reports about the rows of some steps."""
    capsys.readouterr()
    for step in steps:
        inspect.main(["--run", str(run), "--step", str(step), "--json", *settings])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def assert_read_once(rows):
    """Check that no sequence, and no row within an epoch, is repeated or left out."""
    assert [row["sequence"] for row in rows] == list(range(len(rows)))
    for first in range(0, len(rows), PER_EPOCH):
        offsets = [row["offset"] for row in rows[first : first + PER_EPOCH]]
        assert len(set(offsets)) == len(offsets)
        if len(offsets) == PER_EPOCH:
            seen = np.zeros(N_TOKENS, bool)
            for offset in offsets:
                seen[offset : offset + T + 1] = True
            assert seen.all()


def steps_read(out):
    """Return step -> sequences consumed up to that step, from metrics.jsonl."""
    return {r["step"]: r["consumed_tokens"] / T for r in records(out)}


def test_up_and_down_twice_over_an_epoch_on_other_meshes(data, tmp_path, capsys, monkeypatch):
    read, batch = [], Loader.batch

    def remember(self, step):
        read.append(np.asarray(found := batch(self, step)))
        return found

    monkeypatch.setattr(Loader, "batch", remember)
    ends, sizes = (7, 9, 12, 14, 17, 40), (8, 12, 4, 24, 8, 8)
    meshes = ("2,1,1", "1,4,1", "1,1,2", "4,2,1", "1,1,1", "2,1,2")
    for end, size, mesh in zip(ends, sizes, meshes, strict=True):
        train(tmp_path, end, size, data, mesh=("--mesh", mesh))
    rows = rows_of(capsys, tmp_path, range(1, 41))
    assert len(rows) == 7 * 8 + 2 * 12 + 3 * 4 + 2 * 24 + 26 * 8 > 1.7 * PER_EPOCH
    assert_read_once(rows)
    # Two batches may be read ahead of the last step of a start, which the next start reads again.
    trained = {tokens.tobytes() for tokens in np.concatenate(read)}
    assert {np.int32(row["tokens"]).tobytes() for row in rows} <= trained
    names = ("step", "batch_size", "consumed_sequences")
    starts = [tuple(r[name] for name in names) for r in records(tmp_path, "start")]
    assert starts == [(0, 8, 0), (7, 12, 56), (9, 4, 80), (12, 24, 92), (14, 8, 140), (17, 8, 164)]
    assert [steps_read(tmp_path)[end] for end in ends] == [56, 80, 92, 140, 164, len(rows)]
    log = (tmp_path / "train.log").read_text()
    assert "data: step 8 begins at sequence 56; train.batch_size=12 (was 8)" in log
    assert "data: step 18 " not in log  # the batch size has not changed
    assert "order of the data" not in log


def test_every_corpus_of_a_blend_is_read_once_and_counted(tmp_path, capsys):
    blend, out = ("--data.blend", *write_corpora(tmp_path)), tmp_path / "run"
    for end, size in ((5, 16), (8, 32), (14, 8)):
        train(out, end, size, *blend)
    rows = rows_of(capsys, out, range(1, 15))
    assert [row["sequence"] for row in rows] == list(range(5 * 16 + 3 * 32 + 6 * 8))
    for name, size in {"name0": 112, "name1": 56}.items():  # half and a quarter of 224 rows
        assert sum(row["corpus"] == name for row in rows) == size
    # The rows of one batch of that size are the same, so their order is that of one run.
    settings = [word for word in (*SETTINGS, "train.batch_size=224", *blend) if word != "--config"]
    config = load_config(*settings)
    dataset = open_dataset(config.data, config.model)
    whole = Loader.for_training(dataset, config).read(1, range(224))
    assert [row["tokens"] for row in rows] == whole.tolist()
    (last,) = (r for r in records(out) if r["step"] == 14)
    counted = {name: corpus["tokens"] / T for name, corpus in last["corpora"].items()}
    assert counted == {n: sum(row["corpus"] == n for row in rows) for n in counted}
    assert last["consumed_tokens"] == len(rows) * T


def test_skipped_steps_consume_batches_of_their_size(data, tmp_path, capsys):
    skip = ("--train-range-to-skip", "4", "7")
    train(tmp_path, 5, 8, data, *skip)
    train(tmp_path, 9, 16, data)
    assert [s for s, loss in losses(tmp_path).items() if loss is None] == [4, 5, 6, 7]
    assert steps_read(tmp_path) == {s: 8 * min(s, 5) + 16 * max(s - 5, 0) for s in range(1, 10)}
    assert_read_once(rows_of(capsys, tmp_path, range(1, 10)))


def test_a_start_that_saved_nothing_does_not_count(data, tmp_path, capsys):
    """Only checkpoints record earlier batch sizes."""
    train(tmp_path / "a", 5, 8, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", lambda *_: None)
        train(tmp_path / "a", 8, 24, data)
    # As long as nothing is saved, later steps have the batch size of the configuration.
    assert_read_once(rows_of(capsys, tmp_path / "a", range(1, 9)))
    assert steps_read(tmp_path / "a")[8] == 5 * 8 + 3 * 24
    train(tmp_path / "a", 8, 8, data)
    train(tmp_path / "b", 8, 8, data)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    a, b = (checkpoint_arrays(tmp_path / name, 8) for name in "ab")
    assert all((a[name] == b[name]).all() for name in b)
    assert_read_once(rows_of(capsys, tmp_path / "a", range(1, 9)))


def test_a_rewind_to_before_the_change_skips_the_sequences_of_the_spike(
    tmp_path, capsys, monkeypatch
):
    """By step 36, the model has learned enough for random tokens to cause a spike."""
    row = Loader._row
    random = np.random.default_rng(0).integers(256, size=T + 1)
    monkeypatch.setattr(Loader, "_row", lambda self, n: random if 576 <= n < 600 else row(self, n))
    settings = (
        *SMALL, *MESH, "model.n_embd=32", "optimizer.warmup_iters=2", "checkpoint.keep=9",
        "optimizer.learning_rate=0.01", "checkpoint.interval=10", "spike.action=rewind",
        "spike.window=16", "spike.rewind_margin=10", "spike.skip_before=1", "spike.skip_after=1",
        "--out", tmp_path,
    )  # fmt: skip
    train_here(*settings, "train.batch_size=16", "train.max_iters=33")
    train_here(*settings, "train.batch_size=24", "train.max_iters=50")
    (record,) = records(tmp_path, "rewind")
    assert (record["spike"], record["step"]) == (36, 20)
    # Steps 35 to 37 held 552 to 623. Step 21 now begins at 320, so 552 is in step 30, 623 in 33.
    assert record["skip"] == [30, 33]
    assert [s for s, loss in losses(tmp_path).items() if loss is None] == [30, 31, 32, 33]
    log = (tmp_path / "train.log").read_text()
    assert "data: step 34 begins at sequence 528; train.batch_size=24 (was 16)" in log
    assert "data: step 21 begins at sequence 320; train.batch_size=24 (was 16)" in log
    assert steps_read(tmp_path) == {s: 16 * min(s, 20) + 24 * max(s - 20, 0) for s in range(1, 51)}
    rows = rows_of(capsys, tmp_path, range(1, 51))
    assert [row["sequence"] for row in rows] == list(range(20 * 16 + 30 * 24))
    offsets = [row["offset"] for row in rows]
    assert len(set(offsets)) == len(offsets)


def test_replay_repeats_steps_with_the_batch_size_that_they_had(data, tmp_path, capsys):
    for end, size in ((5, 8), (8, 16), (12, 4)):
        train(tmp_path, end, size, data, "checkpoint.keep=1")
    with limited_devices(2), ProcessGroup(launcher="test") as cluster:
        capsys.readouterr()
        assert not replay.replay(tmp_path, [3, 7, 12], None, cluster)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" from ")[0] for line in lines] == [
        f"agrees bit for bit: step {step}" for step in (3, 7, 12)
    ]
    assert all("from the initial state" in line for line in lines)
