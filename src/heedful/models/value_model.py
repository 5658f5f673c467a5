"""A value model of its own: a trunk and a scalar head, when the critic does not share the policy's trunk."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.hub import local_model
from heedful.models.adapters import save_model
from heedful.models.checkpoints import load_trunk, save_tensors
from heedful.models.device import autocast, scale_gradient
from heedful.models.heads import check_causal, scalar_head, scatter
from heedful.models.packing import response_tokens, token_states
from heedful.models.policy import VALUE_HEAD, load_head
from heedful.models.quantize import FourBit


class ValueModel(nn.Module):
    """A trunk with a scalar head, zero at the start, that gives the value of the state before each response token."""

    def __init__(self, trunk: PreTrainedModel, hidden_size: int, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.compute_dtype = compute_dtype
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.value_head = scalar_head(hidden_size, std=0.0).to(trunk.dtype)

    def forward(self, ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> Tensor:
        """Values ``[batch, time]``, zero outside the mask; the layout is that of `Policy.forward`."""
        responses = response_tokens(attention_mask, response_mask)
        with autocast(ids.device, self.compute_dtype):
            before = token_states(self.trunk, ids, attention_mask)[:-1][responses[1:]]
        values = self.value_head(before.to(self.value_head.weight.dtype)).squeeze(-1)
        return scale_gradient(scatter(values, response_mask), self.grad_scaler)


def load_value_model(
    name: str,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    trunk: PreTrainedModel | None = None,
    four_bit: FourBit | None = None,
) -> ValueModel:
    """A value model on the trunk of any causal model; a ``value_head`` folder in it is loaded too.

    ``trunk`` is that of ``name`` where it is in memory already. Raises CheckpointError where the model is missing,
    incomplete or looks ahead.
    """
    trunk = load_trunk(name, four_bit) if trunk is None else trunk
    check_causal(trunk, name)
    model = ValueModel(trunk, trunk.config.hidden_size, compute_dtype=compute_dtype)
    head_file = Path(local_model(name)) / VALUE_HEAD
    if head_file.is_file():
        load_head(model.value_head, head_file)
    return model.to(device)


def save_value_model(model: ValueModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the trunk in Hugging Face format with the value head in a folder of its own."""
    save_model(model.trunk, folder)
    tokenizer.save_pretrained(folder)
    save_tensors(model.value_head.state_dict(), folder / VALUE_HEAD)
