"""Retry failed requests with exponential backoff and jitter, or after the wait of the server's Retry-After.

tenacity runs the retries. The jitter does not use the run's random numbers.
"""

import datetime
import email.utils
import random
from collections.abc import Callable
from dataclasses import dataclass

import tenacity

FIRST_WAIT, LONGEST_WAIT = 0.5, 5.0
"""Seconds before the first retry, and the longest wait between two, unless the server asks for more."""

_RANDOM = random.Random()


def pause(failures: int, asked: float = 0.0, *, first: float = FIRST_WAIT) -> float:
    """Seconds to wait after ``failures`` failures in a row.

    The wait is ``first``, doubled with each failure up to `LONGEST_WAIT`, times a random number between 0.5 and 1. If the
    server ``asked`` for more than half of that, the wait is the asked time plus up to the other half.
    """
    longest = min(first * 2.0 ** min(failures - 1, 60), LONGEST_WAIT)
    return max(asked, longest / 2) + longest * _RANDOM.uniform(0.0, 0.5)


@dataclass(frozen=True)
class Backoff:
    """When tenacity retries (`pause`) and when it stops. The last wait ends when the time is up.

    Args:
        patience: gives the seconds from the first try within which to retry; called after every failure.
        first: seconds before the first retry.

    An error's attribute ``retry_after`` asks for a wait of that many seconds.
    """

    patience: Callable[[], float]
    first: float = FIRST_WAIT

    def wait(self, state: tenacity.RetryCallState) -> float:
        """Seconds before the next try."""
        return min(self._left(state), pause(state.attempt_number, asked_to_wait(state), first=self.first))

    def stop(self, state: tenacity.RetryCallState) -> bool:
        """Whether there is no further try."""
        left = self._left(state)
        return left <= 0 or asked_to_wait(state) > left

    def _left(self, state: tenacity.RetryCallState) -> float:
        return self.patience() - (state.seconds_since_start or 0.0)


def asked_to_wait(state: tenacity.RetryCallState) -> float:
    """Seconds that the server's last answer asks to wait; 0 if it does not."""
    error = state.outcome.exception() if state.outcome else None
    return getattr(error, "retry_after", None) or 0.0


def read_retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or the time until a date. None if it is unreadable."""
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
