"""A2C as a preset: PPO with one unclipped step per rollout batch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from heedful.configs.objective import PolicyLoss
from heedful.configs.ppo import PPOConfig
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True, kw_only=True)
class A2CConfig(PPOConfig):
    """A2C: improve a policy against a reward with one unclipped step per rollout batch."""

    algorithm: ClassVar[str] = "a2c"
    """The command, and the name of its runs."""

    policy_loss: PolicyLoss = "a2c"
    """a2c: advantage times log-prob, without a ratio, so one optimizer step per rollout batch. clip: PPO's clipped
    surrogate."""
    ppo_epochs: Annotated[int, POSITIVE] = 1
    """Passes over a rollout batch; more than one needs policy-loss clip."""
    minibatch_size: Annotated[int, NOT_NEGATIVE] = 0
    """Responses per optimizer step. 0 is the whole rollout batch."""
    value_clip_range: Annotated[float | None, POSITIVE] = None
    """How far values may move from the old ones before their gradient stops. None is off."""

    def __post_init__(self) -> None:
        if self.minibatch_size == 0:
            object.__setattr__(self, "minibatch_size", self.rollout_batch_size)
        super().__post_init__()
