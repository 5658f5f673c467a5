"""Matrices stored in half precision, with the stream between layers in float32 as before."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


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
