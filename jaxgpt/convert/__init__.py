"""Conversion to and from other programs' formats. This module is imported before JAX starts."""

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jaxgpt.cluster.environment import RANK, SIZE
from jaxgpt.config import UsageError, expand_user

OTHER_FOLDER = "choose another folder with --out"  # appended to errors about --out
TRANSFORMERS = "hf:"  # marks a Transformers checkpoint, not a run directory


def transformers_folder(given: str, key: str = "") -> Path:
    """Return the path in `hf:FOLDER` or FOLDER, with ~ expanded.

    Raises `UsageError` if the path is empty or invalid, or if the home directory is unknown. The
    message begins with `key`.
    """
    if given in ("", TRANSFORMERS):
        raise UsageError(f"{key}{given}: names no folder; give {TRANSFORMERS}FOLDER")
    return Path(expand_user(given.removeprefix(TRANSFORMERS), f"{key}{TRANSFORMERS}"))


def convert_in_subprocess(source: Path, out: Path, key: str) -> None:
    """Import a Transformers checkpoint in a subprocess, because the conversion starts JAX.

    `out` becomes a run directory with checkpoint 0. An existing folder `out` and leftovers of
    interrupted conversions are deleted first. Raises `UsageError` if the conversion fails. The
    message begins with `key`.
    """
    for left in (out, *out.parent.glob(f"{glob.escape(out.name)}.partial-*")):
        shutil.rmtree(left, ignore_errors=True)
    words = [sys.executable, "-m", "jaxgpt.convert", "from-hf", str(source), "--out", str(out)]
    # Run as rank 0 of a job with one process, because other ranks do not print errors.
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", RANK: "0", SIZE: "1"}
    job = subprocess.run(words, capture_output=True, text=True, env=environ)
    if job.returncode:
        reason = (job.stderr.strip().splitlines() or ["it was killed"])[-1].removeprefix("error: ")
        # Remove --out from the error, because the user did not set it.
        reason = reason.replace(f"--out {out.absolute()}", str(out.absolute()))
        raise UsageError(f"{key}: {reason.removesuffix(f'; {OTHER_FOLDER}')}")
