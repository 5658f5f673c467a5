"""Asynchronous sampling: servers draw the next rollout batches while the policy learns from this one (``--async-steps``)."""

import copy
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heedful.algorithms.online.learner import Learner, Prompts
from heedful.configs.online import RolloutConfig
from heedful.data.loading import EncodedPrompt
from heedful.engines.rollouts import Rollouts
from heedful.engines.vllm.servers import Pending
from heedful.types import Completion


@dataclass(frozen=True)
class PendingBatch:
    """A rollout batch that is being drawn."""

    step: int
    """The step that will learn from it."""
    version: int
    """The weights that draw it: how many rollout batches they had learned from."""
    pending: Pending


def prompts_ahead(prompts: Prompts, batches: int) -> list[EncodedPrompt]:
    """The prompts of a batch to come: 1 is the one that is next. None is taken."""
    looked_at = Prompts(prompts.prompts, copy.copy(prompts.order), prompts.samples_per_prompt)
    return [next(looked_at) for _ in range(batches)][-1]


class Ahead:
    """The rollout batches that are drawn ahead of the update, at most ``steps`` of them.

    Whenever one is taken, the batch ``steps`` later begins, with the weights as they are: what step n learns from was drawn
    by the weights before step ``n - steps`` (the first batches: by those at the start). With 0 it would be drawn by the
    weights before step n, as without this class.

    The prompts of a batch are looked up, not taken, and its random numbers depend on nothing but the run's seed and its step.
    So a run that goes on has the same prompts drawn again, with the same seeds, by the weights that it has then.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._waiting: deque[PendingBatch] = deque()

    def respond(
        self, learner: Learner[RolloutConfig], prompts: Sequence[EncodedPrompt]
    ) -> tuple[Rollouts, list[Completion], int]:
        """The responses to the prompts of this step, and the version of the weights that drew them; later ones begin.

        Raises SamplerError.
        """
        step = learner.schedule.done + 1
        if not self._waiting or self._waiting[0].step != step:
            self._waiting.clear()
            self._begin(learner, step, prompts)
        taken = self._waiting.popleft()
        rollouts, completions = learner.sampler.finish(taken.pending, learner.policy, prompts)
        last = min(step + self.steps, learner.config.steps)
        for later in range(step + 1 + len(self._waiting), last + 1):
            self._begin(learner, later, prompts_ahead(learner.prompts, later - step))
        return rollouts, completions, taken.version

    def _begin(self, learner: Learner[RolloutConfig], step: int, prompts: Sequence[EncodedPrompt]) -> None:
        seed = random.Random(f"{learner.config.seed}:{step}").getrandbits(63)
        pending = learner.sampler.begin(learner.policy, prompts, torch.Generator().manual_seed(seed))
        self._waiting.append(PendingBatch(step, learner.schedule.done, pending))
