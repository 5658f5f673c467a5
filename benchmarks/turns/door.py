"""The environment of `key_and_door.py`."""

import random
from typing import Any

TURNS, KEY = 6, "a"


class Door:
    """The first letter of the first turn is a key, and `KEY` opens the door. The turns after it change nothing: each is
    paid by a number drawn from a normal distribution with mean 0 and the deviation ``noise``. After each turn the door says
    whether it is open."""

    def reset(self, noise: float = 1.0, **_: Any) -> None:
        self.noise, self.turn, self.is_open = noise, 0, False

    def _reply(self, text: str) -> str | None:
        self.turn += 1
        if self.turn == 1:
            self.is_open = text.startswith(KEY)
        return says(self.is_open) if self.turn < TURNS else None

    def _turn_reward(self) -> float:
        return random.gauss(0, self.noise) if self.turn > 1 else 0.0


def says(is_open: bool) -> str:
    return "open" if is_open else "shut"


def opened(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """The reward of an episode: 1 if its first turn begins with the key."""
    return [float(turns[0]["content"].startswith(KEY)) for turns in completions]
