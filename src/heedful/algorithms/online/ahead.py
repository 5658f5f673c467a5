"""Asynchronous sampling: servers draw the next rollout batches while the policy learns from this one (``--async-steps``)."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heedful.algorithms.online.prompts import Prompts
from heedful.data.loading import EncodedPrompt
from heedful.engines.rollouts import Rollouts
from heedful.engines.sampler import Sampler
from heedful.models.policy import Policy
from heedful.types import Completion


@dataclass(frozen=True)
class PendingBatch:
    """A rollout batch that is being drawn."""

    step: int
    """The step that will learn from it."""
    version: int
    """The weights that draw it: how many rollout batches they had learned from."""
    ticket: Any
    """For `Sampler.finish`."""


class Ahead:
    """The rollout batches that are drawn ahead of the update, at most ``async_steps`` of them.

    Whenever one is taken, the batch ``async_steps`` later begins, with the weights as they are: what step n learns from was
    drawn by the weights before step ``n - async_steps`` (the first batches: by those at the start).

    The prompts of a batch are looked up, not taken, and its random numbers depend on nothing but the run's seed and its step.
    So a run that goes on has the same prompts drawn again, with the same seeds, by the weights that it has then.

    Args:
        sampler: what has servers.
        prompts: those of the run.
        async_steps: how many batches to draw ahead.
        steps: of the run.
        seed: of the run.
    """

    def __init__(self, sampler: Sampler, prompts: Prompts, *, async_steps: int, steps: int, seed: int) -> None:
        self.sampler, self.prompts = sampler, prompts
        self.async_steps, self.steps, self.seed = async_steps, steps, seed
        self._waiting: deque[PendingBatch] = deque()

    def respond(
        self, policy: Policy, prompts: Sequence[EncodedPrompt], *, done: int
    ) -> tuple[Rollouts, list[Completion], int]:
        """The responses to the prompts of this step, and the version of the weights that drew them; later ones begin.

        ``done`` is the number of rollout batches that the policy has learned from. Raises SamplerError.
        """
        step = done + 1
        if not self._waiting or self._waiting[0].step != step:
            self._waiting.clear()
            self._begin(policy, prompts, step=step, version=done)
        taken = self._waiting.popleft()
        rollouts, completions = self.sampler.finish(taken.ticket, policy, prompts)
        for later in range(step + 1 + len(self._waiting), min(step + self.async_steps, self.steps) + 1):
            self._begin(policy, self.prompts.ahead(later - step), step=later, version=done)
        return rollouts, completions, taken.version

    def _begin(self, policy: Policy, prompts: Sequence[EncodedPrompt], *, step: int, version: int) -> None:
        seed = random.Random(f"{self.seed}:{step}").getrandbits(63)
        ticket = self.sampler.begin(policy, prompts, torch.Generator().manual_seed(seed))
        self._waiting.append(PendingBatch(step, version, ticket))
