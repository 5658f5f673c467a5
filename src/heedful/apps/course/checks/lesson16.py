"""Hidden tests of lesson 16, turns."""

from collections.abc import Callable
from typing import Any

import torch

from heedful.apps.course.checks import first, normal, same


def check_1(answer: Callable[..., Any]) -> None:
    """The policy's own tokens of an episode."""
    for ids, speak, end, own, told in (
        ([5, 1, 7, 8, 2, 6, 6, 2, 1, 9, 2], 1, 2, "00111000011", "two turns"),
        ([1, 4, 0, 5, 0, 1, 5, 5, 5], 1, 0, "011000111", "a second turn that is cut"),
        ([3, 2, 9, 2, 4, 2, 9, 2, 7], 9, 2, "000100010", "turns that have nothing but their end"),
    ):
        expected = torch.tensor([letter == "1" for letter in own])
        same(answer(torch.tensor(ids), speak, end), expected, f"own_mask({ids}, {speak}, {end}), {told}")


def check_2(answer: Callable[..., Any]) -> None:
    """The lambda per token with the weight of a lambda per turn."""
    for own, others, gae_lambda in ((50, 4, 0.95), (4, 20, 0.5), (1, 7, 0.9), (39, 0, 0.95)):
        right = gae_lambda ** (1 / own)
        same(answer(own, others, gae_lambda), right, f"same_weight({own}, {others}, {gae_lambda:g})", tolerance=1e-6)


def check_3(answer: Callable[..., Any]) -> None:
    """Rewards to go by turn, minus those of the other episodes."""
    for seed, lengths in ((0, [3, 1, 2, 3]), (1, [1, 2]), (2, [2, 4, 4, 1, 3])):
        played = first(lengths, max(lengths))
        rewards = normal(seed, *played.shape)
        to_go = torch.where(played, rewards, 0.0).flip(1).cumsum(1).flip(1)
        others = (to_go.sum(dim=0) - to_go) / (len(lengths) - 1)
        told = f"without_a_critic with episodes of {', '.join(map(str, lengths))} turns"
        same(answer(rewards, played), torch.where(played, to_go - others, 0.0), told)
