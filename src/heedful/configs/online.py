"""Settings of training on rewards of the policy's own responses. PPO, A2C and GRPO are presets: other defaults of these.

A built-in advantage estimator has an entry in `ESTIMATORS` and a name in `Advantage`; its function is in
`heedful.algorithms.online.advantages`. A policy loss is a name in `PolicyLoss` and a function in
`heedful.algorithms.online.policy_losses`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from heedful import user_code
from heedful.configs.options import DefaultRate, ReferenceOptions, SamplingOptions, TrainingOptions
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import (
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    REQUIRED,
    OwnCode,
    Range,
    Settings,
    changed,
    multiple,
    refuse,
)
from heedful.errors import ConfigError
from heedful.redact import redact
from heedful.types import MicroBatch

Advantage = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce++"]
Action = Literal["token", "turn", "response"]
PolicyLoss = Literal["clip", "a2c", "cispo", "sao"]
ImportanceLevel = Literal["token", "sequence", "sequence-mean"]
ALARM_NAMES = (
    "end-token-lost", "responses-cut", "turns-cut", "length-drift", "repetition", "entropy-collapse", "kl-budget",
    "ratio-tail", "critic-dead", "critic-diverging", "scores-tied", "ties-unfilled", "scores-jump", "scores-unread",
    "judge-falling", "stale-sampler", "reference-moves", "skipped-updates", "responses-masked", "weights-light",
    "nothing-learned",
)  # fmt: skip
"""What ``stop_on`` may name (`heedful.training.alarms`)."""
KLKind = Literal["k1", "k2", "k3", "weighted-k3"]
Importance = Literal["none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
ROLLOUT_ROWS = 64
"""Responses sampled and read at a time, if neither the settings nor the memory plan say more."""
HEAD_EPOCHS = 2
"""Passes of a value head over a rollout batch."""
HEAD_LEARNING_RATE = 1e-3
"""Learning rate of a value head: it is small and starts from random weights, so it needs a far larger rate than a trained
network."""


@dataclass(frozen=True)
class Estimator:
    """The needs and abilities of an advantage estimator."""

    critic: bool = False
    """True if it needs a critic's values."""
    per_token: bool = False
    """True if it uses rewards per token; others get one number per response."""
    compares: Literal["prompt", "batch"] | None = None
    """The responses it compares: those to one prompt, or the whole rollout batch."""


ESTIMATORS = {
    "gae": Estimator(critic=True, per_token=True),
    "grpo": Estimator(compares="prompt"),
    "dr_grpo": Estimator(compares="prompt"),
    "rloo": Estimator(compares="prompt"),
    "reinforce": Estimator(compares="batch"),
    "reinforce++": Estimator(per_token=True),
}


OF_THE_USER = Estimator(per_token=True)
"""The user's function in --advantage; with several responses per prompt it gets them together."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Settings):
    """Advantage, surrogate, average, KL penalty, correction for another sampler, and critic."""

    SECTION = "algorithm"

    advantage: Advantage | OwnCode | Callable[..., Any] = "gae"
    """How good a response was. gae: rewards against a critic's values (PPO). grpo: score minus the mean of the responses to
    its prompt, over their standard deviation. dr_grpo: without the division. rloo: minus the mean of the others. reinforce:
    minus the mean of the rollout batch; samples-per-prompt may be 1. reinforce++: the rewards to come at each token, without
    a critic (heedful ppo --advantage reinforce++). python:FILE.py:FUNCTION: a function of yours (docs/extend.md)."""
    gamma: Annotated[float, FRACTION] = 1.0
    """Discount factor per action, which is a token unless --action says more."""
    action: Action | None = None
    """What the critic judges: it has one value before each action, and gives one advantage to all of the action's tokens;
    gamma and gae-lambda are per action. token: each token. turn: all that the policy says until somebody else speaks.
    response: all of it, so gamma and gae-lambda do not apply. None is token, or response with --importance-level sequence."""
    gae_lambda: Annotated[float, FRACTION] = 0.95
    """Trades bias against variance of the advantages: 1 trusts rewards, 0 trusts values."""
    gae_lambda_alpha: Annotated[float | None, POSITIVE] = None
    """In place of gae-lambda one lambda for each response by its length: 1 - 1 / (alpha * length), and 0 where that is
    negative (VAPO), so that an advantage reads the same share of every response. 0.05 (VAPO) is for answers of hundreds of
    tokens: 0 up to 20 tokens, 0.8 at 100, 0.95 at 400. 1.5 (SAO) is for short ones: 0.97 at 20. None is off."""
    value_lambda: Annotated[float | None, FRACTION] = None
    """Lambda of the critic's targets, if that is not gae-lambda. 1: the rewards that came, without a value in them (VC-PPO,
    VAPO), which is what to take for long answers. None is gae-lambda, or 1 with gae-lambda-alpha."""
    whiten_rewards: bool = False
    """Scale the per-token rewards of a batch to variance 1."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""

    policy_loss: PolicyLoss | OwnCode | Callable[..., Any] = "clip"
    """What is maximised. clip: PPO's clipped surrogate. a2c: advantage times log-prob, without a ratio, so one optimizer
    step per rollout batch. cispo: the same times the clipped ratio as a fixed weight, so that tokens beyond the bounds
    still learn. sao: the same times the ratio to the sampler's probabilities, and nothing for tokens beyond the bounds; no
    pass before the update, and the sampler may be ahead. python:FILE.py:FUNCTION: a function of yours (docs/extend.md)."""
    importance_level: ImportanceLevel = "token"
    """What one probability ratio belongs to. token: each token. sequence: the whole response, which is one action (RLOO);
    with a critic it has one value, that of its prompt, and one advantage, so gamma and gae-lambda do not apply.
    sequence-mean: the geometric mean over the response's tokens (GSPO, which clips at about 3e-4)."""
    loss_reduction: Literal["token", "sequence", "fixed"] = "token"
    """How the loss is averaged. token: over all tokens (PPO, DAPO). sequence: over responses, of each one's mean over its
    tokens (GRPO). fixed: the sum over responses * max-new-tokens (Dr. GRPO). A ratio of a whole response is averaged over
    responses; then this is only about a KL penalty in the loss."""
    clip_range: Annotated[float, POSITIVE] = 0.2
    """How far the probability ratio may move before its gradient stops."""
    clip_range_high: Annotated[float | None, POSITIVE] = None
    """How far the ratio may rise, if that is not clip-range (DAPO: 0.28; SAO: clip-range 0.3 and 5 for reasoning, 0.8 and 3
    for code)."""
    dual_clip: Annotated[float | None, Range(above=1)] = None
    """Above 1: a bad action counts at most this many times its advantage, however much likelier it became. None is off."""
    positive_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """How much the policy also imitates its own correct responses: weight of their negative log-likelihood per token (VAPO:
    0.1). 0 is off."""
    correct_from: Annotated[float, Range()] = 1.0
    """The score from which on a response is correct, for positive-coef."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Bonus on the policy's entropy. Raising it keeps responses diverse."""
    target_entropy: Annotated[float | None, POSITIVE] = None
    """Target entropy, in nats per token; the bonus rises from entropy-coef while policy/entropy is below it and is off above.
    Set it if the entropy collapses. None keeps entropy-coef."""
    approx_kl_limit: Annotated[float | None, POSITIVE] = None
    """Once policy/approx_kl of a minibatch is above this, neither it nor the rest of the rollout batch is learned from. None
    is off."""

    max_approx_kl: Annotated[float | None, POSITIVE] = 10.0
    """A minibatch whose policy/approx_kl is above this is left out, as one whose loss is not finite: its probability ratios
    have exploded (a mean ratio of 10 alone makes 6.7; a policy that learns stays below about 0.05). Only for ratios per
    token. None is off."""

    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.05
    """KL penalty coefficient. Raising it keeps the text closer to the reference."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL penalty goes: off the rewards, or into the loss with its gradient, averaged as the loss is."""
    kl_kind: KLKind | None = None
    """Estimator of the penalty. In the reward k1 makes the return score minus kl-coef times KL. In the loss k2 has the
    gradient of the KL in expectation and k3 is GRPO's; k1's gradient is zero in expectation there. weighted-k3, only in the
    loss (DeepSeek-V3.2): k3 times the probability ratio, which has k2's gradient in a rollout batch's first update, and the
    gradient of the KL also in later ones. None: k1 in the reward, k3 in the loss."""
    kl_target: Annotated[float | None, POSITIVE] = None
    """KL in nats per response that kl-coef is steered to. None keeps kl-coef fixed."""
    kl_horizon: Annotated[int, POSITIVE] = 10_000
    """Time constant of the KL controller, in responses. Raising it makes it slower."""

    importance: Importance = "none"
    """Multiply each token's objective by the ratio of policy to sampler probability. Set it with top-k or top-p, or if
    rollout/sampler_mismatch is large. token-truncate: each token's ratio, at most importance-high (TIS). token-mask: a
    token whose ratio is outside importance-low and importance-high counts 0 (IcePop: 0.5 and 5); with top-k or top-p and no
    importance-low no ratio is above 1, so it is token-truncate. sequence-truncate, sequence-mask: the same with the ratio
    of the whole response."""
    importance_low: Annotated[float, NOT_NEGATIVE] = 0.0
    """Smallest ratio that still counts, for token-mask and sequence-mask."""
    importance_high: Annotated[float, POSITIVE] = 2.0
    """Largest weight; a larger ratio is cut down to it, or counts 0 with token-mask and sequence-mask."""
    importance_normalise: bool = False
    """Divide the weights by their mean over the rollout batch. With top-k or top-p none is above 1, and those of a long
    response (sequence-) are tiny; dividing by their mean restores the gradient's scale."""

    critic: Literal["shared", "separate", "reward"] = "shared"
    """shared: a value head that reads the policy's trunk; it starts as the one saved with the model, also TRL's, or at 0.
    separate: a model of its own. reward: a model of its own that starts as the first reward model among the rewards, head
    included; it must share the policy's tokenizer."""
    value_model: str | None = None
    """Where a separate critic starts from: any causal model, with its value head if it has one, also of TRL, LLaMA-Factory or
    OpenRLHF (docs/reward-models.md). None is the policy's model."""
    value_freeze: tuple[str, ...] = ()
    """Parts of a critic of its own that stay as they start, by their names in it: self_attn (SAO), embed_tokens."""
    value_epochs: Annotated[int | None, POSITIVE] = None
    """Passes of the critic over a rollout batch. None is 2 for a value head, which cost little, as the trunk is not run, and
    ppo-epochs for a model of its own (SAO: 2 to the policy's 1)."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """How much the value loss also pulls the trunk, beside the policy loss (shared critic). 0 leaves it to the policy."""
    value_clip_range: Annotated[float | None, POSITIVE] = 0.2
    """How far values may move from the old ones before their gradient stops, in units of the reward. None is off, as it is
    with value-lambda 1 and with value-epochs of a critic of its own: what these gain lies beyond it."""
    value_learning_rate: Annotated[float | None, POSITIVE] = None
    """Learning rate of the critic. None is 1e-3 for a value head (shared), and learning-rate for a network of its own (VAPO:
    twice, SAO: five times the policy's)."""
    critic_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """First steps in which only the critic learns (of a shared one: only the value head)."""

    @property
    def estimator(self) -> Estimator:
        """The properties of the advantage estimator."""
        return ESTIMATORS.get(self.advantage, OF_THE_USER) if isinstance(self.advantage, str) else OF_THE_USER

    @property
    def advantage_flag(self) -> str:
        """The advantage in a message."""
        return f"--advantage {user_code.name_of(self.advantage)}"

    @property
    def action_size(self) -> Action:
        """What the critic judges; a token without a critic."""
        if not self.estimator.critic:
            return "token"
        return self.action or ("token" if self.importance_level == "token" else "response")

    @property
    def has_response_actions(self) -> bool:
        """Whether a response is a single action for the critic: one value, one reward, one advantage."""
        return self.action_size == "response"

    @property
    def _of_actions(self) -> str:
        """The setting that makes a response one action."""
        return f"--importance-level {self.importance_level}" if self.action is None else f"--action {self.action}"

    @property
    def critic_lambda(self) -> float:
        """Lambda of the critic's targets."""
        if self.value_lambda is not None:
            return self.value_lambda
        return self.gae_lambda if self.gae_lambda_alpha is None else 1.0

    @property
    def moves_values_freely(self) -> bool:
        """Whether values are not clipped, whatever ``value_clip_range``: targets are Monte Carlo returns, or a network of its
        own makes passes of its own number."""
        has_targets = (self.value_lambda is not None or self.gae_lambda_alpha is not None) and self.critic_lambda == 1
        return has_targets or (self.critic != "shared" and self.value_epochs is not None)

    @property
    def value_clip(self) -> float | None:
        """How far values may move from the old ones."""
        return None if self.moves_values_freely else self.value_clip_range

    @property
    def exploded_approx_kl(self) -> float:
        """The approx_kl above which a minibatch is skipped; infinite for ratios of whole responses, which are products."""
        return math.inf if self.max_approx_kl is None or self.importance_level != "token" else self.max_approx_kl

    @property
    def kl_estimate(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the penalty; `is_kl_weighted` says whether the ratio multiplies it."""
        if self.kl_kind == "weighted-k3":
            return "k3"
        return self.kl_kind or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def is_kl_weighted(self) -> bool:
        """Whether the probability ratio multiplies the penalty."""
        return self.kl_kind == "weighted-k3"

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the entropy may have a gradient in some step."""
        return self.entropy_coef > 0 or self.target_entropy is not None

    def check(self) -> None:
        super().check()
        self._check_advantage()
        self._check_surrogate()
        self._check_kl()
        self._check_importance()
        self._check_critic()

    def _check_advantage(self) -> None:
        user_code.check_form("--advantage", self.advantage)
        if not self.estimator.per_token:
            refuse(
                self,
                *("gamma", "whiten_rewards"),
                because=f"is about rewards per token, but {self.advantage_flag} compares whole responses; leave it "
                "out, or use --advantage gae (heedful ppo, a2c)",
            )
        if not self.estimator.critic:
            refuse(
                self,
                *("action", "gae_lambda", "gae_lambda_alpha", "value_lambda"),
                because=f"is about a critic's values, and {self.advantage_flag} has none; leave it out, or use "
                "--advantage gae (heedful ppo, a2c)",
            )
        if self.has_response_actions:
            refuse(
                self,
                *("gamma", "gae_lambda", "gae_lambda_alpha", "value_lambda"),
                because=f"spreads rewards over tokens, but with {self._of_actions} the response is one action; leave out "
                "one of the two",
            )
        elif self.importance_level != "token" and self.estimator.critic:
            raise ConfigError(
                f"--importance-level {self.importance_level} has one ratio per response, but with --action {self.action} it "
                "has several advantages; leave out one of the two"
            )
        if self.action_size == "turn":
            refuse(
                self,
                "gae_lambda_alpha",
                because="makes lambda from the number of actions, of which a response of turns has few; leave it out, or use "
                "--action token",
            )
        if self.gae_lambda_alpha is not None:
            refuse(
                self,
                "gae_lambda",
                because="is one lambda for all responses, and --gae-lambda-alpha gives each its own by its length; leave out "
                "one of the two",
            )

    def _check_surrogate(self) -> None:
        user_code.check_form("--policy-loss", self.policy_loss)
        if self.policy_loss == "a2c":
            refuse(
                self,
                *("clip_range", "clip_range_high", "dual_clip", "approx_kl_limit", "max_approx_kl"),
                because="is about the probability ratio, which --policy-loss a2c does not have; leave it out, or use "
                "--policy-loss clip (heedful ppo, grpo)",
            )
            if self.importance_level == "sequence-mean":
                raise ConfigError(
                    "--importance-level sequence-mean is about the probability ratio, which --policy-loss a2c does not have; "
                    "use --importance-level sequence, or --policy-loss clip (heedful ppo, grpo)"
                )
        if self.policy_loss == "cispo":
            refuse(
                self,
                *("importance_level", "dual_clip"),
                because="does not go with --policy-loss cispo, which weighs each token by its own clipped ratio; leave it "
                "out, or use --policy-loss clip (heedful ppo, grpo)",
            )
        if self.policy_loss == "sao":
            refuse(
                self,
                *("importance_level", "dual_clip", "importance"),
                because="does not go with --policy-loss sao, which weighs each token by its own ratio to the sampler; leave "
                "it out, or use --policy-loss clip (heedful ppo, grpo)",
            )
            if self.clip_range >= 1:
                raise ConfigError(
                    f"--clip-range {self.clip_range:g} is no lower bound: ratios are above 0; make it below 1 (SAO: 0.3 or "
                    "0.8), and the upper one --clip-range-high"
                )
        if not self.positive_coef:
            refuse(
                self,
                "correct_from",
                because="says which responses --positive-coef imitates, which is 0; add it, such as --positive-coef 0.1",
            )
        if self.importance_level == "token":
            return
        level = f"--importance-level {self.importance_level}"
        if self.advantage == "reinforce++":
            raise ConfigError(
                f"{level} has one ratio per response, but {self.advantage_flag} gives each token an advantage of its "
                "own; leave it out, or use an advantage that compares responses (heedful grpo)"
            )
        refuse(
            self,
            "max_approx_kl",
            because=f"is about ratios per token, but {level} has one per response; leave out one of the two",
        )
        if not (self.kl_in == "loss" and self.kl_coef):
            refuse(
                self,
                "loss_reduction",
                because=f"averages tokens, but {level} has one ratio per response; leave out one of the two",
            )

    def _check_kl(self) -> None:
        if self.kl_in == "loss" and self.kl_estimate == "k1":
            raise ConfigError(
                "--kl-in loss does not go with --kl-kind k1, whose gradient is zero in expectation: add --kl-kind k2, "
                "--kl-kind k3 or --kl-kind weighted-k3"
            )
        if self.kl_in == "reward" and self.is_kl_weighted:
            raise ConfigError(
                "--kl-in reward does not go with --kl-kind weighted-k3, whose ratio is 1 when rewards are computed: add "
                "--kl-kind k1, or --kl-in loss"
            )
        if self.advantage == "grpo" and self.kl_in == "reward" and self.kl_coef:
            raise ConfigError(
                "--kl-in reward does not go with --advantage grpo: the division by the group's standard deviation would make "
                "--kl-coef meaningless; add --advantage dr_grpo, or --advantage rloo"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                "--kl-target multiplies --kl-coef by factors, which cannot change 0; set --kl-coef above 0"
            )
        if self.kl_target is None and changed(self, "kl_horizon"):
            raise ConfigError(f"--kl-horizon {self.kl_horizon} belongs to --kl-target, which is not set; add it")

    def _check_importance(self) -> None:
        if self.importance == "none":
            refuse(
                self,
                *("importance_low", "importance_high", "importance_normalise"),
                because="needs --importance; it is off: add --importance sequence-truncate, or leave it out",
            )
        if self.importance.endswith("truncate"):
            refuse(
                self,
                "importance_low",
                because=f"masks tokens, but --importance {self.importance} only truncates weights; use --importance "
                "token-mask or sequence-mask, or leave it out",
            )
        if self.importance_low >= self.importance_high:
            raise ConfigError(
                f"--importance-low {self.importance_low:g} is not below --importance-high {self.importance_high:g}, so no "
                "token would count; IcePop has 0.5 and 5"
            )
        if self.importance.startswith("token") and self.importance_level != "token":
            raise ConfigError(
                f"--importance {self.importance} weighs single tokens, but with --importance-level {self.importance_level} a "
                f"whole response is one action; use --importance {self.importance.replace('token', 'sequence')}"
            )

    def _check_critic(self) -> None:
        if not self.estimator.critic:
            refuse(
                self,
                *(
                    "critic",
                    "value_model",
                    "value_freeze",
                    "value_epochs",
                    "value_coef",
                    "value_clip_range",
                    "value_learning_rate",
                    "critic_warmup_steps",
                ),
                because=f"belongs to a critic, and {self.advantage_flag} has none; leave it out, or use --advantage "
                "gae (heedful ppo, a2c)",
            )
        if self.value_model is not None and self.critic != "separate":
            raise ConfigError("--value-model belongs to a separate critic: add --critic separate")
        if self.critic == "shared":
            refuse(
                self,
                "value_freeze",
                because="names parts of a critic of its own, but with --critic shared it is a head on the policy's trunk; "
                "add --critic separate, or leave it out",
            )
        else:
            refuse(
                self,
                "value_coef",
                because=f"is about a value head on the policy's trunk, but with --critic {self.critic} the critic has a "
                "network of its own; leave it out, or set --value-learning-rate",
            )
        if self.moves_values_freely and self.value_clip_range is not None:
            refuse(
                self,
                "value_clip_range",
                because="bounds how far a value moves, and what --value-lambda 1, --gae-lambda-alpha or --value-epochs gain "
                "lies beyond it; leave it out",
            )
        if self.policy_loss == "a2c" and self.critic != "shared":
            refuse(
                self,
                "value_clip_range",
                because="bounds the change of values in an update, but --policy-loss a2c makes only one step, before which "
                "they have not changed; leave it out, or use --policy-loss clip (heedful ppo)",
            )


PREFIX = "vllm:"
ENGINES = "heedful.engines"
"""The entry points of packages that add a kind of server: NAME, and a function like `heedful.engines.remote.connect`."""


@dataclass(frozen=True, kw_only=True)
class SamplerOptions(Settings):
    """Where responses are sampled. The default is this process."""

    SECTION = "server"

    sampler: tuple[str | Callable[..., Any], ...] | str | Callable[..., Any] = ()
    """vLLM servers that draw the responses, as vllm:http://HOST:PORT; several share them. heedful serve-policy starts one.
    None: this process draws them. python:FILE.py:CLASS: an engine of yours (docs/extend.md). Servers
    are sent the token that the environment variable HEEDFUL_SAMPLER_TOKEN holds."""
    sampler_weights: Literal["folder", "nccl"] = "folder"
    """How a server gets the weights after each step. folder: it reads a folder that the trainer writes. nccl: from GPU to
    GPU, which needs vLLM in this environment too, and a server that heedful serve-policy started with --nccl."""
    sampler_folder: Path | None = None
    """The folder for the weights, which the servers must see under the same path. None: a temporary one of this machine; name
    one on a shared file system if a server is on another machine or in a container."""
    sampler_sleep: bool = False
    """Servers sleep, and leave their GPU's memory to the trainer, except while they sample. For servers on the trainer's GPU,
    started with heedful serve-policy --sleep, which get their weights through a folder."""
    sampler_retry_minutes: Annotated[float, NOT_NEGATIVE] = 10.0
    """How long servers that fail are asked again before the run ends (and can be resumed). A response that one lost is drawn
    by the others meanwhile. At the start of a new run it is 10 seconds."""

    @property
    def _samplers(self) -> tuple[str | Callable[..., Any], ...]:
        return self.sampler if isinstance(self.sampler, tuple) else (self.sampler,)

    @property
    def user_engine(self) -> str | Callable[..., Any] | None:
        """The user's own engine, if ``sampler`` names one."""
        return next(filter(user_code.is_named, self._samplers), None)

    @property
    def servers(self) -> tuple[str, ...]:
        """The samplers that are servers, as they were given."""
        return tuple(one for one in self._samplers if isinstance(one, str) and not user_code.is_named(one))

    @property
    def sampler_addresses(self) -> tuple[str, ...]:
        """http://HOST:PORT of each server."""
        return tuple(
            one.strip().removeprefix(PREFIX).rstrip("/") for part in self.servers for one in part.split(",") if one
        )

    def check(self) -> None:
        super().check()
        if not self.sampler:
            refuse(
                self,
                *("sampler_weights", "sampler_folder", "sampler_sleep", "sampler_retry_minutes"),
                because="belongs to --sampler, which is not set; add --sampler vllm:http://HOST:PORT, or leave it out",
            )
            return
        if self.user_engine is not None:
            user_code.check_form("--sampler", self.user_engine)
            name = user_code.name_of(self.user_engine)
            if len(self._samplers) > 1:
                raise ConfigError(f"--sampler names {name} and others; name one engine of yours, or servers")
            refuse(
                self,
                *("sampler_weights", "sampler_folder", "sampler_sleep", "sampler_retry_minutes"),
                because=f"is about servers, and --sampler {name} is an engine of yours; leave it out",
            )
            return
        for part in self.servers:
            for one in part.split(","):
                _check_address(one.strip())
        if len(set(self.sampler_addresses)) < len(self.sampler_addresses):
            raise ConfigError(f"--sampler names a server twice: {' '.join(self.servers)}; name each once")
        if self.sampler_folder is not None and self.sampler_weights == "nccl":
            raise ConfigError("--sampler-folder belongs to --sampler-weights folder; leave out one of the two")
        if self.sampler_weights == "nccl" and self.sampler_sleep:
            raise ConfigError(
                "--sampler-weights nccl does not go with --sampler-sleep: a server that sleeps is on the trainer's GPU, and "
                "NCCL sends nothing from a GPU to itself; use --sampler-weights folder, or leave out --sampler-sleep"
            )


def _check_address(one: str) -> None:
    """Raise ConfigError unless the address is vllm:http://HOST:PORT."""
    form = "write vllm:http://HOST:PORT, such as vllm:http://127.0.0.1:8000"
    kind = one.partition(":")[0]
    if kind != "vllm" and entry_points(group=ENGINES, name=kind):
        return
    if not one.startswith(PREFIX):
        raise ConfigError(f"--sampler {one!r} is not a sampler; {form}")
    try:
        parts = urlsplit(one.removeprefix(PREFIX))
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"--sampler {one!r} is not an address: {error}; {form}") from error
    if not is_good or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"--sampler {one!r}: {form}, without a path")
    if parts.username or parts.password:
        raise ConfigError(
            f"--sampler: the address of {parts.hostname} holds a user or password, which would be saved with the run; use "
            "the environment variable HEEDFUL_SAMPLER_TOKEN"
        )


CORRECT = "add --importance token-truncate"


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(Settings):
    """What the policy acts in, or talks with."""

    SECTION = "environment"

    environment: tuple[str, ...] = ()
    """What the policy speaks with in turns: python:FILE.py:CLASS, a class with TRL's methods for environments (reset, tools,
    get_reward), and _reply for talk without tools (docs/environments.md). Of several the column `environment` of a record
    names one. Its rewards are added to --rewards, which it needs not have then. In Python also the class or a function that
    makes one, if a file that can be imported has it."""
    max_turns: Annotated[int, POSITIVE] = 8
    """Most turns of the policy in an episode; max-new-tokens are those of all turns, with what the environment says between
    them."""
    environment_timeout: Annotated[float, POSITIVE] = 60.0
    """Seconds for one turn of all environments of a step, which act together. One that has not answered then is stopped, and
    its response is left out."""

    def __post_init__(self) -> None:
        given: Any = self.environment
        several = given if isinstance(given, list | tuple) else [given]
        specs = [user_code.spec_of("environment", one) if callable(one) else one for one in several]
        object.__setattr__(self, "environment", tuple(specs))
        super().__post_init__()

    def check(self) -> None:
        super().check()
        for spec in self.environment:
            if not spec.startswith(user_code.PREFIX):
                raise ConfigError(f"--environment {spec} is no class; use python:FILE.py:CLASS")
            user_code.check_form("--environment", spec)
        names = [spec.rpartition(":")[2] for spec in self.environment]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"--environment names several classes {twice}; the column `environment` could not tell them apart: rename "
                "one"
            )
        if not self.environment:
            refuse(
                self,
                *("max_turns", "environment_timeout"),
                because="is about an environment, and there is none: add --environment, or leave it out",
            )
        length = getattr(self, "response_length", "stop")
        if self.environment and length != "stop":
            raise ConfigError(
                f"--response-length {length} does not go with --environment, whose turns end with their end token; leave out "
                "one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class StepOptions(Settings):
    """Sizes of a step: sampled responses, epochs and minibatches."""

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
    stop_on: tuple[str, ...] = ()
    """End the run with a checkpoint once one of these alarms holds (docs/alarms.md), such as entropy-collapse judge-falling.
    Without it alarms only speak. A run that is resumed ends again if its alarm still holds; leave it out to continue."""
    ptx_data: str | None = None
    """SFT data mixed into the PPO loss (PPO-ptx): demonstrations or plain text, in the forms of heedful sft."""
    ptx_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of their loss, a mean over tokens as the policy loss is, on as many records as a minibatch has responses."""
    ema_decay: Annotated[float, BELOW_ONE] = 0.0
    """Per-step decay of a moving average of the weights; the average is evaluated and saved, sampling uses the live weights.
    0 disables it (InstructGPT: 0.992)."""

    def check(self) -> None:
        super().check()
        unknown = sorted(set(self.stop_on) - set(ALARM_NAMES))
        if unknown:
            raise ConfigError(f"--stop-on {unknown[0]} is no alarm; choose from {', '.join(ALARM_NAMES)}")
        if self.ptx_data is not None and not self.ptx_coef:
            raise ConfigError("--ptx-data has no effect with --ptx-coef 0; add --ptx-coef, such as 1")
        if self.ptx_coef and self.ptx_data is None:
            raise ConfigError(f"--ptx-coef {self.ptx_coef} weighs the loss of demonstrations: add --ptx-data")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(RewardOptions):
    """Processing of the scores before training."""

    SECTION = "reward"

    missing_eos_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """Penalty on the (normalised) score of a response that hits max-new-tokens."""
    overlong_buffer: Annotated[int, NOT_NEGATIVE] = 0
    """Tokens before max-new-tokens over which the overlong penalty grows from 0 to all of it (DAPO). Set it to a quarter of
    max-new-tokens if responses run into the limit. 0 is off."""
    overlong_penalty: Annotated[float, POSITIVE] = 1.0
    """Penalty on the (normalised) score of a response of max-new-tokens; less inside overlong-buffer."""
    score_clip: Annotated[float | None, POSITIVE] = None
    """Scores are kept within plus and minus this, after normalisation if there is one. None is off."""
    score_norm_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Reference responses whose scores set mean 0 and standard deviation 1 before training. 0 leaves scores as they are."""


@dataclass(frozen=True, kw_only=True)
class RolloutSamplingOptions(SamplingOptions):
    """Sampling of a step's responses, besides the settings of all sampling."""

    SECTION = "sampling"

    temperature: Annotated[float, POSITIVE] = 1.0
    """Divides the logits, in sampling and in every log-prob. Below 1 is more cautious."""
    dynamic_sampling_rounds: Annotated[int, NOT_NEGATIVE] = 0
    """Prompts whose responses all score the same teach nothing: this many times per step, others are sampled in their place
    (DAPO). What still ties after that stays (rollout/unfilled_frac), as it does if rewards fail on more of the new responses
    than max-failed-rewards allows in a batch. Each round costs sampling and scoring. 0 is off."""
    rollout_micro_batch_size: Annotated[int | None, POSITIVE] = None
    """Responses sampled at a time, and read at a time by reward models, policy, reference and critic before an update. It
    changes memory and speed, never the responses. None samples as many as the memory plan has room for, at least 64, and
    reads 64."""
    rollout_micro_batch_tokens: Annotated[int | None, POSITIVE] = None
    """Most tokens sampled at a time, besides rollout-micro-batch-size: rows times the longest prompt and max-new-tokens. It
    bounds the key-value cache, never the responses; a row that has more is sampled by itself. None means no limit."""


@dataclass(frozen=True, kw_only=True)
class HeldOutJudgeOptions(Settings):
    """Evaluation of the policy on held-out prompts."""

    SECTION = "evaluation"

    eval_prompts: Annotated[int, POSITIVE] = 128
    """Most held-out prompts to sample at an evaluation."""
    selection_rewards: tuple[str | Callable[..., Any], ...] = ()
    """Rewards that judge held-out responses to choose best/, in the forms of rewards, which may not have them; several are
    summed. None chooses by what training maximises: the score with its penalties, minus the price of the KL. A
    policy that is trained for long over-optimises its reward; a held-out reward detects it."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(
    StepOptions,
    EnvironmentOptions,
    ScoreOptions,
    RolloutSamplingOptions,
    SamplerOptions,
    HeldOutJudgeOptions,
    ReferenceOptions,
    TrainingOptions,
):
    """The initial policy, its rollout batches, and the processing of their scores."""

    SECTION = "model and data"

    model: Annotated[str, REQUIRED] = ""
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    max_prompt_tokens: Annotated[int | None, POSITIVE] = None
    """Longest prompt, in tokens; what happens to longer ones is what too-long says. Raise it for long documents, lower it if
    memory runs out. None is a quarter of what the model can read, but at least 256 and at most 1024."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What to do with prompts longer than max-prompt-tokens. drop and truncate are counted and reported. A truncated prompt
    keeps BOS, the system message and the tools; it loses its oldest turns, then the beginning of its last user message."""
    rollouts: Literal["samples", "all"] = "samples"
    """Responses to save. samples: the few of samples.jsonl. all: every one, with its tokens, log-probs, scores and KL, a
    Parquet file per step in rollouts/ (docs/tracking.md has the columns and sizes)."""
    learning_rate: Annotated[float, POSITIVE] = DefaultRate(3e-6)
    """Peak learning rate of the policy; constant within the epochs of one rollout batch. With lora-rank the default is ten
    times as large."""
    adam_eps: Annotated[float, POSITIVE] = 1e-5
    """Adam's epsilon; 1e-5 is what RL implementations use."""

    @property
    def step_rows(self) -> int:
        return self.minibatch_size

    @property
    def group_size(self) -> int:
        return self.samples_per_prompt

    @property
    def compares(self) -> Literal["prompt", "batch"] | None:
        """The responses whose scores are compared: those to one prompt, or the whole rollout batch."""
        return "prompt"

    @property
    def filters_on_servers(self) -> bool:
        """Whether servers apply top-k or top-p, so that their log-probs are those of the kept tokens."""
        return bool(self.sampler) and self.leaves_out

    @property
    def rollout_micro_batch(self) -> MicroBatch:
        return MicroBatch(self.rollout_micro_batch_size or ROLLOUT_ROWS, self.rollout_micro_batch_tokens)

    @property
    def scoring_micro_batch(self) -> MicroBatch:
        """The micro-batch of policy, reference, critic and reward models without gradients: no activations are saved, so it
        has as many rows as in sampling."""
        return MicroBatch(max(self.micro_batch_size, self.rollout_micro_batch.rows), self.micro_batch_tokens)

    @property
    def needs_reference(self) -> bool:
        """Whether training uses the reference's log-probs of each rollout batch."""
        return True

    @property
    def loads_reference(self) -> bool:
        """Whether the reference is used: in training, or, if it is named, in evaluations."""
        return self.needs_reference or self.reference is not None

    @property
    def makes_one_update(self) -> bool:
        """Whether a rollout batch gets one optimizer step: then the trained policy is the one that sampled."""
        return self.ppo_epochs == 1 and self.minibatch_size == self.rollout_batch_size

    @property
    def needs_old_pass(self) -> bool:
        """Whether the policy needs a pass over a rollout batch before the update. If not, the update's pass is the first."""
        return True

    @property
    def corrects(self) -> bool:
        """Whether the objective has importance weights for responses of another sampler."""
        return False

    @property
    def user_code(self) -> dict[str, str | Callable[..., Any]]:
        """Settings that name the user's own code, or are it, by their flags."""
        return {} if self.user_engine is None else {"--sampler": self.user_engine}

    @property
    def kl_price(self) -> float:
        """KL penalty coefficient in the choice of ``best/``, in units of the reward per nat."""
        return 0.0

    @property
    def best_metric(self) -> str:
        """The metric of evaluations that makes ``best/``: its highest value, of a critic's error the lowest."""
        return "eval/judge_mean" if self.selection_rewards else "eval/objective"

    def _check_environment(self) -> None:
        """Raise ConfigError for settings that do not go with an environment."""
        if not self.environment:
            return
        if self.overlong_buffer:
            raise ConfigError(
                f"--overlong-buffer {self.overlong_buffer} is about the policy's own tokens, but with --environment "
                "--max-new-tokens counts those of the other one too; leave out one of the two"
            )
        if self.user_engine is not None:
            raise ConfigError(
                "--environment does not go with a --sampler of yours, which cannot continue tokens of somebody else: let it "
                "play the episodes itself (heedful.as_responses takes masks), or leave out one of the two"
            )

    def check(self) -> None:
        super().check()
        self._check_environment()
        learned_from = [one for one in self.rewards if one in self.selection_rewards]
        if learned_from:
            raise ConfigError(
                f"--selection-rewards {redact(learned_from[0])} is one of --rewards: a reward used in training cannot judge "
                "the policy; leave it out of one of the two"
            )
        if "judge-falling" in self.stop_on and not self.selection_rewards:
            raise ConfigError(
                "--stop-on judge-falling needs a judge: add --selection-rewards, or leave judge-falling out"
            )
        multiple(self, "rollout_batch_size", "minibatch_size")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
        if self.response_length != "stop":
            refuse(
                self,
                "overlong_buffer",
                because=f"penalises responses that end late, but with --response-length {self.response_length} the policy "
                "does not choose their length; leave it out, or use --response-length stop",
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
                f"--ema-decay {self.ema_decay} does not go with --weights-dtype {self.weights_dtype}: the average would not "
                "change, because its steps are below the precision; leave out one of the two"
            )
        if self.score_norm_samples == 1:
            raise ConfigError("--score-norm-samples must be 0 or at least 2: one sample has no standard deviation")
        if self.sampler:
            self._check_sampler()

    def _check_sampler(self) -> None:
        """Raise ConfigError for settings that servers do not support, and for off-policy sampling without a correction."""
        if self.leaves_out and not self.corrects and self.user_engine is None:
            filtered = f"--top-k {self.top_k}" if self.top_k else f"--top-p {self.top_p:g}"
            raise ConfigError(
                f"--sampler with {filtered} draws from another distribution than the policy's, and nothing corrects for it; "
                f"{CORRECT} (heedful ppo, a2c, grpo), or leave {filtered} out"
            )
        if self.quantize != "none":
            raise ConfigError(
                f"--sampler does not go with --quantize {self.quantize}: servers get unquantized weights; leave out one of "
                "the two"
            )
        if self.cuda_graphs == "on":
            raise ConfigError("--cuda-graphs on is about sampling in this process, so not with --sampler; leave it out")


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(ObjectiveOptions, RolloutConfig):
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
        if user_code.is_named(self.advantage) and self.samples_per_prompt > 1:
            return "prompt"
        return self.estimator.compares

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_old_pass(self) -> bool:
        """True for several updates, whose ratios need the initial policy, or if advantages need KL, values or weights. With
        ``policy_loss`` sao several updates alone do not need it.

        Also with ``mask_truncated``: the update reads only some responses, but KL and entropy are those of all.
        """
        has_kl_in_reward = self.kl_in == "reward" and self.kl_coef > 0
        has_value_head = self.estimator.critic and self.critic == "shared"
        reads_first = has_kl_in_reward or has_value_head or self.importance != "none" or self.mask_truncated
        if (
            self.policy_loss == "sao"
        ):  # its ratio is to the sampler; later epochs would not say how the policy was before
            return reads_first or self.ppo_epochs > 1
        return not self.makes_one_update or reads_first or self.critic_warmup_steps > 0

    @property
    def corrects(self) -> bool:
        return self.importance != "none" or self.policy_loss == "sao"

    @property
    def kl_price(self) -> float:
        return self.kl_coef

    @property
    def user_code(self) -> dict[str, str | Callable[..., Any]]:
        named = {"--advantage": self.advantage, "--policy-loss": self.policy_loss}
        return {flag: value for flag, value in named.items() if user_code.is_named(value)} | super().user_code

    @property
    def critic_epochs(self) -> int:
        """``value_epochs``, or its default."""
        return self.value_epochs or (HEAD_EPOCHS if self.critic == "shared" else self.ppo_epochs)

    @property
    def critic_learning_rate(self) -> float:
        """``value_learning_rate``, or its default."""
        return self.value_learning_rate or (HEAD_LEARNING_RATE if self.critic == "shared" else self.learning_rate)

    def check(self) -> None:
        super().check()
        if self.estimator.compares == "prompt" and self.samples_per_prompt < 2:
            raise ConfigError(
                f"--samples-per-prompt is {self.samples_per_prompt}, but responses are compared with others to the same "
                "prompt; make it at least 2, or add --advantage reinforce"
            )
        if self.rollout_batch_size < 2 and (self.estimator.compares == "batch" or self.has_response_actions):
            reason = (
                f"with {self._of_actions} advantages are whitened over responses, which makes a single one 0"
                if self.has_response_actions
                else f"{self.advantage_flag} compares its responses"
            )
            raise ConfigError(f"--rollout-batch-size is {self.rollout_batch_size}, but {reason}; make it at least 2")
        if self.estimator.compares != "prompt":
            refuse(
                self,
                "dynamic_sampling_rounds",
                because=f"replaces prompts whose responses score the same, but {self.advantage_flag} does not compare "
                "the responses to one prompt, so it learns from these too; leave it out, or use heedful grpo",
            )
        if self.mask_truncated and self.response_length != "stop":
            raise ConfigError(
                f"--mask-truncated would leave out every response that --response-length {self.response_length} cuts; leave "
                "out one of the two"
            )
        if self.policy_loss == "a2c" and (self.ppo_epochs > 1 or self.minibatch_size != self.rollout_batch_size):
            raise ConfigError(
                "--policy-loss a2c has no ratio to correct for changes of the policy since it sampled, so it makes one step "
                f"per rollout batch: --ppo-epochs 1 and --minibatch-size {self.rollout_batch_size}, got --ppo-epochs "
                f"{self.ppo_epochs} and --minibatch-size {self.minibatch_size} (--micro-batch-size bounds the memory)"
            )
        if self.kl_target is not None and self.rollout_batch_size >= 5 * self.kl_horizon:
            raise ConfigError(
                f"--kl-horizon {self.kl_horizon} is too short for --rollout-batch-size {self.rollout_batch_size}: one step "
                f"could make --kl-coef 0 or negative; make it at least {self.rollout_batch_size // 5 + 1}"
            )
        if self.critic_warmup_steps >= self.steps and self.critic_warmup_steps:
            raise ConfigError(
                f"--critic-warmup-steps {self.critic_warmup_steps} leaves no step of --steps {self.steps} for the policy; "
                "lower it, or raise --steps"
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
        """Raise ConfigError if sampling ahead is not possible."""
        ahead = f"--async-steps {self.async_steps}"
        if not self.sampler_addresses:
            raise ConfigError(
                f"{ahead} belongs to --sampler, which is not set: this process cannot sample while it learns; add --sampler "
                "vllm:http://HOST:PORT, or leave it out"
            )
        if not self.corrects:
            raise ConfigError(
                f"{ahead} trains on responses of older weights without a correction; {CORRECT}, or use --async-steps 0"
            )
        if self.dynamic_sampling_rounds:
            raise ConfigError(
                f"{ahead} does not go with --dynamic-sampling-rounds, whose prompts are not known in advance; leave out one "
                "of the two"
            )
        if self.sampler_sleep:
            raise ConfigError(
                f"{ahead} samples during the update, but with --sampler-sleep servers sleep then; leave out one of the two"
            )
        if self.environment and self.sampler_weights == "nccl":
            raise ConfigError(
                f"{ahead} with --environment needs the weights of an episode's first turn until its last, also if an "
                "evaluation wants others, which only a folder can hold; use --sampler-weights folder"
            )
        if self.async_steps > 1 and self.sampler_weights == "nccl":
            raise ConfigError(
                f"{ahead} needs several versions of the weights at a time, which only a folder can hold; use "
                "--sampler-weights folder, or --async-steps 1"
            )

    def _check_reference(self) -> None:
        """Raise ConfigError for a reference, or a device for it, that is not used."""
        if self.needs_reference:
            return
        refuse(
            self,
            "max_kl",
            because="limits the KL to the reference, which is not measured at --kl-coef 0; leave it out, or set --kl-coef "
            "above 0, such as 1e-6",
        )
        if "kl-budget" in self.stop_on:
            raise ConfigError(
                "--stop-on kl-budget needs the KL to the reference, which is not measured at --kl-coef 0; leave it out, or "
                "set --kl-coef above 0, such as 1e-6"
            )
        if self.reference is None and self.reference_device != "same":
            raise ConfigError(
                f"--reference-device {self.reference_device} has no effect: --kl-coef 0 needs no reference, so none is "
                "loaded; leave it out, or set --kl-coef above 0"
            )
        holds_out = self.eval_data is not None or self.eval_fraction > 0
        if self.reference is not None and not holds_out and not self.score_norm_samples:
            raise ConfigError(
                f"--reference {self.reference} would not be used: --kl-coef 0 gives no KL penalty, and there is no held-out "
                "data to measure KL on; leave it out, set --kl-coef above 0, or set --eval-fraction or --eval-data"
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """PPO: improve a policy against a reward while it stays near its reference."""

    algorithm = "ppo"

    kl_kind: KLKind | None = "k1"
    """Estimator of the penalty. In the reward k1: the return is then score minus kl-coef times KL. In the loss k2 (its
    gradient is the KL's in expectation), k3 (GRPO's) or weighted-k3 (k3 times the probability ratio: in expectation the KL's
    gradient, also in a rollout batch's later updates); k1's gradient is zero in expectation there."""


@dataclass(frozen=True, kw_only=True)
class A2CConfig(PPOConfig):
    """A2C: improve a policy against a reward with one unclipped step per rollout batch."""

    algorithm = "a2c"

    policy_loss: PolicyLoss | OwnCode | Callable[..., Any] = "a2c"
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


@dataclass(frozen=True, kw_only=True)
class CriticConfig(PPOConfig):
    """Train a critic on the returns of a policy that stands still, before PPO moves it."""

    algorithm = "critic"
    trains_policy = False

    model: Annotated[str, REQUIRED] = ""
    """The policy that PPO will start from: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME. It samples
    and stays as it is."""
    critic: Literal["shared", "separate", "reward"] = "separate"
    """separate: a network of its own. reward: one that starts as the first reward model among the rewards, head included."""
    learning_rate: Annotated[float, POSITIVE] = DefaultRate(1e-5)
    """Peak learning rate of the critic. With lora-rank the default is ten times as large."""
    value_lambda: Annotated[float | None, FRACTION] = 1.0
    """Lambda of the critic's targets. 1: the rewards that came."""
    ppo_epochs: Annotated[int, POSITIVE] = 1
    """Passes over a rollout batch."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """KL penalty coefficient: 0, as the policy is its own reference."""
    eval_every: Annotated[int, NOT_NEGATIVE] = 5
    """Steps between evaluations on held-out prompts. 0 evaluates only at the start and the end."""
    early_stopping_patience: Annotated[int, NOT_NEGATIVE] = 3
    """Stop after this many evaluations in a row in which the values came no nearer to the held-out returns. 0 never stops
    early."""

    @property
    def needs_old_pass(self) -> bool:
        return False

    @property
    def best_metric(self) -> str:
        return "eval/value_error"

    def check(self) -> None:
        super().check()
        if self.critic == "shared":
            raise ConfigError(
                "--critic shared is a head on the policy's trunk, which moves with the policy: set --critic-warmup-steps of "
                "heedful ppo, or use --critic separate"
            )
        refuse(
            self,
            *("advantage", "gae_lambda", "gae_lambda_alpha", "value_lambda", "whiten_advantages"),
            *("policy_loss", "importance_level", "loss_reduction", "clip_range", "clip_range_high", "dual_clip"),
            *("positive_coef", "entropy_coef", "target_entropy", "approx_kl_limit", "max_approx_kl"),
            *("kl_coef", "kl_in", "kl_kind", "kl_target", "importance", "reference", "max_kl"),
            *("ptx_data", "ema_decay", "mask_truncated", "async_steps", "selection_rewards", "critic_warmup_steps"),
            *("value_coef", "value_learning_rate", "value_epochs"),
            because="is about a policy that learns, but here only the critic does, from the rewards that came; leave it out "
            "(--learning-rate and --ppo-epochs are the critic's)",
        )
        if not self.eval_fraction and self.eval_data is None:
            raise ConfigError(
                "a critic is trained until its values come no nearer to held-out returns, but nothing is held out: set "
                "--eval-fraction or --eval-data"
            )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(OnlineConfig):
    """GRPO: several responses to each prompt, each judged against the others; by flags RLOO, Dr. GRPO, DAPO, GSPO,
    REINFORCE."""

    algorithm = "grpo"

    samples_per_prompt: Annotated[int, POSITIVE] = 8
    """Responses to each prompt: a group. rollout-batch-size counts them all."""
    ppo_epochs: Annotated[int, POSITIVE] = 1
    """Passes over a rollout batch. More epochs reuse each batch more; watch policy/approx_kl."""
    advantage: Advantage | OwnCode | Callable[..., Any] = "grpo"
    """How good a response was. grpo: score minus the mean of the responses to its prompt, over their standard deviation.
    dr_grpo: without the division. rloo: minus the mean of the others. reinforce: minus the mean of the rollout batch;
    samples-per-prompt may be 1. gae: rewards against a critic's values (PPO)."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""
    loss_reduction: Literal["token", "sequence", "fixed"] = "sequence"
    """How the loss is averaged. sequence: over responses, of each one's mean over its tokens (GRPO). token: over all tokens
    (PPO, DAPO). fixed: the sum over responses * max-new-tokens (Dr. GRPO)."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where the KL penalty goes: into the loss with its gradient, averaged as the loss is, or off the score of the response
    (RLOO; not with advantage grpo)."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.04
    """KL penalty coefficient. Raising it keeps the text closer to the reference."""


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(RolloutConfig):
    """Online DPO: several responses of the policy to each prompt, of which the reward prefers the best to the worst."""

    algorithm = "online-dpo"
    learns_pairs = True

    samples_per_prompt: Annotated[int, POSITIVE] = 2
    """Responses to each prompt; the best and the worst make a pair. rollout-batch-size counts them all."""
    minibatch_size: Annotated[int, POSITIVE] = 64
    """Responses per optimizer step, so minibatch-size / samples-per-prompt pairs."""
    ppo_epochs: Annotated[int, POSITIVE] = 1
    """Passes over a rollout batch."""
    loss: Literal["sigmoid", "ipo", "ipo-sum", "hinge"] = "sigmoid"
    """Which loss. sigmoid: DPO. ipo: a squared distance to a margin of 1 / (2 beta) nats per token, which does not push
    certain pairs for ever; ipo-sum: per response, as in the paper. hinge: SLiC."""
    beta: Annotated[float, POSITIVE] = 0.1
    """Strength of the pull to the reference. Raising it keeps the policy closer."""

    @property
    def step_rows(self) -> int:
        return 2 * self.minibatch_size // self.samples_per_prompt

    @property
    def strength(self) -> float:
        return self.beta

    @property
    def rows_per_pair(self) -> int:
        """Number of responses per preference pair."""
        return self.samples_per_prompt

    @property
    def needs_old_pass(self) -> bool:
        """Only for metrics, because the loss has no ratio: with one update, the update's own pass gives them."""
        return not self.makes_one_update

    @property
    def kl_price(self) -> float:
        return self.beta

    def check(self) -> None:
        super().check()
        if self.samples_per_prompt < 2:
            raise ConfigError(
                f"--samples-per-prompt is {self.samples_per_prompt}, but a pair needs two responses to one prompt; make it "
                "at least 2"
            )
        if self.minibatch_size % self.samples_per_prompt:
            raise ConfigError(
                f"--minibatch-size {self.minibatch_size} is not a multiple of --samples-per-prompt "
                f"{self.samples_per_prompt}: responses to one prompt must be in one minibatch"
            )
