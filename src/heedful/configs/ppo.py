"""PPO as a preset."""

from dataclasses import dataclass
from typing import ClassVar

from heedful.configs.objective import KLKind
from heedful.configs.online import OnlineConfig


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """PPO: improve a policy against a reward while it stays near its reference."""

    algorithm: ClassVar[str] = "ppo"
    """The command, and the name of its runs."""

    kl_kind: KLKind | None = "k1"
    """Estimator of the penalty. In the reward k1: the return is then score minus kl-coef times KL. In the loss k2 (its
    gradient is the KL's in expectation), k3 (GRPO's) or weighted-k3 (k3 times the probability ratio: in expectation the KL's
    gradient, also in a rollout batch's later updates); k1's gradient is zero in expectation there."""
