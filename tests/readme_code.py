"""The code that READMEs show, for tests that run it."""

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load_block(readme, name, folder, number=0):
    """Import the `number`-th Python block of a README as module `name`, from a file in `folder`."""
    text = (ROOT / readme).read_text()
    block = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[number]
    path = Path(folder) / f"{name.rpartition('.')[2]}.py"
    path.write_text(block)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def train_and_move(train_here, records, out, *settings):
    """Train on one mesh, save, and continue on another; return the losses by step."""
    small = ("train.max_iters=4", "checkpoint.interval=4", *settings)
    assert train_here(*small, "--out", out, "--mesh", "2,2,1") == 0
    assert train_here("--out", out, "--mesh", "1,2,2", "train.max_iters=6") == 0
    return {r["step"]: r["loss"] for r in records(out)}
