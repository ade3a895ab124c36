"""Work of an operation; the expected numbers are counted by hand from the shapes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.perf.hlo import parse_hlo
from jaxgpt.perf.roofline import Work, read_work

N, M, K = 512, 256, 128


def work(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return read_work(parse_hlo(jax.jit(function).lower(*arguments).compile().as_text()))


def test_a_matmul_reads_two_matrices_writes_one_and_has_2mkn_flops():
    (one,) = work(lambda a, b: a @ b, (M, K), (K, N)).values()
    assert one == Work(1, 4 * (M * K + K * N), 4 * M * N, 2 * M * K * N)


def test_a_batched_matmul_multiplies_the_work_by_the_batch_size():
    (one,) = work(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), (5, M, K), (5, K, N)).values()
    assert one.flops == 5 * 2 * M * K * N


def test_the_workspace_of_a_cublas_call_is_not_a_result():
    program = parse_hlo(
        "HloModule step\n\n"
        "ENTRY %main (a: bf16[256,128], b: bf16[128,512]) -> bf16[256,512] {\n"
        "  %a = bf16[256,128]{1,0} parameter(0)\n"
        "  %b = bf16[128,512]{1,0} parameter(1)\n"
        "  %call = (bf16[256,512]{1,0}, s8[33554432]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul"\n'
        "  ROOT %y = bf16[256,512]{1,0} get-tuple-element(%call), index=0\n"
        "}\n"
    )
    (one,) = read_work(program).values()
    assert one == Work(1, 2 * (M * K + K * N), 2 * M * N, 2 * M * K * N)


def test_a_fused_elementwise_operation_reads_and_writes_its_array_once():
    (one,) = work(lambda x: jnp.tanh(x * 2) + x, (N, N)).values()
    assert one == Work(1, 4 * N * N, 4 * N * N, 0)


def test_loop_operations_count_once_per_iteration_and_slices_only_their_part():
    def rows(x):
        return jax.lax.scan(lambda carry, row: (carry, jnp.tanh(row)), 0.0, x)[1]

    found = work(rows, (N, M))
    loop = [one for one in found.values() if one.times == N]
    assert loop and all(one.read <= 4 * (M + 1) for one in loop)
    assert sum(one.written for one in loop) <= 4 * 2 * (M + 1)


def test_the_minimum_time_is_the_larger_of_memory_and_compute_time():
    one = Work(times=3, read=60, written=40, flops=1000)
    assert one.least_seconds(bandwidth=10, peak=1e9) == 30
    assert one.least_seconds(bandwidth=1e9, peak=10) == 300
    assert one.moved == 300


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jax[cuda12]"
)
def test_a_gpt2_step_on_an_h100_moves_no_more_bytes_than_recorded():
    """The table in perf/DETAILS.md names each part."""
    script = Path(__file__).with_name("h100_bytes.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    printed = subprocess.check_output([sys.executable, script], env=environment, text=True)
    total, operations = printed.splitlines()[-1].split()[1::3]
    assert float(total) <= 75 and int(operations) <= 510
