"""Training and evaluation halves by prompt: the same prompt is never in both, whatever the file, order or seed."""

import hashlib
import json
from collections.abc import Iterable
from typing import Protocol, TypeVar

from heedful.errors import ConfigError, DataError
from heedful.types import Demonstration, Text


class HasPrompt(Protocol):
    """Anything with a prompt: Prompt, Demonstration, Ranking."""

    @property
    def prompt(self) -> Text:
        """Raw text, or the messages so far."""


Item = TypeVar("Item", bound=HasPrompt)


def prompt_key(prompt: Text) -> str:
    """The canonical text of a prompt: equal keys mean the same prompt.

    A leading system message is left out, so that ``--system-prompt`` moves no prompt between the halves. A
    conversation of one user message has the key of that message as raw text; a longer one is its JSON.
    """
    if isinstance(prompt, str):
        return prompt
    turns = prompt[1:] if prompt and prompt[0].role == "system" else prompt
    if len(turns) == 1 and turns[0].role == "user":
        return turns[0].content
    return json.dumps([[turn.role, turn.content] for turn in turns], ensure_ascii=False)


def split_by_prompt(items: Iterable[Item], eval_fraction: float) -> tuple[list[Item], list[Item]]:
    """``(train, eval)``: an item goes to eval where ``SHA-256(prompt_key) / 2^256 < eval_fraction``; order is kept.

    A larger fraction only adds to eval. Plain text, which has an empty prompt, is split by its response. Raises
    ConfigError for a fraction outside [0, 1), and DataError where one half of a split that was asked for is empty.
    """
    if not 0 <= eval_fraction < 1:
        raise ConfigError(
            f"--eval-fraction is {eval_fraction}; it must be at least 0 and less than 1: 0.05 holds out every "
            "twentieth prompt, 0 none"
        )
    train: list[Item] = []
    held_out: list[Item] = []
    for item in items:
        (held_out if _position(_item_key(item)) < eval_fraction else train).append(item)
    if eval_fraction > 0 and not (train and held_out):
        raise _one_sided(train, held_out, eval_fraction)
    return train, held_out


def _item_key(item: HasPrompt) -> str:
    key = prompt_key(item.prompt)
    return item.response if not key and isinstance(item, Demonstration) else key


def _position(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest()) / 2**256


def _one_sided(train: list[Item], held_out: list[Item], eval_fraction: float) -> DataError:
    prompts = len({_item_key(item) for item in train + held_out})
    return DataError(
        f"--eval-fraction {eval_fraction} leaves {len(train)} records to train on and {len(held_out)} to evaluate on: "
        f"the data have {prompts} different prompts, and all records of a prompt stay together. Give more prompts, "
        "another --eval-fraction, or 0 and an evaluation file of its own"
    )
