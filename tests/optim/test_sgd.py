import numpy as np
import pytest

from jaxgpt.config import OptimizerConfig
from jaxgpt.models.weights import Weight
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.parameters import Parameters

MATRIX = Parameters({"kernel": Weight("kernel", (3, 2), ("embed", "mlp"), "matrix", 1)})


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_a_constant_gradient_adds_up_to_a_geometric_sum(momentum):
    """m_t = g (1 - momentum^t) / (1 - momentum), and decay beside it."""
    optimizer = make_optimizer(
        OptimizerConfig(name="sgd", momentum=momentum, weight_decay=0.1), MATRIX
    )
    g, p = np.full((3, 2), 2.0, np.float32), np.full((3, 2), 7.0, np.float32)
    state = optimizer.init({"kernel": p})
    for t in range(1, 8):
        found, state = optimizer.update({"kernel": g}, state, {"kernel": p})
        expected = g * (1 - momentum**t) / (1 - momentum) + 0.1 * p
        np.testing.assert_allclose(found["kernel"], expected, rtol=1e-6)
