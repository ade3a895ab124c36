"""Speed: of the presets, beside nanoGPT, and of a model so small that launching it is the cost."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from jaxgpt.doctor.prove.stage import Needs, Stage
from jaxgpt.tracking.jsonl import read_records

GPT2_ON_CPU = (
    "model.n_layer=2", "model.block_size=64", "train.batch_size=2",
    "train.gradient_accumulation_steps=1", "train.dtype=float32",
)  # fmt: skip
GPT2_XL_ON_CPU = (
    "model.n_layer=1", "model.block_size=64", "train.batch_size=1",
    "train.gradient_accumulation_steps=1", "train.dtype=float32",
)  # fmt: skip
DISPATCHED = (1, 4, 16)  # steps that one dispatch runs: divisors of TIMED_STEPS
TIMED_STEPS = 96


def gpt2(stage: Stage) -> None:
    words = ("--steps", "2") if stage.on_gpu else ("--steps", "1", *GPT2_ON_CPU)
    add_speed(stage, stage.json("bench", "step", "--config", "gpt2", *words))


def gpt2_xl(stage: Stage) -> None:
    on_gpu = ("train.batch_size=96", "train.gradient_accumulation_steps=8")
    words = on_gpu if stage.on_gpu else ("--steps", "1", *GPT2_XL_ON_CPU)
    add_speed(stage, stage.json("bench", "step", "--config", "gpt2-xl", *words))


def add_speed(stage: Stage, found: dict[str, Any]) -> None:
    """Add what `bench step` found."""
    stage.add("tokens/s", found["tokens_per_sec"], note=found["data"])
    stage.add("time of a step", 1e3 * found["seconds_per_step"]["median"], "ms")
    stage.add("MFU", found["mfu"], "%", "" if found["mfu"] else "the device's peak is not known")
    stage.add("share of the largest matrix product's rate", found["share_of_matmul"], "%")
    stage.add("attention", found["attention"])
    stage.add("attention kernels in the compiled step", found["attention_kernels"])


def nanogpt(stage: Stage) -> None:
    """Compare with nanoGPT, in turns, from the same weights on the same batches."""
    clone, python = find_nanogpt(stage), find_torch(stage)
    beside = ("--nanogpt", str(clone), "--torch", python)
    if stage.on_gpu:
        runs = {
            "gpt2": ("--compile", "--steps", "2", "train.gradient_accumulation_steps=20"),
            "shakespeare_char": ("--compile", "--steps", "200", "train.dtype=bfloat16"),
        }
    else:
        runs = {
            "shakespeare_char_cpu": ("--rounds", "8"),
            "shakespeare_char": ("--steps", "1", "--rounds", "5"),
        }
    for config, words in runs.items():
        found = stage.json("bench", "nanogpt", *beside, "--config", config, *words)
        note = f"losses differ by {found['loss_difference']:.1g}"
        stage.add(config, found["ratio"], "x", note)


def find_nanogpt(stage: Stage) -> Path:
    """Return the clone that was given, or one beside this project.

    Raises:
        Needs: if there is none.
    """
    beside = Path(__file__).parents[4] / "nanoGPT"
    for clone in (stage.request.nanogpt, beside):
        if clone is not None and (clone / "model.py").exists():
            return clone
    raise Needs("a clone of nanoGPT: give it with --nanogpt DIR")


def find_torch(stage: Stage) -> str:
    """Return a Python with torch.

    Raises:
        Needs: if none was given and this one has none.
    """
    if stage.request.torch:
        return stage.request.torch
    if importlib.util.find_spec("torch") is None:
        raise Needs("torch: install it, or give a Python that has it with --torch PYTHON")
    return sys.executable


def shakespeare(stage: Stage) -> None:
    """Train the small preset, and time it with one step and with several to a dispatch."""
    preset = "shakespeare_char" if stage.on_gpu else "shakespeare_char_cpu"
    dtype = ("train.dtype=bfloat16",) if stage.on_gpu else ()
    words = ("--config", preset, *dtype, *data(stage))
    out = stage.folder / "run"
    small = () if stage.on_gpu else ("train.max_iters=250", "train.eval_iters=5")
    stage.run("train", *words, *small, "train.sample_tokens=0", "--out", str(out))
    losses = [record["val_loss"] for record in read_records(out / "metrics.jsonl", "eval")]
    stage.add("best validation loss", min(loss for loss in losses if loss is not None))
    # Last: from here on this process holds the device's memory.
    for n, seconds in dispatches(preset, *dtype):
        stage.add(f"time of a step, {n} to a dispatch", 1e3 * seconds, "ms")


def data(stage: Stage) -> list[str]:
    """Return the settings for Tiny Shakespeare if it is here, else for text that always is."""
    from jaxgpt.config import DataConfig
    from jaxgpt.data.dataset import dataset_directory

    if stage.request.text is not None:
        folder = stage.folder / "data"
        text = str(stage.request.text)
        stage.run("prepare", "text", "--input", text, "--tokenizer", "char", "--out", str(folder))
        return [f"data.path={folder}"]
    if (dataset_directory(DataConfig(dataset="shakespeare_char")) / "train.bin").exists():
        return []
    stage.add("text", "Python's standard library: give Tiny Shakespeare with --text FILE")
    return ["data.dataset=python"]


def dispatches(preset: str, *words: str) -> list[tuple[int, float]]:
    """Return seconds of a step where one dispatch runs so many, in a loop on the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxgpt.config import MeshShape, load_config
    from jaxgpt.optim.schedule import learning_rate
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.runtime.allocator import keep_freed_memory
    from jaxgpt.train.functions import make_steps
    from jaxgpt.train.step import train_step

    keep_freed_memory()
    config = load_config(preset, "model.vocab_size=65", *words)
    steps = make_steps(config, make_mesh(MeshShape(), ("this host",)))
    shape = steps.batch_shape.shape
    lr = learning_rate(config.optimizer, 1)
    rows = jnp.asarray(np.random.default_rng(0).integers(65, size=shape, dtype=np.int32))

    def seconds(n: int) -> float:
        def several(state: Any, first: Any) -> Any:
            def step(state: Any, number: Any) -> tuple[Any, None]:
                return train_step(steps.model, state, number, lr, rows)[0], None

            return jax.lax.scan(step, state, first + jnp.arange(n, dtype=jnp.int32))[0]

        run = jax.jit(several, donate_argnums=0)
        state = jax.block_until_ready(run(steps.init(), np.int32(1)))
        began = time.perf_counter()
        for first in range(1, 1 + TIMED_STEPS, n):
            state = run(state, np.int32(first))
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / TIMED_STEPS

    return [(n, seconds(n)) for n in DISPATCHED]
