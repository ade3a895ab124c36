"""A 2.2 GB model in bfloat16 is converted without holding all of it in memory."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from jaxgpt.convert import names, safetensors
from jaxgpt.convert.families import read_model, table_of
from jaxgpt.convert.layout import slots
from jaxgpt.convert.nanogpt import model_of
from jaxgpt.convert.safetensors import write_folder
from jobs import environment

TINYLLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip
NANOGPT = {
    "n_layer": 22, "n_head": 16, "n_embd": 2048, "block_size": 2048, "bias": False,
    "vocab_size": 32000,
}  # fmt: skip
MEASURE = """
import resource, sys, threading, time
import orbax.checkpoint, tensorstore
from jaxgpt.convert import huggingface
from jaxgpt.convert.__main__ import main

def kilobytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

def sample():
    while True:
        peaks.append(kilobytes("RssAnon"))
        time.sleep(0.01)

if sys.argv[1] == "from-nanogpt":
    import torch
idle, peaks = kilobytes("VmRSS"), []
idle_private = kilobytes("RssAnon")
threading.Thread(target=sample, daemon=True).start()
main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("above idle:", (peak - idle) * 1024, (max(peaks) - idle_private) * 1024)
"""


def peaks_above_idle(*arguments):
    """Return the peak memory of a conversion, with and without mapped pages of files."""
    job = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        capture_output=True, text=True, env=environment(), timeout=1800,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    resident, private = map(int, job.stdout.rpartition(":")[2].split())
    print(f"{arguments[0]}: {resident / 1e9:.2f} GB above idle, {private / 1e9:.2f} private")
    return resident, private


@pytest.mark.long
def test_two_gigabytes_are_converted_in_little_memory(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINYLLAMA))
    model = read_model(folder)
    shapes = {name: slot.shape for name, slot in slots(table_of(model), model).items()}
    size = 2 * sum(map(math.prod, shapes.values()))
    block = np.random.default_rng(0).normal(size=2**20).astype(np.float32)
    tensors = ((name, np.resize(block, shape)) for name, shape in shapes.items())
    monkeypatch.setattr(safetensors, "SHARD_BYTES", size // 4 + 10**8)
    write_folder(folder, tensors, shapes, "bfloat16")
    assert len(list(folder.glob("model-*-of-00004.safetensors"))) == 4
    there, _ = peaks_above_idle("from-hf", folder, "--out", tmp_path / "ours")
    back, _ = peaks_above_idle(
        "to-hf", "--run", tmp_path / "ours", "--out", tmp_path / "back", "--dtype", "bfloat16"
    )
    assert there < 1.2e9 and back < 1.2e9


@pytest.mark.long
def test_a_file_of_torch_is_mapped_not_loaded(tmp_path):
    """Pages of the mapped file count as resident memory, but the system can reclaim them."""
    torch = pytest.importorskip("torch")
    model = model_of(tmp_path, NANOGPT)
    shapes = {name: slot.shape for name, slot in slots(names.NANOGPT, model).items()}
    state = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    torch.save({"model": state, "model_args": NANOGPT}, tmp_path / "ckpt.pt")
    _, private = peaks_above_idle("from-nanogpt", tmp_path / "ckpt.pt", "--out", tmp_path / "ours")
    assert (tmp_path / "ckpt.pt").stat().st_size > 2.2e9 and private < 1.2e9
