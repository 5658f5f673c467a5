"""Iterator over the prompts of a run, a rollout batch at a time."""

import copy
from collections.abc import Iterator, Sequence

from heedful.data.loading import EncodedPrompt
from heedful.data.splits import BatchOrder


class Prompts(Iterator[list[EncodedPrompt]]):
    """Prompts of each rollout batch, in an endless shuffled order, each repeated ``samples_per_prompt`` times."""

    def __init__(self, prompts: Sequence[EncodedPrompt], order: BatchOrder, samples_per_prompt: int) -> None:
        self.prompts, self.order, self.samples_per_prompt = prompts, order, samples_per_prompt

    def __next__(self) -> list[EncodedPrompt]:
        return self._repeated(next(self.order))

    def take(self, count: int) -> list[EncodedPrompt]:
        """The next ``count`` prompts, each repeated ``samples_per_prompt`` times."""
        return self._repeated(self.order.take(count))

    def ahead(self, batches: int) -> list[EncodedPrompt]:
        """The prompts of a later batch (1 is the next), without advancing the order."""
        looked_at = Prompts(self.prompts, copy.copy(self.order), self.samples_per_prompt)
        return [next(looked_at) for _ in range(batches)][-1]

    def _repeated(self, rows: Sequence[int]) -> list[EncodedPrompt]:
        return [self.prompts[row] for row in rows for _ in range(self.samples_per_prompt)]
