"""How weights are kept: in half precision, shared with the copy that samples, one gradient for a matrix of two uses, and rows
of an embedding that nobody trained."""

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.kernels.device import HALF

M = TypeVar("M", bound=nn.Module)

SMALLEST_ROW = 0.01
"""An embedding's row whose largest number is below this share of the median row's counts as untrained."""


def store_matrices(
    model: PreTrainedModel, dtype: torch.dtype, *, but: nn.Module | None = None, experts: Iterable[str] = ()
) -> None:
    """Convert the matrices of linear layers, of the token embedding and of experts to a half precision, in place.

    Norms, biases and other parameters stay in float32, and so do the embedding's rows once they are read. Under autocast to
    the same dtype all products are those of float32 weights; the numbers change only where the embedding's rows are rounded,
    which those of a checkpoint in that dtype are not. Tied matrices stay tied. The experts of a mixture are multiplied in the
    dtype in which they are stored, autocast or not (transformers' ``grouped_mm``; few architectures have experts that
    autocast casts), so their products are in half precision from then on.

    Args:
        model: the model; matrices that are not in float32, such as those in 4 bits, are left as they are.
        dtype: that of the products; float32 changes nothing.
        but: a layer to leave as it is.
        experts: names of parameters that hold the matrices of all experts of a layer, to be converted too.
    """
    if dtype == torch.float32:
        return
    embedding = model.get_input_embeddings()
    for module in model.modules():
        matrix = isinstance(module, nn.Linear | Conv1D) or (module is embedding and isinstance(module, nn.Embedding))
        if matrix and module is not but and module.weight.dtype == torch.float32:
            module.weight.data = module.weight.data.to(dtype)
    for parameter in map(model.get_parameter, experts):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    if isinstance(embedding, nn.Embedding) and embedding.weight.dtype == dtype:
        embedding.register_forward_hook(in_float32)


def in_float32(_embedding: nn.Module, _inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    """A forward hook: the rows that were read, in float32."""
    return rows.float()


def same_weights(model: M) -> M:
    """A second module with the structure of ``model`` that shares its parameters and buffers, so it takes no memory.

    Adapters added to ``model`` later are not on it: it stays the model as it was.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def inference_copy(lm: PreTrainedModel, compute_dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model in evaluation mode, for forward passes under autocast, with the weights it has now.

    In half precision the matrices of linear layers are copied once; autocast would cast each of them again at every
    token. Everything else (embeddings, norms, biases) is shared.
    """
    return halve_matrices(same_weights(lm).eval(), compute_dtype)


def as_sampled(compute_dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    """What `halve_matrices` makes of a weight, given the module that holds it: for a copy that is made weight by weight."""

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


def halve_frozen(model: M, compute_dtype: torch.dtype, *, but: Iterable[nn.Module] = ()) -> M:
    """`halve_matrices` of a model that is never trained, without holding the old weights in memory.

    On a CPU loaded weights are parts of a mapped file, and one of them that is still used keeps the whole file in
    memory. So what was not halved is copied to memory of its own.
    """
    if compute_dtype not in HALF:
        return model
    halve_matrices(model, compute_dtype, but=but)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.dtype != compute_dtype:
            tensor.data = tensor.data.clone()
    return model


def halve_matrices(model: M, compute_dtype: torch.dtype, *, but: Iterable[nn.Module] = ()) -> M:
    """Convert linear layers to the half precision that autocast would cast them to, in place. Results do not change.

    Args:
        model: a model that is not trained.
        compute_dtype: the half precision; for any other dtype nothing changes.
        but: modules to leave as they are.
    """
    kept = {id(module) for module in but}
    for module in model.modules() if compute_dtype in HALF else ():
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in kept and module.weight.dtype == torch.float32:
            module.weight = nn.Parameter(module.weight.detach().to(compute_dtype), requires_grad=False)
    return model


class UntrainedRows:
    """A forward hook of an embedding: no gradient flows into rows that are zero, or next to zero, when it is made.

    A norm divides by the length of what it reads, so the gradient into such a row is up to 1,000 times that into others, or
    1,000,000 times if queries and keys have norms of their own. Clipping would scale everything else down to nothing.
    transformers too keeps the padding token's row, which it starts at zero, out of the gradient. An output head that shares
    the matrix still learns all rows.
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
        """The gradient of the rows that were read, 0 at untrained ones. What fills up a batch has none, so needs no word."""
        if not self.is_said:
            read = ids[is_untrained & (gradient != 0).any(dim=-1)].unique().tolist()
            self.is_said = bool(read)
            if read:
                warnings.warn(
                    f"{self.name}: the embedding of token {', '.join(map(str, read[:5]))} is zero or next to zero, as nobody "
                    "trained it, and this run reads it. The gradient into such a row is up to a million times too large, so "
                    "it stays as it is where it is read. To learn it, first set it to the mean of the other rows",
                    stacklevel=1,
                )
        return gradient.masked_fill(is_untrained.unsqueeze(-1), 0.0)


def hold_untrained_rows(model: PreTrainedModel, name: str) -> None:
    """Keep gradients out of the rows of a model's embedding that are (next to) zero, in place, for the whole run.

    Models that add position embeddings, such as GPT-2, are left as they are: their norms never read such a row by itself, and
    its gradient is as large as that of any other.

    Args:
        model: the model, before it gets adapters.
        name: what a warning calls it.
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
    """While entered, a model's embedding and its output head share one gradient of the matrix that they share.

    By itself torch makes a gradient of the whole matrix for each, and adds the embedding's, nearly all zeros, to the
    head's. Here only the rows that were read are added to the head's gradient, in place: bit for bit the same numbers
    in each pass, for half the memory.

    ``weight`` is what the head multiplies by. It must be used for nothing else, since its gradient is changed in place.
    If the head's matrix is not the embedding's, or the embedding does more than read rows, nothing changes.
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
            return None  # a hook may change the rows
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
        if of_weight is None:  # the head had no part in the loss
            return _sums(of_rows, ids, ctx.num_rows), None
        read, places = ids.unique(return_inverse=True)
        of_weight[read] += _sums(of_rows, places, len(read))
        return of_weight, None


def _sums(of_rows: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """For each of ``num_rows`` rows, the sum over the tokens that read it, in their order."""
    sums: Tensor = torch.ops.aten.embedding_dense_backward(of_rows, places, num_rows, -1, False)
    return sums
