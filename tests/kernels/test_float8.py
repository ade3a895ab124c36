import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxgpt.config import UsageError, load_config, mesh_shape
from jaxgpt.kernels.float8 import float8_matmul, float8_warnings, quantize
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps, step_options
from jobs import limited_devices, trace

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LLAMA = ("llama-tiny", "--mesh", "1,1,1", "model.vocab_size=256", "model.n_layer=2")
LINEAR = 5  # linear layers in a block of llama-tiny: q, kv, out, gate_up, down


def rounded(x, dtype):
    """Return float64 values: x in FP8, scaled by the largest power of two that fits."""
    x = np.float64(x)
    scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / abs(x).max()))
    return np.float64((x * scale).astype(dtype)) / scale


def operands(w_shape, n, dtype):
    """Return x, W and the gradient of x W. Elements have very different sizes."""
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def draw(shape, size):
        wide = jax.random.normal(next(keys), shape) * jnp.exp(jax.random.normal(next(keys), shape))
        return (size * wide).astype(dtype)

    x, w = draw((3, 7, *w_shape[:n]), 30), draw(w_shape, 0.02)
    return x, w, draw((3, 7, *w_shape[n:]), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("w_shape", "n"), [((4, 3, 2, 5), 1), ((2, 4, 6), 2)])
def test_a_product_and_its_gradients_are_those_of_rounded_operands(w_shape, n, dtype):
    x, w, dy = operands(w_shape, n, dtype)

    @jax.jit
    def compute(x, w, dy):
        y, pull_back = jax.vjp(lambda x, w: float8_matmul(x, w, n), x, w)
        return y, *pull_back(dy)

    inputs = int(np.prod(w_shape[:n]))
    x_NI, w_IO = rounded(x, E4M3).reshape(-1, inputs), rounded(w, E4M3).reshape(inputs, -1)
    dy_NO = rounded(dy, E5M2).reshape(-1, w_IO.shape[1])
    expected = x_NI @ w_IO, dy_NO @ w_IO.T, x_NI.T @ dy_NO
    like = dy, x, w
    eps = float(jnp.finfo(dtype).eps)
    for found, exact, shaped in zip(compute(x, w, dy), expected, like, strict=True):
        assert found.dtype == dtype and found.shape == shaped.shape
        exact, error = exact.reshape(found.shape), 4 * eps * abs(exact).max()
        np.testing.assert_allclose(np.float64(found), exact, rtol=eps, atol=error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_a_part_of_a_tensor_is_rounded_like_the_whole(fp8, dtype):
    """So a mesh that splits a tensor changes tiny elements only."""
    x = operands((16, 16), 1, dtype)[0]
    x = x.at[0].divide(50)
    whole, part = quantize(x, fp8), quantize(x[0], fp8)
    assert part.scale < whole.scale
    found, expected = (np.float32(one.values) * one.scale for one in (part, whole))
    difference = abs(found - expected[0])
    limits = ml_dtypes.finfo(fp8)
    is_tiny = abs(np.float32(x[0])) < float(limits.smallest_normal) * whole.scale
    assert not difference[~is_tiny].any()
    assert (difference <= float(limits.smallest_subnormal) * whole.scale).all()
    assert float(limits.smallest_normal) * whole.scale < float(abs(x).max()) / 14000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_product_with_a_number_that_is_not_finite_is_nan(bad):
    x = jnp.ones((4, 8)).at[1, 2].set(bad)
    y, pull_back = jax.vjp(lambda x, w: float8_matmul(x, w, 1), x, jnp.ones((8, 8)))
    assert jnp.isnan(y).all()
    assert jnp.isnan(pull_back(jnp.ones((4, 8)))[1]).all()
    assert jnp.isnan(pull_back(x)[0]).all()


def test_zeros_stay_zeros():
    y, pull_back = jax.vjp(lambda x, w: float8_matmul(x, w, 1), jnp.zeros((4, 8)), jnp.ones((8, 8)))
    assert (y == 0).all() and all((d == 0).all() for d in pull_back(jnp.zeros((4, 8))))


def converted(jaxpr):
    """Return the dtypes of all conversions, including those in inner functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            yield str(equation.params["new_dtype"])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from converted(inner)


def test_all_linear_layers_train_in_float8_and_are_evaluated_without():
    config = load_config(*LLAMA, "train.matmul_dtype=float8", "parallel.scan_layers=False")
    with limited_devices(1):
        steps = make_steps(config, make_mesh(mesh_shape(config)), slices=1)
    state = steps.state_shapes
    step = steps.train_step.trace(state, np.int32(1), np.float32(1), steps.batch_shape).jaxpr
    found = list(converted(step.jaxpr))
    n = config.model.n_layer * LINEAR
    assert (found.count("float8_e4m3fn"), found.count("float8_e5m2")) == (2 * n, n)
    evaluation = steps.eval_step.trace(state.params, steps.batch_shape).jaxpr
    assert not any("float8" in dtype for dtype in converted(evaluation.jaxpr))


@pytest.mark.parametrize(
    ("n_steps", "settings"),
    [
        (10, ("model.n_layer=1", "train.batch_size=8")),
        # With the preset's learning rate, both runs have bursts of large gradients, which
        # training amplifies: single losses then differ by up to 8%.
        pytest.param(300, ("optimizer.learning_rate=1e-3",), marks=pytest.mark.long),
    ],
)
def test_training_follows_a_run_without_float8(n_steps, settings):
    settings = ("llama-tiny", "--mesh", "1,1,1", *settings)
    exact = trace(n_steps, *settings, devices=1)
    found = trace(n_steps, *settings, "train.matmul_dtype=float8", devices=1)
    assert found["params"] == exact["params"] and found["evaluated"] == exact["evaluated"]
    found, exact = np.array(found["losses"]), np.array(exact["losses"])
    assert (found != exact).any()
    np.testing.assert_allclose(found[:20], exact[:20], rtol=1e-2)
    means = (np.convolve(losses, np.ones(10) / 10, "valid") for losses in (found, exact))
    np.testing.assert_allclose(*means, rtol=1e-2)
    np.testing.assert_allclose(found, exact, rtol=2e-2)


def test_devices_without_float8_are_refused_or_emulate_it():
    assert float8_warnings("gpu", 8.9) == float8_warnings("gpu", 9.0) == ()
    assert "emulated" in float8_warnings("cpu", 0)[0]
    for capability in (8.0, 0):  # an A100, an AMD GPU
        with pytest.raises(UsageError, match="train.matmul_dtype=float8: needs NVIDIA GPUs"):
            float8_warnings("gpu", capability)
    with pytest.raises(UsageError, match="train.matmul_dtype=int8: must be one of float8"):
        load_config("tiny", "train.matmul_dtype=int8")


def test_the_step_for_a_gpu_leaves_products_to_cublaslt():
    config = load_config("tiny", "train.matmul_dtype=float8")
    options = step_options(config, "gpu", 1)
    assert options == {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    jax.jit(lambda x: x + 1, compiler_options=options).lower(1.0).compile()  # XLA knows the names


@pytest.mark.parametrize(
    "settings",
    [
        ("train.dtype=bfloat16",),
        *(
            pytest.param(settings, marks=pytest.mark.long)
            for settings in (
                ("train.dtype=float32", "parallel.remat=full", "parallel.scan_layers=True"),
                ("train.dtype=bfloat16", "--mesh", "2,2,2", "parallel.sequence_parallel=True"),
            )
        ),
    ],
)
def test_on_an_h100_all_products_of_linear_layers_are_cublaslts(settings, monkeypatch):
    """This needs `pip install 'jax[cuda12]'`, but no GPU."""
    pytest.importorskip("jax_cuda12_plugin")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "parallel")
    from forms import H100

    config = load_config(*LLAMA, "train.matmul_dtype=float8", *settings)
    sizes = mesh_shape(config)
    node = topologies.get_topology_desc(
        "h100", "cuda", topology=f"1x1x{sizes.n_devices}", target_config=H100
    )
    mesh = Mesh(np.array(node.devices).reshape(tuple(sizes.values())), tuple(sizes))
    step = make_steps(config, mesh).lower_train_step()
    text = step.compile({"xla_gpu_autotune_level": 0}).as_text()  # autotuning needs a GPU
    calls = re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8".*', text)
    layers = 1 if "parallel.scan_layers=True" in settings else config.model.n_layer
    again = LINEAR - 1 if "parallel.remat=full" in settings else 0  # all except `down`
    assert len(calls) == layers * (3 * LINEAR + again)
    exact = [call for call in calls if '"operand_precision":["HIGHEST","HIGHEST"]' in call]
    assert len(exact) == layers * 2 * LINEAR
