"""Time a whole run beside a whole run of nanoGPT, from process start, and compare their losses.

    python tests/peers/speedrun.py --repo CLONE --torch PYTHON [--seeds N] [section.key=value …]

nanoGPT trains with the CPU settings of its README, jaxgpt with `--config speedrun_cpu`: once
without compiled programs (cold) and once with them (warm). Run `python -m jaxgpt.prepare
shakespeare_char` first. The losses cover the whole validation text, and `jaxgpt.evaluate` computes
them for both programs after the clock has stopped.
"""

import argparse
import json
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxgpt.bench.harness import Value, as_table
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, parse_args, whole_number
from jaxgpt.data.dataset import dataset_directory

CONFIG = "config/train_shakespeare_char.py"
# From "I only have a macbook" in nanoGPT's README, except that it evaluates and saves only at the
# end, because jaxgpt does not evaluate either.
OPTIONS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 "
    "--eval_interval=2000 --always_save_checkpoint=True"
).split()
TRAINING_ONLY = (
    "train.eval_interval=0", "train.sample_tokens=0", "checkpoint.interval=0", "train.trackers=",
)  # fmt: skip
SEED = "torch.manual_seed(1337"  # in nanoGPT's train.py


def main() -> None:
    command = CommandParser(
        prog="python tests/peers/speedrun.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--repo", type=file_path, required=True, help="a clone of nanoGPT")
    command.add_argument("--torch", metavar="PYTHON", required=True, help="a Python with torch")
    command.add_argument("--seeds", type=whole_number(), default=3, help="runs; default 3")
    with job_exit_handler():
        options, words = command.parse_known_args()
        settings = ["--config", "speedrun_cpu", *words]
        data = dataset_directory(parse_args(settings).data).absolute()
        if not (data / "train.bin").is_file():
            raise UsageError(f"{data}: has no train.bin; run jaxgpt.prepare shakespeare_char")
        source = options.repo / "train.py"
        if not source.is_file() or SEED not in source.read_text():
            raise UsageError(f"--repo={options.repo}: has no train.py with {SEED}; clone nanoGPT")
        rows = []
        with tempfile.TemporaryDirectory(prefix="jaxgpt-speedrun-") as name:
            for seed in range(1, options.seeds + 1):
                folder = Path(name) / str(seed)
                theirs, their_loss = run_nanogpt(folder, options.repo, options.torch, data, seed)
                cold, _ = run_jaxgpt(folder, settings, seed, "cold")
                warm, loss = run_jaxgpt(folder, settings, seed, "warm")
                rows.append((theirs, cold, warm, their_loss, loss))
        theirs, cold, warm, their_losses, losses = map(list, zip(*rows, strict=True))
        print(as_table({
            "nanogpt_seconds": Value(theirs, "s"),
            "cold_seconds": Value(cold, "s"),
            "warm_seconds": Value(warm, "s"),
            "cold_ratio": Value(median_ratio(cold, theirs), "x", "nanoGPT's time; median"),
            "warm_ratio": Value(median_ratio(warm, theirs), "x", "nanoGPT's time; median"),
            "nanogpt_val_losses": Value(their_losses),
            "val_losses": Value(losses),
        }))  # fmt: skip


def run_jaxgpt(folder: Path, settings: Sequence[str], seed: int, name: str) -> tuple[float, float]:
    """Train from nothing; return the seconds of the process and the validation loss."""
    out, cache = folder / name, folder / "compiled"
    own = (*settings, *TRAINING_ONLY, f"train.seed={seed}", f"compile_cache={cache}")
    seconds = timed([sys.executable, "-m", "jaxgpt.train", *own, "--out", str(out)])
    return seconds, validation_loss(out)


def run_nanogpt(
    folder: Path, clone: Path, python: str, data: Path, seed: int
) -> tuple[float, float]:
    """Do the same with a copy of nanoGPT."""
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns(".git"))
    home = folder / "data" / "shakespeare_char"
    for split in ("train.bin", "val.bin"):
        (home / split).unlink(missing_ok=True)
        (home / split).symlink_to(data / split)
    vocab_size = json.loads((data / "meta.json").read_text())["vocab_size"]
    (home / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    source = (folder / "train.py").read_text()
    (folder / "train.py").write_text(source.replace(SEED, f"torch.manual_seed({seed}"))
    seconds = timed([python, "train.py", CONFIG, *OPTIONS], folder)
    converted, saved = folder / "converted", folder / "out-shakespeare-char" / "ckpt.pt"
    convert = [sys.executable, "-m", "jaxgpt.convert", "from-nanogpt", str(saved)]
    run([*convert, "--tokenizer", str(data), "--out", str(converted)])
    return seconds, validation_loss(converted, f"data.path={data}")


def validation_loss(directory: Path, *settings: str) -> float:
    """Return the mean loss of all tokens of the validation split except the first."""
    command = [sys.executable, "-m", "jaxgpt.evaluate", "--run", str(directory), "--json"]
    return json.loads(run([*command, *settings]).splitlines()[-1])["loss"]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def timed(command: Sequence[str], folder: Path | None = None) -> float:
    began = time.perf_counter()
    run(command, folder)
    return time.perf_counter() - began


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command, and return its output; `UsageError` with its last line if it fails."""
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror}; give the path of a Python") from None
    if ended.returncode:
        said = (ended.stdout + ended.stderr).strip().rpartition("\n")[2]
        raise UsageError(f"{' '.join(command[:4])} ended with {ended.returncode} ({said})")
    return ended.stdout


if __name__ == "__main__":
    main()
