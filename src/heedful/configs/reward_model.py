"""Settings of reward-model training."""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.options import TrainingOptions
from heedful.configs.ranges import FRACTION, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True, kw_only=True)
class RewardConfig(TrainingOptions):
    """Reward model: learn from pairs or longer rankings which responses people prefer."""

    model: str
    """Model to start from: the SFT model, any language model, or an encoder."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Pairs, or rankings, per optimizer step."""
    epochs: Annotated[float, POSITIVE] = 1
    """Passes over the data. Reward models overfit after one."""
    max_steps: Annotated[int | None, POSITIVE] = None
    """Optimizer steps; overrides epochs."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Longest prompt with response in tokens; None is the model's context."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What to do with pairs whose chosen and rejected responses are equal (also after truncation), and with rankings that
    prefer a response to an equal one."""
    center_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Pull of the scores towards mean 0: coefficient of (chosen + rejected)^2. 0.01 is usual."""
    label_smoothing: Annotated[float, FRACTION] = 0.0
    """Share of labels assumed to be wrong. Raising it makes the model less sure."""
    offset_data: str | None = None
    """Demonstrations (sft's columns) that should score 0 on average: every saved model gets the offset that makes it so."""
