"""What a policy update maximises, as choices that combine: advantage, surrogate, average over tokens, KL penalty.

A new advantage estimator is an entry in `ESTIMATORS` and its name in `Advantage`; its function is in
`heedful.train.online.advantages`. A new surrogate is a name in `PolicyLoss` and a function in `heedful.core.surrogates`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.checks import changed, refuse
from heedful.configs.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, Range
from heedful.configs.settings import Settings
from heedful.errors import ConfigError

Advantage = Literal["gae", "group", "group-mean", "leave-one-out", "batch-mean", "reinforce++"]
PolicyLoss = Literal["clip", "a2c", "cispo"]
Ratio = Literal["token", "sequence", "sequence-mean"]
KLKind = Literal["k1", "k2", "k3", "weighted-k3"]


@dataclass(frozen=True)
class Estimator:
    """What an advantage estimator needs, and what it can make use of."""

    critic: bool = False
    """It takes values off the rewards."""
    per_token: bool = False
    """It uses rewards at the tokens that they fall on; others see one number per response."""
    compares: Literal["prompt", "batch"] | None = None
    """Among which responses it compares: those to one prompt, or the whole rollout batch."""


ESTIMATORS = {
    "gae": Estimator(critic=True, per_token=True),
    "group": Estimator(compares="prompt"),
    "group-mean": Estimator(compares="prompt"),
    "leave-one-out": Estimator(compares="prompt"),
    "batch-mean": Estimator(compares="batch"),
    "reinforce++": Estimator(per_token=True),
}


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Settings):
    """Advantage, surrogate, average and KL penalty."""

    SECTION = "algorithm"

    advantage: Advantage = "gae"
    """How good a response was. gae: rewards against a critic's values (PPO). group: score minus the mean of the responses to
    its prompt, over their standard deviation (GRPO). group-mean: without the division (Dr. GRPO). leave-one-out: minus the
    mean of the others (RLOO). batch-mean: minus the mean of the rollout batch (REINFORCE); samples-per-prompt may be 1.
    reinforce++: the rewards to come at each token, without a critic (heedful ppo --advantage reinforce++)."""
    gamma: Annotated[float, FRACTION] = 1.0
    """Discount factor per token."""
    gae_lambda: Annotated[float, FRACTION] = 0.95
    """Trades bias against variance of the advantages: 1 trusts rewards, 0 trusts values."""
    whiten_rewards: bool = False
    """Scale the per-token rewards of a batch to variance 1."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""

    action: Literal["token", "response"] = "token"
    """What one action is for a critic: each token, or the whole response, with one advantage and one probability ratio; its
    value is that of the prompt, so gamma and gae-lambda do not apply."""
    policy_loss: PolicyLoss = "clip"
    """What is maximised. clip: PPO's clipped surrogate. a2c: advantage times log-prob, without a ratio, so one optimizer
    step per rollout batch. cispo: the same times the clipped ratio as a fixed weight, so that tokens beyond the bounds
    still learn."""
    ratio: Ratio = "token"
    """What is clipped: each token's probability ratio, the response's (one action; RLOO), or the response's geometric mean
    (GSPO, which clips at about 3e-4)."""
    aggregate: Literal["token", "sequence", "fixed"] = "token"
    """How the loss is averaged. token: over all tokens (PPO, DAPO). sequence: over responses, of each one's mean over its
    tokens (GRPO). fixed: the sum over responses * max-new-tokens (Dr. GRPO)."""
    clip_range: Annotated[float, POSITIVE] = 0.2
    """How far the probability ratio may move before its gradient stops."""
    clip_range_high: Annotated[float | None, POSITIVE] = None
    """How far the ratio may rise, if that is not clip-range (DAPO: 0.28)."""
    dual_clip: Annotated[float | None, Range(above=1)] = None
    """Above 1: a bad action counts at most this many times its advantage, however much likelier it became. None is off."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Bonus on the policy's entropy. Raising it keeps responses diverse."""
    target_entropy: Annotated[float | None, POSITIVE] = None
    """Mean entropy per token, in nats, that the bonus holds: entropy-coef is only where it starts, then it rises while
    policy/entropy is below this, and is off while it is above. Set it if the entropy collapses. None keeps entropy-coef."""
    entropy_step: Annotated[float, POSITIVE] = 0.005
    """How far the coefficient moves in one step towards target-entropy. Raising it reacts sooner and overshoots more."""
    approx_kl_limit: Annotated[float | None, POSITIVE] = None
    """Once policy/approx_kl of a minibatch is above this, neither it nor the rest of the rollout batch is learned from. None
    is off."""

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

    @property
    def estimator(self) -> Estimator:
        """What the advantage needs."""
        return ESTIMATORS[self.advantage]

    @property
    def surrogate(self) -> tuple[str, str]:
        """Key of `heedful.core.surrogates.SURROGATES`: the policy loss, and what one action is for it."""
        return self.policy_loss, "sequence" if self.action == "response" and self.ratio == "token" else self.ratio

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
        if self.target_entropy is None and changed(self, "entropy_step"):
            raise ConfigError(
                f"--entropy-step {self.entropy_step:g} belongs to --target-entropy, which is not set; add it"
            )

    def _check_advantage(self) -> None:
        if not self.estimator.per_token:
            refuse(
                self,
                *("gamma", "whiten_rewards"),
                because=f"is about rewards per token, but --advantage {self.advantage} compares whole responses; leave it "
                "out, or use --advantage gae (heedful ppo, a2c)",
            )
        if not self.estimator.critic:
            refuse(
                self,
                *("gae_lambda", "action"),
                because=f"is about a critic's values, and --advantage {self.advantage} has none; leave it out, or use "
                "--advantage gae (heedful ppo, a2c)",
            )
        if self.action == "response":
            refuse(
                self,
                *("gamma", "gae_lambda"),
                because="spreads rewards over tokens, but with --action response the response is one action; leave out one "
                "of the two",
            )

    def _check_surrogate(self) -> None:
        if self.policy_loss == "a2c":
            refuse(
                self,
                *("ratio", "clip_range", "clip_range_high", "dual_clip", "approx_kl_limit"),
                because="is about the probability ratio, which --policy-loss a2c does not have; leave it out, or use "
                "--policy-loss clip (heedful ppo, grpo)",
            )
        if self.policy_loss == "cispo":
            refuse(
                self,
                *("ratio", "action", "dual_clip"),
                because="does not go with --policy-loss cispo, which weighs each token by its own clipped ratio; leave it "
                "out, or use --policy-loss clip (heedful ppo, grpo)",
            )
        if self.ratio != "token" and self.estimator.per_token and self.action == "token":
            raise ConfigError(
                f"--ratio {self.ratio} has one ratio per response, but --advantage {self.advantage} gives each token an "
                "advantage of its own; add --action response, or an advantage that compares responses (heedful grpo)"
            )
        if self.surrogate[1] != "token" and changed(self, "aggregate"):
            raise ConfigError(
                f"--aggregate {self.aggregate} averages tokens, but --ratio {self.surrogate[1]} has one ratio per response; "
                "leave out one of the two"
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
        if self.advantage == "group" and self.kl_in == "reward" and self.kl_coef:
            raise ConfigError(
                "--kl-in reward does not go with --advantage group: dividing by the group's standard deviation takes the "
                "meaning out of --kl-coef; add --advantage group-mean, or --advantage leave-one-out"
            )
        if self.ratio != "token" and self.kl_in == "loss" and self.kl_coef:
            raise ConfigError(
                f"--ratio {self.ratio} has no penalty per token in its loss; add --kl-in reward, or --kl-coef 0"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                "--kl-target steers --kl-coef by factors, which cannot move it away from 0; set --kl-coef above 0"
            )
        if self.kl_target is None and changed(self, "kl_horizon"):
            raise ConfigError(f"--kl-horizon {self.kl_horizon} belongs to --kl-target, which is not set; add it")
