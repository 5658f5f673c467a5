"""Device and precision of models."""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from heedful.devices import capabilities, device_module, name_of
from heedful.display import counted
from heedful.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
HALF = (torch.float16, torch.bfloat16)


def resolve_device(name: str, *, graphs: bool = False) -> torch.device:
    """The device for ``--device``: ``auto`` is CUDA if available, else Apple's MPS, else the CPU; others are named, such as
    ``cuda:1`` or any type that torch knows.

    Also sets up the process for the device. A device with a number becomes torch's current one of its kind. On a CPU it
    calls `reuse_memory`. On CUDA it switches cuDNN's attention off, which plans each shape anew, and whose gradients with
    a mask were NaN at some lengths (pytorch issue 196678).

    ``graphs`` is ``--cuda-graphs on``. Raises ConfigError if the machine does not have the device, or the device no graphs.
    """
    device = _device(name)
    if graphs:
        check_graphs(device)
    if device.index is not None and hasattr(device_module(device), "set_device"):
        device_module(device).set_device(device)
    if device.type == "cpu":
        reuse_memory()
    elif device.type == "cuda":  # a switch that only CUDA has
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def reuse_memory() -> None:
    """Keep freed memory in this process for later tensors, and limit oneDNN's cache of compiled code.

    Sampling allocates and frees megabytes at every token. By default glibc returns them to the system each time, and
    getting new pages took a sixth of sampling time or more. Blocks above 128 MiB are still returned, and so is free
    memory at the end of the heap beyond 512 MiB. Other C libraries are not changed.

    oneDNN compiles matrix products in half precision per shape. By default it caches 1,024 of them, about half a
    megabyte each; with texts of many lengths they soon take more memory than the model.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # oneDNN reads it at the first product
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 128 * 2**20)
        mallopt(m_trim_threshold, 512 * 2**20)


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"--device: {name!r} is not a device; choose auto, cpu, cuda, cuda:N, mps or another type that torch knows"
        ) from None
    module = device_module(device)
    if not (hasattr(module, "is_available") and module.is_available()):
        raise ConfigError(f"--device: {name!r} is not available on this machine; --device auto selects one that is")
    count = module.device_count()
    if (device.index or 0) >= count:
        devices = counted(count, f"{name_of(device)} device")
        raise ConfigError(f"--device: {name!r} does not exist; this machine has {devices}, numbered from 0")
    return device


def check_graphs(device: torch.device) -> None:
    """Raises ConfigError if a device has no CUDA graphs."""
    if not capabilities(device).graphs:
        raise ConfigError(
            f"--cuda-graphs on: {device.type} has no CUDA graphs; leave it out, or use a CUDA device (--device cuda)"
        )


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The compute dtype; ``auto`` is bfloat16 if the hardware is fast at it, float16 on other GPUs, else float32.

    Warns once on standard error about bfloat16 on a CPU that emulates it. Raises ConfigError for half precision that the
    device does not have.
    """
    name = str(name).removeprefix("torch.")
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"--dtype {name!r} is not a choice; choose auto, {', '.join(DTYPES)}")
    if name != "auto" and DTYPES[name] in HALF and DTYPES[name] not in half_dtypes(device):
        has = " or ".join(["float32", *(str(dtype).removeprefix("torch.") for dtype in half_dtypes(device))])
        raise ConfigError(f"--dtype {name} is not available on {device.type}; choose {has}, or --dtype auto")
    if name == "bfloat16" and device.type == "cpu" and not _fast_bfloat16(device):
        _say_emulated()
    if name != "auto":
        return DTYPES[name]
    if _fast_bfloat16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def half_dtypes(device: torch.device) -> Sequence[torch.dtype]:
    """Half precisions of a device's matrix products."""
    if device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        return (torch.float16,)
    if not torch.amp.is_autocast_available(device.type):
        return ()
    module = device_module(device)
    known = getattr(module, "get_amp_supported_dtype", None)  # what a device from outside torch says
    return HALF if known is None else [dtype for dtype in HALF if dtype in known()]


def frozen_dtype(device: torch.device, compute_dtype: torch.dtype) -> torch.dtype:
    """Storage dtype of frozen matrices on a device: on a GPU, the compute dtype."""
    return compute_dtype if device.type != "cpu" and compute_dtype in HALF else torch.float32


class FrozenPlace(TypedDict):
    """Arguments for loading a frozen model."""

    device: torch.device
    compute_dtype: torch.dtype
    stored: torch.dtype


def frozen_place(device: torch.device, dtype: DtypeName) -> FrozenPlace:
    """Device, compute dtype and storage dtype of a frozen model."""
    compute_dtype = resolve_dtype(dtype, device)
    return {"device": device, "compute_dtype": compute_dtype, "stored": frozen_dtype(device, compute_dtype)}


@functools.cache
def _say_emulated() -> None:
    """Warn once that the requested precision is slow here."""
    print(
        "heedful: --dtype bfloat16: this processor has no instructions for it, so it is emulated, several times slower than "
        "float32; --dtype auto selects a fast one",
        file=sys.stderr,
        flush=True,
    )


def _fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    has = getattr(device_module(device), "is_bf16_supported", None)
    return has is not None and bool(has())


def processor() -> str:
    """The kind of this machine's CPU, and what it costs if it is slow."""
    widest = torch.backends.cpu.get_cpu_capability()
    if _fast_bfloat16(torch.device("cpu")):
        return f"processor: {widest} with bfloat16, which --dtype auto uses"
    return (
        f"processor: {widest} without bfloat16, so --dtype auto is float32; the demo takes twice as long as with both"
    )


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Autocast products to ``dtype``. No effect for float32 and float64."""
    if dtype in HALF:
        return torch.autocast(device.type, dtype=dtype)
    return contextlib.nullcontext()


def scale_gradient(output: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
    """Return ``output`` unchanged, and scale the gradient that flows back through it so that float16 can hold it.

    Args:
        output: a module's float32 output, at the end of its half-precision part.
        scaler: has the scale; None does not scale.

    Scaling here instead of in the loss works for any loss of the output.
    """
    if scaler is not None and output.requires_grad:
        output.register_hook(scaler.scale)
    return output
