"""A separate value model, for a critic that does not share the policy's trunk: a trunk and a scalar head."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.kernels.device import autocast, scale_gradient
from heedful.kernels.layout import scatter
from heedful.kernels.packing import before_each, response_tokens, token_states
from heedful.models.heads import scalar_head


class ValueModel(nn.Module):
    """A trunk with a scalar head, which gives the value of the state before each response token.

    Args:
        trunk: a causal model without its head.
        hidden_size: width of the trunk's hidden states.
        compute_dtype: as in `heedful.models.policy.Policy`.

    The head is zero at the start, and so are all values.
    """

    def __init__(self, trunk: PreTrainedModel, hidden_size: int, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.compute_dtype = compute_dtype
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.value_head = scalar_head(hidden_size, std=0.0).to(torch.promote_types(trunk.dtype, torch.float32))

    def forward(self, ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> Tensor:
        """Values ``[batch, time]``, zero outside the mask. The arguments are laid out as in `Policy.forward`."""
        responses = response_tokens(attention_mask, response_mask)
        with autocast(ids.device, self.compute_dtype):
            before = token_states(self.trunk, ids, attention_mask, before_each(responses))
        values = self.value_head(before.to(self.value_head.weight.dtype)).squeeze(-1)
        return scale_gradient(scatter(values, response_mask), self.grad_scaler)

    def zero(self) -> Tensor:
        """0, from a pass over one token that reads every weight: what a rank passes through that has no rows left."""
        ids = torch.tensor([[1, 2]], device=self.trunk.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return 0.0 * self(ids, mask, mask[:, 1:]).sum()
