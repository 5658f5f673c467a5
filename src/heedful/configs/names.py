"""Advice for setting names of other libraries (TRL, OpenRLHF, verl) and for removed settings of heedful.

The answer is heedful's name, or the replacement of the removed setting.
"""

import difflib
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

TABLES = tomllib.loads((files("heedful.configs") / "names.toml").read_text(encoding="utf-8"))
PEERS: dict[str, str] = TABLES["peers"]
GONE: dict[str, str] = TABLES["gone"]


@dataclass(frozen=True)
class Removed:
    """A setting that is a constant now."""

    beside: str
    """A setting of the commands that had it."""
    use: str
    """Its replacement."""
    was: Any = None
    """Its last default, as a JSON value."""


REMOVED = {name: Removed(**facts) for name, facts in TABLES["removed"].items()}


def was_default(name: str, value: Any) -> bool:
    """Whether a name and its value are a removed setting at its default, as in many files of earlier versions."""
    return name in REMOVED and value == REMOVED[name].was


def answer(name: str, settings: Collection[str]) -> str:
    """Advice for an unknown name of a setting; ``""`` if it resembles none.

    Args:
        name: as in a YAML file, a flag or Hydra's style (``actor_rollout_ref.rollout.n``), dashes as underscores.
        settings: the names of the command's settings.
    """
    name = name.lower()
    parts = name.split(".")
    for spelling in (".".join(parts[i:]) for i in range(len(parts))):
        if spelling in GONE:
            return f"; {GONE[spelling]}"
        if spelling in REMOVED and REMOVED[spelling].beside in settings:
            return f" any more: {REMOVED[spelling].use}"
        ours, _, hint = PEERS.get(spelling, "").partition(" | ")
        found = next((one for one in ours.split() if one in settings), None)
        if found:
            return f"; heedful's name is {_both(found)}" + (f" ({hint})" if hint else "")
        if spelling in settings and spelling != name:
            return f"; heedful's name is {_both(spelling)}"
    near = difflib.get_close_matches(name, settings, n=1)
    return f". Perhaps you meant {_both(near[0])}" if near else ""


def is_hydra(word: str) -> bool:
    """Whether a word is a setting in Hydra's style: a dotted name and a value, such as ``trainer.save_freq=20``."""
    return re.match(r"\+{0,2}[A-Za-z_]\w*(\.\w+)*=", word) is not None


def _both(name: str) -> str:
    return f"--{name.replace('_', '-')}"
