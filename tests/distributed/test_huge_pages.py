import subprocess
import sys

import pytest

from jaxgpt.distributed.huge_pages import TUNABLES, available, without_huge_pages
from jobs import environment

PROGRAM = """
import os, sys
from jaxgpt.distributed.huge_pages import use_huge_pages
print(os.getpid(), flush=True)
use_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:])
"""


def lines(**settings):
    env = environment()
    env.pop(TUNABLES, None)
    program = [sys.executable, "-c", PROGRAM, "--key", "a b"]
    job = subprocess.run(program, capture_output=True, text=True, env=env | settings, check=True)
    return job.stdout.splitlines()


@pytest.mark.skipif(not available(), reason="this kernel or C library has no such choice")
def test_a_command_starts_again_as_the_same_process_with_the_same_arguments():
    *pids, last = lines()
    assert len(pids) == 2 and pids[0] == pids[1]
    assert last == "glibc.malloc.hugetlb=1 --key a b"
    assert lines(GLIBC_TUNABLES="glibc.malloc.arena_max=2")[-1] == (
        "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1 --key a b"
    )


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ("glibc.malloc.hugetlb=1", {}),
        ("glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1", {TUNABLES: "glibc.malloc.arena_max=2"}),
        ("glibc.malloc.hugetlb=0", {TUNABLES: "glibc.malloc.hugetlb=0"}),
    ],
)
def test_a_command_can_be_started_as_if_nothing_had_happened(now, before):
    assert without_huge_pages({TUNABLES: now, "A": "1"}) == {**before, "A": "1"}


@pytest.mark.parametrize(
    "settings", [{"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, {"JAX_PLATFORMS": "cuda"}]
)
def test_what_a_user_has_set_and_accelerators_are_left_alone(settings):
    *pids, last = lines(**settings)
    assert len(pids) == 1 and last == f"{settings.get(TUNABLES)} --key a b"
