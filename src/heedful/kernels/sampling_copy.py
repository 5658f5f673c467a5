"""A language model as sampling runs it: the weights of the one in training, its matrices in the compute dtype."""

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.kernels.device import HALF

M = TypeVar("M", bound=nn.Module)


def same_weights(model: M) -> M:
    """A module with the structure of ``model`` and its very parameters and buffers, not a copy of them.

    Adapters put on ``model`` afterwards are not on it, so it is the model as it was, for no memory.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def inference_copy(lm: PreTrainedModel, compute_dtype: torch.dtype) -> PreTrainedModel:
    """The model in evaluation mode, for forward passes under autocast; its weights are those of this moment.

    In half precision the matrices of linear layers are copied once, where autocast would cast each of them again at every
    token. Everything else (embeddings, norms, biases) is shared.
    """
    return halve_matrices(same_weights(lm).eval(), compute_dtype)


class PackedLinear(nn.Module):
    """A linear layer whose matrix lies as oneDNN, torch's library for CPUs, multiplies it: a copy for inference.

    For few rows a product is up to twice as fast as where the library puts the matrix in that order at each call.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)

    @staticmethod
    def is_possible(module: nn.Linear) -> bool:
        return (
            module.weight.device.type == "cpu"
            and module.weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")


def pack_linears(model: PreTrainedModel) -> PreTrainedModel:
    """Every linear layer in bfloat16 on a CPU as a `PackedLinear`, in place. A model with adapters stays as it is: PEFT's
    layers read the matrices of those that they lie on."""
    for parent in list(model.modules()) if not getattr(model, "peft_config", None) else ():
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear and PackedLinear.is_possible(module):
                setattr(parent, name, PackedLinear(module))
    return model


def refresh(inference: PreTrainedModel, lm: PreTrainedModel) -> None:
    """Give an `inference_copy` of a model its weights of this moment, in the memory that it has."""
    for module, trained in zip(inference.modules(), lm.modules(), strict=True):
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight is not trained.weight:
            module.weight.data.copy_(trained.weight.data)


def halve_frozen(model: M, compute_dtype: torch.dtype, *, but: Iterable[nn.Module] = ()) -> M:
    """`halve_matrices` of a model that is never trained, in no more memory than its weights need.

    On a CPU the weights as loaded are parts of a mapped file, and a single one that is left keeps all its pages: what was not
    halved gets memory of its own.
    """
    if compute_dtype not in HALF:
        return model
    halve_matrices(model, compute_dtype, but=but)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.dtype != compute_dtype:
            tensor.data = tensor.data.clone()
    return model


def halve_matrices(model: M, compute_dtype: torch.dtype, *, but: Iterable[nn.Module] = ()) -> M:
    """Linear layers with their matrices in the half precision that autocast casts them to, in place: no result changes.

    For what is not trained. Modules in ``but`` stay as they are, and nothing changes where ``compute_dtype`` is not half.
    """
    kept = {id(module) for module in but}
    for module in model.modules() if compute_dtype in HALF else ():
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in kept and module.weight.dtype == torch.float32:
            module.weight = nn.Parameter(module.weight.detach().to(compute_dtype), requires_grad=False)
    return model
