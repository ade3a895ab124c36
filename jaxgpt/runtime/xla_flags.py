"""Flags of XLA, which it reads from XLA_FLAGS when JAX starts its devices."""

import os

from jaxgpt.config import UsageError

VARIABLE = "XLA_FLAGS"
# A process of a CPU job may wait long for others that share its cores; XLA's default is 40 s.
CPU_COLLECTIVES = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
# For programs that are compiled to be looked at: fused operations are written for a CPU in XLA's
# older way, which takes half the time. Buffers and collectives stay the same.
QUICK_FUSIONS = ("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",)


def add_xla_flags(*flags: str) -> None:
    """Put the flags that XLA_FLAGS lacks before its own: of two that differ, the last counts."""
    given = os.environ.get(VARIABLE, "").strip()
    if given and not given.startswith("-"):
        raise UsageError(
            f"{VARIABLE}={given}: is the name of a file, to which jaxgpt cannot add the flags that "
            "it needs; give the flags themselves, as in XLA_FLAGS=$(cat FILE)"
        )
    missing = [flag for flag in flags if flag not in given.split()]
    os.environ[VARIABLE] = " ".join([*missing, given]).strip()
