"""bfloat16 against float32, a device against the CPU, attention kernels against XLA; the tests.

As a command, `python -m jaxgpt.doctor.prove.numerics`, it compares the attention kernels.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.doctor.prove.check import Check, Missing
from jaxgpt.doctor.prove.runs import QUIET
from jaxgpt.tracking.jsonl import read_records

STEPS = 50
MODEL = (
    "--config", "shakespeare_char", "model.dropout=0", f"train.max_iters={STEPS}",
    "train.batch_size=8", "optimizer.warmup_iters=10", "checkpoint.interval=0", *QUIET,
)  # fmt: skip
SMALL = ("model.n_layer=2", "model.n_embd=128", "model.n_head=4")
ATTENTION = {  # case -> settings of gpt2
    "attention": (),
    "attention with dropout 0.2": ("model.dropout=0.2",),
    "attention inside documents": ("data.document_mask=True",),
    "attention of grouped queries in a window": ("model.n_kv_head=4", "model.sliding_window=200"),
}
DOCUMENT = 100  # tokens of a document
TOLERANCE = 0.02  # relative, for bfloat16


def numerics(check: Check) -> None:
    words = MODEL if check.on_gpu else (*MODEL, *SMALL)
    lower = losses(check, "bfloat16", *words, "train.dtype=bfloat16")
    single = losses(check, "float32", *words, "train.dtype=float32")
    difference, note = largest_difference(lower, single), f"{STEPS} steps"
    check.add("bfloat16 against float32, losses", difference, note=note, at_most=TOLERANCE)
    if check.on_gpu:
        cpu = losses(check, "cpu", *words, "train.dtype=float32", platform="cpu")
        for name, found in (("bfloat16", lower), ("float32", single)):
            difference = largest_difference(found, cpu)
            check.add(f"{name} against float32 on the CPU, losses", difference)
    for name, found in check.json("jaxgpt.doctor.prove.numerics").items():
        forward, gradient, kernel = found
        check.add(f"{name}, forward", forward, note=kernel, at_most=TOLERANCE)
        check.add(f"{name}, gradient", gradient, at_most=TOLERANCE)


def losses(check: Check, name: str, *words: str, platform: str | None = None) -> list[float]:
    out: Path = check.folder / name
    env = {"JAX_PLATFORMS": platform} if platform else None
    check.run("jaxgpt.train", *words, "--out", str(out), env=env)
    return [record["loss"] for record in read_records(out / "metrics.jsonl", "train")]


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference between losses of the same steps."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def attention_errors(settings: tuple[str, ...]) -> tuple[float, float, str]:
    """Compare the bfloat16 kernel that training would use with XLA's attention in float32.

    Return the largest errors of the output and of the gradients, relative to the largest value,
    and the kernel.
    """
    import jax
    import jax.numpy as jnp

    from jaxgpt.config import load_config
    from jaxgpt.models.attention import choose_attention, cuda_capability, make_attention

    T = 1024 if accelerator_expected() else 256
    config = load_config("gpt2", *settings)
    model, documents = config.model, config.data.document_mask
    groups = model.n_kv_head or model.n_head
    heads = (model.n_head, groups, groups, model.n_head)  # of q, k, v and the output's gradient
    keys = jax.random.split(jax.random.key(0), 4)
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

    def output_and_gradients(kernel: str, arrays: list[Any]) -> list[Any]:
        attend = make_attention(kernel, model)

        @jax.jit
        def compute(q, k, v, d):
            out, pull = jax.vjp(lambda *qkv: attend(*qkv, dropped, starts), q, k, v)
            return [out, *pull(d)]

        return compute(*arrays)

    found = output_and_gradients(kernel, narrow)
    with jax.default_matmul_precision("highest"):
        exact = output_and_gradients("xla", wide)
    forward, *gradients = (
        float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
        for a, b in zip(found, exact, strict=True)
    )
    return forward, max(gradients), f"{kernel}: {why}"


def tests(check: Check) -> None:
    """Run the tests that are marked `gpu`. They also run on CPUs."""
    if importlib.util.find_spec("pytest") is None:
        raise Missing("pytest: pip install pytest")
    folder = Path(__file__).parents[3] / "tests"
    if not folder.is_dir():
        raise Missing("the tests: run from a clone of jaxgpt")
    printed = check.run("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(folder))
    check.add("tests marked gpu", printed.strip().rpartition("\n")[2])


def main() -> None:
    print(json.dumps({name: attention_errors(words) for name, words in ATTENTION.items()}))


if __name__ == "__main__":
    main()
