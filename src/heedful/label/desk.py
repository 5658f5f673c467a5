"""What lies on the desks of a project and is not kept for ever: leases, drafts, invitations, sessions."""

import json
from dataclasses import dataclass
from typing import Any

from heedful.label.assignment import Lease
from heedful.label.identity import to_line

GIVEN = {"lease": 86_400.0, "invitation": 72 * 3600.0, "session": 14 * 86_400.0}
"""For how many seconds rows were given at most by an older heedful, which did not note when they began."""
SLACK = 60.0
"""Seconds by which a clock may be set back without leases ending."""


@dataclass(frozen=True)
class Row:
    """One of them: what it is, and when it ends in seconds since 1970; None if it does not end by itself."""

    value: Any
    until: float | None = None

    def columns(self) -> tuple[str, float | None]:
        """Return the row as the database keeps it."""
        return to_line(self.value), self.until


class Desk:
    """Rows by kind (``lease``, ``draft``, ``invitation``, ``session``) and key, with the changes that were not saved yet."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Row]] = {"lease": {}, "draft": {}, "invitation": {}, "session": {}}
        self.changes: list[tuple[str, str, Row | None]] = []
        self.now = 0.0
        """The time at which rows are put."""
        self._is_checked = False

    def tell_time(self, now: float) -> None:
        """Say what time it is. If the clock was set back, what began in what is now the future begins now.

        So sessions and invitations last as long as they were given for, and no longer. Leases of then have ended: whoever has
        left keeps an item from nobody, and whoever has not may still label it while nobody else has it.
        """
        is_back, self.now = now < self.now or not self._is_checked, now
        self._is_checked = True
        for kind, most in GIVEN.items() if is_back else ():
            for key, row in list(self._rows[kind].items()):
                end = row.until or 0.0
                began = row.value.get("from", end - most)
                if began > now + SLACK:
                    self.put(kind, key, Row(row.value, now if kind == "lease" else now + end - began))

    def load(self, kind: str, key: str, value: str, until: float | None) -> None:
        """Put what the database has."""
        self._rows.setdefault(kind, {})[key] = Row(json.loads(value), until)

    def get(self, kind: str, key: str) -> Row | None:
        """Return a row, or None if there is none."""
        return self._rows[kind].get(key)

    def rows(self, kind: str) -> dict[str, Row]:
        """Return the rows of a kind by key."""
        return self._rows[kind]

    def put(self, kind: str, key: str, row: Row) -> None:
        """Set a row; one that ends notes when it began (``from``). Raises DataError for what JSON cannot hold."""
        if row.until is not None:
            row = Row({**row.value, "from": self.now}, row.until)
        row.columns()
        self._rows[kind][key] = row
        self.changes.append((kind, key, row))

    def drop(self, kind: str, key: str) -> None:
        """Remove a row if it is there."""
        if self._rows[kind].pop(key, None) is not None:
            self.changes.append((kind, key, None))

    def take_changes(self) -> dict[tuple[str, str], Row | None]:
        """Return what has changed since the last time, by kind and key."""
        changes, self.changes = self.changes, []
        return {(kind, key): row for kind, key, row in changes}

    def leases(self) -> dict[str, Lease]:
        """Return the leases by person."""
        return {person: _lease(row) for person, row in self._rows["lease"].items()}

    def lease(self, person_id: str) -> Lease | None:
        """Return what a person holds."""
        row = self.get("lease", person_id)
        return None if row is None else _lease(row)

    def hold(self, person_id: str, lease: Lease) -> None:
        """Give a person an item instead of what they hold."""
        value = {"item": lease.item_id, "repeat": lease.repeat, "token": lease.token}
        self.put("lease", person_id, Row(value, lease.until))


def _lease(row: Row) -> Lease:
    return Lease(row.value["item"], row.value["repeat"], float(row.until or 0), row.value.get("token", ""))


def drafts_of(row: Row | None) -> list[dict[str, Any]]:
    """Return the drafts of a row, the last one last: each has the ``tab`` that saved it, its number there (``save``), and the
    ``draft``.
    """
    if row is None or row.value is None:
        return []
    if isinstance(row.value, dict) and "tabs" in row.value:
        return list(row.value["tabs"])
    return [{"tab": "", "save": 0, "draft": row.value}]  # of before tabs were told apart


def draft_key(person_id: str, item_id: str) -> str:
    """Return the key of the draft of a person for an item."""
    return to_line([person_id, item_id])
