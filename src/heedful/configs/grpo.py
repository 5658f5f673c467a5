"""GRPO as a preset, from which RLOO, Dr. GRPO, DAPO, GSPO and REINFORCE are a flag or two away."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from heedful.configs.objective import Advantage
from heedful.configs.online import OnlineConfig
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(OnlineConfig):
    """GRPO: several responses to each prompt, each judged against the others; by flags RLOO, Dr. GRPO, DAPO, GSPO,
    REINFORCE."""

    algorithm: ClassVar[str] = "grpo"
    """The command, and the name of its runs."""

    samples_per_prompt: Annotated[int, POSITIVE] = 8
    """Responses to each prompt: a group. rollout-batch-size counts them all."""
    ppo_epochs: Annotated[int, POSITIVE] = 1
    """Passes over a rollout batch. More epochs reuse each batch more; watch policy/approx_kl."""
    advantage: Advantage = "group"
    """How good a response was. group: score minus the mean of the responses to its prompt, over their standard deviation
    (GRPO). group-mean: without the division (Dr. GRPO). leave-one-out: minus the mean of the others (RLOO). batch-mean: minus
    the mean of the rollout batch (REINFORCE); samples-per-prompt may be 1. gae: rewards against a critic's values (PPO)."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""
    aggregate: Literal["token", "sequence", "fixed"] = "sequence"
    """How the loss is averaged. sequence: over responses, of each one's mean over its tokens (GRPO). token: over all tokens
    (PPO, DAPO). fixed: the sum over responses * max-new-tokens (Dr. GRPO)."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where the KL penalty goes: into the loss with its gradient, averaged as the loss is, or off the score of the response
    (RLOO; not with advantage group)."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.04
    """KL penalty coefficient. Raising it keeps the text closer to the reference."""
