"""Settings of GRPO and its relatives, which compare the responses to one prompt and have no critic."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import positive
from heedful.configs.online import OnlineOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(OnlineOptions):
    """GRPO: several responses to each prompt, each judged against the others; by flags RLOO, Dr. GRPO, DAPO's loss, GSPO,
    REINFORCE."""

    samples_per_prompt: int = 8
    """Responses to each prompt: a group. rollout-batch-size counts them all."""
    ppo_epochs: int = 1
    """Passes over a rollout batch. More squeeze it harder; policy/approx_kl tells when too hard."""
    advantage: Literal["group", "group-mean", "leave-one-out", "batch-mean"] = "group"
    """Score minus the group's mean, over its standard deviation (GRPO); without the division (Dr. GRPO); minus the mean
    of the others (RLOO); minus the mean of the rollout batch (REINFORCE), where samples-per-prompt may be 1."""
    ratio: Literal["token", "sequence", "sequence-mean"] = "token"
    """What is clipped: each token's probability ratio; the response's, one action (RLOO); its geometric mean (GSPO, which
    clips at about 3e-4)."""
    aggregate: Literal["sequence", "token", "fixed"] = "sequence"
    """Mean over responses of token means (GRPO); over all tokens (DAPO's loss); sum over responses * max-new-tokens (Dr.
    GRPO)."""
    clip_range_high: float | None = None
    """How far the ratio may rise, where that is not clip-range (DAPO: 0.28)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes: k3 a token into the loss, or k1 of the response off its score (RLOO; not with advantage
    group)."""
    kl_coef: float = 0.04
    """Price of a nat of KL to the reference. Raising it keeps the text closer to the reference."""

    def __post_init__(self) -> None:
        self.check_online()
        positive(self, "clip_range_high")
        if self.advantage == "batch-mean" and self.rollout_batch_size < 2:
            raise ConfigError(
                f"--rollout-batch-size is {self.rollout_batch_size}, but --advantage batch-mean compares its responses; make "
                "it at least 2"
            )
        if self.samples_per_prompt < 2 and self.advantage != "batch-mean":
            raise ConfigError(
                f"--samples-per-prompt is {self.samples_per_prompt}, but responses are compared with others to the same "
                "prompt; make it at least 2, or add --advantage batch-mean"
            )
        if self.advantage == "group" and self.kl_in == "reward" and self.kl_coef:
            raise ConfigError(
                "--kl-in reward does not go with --advantage group: dividing by the group's standard deviation takes the "
                "meaning out of --kl-coef; add --advantage group-mean, or --advantage leave-one-out"
            )
        if self.ratio != "token" and self.aggregate != "sequence":
            raise ConfigError(
                f"--aggregate {self.aggregate} averages tokens, but --ratio {self.ratio} has one ratio a response; leave "
                "out one of the two"
            )
        if self.ratio != "token" and self.kl_in == "loss" and self.kl_coef:
            raise ConfigError(
                f"--ratio {self.ratio} has no penalty a token in its loss; add --kl-in reward, or --kl-coef 0"
            )
