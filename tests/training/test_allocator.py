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
