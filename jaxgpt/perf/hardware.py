"""Accelerators as data: what one device can hold, compute and send."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxgpt.perf.units import GIB


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as JAX counts them: a GPU, a GCD of an MI250X, a tile of a PVC.

    Bytes, dense FLOP/s by dtype, bytes/s in each direction: peaks of data sheets, except where the
    table below says that a number was measured. None is a number that the name does not tell.
    """

    name: str
    match: str  # a regular expression found in JAX's device_kind
    memory: int | None = None  # data sheets write GB and mean GiB; the driver keeps about 1 %
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # matmul, float32: TF32 on NVIDIA
    memory_bandwidth: float | None = None  # of the device's own memory
    link_bandwidth: float | None = None  # to the other devices of the host
    network_bandwidth: float | None = None  # to other hosts: the host's share for one device
    host_bandwidth: float | None = None  # to the host's memory: PCIe 4.0 x16 has 32 GB/s, 5.0 twice
    devices_per_host: int = 1  # on the machine that `network_bandwidth` is of
    cuda_capability: float = 0.0  # NVIDIA's; 0 for others


# Each `match` goes to the end of the name: a part of a card (MIG) has the card's name and more.

# NVIDIA's H100 data sheet, SXM: dense is half of what it prints "with sparsity"; NVLink 4 of
# 900 GB/s in both directions. DGX H100 user guide: eight 400 Gb/s InfiniBand ports for eight
# GPUs. The PCIe and NVL cards are slower and have other names.
_H100 = Device(
    name="h100",
    match="H100 80GB HBM3$",
    memory=80 * GIB,
    peak_flops={"bfloat16": 989e12, "float32": 494.5e12},
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    devices_per_host=8,
    cuda_capability=9.0,
)
# NVIDIA's A100 data sheet, 80 GB SXM: NVLink 3 of 600 GB/s in both directions. DGX A100 user
# guide: eight 200 Gb/s InfiniBand ports for eight GPUs.
_A100_80GB = Device(
    name="a100-80gb",
    match=r"A100(-SXM\d?|-PCIE)?[- ]80GB( PCIe)?$",
    memory=80 * GIB,
    peak_flops={"bfloat16": 312e12, "float32": 156e12},
    memory_bandwidth=2.039e12,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    devices_per_host=8,
    cuda_capability=8.0,
)

_TABLE = (
    _H100,
    # NVIDIA's H200 data sheet, SXM: the H100's chip and NVLink with more memory. DGX H200 user
    # guide: network as in DGX H100. The whole name, since GH200 has other memory and network.
    replace(_H100, name="h200", match="^NVIDIA H200$", memory=141 * GIB, memory_bandwidth=4.8e12),
    _A100_80GB,
    # NVIDIA's A100 data sheet, 40 GB SXM. ALCF's Polaris machine overview: four A100 with NVLink
    # between all of them, two Slingshot 11 adapters of 200 Gb/s.
    replace(
        _A100_80GB,
        name="a100",
        match=r"A100-(SXM\d?|PCIE)-40GB$",
        memory=40 * GIB,
        memory_bandwidth=1.555e12,
        network_bandwidth=2 * 25e9 / 4,
        devices_per_host=4,
    ),
    # AMD's MI250X data sheet (383, 95.7 and 3.2 T for the module), halved for one GCD. OLCF's
    # Frontier user guide: Infinity Fabric of 200 GB/s to the other GCD of the module, 50 to 100
    # GB/s to GCDs of other modules, which a ring through the host has to cross, 36 GB/s to the
    # processor; four Slingshot adapters of 25 GB/s for eight GCDs.
    Device(
        name="mi250x",
        match="MI250X",
        memory=64 * GIB,
        peak_flops={"bfloat16": 191.5e12, "float32": 47.85e12},
        memory_bandwidth=1.6e12,
        link_bandwidth=100e9,
        network_bandwidth=4 * 25e9 / 8,
        host_bandwidth=36e9,
        devices_per_host=8,
    ),
    # Intel's Xe HPC: 4096 bfloat16 and 256 float32 operations a clock in each Xe core (oneDNN
    # uses TF32 only where told), 1.6 GHz, 3.28 TB/s of memory for two tiles. ALCF's Aurora machine
    # overview: 448 active engines = 56 Xe cores a tile, 128 GiB for two tiles, GPUs connected all
    # to all, eight Slingshot 11 adapters of 25 GB/s for six GPUs. Links are as measured: 15 GB/s
    # from a tile to one of another GPU (ALCF's Aurora node performance overview), times the five
    # other GPUs. The same page measures 273 TFLOP/s in large bfloat16 products.
    Device(
        name="pvc",
        match="Data Center GPU Max 1550",
        memory=64 * GIB,
        peak_flops={"bfloat16": 56 * 4096 * 1.6e9, "float32": 56 * 256 * 1.6e9},
        memory_bandwidth=1.64e12,
        link_bandwidth=5 * 15e9,
        network_bandwidth=8 * 25e9 / 12,
        host_bandwidth=64e9 / 2,
        devices_per_host=12,
    ),
    # A simulated device is a share of some CPU: nothing about it is fixed; ask the machine.
    Device(name="cpu", match="^cpu$"),
)

DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}


def find_device(device_kind: str) -> Device | None:
    """Return the device that JAX calls `device_kind`; None for one that is not in the table.

    >>> find_device("NVIDIA A100-SXM4-40GB").name
    'a100'
    """
    return next((d for d in DEVICES.values() if re.search(d.match, device_kind)), None)
