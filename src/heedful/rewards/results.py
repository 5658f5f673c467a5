"""Convert the results of reward functions to plain numbers; the kinds of reward functions; no torch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from heedful import user_code

OneScore = float | list[float] | None
"""A reward's score of a response: a number, one number per token, or None if the reward does not apply."""


class Problem(str):
    """Why a response has no score, as the end of a sentence that begins with the reward's name."""

    __slots__ = ("cause",)
    cause: BaseException | None

    def __reduce__(self) -> tuple[type["Problem"], tuple[str]]:
        return Problem, (str(self),)  # an error may be something that pickle cannot hold

    def __new__(cls, text: str, cause: BaseException | None = None) -> "Problem":
        problem = super().__new__(cls, text)
        problem.cause = cause
        return problem


class Truncated(float):
    """The score of a response that a reward model could read only in part: its beginning."""


RewardFunction = Callable[..., Sequence[OneScore | Problem]]


class Remote(ABC):
    """A reward function in another process or on a server, so that it can run at the same time as others."""

    @abstractmethod
    def stop(self) -> None:
        """Cancel a call in another thread."""

    def has_answered_before(self) -> None:
        """Mark it as reachable earlier in this run: then failed requests are retried for longer."""
        return


class Distributed:
    """A reward function whose calls are shared by the ranks: each computes some of the scores, and all get them.

    Other reward functions are called only by rank 0.
    """


class Share(float):
    """A fraction ``count / of`` that keeps both numbers, so that the fractions of several calls merge exactly."""

    __slots__ = ("count", "of")
    count: int
    of: int

    def __new__(cls, count: int, of: int) -> "Share":
        share = super().__new__(cls, count / of)
        share.count, share.of = count, of
        return share

    def __reduce__(self) -> tuple[type["Share"], tuple[int, int]]:
        return Share, (self.count, self.of)


class Measured:
    """A reward function that measures its own calls."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}
        """Metrics of the last call, by their names in docs/metrics.md; fractions are `Share`."""


def merge_measured(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of several calls: counts are summed, times (``time/``) are maxima, fractions are over all calls."""
    found: dict[str, list[float]] = {}
    for call in calls:
        for name, value in call.items():
            found.setdefault(name, []).append(value)
    whole: dict[str, float] = {}
    for name, values in found.items():
        shares = [value for value in values if isinstance(value, Share)]
        if shares:
            whole[name] = Share(sum(share.count for share in shares), sum(share.of for share in shares))
        else:
            whole[name] = max(values) if name.startswith("time/") else sum(values)
    return whole


class ResultError(Exception):
    """A function did not return a list with one score per response; the text follows the reward's name."""


class CallError(Exception):
    """A call of a reward function gave no scores. The text has the reason; it follows the reward's name."""


def read_scores(result: Any) -> list[OneScore | Problem]:
    """Convert a reward function's result: per response a finite number, None, a list of numbers, or a `Problem`.

    Numbers may be of Python, numpy or torch; arrays and tensors become lists of their rows. A `Problem` is kept. Raises
    ResultError if the result is not a list: a set or a dictionary has no order.
    """
    scores = list(result) if getattr(result, "shape", ()) else result
    if isinstance(scores, str | bytes) or not isinstance(scores, Sequence):
        raise ResultError(
            f"returned {type(result).__name__} {result!r:.80}; it must return a list with one number per response"
        )
    return [_score(value) for value in scores]


def _score(value: Any) -> OneScore | Problem:
    if value is None or isinstance(value, Problem):
        return value
    if not isinstance(value, list | tuple) and (_holds_one(value) or len(value.shape) != 1):
        return _number(value)
    numbers = [_number(one) for one in value]
    wrong = [number for number in numbers if isinstance(number, Problem)]
    return wrong[0] if wrong else [number for number in numbers if not isinstance(number, Problem)]


def _number(value: Any) -> float | Problem:
    number = value.item() if hasattr(value, "item") and _holds_one(value) else value
    if not isinstance(number, Real) or not is_finite(number):
        return Problem(
            f"returned {value!r:.80} ({type(value).__name__}); a score is one finite number, or None if the reward does "
            "not apply"
        )
    return number if isinstance(number, Truncated) else float(number)


def _holds_one(value: Any) -> bool:
    """True for a number, also of numpy or torch, and for an array or tensor with one element."""
    return all(length == 1 for length in getattr(value, "shape", ()))


def is_finite(number: Real | Decimal | float) -> bool:
    """Whether a number is finite as a float."""
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a float
        return False


def raised(error: BaseException, arguments: Mapping[str, Any]) -> str:
    """What a reward function raised, in words; with the form of its arguments if it took messages for texts."""
    text = f"raised {user_code.describe(error)}"
    gets_messages = any(isinstance(one, list) for one in arguments.get("completions", ()))
    if gets_messages and isinstance(error, AttributeError | TypeError) and "list" in str(error):
        text += '; the completion c of a conversation is a list of messages, and its text is c[-1]["content"]'
    return text
