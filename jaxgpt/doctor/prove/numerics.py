"""bfloat16 against float32, a device against this host's CPU, and attention against XLA's."""

from pathlib import Path
from typing import Any

from jaxgpt.doctor.prove.runs import QUIET
from jaxgpt.doctor.prove.stage import Stage
from jaxgpt.tracking.jsonl import read_records

STEPS = 50
MODEL = (
    "--config", "shakespeare_char", "model.dropout=0", f"train.max_iters={STEPS}",
    "optimizer.warmup_iters=10", "checkpoint.interval=0", *QUIET,
)  # fmt: skip
ATTENTION = {  # what is compared -> settings of gpt2
    "attention": (),
    "attention with dropout 0.2": ("model.dropout=0.2",),
    "attention inside documents": ("data.document_mask=True",),
    "attention of grouped queries in a window": ("model.n_kv_head=4", "model.sliding_window=200"),
}
DOCUMENT = 100  # tokens of a document
SMALL = ("model.n_layer=2", "model.n_embd=128", "model.n_head=4", "train.batch_size=8")


def numerics(stage: Stage) -> None:
    small = SMALL if not stage.on_gpu else ("train.batch_size=8",)
    words = ("train", *MODEL, *small)
    lower = losses(stage, "bfloat16", *words, "train.dtype=bfloat16")
    single = losses(stage, "float32", *words, "train.dtype=float32")
    stage.add("bfloat16 against float32, losses", furthest(lower, single), note=f"{STEPS} steps")
    if stage.on_gpu:
        cpu = losses(stage, "cpu", *words, "train.dtype=float32", platform="cpu")
        stage.add("bfloat16 against float32 on the CPU, losses", furthest(lower, cpu))
        stage.add("float32 against float32 on the CPU, losses", furthest(single, cpu))
    attention(stage)


def losses(stage: Stage, name: str, *words: str, platform: str | None = None) -> list[float]:
    out: Path = stage.folder / name
    env = {"JAX_PLATFORMS": platform} if platform else None
    stage.run(*words, "--out", str(out), env=env)
    return [record["loss"] for record in read_records(out / "metrics.jsonl", "train")]


def furthest(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of losses of the same steps."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def attention(stage: Stage) -> None:
    """Compare the kernel that training would take in bfloat16 with the same in float32 by XLA."""
    import jax
    import jax.numpy as jnp

    from jaxgpt.config import load_config
    from jaxgpt.models.attention import choose_attention, cuda_capability, make_attention

    T = 1024 if stage.on_gpu else 256
    keys = jax.random.split(jax.random.key(0), 4)
    for name, settings in ATTENTION.items():
        config = load_config("gpt2", *settings)
        model, documents = config.model, config.data.document_mask
        groups = model.n_kv_head or model.n_head
        heads = (model.n_head, groups, groups, model.n_head)  # of q, k, v and the result
        narrow = [
            jax.random.normal(key, (2, T, n, 64)).astype(jnp.bfloat16)
            for key, n in zip(keys, heads, strict=True)
        ]
        wide = [x.astype(jnp.float32) for x in narrow]
        capability = cuda_capability(jax.devices()[0])
        kernel, why = choose_attention(model, "bfloat16", capability, documents)
        dropped = jax.random.split(jax.random.key(1), (2, 12)) if model.dropout else None
        begins = jnp.arange(T) // DOCUMENT * DOCUMENT
        starts = jnp.broadcast_to(begins, (2, T)) if documents else None
        found = outcome(make_attention(kernel, model), narrow, dropped, starts)
        with jax.default_matmul_precision("highest"):
            exact = outcome(make_attention("xla", model), wide, dropped, starts)
        errors = [
            float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
            for a, b in zip(found, exact, strict=True)
        ]
        stage.add(f"{name}, forward", errors[0], note=f"{kernel}: {why}")
        stage.add(f"{name}, gradient", max(errors[1:]))


def outcome(attend: Any, qkvd: list[Any], dropped: Any, starts: Any) -> list[Any]:
    """Return attention's result and the gradients of q, k and v, where d is the result's own."""
    import jax

    @jax.jit
    def compute(q, k, v, d):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, dropped, starts), q, k, v)
        return [out, *pull(d)]

    return compute(*qkvd)
