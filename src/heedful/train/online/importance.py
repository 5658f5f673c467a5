"""``--importance``: advantages weighed by how much likelier each token was under the policy than to be drawn."""

from typing import Literal

import torch
from torch import Tensor

from heedful import core
from heedful.configs.online import OnlineConfig
from heedful.train.online.respond import Scored


def weigh(advantages: Tensor, scored: Scored, config: OnlineConfig) -> tuple[Tensor, dict[str, float]]:
    """Advantages ``[batch, time]`` times importance weights, and the weights' metrics; as they are without ``importance``.

    Every surrogate is proportional to the advantage, so this weighs each token's objective and gradient; entropy bonus and
    KL penalty are not weighed.
    """
    if config.importance == "none":
        return advantages, {}
    assert scored.old is not None
    mask = scored.rollouts.batch.response_mask
    if config.mask_truncated:  # the weights are those of what is learned from
        mask = mask & ~scored.rollouts.truncated.unsqueeze(1)
        if not mask.any():
            return advantages, {}
    level: Literal["token", "sequence"] = "token" if config.importance.startswith("token") else "sequence"
    found = core.importance_weights(
        scored.old.logprobs,
        scored.rollouts.drawn_logprobs,
        mask,
        level=level,
        bound="truncate" if config.importance.endswith("truncate") else "mask",
        low=config.importance_low,
        high=config.importance_high,
        normalise=config.importance_normalise,
    )
    actions = mask if level == "token" else core.first_in_mask(mask)
    metrics = {
        "importance/weight_mean": core.masked_mean(found.weights, actions),
        "importance/weight_max": found.weights.max(),
        "importance/log_ratio_max": torch.where(actions, found.log_ratio, -torch.inf).max(),
        "importance/bounded_frac": core.masked_mean(found.bounded.to(found.weights.dtype), actions),
        "importance/effective_frac": core.effective_sample_size(found.weights, actions),
    }
    return advantages * found.weights, {name: float(value) for name, value in metrics.items()}
