"""Extension of a vLLM server's worker process: loads weights from a folder and returns their checksum.

vLLM loads this file in the server's environment, where heedful need not be installed:

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve MODEL --worker-extension-cls heedful_vllm.HeedfulWorker

``heedful serve-policy`` prints the whole command. Imports only torch.
"""

from __future__ import annotations

import inspect
import uuid
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PROTOCOL = 2
"""Increased whenever arguments or results of the methods below change."""
PART, CPU_PART = 1 << 22, 1 << 17
"""Elements hashed at a time, to bound the memory; on a CPU they stay in its cache."""
_MASK, _FIRST, _SECOND = (1 << 63) - 1, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """The 64-bit checksum of a set of weights, as 16 hexadecimal digits.

        sum over all elements x of all tensors of h(bits of x), modulo 2^64

    with h the finaliser of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"; h(0) = 0).

    Independent of storage: stacked or transposed matrices, a vocabulary padded by zeros, other names. So trainer and
    server can compare it. A changed, missing or duplicated element changes it (except with probability 2^-64); permuted
    elements do not.

    Args:
        tensors: floating-point weights.
        dtype: dtype to which they are rounded first; None does not round. -0.0 counts as 0.0.
    """
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        hashed = torch.zeros((), dtype=torch.int64, device=flat.device)  # modulo 2^64, as int64 adds
        for part in flat.split(CPU_PART if flat.device.type == "cpu" else PART):
            own = (part if dtype is None else part.to(dtype)) + 0.0
            hashed += _mix(own.contiguous().view(_BITS[own.element_size()]).to(torch.int64)).sum()
        total += int(hashed)  # a GPU is waited for once per tensor
    return f"{total & ((1 << 64) - 1):016x}"


def added(checksums: Iterable[str]) -> str:
    """The checksum of several sets of weights together."""
    return f"{sum(int(one, 16) for one in checksums) & ((1 << 64) - 1):016x}"


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser of each element, in place. int64 multiplies modulo 2^64; shifts extend the sign, which is
    masked."""
    shifted = torch.empty_like(x)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_(_MASK >> (shift - 1))
        if factor is not None:
            x *= factor
    return x


class HeedfulWorker:
    """Mixin of vLLM's worker class. Its methods are called over HTTP, by ``POST /collective_rpc``."""

    model_config: Any  # this and the next three are the worker's
    vllm_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]

    def heedful_about(self) -> dict[str, Any]:
        """The server's model and settings: ``{"vocab_size", "dtype", "max_model_len", "logprobs_mode", ...}``."""
        config = self.model_config
        return {
            "protocol": PROTOCOL,
            "architecture": type(self._heedful_model()).__name__,
            "vocab_size": int(config.get_vocab_size()),
            "model_type": str(config.hf_text_config.model_type),
            "hidden_size": int(config.get_hidden_size()),
            "num_layers": int(config.get_total_num_hidden_layers()),
            "max_model_len": int(config.max_model_len),
            "dtype": str(config.dtype).removeprefix("torch."),
            "quantization": None if config.quantization is None else str(config.quantization),
            "logprobs_mode": str(config.logprobs_mode),
            "max_num_seqs": int(self.vllm_config.scheduler_config.max_num_seqs),
            "can_load": _takes_path(self) and _takes_path(self.model_runner),
            "can_sleep": bool(getattr(config, "enable_sleep_mode", False)),
            "has_nccl": getattr(self.vllm_config, "weight_transfer_config", None) is not None,
        } | self.heedful_state()

    def heedful_state(self) -> dict[str, Any]:
        """``{"instance": of this process, "version": of the weights, None before the first, "loads": their number}``."""
        if not hasattr(self, "_heedful_instance"):
            self._heedful_instance, self._heedful_loads = uuid.uuid4().hex, 0
            self._heedful_version: str | None = None
        return {"instance": self._heedful_instance, "version": self._heedful_version, "loads": self._heedful_loads}

    def heedful_load(self, path: str, version: str) -> dict[str, Any]:
        """Replace the weights by the safetensors files of a folder. Returns `heedful_state` and their checksum."""
        self.heedful_state()
        self._heedful_version = None  # invalid until loading is done
        self._heedful_loads += 1
        self.reload_weights(weights_path=path)
        _repack(self._heedful_model())
        return self.heedful_checksum(version)

    def heedful_checksum(self, version: str) -> dict[str, Any]:
        """Name the current weights. Returns `heedful_state` and a checksum of each that the model uses."""
        self.heedful_state()
        self._heedful_version = version
        dtype = self.model_config.dtype
        parts = {name: checksum([tensor], dtype) for name, tensor in _weights(self._heedful_model())}
        return self.heedful_state() | {"parts": parts}

    def _heedful_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()
        return model


def _takes_path(one: Any) -> bool:
    """Whether ``reload_weights`` of a worker, or of its model runner, which it may pass its arguments to, takes a folder."""
    if not hasattr(one, "reload_weights"):
        return not isinstance(one, HeedfulWorker)
    parameters = inspect.signature(one.reload_weights).parameters
    return "weights_path" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@torch.no_grad()
def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights that a vLLM model computes with, each once.

    On a CPU vLLM repacks matrices, and may drop the originals. If a repacked one differs from its original, yields
    both.
    """
    for name, parameter in model.named_parameters():
        module: Any = model.get_submodule(name.rpartition(".")[0])
        if parameter.numel() or not hasattr(module, "cpu_linear"):
            yield name, parameter
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            packed, original = _unpacked(module), module.weight
            if not original.numel() or not torch.equal(packed, original):
                yield f"{name} (packed)", packed


def _unpacked(module: Any) -> torch.Tensor:
    """A repacked matrix, unpacked by its product with the identity, which is exact."""
    width = int(getattr(module, "input_size_per_partition", 0) or module.weight.shape[1])
    identity = torch.eye(width, dtype=module.weight.dtype, device=module.weight.device)
    return module.cpu_linear(identity, module.weight, None).t()


def _repack(model: torch.nn.Module) -> None:
    """Repack an output head tied to the embeddings on a CPU, which vLLM (0.32) does not do when it reloads."""
    for module in model.modules():
        found: Any = module
        if hasattr(found, "cpu_linear") and found.weight.numel():
            found.quant_method.process_weights_after_loading(found)
