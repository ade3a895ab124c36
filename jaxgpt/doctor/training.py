"""End-to-end check: ten data-parallel training steps of a small model."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, load_config
from jaxgpt.doctor.checks import Check
from jaxgpt.doctor.collectives import try_on_all
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.units import count
from jaxgpt.train.jitted import make_steps

N_STEPS = 10
VOCABULARY = 256  # each token is one byte
MODEL = (
    "model.n_layer=1", "model.n_head=2", "model.n_embd=64", "model.block_size=64",
    f"model.vocab_size={VOCABULARY}", "optimizer.learning_rate=3e-3", "optimizer.warmup_iters=0",
)  # fmt: skip


def train_ten_steps(cluster: ProcessGroup) -> tuple[list[float], list[str]]:
    """Train a small model for ten steps on one batch of this file's text, two rows per device.

    Returns the loss of each step in nats, and the distinct SHA-256 hashes of the final parameters
    on this process's devices. Every process must call this.
    """
    n_devices = jax.device_count()
    config = load_config(
        "tiny", *MODEL, "parallel.mesh=-1,1,1", f"train.batch_size={2 * n_devices}"
    )
    mesh = make_mesh(MeshShape(n_devices), cluster.hosts)
    steps = make_steps(config, mesh)
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    width = config.model.block_size + 1
    starts = np.arange(2 * n_devices) * 61 % (text.size - width)
    rows = text[starts[:, None] + np.arange(width)]
    batch = jax.make_array_from_callback(rows.shape, steps.batch_sharding, lambda i: rows[i])
    state = steps.init()
    losses = []
    for step in range(1, N_STEPS + 1):
        lr = learning_rate(config.optimizer, step)
        state, metrics = steps.train_step(state, np.int32(step), lr, batch)
        losses.append(float(metrics.loss))
    leaves = jax.tree.leaves(state.params)
    copies = [
        b"".join(np.asarray(leaf.addressable_data(device)).tobytes() for leaf in leaves)
        for device in range(jax.local_device_count())
    ]
    return losses, sorted({hashlib.sha256(copy).hexdigest() for copy in copies})


def training_check(cluster: ProcessGroup) -> Check:
    """Train for ten steps on all processes, and check the losses and parameters; see `judge`.

    The result is FAIL if a process raises an error. Every process must call this.
    """
    found, error = try_on_all("training", cluster, train_ten_steps, cluster)
    if error:
        return Check("training", "FAIL", error, "see the error messages above this report")
    return judge(found, jax.device_count())


def judge(found: Sequence[tuple[list[float], list[str]]], n_devices: int) -> Check:
    """Check `found`, the results of `train_ten_steps` on all processes.

    The first loss must be within 0.5 nats of ln(256), and the last loss must be more than 0.5 nats
    lower. All processes must report the same losses, and all devices must end with the same
    parameters. If any of these conditions is not met, the check is FAIL.
    """
    losses, hashes = found[0]
    # The loss of a uniform guess among 256 byte values. Training should start near this loss.
    unlearned = math.log(VOCABULARY)
    right = abs(losses[0] - unlearned) < 0.5 and losses[-1] < losses[0] - 0.5
    differing = [rank for rank, other in enumerate(found) if list(other) != [losses, hashes]]
    finding = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    finding += f" on {count(n_devices, 'device')}; "
    remedy = "run again with JAX_PLATFORMS=cpu; if that passes, suspect the driver or a device"
    if not right:
        finding += f"it should fall by more than 0.5 from about {unlearned:.2f}"
    elif differing:
        finding += f"process {differing[0]} differs from process 0 in its losses or parameters"
    elif len(hashes) > 1:
        finding += "devices end with different parameters"
    else:
        return Check("training", "OK", f"{finding}all devices end with the same parameters")
    return Check("training", "FAIL", finding, remedy)
