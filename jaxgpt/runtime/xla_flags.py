"""XLA flags, which XLA reads when JAX starts its devices."""

import os

from jaxgpt.config import UsageError

VARIABLE = "XLA_FLAGS"
# Processes of a CPU job that share cores may wait for each other for more than 40 s, XLA's default
# limit.
CPU_COLLECTIVES = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
# Flags for programs that are compiled only for inspection. XLA's older CPU fusion emitters halve
# the compile time and produce the same buffers and collectives.
QUICK_FUSIONS = ("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",)


def add_xla_flags(*flags: str) -> None:
    """Prepend missing flags to XLA_FLAGS. The user's flags win, because XLA uses the last value.

    Raises `UsageError` if XLA_FLAGS is a file name, that is, not empty and without a leading dash.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given and not given.startswith("-"):
        raise UsageError(
            f"{VARIABLE}={given}: is the name of a file, so jaxgpt cannot add the flags that it "
            "needs; give the flags themselves, as in XLA_FLAGS=$(cat FILE)"
        )
    missing = [flag for flag in flags if flag not in given.split()]
    os.environ[VARIABLE] = " ".join([*missing, given]).strip()
