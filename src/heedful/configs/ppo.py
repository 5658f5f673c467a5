"""Settings of PPO."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import fraction, multiple, not_negative, positive
from heedful.configs.options import SamplingOptions, TrainingOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPOConfig(SamplingOptions, TrainingOptions):
    """PPO: improve a policy against a reward while it stays near its reference."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, or a Hub name."""
    reference: str | None = None
    """Frozen model that the KL penalty is measured against; None is the policy as it starts."""
    rewards: tuple[str, ...] = ()
    """What to maximise, summed: model:PATH, python:FILE.py:FUNCTION, rule:NAME."""
    chat_template: str = ""
    """Chat template in place of the model's own: plain, or a Jinja file. Saved with the model."""

    steps: int = 100
    """Rollout batches: each is sampled, scored, and learned from."""
    rollout_batch_size: int = 64
    """Responses a step."""
    samples_per_prompt: int = 1
    """Responses to each prompt of a step; rollout-batch-size counts them all."""
    ppo_epochs: int = 4
    """Passes over a rollout batch. More squeeze it harder; policy/approx_kl tells when too hard."""
    minibatch_size: int = 64
    """Responses an optimizer step."""
    clip_range: float = 0.2
    """How far the probability ratio may move before its gradient stops."""
    gamma: float = 1.0
    """Discount a token."""
    gae_lambda: float = 0.95
    """Bias against variance of the advantages: 1 trusts rewards, 0 trusts values."""
    entropy_coef: float = 0.0
    """Bonus on the policy's entropy; raising it keeps responses diverse."""

    kl_coef: float = 0.05
    """Price of a nat of KL to the reference. Raising it keeps the text closer to the reference."""
    kl_target: float | None = None
    """KL in nats a response that kl-coef is steered to; None keeps kl-coef fixed."""
    kl_horizon: int = 10_000
    """Responses over which the steering acts; raising it makes it slower."""

    critic: Literal["shared", "separate"] = "shared"
    """shared: a value head on the policy's trunk. separate: a model of its own."""
    value_model: str | None = None
    """Where a separate critic starts from; None is the policy's model."""
    value_coef: float = 0.1
    """Weight of the value loss beside the policy loss (shared critic)."""
    value_clip_range: float | None = 0.2
    """How far values may move from the old ones before their gradient stops; None is off."""
    value_learning_rate: float | None = None
    """Learning rate of the value head or separate critic; None is learning-rate."""

    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that was cut by length."""
    score_norm_samples: int = 0
    """Reference responses whose scores set mean 0 and standard deviation 1 before training; 0 leaves scores as they are."""
    whiten_rewards: bool = False
    """Scale the per-token rewards of a batch to variance 1."""
    rollout_micro_batch_size: int = 64
    """Responses sampled, or scored by a reward model, at a time. It changes memory and speed, never the responses."""
    eval_prompts: int = 128
    """Most held-out prompts sampled at an evaluation."""
    adam_eps: float = 1e-5
    """Adam's epsilon; 1e-5 is what RL implementations use."""
    learning_rate: float = 3e-6
    """Peak learning rate of the policy; constant inside the epochs of one rollout batch."""

    def __post_init__(self) -> None:
        self.check_training()
        self.check_sampling()
        positive(
            self, "steps", "rollout_batch_size", "samples_per_prompt", "ppo_epochs", "minibatch_size", "clip_range"
        )
        positive(self, "kl_target", "kl_horizon", "value_clip_range", "value_learning_rate", "temperature")
        positive(self, "eval_prompts", "rollout_micro_batch_size")
        not_negative(self, "entropy_coef", "kl_coef", "value_coef", "missing_eos_penalty", "score_norm_samples")
        fraction(self, "gamma", "gae_lambda")
        multiple(self, "rollout_batch_size", "minibatch_size")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
        if self.score_norm_samples == 1:
            raise ConfigError("--score-norm-samples must be 0 or at least 2: one sample has no standard deviation")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                "--kl-target steers --kl-coef by factors, which cannot move it away from 0; set --kl-coef above 0"
            )
        if self.value_model is not None and self.critic != "separate":
            raise ConfigError("--value-model belongs to a separate critic: add --critic separate")
