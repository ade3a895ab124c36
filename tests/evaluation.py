"""Small runs for tests of the evaluation, and independent reference implementations."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape
from jaxgpt.data.batch import input_batch
from jaxgpt.evaluate.__main__ import evaluate, parser
from jaxgpt.evaluate.model import Model
from jaxgpt.evaluate.trained import find_trained
from jaxgpt.models.transformer import gpt_graph
from jobs import SMALL, checkpoint_arrays, limited_devices, train_here

BLOCK = 32
TEXT = "".join(
    f"The naïve café № {n} sells {n % 7} crème brûlées — 日本語 😀 costs {n * 13} €\n"
    for n in range(250)
)
SHAPE = (
    *SMALL, f"model.block_size={BLOCK}", "model.n_embd=32", "train.max_iters=3",
    "optimizer.learning_rate=0.02", "optimizer.warmup_iters=1",
)  # fmt: skip


def train(out, *settings):
    """Train a few steps, after which different tokens have different probabilities."""
    assert train_here(*SHAPE, "--mesh", "1,1,1", "--out", out, *settings) == 0
    return out


@contextlib.contextmanager
def devices_of(mesh):
    with limited_devices(MeshShape.parse(mesh).n_devices):
        yield


def evaluated(*words, mesh="1,1,1"):
    """Return the record that a command line prints with --json."""
    arguments, settings = parser().parse_known_args([*map(str, words), "--mesh", mesh])
    with devices_of(mesh):
        return evaluate(Path(arguments.run), arguments, settings, ProcessGroup(launcher="test"))


def opened(run, batch=4, mesh="1,1,1"):
    with devices_of(mesh):
        return Model(find_trained(run, mesh=mesh), batch, ProcessGroup(launcher="test"))


def reference_logits(run, config):
    """tokens_T -> log-probabilities_TV in float64, by the plain network on one device."""
    step = max(int(path.name) for path in (run / "checkpoints").iterdir())
    arrays = checkpoint_arrays(run, step)
    params = unflatten_dict(
        {
            tuple(key.strip("['\"") for key in path.split("]")[:-1])[1:]: array
            for path, array in arrays.items()
            if path.startswith("['params']")
        }
    )
    graph, V = gpt_graph(config.model), config.model.vocab_size

    @jax.jit
    def forward(tokens_BT):
        return nnx.merge(graph, jax.tree.map(jnp.asarray, params))(input_batch(tokens_BT))

    def log_probabilities(tokens):
        padded = np.zeros((1, config.model.block_size), np.int32)
        padded[0, : len(tokens)] = tokens
        logits_TV = np.asarray(forward(padded)[0, : len(tokens), :V], np.float64)
        largest = logits_TV.max(axis=-1, keepdims=True)
        sums = np.exp(logits_TV - largest).sum(axis=-1, keepdims=True)
        return logits_TV - largest - np.log(sums)

    return log_probabilities


def reference_losses(log_probabilities, tokens, T, stride):
    """The loss of each token but the first, as Hugging Face's guide to perplexity has it."""
    losses, end_before, n = [], 0, len(tokens) - 1
    for begin in range(0, n, stride):
        end = min(begin + T, n)
        found = log_probabilities(tokens[begin:end])
        targets = tokens[begin + 1 : end + 1]
        new = end - end_before
        losses += [-found[i, targets[i]] for i in range(len(targets) - new, len(targets))]
        end_before = end
        if end == n:
            break
    assert len(losses) == n
    return np.array(losses)
