import dataclasses
import math
import operator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgpt.config import ModelConfig, load_config
from jaxgpt.data.batch import input_batch
from jaxgpt.models.layers import padded_vocab_size
from jaxgpt.models.loss import OutputLayer
from jaxgpt.models.transformer import GPT
from jaxgpt.models.weights import count_parameters, weights

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=37, bias=True)


def make(config, **options):
    """(the network as a function of parameters, tokens and a key, its initial parameters)."""

    def network():
        return GPT(config, rngs=nnx.Rngs(params=0), **options)

    graph = nnx.graphdef(nnx.eval_shape(network))
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(network())))()

    @jax.jit
    def compute(params, tokens, key=None):
        return nnx.merge(graph, params)(input_batch(tokens), key)

    return compute, params


def noisy(params):
    """Return parameters without initial values of 0 or 1, so that every parameter matters."""
    draw = np.random.default_rng(1).normal
    return jax.tree.map(lambda p: p + np.float32(0.1 * draw(size=p.shape)), params)


def reference_logits(params, tokens_T, config):
    """GPT-2 (Radford et al. 2019) in float64 NumPy, one position and head at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, w):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w["scale"] + w["bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    T, K = len(tokens_T), config.n_embd // config.n_head
    x = [
        p["token_embedding"]["embedding"][t] + p["position_embedding"]["embedding"][i]
        for i, t in enumerate(tokens_T)
    ]
    for layer in range(config.n_layer):
        b = jax.tree.map(operator.itemgetter(layer), p["layers"])
        attention, mlp, qkv = b["attention"], b["mlp"], []
        for v in x:
            n = norm(v, b["norm_1"])
            qkv.append(
                np.einsum("d,dchk->chk", n, attention["qkv"]["kernel"]) + attention["qkv"]["bias"]
            )
        for i in range(T):
            out = attention["out"]["bias"].copy()
            for h in range(config.n_head):
                scores = np.array(
                    [qkv[i][0, h] @ qkv[j][1, h] / math.sqrt(K) for j in range(i + 1)]
                )
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed = sum(w * qkv[j][2, h] for j, w in enumerate(weights))
                out += mixed @ attention["out"]["kernel"][h]
            x[i] = x[i] + out
        for i in range(T):
            hidden = gelu(norm(x[i], b["norm_2"]) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
            x[i] = x[i] + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return np.stack([p["token_embedding"]["embedding"] @ norm(v, p["norm"]) for v in x])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_are_those_of_gpt2(scan_layers):
    model, params = make(SMALL, scan_layers=scan_layers)
    params = noisy(params)
    tokens = np.array([[3, 0, 36, 7, 7, 12, 30, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    logits = model(params, jnp.array(tokens))
    assert logits.dtype == jnp.float32
    for row, expected in zip(logits, tokens, strict=True):
        np.testing.assert_allclose(
            row[:, :37], reference_logits(params, expected, SMALL)[:, :37], rtol=2e-5, atol=2e-5
        )


def test_padding_of_the_vocabulary_is_never_predicted():
    model, params = make(SMALL)
    logits = model(params, jnp.zeros((1, 4), jnp.int32))
    assert logits.shape[-1] == padded_vocab_size(37) == 128
    assert (logits[..., 37:] == -jnp.inf).all()
    assert (params["token_embedding"]["embedding"][37:] == 0).all()


@pytest.mark.parametrize(
    ("preset", "vocab_size", "total", "reported"),
    [
        # nanoGPT prints "number of parameters: 10.65M" for its baby GPT.
        ("shakespeare_char", 65, None, "10.65M"),
        # 12 layers of 12 D^2 + 2 D, two embeddings and the last norm; nanoGPT prints 123.55M.
        ("gpt2", 50257, 124_337_664, "123.55M"),
    ],
)
def test_parameters_are_counted_as_nanogpt_does(preset, vocab_size, total, reported):
    config = dataclasses.replace(load_config(preset).model, vocab_size=vocab_size)
    counted, without_positions = count_parameters(config)
    assert f"{without_positions / 1e6:.2f}M" == reported
    L, D, T = config.n_layer, config.n_embd, config.block_size
    assert counted == L * (12 * D * D + 2 * D) + (vocab_size + T) * D + D
    assert total in (None, counted)


def test_initialization_is_gpt2s():
    config = dataclasses.replace(load_config("shakespeare_char").model, vocab_size=65)
    _, params = make(config)
    residual = 0.02 / math.sqrt(2 * config.n_layer)
    expected = {"qkv": 0.02, "up": 0.02, "out": residual, "down": residual}
    for name, std in expected.items():
        module = params["layers"]["attention" if name in ("qkv", "out") else "mlp"]
        kernel = module[name]["kernel"]
        assert float(kernel.std()) == pytest.approx(std, rel=0.02)
        assert float(kernel[0].std()) == pytest.approx(std, rel=0.02)  # each layer by itself
    assert float(params["token_embedding"]["embedding"][:65].std()) == pytest.approx(0.02, rel=0.02)


def test_an_untrained_model_knows_nothing():
    config = dataclasses.replace(load_config("shakespeare_char_cpu").model, vocab_size=65)
    model, params = make(config)
    tokens = jax.random.randint(jax.random.key(0), (8, 64), 0, 65)
    log_p = jax.nn.log_softmax(model(params, tokens))[..., :65]
    # ln V, and half the variance 0.02^2 D of the logits more: their exponentials are averaged.
    expected = math.log(65) + 0.02**2 * config.n_embd / 2
    assert float(-log_p.mean()) == pytest.approx(expected, abs=0.02)


def test_dropout_acts_only_with_a_key():
    model, params = make(dataclasses.replace(SMALL, dropout=0.5))
    tokens = jnp.arange(10)[None]
    quiet, again = model(params, tokens), model(params, tokens)
    keys = jax.random.split(jax.random.key(1), 2)
    noisy_1, noisy_2 = model(params, tokens, keys[0]), model(params, tokens, keys[1])
    assert (quiet == again).all()
    assert (noisy_1 == model(params, tokens, keys[0])).all()
    assert not (noisy_1 == noisy_2).all() and not (noisy_1 == quiet).all()


def test_computing_in_bfloat16_keeps_parameters_and_logits_in_float32():
    model, params = make(SMALL, dtype=jnp.bfloat16)
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    tokens = jnp.arange(10)[None]
    exact = make(SMALL)[0](params, tokens)[..., :37]
    rounded = model(params, tokens)[..., :37]
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.02)
    assert not (rounded == exact).all()


def products(jaxpr):
    """Return the operand dtypes of every matrix product, including those in inner functions.

    Norms, which compute in float32, multiply by a vector.
    """
    for equation in jaxpr.eqns:
        operands = [operand.aval for operand in equation.invars]
        if equation.primitive.name == "dot_general" and all(a.ndim > 1 for a in operands):
            yield tuple(a.dtype.name for a in operands)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_products_of_a_step_are_of_its_dtype(dtype):
    model, params = make(SMALL, dtype=jnp.dtype(dtype))
    tokens = jnp.arange(10)[None]
    step = jax.make_jaxpr(jax.grad(lambda params: model(params, tokens)[..., :37].sum()))(params)
    found = list(products(step.jaxpr))
    # Four layers in a block, scores and sums in each half of the causal attention, the output.
    assert len(found) >= 3 * (4 + 2 + 1)
    assert set(found) == {(dtype, dtype)}


def test_gradients_in_bfloat16_are_sums_in_float32():
    """Over thousands of tokens, a bfloat16 sum would be off by several units in the last place."""
    tokens = jax.random.randint(jax.random.key(0), (256, SMALL.block_size), 0, SMALL.vocab_size)

    def gradients(dtype):
        model, params = make(SMALL, dtype=jnp.dtype(dtype))

        def loss(params):
            scores = jax.nn.log_softmax(model(params, tokens)[:, :-1, : SMALL.vocab_size])
            return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

        return jax.grad(loss)(params)

    def off(found, exact):
        return float(jnp.linalg.norm((found - exact).ravel()) / jnp.linalg.norm(exact.ravel()))

    errors = jax.tree.map(off, gradients("bfloat16"), gradients("float32"))
    assert {path: e for path, e in jax.tree.leaves_with_path(errors) if e > 2**-6} == {}


def test_every_parameter_names_its_axes():
    found = weights(SMALL)
    assert all(len(w.shape) == len(w.axes) for w in jax.tree.leaves(found))
    qkv = found["layers"]["attention"]["qkv"]["kernel"]
    assert qkv.axes == ("layers", "embed", "parts", "heads", None) and qkv.n_layers == 2
    assert qkv.name == "layers/attention/qkv/kernel" and qkv.role == "matrix"
    assert found["layers"]["mlp"]["down"]["kernel"].axes == ("layers", "mlp", "embed")
    assert found["token_embedding"]["embedding"].axes == ("vocab", "embed")


def test_the_dims_of_a_matrix_are_stacked_inputs_or_outputs():
    layers = weights(SMALL)["layers"]
    assert layers["attention"]["qkv"]["kernel"].matrix_dims == ((0, 2), (1,), (3, 4))
    assert layers["attention"]["out"]["kernel"].matrix_dims == ((0,), (1, 2), (3,))
    assert layers["norm_1"]["scale"].matrix_dims == ((0,), (), (1,))
    assert weights(SMALL)["token_embedding"]["embedding"].matrix_dims == ((), (0,), (1,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_their_gradients_are_products_in_the_operands_dtype(dtype):
    x, w = (
        jax.random.normal(jax.random.key(i), s, dtype) for i, s in enumerate([(3, 5, 8), (7, 8)])
    )
    d = jax.random.normal(jax.random.key(2), (3, 5, 7))

    def exact(x, w):
        return jnp.einsum("...D,VD->...V", x, w, preferred_element_type=jnp.float32)

    config = ModelConfig(vocab_size=7)
    found, d_found = jax.vjp(lambda x, w: OutputLayer(w, 0, config).logits(x), x, w)
    expected, d_expected = jax.vjp(exact, x, w)
    np.testing.assert_array_equal(found, np.float32(expected.astype(dtype)))
    assert found.dtype == "float32"
    rounded = d.astype(dtype).astype(jnp.float32)
    for ours, theirs in zip(d_found(d), d_expected(rounded), strict=True):
        assert ours.dtype == theirs.dtype == x.dtype
        rtol = 1e-6 if dtype == "float32" else 2**-7  # one unit in the last place of bfloat16
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=rtol, atol=1e-6)
