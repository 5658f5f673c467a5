"""Answers to lesson 13, and typical wrong ones."""

import math


def normalize_text(s):
    s = s.strip().lower()
    for ch in [" ", "\n", "\t", "。", "，", ",", ".", "!", "！", "?", "：", ":", '"', "'"]:
        s = s.replace(ch, "")
    return s


def answer_1(ref_probs, rewards, beta):
    largest = max(r / beta for r in rewards)
    weights = [p * math.exp(r / beta - largest) for p, r in zip(ref_probs, rewards, strict=True)]
    return [w / sum(weights) for w in weights]


def wrong_1(ref_probs, rewards, beta):
    """Without the reference."""
    weights = [math.exp(r / beta) for r in rewards]
    return [w / sum(weights) for w in weights]


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
