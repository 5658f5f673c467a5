"""Settings of another library as heedful's, by the tables of `heedful.configs.peers`, with a row for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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

    @cached_property
    def table(self) -> Mapping[str, PeerSetting]:
        """The origin's settings, by section and name."""
        return self.peer.settings(self.trainer, self.origin.first)

    def full_name(self, name: str) -> str:
        """``Section.name`` of a setting, from its name alone or with its section; the name itself if no section has it."""
        return next((key for key in (*self.given, *self.table) if name in (key, key.partition(".")[2])), name)

    def sets(self, name: str) -> bool:
        """Whether the origin sets it; otherwise `value` is its default."""
        return self.full_name(name) in self.given

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
        """Report what became of the origin's setting ``name``; without a note, the table's."""
        key, value = self.full_name(name), self.value(name)
        of_table = self.table[key].note if key in self.table else ""
        self.rows.append(
            Row(
                fate,
                key,
                source_text(value) if key in self.given or value is not None else "",
                ours,
                sentence(of_table if note is None else note),
                self.origin.lines.get(key),
            )
        )

    def add_written_row(self, name: str, ours: str = "", note: str | None = None, *, differs: bool = False) -> None:
        """Report a setting that was written: as kept (or differs) if the origin sets it, as a default if it does not."""
        fate: Fate = "default" if not self.sets(name) else "differs" if differs else "kept"
        self.add_row(fate, name, ours, note)

    def has_row(self, name: str) -> bool:
        """Whether the report has what became of it."""
        return any(row.name == self.full_name(name) for row in self.rows)

    def claim(self, *names: str) -> bool:
        """Take settings out of `translate_by_table`: the caller translates them. Returns whether the origin sets any."""
        keys = {self.full_name(name) for name in names}
        self._claimed |= keys
        return any(key in self.given for key in keys)

    def ask_if_unknown(self, *names: str, ours: str) -> bool:
        """Report those of the settings as questions whose value only a run could tell. Returns whether there are any."""
        unknown = [name for name in names if is_unknown(self.value(name))]
        for name in unknown:
            self.add_row("question", name, f"{ours}: ?")
        return bool(unknown)

    def translate_by_table(self) -> None:
        """Write and report every setting that depends on no other, and what the trainer does without a setting."""
        inherited, sections = self.peer.inherited(self.trainer, self.origin.first), self.origin.sections
        defaults = [
            name
            for name in self.table
            if name not in self.given
            and name not in inherited
            and (sections is None or name.partition(".")[0] in sections)
        ]
        for name in [*(name for name in self.given if name in self.table), *defaults]:
            if self.table[name].kind != "combined" and name not in self._claimed:
                self._translate_one(name, self.table[name])
        for ours, value in self.peer.trainers[self.trainer].writes.items():
            if ours not in self.written:
                always = "The trainer does so; none of its settings changes it."
                self.rows.append(Row("default", self.trainer, "", self.write(ours, value), always))

    def add_remaining_rows(self) -> None:
        """Report the origin's settings that have no row yet, so that none is dropped in silence."""
        reported = {row.name for row in self.rows}
        for name, value in self.given.items():
            if name in reported:
                continue
            if name not in self.table:
                note = f"{self.peer.title}: no such setting is known; nothing was written for it"
                self.add_row("question", name, note=note)
            elif self.table[name].kind == "combined" and name not in self._claimed and not is_unknown(value):
                self.add_row("none" if is_off(value) else "lost", name, " ".join(self.table[name].ours))
            else:
                self.add_row("question", name, " ".join(f"{one}: ?" for one in self.table[name].ours))

    def _translate_one(self, name: str, setting: PeerSetting) -> None:
        """Write and report a setting by its entry in the table; a default only if it makes heedful's numbers others."""
        is_given, value = name in self.given, self.value(name)
        ours = next((one for one in setting.ours if one in self.setting_types), None)
        if not setting.is_in(self.version):
            if is_given:
                since = f"only from {setting.since} on" if setting.since else f"only before {setting.until}"
                note = f"{self.peer.title} has it {since}, and {self.version} was assumed; see --version"
                self.add_row("question", name, note=note)
        elif setting.kind == "none":
            if is_given:
                self.add_row("none", name)
        elif setting.kind == "lost" or ours is None:
            if is_off(value) or value in setting.equal:
                if is_given:
                    self.add_row("none", name, ours or "", "With this value it does nothing.")
            elif is_given or setting.equal:
                self.add_row("lost", name, ours or "", setting.note or f"heedful {self.command} has no such setting")
        elif is_unknown(value):
            note = " ".join(["Only a run can tell its value.", sentence(setting.note)]).strip()
            self.add_row("question", name, f"{ours}: ?", note)
        elif is_given or value is not None:
            self._write_one(name, setting, ours, value, is_given)

    def _write_one(self, name: str, setting: PeerSetting, ours: str, value: Any, is_given: bool) -> None:
        hint = self.setting_types[ours]
        kinds = getattr(hint, "__args__", ()) or (hint,)
        has_value = not setting.values or table_key(value) in setting.values
        taken = setting.values.get(table_key(value)) if setting.values else value
        if isinstance(taken, Imported):
            taken = taken.name
        if isinstance(taken, float) and taken.is_integer() and int in kinds and float not in kinds:
            taken = int(taken)  # top_k=0.0
        if not has_value and value is not None:
            if is_given:
                has = f"heedful has what {' and '.join(setting.values)} {'is' if len(setting.values) == 1 else 'are'}"
                self.add_row("lost", name, note=f"{has}. {setting.note}")
        elif taken is None and type(None) not in kinds:
            if is_given:
                self.add_row("question", name, f"{ours}: ?", f"heedful's {ours} cannot be none. {setting.note}")
        elif is_given:
            self._by_file.add(ours)
            self.add_row("differs" if setting.kind == "differs" else "kept", name, self.write(ours, taken))
        elif taken != getattr(self.config_class, ours, None) and ours not in self._by_file:
            self.add_row("default", name, self.write(ours, taken))


def table_key(value: Any) -> str:
    """A value as a key of ``values`` in a table."""
    return str(value).lower() if isinstance(value, bool) else value.name if isinstance(value, Imported) else str(value)


def sentence(note: str) -> str:
    """A note of a table, with its full stop."""
    note = note.strip()
    return note if not note or note.endswith((".", "?")) else f"{note}."


def is_off(value: Any) -> bool:
    """Whether a value is that of a setting that does nothing."""
    return value is None or value is False or value in ("", "no", "none", 0)


def yaml_text(value: Any) -> str:
    """A value as in YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value) if isinstance(value, str | int | float) else source_text(value)
