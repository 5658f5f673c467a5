"""Lesson 13: hacking the reward."""

import math
from collections.abc import Callable
from typing import Any

from heedful.apps.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """The reward needed to overcome the KL penalty of an unlikely text."""
    for hack, best, beta in ((-60.0, -1.0, 0.1), (-5.0, -5.0, 0.2), (-2.0, -4.0, 1.0)):
        same(answer(hack, best, beta), beta * (best - hack), f"reward_to_win({hack}, {best}, {beta})")


def check_2(answer: Callable[..., Any]) -> None:
    """A rule that a list of all answers cannot hack."""
    for response, expected, reward in (
        ("4", "4", 0.998),
        (" 4. ", "4", 0.998),
        ("0 1 2 3 4 5 6 7 8 9", "4", -1.02),
        ("i like Machine Learning!", "I like machine learning", 0.96),
        ("", "4", -1.0),
        ("通义千问。", "通义千问", 0.992),
        ("通义千问万岁", "通义千问", -1.012),
        ("我是通义千问", "通义千问", -1.012),
        ("czq 是神", "czq是神！", 0.99),
        ("7", "4", -1.002),
    ):
        same(answer(response, expected), reward, f"strict_reward({response!r}, {expected!r})")


def check_3(answer: Callable[..., Any]) -> None:
    """The KL at the peak of the true reward."""
    for alpha, b in ((1.0, 0.5), (0.6, 0.2), (1.0, 1.0)):
        same(answer(alpha, b), math.exp(2 * (alpha / b - 1)), f"peak_kl({alpha}, {b}), which is d squared")
