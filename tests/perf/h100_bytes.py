"""Memory traffic of a step on one H100: `python tests/perf/h100_bytes.py [PRESET] [key=value ...]`.

PRESET is a key of `STEPS`, by default gpt2. The step is compiled ahead of time, which needs `pip
install 'jax[cuda12]'` but no GPU. Without a GPU, set JAX_PLATFORMS=cpu. The tables in
jaxgpt/perf/DETAILS.md have the results.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "parallel")]

from forms import H100

from jaxgpt.config import MeshShape, load_config
from jaxgpt.perf.hlo import parse_hlo, read_operations
from jaxgpt.perf.roofline import read_work
from jaxgpt.train.jitted import make_steps

# One microbatch that fits on a GPU. Autotuning is off below, because it needs a GPU.
STEPS = {
    "gpt2": ("model.vocab_size=50257", "train.batch_size=24"),
    "gpt2-xl": ("model.vocab_size=50257", "train.batch_size=8"),
    "llama3.2-1b": ("model.vocab_size=128256", "train.batch_size=4", "model.block_size=4096"),
}


def main() -> None:
    named = [word for word in sys.argv[1:] if word in STEPS]
    preset = named[0] if named else "gpt2"
    changes = [word for word in sys.argv[1:] if word not in STEPS]
    one_microbatch = "train.gradient_accumulation_steps=1"
    config = load_config(preset, *STEPS[preset], one_microbatch, *changes)
    topology = topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=H100)
    shape = MeshShape()
    devices = np.array(topology.devices).reshape(tuple(shape.values()))
    mesh = Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    compiled = make_steps(config, mesh).lower_train_step()
    program = parse_hlo(compiled.compile({"xla_gpu_autotune_level": 0}).as_text())
    work, operations = read_work(program), read_operations(program)
    moved, times = Counter(), Counter()
    for name, one in work.items():
        part = operations[name].category, operations[name].source
        moved[part] += one.moved
        times[part] += one.times
    for part, n_bytes in moved.most_common():
        print(f"{n_bytes / 1e9:8.2f} GB {times[part]:5} x  {part[0]:<12} {part[1]}")
    print(f"moved {moved.total() / 1e9:.2f} GB: {times.total()} operations")


if __name__ == "__main__":
    main()
