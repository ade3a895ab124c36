"""A training run in which one process fails: `faulty.py WHERE RANK [train arguments]`."""

import os
import resource
import signal
import sys

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.train import __main__ as train


def fail(*args, **kwargs):
    if where == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "interrupted":
        raise KeyboardInterrupt
    raise RuntimeError(f"planted in {where}")


def plant() -> None:
    """Replaces the function that is to fail on this process."""
    if where in ("loop", "killed", "interrupted"):
        from jaxgpt.train import setup

        setup.make_evaluator = lambda *arguments: fail
    elif where == "restore":
        from jaxgpt.checkpoint.checkpointer import Checkpoints

        Checkpoints.restore = fail
    elif where == "rewind":
        from jaxgpt.spikes import policy as rewinds

        rewinds.truncate_metrics = fail
    elif where == "data":
        from jaxgpt.data.loader import Loader

        first = Loader.read

        def read(self, step, rows):
            return fail() if step == 5 else first(self, step, rows)

        Loader.read = read
    elif where == "disk":
        from jaxgpt.checkpoint.checkpointer import Checkpoints

        save = Checkpoints.save

        def save_without_room(*arguments):
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, most))  # bytes of a file
            save(*arguments)

        Checkpoints.save = save_without_room
    elif where == "prepare":
        train.prepare_run = fail


where, rank = sys.argv[1], int(sys.argv[2])
if rank_from_env() == rank:
    # Training code imports JAX, which must not happen before jaxgpt.train has set it up.
    if where == "prepare":
        plant()
    else:
        initialize_jax = train.initialize_jax

        def connect_and_plant(*args, **options):
            facts = initialize_jax(*args, **options)
            plant()
            return facts

        train.initialize_jax = connect_and_plant
train.main(sys.argv[3:])
