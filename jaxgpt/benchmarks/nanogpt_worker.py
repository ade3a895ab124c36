"""Trains nanoGPT's model in its own Python: `python nanogpt_worker.py CLONE FOLDER`.

`jaxgpt.benchmarks.nanogpt` starts it with a clone of nanoGPT and a folder that has `task.json`, the
weights and the batches. Every line that it reads is a number of steps to train; it answers with a
line of JSON. What a step does is what nanoGPT's train.py does, with batches that are in memory.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch


def main() -> None:
    clone, folder = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # nanoGPT prints
    sys.path.insert(0, clone)
    from model import GPT, GPTConfig

    task = json.loads((Path(folder) / "task.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(GPTConfig(**task["model"])).to(device)
    with np.load(Path(folder) / "weights.npz") as weights, torch.no_grad():
        state = model.state_dict()
        for name in weights.files:
            state[name].copy_(torch.from_numpy(weights[name]))
    optimizer = model.configure_optimizers(
        task["weight_decay"], task["lr"][0], tuple(task["betas"]), device
    )
    network = torch.compile(model) if task["compile"] else model
    rows = torch.from_numpy(np.load(Path(folder) / "batches.npy").astype(np.int64)).to(device)
    cast = contextlib.nullcontext()  # as nanoGPT does it, which computes in float32 on CPUs
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        cast = torch.autocast(device, getattr(torch, task["dtype"]))
    parts, step = task["parts"], 0

    def train_step() -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = task["lr"][step]
        total = 0.0
        for part in rows[step].chunk(parts):
            with cast:
                _, loss = network(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            (loss / parts).backward()
            total = total + loss.detach() / parts
        if task["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        began, losses = time.perf_counter(), []
        for _ in range(int(line)):
            losses.append(train_step())
            step += 1
        losses = [loss.item() for loss in losses]
        answer = {"seconds": (time.perf_counter() - began) / len(losses), "losses": losses}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
