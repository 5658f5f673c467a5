"""Answers to lesson 13, and typical wrong ones."""

import math


def normalize_text(s):
    s = s.strip().lower()
    for ch in [" ", "\n", "\t", "。", "，", ",", ".", "!", "！", "?", "：", ":", '"', "'"]:
        s = s.replace(ch, "")
    return s


def answer_1(log_ref_hack, log_ref_best, beta):
    return beta * (log_ref_best - log_ref_hack)


def wrong_1(log_ref_hack, log_ref_best, beta):
    """The difference of the probabilities, and not of their logarithms."""
    return beta * (math.exp(log_ref_best) - math.exp(log_ref_hack))


def answer_2(response, expected):
    resp = normalize_text(response)
    return (1.0 if resp == normalize_text(expected) else -1.0) - 0.002 * len(resp)


def wrong_2(response, expected):
    """The rule with its hole."""
    resp = normalize_text(response)
    return (1.0 if normalize_text(expected) in resp else -1.0) - 0.002 * len(resp)


def answer_3(alpha, b):
    return math.exp(alpha / b - 1) ** 2


def wrong_3(alpha, b):
    """d, and not the KL."""
    return math.exp(alpha / b - 1)
