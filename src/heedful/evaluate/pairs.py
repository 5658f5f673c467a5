"""Score two policies' responses to the same prompts, each by itself or one against the other."""

from collections.abc import Sequence
from dataclasses import replace

from heedful.rewards import Completion, Reward, score_tokens
from heedful.rewards.judge import JudgeReward
from heedful.rewards.scoring import Scores


def score_pairs(rewards: Sequence[Reward], ours: Sequence[Completion], theirs: Sequence[Completion]) -> list[Scores]:
    """The scores of responses and of those that they are compared with, one by one.

    If a judge compares, it is given the two as one group; the better one then has the score 1 and the other 0. Raises
    RewardError.
    """
    if not any(isinstance(reward.function, JudgeReward) and reward.function.group_size == 2 for reward in rewards):
        return [score_tokens(rewards, completions) for completions in (ours, theirs)]
    given = score_tokens(rewards, [completion for pair in zip(ours, theirs, strict=True) for completion in pair])
    return [
        replace(
            given,
            totals=given.totals[side::2],
            tokens=None,
            failed=tuple(row // 2 for row in given.failed if row % 2 == side),
            measured=given.measured if side == 0 else {},
        )
        for side in (0, 1)
    ]
