import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels.linear import matmul, matmul_parts


@pytest.mark.parametrize(("w_shape", "n"), [((4, 3, 2, 5), 1), ((2, 4, 6), 2)])
def test_a_product_and_its_gradients_are_those_of_tensordot(w_shape, n):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 7, *w_shape[:n]))
    w = jax.random.normal(keys[1], w_shape)
    y, gradients = jax.vjp(lambda x, w: matmul(x, w, n), x, w)
    expected, expected_gradients = jax.vjp(lambda x, w: jnp.tensordot(x, w, n), x, w)
    np.testing.assert_array_equal(y, expected)
    dy = jax.random.normal(keys[2], y.shape)
    for found, wanted in zip(gradients(dy), expected_gradients(dy), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("w_shape", "n"), [((4, 3, 2, 5), 1), ((2, 4, 3, 6), 2)])
def test_parts_and_their_gradients_are_slices_of_the_product(w_shape, n):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 7, *w_shape[:n]))
    w = jax.random.normal(keys[1], w_shape)

    def slices(x, w):
        return tuple(jnp.moveaxis(jnp.tensordot(x, w, n), 2, 0))

    parts, gradients = jax.vjp(lambda x, w: matmul_parts(x, w, n), x, w)
    expected, expected_gradients = jax.vjp(slices, x, w)
    dys = tuple(jax.random.normal(keys[2], (3, *expected[0].shape)))
    found = *parts, *gradients(dys)
    for one, wanted in zip(found, (*expected, *expected_gradients(dys)), strict=True):
        assert one.shape == wanted.shape
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_weights_transpose_no_activations():
    """On a CPU, the products in the middle of an MLP need no transposed copies."""

    def compiled(multiply):
        def loss(v, w, x):
            return (multiply(jnp.sin(multiply(x, v, 1)), w, 1) ** 2).sum()

        x, v, w = jnp.ones((4, 64, 64)), jnp.ones((64, 256)), jnp.ones((256, 64))
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(v, w, x).compile().as_text()

    assert " copy(" in compiled(jnp.tensordot)  # else jnp.tensordot would do
    assert " copy(" not in compiled(matmul)
