"""Where models run and in which precision. Master weights are always float32; only the compute dtype varies."""

import contextlib
import ctypes
import os
from typing import Literal

import torch
from torch import Tensor

from heedful.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = (torch.float16, torch.bfloat16)


def resolve_device(name: str) -> torch.device:
    """The device that a flag names; ``auto`` is CUDA, else Apple's MPS, else the CPU.

    For a CPU the process's memory is set up too, by `reuse_memory`; on CUDA attention is not left to cuDNN, which plans each
    shape anew, and whose gradients with a mask were NaN at some lengths (pytorch issue 196678). Raises ConfigError where
    the named device does not exist here.
    """
    device = _device(name)
    if device.type == "cpu":
        reuse_memory()
    elif device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def reuse_memory() -> None:
    """Let this process keep the memory that tensors free for the next ones, and oneDNN the code of few shapes.

    Sampling takes and frees megabytes at every token. By its defaults glibc gives them back to the system each time, and
    taking them again as new pages was a sixth of sampling and more. Blocks of more than 128 MiB are still given back, and
    so is what lies free at the heap's end beyond 512 MiB. Other C libraries stay as they are. oneDNN, which compiles matrix
    products in half precision for each shape, would keep 1,024 of them, about half a megabyte each; with texts of every
    length that is soon more than the model.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # read at the first product
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 128 * 2**20)
        mallopt(m_trim_threshold, 512 * 2**20)


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device: {name!r} is not a device; choose auto, cpu, mps, cuda or cuda:N") from None
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not available.get(device.type):
        raise ConfigError(f"--device: {name!r} is not available on this machine; --device auto picks what is")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device: {name!r} does not exist; this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return device


def resolve_dtype(name: Literal["auto", "float32", "bfloat16", "float16"], device: torch.device) -> torch.dtype:
    """The compute dtype: ``auto`` is bfloat16 where the hardware is fast at it, float16 on other GPUs, else float32."""
    if name != "auto":
        return DTYPES[name]
    if _fast_bfloat16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def _fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Compute in ``dtype`` on float32 weights; nothing changes for float32 and float64."""
    if dtype in HALF:
        return torch.autocast(device.type, dtype=dtype)
    return contextlib.nullcontext()


def scale_gradient(output: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
    """The same tensor; what flows back through it is multiplied by the scaler's factor, so that float16 can hold it.

    This is where a module's float32 output meets its half-precision inside. Scaling here, and not the loss, holds for
    whatever loss is made of the output.
    """
    if scaler is not None and output.requires_grad:
        output.register_hook(scaler.scale)
    return output
