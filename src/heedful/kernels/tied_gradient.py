"""One gradient for a matrix that both the embedding and the output head use."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.kernels.stored import in_float32
from heedful.kernels.untrained_rows import UntrainedRows


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
