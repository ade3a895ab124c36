import subprocess
import sys

import pytest

from jaxgpt.runtime import allocator
from jaxgpt.runtime.allocator import MEMORY_VARIABLES, keep_freed_memory, reserve_gpu_memory
from jobs import environment

# Use memory as XLA does: a thread repeatedly allocates, fills and frees it.
CHURN = """
import ctypes, resource, sys, threading
from jaxgpt.runtime.allocator import keep_freed_memory
if "keep" in sys.argv:
    assert keep_freed_memory() == []
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


def page_faults(*arguments):
    command = [sys.executable, "-c", CHURN, *arguments]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(), check=True)
    return int(job.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_freed_memory_is_kept_and_not_taken_page_by_page_again():
    without = page_faults()
    assert without >= 20 * 50  # even in pages of 2 MiB, where the kernel gives them to all
    assert page_faults("keep") < without / 50


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
def test_the_heap_asks_for_large_pages():
    """The kernel shows `hg` among the heap's flags (proc(5)) after MADV_HUGEPAGE."""
    script = (
        "from jaxgpt.runtime.allocator import keep_freed_memory; keep_freed_memory()\n"
        "print(open('/proc/self/smaps').read().split('[heap]')[1].split('VmFlags:')[1].split('\\n')[0])"
    )
    job = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    assert "hg" in job.stdout.split(), job.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="macOS requires UTF-8 file names")
def test_a_mapped_file_whose_name_is_not_utf8_is_no_problem(tmp_path):
    script = (
        "import mmap, os, sys\n"
        "name = os.path.join(os.fsencode(sys.argv[1]), b'\\xff')\n"
        "open(name, 'wb').write(b'x')\n"
        "mapped = mmap.mmap(os.open(name, os.O_RDWR), 1)\n"
        "from jaxgpt.runtime.allocator import keep_freed_memory\n"
        "assert keep_freed_memory() == []"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment(), check=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"),
        ("MALLOC_ARENA_MAX", "2"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so"),
    ],
)
def test_what_a_user_has_chosen_is_left_alone_and_said(name, value, monkeypatch):
    def refuse(name):
        raise AssertionError("malloc was changed")

    monkeypatch.setattr(allocator.ctypes, "CDLL", refuse)
    monkeypatch.setenv(name, value)
    assert keep_freed_memory() == [f"malloc: unchanged, because the environment has {name}={value}"]


def test_a_gpu_gives_nine_tenths_of_its_memory_unless_the_user_has_chosen(monkeypatch):
    files = []
    monkeypatch.setattr(allocator.glob, "glob", lambda pattern: files)
    for name in MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert reserve_gpu_memory() == [] and MEMORY_VARIABLES[0] not in allocator.os.environ  # no GPU
    files.append("/dev/nvidia0")
    for name in MEMORY_VARIABLES:  # XLA refuses both at once
        monkeypatch.setenv(name, "0.5")
        assert reserve_gpu_memory() == []
        assert [n for n in MEMORY_VARIABLES if n in allocator.os.environ] == [name]
        monkeypatch.delenv(name)
    (line,) = reserve_gpu_memory()
    assert allocator.os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9" and "reserves 90%" in line
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
