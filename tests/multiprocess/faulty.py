"""A training run in which one process fails: `faulty.py WHERE RANK [train arguments]`.

WHERE=disk simulates a disk without room for checkpoints, and disk20 a disk without room for the
checkpoint of step 20.
"""

import os
import resource
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
    """Replace the function that should fail on this process."""
    if where in ("loop", "killed", "interrupted"):
        from jaxgpt.train import setup

        setup.make_evaluator = lambda *arguments: fail
    elif where == "signalled":
        from jaxgpt.cluster.monitor import Monitor

        heartbeat = Monitor.heartbeat

        def compile_signalled(self, activity, *rest):
            heartbeat(self, activity, *rest)
            if activity.startswith("the compilation"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2)  # for all to have heard of it: they wait for this process

        Monitor.heartbeat = compile_signalled
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
        from jaxgpt.checkpoint.checkpointer import Checkpoints

        save, limits = Checkpoints._save, resource.getrlimit(resource.RLIMIT_FSIZE)

        def save_with_quota(self, step, *arguments):
            quota = 4096 if where in ("disk", f"disk{step}") else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (quota, limits[1]))
            save(self, step, *arguments)

        Checkpoints._save = save_with_quota
    elif where == "prepare":
        train.prepare_run = fail
    elif where == "devices":
        train.initialize_jax = fail


where, rank = sys.argv[1], int(sys.argv[2])
if where == "devices":
    train.SLOW_PHASE = 0  # or the test takes half an hour
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
