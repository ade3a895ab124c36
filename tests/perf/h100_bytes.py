"""Memory traffic of a gpt2 step on one H100: `python tests/perf/h100_bytes.py [key=value ...]`.

The step is compiled ahead of time, which needs `pip install 'jax[cuda12]'` but no GPU. The table in
jaxgpt/perf/README.md has the result.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "parallel")]

from forms import H100

from jaxgpt.config import load_config
from jaxgpt.perf.hlo import parse_hlo, read_operations
from jaxgpt.perf.roofline import read_work
from jaxgpt.train.compiled import make_steps

# 24 rows of 1,024 tokens. Autotuning is off below, because it needs a GPU.
STEP = (
    "gpt2", "model.vocab_size=50257", "train.batch_size=24", "train.gradient_accumulation_steps=1",
)  # fmt: skip


def main() -> None:
    config = load_config(*STEP, *sys.argv[1:])
    topology = topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=H100)
    devices = np.array(topology.devices).reshape(1, 1, 1)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
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
