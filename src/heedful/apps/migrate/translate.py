"""Settings of another library as heedful's, by the tables of `heedful.configs.peers`, with a row for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from heedful.apps.migrate.values import Imported, is_unknown, source_text
from heedful.configs.peers import Peer, PeerSetting, peers
from heedful.configs.settings import types_of
from heedful.configs.trainers import TRAINERS

Fate = Literal["question", "lost", "differs", "kept", "default", "none"]
"""question: only the author can tell. lost: not kept, and it matters. differs: kept, with another meaning. default: not said,
and the library's default is written. none: it changes no number."""


@dataclass(frozen=True)
class Row:
    """A setting of the origin, and what became of it."""

    fate: Fate
    name: str
    value: str
    ours: str = ""
    """heedful's setting and value."""
    note: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Origin:
    """What a file sets of another library's trainer."""

    peer: str
    """The library, by the name of its table."""
    trainer: str
    given: Mapping[str, Any]
    """By section and name. A value may be something that only a run could tell."""
    lines: Mapping[str, int]
    """Where, by the same names."""
    sections: frozenset[str] | None = None
    """Those that the file has; defaults of others are not taken. None: all."""
    first: str = ""
    """The section of which defaults come before those of others."""
    version: str = ""
    """The library's, if the file shows it."""


@dataclass
class Translation:
    """Settings of one run: the origin's, and heedful's as they are found."""

    origin: Origin
    version: str
    """Of the library."""
    processes: int = 1
    """On which the origin ran."""
    written: dict[str, Any] = field(default_factory=dict)
    """heedful's settings."""
    rows: list[Row] = field(default_factory=list)
    _claimed: set[str] = field(default_factory=set)
    _by_file: set[str] = field(default_factory=set)
    """heedful's settings that the file sets, by whatever name."""

    @property
    def peer(self) -> Peer:
        """The library."""
        return peers()[self.origin.peer]

    @property
    def trainer(self) -> str:
        """Its trainer."""
        return self.origin.trainer

    @property
    def given(self) -> Mapping[str, Any]:
        """What the origin sets, by section and name."""
        return self.origin.given

    @property
    def command(self) -> str:
        """heedful's."""
        return self.peer.trainers[self.trainer].command

    @property
    def setting_types(self) -> Mapping[str, Any]:
        """The types of the command's settings."""
        return types_of(self.config_class)

    @property
    def config_class(self) -> Any:
        """The class of the command's settings."""
        return TRAINERS[self.command].settings()

    @property
    def table(self) -> Mapping[str, PeerSetting]:
        """The origin's settings, by section and name."""
        return self.peer.settings(self.trainer, self.origin.first)

    def full_name(self, name: str) -> str:
        """Section and name of a setting of which the name is given; the name itself if no section has it."""
        return next((key for key in (*self.given, *self.table) if name in (key, key.partition(".")[2])), name)

    def value(self, name: str) -> Any:
        """What the origin sets, or its default."""
        key = self.full_name(name)
        if key in self.given:
            return self.given[key]
        return self.table[key].default(self.version) if key in self.table else None

    def number(self, name: str) -> float | None:
        """A number among the origin's settings; None if it is none, or only a run could tell."""
        found = self.value(name)
        return found if isinstance(found, int | float) and not isinstance(found, bool) else None

    def write(self, name: str, value: Any) -> str:
        """Set heedful's setting; its text for a row."""
        self.written[name] = value
        return f"{name}: {yaml_text(value)}"

    def add_row(self, fate: Fate, name: str, ours: str = "", note: str | None = None) -> None:
        """What became of the origin's setting ``name``; without a note, the table's."""
        key, value = self.full_name(name), self.value(name)
        has = key in self.given or value is not None
        table = self.table[key].note if key in self.table else ""
        said = sentence(table if note is None else note)
        self.rows.append(Row(fate, key, source_text(value) if has else "", ours, said, self.origin.lines.get(key)))

    def add_written_row(self, name: str, ours: str = "", note: str | None = None, *, differs: bool = False) -> None:
        """A row for a setting that was written: kept if the origin sets it, a default otherwise."""
        fate: Fate = "default" if self.full_name(name) not in self.given else "differs" if differs else "kept"
        self.add_row(fate, name, ours, note)

    def claim(self, *names: str) -> bool:
        """Whether the origin sets any of the names. They are somebody's from here on."""
        keys = {self.full_name(name) for name in names}
        self._claimed |= keys
        return any(key in self.given for key in keys)

    def ask_if_unknown(self, *names: str, ours: str) -> bool:
        """Rows for those of the names of which only a run can tell the value; whether there are any."""
        open_ones = [name for name in names if is_unknown(self.value(name))]
        for name in open_ones:
            self.add_row("question", name, f"{ours}: ?")
        return bool(open_ones)

    def translate_by_table(self) -> None:
        """Settings that stand for themselves, and those that heedful must have for the origin's numbers."""
        for name, value in self.peer.trainers[self.trainer].writes.items():
            self.written.setdefault(name, value)
        inherited = self.peer.inherited(self.trainer, self.origin.first)
        has = [
            name
            for name in self.table
            if self.origin.sections is None or name.partition(".")[0] in self.origin.sections
        ]
        others = [name for name in has if name not in self.given and name not in inherited]
        for name in [*(name for name in self.given if name in self.table), *others]:
            if self.table[name].kind != "combined" and name not in self._claimed:
                self._translate_one(name, self.table[name])

    def add_remaining_rows(self) -> None:
        """Rows for what nothing has read."""
        for name, value in self.given.items():
            if name not in self.table:
                self.add_row(
                    "question", name, note=f"{self.peer.title} is not known to have it; nothing was written for it"
                )
            elif self.table[name].kind == "combined" and name not in self._claimed:
                fate: Fate = "question" if is_unknown(value) else "none" if is_off(value) else "lost"
                self.add_row(fate, name, " ".join(self.table[name].ours))
            elif name in self._claimed and not any(row.name == name for row in self.rows):
                self.add_row("question", name, " ".join(f"{one}: ?" for one in self.table[name].ours))

    def _translate_one(self, name: str, setting: PeerSetting) -> None:
        is_given, value = name in self.given, self.value(name)
        if is_given and not setting.is_in(self.version):
            since = f"only from {setting.since} on" if setting.since else f"only before {setting.until}"
            self.add_row(
                "question",
                name,
                note=f"{self.peer.title} has it {since}, and {self.version} was assumed; see --version",
            )
            return
        if (not is_given and value is None) or not setting.is_in(self.version):
            return
        ours = next((one for one in setting.ours if one in self.setting_types), None)
        if setting.kind == "none":
            if is_given:
                self.add_row("none", name, note=setting.note)
        elif setting.kind == "lost":
            has_no_effect = is_off(value) or any(value == one for one in setting.equal)
            if is_given or (setting.equal and not has_no_effect):
                self.add_row(
                    "none" if has_no_effect else "lost",
                    name,
                    ours or "",
                    "With this value it does nothing." if has_no_effect else None,
                )
        elif is_unknown(value):
            self.add_row(
                "question",
                name,
                f"{ours}: ?" if ours else "",
                " ".join(["Only a run can tell its value.", sentence(setting.note)]).strip(),
            )
        elif ours is None:
            if is_given and not is_off(value):
                self.add_row("lost", name, note=setting.note or f"heedful {self.command} has no such setting")
        else:
            self._write_one(name, setting, ours, value, is_given)

    def _write_one(self, name: str, setting: PeerSetting, ours: str, value: Any, is_given: bool) -> None:
        if setting.values and table_key(value) not in setting.values:
            if is_given and value is not None:
                allowed = " and ".join(setting.values)
                self.add_row(
                    "lost",
                    name,
                    note=f"heedful has what {allowed} {'is' if len(setting.values) == 1 else 'are'}. {setting.note}",
                )
            return
        taken = (
            setting.values[table_key(value)] if setting.values else value.name if isinstance(value, Imported) else value
        )
        if taken is None and type(None) not in getattr(self.setting_types[ours], "__args__", ()):
            return
        if (
            isinstance(taken, float)
            and taken.is_integer()
            and int in (self.setting_types[ours], *getattr(self.setting_types[ours], "__args__", ()))
        ):
            taken = int(taken)  # top_k=0.0
        is_ours = taken == getattr(self.config_class, ours, None)
        if is_given:
            self._by_file.add(ours)
            self.add_row(
                "differs" if setting.kind == "differs" else "kept", name, self.write(ours, taken), setting.note
            )
        elif not is_ours and ours not in self._by_file:
            self.add_row("default", name, self.write(ours, taken), setting.note)


def table_key(value: Any) -> str:
    """A value as a key of ``values`` in a table."""
    return str(value).lower() if isinstance(value, bool) else value.name if isinstance(value, Imported) else str(value)


def sentence(note: str) -> str:
    """A note of a table, or several, as sentences."""
    return note if not note or note.endswith((".", "?")) else f"{note}."


def is_off(value: Any) -> bool:
    """Whether a value is that of a setting that does nothing."""
    return value is None or value is False or value in ("", "no", "none", 0)


def yaml_text(value: Any) -> str:
    """A value as in YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value) if isinstance(value, str | int | float) else source_text(value)
