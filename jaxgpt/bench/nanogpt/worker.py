"""Training of a model of PyTorch in its own Python: `python worker.py LIBRARY FOLDER`.

The benches start it with a clone of nanoGPT or the word `transformers`, and a folder. It writes a
line of JSON about itself, and answers every line that it reads, a number of steps to train, with
another one. Before the first of them the folder has `task.json`, the weights and the batches. A
step does the same as in nanoGPT's train.py, on batches that are in memory.
"""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def main() -> None:
    library, folder = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # nanoGPT prints
    if library == "transformers":
        import transformers  # noqa: F401  or the bench hears of it too late
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}
    print(json.dumps(about), file=answers, flush=True)
    train_step = None
    for line in sys.stdin:
        train_step = train_step or make_step(library, Path(folder), device)
        began = time.perf_counter()
        losses = [train_step() for _ in range(int(line))]
        losses = [loss.item() for loss in losses]
        answer = {"seconds": (time.perf_counter() - began) / len(losses), "losses": losses}
        print(json.dumps(answer), file=answers, flush=True)


def make_step(library: str, folder: Path, device: str) -> Callable[[], torch.Tensor]:
    """Return the function that trains the next step of the task, and returns its loss."""
    task = json.loads((folder / "task.json").read_text())
    make = make_transformers if library == "transformers" else make_nanogpt
    model, optimizer = make(library, task, device)
    with np.load(folder / "weights.npz") as weights, torch.no_grad():
        state = model.state_dict()
        for name in weights.files:
            state[name].copy_(torch.from_numpy(weights[name]))
    network = torch.compile(model) if task["compile"] else model
    rows = torch.from_numpy(np.load(folder / "batches.npy").astype(np.int64)).to(device)
    cast = contextlib.nullcontext()  # as nanoGPT does it, which computes in float32 on CPUs
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        cast = torch.autocast(device, getattr(torch, task["dtype"]))
    parts, steps = task["parts"], itertools.count()

    def train_step() -> torch.Tensor:
        step = next(steps)
        for group in optimizer.param_groups:
            group["lr"] = task["lr"][step]
        total = 0.0
        for part in rows[step].chunk(parts):
            with cast:
                _, loss = network(part[:, :-1].contiguous(), part[:, 1:].contiguous())[:2]
            (loss / parts).backward()
            total = total + loss.detach() / parts
        if task["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return train_step


def make_nanogpt(
    clone: str, task: dict[str, Any], device: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return nanoGPT's model and its optimizer."""
    sys.path.insert(0, clone)
    import model as nanogpt

    model = nanogpt.GPT(nanogpt.GPTConfig(**task["model"])).to(device)
    betas = tuple(task["betas"])
    return model, model.configure_optimizers(task["weight_decay"], task["lr"][0], betas, device)


def make_transformers(
    library: str, task: dict[str, Any], device: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of a config.json that returns logits and loss, with eager attention; AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    class Network(torch.nn.Module):
        def __init__(self, model: torch.nn.Module):
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.model(input_ids=x, use_cache=False).logits
            return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            return self.model.state_dict(*args, **kwargs)

    config = AutoConfig.for_model(**task["model"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() > 1) == decays],
            "weight_decay": task["weight_decay"] if decays else 0.0,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=task["lr"][0], betas=tuple(task["betas"]))
    return Network(model), optimizer


if __name__ == "__main__":
    main()
