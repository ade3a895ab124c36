"""Check for commands that start their own processes."""

import os

from jaxgpt.cluster.environment import find_launch
from jaxgpt.config import UsageError


def check_no_launcher(remedy: str) -> None:
    """Raise `UsageError` if a launcher, such as mpiexec or srun, started this process.

    Otherwise, every process of the job would start the commands, and the commands would inherit the
    launcher's variables. The error message ends with `remedy`. Also raises `UsageError` if the
    launcher's variables are invalid.
    """
    launch = find_launch(os.environ)
    if launch.through is not None:
        raise UsageError(f"{launch.variable}: is set by a launcher; {remedy}")
