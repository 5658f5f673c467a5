"""The bytes that tensors take on a device, and CUDA fake tensors, which have shapes only, on a machine without a GPU.

    with LiveBytes("cuda") as device:
        model.to("cuda"), loss.backward() ...
    device.peaks

torch's FakeTensorMode gives tensors a shape, a dtype and a device, and no numbers. Added here:

- live bytes: those of all storages on the device, each rounded up to 512 bytes as in torch's allocator for CUDA;
- values where code asks for them: integers (token ids, masks, lengths) and short vectors are also computed on the CPU, so
  that indexing by a mask, ``nonzero``, ``tolist`` and the like have the sizes that they would have. A number that nobody
  knows, such as a loss, is taken to be between `UNKNOWN` and twice that;
- attention by the kernels that CUDA takes: flash attention in half precision without a mask, else memory-efficient
  attention. The CPU build of torch would take plain products, which store all scores;
- backward passes in a build of torch without CUDA, which otherwise refuses to look for the device's streams.

Mixed devices raise as on CUDA. What a kernel takes for itself while it runs, and the allocator's holes, are not seen.
"""

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

CUDA, META = torch.device("cuda:0"), torch.device("meta")
GRANULE = 512
"""torch's allocator for CUDA rounds every tensor up to a multiple of these bytes."""
SMALL = 1024
"""Floating-point tensors of at most this many numbers are computed, if all that they come from is known."""
UNKNOWN = 0.5
"""What a floating-point number without a value reads as: finite, and no step is skipped for it."""
ATTENTION = torch.nn.functional.scaled_dot_product_attention
aten = torch.ops.aten
BY_VALUE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.bincount.default}
"""Operators whose output's shape depends on values."""
BY_SHAPE = {
    aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.new_ones.default, aten.new_zeros.default,
    aten.new_full.default,
}  # fmt: skip
"""Operators whose output depends on no values."""
UNWRITTEN = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}
"""Operators whose output has no values yet."""


class _Shapes(FakeTensorMode):
    avoid_device_init = True  # no device will ever be there, whatever `torch.cuda.is_available` says here


class LiveBytes(TorchDispatchMode):
    """In this context tensors on a device are counted, and tensors have no numbers, only shapes.

    ``live`` are the bytes now, ``phase`` is the name of what is being done, ``peaks`` has the most live bytes of each phase.

    Args:
        device: the device whose tensors are counted, ``cuda`` or ``cpu``. A CUDA device need not be there.
        has_numbers: leave tensors as they are; for runs on the CPU.
    """

    def __init__(self, device: str = "cuda", *, has_numbers: bool = False) -> None:
        super().__init__()
        self.kind, self.has_numbers = device, has_numbers
        self.live, self.phase = 0, ""
        self.peaks = dict[str, int]()
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._around = contextlib.ExitStack()

    def __enter__(self) -> "LiveBytes":
        if not self.has_numbers:
            _guard_streams()
            for place, name, stand_in in (*_STAND_INS, *(_OF_CUDA if self.kind == "cuda" else [])):
                self._around.enter_context(mock.patch.object(place, name, stand_in))
            self._around.enter_context(_Shapes())
            # In this thread: those of devices are started once, at the first backward pass of a process.
            self._around.enter_context(torch.autograd.set_multithreading_enabled(False))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.close()

    @contextlib.contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Within this context the peak is of this phase."""
        outer, self.phase = self.phase, name
        self._note()
        try:
            yield
        finally:
            self.phase = outer
            self._note()

    def _note(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.has_numbers:
            out = func(*args, **kwargs)
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, Tensor):
                    self._count(one)
            return out
        if func is torch.ops.prim.device.default:
            device = args[0].fake_device
            return META if device.type == "cuda" and _asks_for_streams() else device
        if kwargs.get("device") == META:  # an operator of a backward pass, whose input said that it was on META
            kwargs["device"] = CUDA
        if func is aten._local_scalar_dense.default:
            with unset_fake_temporarily():
                return _known(args[0]).item()
        if func is aten.index.Tensor:
            args = (args[0], self._places(args[1]))
        if func in BY_VALUE:
            real = _computed(func, args, kwargs)
            if real is None:
                raise RuntimeError(f"{func}: the shape of its result depends on values that nobody knows")
            return tree_map_only(Tensor, lambda one: self.of_value(one, args[0].device), real)
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor):
            self._count(out)
            out.known = _assumed(out, _computed(func, args, kwargs) if _is_kept(out) else None)
        elif isinstance(out, tuple | list):
            fakes = [one for one in out if isinstance(one, FakeTensor)]
            known = _computed(func, args, kwargs) if any(map(_is_kept, fakes)) else None
            for i, fake in enumerate(fakes):
                self._count(fake)
                fake.known = _assumed(fake, None if known is None else known[i])
        return out

    def of_value(self, real: Tensor, device: torch.device) -> Tensor:
        """A tensor on a device with a known value."""
        fake = torch.empty(real.shape, dtype=real.dtype, device=device)
        fake.known = real
        self._count(fake)
        return fake

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices in which every mask is replaced by the places of its True entries, as CUDA's kernel does."""
        places = list[Tensor | None]()
        for index in indices:
            if index is None or index.dtype != torch.bool:
                places.append(index)
            else:
                with unset_fake_temporarily():
                    columns = _known(index).nonzero().unbind(1)
                places += [self.of_value(column, index.device) for column in columns]
        return places

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != self.kind:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            size = -(-storage.nbytes() // GRANULE) * GRANULE
            self._sizes[key] = size, weakref.ref(storage, lambda _: self._free(key))
            self.live += size
            self._note()

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[0]


# Values -----------------------------------------------------------------------------------------------------------------


def _known(tensor: Tensor) -> Tensor:
    real = getattr(tensor, "known", None)
    if real is None:
        raise RuntimeError(f"code asks for the values of a tensor that has none: {tensor}")
    return real


def _assumed(fake: FakeTensor, known: Tensor | None) -> Tensor | None:
    """A tensor's known values; a single number that nobody knows, such as a loss or the largest weight, is assumed."""
    return _unknown(fake) if known is None and fake.dim() == 0 and fake.is_floating_point() else known


def _unknown(fake: FakeTensor) -> Tensor:
    """Different numbers for a floating-point tensor whose numbers nobody knows: finite, and no step is skipped for them."""
    with unset_fake_temporarily():
        return torch.linspace(UNKNOWN, 2 * UNKNOWN, fake.numel(), dtype=fake.dtype).view(fake.shape)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives on the known values; None if one of its inputs has none."""
    if func in BY_SHAPE:
        dtype = args[0].dtype
        args = (args[0].shape, *args[1:])
    for one in (*args, *kwargs.values()):
        for part in one if isinstance(one, tuple | list) else (one,):
            if isinstance(part, FakeTensor) and getattr(part, "known", None) is None:
                return None
    args, kwargs = tree_map_only(FakeTensor, lambda fake: fake.known, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    with unset_fake_temporarily():
        if func in BY_SHAPE:
            args = (torch.empty(args[0], dtype=dtype), *args[1:])
        real = func(*args, **kwargs)
        return real.fill_(UNKNOWN) if func in UNWRITTEN and real.is_floating_point() else real


def _is_kept(fake: FakeTensor) -> bool:
    """Whether values of a tensor like this one are kept."""
    return not fake.is_floating_point() or fake.numel() <= SMALL


# What torch asks of the device, or takes from it ------------------------------------------------------------------------


def _listed(tensor: FakeTensor) -> Any:
    with _disable_current_modes():
        is_unknown = tensor.is_floating_point() and getattr(tensor, "known", None) is None
        return (_unknown(tensor) if is_unknown else _known(tensor)).tolist()


def _attention(  # noqa: PLR0917  as torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that torch takes on CUDA (cuDNN's is off)."""
    if not query.is_cuda:
        return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        width, multiple = attn_mask.shape[-1], 16
        padded = torch.nn.functional.pad(attn_mask.to(query.dtype), (0, -width % multiple))
        attn_mask = padded[..., :width].expand(*query.shape[:3], width)
    learns = any(x.requires_grad for x in (query, key, value))
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, learns and torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )
    return found[0]


def _asks_for_streams() -> bool:
    """Whether autograd's engine asks for a device: no Python code is between it and us.

    The engine looks for the streams of CUDA, which a build without CUDA does not have; those of META are not looked for.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def _guard_streams() -> None:
    """In a build without CUDA, register a device guard for CUDA that does nothing.

    torch has one for builds with CUDA on machines without a GPU, whose own guard finds no device. So it is given one that
    finds none: that of its lazy tensors.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, lazy = 1, 17
    if guards[cuda] is None:
        register = c10["_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"]
        register(ctypes.c_int8(cuda), ctypes.c_void_p(guards[lazy]))
    torch._C._ensureCUDADeviceGuardSet()


def _swap(old: Tensor, new: Tensor) -> None:
    """`torch.utils.swap_tensors` for a module that moves: a tensor without numbers has weak references."""
    if old is not new:
        old.data = new.data
        old.fake_device = new.fake_device


class _Generator(torch.Generator):
    """One on the CPU; on a device without numbers there are no random ones."""

    def __new__(cls, _device: torch.device | str = "cpu") -> "_Generator":
        return super().__new__(cls)


_STAND_INS: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.utils, "swap_tensors", _swap),
    (torch, "Generator", _Generator),
    (FakeTensor, "tolist", _listed),
    (torch.nn.functional, "scaled_dot_product_attention", _attention),
]
"""Functions of torch that need numbers or a device."""
_OF_CUDA: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.cuda, "is_available", lambda: True),
    (torch.cuda, "device_count", lambda: 1),
    (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
]
"""What torch answers about the device: that of an H100."""
