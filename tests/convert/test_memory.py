"""A model is converted without ever being in memory: 2.2 GB of bfloat16 in four shards."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from jaxgpt.convert.families import read_model, table_of
from jaxgpt.convert.layout import slots
from jaxgpt.convert.safetensors import Writer
from jobs import environment

TINYLLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip
MEASURE = """
import resource, sys
import orbax.checkpoint, tensorstore
from jaxgpt.convert import huggingface
from jaxgpt.convert.__main__ import main
idle = int(open("/proc/self/statm").read().split()[1]) * 4096
main(sys.argv[1:])
print("above idle:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - idle)
"""


def peak_above_idle(*arguments):
    job = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        capture_output=True, text=True, env=environment(), timeout=1800,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    return int(job.stdout.rpartition(":")[2])


@pytest.mark.long
def test_two_gigabytes_are_converted_in_little_memory(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINYLLAMA))
    model = read_model(folder)
    shapes = {name: slot.shape for name, slot in slots(table_of(model), model).items()}
    size = 2 * sum(map(math.prod, shapes.values()))
    writer = Writer(folder, shapes, "bfloat16", size // 4 + 10**8)
    block = np.random.default_rng(0).normal(size=2**20).astype(np.float32)
    for name, shape in shapes.items():
        writer.write(name, np.resize(block, shape))
    writer.close()
    assert len(list(folder.glob("model-*-of-00004.safetensors"))) == 4
    there = peak_above_idle("from-hf", folder, "--out", tmp_path / "ours")
    back = peak_above_idle(
        "to-hf", "--run", tmp_path / "ours", "--out", tmp_path / "back", "--dtype", "bfloat16"
    )
    print(f"{size / 1e9:.2f} GB: {there / 1e9:.2f} GB above idle there, {back / 1e9:.2f} back")
    assert there < 1.2e9 and back < 1.2e9
