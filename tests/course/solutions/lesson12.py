"""Answers to lesson 12, and typical wrong ones."""

import math


def answer_1(p, n, z=1.96):
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return [(middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)]


def wrong_1(p, n, z=1.96):
    """The normal interval, which has no width at a share of 1."""
    half = z * math.sqrt(p * (1 - p) / n)
    return [p - half, p + half]


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
