"""Loads files of torch.save with torch, without running any code in them.

Such a file is a pickle, which is a program. `torch.load(weights_only=True)` builds containers and
tensors and refuses every other class. It maps the file into memory, so reading a tensor takes no
memory that the system cannot reclaim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.convert.tensors import FLOATS

OLDEST = "2.10"  # the weights_only=True of older versions can execute code (CVE-2026-24747)


class Inert:
    """Stand-in for an object of another program's class: constructor arguments and fields."""

    def __new__(cls, *arguments: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments, made.fields = arguments, {}
        return made

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields.update(state)


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of torch, in the mapped file until it is read."""

    path: Path
    name: str
    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows [start, stop) in float32."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        if dtype not in FLOATS:
            raise UsageError(
                f"{self.path}: {self.name} has dtype {dtype}; weights are read from "
                f"{', '.join(FLOATS)}"
            )
        try:
            rows = self.tensor[start:stop] if self.shape else self.tensor
            return rows.detach().float().numpy()
        except (RuntimeError, TypeError) as error:  # a sparse tensor, for example
            raise UsageError(f"{self.path}: {self.name} cannot be read ({_line(error)})") from None


def load(path: Path, is_harmless: Callable[[str], bool] = lambda _: False) -> Any:
    """Return the object of a torch.save file, with tensors that stay in the file.

    Args:
        is_harmless: whether objects of the class with this full name become `Inert`; a file with
            any other class is refused.
    """
    torch = _torch()
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = sorted(name for name in names if not is_harmless(name))
        if refused:
            raise UsageError(
                f"{path}: contains {refused[0]}, which is not a tensor or a container and could "
                "run code; nothing was run or read: save the weights alone"
            )
        with torch.serialization.safe_globals([(Inert, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({in_words(error)})") from None
    except Exception as error:  # torch documents none, and a damaged file raises a dozen kinds
        raise UsageError(
            f"{path}: is not a complete file of torch.save ({_line(error)}); copy it again, or "
            "save it again with a newer torch"
        ) from None


def is_tensor(value: Any) -> bool:
    """Return whether part of a loaded object is a tensor."""
    return isinstance(value, _torch().Tensor)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise UsageError(
            "torch reads files of torch.save, and is not installed: pip install 'jaxgpt[torch]'"
        ) from None
    if torch.__version__ < OLDEST:
        raise UsageError(
            f"torch {torch.__version__} can run code that is in a file (CVE-2026-24747): pip "
            f"install 'torch>={OLDEST}'"
        )
    return torch


def _line(error: Exception) -> str:
    """Return the reason in an error of torch, without its advice to load the file unsafely."""
    return in_words(error).split("WeightsUnpickler error: ")[-1].partition("\n")[0][:120]
