"""Split records into training and evaluation parts by prompt: no prompt is ever in both, whatever the file, order or seed."""

import hashlib
from collections.abc import Iterable
from typing import Protocol, TypeVar

from heedful.errors import ConfigError, DataError
from heedful.types import Demonstration, Ranking, Text, plain_response


class HasPrompt(Protocol):
    """Anything with a prompt: a Prompt, Demonstration or Ranking."""

    @property
    def prompt(self) -> Text:
        """Raw text, or the messages so far."""

    @property
    def source(self) -> str:
        """Where it was read, for messages."""


Item = TypeVar("Item", bound=HasPrompt)


def prompt_key(prompt: Text) -> str:
    """Return the text that decides on which side of a split a prompt falls.

    It is raw text itself, or a conversation's first user message. So the turns of one conversation stay together, a question
    has the same key as text and as a message, and ``--system-prompt`` moves no prompt to the other side.
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

    Args:
        items: prompts, demonstrations or rankings.
        eval_fraction: the expected share of prompts in eval, in [0, 1); 0 puts every item into train.
        may_be_one_sided: whether a part may be empty although the fraction is above 0.

    Raises ConfigError for another fraction, and DataError if the fraction is above 0 but one of the two parts is empty
    and may not be.
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
    prompts = len({item_key(item) for item in train + held_out})
    return DataError(
        f"--eval-fraction {eval_fraction} leaves {len(train)} records to train on and {len(held_out)} to evaluate on: "
        f"the data have {prompts} different prompts, and all records of a prompt stay together. Give more prompts, "
        "another --eval-fraction, or 0 and a separate evaluation file (--eval-data)"
    )
