"""Settings that PPO, A2C and GRPO share: all sample responses, score them, and learn from them."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import multiple, not_negative, positive
from heedful.configs.lora import ReferenceOptions, check_reference_device
from heedful.configs.options import SamplingOptions, TrainingOptions
from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OnlineOptions(RewardOptions, ReferenceOptions, SamplingOptions, TrainingOptions):
    """Where a policy starts, what it maximises, and how rollout batches are made and learned from."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    reference: str | None = None
    """Frozen model that the KL penalty is measured against; None is the policy as it starts."""
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
    kl_coef: float = 0.05
    """Price of a nat of KL to the reference. Raising it keeps the text closer to the reference."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that was cut by length, or put in its place (see missing-eos)."""
    score_clip: float | None = None
    """Scores are kept within plus and minus this, after normalisation where there is one; None is off."""
    missing_eos: Literal["subtract", "replace"] = "subtract"
    """subtract: the penalty comes off the (normalised) score. replace: minus the penalty takes the place of that score."""
    rollout_micro_batch_size: int = 64
    """Responses sampled at a time. It changes memory and speed, never the responses."""
    eval_prompts: int = 128
    """Most held-out prompts sampled at an evaluation."""
    adam_eps: float = 1e-5
    """Adam's epsilon; 1e-5 is what RL implementations use."""
    learning_rate: float = 3e-6
    """Peak learning rate of the policy; constant inside the epochs of one rollout batch."""

    def check_online(self) -> None:
        self.check_training()
        self.check_sampling()
        self.check_rewards()
        check_reference_device(self)
        positive(self, "steps", "rollout_batch_size", "samples_per_prompt", "ppo_epochs", "minibatch_size")
        positive(self, "clip_range", "temperature", "eval_prompts", "rollout_micro_batch_size", "score_clip")
        not_negative(self, "kl_coef", "missing_eos_penalty")
        multiple(self, "rollout_batch_size", "minibatch_size")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
        if self.missing_eos == "replace" and self.missing_eos_penalty == 0:
            raise ConfigError("--missing-eos replace would score cut responses 0; add --missing-eos-penalty, such as 1")
        if self.missing_eos == "replace" and self.response_length != "stop":
            raise ConfigError(
                f"--missing-eos replace with --response-length {self.response_length} would replace every score: such "
                "responses never end by themselves; leave out one of the two"
            )
