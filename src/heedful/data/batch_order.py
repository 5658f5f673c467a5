"""The order in which items are visited: endless, reshuffled every epoch, and restorable to the exact item."""

import random
from collections.abc import Mapping

from heedful.errors import CheckpointError, ConfigError


class BatchOrder:
    """An endless iterator over batches of item indices; every epoch visits each item exactly once.

    Every batch has exactly ``batch_size`` items: if an epoch does not divide evenly, a batch takes the epoch's last items
    and the first of the next. The order depends only on ``seed`` and the number of the epoch, so two integers restore the
    position.

    Args:
        num_items: the number of items in the data.
        batch_size: items per batch.
        seed: of the shuffling.
        batch_flag: the flag that sets ``batch_size``, named in messages.

    Raises ConfigError if a batch would be empty or larger than the data.
    """

    def __init__(self, num_items: int, batch_size: int, seed: int, *, batch_flag: str = "--batch-size") -> None:
        if batch_size < 1:
            raise ConfigError(f"{batch_flag} is {batch_size}; it must be at least 1")
        if num_items < batch_size:
            raise ConfigError(
                f"{batch_flag} is {batch_size}, but the data have only {num_items} items. Lower "
                f"{batch_flag}, or give more data"
            )
        self._num_items = num_items
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._permutation(0)

    def __iter__(self) -> "BatchOrder":
        return self

    def __next__(self) -> list[int]:
        return self.take(self._batch_size)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` items, which may be fewer or more than a batch."""
        batch: list[int] = []
        while len(batch) < count:
            taken = self._order[self._cursor : self._cursor + count - len(batch)]
            batch += taken
            self._cursor += len(taken)
            if self._cursor == self._num_items:
                self._move_to(self._epoch + 1, 0)
        return batch

    @property
    def progress(self) -> float:
        """The number of epochs done, with a fraction for the current one: 1.5 is half-way through the second."""
        return self._epoch + self._cursor / self._num_items

    def state_dict(self) -> dict[str, int]:
        """Return the position: ``{"epoch": epochs completed, "cursor": items taken of the next one}``."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the position ``state``. Raises CheckpointError if these data have no such position."""
        epoch, cursor = state.get("epoch", -1), state.get("cursor", -1)
        if epoch < 0 or not 0 <= cursor < self._num_items:
            raise CheckpointError(
                f"the saved data position {dict(state)} does not fit data of {self._num_items} items: expected "
                f"epoch >= 0 and 0 <= cursor < {self._num_items}. Resume with the data that the run was started with"
            )
        self._move_to(epoch, cursor)

    def _move_to(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self._num_items))
        # A string seed: neighbouring (seed, epoch) pairs give unrelated orders, which seed + epoch would not.
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
