"""nanoGPT's run, in its own Python: `python worker.py ACTION CLONE FOLDER DATA SEED`.

`jaxgpt.bench.speedrun` starts it to prepare, train and evaluate. The clone is copied to FOLDER
with links to the token files in DATA.
"""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

CONFIG = "config/train_shakespeare_char.py"
# The line for a CPU in nanoGPT's README, section "I only have a macbook", but for what is not
# training: it evaluates at its begin and end only, and saves its last weights.
OPTIONS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 "
    "--eval_interval=2000 --always_save_checkpoint=True"
).split()
OUT = "out-shakespeare-char"


def prepare(clone: Path, folder: Path, data: Path) -> None:
    """Copy the clone, and give it the data."""
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns(".git"))
    home = folder / "data" / "shakespeare_char"
    for split in ("train.bin", "val.bin"):
        (home / split).unlink(missing_ok=True)
        (home / split).symlink_to(data / split)
    meta = json.loads((data / "meta.json").read_text())
    with (home / "meta.pkl").open("wb") as file:  # where nanoGPT looks for the vocabulary
        pickle.dump({"vocab_size": meta["vocab_size"]}, file)


def train(folder: Path, seed: int) -> None:
    """Become nanoGPT's train.py, whose own seed is added to."""
    source = (folder / "train.py").read_text()
    seeded = source.replace("torch.manual_seed(1337", f"torch.manual_seed({seed}")
    if seeded == source:
        sys.exit("train.py has no torch.manual_seed(1337; this clone is another version")
    (folder / "train.py").write_text(seeded)
    os.chdir(folder)
    os.execv(sys.executable, [sys.executable, "train.py", CONFIG, *OPTIONS])


def evaluate(folder: Path, data: Path) -> None:
    """Print the mean loss of all tokens of val.bin but the first, in rows that do not overlap."""
    import numpy as np
    import torch

    sys.path.insert(0, str(folder))
    import model as nanogpt

    saved = torch.load(folder / OUT / "ckpt.pt", weights_only=True)
    network = nanogpt.GPT(nanogpt.GPTConfig(**saved["model_args"]))
    network.load_state_dict(saved["model"])
    network.eval()
    tokens = torch.from_numpy(np.fromfile(data / "val.bin", "<u2").astype(np.int64))
    T, total = saved["model_args"]["block_size"], 0.0
    with torch.no_grad():
        for first in range(0, len(tokens) - 1, T):
            row = tokens[None, first : first + T + 1]
            total += network(row[:, :-1], row[:, 1:])[1].item() * (row.shape[1] - 1)
    print(total / (len(tokens) - 1))


def main() -> None:
    action, clone, folder, data, seed = sys.argv[1:]
    if action == "prepare":
        prepare(Path(clone), Path(folder), Path(data))
    elif action == "train":
        train(Path(folder), int(seed))
    else:
        evaluate(Path(folder), Path(data))


if __name__ == "__main__":
    main()
