"""Training steps beside nanoGPT's: the same weights, batches, learning rates, in turns.

nanoGPT (PyTorch) is not part of jaxgpt: a clone of it runs in a Python of its own that has torch.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.bench.alone import join_alone, of_its_own
from jaxgpt.bench.progress import tell
from jaxgpt.bench.scratch import scratch_folder
from jaxgpt.bench.step import steps_only, with_data
from jaxgpt.config import Config, ModelConfig, UsageError, mesh_sizes
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.train.run_directory import prepare_run

MOST_BYTES = 2**30  # of batches, which are made before the first round
VOCAB_OF_GPT2 = (50257, 50304)  # GPT-2's, and what nanoGPT makes of it
PR_SET_PDEATHSIG = 1  # of Linux's prctl
WORKER = Path(__file__).with_name("nanogpt_worker.py")


def measure(
    config: Config, clone: Path, python: str, n_steps: int, n_rounds: int, compiled: bool
) -> dict[str, Any]:
    """Times rounds of steps of the trainer's loop and of nanoGPT, in turns.

    Args:
        clone: a folder with nanoGPT's model.py.
        python: the interpreter that has torch.
        n_steps: in each round.
        n_rounds: of both, after one that counts for nothing.
        compiled: use torch.compile.

    Returns:
        Seconds per step of both, their ratio, and how far the losses of logged steps differ.

    Raises:
        UsageError: if nanoGPT cannot be run, or if the batches of so many steps are too large.
    """
    refuse_what_is_not_there(clone, python)
    batch_bytes = 4 * config.train.batch_size * (config.model.block_size + 1)
    most = MOST_BYTES // batch_bytes // (n_rounds + 1)
    if n_steps > most:
        remedy = f"at most --steps={most}" if most else "fewer --rounds"
        raise UsageError(
            f"--steps={n_steps} --rounds={n_rounds}: batches of so many are more than 1 GiB; "
            f"give {remedy}"
        )
    cluster = join_alone("nanogpt", config.init_timeout)
    # Or JAX would take three quarters of a GPU's memory at once, of which nanoGPT needs as much.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with scratch_folder(cluster) as folder, worker(python, clone, folder) as (about, theirs):
        config, data = with_data(config, False, folder, cluster)
        run = prepare_run(steps_only(config, folder / "run"), cluster)
        facts = initialize_jax(cluster, mesh_sizes(run.config))
        refuse_another_kind(python, about["device"])
        refuse_more_gpus_than_one(about["device"])
        from jaxgpt.bench.job import Job

        tell(cluster, "compiling the step")
        with contextlib.redirect_stdout(io.StringIO()):  # what the trainer tells
            job = Job(run, cluster, facts)
            write_task(job, (n_rounds + 1) * n_steps, compiled, folder)
            rounds, losses = [], []
            for number in range(n_rounds + 1):
                tell(cluster, f"round {number} of {n_rounds}" if number else "warming up")
                if number % 2:
                    own, answer = job.trainer(n_steps), theirs(n_steps)
                else:
                    answer, own = theirs(n_steps), job.trainer(n_steps)
                rounds.append((own.seconds, answer["seconds"]))
                losses += answer["losses"]
        ours, others = zip(*rounds[1:], strict=True)  # after one to warm up
        ratios = [b / a for a, b in zip(ours, others, strict=True)]
        own_dtype = run.config.train.dtype
        return {
            "config": config.config,
            "data": data,
            "steps_per_round": n_steps,
            "step_seconds": statistics.median(ours),
            "nanogpt_step_seconds": statistics.median(others),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            **loss_difference(run.directory, losses),
            "dropout": config.model.dropout,
            "dtype": own_dtype,
            "vocab_sizes": [run.config.model.vocab_size, nanogpt_vocab_size(run.config.model)],
            "mesh": dict(job.mesh.shape),
            "device_kind": job.mesh.devices.flat[0].device_kind,
            "nanogpt": about
            | {"compile": compiled, "dtype": own_dtype if about["device"] == "cuda" else "float32"},
        }


def refuse_what_is_not_there(clone: Path, python: str) -> None:
    """Before anything starts.

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


def refuse_another_kind(python: str, device: str) -> None:
    """Times are of one kind of device.

    Raises:
        UsageError: if JAX has a GPU and nanoGPT's `device` is none, or the other way round.
    """
    import jax

    if (device == "cuda") != (jax.default_backend() == "gpu"):
        raise UsageError(
            f"--torch={python}: nanoGPT is on {device} and JAX on {jax.default_backend()}; give "
            "a Python whose torch has CUDA to compare on a GPU, or set JAX_PLATFORMS=cpu and "
            "CUDA_VISIBLE_DEVICES= to compare on the CPU"
        )


def refuse_more_gpus_than_one(device: str) -> None:
    """The devices of a CPU share its cores, as nanoGPT's threads do; of GPUs nanoGPT uses one.

    Raises:
        UsageError: if nanoGPT's `device` is a GPU, and JAX sees several.
    """
    import jax

    if device == "cuda" and jax.device_count() > 1:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}: shows "
            f"{jax.device_count()} GPUs, and nanoGPT trains on one; set CUDA_VISIBLE_DEVICES=0"
        )


def write_task(job: Any, n_steps: int, compiled: bool, folder: Path) -> None:
    """Writes what nanoGPT is to do: our initial weights, and batches of the first steps."""
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
    """Tokens of nanoGPT's model: its configurations pad GPT-2's vocabulary, for speed."""
    ours, theirs = VOCAB_OF_GPT2
    return theirs if model.vocab_size == ours else model.vocab_size


def nanogpt_weights(
    params: dict[str, Any], model: ModelConfig, vocab_size: int
) -> dict[str, np.ndarray]:
    """Our parameters by nanoGPT's names; PyTorch's linear layers hold W transposed."""
    D = model.n_embd
    wte_VD = np.zeros((vocab_size, D), np.float32)
    wte_VD[: model.vocab_size] = params["wte"]["embedding"][: model.vocab_size]
    out = {"transformer.wte.weight": wte_VD, "lm_head.weight": wte_VD}
    out["transformer.wpe.weight"] = params["wpe"]["embedding"]
    out |= norm("transformer.ln_f", params["norm"])
    layers = {
        "qkv": ("attn.c_attn", D),
        "out": ("attn.c_proj", D),
        "up": ("mlp.c_fc", D),
        "down": ("mlp.c_proj", 4 * D),
    }
    for i in range(model.n_layer):
        block = {
            name: {kind: leaf[i] for kind, leaf in module.items() if leaf is not None}
            for name, module in params["blocks"].items()
        }
        here = f"transformer.h.{i}"
        for name, (theirs, inputs) in layers.items():
            out[f"{here}.{theirs}.weight"] = block[name]["kernel"].reshape(inputs, -1).T
            if model.bias:
                out[f"{here}.{theirs}.bias"] = block[name]["bias"].reshape(-1)
        out |= norm(f"{here}.ln_1", block["norm_1"]) | norm(f"{here}.ln_2", block["norm_2"])
    return out


def norm(name: str, params: dict[str, Any]) -> dict[str, np.ndarray]:
    theirs = {"scale": "weight", "bias": "bias"}
    return {f"{name}.{theirs[kind]}": leaf for kind, leaf in params.items() if leaf is not None}


@contextlib.contextmanager
def worker(python: str, clone: Path, folder: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Starts nanoGPT; gives what it says of itself, and a function that has it train steps.

    Raises:
        UsageError: if it ends, or says something else.
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
                env=of_its_own(),  # as its users run it
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
            with contextlib.suppress(BrokenPipeError):  # `answer` tells what it said at last
                process.stdin.write(f"{n_steps}\n")
                process.stdin.flush()
            return answer()

        try:
            yield answer(), train
        finally:
            process.kill()
            process.wait()


def end_with_parent() -> None:
    """Has Linux kill the process that calls this when its parent has ended, however that was."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def loss_difference(directory: Path, losses: list[float]) -> dict[str, Any]:
    """The largest between the losses of our log and nanoGPT's of the same steps, and of how many.

    The log has the first step, and every train.log_interval-th.
    """
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    return {
        "loss_difference": max(abs(loss - losses[step - 1]) for step, loss in logged.items()),
        "losses_compared": len(logged),
        "losses": len(losses),
    }


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    about, ratio, ratios = found["nanogpt"], found["ratio"], found["ratios"]
    how = "torch.compile" if about["compile"] else "eager"
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    losses = (
        f"losses of the same steps differ by {found['loss_difference']:.1g} at the most, in the "
        f"{found['losses_compared']} of {found['losses']} steps that are logged"
    )
    if found["dropout"]:
        losses += f", with dropout {found['dropout']} of other random numbers"
    ours, theirs = found["vocab_sizes"]
    if theirs > ours:
        losses += f", with {theirs - ours} tokens more in nanoGPT's softmax"
    return (
        f"nanogpt: {found['config']}, {len(ratios)} rounds of {found['steps_per_round']} steps "
        f"each, in turns, from the same weights on the same batches\ndata: {found['data']}\n"
        f"jaxgpt: {found['step_seconds'] * 1e3:.2f} ms a step, {found['dtype']}, mesh {mesh}\n"
        f"nanoGPT: {found['nanogpt_step_seconds'] * 1e3:.2f} ms a step, torch {about['torch']} on "
        f"{about['device']}, {about['dtype']}, {about['threads']} threads, {how}\n"
        f"ratio: {ratio:.2f} x nanoGPT's tokens/s, the median of the rounds' own ratios "
        f"({min(ratios):.2f} to {max(ratios):.2f})\n{losses}"
    )
