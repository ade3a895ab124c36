"""Weights of other programs; here, what a run needs of it before JAX is started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from jaxgpt.config import UsageError, expand_user

TRANSFORMERS = "hf:"  # before a folder of transformers, where a run or weights can be given too


def transformers_folder(given: str, key: str = "") -> Path:
    """Return the folder of `hf:FOLDER`; `key` stands before it in errors."""
    return Path(expand_user(given.removeprefix(TRANSFORMERS), f"{key}{TRANSFORMERS}"))


def convert_apart(source: Path, out: Path, key: str) -> None:
    """Convert a folder of transformers in a process of its own, which may start JAX.

    Raises `UsageError`, which begins with `key`, if that fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "jaxgpt.convert", "from-hf", str(source), "--out", str(out)]
    job = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    if job.returncode:
        reason = (job.stderr.strip().splitlines() or ["it was ended"])[-1]
        raise UsageError(f"{key}: {reason.removeprefix('error: ')}")
