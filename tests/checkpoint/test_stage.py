"""A checkpoint goes to the run directory by way of a folder of the node."""

import shutil
import threading

import jax
import numpy as np
import pytest

from jaxgpt.checkpoint import save as saving
from jaxgpt.checkpoint import stage as staging
from jaxgpt.checkpoint.checkpointer import Checkpoints, restore_params
from jaxgpt.checkpoint.metadata import list_checkpoints
from jaxgpt.checkpoint.stage import Stage
from jaxgpt.config import MeshShape, UsageError, load_config
from jaxgpt.parallel.mesh import make_mesh
from jobs import META


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def stage(run, tmp_path):
    return Stage(str(tmp_path / "nvme"), run)


def open_run(run, tmp_path, *settings):
    checkpoints = Checkpoints(
        run, load_config("tiny", f"checkpoint.stage={tmp_path / 'nvme'}", *settings)
    )
    checkpoints.open(tree(0))
    return checkpoints


def tree(step):
    """A state with parts on several devices, and a copy on each."""
    mesh = make_mesh(MeshShape(2, 2, 2))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    copied = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = np.arange(4096, dtype=np.float32).reshape(64, 64) + step
    return {"params": {"w": jax.device_put(w, sharded), "b": jax.device_put(w[0], copied)}}


def shapes():
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree(0)
    )


def same(found, step):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, tree(step)))


def spoil(checkpoint):
    """Change a number that it holds."""
    start = np.asarray(tree(int(checkpoint.name))["params"]["b"]).tobytes()[4:32]
    (file,) = (f for f in checkpoint.rglob("*") if f.is_file() and start in f.read_bytes())
    file.write_bytes(file.read_bytes().replace(start, start[:-4] + b"\0\0\0\0"))


def test_both_folders_hold_the_same_checkpoint_and_the_stage_only_the_newest(run, stage, tmp_path):
    checkpoints = open_run(run, tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, tree(step), META)
    checkpoints.close()
    assert list_checkpoints(run) == [2, 3]  # checkpoint.keep=2
    assert list_checkpoints(stage.directory) == [3]
    assert sorted(p.name for p in stage.checkpoints.iterdir()) == ["3"]
    for folder in (run, stage.directory):
        assert same({"params": restore_params(folder, 3, shapes()["params"])}, 3)


def test_the_nearest_undamaged_copy_is_restored(run, stage, tmp_path):
    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.close()
    spoil(run / "checkpoints" / "1")
    assert same(checkpoints.restore(1, shapes())[0], 1)  # the staged one
    shutil.rmtree(run / "checkpoints" / "1")
    shutil.copytree(stage.checkpoints / "1", run / "checkpoints" / "1")
    spoil(stage.checkpoints / "1")
    assert same(checkpoints.restore(1, shapes())[0], 1)  # the run directory's
    spoil(run / "checkpoints" / "1")
    with pytest.raises(UsageError, match=f"{run}/checkpoints/1: .* is not what was saved"):
        checkpoints.restore(1, shapes())


def test_a_staged_checkpoint_of_the_same_step_from_another_time_is_not_restored(
    run, stage, tmp_path
):
    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.close()
    old = tmp_path / "old"
    stage.checkpoints.rename(old)
    shutil.rmtree(run / "checkpoints")
    checkpoints.open(shapes())
    checkpoints.save(1, tree(5), META)
    checkpoints.close()
    shutil.rmtree(stage.checkpoints)
    old.rename(stage.checkpoints)
    assert same(checkpoints.restore(1, shapes())[0], 5)


def test_a_slow_run_directory_holds_up_the_save_after_the_next_not_the_next(
    run, tmp_path, monkeypatch
):
    copy, may_copy = saving.copy_files, threading.Event()
    monkeypatch.setattr(saving, "copy_files", lambda *a: may_copy.wait(60) and copy(*a))
    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.save(2, tree(2), META)  # while the first is being copied
    assert list_checkpoints(run) == []
    may_copy.set()
    checkpoints.close()
    assert list_checkpoints(run) == [1, 2]


def line(step):
    """A line of metrics.jsonl."""
    return f'{{"kind": "train", "step": {step}, "loss": 1.0, "skipped": false}}\n'


def test_the_next_start_completes_a_copy_that_was_cut_short(run, stage, tmp_path, monkeypatch):
    def cut_short(*arguments):
        raise OSError(5, "Input/output error")

    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.close()
    with monkeypatch.context() as patch:
        patch.setattr(saving, "copy_files", cut_short)
        checkpoints.save(2, tree(2), META)
        checkpoints.close(is_final=False)
    assert list_checkpoints(run) == [1]
    metrics = run / "metrics.jsonl"
    metrics.write_text(line(1))  # it went on from 1 on another node
    assert stage.recover(run, log_interval=1) == []
    (stage.checkpoints / "2" / "copied").unlink()
    metrics.write_text(line(1) + line(2))
    (note,) = stage.recover(run, log_interval=1)
    assert note == f"checkpoint 2: copied from {stage.directory}, its stage"
    assert list_checkpoints(run) == [1, 2]
    shutil.rmtree(stage.directory)
    assert same(checkpoints.restore(2, shapes())[0], 2)


def test_what_cannot_be_copied_now_is_kept_and_what_is_damaged_is_said(
    run, stage, tmp_path, monkeypatch
):
    checkpoints = open_run(run, tmp_path)
    for step in (1, 2):
        checkpoints.save(step, tree(step), META)
    checkpoints.close()
    shutil.rmtree(run / "checkpoints" / "2")
    (stage.checkpoints / "2" / "copied").unlink()
    (run / "metrics.jsonl").write_text(line(1) + line(2))

    def no_room(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "copy_files", no_room)
        with pytest.raises(UsageError, match=r"/2: cannot be copied to .*No space left.*make room"):
            stage.recover(run, log_interval=1)
    assert list_checkpoints(run) == [1] and list_checkpoints(stage.directory) == [2]
    meta = stage.checkpoints / "2" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"step": 2', '"step": 3'))
    (note,) = stage.recover(run, log_interval=1)
    assert note.startswith("warning: checkpoint 2 is not copied from its stage: ")
    assert "is damaged" in note and list_checkpoints(run) == [1]


def test_a_checkpoint_that_a_rewind_removed_does_not_come_back(run, stage, tmp_path):
    checkpoints = open_run(run, tmp_path)
    for step in (1, 2):
        checkpoints.save(step, tree(step), META)
    checkpoints.close()
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 2}\n')
    shutil.rmtree(run / "checkpoints" / "2")
    assert stage.recover(run, log_interval=1) == [] and list_checkpoints(run) == [1]
    checkpoints.forget_later(1)
    assert list_checkpoints(stage.directory) == []


def test_parts_that_process_0_does_not_see_are_joined_in_the_run_directory(
    run, stage, tmp_path, monkeypatch
):
    monkeypatch.setattr(Stage, "has_parts", lambda *arguments: False)
    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.close()
    assert list(stage.checkpoints.iterdir()) == []
    assert same(checkpoints.restore(1, shapes())[0], 1)


def test_runs_of_the_same_name_have_their_own_folders(tmp_path):
    one, other = (Stage(str(tmp_path), tmp_path / name / "run") for name in "ab")
    assert one.directory != other.directory
    assert one.directory == Stage(str(tmp_path), tmp_path / "a" / "run").directory


def test_a_stage_that_cannot_be_written_is_one_sentence(run, tmp_path):
    (tmp_path / "nvme").write_text("")
    with pytest.raises(UsageError, match=r"checkpoint.stage=.*nvme: cannot be written on host \w"):
        open_run(run, tmp_path)
