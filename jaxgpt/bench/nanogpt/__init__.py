"""Training steps beside nanoGPT's: the same weights, batches and learning rates, in turns.

nanoGPT (PyTorch) is not part of jaxgpt: `worker.py` trains with a clone of it in a Python that has
torch.
"""

import contextlib
import ctypes
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.bench.harness import (
    PROG,
    Result,
    child_environment,
    join_alone,
    log_progress,
    remove_on_signals,
    scratch_folder,
)
from jaxgpt.bench.step import steps_only, with_data
from jaxgpt.config import Config, ModelConfig, UsageError, mesh_shape, parse_args
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.train.run_directory import prepare_run

MAX_BYTES = 2**30  # of batches, which are made before the first round
VOCAB_OF_GPT2 = (50257, 50304)  # GPT-2's, and nanoGPT's padded one
PR_SET_PDEATHSIG = 1  # of Linux's prctl
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
    """Time rounds of steps of the trainer's loop and of nanoGPT, in turns.

    Args:
        settings: as for jaxgpt.train.
        nanogpt: a folder with nanoGPT's model.py.
        torch: the Python that has torch.
        steps: in each round.
        rounds: of both, after one that counts for nothing.
        compile: let nanoGPT use torch.compile.

    Raises:
        UsageError: if nanoGPT cannot be run, or if the batches of so many steps are too large.
    """
    config = parse_args(settings, PROG)
    check_programs(nanogpt, torch)
    check_batch_bytes(config, steps, rounds)
    cluster = join_alone("nanogpt", config.init_timeout)
    # Or JAX would take three quarters of a GPU's memory at once, of which nanoGPT needs as much.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with scratch_folder(cluster) as folder, worker(torch, nanogpt, folder) as (about, train):
        config, data = with_data(config, False, folder, cluster)
        run = prepare_run(steps_only(config, folder / "run"), cluster)
        facts = initialize_jax(cluster, mesh_shape(run.config))
        check_same_device(torch, about["device"])
        from jaxgpt.bench.job import Job  # imports JAX, after initialize_jax

        log_progress(cluster, "compiling the step")
        with contextlib.redirect_stdout(io.StringIO()):  # of the trainer
            job = Job(run, cluster, facts)
            remove_on_signals(folder)  # and not after a step
            write_task(job, (rounds + 1) * steps, compile, folder)
            ours, theirs, losses = take_turns(job, train, steps, rounds)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        dtype, on_gpu = run.config.train.dtype, about["device"] == "cuda"
        values = {
            "config": config.config,
            "data": data,
            "steps_per_round": steps,
            "step_seconds": statistics.median(ours),
            "nanogpt_step_seconds": statistics.median(theirs),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            **loss_difference(run.directory, losses),
            "dropout": config.model.dropout,
            "dtype": dtype,
            "vocab_sizes": [run.config.model.vocab_size, nanogpt_vocab_size(run.config.model)],
            "mesh": dict(job.mesh.shape),
            "device_kind": job.mesh.devices.flat[0].device_kind,
            "nanogpt": about | {"compile": compile, "dtype": dtype if on_gpu else "float32"},
        }
        return Result(values, rows(values))


def take_turns(
    job: Any, train: Train, n_steps: int, n_rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Run the rounds, after one to warm up.

    Returns:
        Seconds per step of our rounds and of nanoGPT's, and nanoGPT's losses of all steps.
    """
    ours, theirs, losses = [], [], []
    for number in range(n_rounds + 1):
        log_progress(job.cluster, f"round {number} of {n_rounds}" if number else "warming up")
        if number % 2:
            clocks, answer = job.trainer(n_steps), train(n_steps)
        else:
            answer, clocks = train(n_steps), job.trainer(n_steps)
        ours.append(clocks.seconds)
        theirs.append(answer["seconds"])
        losses += answer["losses"]
    return ours[1:], theirs[1:], losses


def check_programs(clone: Path, python: str) -> None:
    """Check that both sides are there before anything starts.

    Raises:
        UsageError: if there is no nanoGPT in `clone`, or no such program as `python`.
    """
    if not (clone / "model.py").is_file():
        raise UsageError(f"--nanogpt={clone}: has no model.py; give a clone of nanoGPT")
    if shutil.which(python) is None:
        raise UsageError(
            f"--torch={python}: cannot be started (there is no such program); give the path of a "
            "Python that has torch"
        )


def check_batch_bytes(config: Config, n_steps: int, n_rounds: int) -> None:
    """Check that the batches of all steps fit into 1 GiB.

    Raises:
        UsageError: if they do not.
    """
    batch_bytes = 4 * config.train.batch_size * (config.model.block_size + 1)
    most = MAX_BYTES // batch_bytes // (n_rounds + 1)
    if n_steps > most:
        remedy = f"at most --steps={most}" if most else "fewer --rounds"
        raise UsageError(
            f"--steps={n_steps} --rounds={n_rounds}: batches of so many are more than 1 GiB; "
            f"give {remedy}"
        )


def check_same_device(python: str, device: str) -> None:
    """Check that both train on the CPU, or both on one GPU. JAX has been started.

    CPU devices share the cores, as nanoGPT's threads do; of several GPUs nanoGPT uses one.

    Args:
        device: of nanoGPT: cpu or cuda.

    Raises:
        UsageError: if they do not.
    """
    import jax

    if (device == "cuda") != (jax.default_backend() == "gpu"):
        raise UsageError(
            f"--torch={python}: nanoGPT is on {device} and JAX on {jax.default_backend()}; give "
            "a Python whose torch has CUDA to compare on a GPU, or set JAX_PLATFORMS=cpu and "
            "CUDA_VISIBLE_DEVICES= to compare on the CPU"
        )
    if device == "cuda" and jax.device_count() > 1:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}: shows "
            f"{jax.device_count()} GPUs, and nanoGPT trains on one; set CUDA_VISIBLE_DEVICES=0"
        )


def write_task(job: Any, n_steps: int, compiled: bool, folder: Path) -> None:
    """Write nanoGPT's task: our initial weights, and the batches of the first steps."""
    from jaxgpt.optim import learning_rate_schedule

    config: Config = job.run.config
    model, schedule = config.model, learning_rate_schedule(config.optimizer)
    vocab_size = nanogpt_vocab_size(model)
    keys = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    steps = range(1, n_steps + 1)
    task = {
        "model": {key: getattr(model, key) for key in keys} | {"vocab_size": vocab_size},
        "lr": [float(schedule(step)) for step in steps],
        "weight_decay": config.optimizer.weight_decay,
        "betas": [config.optimizer.beta1, config.optimizer.beta2],
        "grad_clip": config.optimizer.grad_clip,
        "parts": config.train.gradient_accumulation_steps,
        "dtype": config.train.dtype,
        "compile": compiled,
    }
    (folder / "task.json").write_text(json.dumps(task))
    np.save(folder / "batches.npy", np.stack([np.asarray(job.loader.batch(s)) for s in steps]))
    np.savez(folder / "weights.npz", **nanogpt_weights(job.params(), model, vocab_size))


def nanogpt_vocab_size(model: ModelConfig) -> int:
    """Return the size of nanoGPT's vocabulary: its configurations pad GPT-2's, for speed."""
    ours, theirs = VOCAB_OF_GPT2
    return theirs if model.vocab_size == ours else model.vocab_size


def nanogpt_weights(
    params: dict[str, Any], model: ModelConfig, vocab_size: int
) -> dict[str, np.ndarray]:
    """Return our parameters by nanoGPT's names; PyTorch's linear layers hold W transposed."""
    import jax

    D = model.n_embd
    wte_VD = np.zeros((vocab_size, D), np.float32)
    wte_VD[: model.vocab_size] = params["token_embedding"]["embedding"][: model.vocab_size]
    out = {"transformer.wte.weight": wte_VD, "lm_head.weight": wte_VD}
    out["transformer.wpe.weight"] = params["position_embedding"]["embedding"]
    out |= norm_weights("transformer.ln_f", params["norm"])
    layers = {
        ("attention", "qkv"): ("attn.c_attn", D),
        ("attention", "out"): ("attn.c_proj", D),
        ("mlp", "up"): ("mlp.c_fc", D),
        ("mlp", "down"): ("mlp.c_proj", 4 * D),
    }
    for i in range(model.n_layer):
        layer = jax.tree.map(lambda stacked, i=i: stacked[i], params["layers"])
        here = f"transformer.h.{i}"
        for (module, linear), (theirs, inputs) in layers.items():
            out[f"{here}.{theirs}.weight"] = layer[module][linear]["kernel"].reshape(inputs, -1).T
            if model.bias:
                out[f"{here}.{theirs}.bias"] = layer[module][linear]["bias"].reshape(-1)
        out |= norm_weights(f"{here}.ln_1", layer["norm_1"]) | norm_weights(
            f"{here}.ln_2", layer["norm_2"]
        )
    return out


def norm_weights(name: str, params: dict[str, Any]) -> dict[str, np.ndarray]:
    theirs = {"scale": "weight", "bias": "bias"}
    return {f"{name}.{theirs[kind]}": leaf for kind, leaf in params.items() if leaf is not None}


@contextlib.contextmanager
def worker(python: str, clone: Path, folder: Path) -> Iterator[tuple[dict[str, Any], Train]]:
    """Start nanoGPT; yield its description of itself, and a function that trains steps.

    Raises:
        UsageError: if it ends, or answers something else.
    """
    with (folder / "nanogpt.log").open("w+") as log:
        try:
            process = subprocess.Popen(
                [python, str(WORKER), str(clone.absolute()), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C is for us, who end it
                env=child_environment(),  # as its users run it
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise UsageError(
                f"--torch={python}: cannot be started ({error.strerror}); give the path of a "
                "Python that has torch"
            ) from None

        def answer() -> dict[str, Any]:
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["no word"])[-1]
                raise UsageError(
                    f"--torch={python}: nanoGPT has ended ({last}); give a Python that has torch"
                )
            try:
                return json.loads(line)
            except ValueError:
                raise UsageError(
                    f"--torch={python}: answers with {line.strip()!r}; give a Python that has torch"
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


def end_with_parent() -> None:
    """Let Linux kill the calling process when its parent has ended, however that was."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def loss_difference(directory: Path, losses: list[float]) -> dict[str, Any]:
    """Return the largest difference between our logged losses and nanoGPT's of the same steps.

    The log has the first step, and every train.log_interval-th: `losses_compared` of `losses`.
    """
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    return {
        "loss_difference": max(abs(loss - losses[step - 1]) for step, loss in logged.items()),
        "losses_compared": len(logged),
        "losses": len(losses),
    }


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words."""
    about, ratios = values["nanogpt"], values["ratios"]
    mesh = " ".join(f"{axis}={size}" for axis, size in values["mesh"].items())
    losses = (
        f"of the same steps differ by {values['loss_difference']:.1g} at the most, in the "
        f"{values['losses_compared']} of {values['losses']} steps that are logged"
    )
    if values["dropout"]:
        losses += f", with dropout {values['dropout']} of other random numbers"
    ours, theirs = values["vocab_sizes"]
    if theirs > ours:
        losses += f", with {theirs - ours} tokens more in nanoGPT's softmax"
    return [
        ("nanogpt", f"{values['config']}, {len(ratios)} rounds of {values['steps_per_round']} "
         "steps each, in turns, from the same weights on the same batches"),
        ("data", values["data"]),
        ("jaxgpt", f"{1e3 * values['step_seconds']:.2f} ms a step, {values['dtype']}, mesh {mesh}"),
        ("nanoGPT", f"{1e3 * values['nanogpt_step_seconds']:.2f} ms a step, torch "
         f"{about['torch']} on {about['device']}, {about['dtype']}, {about['threads']} threads, "
         f"{'torch.compile' if about['compile'] else 'eager'}"),
        ("ratio", f"{values['ratio']:.2f} x nanoGPT's tokens/s, the median of the rounds' own "
         f"ratios ({min(ratios):.2f} to {max(ratios):.2f})"),
        ("losses", losses),
    ]  # fmt: skip
