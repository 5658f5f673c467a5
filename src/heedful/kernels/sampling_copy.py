"""The copy of a language model that samples: it shares the weights in training, with matrices in the compute dtype."""

import copy
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.kernels.device import HALF
from heedful.kernels.products import is_plain_linear

M = TypeVar("M", bound=nn.Module)


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


class PackedLinear(nn.Module):
    """A linear layer for inference whose matrix is stored in the order that oneDNN, torch's library for CPUs, reads.

    For few rows a product is up to twice as fast as when oneDNN reorders the matrix at each call.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.plain: Tensor | None = None
        self.packed: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)

    @staticmethod
    def is_possible(module: nn.Linear) -> bool:
        """Whether this layer is in bfloat16 on a CPU whose torch has the packed product."""
        return (
            module.weight.device.type == "cpu"
            and module.weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )

    @property
    def weight(self) -> Tensor:
        """The matrix in its usual order, for the few models that read it themselves; from then on it is the only copy."""
        if self.plain is None:
            assert self.packed is not None
            self.plain, self.packed = self.packed.to_dense(), None
        return self.plain

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return nn.functional.linear(x.to(self.dtype), self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")


def pack_linears(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every bfloat16 linear layer on a CPU by a `PackedLinear`, in place.

    A model with adapters is left as it is, because PEFT's layers read the matrices of the layers below them.
    """
    for parent in list(model.modules()) if not getattr(model, "peft_config", None) else ():
        for name, module in list(parent.named_children()):
            if is_plain_linear(module) and PackedLinear.is_possible(module):
                setattr(parent, name, PackedLinear(module))
    return model


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
