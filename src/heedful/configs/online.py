"""Settings of learning from rewards of the policy's own responses. PPO, A2C and GRPO are presets: other defaults of these."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from heedful.configs.checks import changed, multiple, refuse
from heedful.configs.critic import HEAD_LEARNING_RATE, CriticOptions
from heedful.configs.importance import ImportanceOptions
from heedful.configs.lora import ReferenceOptions
from heedful.configs.options import SamplingOptions, TrainingOptions
from heedful.configs.ranges import BELOW_ONE, NOT_NEGATIVE, POSITIVE
from heedful.configs.sampler import SamplerOptions
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import Settings
from heedful.errors import ConfigError
from heedful.redact import redact
from heedful.types import MicroBatch

CORRECT = "add --importance token-truncate"


@dataclass(frozen=True, kw_only=True)
class StepOptions(Settings):
    """How much a step samples, and how often it learns from that."""

    SECTION = "algorithm"

    steps: Annotated[int, POSITIVE] = 100
    """Rollout batches: each is sampled, scored, and learned from."""
    rollout_batch_size: Annotated[int, POSITIVE] = 64
    """Responses per step."""
    samples_per_prompt: Annotated[int, POSITIVE] = 1
    """Responses to each prompt of a step; rollout-batch-size counts them all."""
    ppo_epochs: Annotated[int, POSITIVE] = 4
    """Passes over a rollout batch. More epochs reuse each batch more; watch policy/approx_kl."""
    minibatch_size: Annotated[int, POSITIVE] = 64
    """Most responses per optimizer step. Masked or failed responses shrink every minibatch evenly."""
    max_kl: Annotated[float | None, POSITIVE] = None
    """End the run, keeping what it learned, once reference/kl (nats per response) has been above this in 3 steps in a row.
    Set it if nobody watches: far from its reference a policy can mislead a reward model without bound. None is off."""
    ptx_data: str | None = None
    """SFT data mixed into the PPO loss (PPO-ptx): demonstrations or plain text, in the forms of heedful sft."""
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
class ScoreOptions(RewardOptions):
    """What becomes of the scores before they are learned from."""

    SECTION = "reward"

    missing_eos_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """Penalty for responses that hit max-new-tokens: taken off the score, or put in its place (missing-eos)."""
    missing_eos: Literal["subtract", "replace"] = "subtract"
    """subtract: the penalty comes off the (normalised) score. replace: minus the penalty takes the place of that score."""
    overlong_buffer: Annotated[int, NOT_NEGATIVE] = 0
    """Tokens before max-new-tokens over which the overlong penalty grows from 0 to all of it (DAPO). Set it to a quarter of
    max-new-tokens if responses run into the limit. 0 is off."""
    overlong_penalty: Annotated[float, POSITIVE] = 1.0
    """Taken off the (normalised) score of a response of max-new-tokens; less inside overlong-buffer."""
    score_clip: Annotated[float | None, POSITIVE] = None
    """Scores are kept within plus and minus this, after normalisation if there is one. None is off."""
    score_norm_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Reference responses whose scores set mean 0 and standard deviation 1 before training. 0 leaves scores as they are."""
    score_norm_running: bool = False
    """Shift and scale scores by the mean and standard deviation of all scores so far, those of the step included."""


@dataclass(frozen=True, kw_only=True)
class RolloutSamplingOptions(SamplingOptions):
    """How the responses of a step are sampled, beyond what all sampling has."""

    SECTION = "sampling"

    temperature: Annotated[float, POSITIVE] = 1.0
    """Divides the logits, in sampling and in every log-prob. Below 1 is more cautious."""
    dynamic_sampling_rounds: Annotated[int, NOT_NEGATIVE] = 0
    """Prompts whose responses all score the same teach nothing: this many times per step, others are sampled in their place
    (DAPO). What still ties after that stays (rollout/unfilled_frac), as it does if rewards fail on more of the new responses
    than max-failed-rewards allows in a batch. Each round costs sampling and scoring. 0 is off."""
    rollout_micro_batch_size: Annotated[int, POSITIVE] = 64
    """Responses sampled at a time, and read at a time by policy, reference and critic before an update. It changes memory and
    speed, never the responses."""
    rollout_micro_batch_tokens: Annotated[int | None, POSITIVE] = None
    """Most tokens sampled at a time, besides rollout-micro-batch-size: rows times the longest prompt and max-new-tokens. It
    bounds the key-value cache, never the responses; a row that has more is sampled by itself. None means no limit."""


@dataclass(frozen=True, kw_only=True)
class HeldOutJudgeOptions(Settings):
    """How the policy is measured on held-out prompts."""

    SECTION = "evaluation"

    eval_prompts: Annotated[int, POSITIVE] = 128
    """Most held-out prompts to sample at an evaluation."""
    best_by: tuple[str, ...] = ()
    """Rewards that judge held-out responses to choose best/, in the forms of rewards, which may not have them; several are
    summed. None chooses by what training maximises: the score with its penalties, minus the price of the KL. A
    policy that is trained for long over-optimises its reward; a held-out reward detects it."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(
    StepOptions,
    ScoreOptions,
    RolloutSamplingOptions,
    SamplerOptions,
    HeldOutJudgeOptions,
    ReferenceOptions,
    TrainingOptions,
):
    """Where a policy starts, how rollout batches are made, and what becomes of their scores."""

    SECTION = "model and data"

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    max_prompt_tokens: Annotated[int | None, POSITIVE] = None
    """Longest prompt, in tokens; what happens to longer ones is what too-long says. Raise it for long documents, lower it if
    memory runs out. None is a quarter of what the model can read, but at least 256 and at most 1024."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What to do with prompts longer than max-prompt-tokens. drop and truncate are counted and reported. A truncated prompt
    keeps BOS, the system message and the tools; it loses its oldest turns, then the beginning of its last user message."""
    rollouts: Literal["samples", "all"] = "samples"
    """What is kept of the responses. samples: the few of samples.jsonl. all: every one, with its tokens, log-probs, scores
    and KL, a Parquet file per step in rollouts/ (docs/tracking.md has the columns and sizes)."""
    learning_rate: Annotated[float, POSITIVE] = 3e-6
    """Peak learning rate of the policy; constant within the epochs of one rollout batch."""
    adam_eps: Annotated[float, POSITIVE] = 1e-5
    """Adam's epsilon; 1e-5 is what RL implementations use."""

    algorithm: ClassVar[str]
    """The command, and the name of its runs."""

    @property
    def group_size(self) -> int:
        return self.samples_per_prompt

    @property
    def compares(self) -> Literal["prompt", "batch"] | None:
        """Among which responses scores are compared: those to one prompt, or the whole rollout batch."""
        return "prompt"

    @property
    def rollout_micro_batch(self) -> MicroBatch:
        return MicroBatch(self.rollout_micro_batch_size, self.rollout_micro_batch_tokens)

    @property
    def scoring_micro_batch(self) -> MicroBatch:
        """What policy, reference and critic read at a time without gradients: no layer's activations outlive it, so as many
        rows as are sampled at a time."""
        return MicroBatch(max(self.micro_batch_size, self.rollout_micro_batch_size), self.micro_batch_tokens)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-probs of each rollout batch have a part in what is learned."""
        return True

    @property
    def loads_reference(self) -> bool:
        """Whether anything reads the reference: what is learned, or evaluations, if it is named."""
        return self.needs_reference or self.reference is not None

    @property
    def makes_one_update(self) -> bool:
        """Whether a rollout batch is learned from in one optimizer step: the policy that learns is the one that sampled."""
        return self.ppo_epochs == 1 and self.minibatch_size == self.rollout_batch_size

    @property
    def needs_old_pass(self) -> bool:
        """Whether the policy reads a rollout batch before it learns from it. If not, the update's own pass is the first."""
        return True

    @property
    def corrects(self) -> bool:
        """Whether the objective weighs what something else than the policy drew."""
        return False

    @property
    def kl_price(self) -> float:
        """What a nat of KL to the reference costs in the comparison of models for ``best/``, in units of the reward."""
        return 0.0

    @property
    def best_metric(self) -> str:
        """The metric of evaluations whose highest value makes ``best/``."""
        return "eval/judge_mean" if self.best_by else "eval/objective"

    def check(self) -> None:
        super().check()
        learned_from = sorted(set(self.best_by) & set(self.rewards))
        if learned_from:
            raise ConfigError(
                f"--best-by {redact(learned_from[0])} is one of --rewards: what the policy is trained on cannot judge it; "
                "leave it out of one of the two"
            )
        multiple(self, "rollout_batch_size", "minibatch_size")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
        if self.missing_eos == "replace" and self.missing_eos_penalty == 0:
            raise ConfigError("--missing-eos replace would score cut responses 0; add --missing-eos-penalty, such as 1")
        if self.missing_eos == "replace" and self.response_length != "stop":
            raise ConfigError(
                f"--missing-eos replace with --response-length {self.response_length} would replace every score: such "
                "responses never end by themselves; leave out one of the two"
            )
        if self.response_length != "stop":
            refuse(
                self,
                "overlong_buffer",
                because=f"penalises responses that end late, but with --response-length {self.response_length} the policy "
                "does not choose where they end; leave it out, or use --response-length stop",
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise ConfigError(
                f"--overlong-buffer {self.overlong_buffer} is larger than --max-new-tokens {self.max_new_tokens}; lower it, "
                f"such as to {max(1, self.max_new_tokens // 4)}"
            )
        if not self.overlong_buffer and changed(self, "overlong_penalty"):
            raise ConfigError(
                f"--overlong-penalty {self.overlong_penalty:g} belongs to --overlong-buffer, which is 0; add it, such as "
                f"--overlong-buffer {max(1, self.max_new_tokens // 4)}"
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
        if self.sampler:
            self._check_sampler()

    def _check_sampler(self) -> None:
        """Refuse what servers cannot draw, or what would be off-policy with nothing to correct for it. Raises ConfigError."""
        if self.leaves_out and not self.corrects:
            filtered = f"--top-k {self.top_k}" if self.top_k else f"--top-p {self.top_p:g}"
            raise ConfigError(
                f"--sampler with {filtered} draws from another distribution than the policy's, and nothing corrects for it; "
                f"{CORRECT} (heedful ppo, a2c, grpo), or leave {filtered} out"
            )
        if self.quantize != "none":
            raise ConfigError(
                f"--sampler does not go with --quantize {self.quantize}: servers are given whole weights; leave out one of "
                "the two"
            )
        if self.cuda_graphs:
            raise ConfigError("--cuda-graphs is about sampling in this process, so not with --sampler; leave it out")


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(CriticOptions, ImportanceOptions, RolloutConfig):
    """Improve a policy against a reward: sample, score, estimate advantages, maximise a surrogate."""

    async_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Rollout batches that the sampler is ahead of the update, so that the two go on at the same time: responses are drawn by
    weights this many steps old, which importance must correct for. 0: sampling and update take turns."""

    mask_truncated: bool = False
    """Learn nothing from responses that were cut at max-new-tokens. Their scores still count in baselines and means, as do
    their KL and entropy, which cost a pass before the update; rollout/masked_frac says how many there were. Use it if a cut
    response says nothing about how good the policy is."""

    reference: str | None = None
    """Frozen model that the policy is compared with. None is the policy as it starts, loaded only if kl-coef is above 0. With
    kl-coef 0 a named one is read only at evaluations, for eval/kl."""

    @property
    def compares(self) -> Literal["prompt", "batch"] | None:
        return self.estimator.compares

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_old_pass(self) -> bool:
        """In more than one update the ratio is to the policy before the first; advantages may need KL, values or weights.

        With ``mask_truncated`` the update reads only some responses, and KL and entropy are those of all.
        """
        has_kl_in_reward = self.kl_in == "reward" and self.kl_coef > 0
        has_value_head = self.estimator.critic and self.critic == "shared"
        reads_first = has_kl_in_reward or has_value_head or self.importance != "none" or self.mask_truncated
        return not self.makes_one_update or reads_first or self.critic_warmup_steps > 0

    @property
    def corrects(self) -> bool:
        return self.importance != "none"

    @property
    def kl_price(self) -> float:
        return self.kl_coef

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
        if self.estimator.compares != "prompt":
            refuse(
                self,
                "dynamic_sampling_rounds",
                because=f"replaces prompts whose responses score the same, but --advantage {self.advantage} does not compare "
                "the responses to one prompt, so it learns from these too; leave it out, or use heedful grpo",
            )
        if self.mask_truncated and self.response_length != "stop":
            raise ConfigError(
                f"--mask-truncated would leave out every response that --response-length {self.response_length} cuts; leave "
                "out one of the two"
            )
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
        self._check_reference()
        if self.async_steps:
            self._check_async()
        if self.quantize != "none" and self.estimator.critic and self.critic == "reward":
            raise ConfigError(
                f"--quantize {self.quantize} does not reach a critic that starts as a reward model; use --critic shared or "
                "--critic separate"
            )

    def _check_async(self) -> None:
        """Refuse to sample ahead where that cannot be. Raises ConfigError."""
        ahead = f"--async-steps {self.async_steps}"
        if not self.sampler:
            raise ConfigError(
                f"{ahead} belongs to --sampler, which is not set: this process cannot sample while it learns; add --sampler "
                "vllm:http://HOST:PORT, or leave it out"
            )
        if not self.corrects:
            raise ConfigError(
                f"{ahead} learns from responses of older weights, and nothing corrects for it; {CORRECT}, or use "
                "--async-steps 0"
            )
        if self.dynamic_sampling_rounds:
            raise ConfigError(
                f"{ahead} does not go with --dynamic-sampling-rounds, whose prompts are not known ahead; leave out one of "
                "the two"
            )
        if self.sampler_sleep:
            raise ConfigError(
                f"{ahead} samples while the update goes on, and --sampler-sleep has servers sleep then; leave out one of the "
                "two"
            )
        if self.async_steps > 1 and self.sampler_weights == "nccl":
            raise ConfigError(
                f"{ahead} needs several versions of the weights at a time, which only a folder keeps; use --sampler-weights "
                "folder, or --async-steps 1"
            )

    def _check_reference(self) -> None:
        """Refuse to load or to move a reference that nothing reads. Raises ConfigError."""
        if self.needs_reference:
            return
        refuse(
            self,
            "max_kl",
            because="limits the KL to the reference, which is not measured at --kl-coef 0; leave it out, or set --kl-coef "
            "above 0, such as 1e-6",
        )
        if self.reference is None and self.reference_device != "same":
            raise ConfigError(
                f"--reference-device {self.reference_device} moves nothing: --kl-coef 0 needs no reference, so none is "
                "loaded; leave it out, or set --kl-coef above 0"
            )
        holds_out = self.eval_data is not None or self.eval_fraction > 0
        if self.reference is not None and not holds_out and not self.score_norm_samples:
            raise ConfigError(
                f"--reference {self.reference} would be read by nothing: --kl-coef 0 puts no price on KL, and nothing is "
                "held out to measure it on; leave it out, set --kl-coef above 0, or set --eval-fraction or --eval-data"
            )
