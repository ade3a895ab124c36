"""Table of accelerators: memory, peak FLOP/s and bandwidths of one device."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxgpt.perf.units import GIB


@dataclass(frozen=True, kw_only=True)
class Device:
    """Specification of one JAX device: a GPU, a GCD of an MI250X, a tile of a PVC, or a CPU device.

    Memory is in bytes, peaks are dense FLOP/s by dtype, and bandwidths are bytes/s. Link, network
    and host bandwidths are per direction. All numbers are peaks from data sheets unless a comment
    says otherwise. None means unknown.
    """

    name: str
    match: str  # regular expression to search for in JAX's device_kind
    memory: int | None = None  # data sheets say GB but mean GiB; the driver reserves about 1%
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # float32 means TF32 on NVIDIA
    memory_bandwidth: float | None = None  # of the device's own memory
    link_bandwidth: float | None = None  # to the other devices on the host
    network_bandwidth: float | None = None  # one device's share of the bandwidth to other hosts
    host_bandwidth: float | None = None  # to host memory; PCIe x16: 32 GB/s (4.0), 64 GB/s (5.0)
    devices_per_host: int = 1  # on the machine that `network_bandwidth` describes
    cuda_capability: float = 0.0  # 0 if the device is not from NVIDIA
    platform: str = "gpu"  # as in `jax.Device.platform`


# Patterns for NVIDIA GPUs end with $ to exclude MIG slices, whose names have a suffix.

# From NVIDIA's H100 data sheet (SXM): dense FLOP/s are half of the numbers "with sparsity", and
# NVLink 4 has 900 GB/s, counting both directions. From the DGX H100 user guide: eight 400 Gb/s
# InfiniBand ports for eight GPUs. The PCIe and NVL cards are slower and have different names.
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
# From NVIDIA's A100 data sheet (80 GB SXM): NVLink 3 has 600 GB/s, counting both directions. From
# the DGX A100 user guide: eight 200 Gb/s InfiniBand ports for eight GPUs.
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
    # According to NVIDIA's data sheet, the H200 (SXM) is an H100 with more and faster memory. The
    # DGX H200 has the same network as the DGX H100. The pattern matches the whole name, to exclude
    # the GH200.
    replace(_H100, name="h200", match="^NVIDIA H200$", memory=141 * GIB, memory_bandwidth=4.8e12),
    _A100_80GB,
    # From NVIDIA's A100 data sheet (40 GB SXM). From ALCF's overview of Polaris: four A100s, all
    # connected by NVLink, and two Slingshot 11 adapters of 200 Gb/s.
    replace(
        _A100_80GB,
        name="a100",
        match=r"A100-(SXM\d?|PCIE)-40GB$",
        memory=40 * GIB,
        memory_bandwidth=1.555e12,
        network_bandwidth=2 * 25e9 / 4,
        devices_per_host=4,
    ),
    # From AMD's MI250X data sheet: 383 (bfloat16) and 95.7 (float32) TFLOP/s and 3.2 TB/s per
    # module. One GCD has half of each. From OLCF's Frontier user guide: Infinity Fabric provides
    # 200 GB/s to the other GCD of the module, 50 to 100 GB/s to other modules, and 36 GB/s to the
    # CPU. A ring collective over all GCDs of a host uses the links between modules. A host has four
    # Slingshot adapters of 25 GB/s for eight GCDs.
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
    # From Intel's documents on Xe HPC: at 1.6 GHz, each Xe core performs 4096 bfloat16 and 256
    # float32 operations per clock cycle, two tiles have 3.28 TB/s of memory bandwidth, and oneDNN
    # uses TF32 only on request. From ALCF's overview of Aurora: 448 active engines correspond to 56
    # Xe cores per tile, two tiles have 128 GiB, all GPUs are connected to each other, and six GPUs
    # share eight Slingshot 11 adapters of 25 GB/s. The link bandwidth was measured: 15 GB/s from
    # one tile to a tile of another GPU (ALCF's Aurora node performance overview), times the five
    # other GPUs. The same page reports 273 TFLOP/s for large bfloat16 matrix products.
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
    # A simulated device is a share of an unknown CPU, so its numbers are unknown.
    Device(name="cpu", match="^cpu$", platform="cpu"),
)

DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}


def find_device(device_kind: str) -> Device | None:
    """Return the table's entry for JAX's `device_kind` (a string), or None if there is no entry.

    A100 PCIe cards get the numbers of the SXM modules, although some of their bandwidths are lower.

    >>> find_device("NVIDIA A100-SXM4-40GB").name
    'a100'
    """
    return next((d for d in DEVICES.values() if re.search(d.match, device_kind)), None)
