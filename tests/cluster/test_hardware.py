import types

import pytest

from jaxgpt.cluster import hardware
from jaxgpt.cluster.hardware import (
    VISIBLE_VARIABLES,
    accelerator_expected,
)


@pytest.fixture
def machine(monkeypatch):
    """Plugins of JAX and device files, as a test sets them."""
    found = {"plugins": [], "files": []}

    def plugins(group):
        assert group == "jax_plugins"
        return [types.SimpleNamespace(name=name) for name in found["plugins"]]

    def files(pattern):
        return [
            file for file in found["files"] if file.startswith(pattern.split("[")[0].rstrip("*"))
        ]

    monkeypatch.setattr(hardware.metadata, "entry_points", plugins)
    monkeypatch.setattr(hardware.glob, "glob", files)
    for name in ("JAX_PLATFORMS", *VISIBLE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("plugins", "files", "expected"),
    [
        ([], ["/dev/nvidia0", "/dev/kfd"], False),
        (["xla_cuda13"], ["/dev/nvidia0"], True),
        (["xla_cuda12"], ["/dev/dri/renderD128"], False),  # a laptop's own graphics
        (["xla_cuda12"], ["/dev/kfd", "/dev/dri/renderD128"], False),
        (["xla_rocm7"], ["/dev/kfd", "/dev/dri/renderD128"], True),
        (["intel_extension_for_openxla"], ["/dev/dri/renderD128"], True),
        (["xla_cuda13", "intel_extension_for_openxla"], ["/dev/dri/renderD128"], True),
        (["xla_cuda13"], [], False),
    ],
)
def test_a_plugin_needs_devices_of_its_own_kind(machine, plugins, files, expected):
    machine |= {"plugins": plugins, "files": files}
    assert accelerator_expected() == expected


CUDA, ROCM = ("xla_cuda13", "/dev/nvidia0"), ("xla_rocm7", "/dev/kfd")


@pytest.mark.parametrize(
    ("plugin", "variable", "value", "expected"),
    [
        (CUDA, "CUDA_VISIBLE_DEVICES", "", False),
        (CUDA, "CUDA_VISIBLE_DEVICES", "-1", False),
        (CUDA, "CUDA_VISIBLE_DEVICES", "0", True),
        (CUDA, "HIP_VISIBLE_DEVICES", "-1", True),
        (ROCM, "ROCR_VISIBLE_DEVICES", "", False),
        (ROCM, "HIP_VISIBLE_DEVICES", "-1", False),
        (ROCM, "HIP_VISIBLE_DEVICES", "", True),  # which ROCm takes for none
        (ROCM, "CUDA_VISIBLE_DEVICES", "", True),
    ],
)
def test_devices_that_are_hidden_are_not_expected(
    machine, monkeypatch, plugin, variable, value, expected
):
    name, file = plugin
    machine |= {"plugins": [name], "files": [file]}
    monkeypatch.setenv(variable, value)
    assert accelerator_expected() == expected
