"""Trains a PyTorch model in its own Python: `python torch_worker.py LIBRARY FOLDER`.

`side_by_side.py` starts it. LIBRARY is a clone of nanoGPT, or the word `transformers`. The worker
prints one JSON line about itself. It then answers each line that it reads, a JSON list of learning
rates, by training one step per learning rate on FOLDER/batches.npy and printing a JSON line with
the time per step and the losses. FOLDER/task.json and FOLDER/weights.npz describe the model.
A step does what nanoGPT's train.py does.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # nanoGPT prints
    if library == "transformers":
        import transformers  # noqa: F401  fail now, before jaxgpt compiles its step
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}
    print(json.dumps(about), file=answers, flush=True)
    trainer = None
    for line in sys.stdin:
        trainer = trainer or Trainer(library, folder, device)
        rows = torch.from_numpy(np.load(folder / "batches.npy").astype(np.int64)).to(device)
        began = time.perf_counter()
        losses = [trainer.step(*step) for step in zip(rows, json.loads(line), strict=True)]
        losses = [loss.item() for loss in losses]  # waits for the device
        answer = {"seconds": (time.perf_counter() - began) / len(losses), "losses": losses}
        print(json.dumps(answer), file=answers, flush=True)


class Trainer:
    """A model with jaxgpt's initial weights, and its optimizer."""

    def __init__(self, library: str, folder: Path, device: str):
        self.task = task = json.loads((folder / "task.json").read_text())
        make = make_transformers if library == "transformers" else make_nanogpt
        self.model, self.optimizer = make(library, task, device)
        state = self.model.state_dict()
        with np.load(folder / "weights.npz") as weights, torch.no_grad():
            for name in weights.files:
                array = torch.from_numpy(weights[name])
                state[name].zero_()[: len(array)].copy_(array)  # nanoGPT pads its vocabulary
        self.network = torch.compile(self.model) if task["compile"] else self.model
        self.cast = contextlib.nullcontext()  # like nanoGPT, which uses float32 on CPUs
        if device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            self.cast = torch.autocast(device, getattr(torch, task["dtype"]))

    def step(self, rows: torch.Tensor, lr: float) -> torch.Tensor:
        """Train one step on a global batch, and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        n_microbatches, total = self.task["gradient_accumulation_steps"], 0.0
        for part in rows.chunk(n_microbatches):
            with self.cast:
                _, loss = self.network(part[:, :-1].contiguous(), part[:, 1:].contiguous())[:2]
            (loss / n_microbatches).backward()
            total = total + loss.detach() / n_microbatches
        if self.task["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task["grad_clip"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def make_nanogpt(
    clone: str, task: dict[str, Any], device: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return nanoGPT's model and its optimizer."""
    sys.path.insert(0, clone)
    import model as nanogpt

    model = nanogpt.GPT(nanogpt.GPTConfig(**task["model"])).to(device)
    return model, model.configure_optimizers(task["weight_decay"], 0.0, task["betas"], device)


def make_transformers(
    library: str, task: dict[str, Any], device: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model of a config.json, with eager attention and nanoGPT's interface; AdamW."""
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
    return Network(model), torch.optim.AdamW(groups, lr=0.0, betas=task["betas"])


if __name__ == "__main__":
    main()
