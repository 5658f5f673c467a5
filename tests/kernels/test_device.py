"""Devices by name, the precision of each, and the memory of a process that computes on a CPU."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from heedful import ConfigError
from heedful.kernels.device import _say_emulated, autocast, resolve_device, resolve_dtype

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


@pytest.mark.exhaustive
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


@pytest.mark.parametrize("name", ["", "cuda:x"])
def test_a_device_that_is_none(name):
    with pytest.raises(ConfigError, match=r"is not a device; choose auto, cpu, cuda, cuda:N, mps or another type"):
        resolve_device(name)


def test_devices_of_other_machines(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    for name in ("cuda", "cuda:1", "mps", "meta", "xla"):
        with pytest.raises(ConfigError, match=f"'{name}' is not available on this machine; --device auto"):
            resolve_device(name)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made_current = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert resolve_device("auto") == torch.device("cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert made_current == []
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert made_current == [torch.device("cuda:1")]
    for name, there in (("cuda:2", "2 CUDA devices"), ("cpu:5", "1 CPU device,")):
        with pytest.raises(ConfigError, match=f"'{name}' does not exist; this machine has {there}"):
            resolve_device(name)


def test_graphs_are_refused_on_a_device_without_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda", graphs=True) == torch.device("cuda")
    with pytest.raises(
        ConfigError, match=r"--cuda-graphs on: cpu has no CUDA graphs; leave it out, or .*--device cuda"
    ):
        resolve_device("cpu", graphs=True)


def test_half_precision_is_refused_on_a_device_without_it(monkeypatch):
    """An Apple GPU under an old macOS; a device to which torch cannot cast by itself."""
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: False)
    assert resolve_dtype("float16", torch.device("mps")) is torch.float16
    with pytest.raises(ConfigError, match="--dtype bfloat16 is not available on mps; choose float32 or float16, or"):
        resolve_dtype("bfloat16", torch.device("mps"))
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: True)
    assert resolve_dtype("bfloat16", torch.device("mps")) is torch.bfloat16
    with pytest.raises(ConfigError, match="--dtype float16 is not available on meta; choose float32, or --dtype auto"):
        resolve_dtype("float16", torch.device("meta"))


def test_compute_dtype(monkeypatch):
    cpu, cuda, mps = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    assert resolve_dtype("float32", cuda) is torch.float32
    assert resolve_dtype("bfloat16", cpu) is torch.bfloat16
    assert resolve_dtype("float16", cpu) is torch.float16
    assert resolve_dtype("auto", mps) is torch.float32
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert resolve_dtype("auto", cuda) is dtype


def test_autocast_changes_half_precision_alone():
    for dtype, kept in (
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
    ):
        a = torch.ones(2, 2, dtype=kept)
        with autocast(torch.device("cpu"), dtype):
            assert (a @ a).dtype is dtype


@pytest.mark.parametrize(("fast", "device", "name", "said"), [
    (False, "cpu", "bfloat16", 1), (True, "cpu", "bfloat16", 0), (False, "cpu", "auto", 0), (False, "cpu", "float32", 0),
    (False, "cuda", "bfloat16", 0),
])  # fmt: skip
def test_a_precision_that_is_emulated_is_said_to_be_slow_once(monkeypatch, capsys, fast, device, name, said):
    """Asked for by name, on a CPU without instructions for it; nobody who lets heedful choose gets it there."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    _say_emulated.cache_clear()
    for _ in range(2):
        resolve_dtype(name, torch.device(device))
    assert capsys.readouterr().err.count("--dtype bfloat16: this processor has no instructions for it") == said
