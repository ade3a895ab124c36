"""Load torch.save files without running code from them.

A torch.save file is a pickle, which can run code. `torch.load(weights_only=True)` creates only
containers and tensors and rejects all other classes. `mmap=True` maps the file into memory, so the
system can reclaim pages after they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.convert.tensors import FLOATS

OLDEST = "2.10"  # older versions can run code even with weights_only=True (CVE-2026-24747)


class Inert:
    """Stand-in for an external object. It keeps the object's constructor arguments and fields.

    `fields` is empty unless the pickled state of the object is a dictionary.
    """

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
    """A torch tensor. It stays in the mapped file until it is read."""

    path: Path
    name: str
    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) as float32, like `Tensor.read`.

        Raises `UsageError` if the rows cannot be read or their dtype is not in `FLOATS`.
        """
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        if dtype not in FLOATS:
            raise UsageError(
                f"{self.path}: {self.name} has dtype {dtype}; weights must be one of "
                f"{', '.join(FLOATS)}"
            )
        try:
            rows = self.tensor[start:stop] if self.shape else self.tensor
            return rows.detach().float().numpy()
        except (RuntimeError, TypeError) as error:  # a sparse tensor, for example
            raise UsageError(f"{self.path}: {self.name} cannot be read ({_line(error)})") from None


def load(path: Path, is_harmless: Callable[[str], bool] = lambda _: False) -> Any:
    """Return the object in a torch.save file. Its tensors stay in the mapped file.

    Args:
        is_harmless: predicate that receives the full name of a class or function. It is not called
            for names that `torch.load` allows, such as those of tensors and OrderedDict. If it
            returns True, the class or function is replaced with `Inert`. If it returns False, if
            `torch.load` blocks the module (such as os), or if the file adds items to an `Inert`
            object, the file is rejected.

    Raises `UsageError` if the file cannot be read, is damaged or not in a format that `torch.load`
    reads with `weights_only` and `mmap`, if the file is rejected, or if torch is missing or too
    old.
    """
    torch = _torch()
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        refused = sorted(name for name in names if not is_harmless(name))
        if refused:
            raise UsageError(
                f"{path}: contains {refused[0]}, which is not a tensor or a container and could "
                "run code, so the file was not loaded; save only the weights"
            )
        with torch.serialization.safe_globals([(Inert, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({in_words(error)})") from None
    except Exception as error:  # a damaged file raises many types of undocumented exceptions
        raise UsageError(
            f"{path}: is not a complete torch.save file ({_line(error)}); copy it again, or save "
            "it again with a newer torch"
        ) from None


def is_tensor(value: Any) -> bool:
    """Return whether a value from a loaded file is a torch tensor.

    Raises `UsageError` if torch is missing or too old.
    """
    return isinstance(value, _torch().Tensor)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise UsageError(
            "torch, which reads torch.save files, is not installed: run pip install 'jaxgpt[torch]'"
        ) from None
    if torch.__version__ < OLDEST:
        raise UsageError(
            f"torch {torch.__version__} can run code from the file that it loads (CVE-2026-24747): "
            f"run pip install 'torch>={OLDEST}'"
        )
    return torch


def _line(error: Exception) -> str:
    """Return the first line of torch's error message, without advice to load the file unsafely."""
    return in_words(error).split("WeightsUnpickler error: ")[-1].partition("\n")[0][:120]
