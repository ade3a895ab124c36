"""Training steps beside nanoGPT's: the same weights, batches and learning rates, in turns.

nanoGPT (PyTorch) is not part of jaxgpt: `worker.py` trains with a clone of it in a Python that has
torch.
"""

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, Job, Result, Value, open_job
from jaxgpt.bench.rounds import Rounds
from jaxgpt.config import Config, ModelConfig, UsageError, is_changed, parse_args
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.parallel.sharding import Params
from jaxgpt.train.run.resume import initial_model

MAX_BYTES = 2**30  # of batches, which are made before the first round
VOCAB_OF_GPT2 = (50257, 50304)  # GPT-2's, and nanoGPT's padded one
OPTIONS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")  # of nanoGPT's models
HAS = {*OPTIONS, "vocab_size", "attention"}
WORKER = Path(__file__).with_name("worker.py")

Train = Callable[[int], dict[str, Any]]  # number of steps -> the worker's answer


def run(
    settings: Sequence[str],
    nanogpt: Path,
    torch: str,
    steps: int = 15,
    rounds: int = 15,
    compile: bool = False,
) -> Result:
    """Time rounds of steps of the trainer's loop and of nanoGPT, in turns, after one of each.

    Raises `UsageError` if nanoGPT cannot be run, or if the batches of so many steps are too large.
    """
    config = parse_args(settings, PROG, initial_model)
    if not (nanogpt / "model.py").is_file():
        raise UsageError(f"--nanogpt={nanogpt}: has no model.py; give a clone of nanoGPT")
    for key in sorted(vars(config.model).keys() - HAS):
        if is_changed(config.model, key):
            raise UsageError(f"model.{key}={getattr(config.model, key)}: nanoGPT has no such model")
    other = Other("nanoGPT", "torch", str(nanogpt.absolute()), nanogpt_model)
    return side_by_side(config, torch, other, steps, rounds, compile)


class Other(NamedTuple):
    """A program that trains beside ours."""

    name: str
    needs: str  # packages in its Python
    library: str  # what `worker.py` makes its model of
    model: Callable[[Params, ModelConfig], tuple[dict[str, Any], dict[str, np.ndarray]]]
    """(our parameters, our model) -> (the options of its model, the parameters by its names)."""


def side_by_side(
    config: Config, torch: str, other: Other, steps: int, rounds: int, compile: bool
) -> Result:
    """Time rounds of steps of the trainer's loop and of another program; arguments as for `run`."""
    if config.optimizer.name != "adamw":
        raise UsageError(f"optimizer.name={config.optimizer.name}: {other.name} trains with adamw")
    batch_bytes = 4 * config.train.batch_size * (config.model.block_size + 1)
    if batch_bytes * steps * (rounds + 1) > MAX_BYTES:
        raise UsageError(
            f"--steps={steps} --rounds={rounds}: batches of so many are more than 1 GiB; give fewer"
        )
    # Or JAX would take three quarters of a GPU's memory at once, of which the other needs as much.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with open_job(config, alone=True) as job, worker(torch, other, job.folder) as (about, train):
        trainer = Rounds(job, config)
        check_same_device(torch, about["device"])
        model = write_task(trainer, other, (rounds + 1) * steps, compile, job.folder)
        ours, theirs, losses = take_turns(trainer, train, steps, rounds, job)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        config, mesh = trainer.run.config, trainer.mesh
        dtype = config.train.dtype
        about |= {"compile": compile, "dtype": dtype if about["device"] == "cuda" else "float32"}
        of_both = f"{other.name}'s tokens/s, the median of the rounds' own ratios"
        return {
            "config": config.config,
            "data": trainer.data,
            "dtype": dtype,
            "dropout": Value(config.model.dropout, note="above 0, losses differ"),
            "mesh": dict(mesh.shape),
            "device_kind": mesh.devices.flat[0].device_kind,
            other.name.lower(): about,
            "steps_per_round": steps,
            "step_seconds": Value(statistics.median(ours), "s"),
            f"{other.name.lower()}_step_seconds": Value(statistics.median(theirs), "s"),
            "ratio": Value(statistics.median(ratios), "x", of_both),
            "ratios": Value(ratios, "x"),
            **loss_difference(trainer.run.directory, losses),
            "vocab_sizes": Value(
                [config.model.vocab_size, model["vocab_size"]], note=f"ours, {other.name}'s"
            ),
        }


def take_turns(
    trainer: Rounds, train: Train, n_steps: int, n_rounds: int, job: Job
) -> tuple[list[float], list[float], list[float]]:
    """Run the rounds, after one to warm up.

    Return seconds per step of our rounds and of nanoGPT's, and nanoGPT's losses of all steps.
    """
    ours, theirs, losses = [], [], []
    for number in range(n_rounds + 1):
        job.log(f"round {number} of {n_rounds}" if number else "warming up")
        if number % 2:
            (seconds, _), answer = trainer.train(n_steps), train(n_steps)
        else:
            answer, (seconds, _) = train(n_steps), trainer.train(n_steps)
        ours.append(seconds)
        theirs.append(answer["seconds"])
        losses += answer["losses"]
    return ours[1:], theirs[1:], losses


def check_same_device(python: str, device: str) -> None:
    """Raise `UsageError` unless PyTorch, on cpu or cuda, and JAX use the CPU, or both one GPU.

    CPU devices share the cores, as PyTorch's threads do; of several GPUs PyTorch uses one.
    """
    on_gpu = jax.default_backend() == "gpu"
    if (device == "cuda") != on_gpu:
        raise UsageError(
            f"--torch={python}: PyTorch is on {device} and JAX on {jax.default_backend()}; give "
            "a Python whose torch has CUDA, or set JAX_PLATFORMS=cpu and CUDA_VISIBLE_DEVICES="
        )
    if on_gpu and jax.device_count() > 1:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}: shows "
            f"{jax.device_count()} GPUs, and PyTorch trains on one; set CUDA_VISIBLE_DEVICES=0"
        )


def write_task(
    trainer: Rounds, other: Other, n_steps: int, compiled: bool, folder: Path
) -> dict[str, Any]:
    """Write the task of the other: our initial weights, and the batches of the first steps.

    Return the options of its model.
    """
    config = trainer.run.config
    steps = range(1, n_steps + 1)
    model, arrays = other.model(jax.device_get(trainer.state.params), config.model)
    task = {
        "model": model,
        "lr": [float(learning_rate(config.optimizer, step)) for step in steps],
        "weight_decay": config.optimizer.weight_decay,
        "betas": [config.optimizer.beta1, config.optimizer.beta2],
        "grad_clip": config.optimizer.grad_clip,
        "parts": config.train.gradient_accumulation_steps,
        "dtype": config.train.dtype,
        "compile": compiled,
    }
    (folder / "task.json").write_text(json.dumps(task))
    batches = [np.asarray(trainer.trainer.loader.batch(step)) for step in steps]
    np.save(folder / "batches.npy", np.stack(batches))
    np.savez(folder / "weights.npz", **arrays)
    return model


def nanogpt_model(
    params: Params, model: ModelConfig
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the options of nanoGPT's model, and our parameters by its names."""
    vocab_size = nanogpt_vocab_size(model)
    options = {key: getattr(model, key) for key in OPTIONS} | {"vocab_size": vocab_size}
    return options, nanogpt_weights(params, model, vocab_size)


def nanogpt_vocab_size(model: ModelConfig) -> int:
    """Return the size of nanoGPT's vocabulary: its configurations pad GPT-2's, for speed."""
    ours, theirs = VOCAB_OF_GPT2
    return theirs if model.vocab_size == ours else model.vocab_size


def nanogpt_weights(
    params: dict[str, Any], model: ModelConfig, vocab_size: int
) -> dict[str, np.ndarray]:
    """Return our parameters by nanoGPT's names; PyTorch's linear layers hold W transposed."""
    D = model.n_embd
    wte_VD = np.zeros((vocab_size, D), np.float32)
    wte_VD[: model.vocab_size] = params["token_embedding"]["embedding"][: model.vocab_size]
    out = {"transformer.wte.weight": wte_VD, "lm_head.weight": wte_VD}
    out["transformer.wpe.weight"] = params["position_embedding"]["embedding"]

    def add(name: str, module: dict[str, Any], inputs: int = 0) -> None:
        if "kernel" in module:
            out[f"{name}.weight"] = module["kernel"].reshape(inputs, -1).T
        else:
            out[f"{name}.weight"] = module["scale"]
        if model.bias:
            out[f"{name}.bias"] = module["bias"].reshape(-1)

    add("transformer.ln_f", params["norm"])
    for i in range(model.n_layer):
        layer = jax.tree.map(lambda stacked, i=i: stacked[i], params["layers"])
        here = f"transformer.h.{i}"
        add(f"{here}.ln_1", layer["norm_1"])
        add(f"{here}.attn.c_attn", layer["attention"]["qkv"], D)
        add(f"{here}.attn.c_proj", layer["attention"]["out"], D)
        add(f"{here}.ln_2", layer["norm_2"])
        add(f"{here}.mlp.c_fc", layer["mlp"]["up"], D)
        add(f"{here}.mlp.c_proj", layer["mlp"]["down"], 4 * D)
    return out


@contextlib.contextmanager
def worker(python: str, other: Other, folder: Path) -> Iterator[tuple[dict[str, Any], Train]]:
    """Start the other; yield its description of itself, and a function that trains steps.

    Raises `UsageError` if it cannot be started, ends, or answers something else.
    """
    remedy = f"give the path of a Python that has {other.needs}"
    with (folder / "worker.log").open("w+") as log:
        try:
            process = subprocess.Popen(
                [python, str(WORKER), other.library, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except OSError as error:
            raise UsageError(f"--torch={python}: {error.strerror}; {remedy}") from None

        def answer() -> dict[str, Any]:
            line = process.stdout.readline()
            try:
                return json.loads(line)
            except ValueError:
                log.seek(0)
                said = (line + log.read()).strip().rpartition("\n")[2]
                raise UsageError(
                    f"--torch={python}: {other.name} fails ({said}); {remedy}"
                ) from None

        def train(n_steps: int) -> dict[str, Any]:
            with contextlib.suppress(BrokenPipeError):  # `answer` repeats its last words
                process.stdin.write(f"{n_steps}\n")
                process.stdin.flush()
            return answer()

        try:
            yield answer(), train
        finally:
            process.kill()
            process.wait()


def loss_difference(directory: Path, losses: list[float]) -> dict[str, Any]:
    """Return the largest difference between our logged losses and the other's of the same steps.

    The log has the first step, and every train.log_interval-th: `losses_compared` of `losses`.
    """
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    return {
        "loss_difference": max(abs(loss - losses[step - 1]) for step, loss in logged.items()),
        "losses_compared": len(logged),
        "losses": len(losses),
    }
