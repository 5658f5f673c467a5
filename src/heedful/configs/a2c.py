"""Settings of advantage actor-critic: those of PPO with other defaults."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.ppo import PPOConfig


@dataclass(frozen=True, kw_only=True)
class A2CConfig(PPOConfig):
    """A2C: improve a policy against a reward with one unclipped step a rollout batch."""

    policy_loss: Literal["clip", "a2c"] = "a2c"
    """a2c: advantage times log-prob, without a ratio, so one optimizer step a rollout batch. clip: PPO's clipped
    surrogate."""
    ppo_epochs: int = 1
    """Passes over a rollout batch; more than one needs policy-loss clip."""
    minibatch_size: int = 0
    """Responses an optimizer step; 0 is the whole rollout batch."""
    value_clip_range: float | None = None
    """How far values may move from the old ones before their gradient stops; None is off."""

    def __post_init__(self) -> None:
        if self.minibatch_size == 0:
            object.__setattr__(self, "minibatch_size", self.rollout_batch_size)
        super().__post_init__()
