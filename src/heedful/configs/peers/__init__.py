"""Settings of other libraries, by library and name: what heedful calls each, and what differs.

A file of TOML for each library (the names of its settings are in sections, by the class or the stage that they belong to):

    title = "TRL's trainers from 0.12 on"
    versions = ["1.15", "1.16"]

    [trainers.GRPOTrainer]                     what becomes of a trainer
    config = ["GRPOConfig", "TrainingArguments"]    sections with its settings, the more special first
    command = "grpo"                           heedful's
    writes = { loss_reduction = "token" }      settings that make heedful's numbers the origin's
    differs = ["..."]                          what differs without a setting

    [GRPOConfig.beta]
    ours = "kl_coef"                           heedful's setting; of several the first that the command has
    default = 0.0                              of the newest version; missing: None, or none
    defaults = { "0.14" = 0.04, "0.17" = 0.0 } in its place: each from that version on
    values = { group = "grpo" }                their value = ours; one that is not listed is not kept
    equal = 0.9                                the value, or values, of a lost setting that change no number here
    since = "0.14"                             until = "0.17": the first version without it
    kind = "differs"                           see `Kind`
    note = "..."                               what differs, or what to do
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["same", "differs", "combined", "lost", "none"]
"""same: ``ours`` takes the value, and it means the same. differs: ``ours`` takes it, with another meaning. combined: it makes
``ours`` together with other settings. lost: heedful has nothing of the kind. none: it changes no number."""


def version_key(version: str) -> tuple[int, ...]:
    """A version's numbers, for comparison: 0.9 is before 0.11."""
    return tuple(map(int, re.findall(r"\d+", version)))


def _last_of(version: str) -> tuple[int, ...]:
    """A version for comparison; 0.9 is the last of all 0.9.x."""
    key = version_key(version)
    return key if len(key) > 2 else (*key, sys.maxsize)


def _between(since: str, version: str, until: str) -> bool:
    key = _last_of(version)
    return (not since or version_key(since) <= key) and (not until or key < version_key(until))


@dataclass(frozen=True)
class PeerSetting:
    """A setting of another library."""

    name: str
    ours: tuple[str, ...] = ()
    kind: Kind = "same"
    note: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    defaults: tuple[tuple[str, Any], ...] = ()
    """Versions, in order, and the default from each on."""
    equal: tuple[Any, ...] = ()
    """Values of a lost setting with which the numbers are heedful's."""
    since: str = ""
    until: str = ""

    def default(self, version: str) -> Any:
        """The default of a version; None if it has none."""
        found = [value for first, value in self.defaults if version_key(first) <= _last_of(version)]
        return None if not found or found[-1] == "none" else found[-1]

    def is_in(self, version: str) -> bool:
        """Whether a version has the setting."""
        return _between(self.since, version, self.until)


@dataclass(frozen=True)
class PeerTrainer:
    """A trainer, or a stage, of another library."""

    config: tuple[str, ...]
    command: str
    writes: Mapping[str, Any] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    name: str = ""
    """Its class, if two trainers have the same name."""
    since: str = ""
    until: str = ""

    def is_in(self, version: str) -> bool:
        """Whether a version has the trainer."""
        return _between(self.since, version, self.until)


@dataclass(frozen=True)
class Peer:
    """A library."""

    title: str
    versions: tuple[str, ...]
    """Those that were read, in order."""
    trainers: Mapping[str, PeerTrainer]
    sections: Mapping[str, Mapping[str, PeerSetting]]

    def settings(self, trainer: str, first: str = "") -> dict[str, PeerSetting]:
        """The settings of a trainer, by section and name: ``GRPOConfig.beta``. More special sections come first, or the one
        that is named; those of no trainer belong to all, and come last."""
        of_trainers = {section for one in self.trainers.values() for section in one.config}
        shared = [section for section in self.sections if section not in of_trainers]
        own = sorted(self.trainers[trainer].config, key=lambda section: section != first)
        return {
            f"{section}.{name}": one
            for section in (*own, *shared)
            for name, one in self.sections.get(section, {}).items()
        }

    def inherited(self, trainer: str, first: str = "") -> set[str]:
        """Settings that a more special section of the trainer has under the same name."""
        keys = list(self.settings(trainer, first))
        names = [key.partition(".")[2] for key in keys]
        return {key for place, key in enumerate(keys) if names[place] in names[:place]}


@cache
def peers() -> dict[str, Peer]:
    """The libraries by the names of their files."""
    found = sorted(one.name for one in files(__name__).iterdir() if one.name.endswith(".toml"))
    return {name.removesuffix(".toml"): _peer(name) for name in found}


def _peer(name: str) -> Peer:
    content = tomllib.loads((files(__name__) / name).read_text(encoding="utf-8"))
    title, versions, trainers = content.pop("title"), content.pop("versions", []), content.pop("trainers", {})
    return Peer(
        title,
        tuple(versions),
        {one: PeerTrainer(**_tuples(given, "config", "differs")) for one, given in trainers.items()},
        {
            section: {one: _setting(one, given) for one, given in settings.items()}
            for section, settings in content.items()
        },
    )


def _setting(name: str, given: dict[str, Any]) -> PeerSetting:
    always = {"0": given["default"]} if "default" in given else {}
    defaults = given.get("defaults", always)
    plain = {key: value for key, value in given.items() if key not in ("default", "defaults", "ours")}
    if "equal" in plain:
        plain["equal"] = tuple(plain["equal"]) if isinstance(plain["equal"], list) else (plain["equal"],)
    return PeerSetting(name, ours=tuple(given.get("ours", "").split()), defaults=tuple(defaults.items()), **plain)


def _tuples(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return given | {name: tuple(given.get(name, ())) for name in names}
