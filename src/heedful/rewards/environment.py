"""The rewards that environments gave during sampling."""

from collections.abc import Sequence
from typing import Any

from heedful.rewards.results import OneScore, Problem
from heedful.types import Episode


def environment_reward(episodes: Sequence[Episode | None], **_: Any) -> list[OneScore | Problem]:
    """The reward of each turn at its last token, the end token included; None where an environment gives none.

    An episode whose environment failed has no score.
    """
    return [None if one is None else Problem(one.failure) if one.failure else _of_tokens(one) for one in episodes]


def _of_tokens(episode: Episode) -> OneScore:
    if not episode.rewards:
        return None
    numbers = [0.0] * episode.ends[-1]
    for end, reward in zip(episode.ends, episode.rewards, strict=True):
        numbers[end - 1] += reward
    return numbers
