"""Freed blocks stay in the process."""

import platform
import resource
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from groundhop.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import numpy
for _ in range(3):
    numpy.ones(8 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    numpy.ones(8 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_are_reused_without_new_pages() -> None:
    assert resource.getpagesize() > 0
    assert faults("keep") * 10 < faults("default")


GIVE_BACK = """
import ctypes, psutil
from groundhop.training.allocator import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 300 * 2**20
block = libc.malloc(size)
ctypes.memset(block, 1, size)
libc.free(block)
held = psutil.Process().memory_info().rss
give_back_freed_memory()
print(held - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_training_freed_is_given_back_on_request() -> None:
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 * 2**20
