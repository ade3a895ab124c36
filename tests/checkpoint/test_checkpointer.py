"""A checkpoint saved on one mesh or ZeRO stage can be restored on any other."""

import contextlib
import gc
import os
import resource
import shutil
import threading
import time

import jax
import numpy as np
import optax
import pytest

from jaxgpt.checkpoint.checkpointer import Checkpoints, Save, restore_params
from jaxgpt.checkpoint.metadata import DamagedCheckpoint, list_checkpoints
from jaxgpt.config import UsageError, load_config, mesh_shape
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.state import checkpoint_json, checkpoint_tree, state_from_checkpoint
from jobs import META, flat

SETTINGS = (
    ("--mesh", "2,2,2", "parallel.offload=state", "parallel.scan_layers=True"),
    ("--mesh", "1,8,1", "parallel.zero_stage=1", "parallel.offload=moments"),
    ("--mesh", "8,1,1", "parallel.zero_stage=0", "parallel.scan_layers=True"),
    ("--mesh", "2,1,4", "parallel.sequence_parallel=True", "parallel.remat=full"),
    ("--mesh", "1,4,2", "parallel.zero_stage=2", "parallel.offload=moments"),
)


@pytest.fixture(scope="module")
def steps():
    out = []
    for options in SETTINGS:
        config = load_config("tiny", "model.bias=True", "train.batch_size=16", *options)
        config = config.replace(model__vocab_size=256)
        out.append(make_steps(config, make_mesh(mesh_shape(config))))
    return out


def filled(shapes):
    """Return a state of random numbers."""
    draw = np.random.default_rng(0).normal
    return jax.tree.map(
        lambda s: jax.device_put(draw(0, 100, s.shape).astype(s.dtype), s.sharding), shapes
    )


@pytest.mark.long  # shorter tests resume runs on another mesh
@pytest.mark.parametrize(
    "saved", [pytest.param(i, id=" ".join(s[1:])) for i, s in enumerate(SETTINGS)]
)
def test_any_settings_read_what_any_others_wrote(saved, steps, tmp_path):
    state = filled(steps[saved].state_shapes)
    expected = flat(state)
    checkpoints = Checkpoints(tmp_path, load_config("tiny", "checkpoint.keep=1"))
    meta = {**META, **checkpoint_json(state, steps[saved].mesh, 1)}
    checkpoints.save(2, checkpoint_tree(state), meta)
    for reader in steps:
        shapes = reader.state_shapes
        found = state_from_checkpoint(*checkpoints.restore(2, checkpoint_tree(shapes)), shapes)
        for (path, array), wanted in zip(
            jax.tree_util.tree_leaves_with_path(found),
            jax.tree.leaves(reader.state_shapes),
            strict=True,
        ):
            assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim), path
            assert array.sharding.memory_kind == wanted.sharding.memory_kind, path
        found = flat(found)
        assert all((found[path] == array).all() for path, array in expected.items())
        assert found.keys() == expected.keys()
    checkpoints.close()


def test_a_single_flipped_bit_is_noticed(steps, tmp_path):
    shapes = steps[0].state_shapes
    state = filled(shapes)
    checkpoints = Checkpoints(tmp_path, load_config("tiny"))
    checkpoints.save(2, checkpoint_tree(state), META)
    checkpoints.close()
    restore_params(tmp_path, 2, shapes.params)

    flip_a_bit(
        optax.tree_utils.tree_get(state.opt_state, "nu")["position_embedding"]["embedding"],
        tmp_path,
    )
    with pytest.raises(
        UsageError,
        match="points/2: opt_state/0/nu/position_embedding/embedding does not match.*1 of",
    ):
        checkpoints.restore(2, checkpoint_tree(shapes))
    restore_params(tmp_path, 2, shapes.params)  # the parameters are undamaged
    flip_a_bit(state.params["position_embedding"]["embedding"], tmp_path)
    with pytest.raises(UsageError, match="params/position_emb.* does not match its.*1 of.* choose"):
        restore_params(tmp_path, 2, shapes.params)


def test_the_time_of_a_save_ends_when_it_is_complete(steps, tmp_path):
    """The clock of the file server is an hour ahead."""
    tree, found = checkpoint_tree(filled(steps[0].state_shapes)), []
    checkpoints = Checkpoints(tmp_path, load_config("tiny"))
    checkpoints.log = found.append
    began = time.perf_counter()
    checkpoints.save(1, tree, META)
    while not list_checkpoints(tmp_path):
        time.sleep(0.01)
    os.utime(tmp_path / "checkpoints" / "1", times=2 * (time.time() + 3600,))
    time.sleep(1)  # such as an evaluation
    passed = time.perf_counter() - began
    checkpoints.close()
    assert found[0].stalled <= found[0].seconds < passed - 0.5


def test_a_parameter_that_was_not_saved_is_named(steps, tmp_path):
    shapes = steps[0].state_shapes
    checkpoints = Checkpoints(tmp_path, load_config("tiny"))
    checkpoints.save(2, checkpoint_tree(filled(shapes)), META)
    checkpoints.close()
    params = {**shapes.params, "other": jax.tree.leaves(shapes.params)[0]}
    with pytest.raises(DamagedCheckpoint, match="checkpoints/2: has no params/other; choose"):
        restore_params(tmp_path, 2, params)


def flip_a_bit(array, folder):
    """Flip a bit of one element, in the file that contains it."""
    start = np.asarray(array.addressable_shards[0].data).tobytes()[:16]
    files = [path for path in folder.rglob("*") if path.is_file() and start in path.read_bytes()]
    (path,) = files
    data = bytearray(path.read_bytes())
    data[data.index(start) + 9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")])
def test_too_little_memory_is_no_reason_to_remove_a_checkpoint(error, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def fails(*arguments, **options):
        raise Exception("while reading") from error

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fails)
    with pytest.raises(RuntimeError, match="checkpoints/7: could not be restored") as raised:
        restore_params(tmp_path, 7, {})
    assert raised.value.__cause__.__cause__ is error


def test_a_checkpoint_for_which_there_is_no_room_is_not_begun(steps, tmp_path, monkeypatch):
    state = filled(steps[0].state_shapes)
    needed = sum(array.nbytes for array in jax.tree.leaves((state.params, state.opt_state)))
    checkpoints = Checkpoints(tmp_path, load_config("tiny"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    checkpoints.save(1, checkpoint_tree(state), META)
    checkpoints.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UsageError, match=r"points: a checkpoint takes \d+\.\d MB, .* make room"):
        checkpoints.open(checkpoint_tree(state))
    checkpoints.save(2, checkpoint_tree(state), META)
    with pytest.raises(UsageError, match=r"checkpoint 2 could .*takes \d+\.\d MB, .*; make room"):
        checkpoints.close()
    assert names(tmp_path) == ["1"]


def test_what_orbax_writes_after_a_failed_save_is_removed_by_the_next_save(
    steps, tmp_path, monkeypatch
):
    tree = checkpoint_tree(filled(steps[0].state_shapes))
    checkpoints = Checkpoints(tmp_path, load_config("tiny"))
    usage = shutil.disk_usage(tmp_path)
    checkpoints.save(1, tree, META)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        checkpoints.save(2, tree, META)
        checkpoints.close(is_final=False)
    (tmp_path / "checkpoints/2.orbax-checkpoint-tmp").mkdir()  # by one of Orbax's threads
    checkpoints.save(3, tree, META)
    checkpoints.close()
    assert names(tmp_path) == ["1", "3"]


@contextlib.contextmanager
def quota():
    """Limit files to 1 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def vanished(folder):
    """Remove the folder that is written to, as if its file system had vanished."""
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("")
    try:
        yield
    finally:
        folder.unlink()
        folder.with_name("elsewhere").rename(folder)


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("trouble", ["quota", "vanished"])
def test_a_run_continues_after_a_failed_save_while_an_older_one_is_complete(
    trouble, is_local, steps, tmp_path, capfd
):
    tree = checkpoint_tree(filled(steps[0].state_shapes))
    run, log = tmp_path / "run", []
    threads = set(threading.enumerate())
    run.mkdir()
    local = [f"checkpoint.local={tmp_path / 'local'}"] if is_local else []
    checkpoints = Checkpoints(run, load_config("tiny", *local))
    checkpoints.log = log.append
    checkpoints.open(tree)
    checkpoints.save(1, tree, META)
    checkpoints.close()
    with quota() if trouble == "quota" else vanished(run / "checkpoints" if is_local else run):
        if trouble == "quota":
            checkpoints.save(2, tree, META)
            checkpoints.close(is_final=False)
        else:  # the older checkpoint has vanished with the folder
            with pytest.raises(
                UsageError, match="2 could not .*(File exists|Not a directory).; start"
            ):
                checkpoints.save(2, tree, META)
                checkpoints.close(is_final=False)
    assert list_checkpoints(run) == [1]
    checkpoints.save(3, tree, META)
    checkpoints.close()
    assert list_checkpoints(run) == [1, 3]
    kinds = [(record.kind, record.step) for record in log]
    failed = [("checkpoint_failed", 2)] if trouble == "quota" else []
    assert kinds == [("checkpoint", 1), *failed, ("checkpoint", 3)]
    if failed:
        assert log[1].latest_complete == 1 and log[1].reason.endswith("written (File too large)")
    assert "Traceback" not in "".join(capfd.readouterr())
    checkpoints.restore(3, checkpoint_tree(steps[0].state_shapes))
    gc.collect()
    left = set(threading.enumerate()) - threads
    assert not left, left  # the process could not exit before they end


def test_a_run_survives_a_file_system_that_is_gone_between_saves(tmp_path):
    checkpoints = Checkpoints(tmp_path / (300 * "x"), load_config("tiny"))  # cannot be looked up
    checkpoints._writing = Save(step=1, began=0.0)
    checkpoints.check()  # the next save reports the problem


@pytest.mark.parametrize(
    ("why", "noticed"),
    [
        ("on_error=stop", "at the next save"),
        ("on_error=stop", "at the end"),
        ("no other", "at the next save"),
        ("no other", "at the end"),
        ("the last", "at the end"),
    ],
)
def test_a_run_that_needs_the_failed_save_ends_with_one_sentence(why, noticed, steps, tmp_path):
    tree = checkpoint_tree(filled(steps[0].state_shapes))
    stop = ["checkpoint.on_error=stop"] if why == "on_error=stop" else []
    checkpoints = Checkpoints(tmp_path, load_config("tiny", *stop))
    if why != "no other":
        checkpoints.save(1, tree, META)
        checkpoints.close()
    sentence = "points: checkpoint 2 could not be written .File too large.; make room, and start"
    with quota():
        checkpoints.save(2, tree, META)
        with pytest.raises(UsageError, match=sentence):
            if noticed == "at the end":
                checkpoints.close(is_final=why == "the last")
            checkpoints.save(3, tree, META)
    checkpoints.close()
    assert list_checkpoints(tmp_path) == ([] if why == "no other" else [1])
    # Orbax may still write other arrays after the failure. The next start removes their remains.
    checkpoints.open(tree)
    assert names(tmp_path) == ([] if why == "no other" else ["1"])


def names(run):
    """Return the names in the folder of checkpoints."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_no_thread_is_left_after_close_and_saves_may_follow(steps, tmp_path):
    state = filled(steps[0].state_shapes)
    checkpoints = Checkpoints(tmp_path, load_config("tiny", "checkpoint.keep=1"))
    for step in (1, 2):
        before = set(threading.enumerate())
        checkpoints.save(step, checkpoint_tree(state), META)
        checkpoints.close()
        gc.collect()
        left = set(threading.enumerate()) - before
        assert not left, left
    assert list_checkpoints(tmp_path) == [2]
