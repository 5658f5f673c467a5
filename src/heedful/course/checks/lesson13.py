"""Lesson 13: hacking the reward."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """The optimal policy under a KL penalty."""
    for ref, rewards, beta in (
        ([0.5, 0.3, 0.2], [0.0, 1.0, 2.0], 1.0),
        ([0.9, 0.1], [1.0, 1.0], 0.2),
        ([0.999, 0.001], [0.0, 1000.0], 0.01),
    ):
        found = answer(ref, rewards, beta)
        same(
            found, _optimal(ref, rewards, beta), f"kl_optimal with ref_probs {ref}, rewards {rewards} and beta {beta:g}"
        )


def _optimal(ref: Sequence[float], rewards: Sequence[float], beta: float) -> list[float]:
    exponents = [math.log(p) + r / beta for p, r in zip(ref, rewards, strict=True)]
    weights = [math.exp(one - max(exponents)) for one in exponents]
    return [one / sum(weights) for one in weights]


def check_2(answer: Callable[..., Any]) -> None:
    """A rule that a list of all answers does not satisfy."""
    for response, expected, reward in (
        ("4", "4", 0.998),
        (" 4. ", "4", 0.998),
        ("0 1 2 3 4 5 6 7 8 9", "4", -1.02),
        ("i like Machine Learning!", "I like machine learning", 0.96),
        ("", "4", -1.0),
    ):
        same(answer(response, expected), reward, f"strict_reward({response!r}, {expected!r})")


def check_3(answer: Callable[..., Any]) -> None:
    """Where the true reward peaks."""
    for alpha, b in ((1.0, 0.5), (0.6, 0.2), (1.0, 1.0)):
        same(answer(alpha, b), math.exp(2 * (alpha / b - 1)), f"peak_kl({alpha}, {b}), which is d squared")
