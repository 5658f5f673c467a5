"""What the options that save memory do to the models of a run."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from heedful.configs.dpo import DPOConfig
from heedful.configs.online import OnlineOptions
from heedful.configs.options import TrainingOptions
from heedful.models.device import resolve_dtype
from heedful.models.heads import checkpoint_layers
from heedful.models.lora import add_adapters, same_weights
from heedful.models.policy import Policy, freeze, load_policy
from heedful.models.quantize import four_bit
from heedful.models.reward_model import RewardModel
from heedful.models.value_model import ValueModel


def prepare(
    module: Policy | ValueModel | RewardModel, config: TrainingOptions, *, base: str, dropout: float = 0.0
) -> None:
    """Adapters and gradient checkpointing, where they are wanted, on what was loaded from ``base`` to be trained.

    transformers recomputes layers in training mode only, so the module is put into it. Raises ConfigError.
    """
    model = _transformer(module)
    if config.lora_rank:
        add_adapters(model, config, base=base, seed=config.seed, dropout=dropout)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
        module.train()


def _transformer(module: Policy | ValueModel | RewardModel) -> PreTrainedModel:
    """The pretrained model in a module."""
    if isinstance(module, Policy):
        return module.lm
    return module.trunk if isinstance(module, ValueModel) else module.classifier


def scale_gradients(modules: Sequence[Policy | ValueModel | RewardModel]) -> None:
    """In float16, one gradient scaler for what one optimizer trains: small gradients would be 0 there."""
    if modules[0].compute_dtype == torch.float16:
        device = next(modules[0].parameters()).device
        scaler = torch.amp.GradScaler(device.type)
        for module in modules:
            module.grad_scaler = scaler


def load_reference(config: OnlineOptions | DPOConfig, policy: Policy) -> Policy:
    """The frozen reference: another model, the policy's loaded once more, or, with LoRA, its very weights.

    For the last, the policy has no adapters yet: those it gets are not on the reference.
    """
    if config.reference is None and config.lora_rank:
        reference = same_weights(policy)
        reference.value_head = None
    else:
        device = reference_device(config, policy.device)
        dtype = resolve_dtype(config.dtype, device)
        smaller = four_bit(config, device, dtype) if device.type == "cuda" else None
        reference = load_policy(config.reference or config.model, device=device, compute_dtype=dtype, four_bit=smaller)
    freeze(reference)
    return reference


def reference_device(config: OnlineOptions | DPOConfig, device: torch.device) -> torch.device:
    """Where the reference lives, the policy being on ``device``."""
    return torch.device("cpu") if config.reference_device == "cpu" else device
