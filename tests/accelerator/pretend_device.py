# SPDX-License-Identifier: Apache-2.0
"""A pretend accelerator for PyTorch: a device whose tensors compute on the CPU and are not CPU tensors.

    install()                              # once per process, before the first tensor on it
    model.to("pretend")
    with phase("sampling") as counts:
        model.generate(...)
    print(counts.synchronisations, counts.copies, counts.bytes, counts.peak)

It finds without a GPU what goes wrong on one first: tensors on two devices, hidden synchronisations, copies to and fro, a
generator of the wrong device, a result that is read before it has arrived. Numbers are bit for bit the CPU's, because in the
end every operator runs there. It has no streams that overlap, no graphs and no kernels of its own. Left out, though CUDA has
them: `nn.LSTM` and `nn.GRU`, sparse tensors, pinned memory (also in a `DataLoader`) and the priority or order of streams.

A `DeviceTensor` wraps a CPU tensor, and shares storage where the CPU tensors do. Operators with such tensors arrive in
``__torch_dispatch__``, factories in a fallback for the dispatch key ``PrivateUse1``; both call `_run`. Below autograd
nothing is special: gradients, checkpointing, autocast, vmap and optimizers are PyTorch's own. Made for torch 2.13,
whose private functions it calls; with another version run test_pretend_device.py first.
"""

import contextlib
import copy
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME, CPU = "pretend", torch.device("cpu")
MEMORY = 8 * 2**30
"""Bytes that the device says it has."""


# Counting ------------------------------------------------------------------------------------------------------------


class Counts:
    """What happened on the device while a phase was open."""

    def __init__(self) -> None:
        self.synchronisations: Counter[str] = Counter()
        """How often the host waited for the device, by reason. A blocking copy waits in both directions, as on CUDA."""
        self.copies: Counter[str] = Counter()
        """Copies by direction, ``to device`` or ``to host``. The number that `Tensor.item` reads is none."""
        self.bytes: Counter[str] = Counter()
        """Bytes of these copies."""
        self.places: Counter[str] = Counter()
        """Which lines waited or copied: the innermost one outside of torch."""
        self.operators = 0
        self.allocations = 0
        self.peak = 0
        """Most bytes alive on the device at once, older ones among them."""


phases: dict[str, Counts] = {}
"""The counts of every phase so far by name; a name opened again goes on counting. Clear it at will."""
_state = SimpleNamespace(live=0, most=0, main=[], arriving=[])
_thread = threading.local()


@contextlib.contextmanager
def phase(name: str) -> Iterator[Counts]:
    """Count what this thread does until the end; threads without a phase count for those of the main thread."""
    counts = phases.setdefault(name, Counts())
    if threading.current_thread() is threading.main_thread():
        opened = _state.main
    else:
        opened = _thread.__dict__.setdefault("opened", [])
    counts.peak = max(counts.peak, _state.live)
    opened.append(counts)
    try:
        yield counts
    finally:
        opened.remove(counts)


def _opened() -> list[Counts]:
    return getattr(_thread, "opened", None) or _state.main


def _place() -> str:
    frame = sys._getframe(1)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"


def _wait(reason: str) -> None:
    """The host waits for the device; what was on its way arrives."""
    for counts in _opened():
        counts.synchronisations[reason] += 1
        counts.places[f"{_place()} {reason}"] += 1
    arriving, _state.arriving = _state.arriving, []
    for deliver in arriving:
        deliver()


def _copied(direction: str, size: int, *, waits: bool) -> None:
    for counts in _opened():
        counts.copies[direction] += 1
        counts.bytes[direction] += size
        if not waits:
            counts.places[f"{_place()} copy {direction}, not waiting"] += 1
    if waits:
        _wait(f"copy {direction}")


class _Block:
    """Memory of the device; lives as long as a tensor in it."""

    def __init__(self, size: int) -> None:
        self.size = size
        _state.live += size
        _state.most = max(_state.most, _state.live)
        for counts in _opened():
            counts.allocations += 1
            counts.peak = max(counts.peak, _state.live)

    def __del__(self, state: SimpleNamespace = _state) -> None:
        state.live -= self.size


# Tensors -------------------------------------------------------------------------------------------------------------


class DeviceTensor(Tensor):
    """A tensor of the pretend device. ``inner`` is the CPU tensor that computes."""

    inner: Tensor
    block: _Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: _Block) -> "DeviceTensor":
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device(NAME, 0), requires_grad=False,
        )  # fmt: skip
        made.inner, made.block = inner, block
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_device = _METHODS.get(function)
        if of_device is not None:
            return of_device(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            rest = {name: value for name, value in vars(self).items() if name not in ("inner", "block")}
            vars(copied).update(copy.deepcopy(rest, memo))
            copied.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (self.detach().cpu(), self.dtype, NAME, self.requires_grad)


def _tolist(tensor: DeviceTensor) -> Any:
    _copied("to host", tensor.inner.nbytes, waits=True)
    return tensor.inner.tolist()


def _numpy(tensor: DeviceTensor, *_args: Any, **_options: Any) -> None:
    raise TypeError(
        f"can't convert {tensor.device} device type tensor to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first."
    )


def _format(tensor: DeviceTensor, spec: str) -> str:
    """What `format` and f-strings give: a number if it is one, else what `repr` says."""
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def _indexed(method: Any) -> Callable[..., Any]:
    """Indices that are lists are copied to the device, as on CUDA."""

    def of_device(tensor: Tensor, index: Any, *value: Any) -> Any:
        every = index if isinstance(index, tuple) else (index,)
        tensors = tuple(torch.tensor(one, device=NAME) if isinstance(one, list) else one for one in every)
        with torch._C.DisableTorchFunctionSubclass():
            return method(tensor, tensors if isinstance(index, tuple) else tensors[0], *value)

    return of_device


def _set_data(tensor: Tensor, value: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(tensor, value)
    tensor.inner, tensor.block = value.inner, value.block


_METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.__repr__: lambda tensor, **_: f"DeviceTensor({_tolist(tensor)}, device='{NAME}:0', dtype={tensor.dtype})",
    Tensor.__format__: _format,
    Tensor.new_tensor: lambda tensor, data, **o: torch.tensor(
        data, **{"dtype": tensor.dtype, "device": tensor.device} | o
    ),
    Tensor.data_ptr: lambda tensor: tensor.inner.data_ptr(),
    Tensor.untyped_storage: lambda tensor: tensor.inner.untyped_storage(),
    Tensor.data.__set__: _set_data,
    Tensor.__getitem__: _indexed(Tensor.__getitem__),
    Tensor.__setitem__: _indexed(Tensor.__setitem__),
}
"""Methods that do not end in an operator."""


# Operators -----------------------------------------------------------------------------------------------------------

WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.masked_scatter_backward.default: "masked_select",
    aten.equal.default: "equal",
    aten.allclose.default: "equal",
    aten._linalg_check_errors.default: "linalg",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}
"""Operators whose result the host needs before it can go on, because its shape or number depends on data, or an error."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Indices may be on the host, as on CUDA, and are then copied. The True positions of a mask are looked up on its own device;
the host waits for those of the device."""
MASKS = (torch.bool, torch.uint8)
COPIES = {aten.copy_.default, aten._to_copy.default}
SCALARS_TOO = {
    aten.fill_.Tensor, aten.fill.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten._fused_adamw_.tensor_lr,
    aten._fused_adam_.tensor_lr,
}  # fmt: skip
"""Operators that are not element by element, but take a 0-dim tensor of the host."""
OTHER_NAMES = {
    aten.convolution_overrideable.default: aten.convolution.default,
    aten.convolution_backward_overrideable.default: aten.convolution_backward.default,
    aten.histc.default: lambda x, *args, **options: aten.histc.default(x.float(), *args, **options).to(x.dtype),
}
"""What PyTorch calls on devices from outside, and counts integers with, but not on the CPU."""


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator whose tensors, or whose result, are on the device."""
    if op is aten.scaled_dot_product_attention.default:
        return _attention(*args, **kwargs)
    if op is aten._pack_padded_sequence.default:
        return _pack_padded_sequence(*args)
    if _is_composite(op):  # in inference mode these arrive whole
        with _as_called():
            return op.decompose(*args, **kwargs)
    tensors = [x for one in (args, kwargs.values()) for x in _tensors(one)]
    on_device = [x for x in tensors if isinstance(x, DeviceTensor)]
    if on_device:
        _check_devices(op, args, tensors)
    for counts in _opened():
        counts.operators += 1
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type != NAME
    if op in COPIES:
        found = _copy(op, args, kwargs, to_host)
        if found is not None:
            return found
    _count_arguments(op, args)
    inner_args = _inner(args)
    inner_kwargs = {
        name: CPU if name == "device" and value is not None else _inner(value) for name, value in kwargs.items()
    }
    with _random_state(op, kwargs):
        result = OTHER_NAMES.get(op, op)(*inner_args, **inner_kwargs)
    if op in WAITS:
        _wait(WAITS[op])
    if op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        _wait("repeat_interleave")
    if to_host:  # `zeros_like` and its kind
        return result
    return _outer(result, {id(x.inner): x for x in on_device}, on_device)


def _as_called() -> contextlib.AbstractContextManager[object]:
    """Views and autocast as outside of ``__torch_dispatch__``, which leaves them out."""
    left_out = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    if torch.is_autocast_enabled(NAME):
        left_out = left_out.remove(torch._C.DispatchKey.AutocastPrivateUse1)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


def _inner(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    if isinstance(value, (list, tuple)):
        return type(value)(map(_inner, value))
    return CPU if isinstance(value, torch.device) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (str, torch.Size)) and hasattr(value, "__iter__"):
        for one in value:
            yield from _tensors(one)


def _outer(result: Any, known: dict[int, DeviceTensor], given: list[DeviceTensor]) -> Any:
    """Wrap results: what an operator changed in place is the tensor it was given, and a view has the memory of its base."""
    if isinstance(result, Tensor):
        storage = result.untyped_storage()
        if id(result) in known:
            changed = known[id(result)]
            if (
                changed.shape != result.shape or changed.stride() != result.stride()
            ):  # `t_`, `resize_`, an empty ``out``
                grown = changed.block.size < storage.nbytes()
                _set_data(changed, DeviceTensor(result, _Block(storage.nbytes()) if grown else changed.block))
            return changed
        base = next((x for x in given if x.inner.untyped_storage()._cdata == storage._cdata), None)
        if base is None:
            return DeviceTensor(result, _Block(storage.nbytes()))
        with torch.inference_mode(base.is_inference()):  # a view of a trained weight knows that it is one
            return DeviceTensor(result, base.block)
    if isinstance(result, (list, tuple)):
        return type(result)(_outer(one, known, given) for one in result)
    return result


def _pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Lengths, and the sizes of batches, are on the host."""
    if isinstance(lengths, DeviceTensor):
        raise RuntimeError(f"'lengths' argument should be a 1D CPU int64 tensor, but got one on {lengths.device}")
    data, sizes = aten._pack_padded_sequence(_inner(x), lengths, batch_first)
    return _outer(data, {}, []), sizes


@functools.cache
def _is_composite(op: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return op not in WAITS and has(op.name(), "CompositeImplicitAutograd") and not has(op.name(), "CPU")


def _check_devices(op: Any, args: Any, tensors: list[Tensor]) -> None:
    """Refuse an operator with tensors on both devices where CUDA does."""
    on_host = [x for x in tensors if not isinstance(x, DeviceTensor)]
    if not on_host or op in COPIES:
        return
    takes_scalar = torch.Tag.pointwise in op.tags or op in SCALARS_TOO or op.name().startswith("aten::_foreach")
    changes_host = op._schema.is_mutable and args and any(x is args[0] for x in on_host)
    if takes_scalar and not changes_host and all(x.dim() == 0 for x in on_host):
        return
    if op in INDEXED and isinstance(args[0], DeviceTensor):
        others = [x for x in _tensors(args[2:3]) if not isinstance(x, DeviceTensor)]
        if all(x.dim() == 0 for x in others):
            return
    shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
        f"(when checking arguments of {op.name()}: {shapes})"
    )


def _count_arguments(op: Any, args: Any) -> None:
    """Count copies and waits before an operator begins: numbers and indices of the host, and masks of the device."""
    if op is aten.where.self:  # others take the number itself
        copied = [x for x in args if not isinstance(x, DeviceTensor)]
    elif op in INDEXED:
        masks = [x for x in _tensors(args[1]) if x.dtype in MASKS]
        places = [x for x in _tensors(args[1]) if x.dtype not in MASKS]
        for mask in masks:
            if isinstance(mask, DeviceTensor) and not _only_fills(args):
                _wait("boolean index")
            elif not isinstance(mask, DeviceTensor):
                places += mask.nonzero().unbind(1)
        copied = [x for x in places if not isinstance(x, DeviceTensor)]
    else:
        return
    for x in copied:
        _copied("to device", x.nbytes, waits=True)


def _only_fills(args: Any) -> bool:
    """Whether a mask only sets a single number, which is `masked_fill` and needs no count."""
    return len(args) > 2 and args[2].numel() == 1 and len(args[1]) == 1


def _copy(op: Any, args: Any, kwargs: dict[str, Any], to_host: bool) -> Any:
    """Copy between host and device; None if both sides are on the device."""
    if op is aten._to_copy.default:
        if not to_host:
            return None
        source, is_async = args[0].inner, kwargs.get("non_blocking", False)
        options = {name: value for name, value in kwargs.items() if name not in ("non_blocking", "pin_memory")}
        result = op(source, **options)
    else:
        result, source = args[0], args[1]
        if isinstance(result, DeviceTensor) == isinstance(source, DeviceTensor):
            return None
        if isinstance(result, DeviceTensor):
            result.inner.copy_(source)
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            _copied("to device", source.numel() * result.element_size(), waits=not is_async)
            return result
        result.copy_(source.inner)
        is_async = False  # only from and to pinned memory, which there is none of
    _copied("to host", result.nbytes, waits=not is_async)
    if is_async:  # its memory holds anything until the host has waited
        arrived = result.clone()
        result.fill_(torch.nan if result.is_floating_point() else 1)
        _state.arriving.append(functools.partial(result.copy_, arrived))
    return result


# Attention, autocast --------------------------------------------------------------------------------------------------


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` by the kernel that the CPU would choose; other devices get the plain one by default."""
    _check_devices(aten.bmm.default, (), [x for x in (query, key, value, attn_mask) if x is not None])
    inner = [_inner(x) for x in (query, key, value, attn_mask)]
    chosen = torch._fused_sdp_choice(*inner, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool and query.dtype != torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    if chosen == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value and not learns_mask:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    plain = aten._scaled_dot_product_attention_math
    return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


LOWER = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "bmm", "mm", "baddbmm", "addmm", "addbmm", "linear", "matmul",
    "linalg_vecdot", "prelu", "scaled_dot_product_attention",
)  # fmt: skip
HIGHER = (
    "prod", "prod.dim_int", "cdist", "trace", "mse_loss", "nll_loss", "cosine_embedding_loss", "binary_cross_entropy",
    "smooth_l1_loss", "cross_entropy_loss", "l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits",
    "quantile", "view_as_complex", "polar",
)  # fmt: skip
WIDEST = ("stack", "cat", "index_copy")
"""What autocast runs in its dtype, in float32, and in the widest dtype of its arguments: the CPU's lists."""
_CASTS: dict[int, tuple[Tensor, Tensor]] = {}
"""Parameters that autocast has cast, until its end."""


def _casting(op: Any, dtype_of: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            tensors = [x for one in (args, kwargs.values()) for x in _tensors(one)]
            dtype = dtype_of(tensors)
            return op(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(one, dtype) for one in value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
        return value
    is_weight = value.requires_grad and value.is_leaf and not value._is_view() and value.dtype == torch.float32
    if not (is_weight and torch.is_autocast_cache_enabled()) or torch.is_inference_mode_enabled():
        return value.to(dtype)
    if id(value) not in _CASTS:
        with torch.enable_grad():  # a later pass may need the gradient
            _CASTS[id(value)] = value, value.to(dtype)
    return _CASTS[id(value)][1]


def _widest(tensors: list[Tensor]) -> torch.dtype:
    dtypes = {x.dtype for x in tensors if x.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes, torch.get_autocast_dtype(NAME))


# Random numbers -------------------------------------------------------------------------------------------------------

_OWN: set[int] = set()
"""Addresses of the device's generators."""
_default = torch._C.Generator()


class _GeneratorKind(type(torch._C.Generator)):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_GeneratorKind):
    """Takes the place of `torch.Generator`, which cannot be made for a device written in Python."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return torch._C.Generator(device)
        made = super().__new__(cls)
        _OWN.add(made._cdata)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    def __del__(self) -> None:
        _OWN.discard(self._cdata)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


@contextlib.contextmanager
def _random_state(op: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Random numbers of the device come from generators of the device; its own state is not the CPU's."""
    given = kwargs.get("generator")
    if given is not None and given._cdata not in _OWN:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{given.device.type}'")
    if given is not None or torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    of_host = torch.get_rng_state()
    torch.set_rng_state(_default.get_state())
    try:
        yield
    finally:
        _default.set_state(torch.get_rng_state())
        torch.set_rng_state(of_host)


# The device -----------------------------------------------------------------------------------------------------------


class _Event:
    """A mark in the only stream."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return not _state.arriving

    def synchronize(self) -> None:
        _wait("event")


class Module:
    """``torch.pretend``, found by `torch.get_device_module`: what PyTorch and others ask of a device."""

    Event = _Event
    _initialized = True
    is_available = is_initialized = is_built = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda: True)
    _is_in_bad_fork = _is_compiled = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = init = empty_cache = staticmethod(lambda *_: None)
    device = staticmethod(lambda _device: contextlib.nullcontext())
    get_device_name = staticmethod(lambda _device=None: "pretend accelerator")
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    synchronize = staticmethod(lambda _device=None: _wait("synchronize"))

    manual_seed = manual_seed_all = staticmethod(lambda seed: _default.manual_seed(seed) and None)
    get_rng_state = staticmethod(lambda _device=None: _default.get_state())
    set_rng_state = staticmethod(lambda state, _device=None: _default.set_state(state) and None)
    get_rng_state_all = staticmethod(lambda: [_default.get_state()])
    set_rng_state_all = staticmethod(lambda states: _default.set_state(states[0]) and None)

    memory_allocated = memory_reserved = staticmethod(lambda _device=None: _state.live)
    max_memory_allocated = max_memory_reserved = staticmethod(lambda _device=None: _state.most)
    mem_get_info = staticmethod(lambda _device=None: (MEMORY - _state.live, MEMORY))

    @staticmethod
    def reset_peak_memory_stats(_device: Any = None) -> None:
        _state.most = _state.live


_LIBRARIES: list[torch.library.Library] = []
"""Registrations last as long as these."""


def install() -> None:
    """Make the device known to PyTorch, once per process. It stays until the process ends."""
    if _LIBRARIES:
        return
    _setup_privateuseone_for_python_backend(NAME, Module)
    every, ours = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((every, ours))
    every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    ours.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for op in (aten.silu_backward, aten.mish_backward):  # with a kernel of the CPU's, but composed of others elsewhere
        ours.impl(op.__name__, _below_autograd(op.default), "AutogradPrivateUse1")
    lists = (
        (LOWER, lambda _: torch.get_autocast_dtype(NAME)),
        (HIGHER, lambda _: torch.float32),
        (WIDEST, _widest),
    )
    for names, dtype_of in lists:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            ours.impl(name, _casting(op, dtype_of), "AutocastPrivateUse1")
    optimizer._foreach_supported_types.append(DeviceTensor)
    _foreach_utils._foreach_supported_types.append(DeviceTensor)
    torch.Generator = Generator
    torch.accelerator.synchronize = Module.synchronize
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _made_on_host(getattr(torch, name)))
    torch.clear_autocast_cache = _then(torch.clear_autocast_cache, _CASTS.clear)
    torch.nn.Module._apply = _keeping_parameters(torch.nn.Module._apply)
    torch.autograd._engine_run_backward = _in_this_thread(torch.autograd._engine_run_backward)


def _made_on_host(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Factories from data make the tensor on the host and copy it, below anything that could be intercepted."""

    @functools.wraps(factory)
    def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        if device is None:
            device = data.device if isinstance(data, Tensor) else torch.empty(0).device
        if isinstance(data, (list, tuple)):
            data = _numbers_read(data)
        if device is None or torch.device(device).type != NAME:
            more = {"requires_grad": True} if requires_grad else {}
            return factory(data, *args, device=device, **more, **options)
        made = data if isinstance(data, Tensor) else factory(data, *args, **options)
        return made.to(device, options.get("dtype", made.dtype)).requires_grad_(requires_grad)

    return make


def _numbers_read(data: Any) -> Any:
    """Data with each number of the device read, which waits once for each, as on CUDA."""
    if isinstance(data, DeviceTensor) and data.dim() == 0:
        _wait("item")
        return data.inner
    return [_numbers_read(one) for one in data] if isinstance(data, (list, tuple, DeviceTensor)) else data


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _in_this_thread(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients in the thread that asks for them, for those of devices are started only once; and methods in hooks."""

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False), torch._C._EnableTorchFunction():
            return run_backward(*args, **kwargs)

    return run


def _keeping_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module.to` leaves parameters the objects that they are, as from the CPU to CUDA, so that tied ones stay tied."""

    @functools.wraps(apply)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return run


def _below_autograd(op: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run
