"""Lesson 12: you are the labeller."""

import math
from collections.abc import Callable
from typing import Any

from heedful import core
from heedful.apps.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """The interval of a share."""
    for right, n in ((15, 30), (30, 30), (2, 10), (41, 50)):
        expected = core.share_interval([[1.0]] * right + [[0.0]] * (n - right))
        same(answer(right / n, n), [*expected], f"wilson({right / n:g}, {n})")
    same(answer(0.4, 20, 1.0), [0.29775, 0.51177], "wilson(0.4, 20, z=1)")


def check_2(answer: Callable[..., Any]) -> None:
    """Agreement beyond chance."""
    for first, second in (
        ([0, 1, 0, 1], [0, 1, 1, 1]),
        ([0, 0, 0, 0, 1], [0, 0, 0, 1, 0]),
        ([0, 1, 1], [0, 1, 1]),
        ([1, 1, 1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0, 1, 1]),
    ):
        n, one, two = len(first), sum(first) / len(first), sum(second) / len(second)
        observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
        chance = one * two + (1 - one) * (1 - two)
        same(answer(first, second), (observed - chance) / (1 - chance), f"cohen_kappa({first}, {second})")


def check_3(answer: Callable[..., Any]) -> None:
    """Number of labels with errors that are worth as much as labels without."""
    for perfect, agreement in ((100, 0.73), (100, 1.0), (30, 0.65), (7, 0.9)):
        expected = math.ceil(perfect / (2 * agreement - 1) ** 2)  # none of these is next to a whole number
        same(answer(perfect, agreement), expected, f"labels_needed({perfect}, {agreement})")
