"""Split records by prompt, so that no prompt is ever in both parts, and visit them in an order that a run can restore."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from heedful.display import counted
from heedful.errors import CheckpointError, ConfigError, DataError
from heedful.types import Demonstration, Ranking, Text, plain_response


class HasPrompt(Protocol):
    """Anything with a prompt: a Prompt, Demonstration or Ranking."""

    @property
    def prompt(self) -> Text:
        """Raw text, or the messages so far."""

    @property
    def source(self) -> str:
        """Its file and line, for messages."""


Item = TypeVar("Item", bound=HasPrompt)


def prompt_key(prompt: Text) -> str:
    """Return the text that decides the side of the split for a prompt.

    It is the raw text, or a conversation's first user message. So the turns of one conversation stay together, a question
    has the same key as text and as a message, and ``--system-prompt`` does not change the split.
    """
    if isinstance(prompt, str):
        return prompt
    return next((turn.content for turn in prompt if turn.role == "user"), "")


def split_by_prompt(
    items: Iterable[Item], eval_fraction: float, *, may_be_one_sided: bool = False
) -> tuple[list[Item], list[Item]]:
    """Split items into ``(train, eval)``, keeping their order.

    An item goes to eval if ``SHA-256(prompt_key) / 2^256 < eval_fraction``, so a larger fraction only adds to eval. Items
    with an empty prompt, such as plain text, are split by their first response.

    Raises ConfigError for a fraction outside [0, 1). Raises DataError if it is above 0 and one of the two parts is empty,
    unless it ``may_be_one_sided``.
    """
    if not 0 <= eval_fraction < 1:
        raise ConfigError(
            f"--eval-fraction is {eval_fraction}; it must be at least 0 and less than 1: 0.05 holds out one "
            "prompt in twenty, 0 none"
        )
    train: list[Item] = []
    held_out: list[Item] = []
    for item in items:
        (held_out if _position(item_key(item)) < eval_fraction else train).append(item)
    if eval_fraction > 0 and not may_be_one_sided and not (train and held_out):
        raise _one_sided(train, held_out, eval_fraction)
    return train, held_out


def item_key(item: HasPrompt) -> str:
    """Return the `prompt_key` of a record; of one with an empty prompt, such as plain text, its first response."""
    key = prompt_key(item.prompt)
    if key or not isinstance(item, Demonstration | Ranking):
        return key
    return plain_response(item.response if isinstance(item, Demonstration) else item.responses[0])


def _position(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest()) / 2**256


def _one_sided(train: list[Item], held_out: list[Item], eval_fraction: float) -> DataError:
    prompts = counted(len({item_key(item) for item in train + held_out}), "different prompt")
    return DataError(
        f"--eval-fraction {eval_fraction} leaves {counted(len(train), 'record')} to train on and {len(held_out)} to evaluate "
        f"on: the data have {prompts.replace('1 different', 'a single')}, and all records of a prompt stay together. Give "
        "more prompts, "
        "another --eval-fraction, or 0 and a separate evaluation file (--eval-data)"
    )


class BatchOrder:
    """An endless iterator over batches of item indices; every epoch visits each item exactly once.

    Every batch has exactly ``batch_size`` items: if an epoch does not divide evenly, a batch takes the epoch's last items
    and the first of the next. The order depends only on ``seed`` and the number of the epoch, so two integers restore the
    position.

    Args:
        num_items: the number of items in the data.
        batch_size: items per batch.
        seed: of the shuffling.
        shuffle: False keeps the order of the data in every epoch.
        items: what the items are, for messages.

    Raises ConfigError if a batch would be empty or larger than the data.
    """

    def __init__(
        self,
        num_items: int,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        items: str = "records",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
        if num_items < batch_size:
            raise ConfigError(
                f"batch_size is {batch_size}, but the data have only {num_items} {items}. Lower it, or give more data"
            )
        self.num_items = num_items
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._items = items
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)

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
            if self._cursor == self.num_items:
                self._move_to(self._epoch + 1, 0)
        return batch

    @property
    def progress(self) -> float:
        """The number of epochs done, with a fraction for the current one: 1.5 is half-way through the second."""
        return self._epoch + self._cursor / self.num_items

    def state_dict(self) -> dict[str, int]:
        """Return the position: ``{"epoch": epochs completed, "cursor": items taken of the next one}``."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the position ``state``. Raises CheckpointError if these data have no such position."""
        epoch, cursor = state.get("epoch", -1), state.get("cursor", -1)
        if epoch < 0 or not 0 <= cursor < self.num_items:
            raise CheckpointError(
                f"the saved data position {dict(state)} does not fit data of {self.num_items} {self._items}: expected "
                f"epoch >= 0 and 0 <= cursor < {self.num_items}. Resume with the data that the run was started with"
            )
        self._move_to(epoch, cursor)

    def _move_to(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self.num_items))
        if self._shuffle:
            # A string seed: neighbouring (seed, epoch) pairs give unrelated orders, which seed + epoch would not.
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
