"""Settings of learning from rewards of the policy's own responses. PPO, A2C and GRPO are presets: other defaults of these."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from heedful.configs.checks import multiple
from heedful.configs.critic import HEAD_LEARNING_RATE, CriticOptions
from heedful.configs.lora import ReferenceOptions
from heedful.configs.objective import ObjectiveOptions
from heedful.configs.options import SamplingOptions, TrainingOptions
from heedful.configs.ranges import BELOW_ONE, NOT_NEGATIVE, POSITIVE
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import Settings
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BesideOptions(Settings):
    """What is trained or kept beside the policy's own objective."""

    ptx_data: str | None = None
    """Demonstrations or plain text whose likelihood is kept up (PPO-ptx), in the forms of heedful sft."""
    ptx_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of their loss, a mean over tokens as the policy loss is, on as many records as a minibatch has responses."""
    ema_decay: Annotated[float, BELOW_ONE] = 0.0
    """Per-step decay of a moving average of the weights; the average is evaluated and saved, sampling uses the live weights.
    0 disables it (InstructGPT: 0.992)."""

    def check(self) -> None:
        super().check()
        if self.ptx_data is not None and not self.ptx_coef:
            raise ConfigError("--ptx-data has no effect with --ptx-coef 0; add --ptx-coef, such as 1")
        if self.ptx_coef and self.ptx_data is None:
            raise ConfigError(f"--ptx-coef {self.ptx_coef} weighs the loss of demonstrations: add --ptx-data")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(BesideOptions, RewardOptions, ReferenceOptions, SamplingOptions, TrainingOptions):
    """Where a policy starts, how rollout batches are made, and what becomes of their scores."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    chat_template: str = ""
    """Chat template in place of the model's own: plain, or a Jinja file. Saved with the model."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Divides the logits, in sampling and in every log-prob. Below 1 is more cautious."""

    steps: Annotated[int, POSITIVE] = 100
    """Rollout batches: each is sampled, scored, and learned from."""
    rollout_batch_size: Annotated[int, POSITIVE] = 64
    """Responses per step."""
    samples_per_prompt: Annotated[int, POSITIVE] = 1
    """Responses to each prompt of a step; rollout-batch-size counts them all."""
    ppo_epochs: Annotated[int, POSITIVE] = 4
    """Passes over a rollout batch. More squeeze it harder; policy/approx_kl shows when too hard."""
    minibatch_size: Annotated[int, POSITIVE] = 64
    """Responses per optimizer step."""
    missing_eos_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """Taken off the score of a response that was cut by length, or put in its place (see missing-eos)."""
    missing_eos: Literal["subtract", "replace"] = "subtract"
    """subtract: the penalty comes off the (normalised) score. replace: minus the penalty takes the place of that score."""
    score_clip: Annotated[float | None, POSITIVE] = None
    """Scores are kept within plus and minus this, after normalisation if there is one. None is off."""
    score_norm_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Reference responses whose scores set mean 0 and standard deviation 1 before training. 0 leaves scores as they are."""
    score_norm_running: bool = False
    """Shift and scale scores by the mean and standard deviation of all scores so far, those of the step included."""
    rollout_micro_batch_size: Annotated[int, POSITIVE] = 64
    """Responses sampled at a time. It changes memory and speed, never the responses."""
    eval_prompts: Annotated[int, POSITIVE] = 128
    """Most held-out prompts to sample at an evaluation."""
    adam_eps: Annotated[float, POSITIVE] = 1e-5
    """Adam's epsilon; 1e-5 is what RL implementations use."""
    learning_rate: Annotated[float, POSITIVE] = 3e-6
    """Peak learning rate of the policy; constant within the epochs of one rollout batch."""

    algorithm: ClassVar[str]
    """The command, and the name of its runs."""

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-probs of each rollout batch have a part in what is learned."""
        return True

    def check(self) -> None:
        super().check()
        multiple(self, "rollout_batch_size", "minibatch_size")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
        if self.missing_eos == "replace" and self.missing_eos_penalty == 0:
            raise ConfigError("--missing-eos replace would score cut responses 0; add --missing-eos-penalty, such as 1")
        if self.missing_eos == "replace" and self.response_length != "stop":
            raise ConfigError(
                f"--missing-eos replace with --response-length {self.response_length} would replace every score: such "
                "responses never end by themselves; leave out one of the two"
            )
        if self.ema_decay and self.weights_dtype != "float32":
            raise ConfigError(
                f"--ema-decay {self.ema_decay} does not go with --weights-dtype {self.weights_dtype}, in which an average "
                "would not move: its steps are smaller than the distance between numbers; leave out one of the two"
            )
        if self.score_norm_samples == 1:
            raise ConfigError("--score-norm-samples must be 0 or at least 2: one sample has no standard deviation")
        if self.score_norm_running and self.score_norm_samples:
            raise ConfigError(
                "--score-norm-running measures scores while it trains, --score-norm-samples before; leave out one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(CriticOptions, ObjectiveOptions, RolloutConfig):
    """Improve a policy against a reward: sample, score, estimate advantages, maximise a surrogate."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def critic_learning_rate(self) -> float:
        """What ``value_learning_rate`` stands for."""
        return self.value_learning_rate or (HEAD_LEARNING_RATE if self.critic == "shared" else self.learning_rate)

    def check(self) -> None:
        super().check()
        if self.estimator.compares == "prompt" and self.samples_per_prompt < 2:
            raise ConfigError(
                f"--samples-per-prompt is {self.samples_per_prompt}, but responses are compared with others to the same "
                "prompt; make it at least 2, or add --advantage batch-mean"
            )
        if self.rollout_batch_size < 2 and (self.estimator.compares == "batch" or self.action == "response"):
            reason = (
                "with --action response advantages are whitened over responses, and nothing is left of a single one"
                if self.action == "response"
                else f"--advantage {self.advantage} compares its responses"
            )
            raise ConfigError(f"--rollout-batch-size is {self.rollout_batch_size}, but {reason}; make it at least 2")
        if self.policy_loss == "a2c" and (self.ppo_epochs > 1 or self.minibatch_size != self.rollout_batch_size):
            raise ConfigError(
                "--policy-loss a2c has no ratio that corrects for a policy which has moved since it sampled, so it makes one "
                f"step per rollout batch: --ppo-epochs 1 and --minibatch-size {self.rollout_batch_size}, got --ppo-epochs "
                f"{self.ppo_epochs} and --minibatch-size {self.minibatch_size} (--micro-batch-size bounds the memory)"
            )
        if self.kl_target is not None and self.rollout_batch_size >= 5 * self.kl_horizon:
            raise ConfigError(
                f"--kl-horizon {self.kl_horizon} is too short for --rollout-batch-size {self.rollout_batch_size}: one step "
                f"could take all of --kl-coef away, or more; make it at least {self.rollout_batch_size // 5 + 1}"
            )
        if self.critic_warmup_steps >= self.steps and self.critic_warmup_steps:
            raise ConfigError(
                f"--critic-warmup-steps {self.critic_warmup_steps} leaves the policy none of --steps {self.steps} to learn "
                "in; lower it, or raise --steps"
            )
        if self.quantize != "none" and self.estimator.critic and self.critic == "reward":
            raise ConfigError(
                f"--quantize {self.quantize} does not reach a critic that starts as a reward model; use --critic shared or "
                "--critic separate"
            )
