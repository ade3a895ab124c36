import re

import pytest

from jaxgpt.config import MeshShape, load_config
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices

LAYERS = 3
IN_NORMS = 2 * (2 * LAYERS + 1)  # products with a vector, in the backward pass of each norm


@pytest.mark.parametrize(
    ("remat", "linear", "attention"),
    # Each product once forward and twice backward: those of a layer's 4 linear ones, of the output
    # layer, and the 2 of attention, which is one block here. Forward, q, k and v take one each.
    [
        ("none", 14 * LAYERS + 3, 6 * LAYERS),
        ("attention", 14 * LAYERS + 3, 7 * LAYERS),  # its scores alone
        ("dots", 14 * LAYERS + 3, 8 * LAYERS),
        ("full", 19 * LAYERS + 3, 8 * LAYERS),  # all but `down`, whose result nothing needs
    ],
)
def test_a_layer_computes_again_what_it_does_not_keep(remat, linear, attention):
    config = load_config(
        "shakespeare_char_cpu",
        f"model.n_layer={LAYERS}",
        "model.block_size=32",
        "model.vocab_size=65",
        f"parallel.remat={remat}",
    )
    with limited_devices(1):
        steps = make_steps(config, make_mesh(MeshShape(1, 1, 1)), on_cpu=False)
    text = steps.lower_train_step().compile().as_text()
    products = re.findall(r" dot\(.*", text)
    of_heads = [p for p in products if "lhs_batch_dims" in p]
    assert (len(products) - len(of_heads), len(of_heads)) == (linear + IN_NORMS, attention)
