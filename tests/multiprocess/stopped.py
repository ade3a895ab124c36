"""A run in which one process stops once: `stopped.py PHASE RANK MARK [train arguments]`.

The process stops itself during the activity that the monitor calls PHASE. If PHASE is "start", it
stops before it connects to the others. It first writes the file MARK, so that it stops only once.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.train import __main__ as train

phase, rank, mark = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
heartbeat = Monitor.heartbeat


def stop():
    if not mark.exists():
        mark.write_text(phase)
        os.kill(os.getpid(), signal.SIGSTOP)


def watched(self, activity, *rest):
    heartbeat(self, activity, *rest)
    if activity.startswith(phase):
        threading.Thread(target=lambda: (time.sleep(0.02), stop()), daemon=True).start()


if rank_from_env() == rank:
    Monitor.heartbeat = watched
    if phase == "start":
        stop()
train.main(sys.argv[4:])
