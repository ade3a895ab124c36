"""Ten data-parallel steps of a small model: does all of it work together?"""

import hashlib
import math
from pathlib import Path

import jax
import numpy as np

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, load_config
from jaxgpt.doctor.checks import Check, fail, ok
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.units import count
from jaxgpt.train.functions import make_steps

N_STEPS = 10
VOCABULARY = 256  # bytes
MODEL = (
    "model.n_layer=1", "model.n_head=2", "model.n_embd=64", "model.block_size=64",
    f"model.vocab_size={VOCABULARY}", "optimizer.learning_rate=3e-3", "optimizer.warmup_iters=0",
)  # fmt: skip


def train_ten_steps(cluster: ProcessGroup) -> tuple[list[float], str]:
    """Train with two rows per device, the same in every step, on the text of this file.

    Returns:
        The losses, and a hash of the parameters that this process's devices end with; several
        hashes if the devices do not agree.
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
    batch = jax.make_array_from_callback(rows.shape, steps.batch_shape.sharding, lambda i: rows[i])
    state = steps.init()
    losses = []
    for step in range(1, N_STEPS + 1):
        state, metrics = steps.train_step(state, np.int32(step), batch)
        losses.append(float(metrics.loss))
    hashes = [hashlib.sha256() for _ in jax.local_devices()]
    for leaf in jax.tree.leaves(state.params):
        for digest, shard in zip(hashes, leaf.addressable_shards, strict=True):
            digest.update(np.asarray(shard.data).tobytes())
    return losses, " ".join(sorted({digest.hexdigest()[:16] for digest in hashes}))


def training_check(found: list[tuple[list[float], str]], n_devices: int) -> Check:
    """Evaluate what `train_ten_steps` returned on every process."""
    losses = found[0][0]
    devices = "one device" if n_devices == 1 else count(n_devices, "device")
    finding = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps on {devices}"
    others = [(rank, other[-1]) for rank, (other, _) in enumerate(found) if other != losses]
    # A model that knows nothing is as good as any other guess among 256 bytes.
    unlearned = math.log(VOCABULARY)
    problem = ""
    if not all(math.isfinite(loss) for loss in losses):
        problem = ", which is not a number"
    elif abs(losses[0] - unlearned) > 0.5:
        problem = f"; a new model's should be about {unlearned:.2f}"
    elif losses[-1] > losses[0] - 0.5:
        problem = ": it should fall"
    elif others:
        rank, last = others[0]
        problem = f"; on process {rank} to {last:.3f}: all should agree"
    elif len({hashes for _, hashes in found}) > 1 or " " in found[0][1]:
        problem = "; devices end with different parameters"
    if problem:
        return fail(
            "training",
            finding + problem,
            "run it again with JAX_PLATFORMS=cpu: if that is right, suspect the driver or a device",
        )
    agreed = "; all devices end with the same parameters" if n_devices > 1 else ""
    return ok("training", finding + agreed)
