"""On what a bench ran."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from jaxgpt import __version__
from jaxgpt.cluster.hardware import own_cpus

PACKAGES = ("jax", "jaxlib")


def environment() -> dict[str, Any]:
    """This host, its processor, and versions."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "host_name": platform.node(),
        "cpu": cpu_model(),
        "cpus": len(own_cpus()),
        "versions": {"jaxgpt": __version__, **packages, "python": platform.python_version()},
    }


def cpu_model() -> str:
    """The processor's name, where /proc tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe(found: dict[str, Any]) -> str:
    """What `environment` found, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"with: {versions}; {found['cpus']} CPUs, {found['cpu']}"
