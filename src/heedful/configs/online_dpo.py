"""Settings of online DPO."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from heedful.configs.online import RolloutConfig
from heedful.configs.ranges import POSITIVE
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(RolloutConfig):
    """Online DPO: several responses of the policy to each prompt, of which the reward prefers the best to the worst."""

    algorithm: ClassVar[str] = "online-dpo"
    """The command, and the name of its runs."""
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
    def needs_old_pass(self) -> bool:
        """The loss has no ratio: only metrics need it, and only the first update's pass can give them."""
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
                f"{self.samples_per_prompt}: responses to one prompt are learned from together"
            )
