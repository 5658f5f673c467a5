"""The memory of a process that computes on a CPU."""

import ctypes
import os
import subprocess
import sys

import pytest

from heedful.kernels.device import resolve_device

FAULTS = """
import ctypes, resource
from heedful.kernels.device import resolve_device
if {reuses}:
    resolve_device("cpu")
libc, size = ctypes.CDLL(None), 2**20
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = 0
for _ in range(9):
    blocks = [libc.malloc(size) for _ in range(24)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in reversed(blocks):
        libc.free(block)
    before = before or resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, reuses):
    """New pages that the system gives for 24 MiB, eight times after others of 24 MiB were freed, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS.format(reuses=reuses)], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


def has_mallopt():
    return os.name == "posix" and hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not has_mallopt(), reason="the C library is not glibc")
def test_what_was_freed_is_used_again():
    assert faults(reuses=True) < 100
    assert faults(reuses=False) > 8 * 1000


@pytest.mark.parametrize(("set_before", "expected"), [(None, "128"), ("7", "7")])
def test_the_cache_of_compiled_products_is_small_unless_the_user_says_otherwise(monkeypatch, set_before, expected):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.delenv(name, raising=False)
    if set_before:
        monkeypatch.setenv(name, set_before)
    resolve_device("cpu")
    assert os.environ[name] == expected
