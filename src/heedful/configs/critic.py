"""Settings of the critic, whose values the advantages of PPO and A2C are measured against."""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.checks import refuse
from heedful.configs.objective import ObjectiveOptions
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE
from heedful.errors import ConfigError

HEAD_LEARNING_RATE = 1e-3
"""A value head starts from nothing and is small: it wants a far larger rate than a trained network."""


@dataclass(frozen=True, kw_only=True)
class CriticOptions(ObjectiveOptions):
    """Which network the critic is, and how it learns."""

    SECTION = "algorithm"

    critic: Literal["shared", "separate", "reward"] = "shared"
    """shared: a value head that reads the policy's trunk. separate: a model of its own. reward: a model of its own that
    starts as the first reward model among the rewards, head included; it must share the policy's tokenizer."""
    value_model: str | None = None
    """Where a separate critic starts from. None is the policy's model."""
    value_epochs: Annotated[int, POSITIVE] = 2
    """Passes of the value head over a rollout batch (shared critic). They cost next to nothing: the trunk has no pass."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """How much the value loss also pulls the trunk, beside the policy loss (shared critic). 0 leaves it to the policy."""
    value_clip_range: Annotated[float | None, POSITIVE] = 0.2
    """How far values may move from the old ones before their gradient stops. None is off."""
    value_learning_rate: Annotated[float | None, POSITIVE] = None
    """Learning rate of the critic. None is 1e-3 for a value head (shared), and learning-rate for a network of its own."""
    critic_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """First steps in which only the critic learns (of a shared one: only the value head)."""

    def check(self) -> None:
        super().check()
        if not self.estimator.critic:
            refuse(
                self,
                *(
                    "critic",
                    "value_model",
                    "value_epochs",
                    "value_coef",
                    "value_clip_range",
                    "value_learning_rate",
                    "critic_warmup_steps",
                ),
                because=f"belongs to a critic, and --advantage {self.advantage} has none; leave it out, or use --advantage "
                "gae (heedful ppo, a2c)",
            )
        if self.value_model is not None and self.critic != "separate":
            raise ConfigError("--value-model belongs to a separate critic: add --critic separate")
        if self.critic != "shared":
            refuse(
                self,
                *("value_coef", "value_epochs"),
                because=f"is about a value head on the policy's trunk, but with --critic {self.critic} the critic has a "
                "network of its own; leave it out, or set --value-learning-rate",
            )
        if self.policy_loss == "a2c" and self.critic != "shared":
            refuse(
                self,
                "value_clip_range",
                because="bounds how far values move in an update, but --policy-loss a2c makes one step, before which they "
                "have not moved; leave it out, or use --policy-loss clip (heedful ppo)",
            )
