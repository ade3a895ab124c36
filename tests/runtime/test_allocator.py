import subprocess
import sys

import pytest

from jaxgpt.runtime.allocator import OURS, VARIABLE, available, notes, without_tuning
from jobs import environment

START = """
import os, sys
from jaxgpt.runtime.allocator import tune_malloc
print(os.getpid(), flush=True)
tune_malloc()
print(os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:])
"""
# Memory as XLA takes it: from a thread, filled, and given back, again and again.
CHURN = """
import ctypes, resource, threading
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def churn(n):
    for _ in range(n):
        block = libc.malloc(100 << 20)
        ctypes.memset(block, 1, 100 << 20)
        libc.free(block)
def run(n):
    thread = threading.Thread(target=churn, args=(n,))
    thread.start(), thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = run(1)
print(run(20) - before)
"""

pytestmark = pytest.mark.skipif(not available(), reason="this C library has no such settings")


def run(program, **settings):
    env = environment()
    env.pop(VARIABLE, None)
    command = [sys.executable, "-c", program, "--key", "a b"]
    job = subprocess.run(command, capture_output=True, text=True, env=env | settings, check=True)
    return job.stdout.splitlines()


def test_a_command_starts_again_as_the_same_process_with_the_same_arguments():
    *pids, last = run(START)
    assert len(pids) == 2 and pids[0] == pids[1]
    assert last == f"{OURS} --key a b"
    assert run(START, GLIBC_TUNABLES="glibc.rtld.nns=8")[-1] == (
        f"glibc.rtld.nns=8:{OURS} --key a b"
    )


def test_memory_is_kept_and_not_taken_page_by_page_again():
    [tuned] = run(CHURN, GLIBC_TUNABLES=OURS)
    [without] = run(CHURN, GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert int(without) >= 20 * 50  # even in pages of 2 MiB, where the kernel gives them to all
    assert int(tuned) < int(without) / 50


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (OURS, {}),
        (f"glibc.rtld.nns=8:{OURS}", {VARIABLE: "glibc.rtld.nns=8"}),
        ("glibc.malloc.hugetlb=0", {VARIABLE: "glibc.malloc.hugetlb=0"}),
    ],
)
def test_a_command_can_be_started_as_if_nothing_had_happened(now, before):
    assert without_tuning({VARIABLE: now, "A": "1"}) == {**before, "A": "1"}


@pytest.mark.parametrize(
    "settings",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
        {"JAX_PLATFORMS": "cuda"},
        {"MALLOC_ARENA_MAX": "2"},
    ],
)
def test_what_a_user_has_set_and_accelerators_are_left_alone(settings):
    *pids, last = run(START, **settings)
    assert len(pids) == 1 and last == f"{settings.get(VARIABLE)} --key a b"


@pytest.mark.parametrize(("told", "said"), [(OURS, [f"malloc: {VARIABLE}={OURS}"]), ("", [])])
def test_the_log_says_how_memory_is_handed_out(told, said, monkeypatch):
    monkeypatch.setenv(VARIABLE, told)
    assert notes() == said
