import importlib.metadata
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import load_config
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train import stored
from jaxgpt.train.generate import make_generate
from jaxgpt.train.step import make_steps
from jobs import SMALL, flat, losses, records, run

HERE = Path(__file__).parent
ALONE = ProcessGroup("test")


@pytest.fixture
def folder(tmp_path):
    """A compile cache for this process, for one test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    stored._traced.cache_clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def small(*settings):
    config = load_config(*SMALL[1:], "model.n_layer=1", "model.n_embd=32", *settings)
    return config.replace(model__vocab_size=256)


def two_steps(steps, batch):
    """Losses of two steps, and the parameters after them."""
    state = steps.init()
    found = []
    for step in (1, 2):
        state, metrics = steps.train_step(state, np.int32(step), batch)
        found.append(float(metrics.loss))
    return found, flat(state._asdict())


def text(steps, params):
    """Eight tokens, the likeliest ones."""
    prompt = np.arange(64, dtype=np.int32)
    generate = make_generate(steps.reader, 256, 8, 0.0, None)
    generate = steps.jitted("sample", generate, prompt, np.int32(0), np.int32(0))
    return np.asarray(generate(params, prompt, np.int32(40), np.int32(1)))


def test_what_is_stored_is_what_was_traced_on_any_mesh(folder):
    config = small()
    mesh = make_mesh((2, 2, 2))
    batch = np.random.default_rng(0).integers(0, 256, (16, 65)).astype(np.int32)
    traced = make_steps(config, mesh)
    batch = jax.device_put(batch, traced.batch_shape.sharding)
    expected, final = two_steps(traced, batch)
    first = two_steps(stored.load_steps(config, mesh, ALONE), batch)
    assert len(list(folder.glob("programs-*.json"))) == 1
    second = two_steps(stored.load_steps(config, mesh, ALONE), batch)
    assert second[0] == first[0]  # bitwise: the one that stores runs what it stored
    assert all(np.array_equal(second[1][k], v) for k, v in first[1].items())
    np.testing.assert_allclose(first[0], expected, rtol=1e-6)
    assert first[1].keys() == final.keys()
    steps = stored.load_steps(config, mesh, ALONE)
    params = steps.init().params
    for _ in "stored", "read":
        loaded = stored.load_steps(config, mesh, ALONE)
        evaluated = loaded.eval_step(params, batch)
        np.testing.assert_allclose(evaluated, traced.eval_step(params, batch), rtol=1e-6)
        assert np.array_equal(text(loaded, params), text(traced, params))
    for name in ("attention", "warnings", "n_parameters", "state_shapes", "batch_shape"):
        assert getattr(steps, name) == getattr(traced, name), name


@pytest.mark.parametrize(
    "damaged",
    ["half", "stateless", "[]", '{"programs": null}', '{"programs": {"init": "AAAA"}}'],
)
def test_a_damaged_file_is_replaced(folder, damaged):
    config, mesh = small(), make_mesh((8, 1, 1))
    stored.load_steps(config, mesh, ALONE)
    (file,) = folder.glob("programs-*.json")
    assert file.name.endswith("-start.json")  # what is evaluated is not traced before it is needed
    whole = file.read_text()
    stateless = {name: part for name, part in json.loads(whole).items() if name != "state"}
    made = {"half": whole[: len(whole) // 2], "stateless": json.dumps(stateless)}
    file.write_text(made.get(damaged, damaged))
    stored.load_steps(config, mesh, ALONE)
    assert json.loads(file.read_text())["state"] == json.loads(whole)["state"]


def test_what_is_traced_of_edited_source_is_not_stored(folder, monkeypatch):
    config, mesh = small(), make_mesh((8, 1, 1))
    steps = stored.load_steps(config, mesh, ALONE)
    monkeypatch.setattr(stored, "_name", lambda config, mesh: "edited")
    params = steps.init().params
    steps.eval_step(
        params, jax.device_put(np.zeros((16, 65), np.int32), steps.batch_shape.sharding)
    )
    assert [path.name[-11:] for path in folder.glob("programs-*.json")] == ["-start.json"]


def test_process_0_traces_for_all(folder, monkeypatch):
    config, mesh = small(), make_mesh((8, 1, 1))

    class Mate:
        """Process 0, which traced before; what it says is the first message."""

        def allgather(self, message):
            return [said.pop(0), message]

    def traces(*arguments):
        raise AssertionError("a process traces what process 0 sends")

    stored.load_steps(config, mesh, ALONE)
    (file,) = folder.glob("programs-*.json")
    traced = json.dumps(file.read_text()).encode()
    file.unlink()
    said = [b"false", b"null", traced]  # it has no file; it traced without an error; what it traced
    monkeypatch.setattr(stored, "_traced", traces)
    steps = stored.load_steps(config, mesh, ProcessGroup("test", rank=1, size=2, transport=Mate()))
    assert steps.n_parameters == make_steps(config, mesh).n_parameters
    assert not said and not list(folder.glob("programs-*.json"))  # process 0 writes it


def test_whatever_decides_about_a_program_is_in_its_name(monkeypatch):
    config, mesh = small(), make_mesh((8, 1, 1))
    names = {
        stored._name(config, mesh),
        stored._name(small("model.bias=True"), mesh),
        stored._name(small("train.dtype=bfloat16"), mesh),
        stored._name(small("optimizer.beta1=0.8"), mesh),
        stored._name(small("parallel.remat=full"), mesh),
        stored._name(config, make_mesh((4, 2, 1))),
        stored._name(small("spike.action=off"), mesh),
        stored._name(small("spike.action=skip_update"), mesh),
        stored._name(small("spike.loss_threshold=5"), mesh),
        stored._name(small("faults.nan_step=5"), mesh),
        stored._name(small("faults.nan_step=5", "faults.nan_device=1"), mesh),
    }
    longer = small("train.max_iters=7", "train.time_limit=5", "train.eval_interval=3")
    assert stored._name(longer, mesh) in names
    rewinding = ("spike.action=rewind", "spike.skip_after=9", "checkpoint.interval=100")
    rewinding = small(*rewinding)
    assert stored._name(rewinding, mesh) in names
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16")
    names.add(stored._name(config, mesh))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    names.add(stored._name(config, mesh))
    assert len(names) == 13


def test_a_second_start_loads_little_and_computes_the_same(tmp_path):
    cache = str(tmp_path / "cache")
    heavy = "flax,optax,orbax,grain,matplotlib,wandb,mpi4py"
    arguments = (*SMALL, "train.max_iters=3", "train.sample_tokens=4", f"compile_cache={cache}")
    runs = [tmp_path / name for name in ("first", "second")]
    for out in runs:
        job = run(HERE / "loaded.py", heavy, *arguments, "--out", out, JAX_COMPILATION_CACHE_DIR="")
        assert job.returncode == 0, job.stdout
    assert losses(runs[0]) == losses(runs[1])
    for kind in ("eval", "sample"):
        assert len(records(runs[0], kind)) == 1
        assert records(runs[0], kind) == records(runs[1], kind)
    assert "loaded by the first step:\ncompile cache: hit\n" in job.stdout, job.stdout
    assert "loaded by the end: orbax\n" in job.stdout, job.stdout
