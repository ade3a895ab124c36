"""Train jaxgpt and a PyTorch program in turns, on the same weights, batches and learning rates.

`nanogpt.py` and `hugging_face.py` are the commands. The PyTorch program runs in its own Python,
because jaxgpt does not depend on torch; `torch_worker.py` is its side.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.bench.harness import Value, as_json, as_table, open_job
from jaxgpt.bench.rounds import Rounds
from jaxgpt.config import CommandParser, Config, ModelConfig, UsageError, parse_args, whole_number
from jaxgpt.convert.layout import slots
from jaxgpt.convert.names import Table
from jaxgpt.models.weights import weights
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.train.init_from import initial_model

WORKER = Path(__file__).with_name("torch_worker.py")


class Peer(NamedTuple):
    """A program to compare with."""

    name: str
    library: str  # what `torch_worker.py` builds the model from
    describe: Callable[[ModelConfig], tuple[dict[str, Any], Table]]
    """our model -> the options of its model, and the names of its weights"""


def parser(script: str, description: str | None) -> CommandParser:
    out = CommandParser(
        prog=f"python tests/peers/{Path(script).name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options are those of jaxgpt.train.",
    )
    out.add_argument("--torch", metavar="PYTHON", required=True, help="a Python with torch")
    for option in ("--steps", "--rounds"):
        out.add_argument(option, type=whole_number(), default=15, help="default 15")
    out.add_argument("--compile", action="store_true", help="use torch.compile")
    out.add_argument("--json", action="store_true", help="print one line of JSON")
    return out


def compare(peer: Peer, options: argparse.Namespace, settings: Sequence[str]) -> None:
    """Time rounds of steps of both programs in turns, after a warm-up round, and print the result.

    Raises:
        UsageError: if the peer cannot be started, or cannot train such a model.
    """
    config = parse_args(settings, initial_model=initial_model)
    if config.optimizer.name != "adamw":
        raise UsageError(f"optimizer.name={config.optimizer.name}: {peer.name} trains with adamw")
    # JAX would otherwise reserve three quarters of a GPU that it shares with PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with (
        open_job(config, single_process=True) as job,
        start_worker(peer, options.torch, job.folder) as (about, ask),
    ):
        rounds = Rounds(job, config)
        check_same_device(options.torch, about["device"])
        config = rounds.run.config
        write_task(peer, config, rounds.state.params, options.compile, job.folder)

        def train_peer(steps: range) -> dict[str, Any]:
            batches = [np.asarray(rounds.parts.loader.batch(step)) for step in steps]
            np.save(job.folder / "batches.npy", np.stack(batches))
            return ask([float(learning_rate(config.optimizer, step)) for step in steps])

        ours, theirs, losses = [], [], []
        for number in range(options.rounds + 1):
            job.log(f"round {number} of {options.rounds}" if number else "warming up")
            steps = range(number * options.steps + 1, (number + 1) * options.steps + 1)
            if number % 2:
                seconds = rounds.train(options.steps)
                answer = train_peer(steps)
            else:
                answer = train_peer(steps)
                seconds = rounds.train(options.steps)
            ours.append(seconds)
            theirs.append(answer["seconds"])
            losses += answer["losses"]
        ratios = [b / a for a, b in zip(ours[1:], theirs[1:], strict=True)]
        result = {
            "config": config.config,
            "data": rounds.data,
            "dtype": config.train.dtype,
            "dropout": Value(config.model.dropout, note="losses differ if it is not 0"),
            "mesh": dict(rounds.mesh.shape),
            "device_kind": rounds.mesh.devices.flat[0].device_kind,
            "peer": {"name": peer.name, **about, "compile": options.compile},
            "steps_per_round": options.steps,
            "step_seconds": Value(statistics.median(ours[1:]), "s"),
            "peer_step_seconds": Value(statistics.median(theirs[1:]), "s"),
            "ratio": Value(
                statistics.median(ratios), "x", f"{peer.name}'s tokens/s; median of the rounds"
            ),
            "ratios": Value(ratios, "x"),
            **loss_difference(rounds.run.directory, losses),
        }
    print(as_json(result) if options.json else as_table(result))


def check_same_device(python: str, device: str) -> None:
    """Raise `UsageError` unless PyTorch and JAX both use the CPU, or both the same single GPU."""
    backend = jax.default_backend()
    if (device == "cuda") != (backend == "gpu"):
        raise UsageError(
            f"--torch={python}: PyTorch is on {device} and JAX on {backend}; give a Python whose "
            "torch has CUDA, or set JAX_PLATFORMS=cpu and CUDA_VISIBLE_DEVICES="
        )
    if backend == "gpu" and jax.device_count() > 1:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}: shows "
            f"{jax.device_count()} GPUs, and PyTorch trains on one; set CUDA_VISIBLE_DEVICES=0"
        )


def write_task(peer: Peer, config: Config, params: Any, compiled: bool, folder: Path) -> None:
    """Write what the worker needs before its first step: its task, and our initial weights."""
    model, table = peer.describe(config.model)
    task = {
        "model": model,
        "weight_decay": config.optimizer.weight_decay,
        "betas": [config.optimizer.beta1, config.optimizer.beta2],
        "grad_clip": config.optimizer.grad_clip,
        "gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "dtype": config.train.dtype,
        "compile": compiled,
    }
    (folder / "task.json").write_text(json.dumps(task))
    np.savez(folder / "weights.npz", **peer_weights(params, config.model, table))


def peer_weights(params: Any, model: ModelConfig, table: Table) -> dict[str, np.ndarray]:
    """Return our parameters under a peer's names and in its layout."""
    names = [weight.name for weight in jax.tree.leaves(weights(model))]
    ours = dict(zip(names, jax.tree.leaves(jax.device_get(params)), strict=True))
    out = {}
    for name, slot in slots(table, model).items():
        array = ours[slot.weight.name][slot.index]
        if slot.weight.axes[0] == "vocab":
            array = array[: model.vocab_size]  # without the rows that pad the vocabulary
        out[name] = slot.to_external(array)
    return out


@contextlib.contextmanager
def start_worker(
    peer: Peer, python: str, folder: Path
) -> Iterator[tuple[Mapping[str, Any], Callable[[list[float]], dict[str, Any]]]]:
    """Start the worker; yield its description, and a function that trains with learning rates.

    Raises:
        UsageError: if it cannot be started or fails, with the last line of its output.
    """
    with (folder / "worker.log").open("w+") as log:
        try:
            process = subprocess.Popen(
                [python, str(WORKER), peer.library, str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"--torch={python}: {error.strerror}; give a Python path") from None

        def answer() -> dict[str, Any]:
            line = process.stdout.readline()
            try:
                return json.loads(line)
            except ValueError:
                log.seek(0)
                said = (line + log.read()).strip().rpartition("\n")[2]
                raise UsageError(
                    f"--torch={python}: {peer.name} fails ({said}); give a Python with its packages"
                ) from None

        def ask(learning_rates: list[float]) -> dict[str, Any]:
            with contextlib.suppress(BrokenPipeError):  # `answer` reports why the worker ended
                print(json.dumps(learning_rates), file=process.stdin, flush=True)
            return answer()

        try:
            yield answer(), ask
        finally:
            process.kill()
            process.wait()


def loss_difference(directory: Path, losses: list[float]) -> dict[str, Any]:
    """Return the largest difference between our logged losses and the peer's of the same steps."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    return {
        "loss_difference": max(abs(loss - losses[step - 1]) for step, loss in logged.items()),
        "losses_compared": len(logged),
    }
