"""From the scores that rewards gave to those that training counts: normalised, clipped, with penalties of length."""

import torch
from torch import Tensor

from heedful import core
from heedful.configs.online import RolloutConfig
from heedful.sampling.rollouts import Rollouts


def shape(scores: Tensor, rollouts: Rollouts, norm: core.ScoreNorm, config: RolloutConfig) -> Tensor:
    """Scores ``[batch]`` as training counts them: normalised, clipped, with the penalties of responses that end late or not.

    ``--overlong-buffer`` takes off what `core.overlong_penalty` says, times ``--overlong-penalty``.
    """
    clipped = core.clip_scores((scores - norm.mean) / norm.std, config.score_clip)
    shaped = penalise_missing_eos(clipped, rollouts.truncated, config)
    if config.overlong_buffer:
        late = core.overlong_penalty(
            rollouts.lengths, max_new_tokens=config.max_new_tokens, buffer=config.overlong_buffer
        )
        shaped = shaped + config.overlong_penalty * late
    return shaped


def penalise_missing_eos(scores: Tensor, truncated: Tensor, config: RolloutConfig) -> Tensor:
    """Scores ``[batch]`` with the penalty of responses that were cut by length, as ``missing_eos`` says.

    "subtract" takes it off the score (as TRL does), "replace" puts minus the penalty in the score's place (Ziegler et al.
    2019, Huang et al. 2023, with a penalty of 1).
    """
    if config.missing_eos == "replace":
        return torch.where(truncated, -config.missing_eos_penalty, scores)
    return scores - config.missing_eos_penalty * truncated
