"""Settings of PPO."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import changed, fraction, not_negative, positive
from heedful.configs.ppo_update import PPOUpdateOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PPOUpdateOptions):
    """PPO: improve a policy against a reward while it stays near its reference."""

    gamma: float = 1.0
    """Discount a token."""
    gae_lambda: float = 0.95
    """Bias against variance of the advantages: 1 trusts rewards, 0 trusts values."""
    entropy_coef: float = 0.0
    """Bonus on the policy's entropy; raising it keeps responses diverse."""

    kl_target: float | None = None
    """KL in nats a response that kl-coef is steered to; None keeps kl-coef fixed."""
    kl_horizon: int = 10_000
    """Responses over which the steering acts; raising it makes it slower."""

    critic: Literal["shared", "separate", "reward"] = "shared"
    """shared: a value head on the policy's trunk. separate: a model of its own. reward: a model of its own that starts as
    the first reward model among the rewards, head included; it must share the policy's tokenizer."""
    value_model: str | None = None
    """Where a separate critic starts from; None is the policy's model."""
    value_coef: float = 0.1
    """Weight of the value loss beside the policy loss (shared critic)."""
    value_clip_range: float | None = 0.2
    """How far values may move from the old ones before their gradient stops; None is off."""
    value_learning_rate: float | None = None
    """Learning rate of the value head or separate critic; None is learning-rate."""

    score_norm_samples: int = 0
    """Reference responses whose scores set mean 0 and standard deviation 1 before training; 0 leaves scores as they are."""
    score_norm_running: bool = False
    """Shift and scale scores by the mean and standard deviation of all scores so far, those of the step included."""
    whiten_rewards: bool = False
    """Scale the per-token rewards of a batch to variance 1."""

    def __post_init__(self) -> None:
        self.check_update()
        positive(self, "kl_target", "kl_horizon", "value_clip_range", "value_learning_rate")
        not_negative(self, "entropy_coef", "value_coef", "score_norm_samples")
        fraction(self, "gamma", "gae_lambda")
        if self.score_norm_samples == 1:
            raise ConfigError("--score-norm-samples must be 0 or at least 2: one sample has no standard deviation")
        if self.score_norm_running and self.score_norm_samples:
            raise ConfigError(
                "--score-norm-running measures scores while it trains, --score-norm-samples before; leave out one of the two"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                "--kl-target steers --kl-coef by factors, which cannot move it away from 0; set --kl-coef above 0"
            )
        if self.kl_target is None and changed(self, "kl_horizon"):
            raise ConfigError(f"--kl-horizon {self.kl_horizon} belongs to --kl-target, which is not set; add it")
        if self.kl_target is not None and self.rollout_batch_size >= 5 * self.kl_horizon:
            raise ConfigError(
                f"--kl-horizon {self.kl_horizon} is too short for --rollout-batch-size {self.rollout_batch_size}: one step "
                f"could take all of --kl-coef away, or more; make it at least {self.rollout_batch_size // 5 + 1}"
            )
        if self.action == "response" and self.rollout_batch_size < 2:
            raise ConfigError(
                f"--rollout-batch-size is {self.rollout_batch_size}, but with --action response advantages are whitened over "
                "responses, and of a single one nothing is left; make it at least 2"
            )
        if self.value_model is not None and self.critic != "separate":
            raise ConfigError("--value-model belongs to a separate critic: add --critic separate")
        if self.quantize != "none" and self.critic == "reward":
            raise ConfigError(
                f"--quantize {self.quantize} does not reach a critic that starts as a reward model; use --critic shared or "
                "--critic separate"
            )
        unused = changed(self, "gamma", "gae_lambda") if self.action == "response" else []
        if unused:
            raise ConfigError(
                f"{unused[0]} spreads rewards over tokens, but with --action response the response is one action; leave out "
                "one of the two"
            )
        if self.critic_warmup_steps and self.critic == "shared" and self.value_coef == 0:
            raise ConfigError("--critic-warmup-steps with --value-coef 0 trains nothing; raise --value-coef")
