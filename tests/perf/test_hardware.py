import dataclasses
import math

import jax
import pytest

from jaxgpt.perf.hardware import DEVICES, find_device


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("A100-PCIE-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI250X", "mi250x"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
    ],
)
def test_devices_are_found_by_the_name_that_jax_gives(device_kind, name):
    assert find_device(device_kind) is DEVICES[name]


@pytest.mark.parametrize(
    "device_kind",
    [
        "NVIDIA H100 PCIe",  # 756 TFLOP/s
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A100-SXM-64GB",  # made for Leonardo
        "NVIDIA A100X",
        "GRID A100-10C",
        "NVIDIA GH200 480GB",  # 96 GB
        "AMD Instinct MI250",  # fewer compute units
        "TPU v5 lite",
    ],
)
def test_a_similar_device_name_does_not_match(device_kind):
    assert find_device(device_kind) is None


def test_the_peak_of_a_cpu_is_unknown():
    cpu = find_device(jax.devices("cpu")[0].device_kind)
    assert cpu is DEVICES["cpu"]
    assert cpu.memory is None and cpu.link_bandwidth is None and not cpu.peak_flops


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "cpu"])
def test_units_are_bytes_and_flops(name):
    """A number in GB, Gb/s or TFLOP/s would be off by far more than devices differ."""
    device = DEVICES[name]
    assert None not in dataclasses.astuple(device)
    assert 32e9 < device.memory < 300e9
    assert 1e12 < device.memory_bandwidth < 10e12
    assert 1e14 < device.peak_flops["bfloat16"] < 3e15
    assert device.peak_flops["float32"] < device.peak_flops["bfloat16"]
    assert 10e9 < device.network_bandwidth < device.link_bandwidth < device.memory_bandwidth


@pytest.mark.parametrize(
    ("name", "node_flops", "node_network"),
    [
        # From the machines' documentation: bfloat16 FLOP/s of a node, and Gb/s of its adapters.
        ("a100", 1.3e15, 2 * 200),  # Polaris, ALCF: "1.3 PF", two Slingshot 11
        ("mi250x", 4 * 383e12, 4 * 200),  # Frontier, OLCF: four MI250X, four Slingshot 11
        ("h100", 7.9e15, 8 * 400),  # DGX H100: 32 PFLOP/s of sparse FP8, four times dense bf16
    ],
)
def test_the_devices_of_a_host_add_up_to_the_node(name, node_flops, node_network):
    device = DEVICES[name]
    n = device.devices_per_host
    assert math.isclose(n * device.peak_flops["bfloat16"], node_flops, rel_tol=0.05)
    assert n * device.network_bandwidth * 8 == pytest.approx(node_network * 1e9)
