"""How a request that failed is tried again: waits that double, with jitter, or what the server's Retry-After asks for.

tenacity does the trying. The waits are random, but not by the run's random numbers.
"""

import datetime
import email.utils
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import tenacity

FIRST_WAIT, LONGEST_WAIT = 0.5, 5.0
"""Seconds before the first new try, and the most between two, unless the server asks for more."""


@dataclass(frozen=True)
class Backoff:
    """When to try again, and when to stop.

    The waits are ``first``, twice that, and so on up to ``longest``, each times a random number between 0.5 and 1. If an
    error has an attribute ``retry_after`` with more seconds than half of such a wait, they are those and up to the other
    half. The last wait ends when the time is up.

    Args:
        patience: seconds from the first try within which there is another; asked after every failure.
        first: seconds before the first new try.
        longest: the most seconds between two tries.
    """

    patience: Callable[[], float]
    first: float = FIRST_WAIT
    longest: float = LONGEST_WAIT
    jitter: random.Random = field(default_factory=random.Random, repr=False)

    def wait(self, state: tenacity.RetryCallState) -> float:
        """Seconds before the next try."""
        longest = min(self.first * 2.0 ** min(state.attempt_number - 1, 60), self.longest)
        return min(self._left(state), max(asked_to_wait(state), longest / 2) + longest * self.jitter.uniform(0.0, 0.5))

    def stop(self, state: tenacity.RetryCallState) -> bool:
        """Whether there is no further try."""
        left = self._left(state)
        return left <= 0 or asked_to_wait(state) > left

    def _left(self, state: tenacity.RetryCallState) -> float:
        return self.patience() - (state.seconds_since_start or 0.0)


def asked_to_wait(state: tenacity.RetryCallState) -> float:
    """Seconds that the server has asked to wait in its last answer; 0 if it has not."""
    error = state.outcome.exception() if state.outcome else None
    return getattr(error, "retry_after", None) or 0.0


def read_retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait: a number, or up to a date. None if it says nothing readable."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        date = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
