"""Pairs and rewards of which an exam should find out what they are."""

from heedful.apps.exam.inputs import ChosenRejected, Scorer
from heedful.rewards import Ensemble, Reward
from heedful.types import Message, Prompt

RECORDS = [
    {"prompt": f"第{number}问?", "chosen": good, "rejected": bad, "good": good}
    for number, (good, bad) in enumerate(
        [("yes, it is so", "no"), ("four cats sat", "a cat"), ("猫在睡觉。", "狗"), ("blue and green", "red"),
         ("one two three", "1 2"), ("a long answer here", "short"), ("it rains today", "sun"), ("很好，谢谢！", "差")]
    )
]  # fmt: skip
"""Eight pairs; the chosen response is always the longer one."""


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def length(completions, **_):
    """The longer, the better."""
    return [float(len(text_of(one))) for one in completions]


def constant(completions, **_):
    return [1.0] * len(completions)


def exact(completions, good, **_):
    """1 for the one right answer, which the record's column ``good`` has: a perfect reward."""
    return [float(text_of(one) == right) for one, right in zip(completions, good, strict=True)]


def pair(prompt, chosen, rejected, **columns):
    return ChosenRejected(Prompt((Message("user", prompt),), f"{prompt}:1", columns), chosen, rejected)


def scorer(function):
    """A function as the exam calls rewards; it sees the bytes of a text as its tokens."""
    return Scorer(Ensemble((Reward(function.__name__, function),), max_failed=0.0), lambda text: list(text.encode()))
