"""Answers to lesson 12, and typical wrong ones."""

import math


def answer_1(orders, preferred):
    left = [order[0] == one for order, one in zip(orders, preferred, strict=True) if one is not None]
    return sum(left) / len(left)


def wrong_1(orders, preferred):
    """How often the first candidate won, wherever it was on the screen."""
    decided = [one for one in preferred if one is not None]
    return sum(one == 0 for one in decided) / len(decided)


def answer_2(first, second):
    n, one, two = len(first), sum(first) / len(first), sum(second) / len(second)
    p_o = sum(a == b for a, b in zip(first, second, strict=True)) / n
    p_e = one * two + (1 - one) * (1 - two)
    return (p_o - p_e) / (1 - p_e)


def wrong_2(first, second):
    """With chance one half, whatever the shares."""
    p_o = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
    return (p_o - 0.5) / 0.5


def answer_3(perfect, agreement):
    return math.ceil(perfect / (2 * agreement - 1) ** 2)


def wrong_3(perfect, agreement):
    """Only the errors taken out."""
    return math.ceil(perfect / agreement)
