"""What each kind of device can do, and one way to its random numbers and its memory.

Code asks `capabilities` for what it needs, not for a device's name: Apple's MPS and any other accelerator that torch knows
then take the same path as CUDA, except for what they lack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Capabilities:
    """What heedful uses of a kind of device beyond tensors; the defaults hold for an accelerator that is not listed."""

    graphs: bool = False
    """CUDA graphs: the kernels of a token, recorded once and launched together."""
    varlen_attention: bool = False
    """torch's attention for packed texts of any length, in half precision."""
    bitsandbytes: bool = False
    """4-bit weights and 8-bit moments."""
    nccl: bool = False
    """Collectives between devices, for several ranks."""
    float64: bool = True
    """Tensors of double precision."""
    queues: bool = True
    """Operations are queued, so reading a number waits for all of them. A CPU computes at once."""
    stages_copies: bool = True
    """A copy from the host's ordinary memory need not be waited for: what it copies is read before the call returns. torch
    does so for CUDA and XPU, not for MPS."""
    compiler: str = "Triton and a C compiler"
    """What torch.compile needs."""


CAPABILITIES = {
    "cpu": Capabilities(queues=False, compiler="a C++ compiler (g++ or clang++)"),
    "cuda": Capabilities(graphs=True, varlen_attention=True, bitsandbytes=True, nccl=True),
    "mps": Capabilities(float64=False, stages_copies=False),
}
"""By device type."""
OTHERS = Capabilities()


_ON_HOST = WeakTensorKeyDictionary()
"""Copies on the host of tensors on devices, with the versions of both at the time: they are equal until one is changed."""


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host on a device, without waiting where copies are staged; the tensor itself if it is there
    already. `on_host` of the copy is then the tensor, as long as neither is changed in place.
    """
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    copied = tensor.to(device, non_blocking=capabilities(device).stages_copies)
    remember(copied, tensor)
    return copied


def remember(on_device: Tensor, of_host: Tensor) -> None:
    """Let `on_host` give a tensor of the host for an equal one on a device, as long as neither is changed in place."""
    if not (on_device.is_inference() or of_host.is_inference()):  # their changes are not counted
        _ON_HOST[on_device] = of_host, (on_device._version, of_host._version)


def known_on_host(tensor: Tensor) -> Tensor | None:
    """`on_host`, or None if that would wait for the device."""
    if tensor.device.type == "cpu":
        return tensor
    copied, versions = _ON_HOST.get(tensor, (None, None))
    return copied if copied is not None and versions == (tensor._version, copied._version) else None


def on_host(tensor: Tensor) -> Tensor:
    """A tensor's copy on the host, to read only: later calls return the same. Waits for the device, unless the tensor came
    from there by `upload`, or was asked for before."""
    copied = known_on_host(tensor)
    if copied is None:
        copied = tensor.cpu()
        remember(tensor, copied)
    return copied


def capabilities(device: torch.device) -> Capabilities:
    """What a device can do."""
    return CAPABILITIES.get(device.type, OTHERS)


def device_module(device: torch.device) -> Any:
    """torch's module for a device, such as `torch.cuda`; None if torch has none."""
    return getattr(torch, device.type, None)


def name_of(device: torch.device) -> str:
    """A device type as people write it, such as CUDA."""
    return device.type.upper() if device.type in CAPABILITIES else device.type


def device_names() -> list[str]:
    """Names of this machine's accelerators, as far as torch knows them; empty without any."""
    module = device_module(_accelerator())
    return [module.get_device_name(i) for i in range(module.device_count())] if _has(module, "get_device_name") else []


def empty_cache() -> None:
    """Return unused memory of the accelerator to the system, if there is one."""
    module = device_module(_accelerator())
    if _has(module, "empty_cache"):
        module.empty_cache()


def free_memory(device: torch.device) -> int | None:
    """Bytes that a run in this process can use; None if the device has no memory of its own, or does not tell."""
    free, module = _memory(device)[0], device_module(device)
    if free is None:
        return None
    # Memory of this process is the run's own, or torch's cache from an earlier run.
    return free + (int(module.memory_reserved(device)) if _has(module, "memory_reserved") else 0)


def total_memory(device: torch.device) -> int | None:
    """Bytes of a device's memory; None if it has none of its own, or does not tell."""
    return _memory(device)[1]


def _memory(device: torch.device) -> tuple[int, int] | tuple[None, None]:
    """Free bytes of a device, and all; None if it has no memory of its own, or does not tell."""
    module = device_module(device)
    try:
        free, total = module.mem_get_info(device) if _has(module, "mem_get_info") else (None, None)
    except RuntimeError:  # the function is there, but the driver does not answer: some of Intel's GPUs
        return None, None
    return free, total


def peak_memory(device: torch.device) -> int | None:
    """Bytes of all tensors on a device at their most so far; None if the device does not tell."""
    module = device_module(device)
    return int(module.max_memory_allocated(device)) if _has(module, "max_memory_allocated") else None


def synchronize(device: torch.device) -> None:
    """Wait until a device, the current one of its kind, has done everything that is queued."""
    module = device_module(device)
    if _has(module, "synchronize"):
        module.synchronize()


def random_states() -> dict[str, list[Tensor]]:
    """States of the accelerator's random generators, one for each device, by device type; empty without an accelerator."""
    kind = _accelerator()
    module = device_module(kind)
    if not _has(module, "get_rng_state"):
        return {}
    return {kind.type: [module.get_rng_state(*place) for place in _places(kind)]}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the generators from `random_states`. Devices that were not there, or are no more, are left out."""
    kind = _accelerator()
    module = device_module(kind)
    if _has(module, "set_rng_state"):
        for place, state in zip(_places(kind), states.get(kind.type, []), strict=False):
            module.set_rng_state(state, *place)


def dropout_state() -> tuple[Tensor, Tensor | None]:
    """States of torch's generators on the CPU and on the accelerator in use, which dropout draws from.

    Reading them does not wait for the accelerator. Without one, and before its first use, the second is None.
    """
    module = device_module(_accelerator())
    is_used = _has(module, "get_rng_state") and (not _has(module, "is_initialized") or module.is_initialized())
    return torch.get_rng_state(), module.get_rng_state() if is_used else None


def set_dropout_state(state: tuple[Tensor, Tensor | None]) -> None:
    """Restore the generators from `dropout_state`."""
    on_cpu, on_accelerator = state
    torch.set_rng_state(on_cpu)
    if on_accelerator is not None:
        device_module(_accelerator()).set_rng_state(on_accelerator)


def _accelerator() -> torch.device:
    """The kind of accelerator that this process has, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _places(kind: torch.device) -> list[tuple[int, ...]]:
    """Arguments that select each device of a kind. MPS has one, and its functions take none."""
    return [()] if kind.type == "mps" else [(i,) for i in range(device_module(kind).device_count())]


def _has(module: Any, name: str) -> bool:
    return hasattr(module, name)
