"""Advice for setting names of other libraries (TRL, OpenRLHF, verl): heedful's name, or what to do without a setting."""

import difflib
import re
import tomllib
from collections.abc import Collection
from importlib.resources import files

TABLES = tomllib.loads((files("heedful.configs") / "names.toml").read_text(encoding="utf-8"))
PEERS: dict[str, str] = TABLES["peers"]
WITHOUT: dict[str, str] = TABLES["without"]


def answer(name: str, settings: Collection[str], *, in_python: bool = False) -> str:
    """Advice for an unknown name of a setting; ``""`` if it resembles none.

    Args:
        name: as in a YAML file, a flag or Hydra's style (``actor_rollout_ref.rollout.n``), dashes as underscores.
        settings: the names of the command's settings.
        in_python: whether the advice has names as in Python; by default it has flags.
    """
    advice = _answer(name, settings)
    return re.sub(r"--([a-z][a-z-]*[a-z])", lambda m: _in_python(m, settings), advice) if in_python else advice


def _in_python(found: re.Match[str], settings: Collection[str]) -> str:
    name = found[1].replace("-", "_")
    return name if name in settings else found[0]


def _answer(name: str, settings: Collection[str]) -> str:
    name = name.lower()
    parts = name.split(".")
    for spelling in (".".join(parts[i:]) for i in range(len(parts))):
        if spelling in WITHOUT:
            return f"; {WITHOUT[spelling]}"
        ours, _, hint = PEERS.get(spelling, "").partition(" | ")
        found = next((one for one in ours.split() if one in settings), None)
        if found:
            return f"; heedful's name is {_both(found)}" + (f" ({hint})" if hint else "")
        if spelling in settings and spelling != name:
            return f"; heedful's name is {_both(spelling)}"
    begun = [one for one in settings if one.startswith(f"{name}_")]
    near = difflib.get_close_matches(name, settings, n=1) or begun
    return f". Perhaps you meant {_both(near[0])}" if near else ""


def is_hydra(word: str) -> bool:
    """Whether a word is a setting in Hydra's style: a dotted name and a value, such as ``trainer.save_freq=20``."""
    return re.match(r"\+{0,2}[A-Za-z_]\w*(\.\w+)*=", word) is not None


def _both(name: str) -> str:
    return f"--{name.replace('_', '-')}"
