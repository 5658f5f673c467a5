"""An unfinished run whose servers are away when it is to go on: they are waited for, and it can be tried again."""

import contextlib
from collections.abc import Iterator, Sequence

from heedful.errors import RewardError, SamplerError, TrainingError
from heedful.rewards import Reward
from heedful.rewards.results import Remote
from heedful.train.output_folder import FolderPlan

NAMES_SERVERS = {"rewards", "best_by", "sampler"}
"""Settings with addresses. One that was changed may be wrong, however long the run has been going."""


def with_the_same_servers(plan: FolderPlan) -> bool:
    """Whether an unfinished run goes on with the servers that have answered it before: none begins without their answer."""
    return plan.resumes and not NAMES_SERVERS & set(plan.changes)


def expect_answers(rewards: Sequence[Reward]) -> None:
    """Have rewards on servers waited for as long as in the middle of a run."""
    for reward in rewards:
        if isinstance(reward.function, Remote):
            reward.function.has_answered_before()


@contextlib.contextmanager
def resumable(goes_on: bool) -> Iterator[None]:
    """Around what asks servers before the first step: a failure of a run that goes on has the status of one that can."""
    try:
        yield
    except (RewardError, SamplerError) as error:
        if goes_on:
            error.status = TrainingError.status
        raise
