"""Running jaxgpt as users do, and in this process; reading what a run left behind."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from jaxgpt.checkpoint.metadata import SECTIONS
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import load_config, mesh_shape, parse_args
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.clock import Clock
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.runtime.xla_flags import VARIABLE as XLA_FLAGS
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.resume import saved_settings
from jaxgpt.train.run_directory import prepare_run

# Variables for a command: it compiles as it does for users, with all optimizations.
AS_USERS = {XLA_FLAGS: ""}
FIGHT = "full rematerialization"  # in XLA's warning, which begins with "[SPMD] Involuntary"
# The JSON of a checkpoint, the least that is one.
META = {
    "step": 2, "batch_sizes": [(1, 16)], "data_fingerprint": [], "tokenizer": None, "jax": "",
    "config": dict.fromkeys(SECTIONS, {}),
    "mesh": "", "processes": 1,
}  # fmt: skip
# A model that compiles fast, on the data set that needs no download.
SMALL = (
    "--config",
    "shakespeare_char_cpu",
    "data.dataset=python",
    "model.n_layer=1",
    "model.n_embd=64",
    "train.batch_size=16",
    "train.eval_iters=1",
    "train.eval_interval=0",
    "train.sample_tokens=0",
    "train.log_interval=1",
    "checkpoint.interval=0",
)
# Options for a mesh of eight devices with pipeline stages and a split sequence.
FIVE_AXES = (
    "--mesh", "stage=2,context=2,tensor=2", "model.n_layer=2",
    "train.gradient_accumulation_steps=2", "parallel.context_impl=ring",
)  # fmt: skip


def command(module, *args, processes=None):
    """Return the command line of a jaxgpt command or test script, under mpiexec if `processes`."""
    program = [str(module)] if str(module).endswith(".py") else ["-m", f"jaxgpt.{module}"]
    launcher = [] if processes is None else ["mpiexec", "-n", str(processes)]
    return [*launcher, sys.executable, *program, *map(str, args)]


def environment(**extra):
    """Return environment variables for a command: this process's, with its Python first in PATH.

    Unless `AS_USERS` is given, programs are compiled with the options of `pytest_configure`.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **extra}


def run(module, *args, processes=None, timeout=240, **extra):
    """Run a command until it ends, and return the completed process with its output."""
    process = subprocess.Popen(
        command(module, *args, processes=processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(**extra),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def process_of(out, rank):
    """Return the ID of the process with this rank in the job that writes to `out`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if words[0] == sys.executable and str(out) in words and f"PMI_RANK={rank}" in variables:
                return int(entry.name)
    raise LookupError(f"rank {rank} of {out}")


def wait_for_step(out, step, job):
    """Wait until a running job has logged a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert job.poll() is None, job.communicate()[0]
        if (out / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(out)):
            return
        time.sleep(0.2)
    raise TimeoutError(f"{out} did not reach step {step}")


def train_here(*args, stop_at=None):
    """Run `python -m jaxgpt.train` in this process, on as many of its devices as the mesh needs.

    A mesh with -1 gets two devices. Return the exit status.
    """
    from jaxgpt.train.loop import train

    class Stop:
        reason = "the test"
        allow_for_save = staticmethod(lambda seconds: None)

        def reached(self, tick):
            return tick + (prepared.resume_step or 0) == stop_at

    cluster = ProcessGroup(launcher="test")
    config = parse_args(
        list(map(str, args)), initial_model=initial_model, saved_settings=saved_settings
    )
    prepared = prepare_run(config, cluster)
    sizes = mesh_shape(prepared.config)
    with limited_devices(sizes.n_devices if sizes.is_filled else 2):
        facts = initialize_jax(cluster, sizes)
        with cluster:
            return train(prepared, cluster, facts, Stop(), Clock(time.time()))


def records(directory, kind="train"):
    """Return the records of one kind in a run's metrics.jsonl."""
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def losses(directory):
    """Return step -> loss of a run that logs every step."""
    return {r["step"]: r["loss"] for r in records(directory)}


def checkpoint_arrays(directory, step):
    """Return path -> array for all arrays of a checkpoint, read without jaxgpt or a mesh."""
    import orbax.checkpoint as ocp

    path = (Path(directory) / "checkpoints" / str(step) / "state").absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        meta = checkpointer.metadata(path).item_metadata.tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), meta)
        tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    return flat(tree)


def flat(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def sha256(tree):
    """Return a hash of a pytree of arrays, which are gathered on every process."""
    from jax.experimental.multihost_utils import process_allgather

    whole = jax.tree.map(lambda x: np.asarray(process_allgather(x, tiled=True)), tree)
    digest = hashlib.sha256()
    for path, leaf in sorted(flat(whole).items()):
        digest.update(path.encode() + leaf.tobytes())
    return digest.hexdigest()


def trace(n_steps, *args, devices=None, with_final=False):
    """Train a few steps, and return the results that must not depend on the layout.

    Returns:
        A dict: `params`, a hash of the initial parameters; `rows`, a hash of each step's batch;
        `losses` and `norms`, the loss and gradient norm of each step; `evaluated`, the initial loss
        on a validation batch; and, if `with_final`, `final`: path -> parameter after the last step.
    """
    config = load_config(*args)
    dataset = open_dataset(config.data, config.model)
    config = config.replace(model__vocab_size=dataset.vocab_size)
    with limited_devices(devices):
        mesh = make_mesh(mesh_shape(config, jax.device_count()))
    steps = make_steps(config, mesh)
    state = steps.init()
    validation = Loader.for_evaluation(dataset, "val", config, steps.batch_shape.sharding).batch(1)
    out = {
        "params": sha256(state.params), "rows": [], "losses": [], "norms": [],
        "evaluated": float(np.mean(steps.eval_step(state.params, validation))),
    }  # fmt: skip
    loader = Loader.for_training(dataset, config, steps.batch_shape.sharding)
    for step in range(1, n_steps + 1):
        batch = loader.batch(step)
        out["rows"].append(sha256(batch))
        state, metrics = steps.train_step(state, *scalars(config, step), batch)
        out["losses"].append(float(metrics.loss))
        out["norms"].append(float(metrics.scalars["grad_norm"]))
    return out | ({"final": flat(state.params)} if with_final else {})


def scalars(config, step):
    """Return the scalar arguments of `train_step`: the step number and its learning rate."""
    return np.int32(step), learning_rate(config.optimizer, step)


@contextlib.contextmanager
def limited_devices(n):
    """Hide all but the first n devices of this process from JAX, for building a mesh."""
    if n is None:
        yield
        return
    every, count = jax.devices, jax.device_count
    jax.devices, jax.device_count = (lambda: every()[:n]), (lambda: n)
    try:
        yield
    finally:
        jax.devices, jax.device_count = every, count
