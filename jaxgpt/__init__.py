"""Pre-train GPT models with JAX, on any mesh, from one command.

`__all__` lists the public names (see jaxgpt/README.md). Each name is imported on first use, so that
commands start without JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxgpt.cluster.process_group import join_process_group
    from jaxgpt.config import Config, UsageError
    from jaxgpt.evaluate.model import Model
    from jaxgpt.library import StepBatch, Trainer, batches, load_config, load_model
    from jaxgpt.tracking.records import EvalRecord
    from jaxgpt.train.state import TrainState

__version__ = "0.1.0"
__all__ = [
    "Config",
    "EvalRecord",
    "Model",
    "StepBatch",
    "TrainState",
    "Trainer",
    "UsageError",
    "batches",
    "join_process_group",
    "load_config",
    "load_model",
]

if not TYPE_CHECKING:  # type checkers read the imports above
    _MODULES = {
        "Config": "jaxgpt.config",
        "EvalRecord": "jaxgpt.tracking.records",
        "Model": "jaxgpt.evaluate.model",
        "TrainState": "jaxgpt.train.state",
        "UsageError": "jaxgpt.config",
        "join_process_group": "jaxgpt.cluster.process_group",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'jaxgpt' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES.get(name, "jaxgpt.library")), name)

    def __dir__():
        return sorted({*globals(), *__all__})
