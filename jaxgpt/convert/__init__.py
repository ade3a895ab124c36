"""Weights of other programs; here, what a run needs of it before JAX is started."""

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jaxgpt.cluster.environment import RANK, SIZE
from jaxgpt.config import UsageError, expand_user

OTHER_FOLDER = "give --out another folder"  # ends an error of a command with --out
TRANSFORMERS = "hf:"  # before a folder of transformers, where a run or weights can be given too


def transformers_folder(given: str, key: str = "") -> Path:
    """Return the folder of `hf:FOLDER`; `key` stands before it in errors."""
    return Path(expand_user(given.removeprefix(TRANSFORMERS), f"{key}{TRANSFORMERS}"))


def convert_apart(source: Path, out: Path, key: str) -> None:
    """Convert a folder of transformers in a process of its own, which may start JAX.

    What an earlier conversion left is removed. Raises `UsageError`, which begins with `key`, if it
    fails.
    """
    for left in (out, *out.parent.glob(f"{glob.escape(out.name)}.partial-*")):
        shutil.rmtree(left, ignore_errors=True)
    words = [sys.executable, "-m", "jaxgpt.convert", "from-hf", str(source), "--out", str(out)]
    # Not a process of this job: as one of another rank than 0 it would not say what is wrong.
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", RANK: "0", SIZE: "1"}
    job = subprocess.run(words, capture_output=True, text=True, env=environ)
    if job.returncode:
        reason = (job.stderr.strip().splitlines() or ["it was ended"])[-1].removeprefix("error: ")
        # The user has given no --out.
        reason = reason.replace(f"--out {out.absolute()}", str(out.absolute()))
        raise UsageError(f"{key}: {reason.removesuffix(f'; {OTHER_FOLDER}')}")
