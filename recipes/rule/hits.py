"""Rewards to measure by: 1 where the rule finds the expected text in the response, else 0.

heedful evaluate scores --model MODEL --rewards python:recipes/rule/hits.py:hits --data recipes/rule/tasks.jsonl

A larger --samples-per-prompt makes the mean, which is the hit rate, more exact.
"""

from heedful.rewards.rules import contains_expected


def hits(completions, expected):
    """The sign of the rule's score says whether it was a hit, while responses are shorter than 500 characters.

    A record without an expected text, or with one that cannot be read, keeps what the rule says of it.
    """
    scores = contains_expected(completions=completions, expected=expected)
    return [float(score > 0) if isinstance(score, float) else score for score in scores]
