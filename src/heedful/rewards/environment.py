"""The rewards that environments gave during sampling."""

from collections.abc import Sequence
from typing import Any

from heedful.rewards.results import OneScore
from heedful.types import Episode


def environment_reward(episodes: Sequence[Episode], **_: Any) -> list[OneScore]:
    """The reward of each turn at its last token, the end token included; None where an environment gives none."""
    return [_of_tokens(one) if one.rewards else None for one in episodes]


def _of_tokens(episode: Episode) -> list[float]:
    numbers = [0.0] * episode.ends[-1]
    for end, reward in zip(episode.ends, episode.rewards, strict=True):
        numbers[end - 1] += reward
    return numbers
