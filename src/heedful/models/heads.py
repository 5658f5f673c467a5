"""Scalar heads, dropout, gradient checkpointing, and the parts of a causal language model."""

import torch
from torch import nn
from transformers import PreTrainedModel

from heedful.errors import CheckpointError, ConfigError
from heedful.kernels.device import autocast
from heedful.kernels.layout import hidden_states


def scalar_head(hidden_size: int, *, std: float) -> nn.Linear:
    """A linear map from a hidden state to one number, with weights N(0, std^2) and bias 0."""
    head = nn.Linear(hidden_size, 1)
    nn.init.normal_(head.weight, std=std) if std else nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, in modules and in float attributes.

    Ratios and KL compare two passes of one policy, so both passes must be the same function. ``model.eval()`` is not
    enough: it also switches gradient checkpointing off, and some attentions read a float attribute instead of a module.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input, and recompute the rest in the backward pass (Chen et al. 2016).

    transformers does so only in training mode. Raises ConfigError if the architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"--gradient-checkpointing: {type(model).__name__} does not support it; leave it out")
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # its old name
    enable({"use_reentrant": False})


def split_language_model(lm: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The trunk and the output head of a causal language model, after a check that together they give its logits.

    Some architectures rescale or cap the logits after the head. Log-probs computed from trunk and head would then be
    silently wrong, so CheckpointError is raised for them.
    """
    trunk, head = lm.base_model, lm.get_output_embeddings()
    if head is None or trunk is lm:
        raise CheckpointError(f"{type(lm).__name__}: it has no separate trunk and output head")
    device = next(lm.parameters()).device
    ids = torch.arange(1, 5, device=device).unsqueeze(0)
    was_training = lm.training
    lm.eval()
    # Make logits a thousand times larger, so that a cap also shows with fresh weights.
    hook = head.register_forward_hook(lambda _module, _inputs, output: 1000 * output)
    with torch.no_grad():
        whole = lm(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
        parts = head(hidden_states(trunk, ids)).float()
    hook.remove()
    lm.train(was_training)
    if not torch.allclose(whole, parts, rtol=1e-3, atol=1.0):
        raise CheckpointError(
            f"{type(lm).__name__} changes its logits after the output head (scaling or capping), which heedful does not "
            "support yet; gpt2, llama, qwen2 and qwen3 shapes work"
        )
    return trunk, head


def check_causal(trunk: PreTrainedModel, name: str) -> None:
    """Refuse a trunk that looks ahead: its values would depend on the rest of the response.

    Args:
        trunk: the model without its head; it is left in evaluation mode.
        name: what the error message calls it.

    Raises CheckpointError.
    """
    ids = torch.arange(1, 5, device=trunk.device).unsqueeze(0)
    changed = ids.clone()
    changed[0, -1] = 1
    with torch.no_grad(), autocast(trunk.device, trunk.get_input_embeddings().weight.dtype):
        before = hidden_states(trunk.eval(), ids)[:, :-1]
        after = hidden_states(trunk, changed)[:, :-1]
    if not torch.allclose(before, after, atol=1e-4):
        raise CheckpointError(f"{name}: {type(trunk).__name__} looks at later tokens; a value model must be causal")
