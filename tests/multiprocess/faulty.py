"""A training run in which one process fails: `faulty.py WHERE RANK [train arguments]`.

WHERE disk is a full disk, disk20 one that is full while the checkpoint of step 20 is written.
"""

import os
import signal
import sys
import time

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.train import __main__ as train


def fail(*args, **kwargs):
    if where == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "interrupted":
        raise KeyboardInterrupt
    if where in ("waits", "devices"):
        time.sleep(1000)
    raise RuntimeError(f"planted in {where}")


def plant() -> None:
    """Replaces the function that is to fail on this process."""
    if where in ("loop", "killed", "interrupted"):
        from jaxgpt.train import setup

        setup.make_evaluator = lambda *arguments: fail
    elif where == "signalled":
        from jaxgpt.cluster.health.watchdog import Watchdog

        heartbeat = Watchdog.heartbeat

        def compile_signalled(self, activity, *rest):
            heartbeat(self, activity, *rest)
            if activity.startswith("the compilation"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2)  # for all to have heard of it: they wait for this process

        Watchdog.heartbeat = compile_signalled
    elif where == "restore":
        from jaxgpt.checkpoint.checkpointer import Checkpoints

        Checkpoints.restore = fail
    elif where == "rewind":
        from jaxgpt.spikes import policy as rewinds

        rewinds.truncate_metrics = fail
    elif where in ("data", "waits"):
        from jaxgpt.data.loader import Loader

        first = Loader.read

        def read(self, step, rows):
            return fail() if step == 5 else first(self, step, rows)

        Loader.read = read
    elif where.startswith("disk"):
        from jaxgpt.checkpoint import save

        write = save.write_part

        def write_without_room(state, *arguments):
            if where in ("disk", f"disk{state.parent.name.partition('.')[0]}"):
                raise ValueError("TensorStore's [os_error_code='28']")  # ENOSPC
            return write(state, *arguments)

        save.write_part = write_without_room
    elif where == "prepare":
        train.prepare_run = fail
    elif where == "devices":
        train.initialize_jax = fail


where, rank = sys.argv[1], int(sys.argv[2])
if where == "devices":
    train.START_MINUTES = 0  # or the test takes half an hour
if rank_from_env() == rank:
    # Training code imports JAX, which must not happen before jaxgpt.train has set it up.
    if where in ("prepare", "devices"):
        plant()
    else:
        initialize_jax = train.initialize_jax

        def connect_and_plant(*args, **options):
            facts = initialize_jax(*args, **options)
            plant()
            return facts

        train.initialize_jax = connect_and_plant
train.main(sys.argv[3:])
