"""Asynchronous sampling: servers sample the next rollout batches during the update (``--async-steps``)."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from heedful.algorithms.online.prompts import Prompts
from heedful.data.loading import EncodedPrompt
from heedful.engines.engine import RemoteEngine
from heedful.engines.episodes import Episodes, Say
from heedful.engines.responses import Responses
from heedful.models.policy import Policy


@dataclass(frozen=True)
class PendingBatch:
    """A rollout batch that is being sampled."""

    step: int
    """The training step that will use it."""
    version: int
    """Version of the weights that sample it: number of rollout batches they were trained on."""
    ticket: Any
    """For `RemoteEngine.finish`."""


class AsyncServers:
    """Rollout batches sampled ahead of the update, at most ``async_steps`` of them.

    Taking one starts the batch ``async_steps`` later, with the current weights. So the batch of step n is sampled by
    the weights before step ``n - async_steps`` (the first batches: by the initial weights).

    A batch's prompts are looked up without advancing the order, and its random numbers depend only on the run's seed
    and the step. So a resumed run samples the same prompts again, with the same seeds and the weights of the
    checkpoint.

    Args:
        remote: the servers.
        prompts: the run's prompts.
        async_steps: number of batches to sample ahead.
        steps: number of steps of the run.
        seed: the run's seed.
        episodes: plays the batches on rank 0, with environments of its own, as an evaluation may play at the same time; None:
            the policy answers once.
    """

    def __init__(
        self,
        remote: RemoteEngine,
        prompts: Prompts,
        *,
        async_steps: int,
        steps: int,
        seed: int,
        episodes: Episodes | None = None,
    ) -> None:
        self.remote, self.prompts, self.episodes = remote, prompts, episodes
        self.async_steps, self.steps, self.seed = async_steps, steps, seed
        self._waiting: deque[PendingBatch] = deque()

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        _generator: torch.Generator,
        version: int | None,
        _most: Sequence[int] | None = None,
        /,
    ) -> Responses:
        """The responses of this step, with the version of the weights that sampled them; starts later batches.

        ``version`` is the number of rollout batches that the policy was trained on. Raises SamplerError.
        """
        assert version is not None
        step = version + 1
        if not self._waiting or self._waiting[0].step != step:
            self._waiting.clear()
            self._begin(policy, prompts, step=step, version=version)
        taken = self._waiting.popleft()
        responses = self.remote.finish(taken.ticket, policy.device)
        for later in range(step + 1 + len(self._waiting), min(step + self.async_steps, self.steps) + 1):
            self._begin(policy, self.prompts.ahead(later - step), step=later, version=version)
        return replace(responses, versions=torch.full_like(responses.lengths, taken.version))

    def take_retries(self) -> int:
        """Of rows and servers."""
        return self.remote.take_retries()

    def close(self) -> None:
        """Cancel all pending requests, and end environments."""
        if self.episodes is not None:
            self.episodes.close()
        self.remote.close()

    def _begin(self, policy: Policy, prompts: Sequence[EncodedPrompt], *, step: int, version: int) -> None:
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed}:{step}").getrandbits(63))
        episodes = self.episodes
        if episodes is None:
            ticket = self.remote.begin(policy, [one.ids for one in prompts], generator)
        else:

            def play(say: Say) -> Responses:
                return episodes.play(say, prompts, generator)

            ticket = self.remote.begin_episodes(policy, play, generator)
        self._waiting.append(PendingBatch(step, version, ticket))
