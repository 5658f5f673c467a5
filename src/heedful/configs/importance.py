"""Settings of what corrects for a sampler that is not quite the policy in training."""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.checks import refuse
from heedful.configs.objective import ObjectiveOptions
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE
from heedful.errors import ConfigError

Importance = Literal["none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]


@dataclass(frozen=True, kw_only=True)
class ImportanceOptions(ObjectiveOptions):
    """How tokens are weighed that something else than the policy drew."""

    SECTION = "algorithm"

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
    response (sequence-) are next to nothing: by this the gradient keeps its size."""

    def check(self) -> None:
        super().check()
        if self.importance == "none":
            refuse(
                self,
                *("importance_low", "importance_high", "importance_normalise"),
                because="belongs to --importance, which is none; add --importance sequence-truncate, or leave it out",
            )
        if self.importance.endswith("truncate"):
            refuse(
                self,
                "importance_low",
                because=f"leaves tokens out, but --importance {self.importance} only cuts weights down; use --importance "
                "token-mask or sequence-mask, or leave it out",
            )
        if self.importance_low >= self.importance_high:
            raise ConfigError(
                f"--importance-low {self.importance_low:g} is not below --importance-high {self.importance_high:g}, so no "
                "token would count; IcePop has 0.5 and 5"
            )
        if self.importance.startswith("token") and self.surrogate[1] != "token":
            whole = f"--ratio {self.ratio}" if self.ratio != "token" else f"--action {self.action}"
            raise ConfigError(
                f"--importance {self.importance} weighs single tokens, but with {whole} a whole response is one action; use "
                f"--importance {self.importance.replace('token', 'sequence')}"
            )
