"""Rows of an embedding that nobody trained: they are read as they are, and get no gradient from being read."""

import warnings
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SMALLEST_ROW = 0.01
"""A row whose largest number is below this share of the median row's counts as untrained."""


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
