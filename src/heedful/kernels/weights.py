"""Storage of weights: half precision, sharing with the sampling copy, one gradient for tied matrices, and untrained
embedding rows."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.devices import capabilities
from heedful.kernels.cpu.products import is_plain_linear
from heedful.kernels.device import HALF

M = TypeVar("M", bound=nn.Module)

CHUNK = 2**24
"""Numbers of a weight that are converted at a time on their way to a device."""
SMALLEST_ROW = 0.01
"""An embedding row counts as untrained if its largest number is below this share of the median row's."""


def store_matrices(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    device: torch.device | None = None,
    *,
    but: nn.Module | None = None,
    experts: Iterable[str] = (),
) -> None:
    """Convert the matrices of linear layers, of the token embedding and of experts to a storage dtype, in place.

    Norms, biases and other parameters are stored in float32; embedding rows are converted to float32 when read. Under
    autocast to the same dtype products equal those of float32 weights; only embedding rows are rounded, except those of
    a checkpoint in that dtype. Tied matrices stay tied. Experts of a mixture are multiplied in their storage dtype,
    with or without autocast (transformers' ``grouped_mm``; autocast casts experts in only a few architectures), so
    their products are in half precision from then on.

    Args:
        model: the model; 4-bit matrices do not change.
        dtype: float32 or the compute dtype; None leaves matrices as they are.
        device: also move the parameters there, one by one, so that the host never needs memory for all; None leaves them.
        but: a layer to store in float32.
        experts: names of parameters with the matrices of all experts of a layer, to be converted too.
    """
    embedding = model.get_input_embeddings()
    matrices = {id(model.get_parameter(name)) for name in experts}
    for module in model.modules():
        is_matrix = isinstance(module, nn.Linear | Conv1D) or (module is embedding and isinstance(module, nn.Embedding))
        if is_matrix and module is not but:
            matrices.add(id(module.weight))
    vectors = {id(p) for p in model.parameters() if p.is_floating_point()} - matrices

    def convert(tensor: Tensor) -> Tensor:
        is_matrix = id(tensor) in matrices and tensor.is_floating_point()
        wanted = torch.float32 if id(tensor) in vectors else dtype if is_matrix else None
        return _moved(tensor, device or tensor.device, wanted or tensor.dtype)

    model._apply(convert)
    is_half = isinstance(embedding, nn.Embedding) and embedding.weight.dtype in HALF
    if is_half and in_float32 not in embedding._forward_hooks.values():
        embedding.register_forward_hook(in_float32)


def _moved(weight: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A weight on a device in a dtype, converted in chunks of rows on the way, which travel in the smaller dtype."""
    if weight.device.type == device.type and weight.dtype == dtype:
        return weight
    if weight.device.type == device.type or weight.dtype == dtype:
        return weight.to(device, dtype)
    moved = torch.empty_like(weight, device=device, dtype=dtype)
    smaller = min(dtype, weight.dtype, key=lambda kind: kind.itemsize)
    rows = max(1, CHUNK * len(weight) // max(1, weight.numel())) if weight.dim() else 1
    for there, here in zip(torch.atleast_1d(moved).split(rows), torch.atleast_1d(weight).split(rows), strict=True):
        there.copy_(here.to(smaller).to(device))
    return moved


@contextlib.contextmanager
def computing_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """In this context, a model with matrices in half precision computes in float32, without autocast.

    Each layer's matrices are float32 copies only while it is called, so the memory needed is that of one layer, and of a
    tied output head. Another plain head gives zeros: it is the largest matrix, and no trial needs its numbers.
    """
    kept: dict[nn.Parameter, Tensor] = {}

    def convert(parameters: list[nn.Parameter], *_: object) -> None:
        for parameter in parameters:
            kept[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(parameters: list[nn.Parameter], *_: object) -> None:
        for parameter in parameters:
            parameter.data = kept.pop(parameter)

    hooks, head, embedding = [], model.get_output_embeddings(), model.get_input_embeddings()
    for module, parameters in _called(model):
        halves = [parameter for parameter in parameters if parameter.dtype in HALF]
        if isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_hook(in_float32))
        elif halves and module is head and type(head) is nn.Linear and head.weight is not embedding.weight:
            for parameter in halves:  # some models read its dtype
                kept[parameter] = parameter.data
                parameter.data = parameter.new_zeros((), dtype=torch.float32).expand_as(parameter)
            vars(head)["forward"] = lambda states: states.new_zeros(*states.shape[:-1], head.out_features)
        elif module is head:
            convert(halves)
        elif halves:
            hooks.append(module.register_forward_pre_hook(partial(convert, halves)))
            hooks.append(module.register_forward_hook(partial(restore, halves)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if head is not None:
            vars(head).pop("forward", None)
        restore(list(kept))


def _called(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The layers of a model with all of their parameters, and the modules above and beside them with their own."""
    yield model, list(model.parameters(recurse=False))
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, list(layer.parameters())) for layer in child)
        else:
            yield from _called(child)


def in_float32(_embedding: nn.Module, _inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    """A forward hook: converts the embedding rows read to float32."""
    return rows.float()


def same_weights(model: M) -> M:
    """A second module with the structure of ``model`` that shares its parameters and buffers, so it needs no memory.

    Adapters added to ``model`` later do not affect it.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def inference_copy(lm: PreTrainedModel, compute_dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model in evaluation mode, for forward passes under autocast, with its current weights.

    In half precision the matrices of linear layers are converted once; autocast would cast each of them at every token.
    The rest (embeddings, norms, biases) is shared.
    """
    return halve_matrices(same_weights(lm).eval(), compute_dtype)


def as_sampled(compute_dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    """`halve_matrices` for a single weight of a module, for copies made weight by weight."""

    def convert(module: nn.Module, weight: Tensor) -> Tensor:
        halves = compute_dtype in HALF and isinstance(module, (nn.Linear, Conv1D))
        is_matrix = halves and weight.ndim == 2 and weight.dtype == torch.float32
        return weight.to(compute_dtype) if is_matrix else weight

    return convert


def refresh(inference: PreTrainedModel, lm: PreTrainedModel) -> None:
    """Copy the current weights of ``lm`` into its `inference_copy`, without new memory."""
    for module, trained in zip(inference.modules(), lm.modules(), strict=True):
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight is not trained.weight:
            module.weight.data.copy_(trained.weight.data)


TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that multiply the same states."""


def join_matrices(model: nn.Module, *, but: Iterable[Tensor] = ()) -> None:
    """Move matrices that multiply the same states next to each other, in place, so that one product can take them (`joined`).

    ``but`` are weights that must stay where they are.
    """
    kept = {tensor.data_ptr() for tensor in but}
    for module in model.modules():
        for names in TOGETHER:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(is_plain_linear(layer) and layer.bias is None for layer in layers):
                weights = [layer.weight for layer in layers]
                same = {weight.dtype for weight in weights}
                if len(same) == 1 and kept.isdisjoint(weight.data_ptr() for weight in weights):
                    parts = torch.cat([weight.data for weight in weights]).split([len(weight) for weight in weights])
                    for weight, part in zip(weights, parts, strict=True):
                        weight.data = part


def joined(*layers: Any) -> Tensor | None:
    """The matrix of several linear layers together, if `join_matrices` has moved them next to each other."""
    weights = [layer.weight.data for layer in layers if is_plain_linear(layer) and layer.bias is None]
    if len(weights) < len(layers):
        return None
    first, rows = weights[0], 0
    for weight in weights:
        is_next = weight.data_ptr() == first.data_ptr() + rows * first.shape[1] * first.element_size()
        if not is_next or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        rows += len(weight)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def halve_frozen(model: M, compute_dtype: torch.dtype, *, but: Iterable[nn.Module] = ()) -> M:
    """`halve_matrices` of a frozen model, without keeping the old weights in memory.

    On a CPU loaded weights are parts of a memory-mapped file, and a single one in use keeps the whole file in memory.
    So the other weights are copied to new memory.
    """
    if compute_dtype not in HALF:
        return model
    halve_matrices(model, compute_dtype, but=but)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.dtype != compute_dtype:
            tensor.data = tensor.data.clone()
    return model


def halve_matrices(model: M, compute_dtype: torch.dtype, *, but: Iterable[nn.Module] = ()) -> M:
    """Convert linear layers to the half precision of autocast, in place. Results do not change.

    Args:
        model: a frozen model.
        compute_dtype: the half precision; other dtypes have no effect.
        but: modules to skip.
    """
    kept = {id(module) for module in but}
    for module in model.modules() if compute_dtype in HALF else ():
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in kept and module.weight.dtype == torch.float32:
            module.weight = nn.Parameter(module.weight.detach().to(compute_dtype), requires_grad=False)
    return model


class UntrainedRows:
    """A forward hook of an embedding: blocks gradients into rows that are (nearly) zero when it is created.

    A norm divides by the length of its input, so the gradient into such a row is up to 1,000 times that into others, or
    1,000,000 times if queries and keys also have norms. Gradient clipping would scale all other gradients down to
    nearly 0. transformers does the same for the padding token's row, initialised at zero. A tied output head still
    trains all rows.
    """

    def __init__(self, rows: Tensor, name: str) -> None:
        self.rows, self.name = rows, name
        self.is_said = False

    def __call__(self, _embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        ids = inputs[0]
        self.rows = self.rows.to(ids.device)
        is_untrained = torch.isin(ids, self.rows)
        if is_untrained.any():
            output.register_hook(partial(self._without, ids, is_untrained))

    def _without(self, ids: Tensor, is_untrained: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the rows read, 0 at untrained ones. Warns about them, except for padding, whose gradient is
        0."""
        if not self.is_said:
            read = ids[is_untrained & (gradient != 0).any(dim=-1)].unique().tolist()
            self.is_said = bool(read)
            if read:
                warnings.warn(
                    f"{self.name}: this run reads token {', '.join(map(str, read[:5]))}, whose embedding is (nearly) zero, "
                    "hence untrained. The gradient into such a row is up to a million times too large, so the input "
                    "embedding is not trained. To train it, first set it to the mean of the other rows",
                    stacklevel=1,
                )
        return gradient.masked_fill(is_untrained.unsqueeze(-1), 0.0)


def hold_untrained_rows(model: PreTrainedModel, name: str) -> None:
    """Block gradients into (nearly) zero rows of a model's embedding, in place, for the whole run.

    Models that add position embeddings, such as GPT-2, do not change: their norms never read such a row alone, so its
    gradient is of normal size.

    Args:
        model: the model, before it gets adapters.
        name: its name in a warning.
    """
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or _adds_positions(model):
        return
    sizes = torch.linalg.vector_norm(embedding.weight.detach(), ord=torch.inf, dim=1)
    rows = (sizes <= SMALLEST_ROW * sizes.median()).nonzero().flatten()
    if len(rows):
        embedding.register_forward_hook(UntrainedRows(rows, name))


def _adds_positions(model: PreTrainedModel) -> bool:
    return any(
        isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        for name, module in model.named_modules()
    )


class TiedMatrix:
    """In this context, embedding and output head share one gradient of their tied matrix.

    torch makes a full gradient for each, and adds the embedding's, nearly all zeros, to the head's. Here only the rows
    read are added to the head's gradient, in place: bit for bit the same, for half the memory.

    ``weight`` is the head's matrix. It must not be used otherwise, since its gradient is changed in place. No effect if
    the matrices are not tied, or the embedding does more than read rows.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.embedding = lm.get_input_embeddings()
        self.weight: Tensor = lm.get_output_embeddings().weight

    def __enter__(self) -> "TiedMatrix":
        self.hook = self.embedding.register_forward_hook(self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def _read(self, embedding: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor | None:
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        if not learns or type(embedding) is not nn.Embedding or embedding.weight is not self.weight:
            return None
        if embedding.padding_idx is not None or embedding.max_norm is not None or embedding.scale_grad_by_freq:
            return None
        hooks = [hook for hook in embedding._forward_hooks.values() if hook != self._read]
        if embedding.sparse or not all(hook is in_float32 or isinstance(hook, UntrainedRows) for hook in hooks):
            return None  # another hook may change the rows
        rows, self.weight = _TiedRows.apply(embedding.weight, *inputs)
        for hook in hooks:
            read = hook(embedding, inputs, rows)
            rows = rows if read is None else read
        return rows


class _TiedRows(torch.autograd.Function):
    """The rows ``weight[ids]``, and ``weight`` itself for the head."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.num_rows = weight.shape[0]
        ctx.set_materialize_grads(False)
        return nn.functional.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_rows: Tensor | None, of_weight: Tensor | None) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if of_rows is None:
            return of_weight, None
        if of_weight is None:  # the head is not part of the loss
            return _sums(of_rows, ids, ctx.num_rows), None
        if capabilities(ids.device).queues:
            read, places = _in_order(ids.flatten())
            return of_weight.index_add_(0, read, _sums(of_rows.flatten(0, -2), places, len(read))), None
        read, places = ids.unique(return_inverse=True)
        of_weight[read] += _sums(of_rows, places, len(read))
        return of_weight, None


def _in_order(ids: Tensor) -> tuple[Tensor, Tensor]:
    """``ids.unique(return_inverse=True)``, filled up with id 0 to as many entries as there are tokens: a device need not be
    waited for to know how many there are."""
    ordered, order = ids.sort(stable=True)
    begins = nn.functional.pad((ordered[1:] != ordered[:-1]).long().cumsum(0), (1, 0))
    return torch.zeros_like(ordered).scatter_(0, begins, ordered), torch.empty_like(begins).scatter_(0, order, begins)


def _sums(of_rows: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """For each of ``num_rows`` rows, the sum over the tokens that read it, in token order."""
    sums: Tensor = torch.ops.aten.embedding_dense_backward(of_rows, places, num_rows, -1, False)
    return sums
