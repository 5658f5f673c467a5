"""What PPO maximises in an update, how often, and what is trained beside it."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import changed, fraction, not_negative, positive
from heedful.configs.online import OnlineOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPOUpdateOptions(OnlineOptions):
    """The policy loss, its KL penalty, when an update ends, and the mix with demonstrations."""

    action: Literal["token", "response"] = "token"
    """What is one action: each token, or the whole response, with one advantage and one probability ratio; its value is
    that of the prompt, so gamma and gae-lambda do not apply."""
    policy_loss: Literal["clip", "a2c"] = "clip"
    """clip: PPO's clipped surrogate. a2c: advantage times log-prob, without a ratio, so one optimizer step a rollout
    batch."""
    clip_range_high: float | None = None
    """How far the ratio may rise, where that is not clip-range."""
    dual_clip: float | None = None
    """Above 1: a bad action counts at most this many times its advantage, however much likelier it became; None is off."""

    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL penalty goes: off the rewards, or into the loss as its mean over tokens, with gradient."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the penalty. In the reward k1: the return is then score minus kl-coef times KL. In the loss k2 (its
    gradient is the KL's in expectation) or k3 (GRPO's); k1's gradient is zero in expectation there."""

    approx_kl_limit: float | None = None
    """Once policy/approx_kl of a minibatch is above this, it and the rest of the rollout batch are not learned from; None
    is off."""
    critic_warmup_steps: int = 0
    """First steps in which the critic alone learns (a shared one: the value head alone)."""

    ptx_data: str | None = None
    """Demonstrations or plain text whose likelihood is kept up (PPO-ptx), in the forms of heedful sft."""
    ptx_coef: float = 0.0
    """Weight of their loss, a mean over tokens as the policy loss is, on as many records as a minibatch has responses."""
    ema_decay: float = 0.0
    """Decay an optimizer step of an average of the policy's weights, which is then what is evaluated and saved, not what
    samples; 0 is off (InstructGPT: 0.992)."""

    def check_update(self) -> None:
        self.check_online()
        positive(self, "clip_range_high", "dual_clip", "approx_kl_limit")
        not_negative(self, "critic_warmup_steps", "ptx_coef")
        fraction(self, "ema_decay")
        if self.ema_decay == 1:
            raise ConfigError(
                f"--ema-decay must be below 1, got {self.ema_decay}: the average would never leave the start"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(
                f"--dual-clip must be greater than 1, got {self.dual_clip}: a ratio of 1 is not to be cut"
            )
        if self.policy_loss == "a2c":
            self._check_a2c()
        if self.kl_in == "loss" and self.kl_kind == "k1":
            raise ConfigError(
                "--kl-in loss does not go with --kl-kind k1, whose gradient is zero in expectation: add --kl-kind k2 or "
                "--kl-kind k3"
            )
        if self.critic_warmup_steps >= self.steps:
            raise ConfigError(
                f"--critic-warmup-steps {self.critic_warmup_steps} leaves the policy none of --steps {self.steps} to learn "
                "in; lower it, or raise --steps"
            )
        if self.ptx_data is not None and not self.ptx_coef:
            raise ConfigError("--ptx-data has no effect with --ptx-coef 0; add --ptx-coef, such as 1")
        if self.ptx_coef and self.ptx_data is None:
            raise ConfigError(f"--ptx-coef {self.ptx_coef} weighs the loss of demonstrations: add --ptx-data")

    def _check_a2c(self) -> None:
        unused = changed(self, "clip_range", "clip_range_high", "dual_clip", "approx_kl_limit")
        if unused:
            raise ConfigError(f"{unused[0]} is about the probability ratio, which --policy-loss a2c does not have")
        if self.ppo_epochs > 1 or self.minibatch_size != self.rollout_batch_size:
            raise ConfigError(
                "--policy-loss a2c has no ratio that corrects for a policy which has moved since it sampled, so it makes one "
                f"step a rollout batch: --ppo-epochs 1 and --minibatch-size {self.rollout_batch_size}, got --ppo-epochs "
                f"{self.ppo_epochs} and --minibatch-size {self.minibatch_size} (--micro-batch-size bounds the memory)"
            )
