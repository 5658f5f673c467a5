"""Sharding of a run's models over its ranks (--shard full)."""

from datetime import timedelta

import torch
from transformers import PreTrainedModel

from heedful.configs.options import ShardOptions
from heedful.distributed import ranks
from heedful.distributed.sharding import make_mesh, shard
from heedful.errors import ConfigError
from heedful.kernels.device import autocast
from heedful.kernels.packing import can_pack
from heedful.models.adapters import expert_parameters
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.value_model import ValueModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in model configurations."""


def divides(config: ShardOptions) -> bool:
    """Whether a run's models are sharded; never in a single process."""
    return config.shard == "full" and ranks.size() > 1


def loading_device(config: ShardOptions, device: torch.device) -> torch.device:
    """Device on which a model is loaded and prepared: the CPU, if it will be sharded."""
    return torch.device("cpu") if divides(config) else device


def divide(config: ShardOptions, device: torch.device, *models: Policy | ValueModel | RewardModel | None) -> None:
    """Shard models over the ranks, in place, if the settings say so. Adapters must be added before; None is skipped.

    Raises ConfigError if the number of ranks does not fit, or a model cannot be sharded.
    """
    if not divides(config):
        return
    if getattr(config, "dtype", None) == "auto" and any(
        m.compute_dtype == torch.float16 for m in models if m is not None
    ):
        raise ConfigError(
            "--shard full: this GPU computes in float16, whose gradient scaling is untested with sharded weights; add "
            "--dtype float32"
        )
    trained = torch.float32 if getattr(config, "weights_dtype", "float32") == "float32" else None
    mesh = make_mesh(device, config.replicas, timedelta(minutes=getattr(config, "distributed_timeout_minutes", 30)))
    for model in models:
        if model is not None:
            _find_out(model)
            shard(model, mesh, sync_every=config.sync_every, compute_dtype=model.compute_dtype, trained=trained)


def _find_out(model: Policy | ValueModel | RewardModel) -> None:
    """Run the once-per-model probes now: later, a pass on only some ranks would hang.

    Raises ConfigError for a mixture of experts with a module per expert: ranks differ in which experts have gradients.
    """
    if isinstance(model, RewardModel):
        model.try_packing()
        inner = model.classifier
    else:
        inner = model.lm if isinstance(model, Policy) else model.trunk
        trunk = inner.base_model
        with autocast(trunk.device, model.compute_dtype):
            can_pack(trunk)
    if is_mixture(inner) and not expert_parameters(inner):
        raise ConfigError(
            f"--shard full: {type(inner).__name__} is a mixture of experts with a module per expert, and ranks would differ "
            "in the experts that get gradients; leave out --shard"
        )


def is_mixture(model: PreTrainedModel) -> bool:
    """Whether a model is a mixture of experts."""
    settings = model.config.get_text_config()
    return any((getattr(settings, name, None) or 0) > 1 for name in EXPERTS)
