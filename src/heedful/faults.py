"""Fault points: places where a run can be made to fail, to test its recovery (RELIABILITY.md).

HEEDFUL_FAULTS="save.manifest:kill@2" heedful ppo ...

ends the process as if by kill -9 at the second visit of that point. Several faults are separated by commas; without
``@N`` the fault comes at the first visit. If the variable is not set, a point costs one dictionary look-up.
"""

import os
import signal
import time
from collections.abc import Callable

from heedful.errors import ConfigError

VARIABLE = "HEEDFUL_FAULTS"
POINTS = {
    "run.moving": "a file or folder of the run that is replaced has moved, others have not",
    "run.aside": "the run that is replaced is set aside, and nothing is in its place",
    "run.named": "the folder is there with the run's name, but not its settings",
    "run.opened": "the folder is there with the run's settings",
    "run.started": "the first step is next",
    "generation": "a token of every response is sampled",
    "reward.call": "a reward is called, also for evaluations",
    "rollout": "responses are sampled, not scored",
    "reward": "responses are scored",
    "pass": "log-probs of the policy and the reference are there",
    "update.backward": "a minibatch has its gradients",
    "update.stepped": "the optimizer has stepped on a minibatch",
    "step.learned": "all of a step is learned, nothing of it is written",
    "step.logged": "the step's metrics are written",
    "evaluation": "an evaluation is measured, not written",
    "evaluated": "an evaluation is written, and best/ with it",
    "save.files": "a model or checkpoint is in its temporary folder, maybe not on the disk",
    "save.parts": "the state of a run is there, and each rank's part of a sharded one is not yet in it",
    "save.state": "the state of a run is in the temporary folder",
    "save.manifest": "the manifest is in the temporary folder",
    "save.synced": "all of it is on the disk, under its temporary name",
    "save.aside": "the folder that is replaced has its temporary name",
    "save.renamed": "the folder has its name",
    "save.pruned": "older checkpoints are gone",
    "run.learned": "the last step is done and final/ saved, the summary not written",
    "run.finished": "the summary is written",
}
"""The points of a run, each with the state of the run there."""
LABEL_POINTS = {
    "label.began": "events are in an open transaction of events.sqlite",
    "label.committed": "events are on the disk, and nobody was told",
}
"""The points of a labelling project's store."""
ROUND_POINTS = {
    "round.sampled": "answers to label are on the disk, nothing of them is in the project",
    "round.step": "a step of a round is done, not noted",
    "round.noted": "a step of a round is noted",
}
"""The points of a round, besides those of its training runs."""


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("a fault point says that memory is full")


def _raise(error: Exception) -> None:
    raise error


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hup": lambda: os.kill(os.getpid(), signal.SIGHUP),
    "raise": lambda: _raise(RuntimeError("a fault point says so")),
    "enospc": lambda: _raise(OSError(28, "No space left on device")),
    "eio": lambda: _raise(OSError(5, "Input/output error")),
    "oom": _out_of_memory,
    "hang": lambda: time.sleep(3600),
}

Plan = dict[str, list[tuple[str, int]]]
"""For each point its actions, each with the number of the visit that triggers it."""


def read_plan(text: str) -> Plan:
    """Parse the faults of the environment variable. Raises ConfigError."""
    plan: Plan = {}
    for fault in filter(None, text.split(",")):
        point, _, rest = fault.strip().partition(":")
        action, _, visit = rest.partition("@")
        if point not in POINTS | LABEL_POINTS | ROUND_POINTS or action not in ACTIONS or not (visit or "1").isdigit():
            raise ConfigError(
                f"{VARIABLE}: {fault!r} is not a fault; write POINT:ACTION or POINT:ACTION@VISIT with a point of "
                f"{', '.join(POINTS | LABEL_POINTS | ROUND_POINTS)} and an action of {', '.join(ACTIONS)}"
            )
        plan.setdefault(point, []).append((action, int(visit or 1)))
    return plan


_plan: Plan = {}
_visits: dict[str, int] = {}


def plan(text: str) -> None:
    """Replace the faults of the environment variable by those of the text."""
    planned = read_plan(text)
    _plan.clear()
    _plan.update(planned)
    _visits.clear()


def visits() -> dict[str, int]:
    """Number of visits of each point since the plan was made; without a plan nothing is counted."""
    return dict(_visits)


def hit(point: str) -> None:
    """Fail here if the plan has a fault for this visit of the point."""
    if not _plan:
        return
    visit = _visits[point] = _visits.get(point, 0) + 1
    for action, at in _plan.get(point, []):
        if visit == at:
            ACTIONS[action]()


plan(os.environ.get(VARIABLE, ""))
