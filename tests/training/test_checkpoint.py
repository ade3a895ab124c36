"""A checkpoint saved under any way to lay a step out is restored under any other."""

import jax
import numpy as np
import pytest

from jaxgpt.config import load_config, mesh_sizes
from jaxgpt.distributed.mesh import make_mesh
from jaxgpt.training.checkpoint import Checkpoints, restore_params
from jaxgpt.training.step import make_steps
from jobs import flat

SETTINGS = (
    ("--mesh", "2,2,2", "parallel.sequence_parallel=True"),
    ("--mesh", "1,8,1", "parallel.zero_stage=1", "parallel.offload_optimizer=True"),
    ("--mesh", "8,1,1", "parallel.zero_stage=0", "parallel.scan_layers=True"),
    ("--mesh", "2,1,4", "train.gradient_accumulation_steps=2", "parallel.remat=full"),
    ("--mesh", "1,4,2", "parallel.zero_stage=2", "parallel.offload_optimizer=True"),
)


@pytest.fixture(scope="module")
def steps():
    out = []
    for options in SETTINGS:
        config = load_config("tiny", "model.bias=True", "train.batch_size=16", *options)
        config = config.replace(model__vocab_size=256)
        out.append(make_steps(config, make_mesh(mesh_sizes(config))))
    return out


@pytest.mark.parametrize("saved", range(len(SETTINGS)), ids=[" ".join(s[1:]) for s in SETTINGS])
def test_any_settings_read_what_any_others_wrote(saved, steps, tmp_path):
    draw = np.random.default_rng(0).normal
    state = jax.tree.map(
        lambda s: jax.device_put(draw(0, 100, s.shape).astype(s.dtype), s.sharding),
        steps[saved].state_shapes,
    )
    expected = flat(state)
    checkpoints = Checkpoints(tmp_path, load_config("tiny", "checkpoint.keep=1"))
    checkpoints.save(2, state, {})
    for reader in steps:
        found = checkpoints.restore(2, reader.state_shapes)
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


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")])
def test_too_little_memory_is_no_reason_to_remove_a_checkpoint(error, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def fails(*arguments, **options):
        raise Exception("while reading") from error

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", fails)
    with pytest.raises(RuntimeError, match="checkpoints/7: not restored") as raised:
        restore_params(tmp_path, 7, {})
    assert raised.value.__cause__.__cause__ is error
