"""Checkpoints are saved to a faster folder, and then copied to the run directory."""

import os
import shutil
import threading
import time

import jax
import numpy as np
import pytest

from jaxgpt.checkpoint import local as local_module
from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.checkpoint.local import LocalFolder
from jaxgpt.checkpoint.metadata import list_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, UsageError, load_config
from jaxgpt.parallel.mesh import make_mesh
from jobs import META


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def local(run, tmp_path):
    return LocalFolder(str(tmp_path / "nvme"), run)


def open_run(run, tmp_path, *settings):
    checkpoints = Checkpoints(
        run, load_config("tiny", f"checkpoint.local={tmp_path / 'nvme'}", *settings)
    )
    checkpoints.open(tree(0))
    return checkpoints


def tree(step):
    """Return a state with a sharded and a replicated array."""
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


def test_all_checkpoints_reach_the_run_directory_and_none_stays_behind(run, local, tmp_path):
    checkpoints = open_run(run, tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, tree(step), META)
    checkpoints.close()
    assert list_checkpoints(run) == [2, 3]  # checkpoint.keep=2
    assert list((local.directory / "checkpoints").iterdir()) == []
    assert same(checkpoints.restore(3, shapes())[0], 3)


def test_a_slow_run_directory_delays_the_save_after_the_next_not_the_next(
    run, tmp_path, monkeypatch
):
    copy, may_copy = LocalFolder.copy_to_run, threading.Event()
    monkeypatch.setattr(
        LocalFolder, "copy_to_run", lambda self, step: may_copy.wait(60) and copy(self, step)
    )
    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.save(2, tree(2), META)  # while the first is being copied
    assert list_checkpoints(run) == []
    may_copy.set()
    checkpoints.close()
    assert list_checkpoints(run) == [1, 2]


@pytest.mark.parametrize("offset", [3600, -3600])
def test_the_time_of_a_save_includes_the_copy(offset, run, local, tmp_path, monkeypatch):
    """The clock of the file server may be `offset` seconds ahead."""
    copy, found = local_module._copy_to_disk, []

    def slowly(source, target):
        if source.endswith("meta/metadata"):  # once for each checkpoint
            time.sleep(0.5)
        copy(source, target)

    monkeypatch.setattr(local_module, "_copy_to_disk", slowly)
    checkpoints = open_run(run, tmp_path)
    checkpoints.log = found.append
    began = time.perf_counter()
    checkpoints.save(1, tree(1), META)
    while not list_checkpoints(local.directory):
        time.sleep(0.01)
    checkpoints.check()  # starts to copy
    while not list_checkpoints(run):
        time.sleep(0.01)
    os.utime(run / "checkpoints" / "1", times=2 * (time.time() + offset,))
    time.sleep(1)  # such as an evaluation
    passed = time.perf_counter() - began
    checkpoints.close()
    (record,) = found
    assert record.stalled + 0.5 <= record.seconds < passed - 0.5


def line(step):
    """Return a line of metrics.jsonl."""
    return f'{{"kind": "train", "step": {step}, "loss": 1.0, "skipped": false}}\n'


def fail_to_copy(error):
    def copytree(*arguments, **options):
        raise error

    return copytree


@pytest.fixture
def interrupted(run, tmp_path, monkeypatch):
    """Save checkpoint 1 to the run directory, and checkpoint 2 only to the local folder."""
    checkpoints = open_run(run, tmp_path)
    checkpoints.save(1, tree(1), META)
    checkpoints.close()
    with monkeypatch.context() as patch:
        error = OSError(5, "Input/output error")
        patch.setattr(shutil, "copytree", fail_to_copy(error))
        checkpoints.save(2, tree(2), META)
        checkpoints.close(is_final=False)
    assert list_checkpoints(run) == [1]
    return checkpoints


def test_the_next_start_completes_an_interrupted_copy(run, local, interrupted):
    (run / "metrics.jsonl").write_text(line(1) + line(2))
    (note,) = local.recover(log_interval=1)
    assert note.startswith("checkpoint 2: copied from checkpoint.local=")
    assert list_checkpoints(run) == [1, 2] and list_checkpoints(local.directory) == []
    assert same(interrupted.restore(2, shapes())[0], 2)


def test_a_checkpoint_of_an_abandoned_training_is_not_copied(run, local, interrupted):
    (run / "metrics.jsonl").write_text(line(1))  # the run continued from 1 on another node
    (note,) = local.recover(log_interval=1)
    assert note.startswith("warning: checkpoint 2 is not used, because metrics.jsonl ends at")
    assert list_checkpoints(run) == [1] and list_checkpoints(local.directory) == []
    assert (local.directory / "checkpoints" / "2.stale" / "meta" / "metadata").exists()


def test_a_restart_removes_the_local_checkpoints_that_it_abandons(run, local, interrupted):
    interrupted.remove_local_after(2)
    assert list_checkpoints(local.directory) == [2]
    interrupted.remove_local_after(1)
    assert list_checkpoints(local.directory) == []


def test_a_full_run_directory_and_a_damaged_checkpoint_are_reported(
    run, local, interrupted, monkeypatch
):
    (run / "metrics.jsonl").write_text(line(1) + line(2))
    with monkeypatch.context() as patch:
        error = OSError(28, "No space left on device")
        patch.setattr(shutil, "copytree", fail_to_copy(error))
        with pytest.raises(UsageError, match=r"/2: cannot be copied to .*No space left.*make room"):
            local.recover(log_interval=1)
    assert list_checkpoints(run) == [1] and list_checkpoints(local.directory) == [2]
    meta = local.directory / "checkpoints" / "2" / "meta" / "metadata"
    meta.write_text(
        meta.read_text().replace('"step":2', '"step":3').replace('"step": 2', '"step": 3')
    )
    (note,) = local.recover(log_interval=1)
    assert note.startswith("warning: checkpoint 2 was not copied: ")
    assert "is damaged" in note and list_checkpoints(run) == [1]


def test_runs_of_the_same_name_have_their_own_folders(tmp_path):
    one, other = (LocalFolder(str(tmp_path), tmp_path / name / "run") for name in "ab")
    assert one.directory != other.directory
    assert one.directory == LocalFolder(str(tmp_path), tmp_path / "a" / "run").directory


def test_a_folder_that_cannot_be_written_is_one_sentence(run, tmp_path):
    (tmp_path / "nvme").write_text("")
    with pytest.raises(UsageError, match=r"checkpoint.local=.*nvme: cannot be written \("):
        open_run(run, tmp_path)


def test_a_host_that_cannot_access_the_folder_is_reported(run, tmp_path):
    other_process = ProcessGroup("none", rank=1, host_names=("a", "b"))
    with pytest.raises(UsageError, match="host b cannot see the files"):
        LocalFolder(str(tmp_path / (300 * "x")), run).open(other_process)


def test_a_copy_also_removes_older_checkpoints_whose_copies_failed(run, local):
    for step in (1, 2, 3):
        (local.directory / "checkpoints" / str(step)).mkdir(parents=True)
    local.copy_to_run(2)
    assert list_checkpoints(run) == [2] and list_checkpoints(local.directory) == [3]
