"""Advice for the name of a setting of another library: heedful's name, or what to do without a setting."""

import difflib
import re
from collections.abc import Collection, Iterable
from functools import cache

from heedful.configs.peers import PeerSetting, peers

MOST = 3
"""Libraries in one piece of advice."""


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
        meanings = _meanings(spelling, settings)
        if len(meanings) == 1:
            ((ours, theirs),) = meanings.items()
            note = min((one.note for _, one in theirs if one.note), key=len, default="")
            return f"; heedful's name is {_flag(ours)}" + (f" ({note})" if note else "")
        if meanings:
            each = (f"{_flag(ours)} for {_titles(theirs)}" for ours, theirs in meanings.items())
            return f"; heedful's name is {', '.join(each)}"
        if spelling in settings and spelling != name:
            return f"; heedful's name is {_flag(spelling)}"
        notes = [one.note for _, one in _by_name().get(spelling, ()) if one.note and not one.ours]
        if notes:
            return f"; {notes[0]}"
    begun = [one for one in settings if one.startswith(f"{name}_")]
    near = difflib.get_close_matches(name, settings, n=1) or begun
    return f". Perhaps you meant {_flag(near[0])}" if near else ""


def _meanings(name: str, settings: Collection[str]) -> dict[str, list[tuple[str, PeerSetting]]]:
    """heedful's settings that a name may mean, each with the libraries and their settings that mean it."""
    found: dict[str, list[tuple[str, PeerSetting]]] = {}
    for title, one in _by_name().get(name, ()):
        ours = next((mine for mine in one.ours if mine in settings and mine != name), None)
        if ours is not None:
            found.setdefault(ours, []).append((title, one))
    return found


def _titles(theirs: Iterable[tuple[str, PeerSetting]]) -> str:
    return " and ".join(list(dict.fromkeys(title for title, _ in theirs))[:MOST])


@cache
def _by_name() -> dict[str, list[tuple[str, PeerSetting]]]:
    """The settings of all libraries by name, each with its library's title."""
    found: dict[str, list[tuple[str, PeerSetting]]] = {}
    for peer in peers().values():
        for settings in peer.sections.values():
            for name, one in settings.items():
                found.setdefault(name.lower(), []).append((peer.title, one))
    return found


def is_hydra(word: str) -> bool:
    """Whether a word is a setting in Hydra's style: a dotted name and a value, such as ``trainer.save_freq=20``."""
    return re.match(r"\+{0,2}[A-Za-z_]\w*(\.\w+)*=", word) is not None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
