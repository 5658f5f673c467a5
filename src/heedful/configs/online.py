"""Settings that PPO and GRPO share: both sample responses, score them, and learn from them."""

from dataclasses import dataclass

from heedful.configs.checks import multiple, not_negative, positive
from heedful.configs.options import SamplingOptions, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class OnlineOptions(SamplingOptions, TrainingOptions):
    """Where a policy starts, what it maximises, and how rollout batches are made and learned from."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
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
    kl_coef: float = 0.05
    """Price of a nat of KL to the reference. Raising it keeps the text closer to the reference."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that was cut by length."""
    rollout_micro_batch_size: int = 64
    """Responses sampled, or scored by a reward model, at a time. It changes memory and speed, never the responses."""
    eval_prompts: int = 128
    """Most held-out prompts sampled at an evaluation."""
    adam_eps: float = 1e-5
    """Adam's epsilon; 1e-5 is what RL implementations use."""
    learning_rate: float = 3e-6
    """Peak learning rate of the policy; constant inside the epochs of one rollout batch."""

    def check_online(self) -> None:
        self.check_training()
        self.check_sampling()
        positive(self, "steps", "rollout_batch_size", "samples_per_prompt", "ppo_epochs", "minibatch_size")
        positive(self, "clip_range", "temperature", "eval_prompts", "rollout_micro_batch_size")
        not_negative(self, "kl_coef", "missing_eos_penalty")
        multiple(self, "rollout_batch_size", "minibatch_size")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
