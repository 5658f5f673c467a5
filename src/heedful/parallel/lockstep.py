"""Ranks whose models are divided move in lockstep: each pass needs all of them, so what one cannot finish none can."""

import contextlib
from collections.abc import Iterator

from heedful.errors import HeedfulError
from heedful.parallel import ranks


class _Passes:
    """Whether this rank is in the midst of passes that the others make with it."""

    are_open = False


@contextlib.contextmanager
def in_lockstep() -> Iterator[None]:
    """Around passes through divided models. After an error they stay open: the other ranks still wait."""
    _Passes.are_open = True
    yield
    _Passes.are_open = False


def others_wait() -> bool:
    """True if other ranks wait in the midst of passes that this one has not finished, and so cannot do again."""
    return _Passes.are_open


def check_present(error: Exception) -> None:
    """Raise RankError if an error in a pass through divided models is that another rank has left."""
    if not _Passes.are_open or not isinstance(error, RuntimeError) or isinstance(error, HeedfulError):
        return
    from heedful.parallel import rank_failures  # which loads torch

    if any(word in str(error) for word in rank_failures.TRANSPORTS):
        raise rank_failures.lost(error) from error


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Around passes through divided models outside `AdaptiveMicroBatch`: RankError if another rank leaves in their midst."""
    try:
        yield
    except Exception as error:
        check_present(error)
        raise


def all_stop(error: BaseException) -> bool:
    """Tell that this rank stops by an error, and wait a little: True if all others stop by the same, and can act together.

    All of them get the same answer, unless one comes so late that the others have gone.
    """
    if ranks.size() == 1 or _Passes.are_open:
        return False
    from heedful.parallel import rank_failures

    return rank_failures.all_stop_by(error)
