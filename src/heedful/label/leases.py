"""What ends by itself or is not kept for ever: leases on items, drafts, invitations, sessions. Each is a row."""

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from heedful.label.identity import to_line

SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
    kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, until REAL, PRIMARY KEY (kind, key)
) STRICT;
"""
LONGEST = {"lease": 86_400.0, "invitation": 72 * 3600.0, "session": 14 * 86_400.0}
"""Seconds for which rows without a beginning were given at most; an older heedful did not note when they began."""
SLACK = 60.0
"""Seconds by which a clock may be set back without leases ending."""


@dataclass(frozen=True)
class Lease:
    """An item that a person holds."""

    item_id: str
    repeat: bool
    until: float
    """Seconds since 1970. Afterwards the item is still theirs if nobody else has taken it."""
    token: str = ""
    """Drawn when the item is given; an older page of the same item has another one."""


@dataclass(frozen=True)
class Row:
    """A lease, draft, invitation or session: what it is, and when it ends in seconds since 1970 (None: never by itself)."""

    value: Any
    until: float | None = None


class Leases:
    """Rows by kind (``lease``, ``draft``, ``invitation``, ``session``) and key. Changes are part of the open transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.now: float | None = None
        """The time at which rows are put; None before the first `set_time`."""

    def set_time(self, now: float) -> None:
        """Set the time. If the clock was set back, rows that began in what is now the future begin now.

        So sessions and invitations last as long as they were given for, and no longer. Leases from then have ended: their
        items can go to others, and a late label still counts if nobody else has the item.
        """
        is_back, self.now = self.now is None or now < self.now, now
        if not is_back:
            return
        for kind, longest in LONGEST.items():
            for key, row in self.rows(kind).items():
                end = row.until or 0.0
                began = row.value.get("from", end - longest)
                if began > now + SLACK:
                    self.put(kind, key, Row(row.value, now if kind == "lease" else now + end - began))

    def get(self, kind: str, key: str) -> Row | None:
        """Return a row, or None if there is none."""
        found = self._database.execute("SELECT value, until FROM leases WHERE kind = ? AND key = ?", (kind, key))
        row = found.fetchone()
        return None if row is None else Row(json.loads(row[0]), row[1])

    def rows(self, kind: str) -> dict[str, Row]:
        """Return the rows of a kind by key."""
        found = self._database.execute("SELECT key, value, until FROM leases WHERE kind = ? ORDER BY rowid", (kind,))
        return {key: Row(json.loads(value), until) for key, value, until in found}

    def put(self, kind: str, key: str, row: Row) -> None:
        """Set a row; one that ends notes when it began (``from``). Raises DataError for what JSON cannot hold."""
        value = row.value if row.until is None else {**row.value, "from": self.now or 0.0}
        self._database.execute(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", (kind, key, to_line(value), row.until)
        )

    def drop(self, kind: str, key: str) -> None:
        """Remove a row if it is there."""
        self._database.execute("DELETE FROM leases WHERE kind = ? AND key = ?", (kind, key))

    def by_person(self) -> dict[str, Lease]:
        """Return who holds which item."""
        return {person: _lease(row) for person, row in self.rows("lease").items()}

    def of(self, person_id: str) -> Lease | None:
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
    """Return the drafts of a row, the newest last: each has the ``tab`` that saved it, its number there (``save``), and the
    ``draft``.
    """
    if row is None or row.value is None:
        return []
    if isinstance(row.value, dict) and "tabs" in row.value:
        return list(row.value["tabs"])
    return [{"tab": "", "save": 0, "draft": row.value}]  # an older heedful did not tell tabs apart


def draft_key(person_id: str, item_id: str) -> str:
    """Return the key of the draft of a person for an item."""
    return to_line([person_id, item_id])
