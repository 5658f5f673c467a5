"""A labelling project: the one way in which pages, commands and rounds read and change it.

All methods are synchronous and may be called from any thread; those that change something return when it is on the disk.
"""

import hashlib
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from heedful.configs.label import ProjectSettings
from heedful.display import say
from heedful.errors import ConfigError
from heedful.files import make_private
from heedful.label import backups, labelling
from heedful.label import people as persons
from heedful.label.answers import check_words
from heedful.label.assignment import NotHeldError, chats_left, is_over, progress, waiting, why_nothing
from heedful.label.backups import is_old, migrate, read_old
from heedful.label.labelling import Saved, Sent, UndoLimits
from heedful.label.records import Assignment, Event, Item, LabelledItem, Person, Role, Standing, token_hash
from heedful.label.rounds_page import trained_on
from heedful.label.settings_file import raise_format, read_settings, write_settings
from heedful.label.state import State
from heedful.label.store import DATABASE, Reader, Store, Transaction, iso, row_of
from heedful.lock import FolderLock

__all__ = ["Assignment", "LabelledItem", "NotHeldError", "Project"]

AT_A_TIME = 100
"""Items or labels that are added in one transaction: a few hundredths of a second."""
T = TypeVar("T")


def _some_at_a_time(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[at : at + AT_A_TIME] for at in range(0, max(1, len(values)), AT_A_TIME))


def _reader(folder: Path, clock: Callable[[], float]) -> Reader:
    """What reads a project: its database, the files of an older heedful, or nothing if it has no events yet."""
    backups.refuse_missing(folder)
    if (folder / DATABASE).exists():
        return Reader(folder, clock)
    return Reader(folder, clock, read_old(folder)[0] if is_old(folder) else State())


class Project:
    """An open project. Made by `create` and `open`; a context manager that closes it.

    ``settings`` are those of its project.yaml, ``folder`` is where it is.
    """

    def __init__(
        self, folder: Path, settings: ProjectSettings, store: "Store | Reader", lock: FolderLock | None
    ) -> None:
        self.folder = folder
        self.settings = settings
        self._store = store
        self._lock = lock

    @classmethod
    def create(
        cls, folder: Path | str, settings: ProjectSettings, *, clock: Callable[[], float] = time.time
    ) -> "Project":
        """Make a project in a folder that is empty or does not exist, with one person: its owner. Raises ConfigError."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder; choose another name for the project")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(folder)
        write_settings(folder, settings)
        return cls.open(folder, clock=clock)

    @classmethod
    def open(cls, folder: Path | str, read_only: bool = False, *, clock: Callable[[], float] = time.time) -> "Project":
        """Open a project. One process at a time may do so to write; with ``read_only`` any number may, at any time.

        Opened to write, all of it is checked, the folder and its files become readable for their owner only, a backup is
        kept, and a project of an older heedful gets the files of this one.

        Raises ConfigError if it is no project, or if another process has it open to write; DataError if it is damaged.
        """
        folder = Path(folder)
        settings = read_settings(folder)
        if read_only:
            return cls(folder, settings, _reader(folder, clock), None)
        lock = FolderLock(
            folder,
            f"the project {folder} is open in another process ({{owner}}), which is the only one to write to it; end that "
            "process first, or do this on its pages",
        )
        try:
            migrate(folder)
            backups.refuse_missing(folder)
            store = Store(folder, clock)
            raise_format(folder)
            if refused := make_private(folder):
                say(
                    f"warning: {refused[0]} belongs to somebody else, so others may be able to read it; make it your own"
                )
        except BaseException:
            lock.release()
            raise
        project = cls(folder, settings, store, lock)
        if not any(map(persons.is_owner, project.people())):  # also if the one who made it was killed in between
            project.add_person("owner", "owner")
        project.keep_backup()
        return project

    def keep_backup(self) -> None:
        """Keep a backup in the project's folder, unless the newest one has the same events. A failure is only said."""
        try:
            backups.keep_backup(self.folder)
        except (OSError, sqlite3.DatabaseError) as error:
            say(f"warning: no backup of {self.folder} was made ({error})")

    def close(self) -> None:
        """Finish what is being written and let others open the project. A second time does nothing."""
        try:
            self._store.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "Project":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Items

    def add_items(self, items: Sequence[Item]) -> int:
        """Add items, and return how many were new: an item whose id is there already is not added again.

        Of all pairs, rankings and ratings together, exactly ``round(overlap * count)`` need several people; which ones of the
        new items do is drawn by a hash. Items that ask for several by themselves (``needed``) keep that and count. Raises
        DataError, and adds none, if one of them is not complete.

        Many items are added `AT_A_TIME`, so that people who label meanwhile do not wait. If the program ends in between, some
        are there; adding the same items again adds the others.
        """
        checked = labelling.checked_items(items)
        return sum(
            self._store.do(partial(labelling.add_items, settings=self.settings, items=some))
            for some in _some_at_a_time(checked)
        )

    def items(self, *, also_withdrawn: bool = False) -> list[Item]:
        """Return all items but those that are withdrawn, in the order in which they were added."""
        return self._store.look(
            lambda state, *_: [
                item for item in state.items.values() if also_withdrawn or item.item_id not in state.withdrawn
            ]
        )

    def begin_batch(self, file: str) -> str:
        """Record that the import of a file begins, and return what its items have as ``batch``."""
        return self._store.do(lambda t: labelling.begin_batch(t, file))

    def batches(self) -> list[dict[str, Any]]:
        """Return each import, the newest first: ``batch``, ``at``, and how many ``items``, ``labels``, ``withdrawn``."""

        def look(state: State, *_: Any) -> list[dict[str, Any]]:
            labels = Counter(
                state.items[one.content["item"]].batch for one in state.counting.values() if one.kind == "label"
            )
            items = Counter(item.batch for item in state.items.values())
            gone = Counter(state.items[one].batch for one in state.withdrawn)
            return [
                {"batch": name, "at": event.at, "items": items[name], "labels": labels[name], "withdrawn": gone[name]}
                for name, event in reversed(state.batches.items())
            ]

        return self._store.look(look)

    def withdraw(
        self, person_id: str | None, *, batch: str = "", items: Sequence[str] = (), back: bool = False, reason: str = ""
    ) -> int:
        """Withdraw the items of an import, or single ones: nobody gets them, and their labels are kept but do not count.

        Args:
            person_id: who does it; None for a command.
            batch: the import, or its number.
            items: ids of items; not looked at with a batch.
            back: put them back instead.

        Returns how many items that changed. Raises DataError for an import or item that is not there.
        """
        return self._store.do(lambda t: labelling.withdraw(t, person_id, batch, items, back=back, reason=reason))

    def withdrawn(self) -> set[str]:
        """Return the ids of the items that are withdrawn."""
        return self._store.look(lambda state, *_: set(state.withdrawn))

    def tasks(self) -> list[str]:
        """Return the tasks of the items, each once."""
        return self._store.look(lambda state, *_: sorted(state.tasks))

    # People

    def add_person(self, name: str, role: Role, standing: Standing | None = None) -> Person:
        """Add somebody. An annotator without a ``standing`` begins in screening if the project screens, else is active."""
        return self._store.do(lambda t: persons.add_person(t, self.settings, name, role, standing))

    def set_person(
        self, person_id: str, *, name: str | None = None, role: Role | None = None, standing: Standing | None = None
    ) -> Person:
        """Change somebody's name, role or standing; None leaves it. Who is removed is signed out.

        With another role or standing, an item that they hold goes back to the others. Raises DataError for the only owner.
        """
        given = {"name": name, "role": role, "standing": standing}
        changes = {key: value for key, value in given.items() if value is not None}
        return self._store.do(lambda t: persons.change_person(t, person_id, changes))

    def people(self) -> list[Person]:
        """Return everybody, in the order in which they were added."""
        return self._store.look(lambda state, *_: list(state.people.values()))

    def invite(self, person_id: str, hours: float = persons.INVITATION_HOURS, *, session: str | None = None) -> str:
        """Return a token that signs a person in once, within some hours.

        An earlier one of theirs counts no more, and their sessions end, but for the one with the token ``session``, which
        lasts until the new token is used.
        """
        return self._store.do(lambda t: persons.invite(t, person_id, hours, session))

    def redeem(self, token: str, hours: float = persons.SESSION_HOURS) -> str | None:
        """Return the token of a new session in exchange for an invitation's, or for that of the owner's link.

        The person's other sessions end. None if the token does not count (any more).
        """
        session = self._store.do(lambda t: persons.redeem(t, token, hours))
        if session is None and persons.take_owner_link(self.folder, token):
            return self._store.do(lambda t: persons.sign_in(t, persons.first_owner(t, self.settings).person_id, hours))
        return session

    def session(self, token: str) -> Person | None:
        """Return whose session a token is; None if it is none, has ended, or its person was removed."""
        return self._store.look(lambda state, leases, now: persons.holder(state, leases, "session", token, now))

    def end_session(self, token: str) -> None:
        """Sign out."""
        self._store.do(lambda t: t.leases.drop("session", token_hash(token)))

    # Labelling

    def next_item(self, person_id: str, *, chats: bool = True) -> Assignment | None:
        """Return the item that a person holds, else the next one for them, which they hold from now on; None if none is.

        ``chats=False``: there is nobody to talk to, so the next one is no chat.
        """
        return self._store.do(lambda t: labelling.next_item(t, self.settings, person_id, chats=chats))

    def held(self, person_id: str) -> Assignment | None:
        """Return the item that a person holds; None if they hold none. Nothing changes."""
        return self._store.look(lambda state, leases, _: labelling.held(state, leases, self.settings, person_id))

    def label(
        self,
        person_id: str,
        item_id: str,
        answer: Mapping[str, Any],
        *,
        nonce: str,
        seconds: float,
        comment: str = "",
        flags: Sequence[str] = (),
        expected_version: int | None = None,
        token: str | None = None,
        active: float | None = None,
    ) -> Event:
        """Record a person's answer to the item that they hold.

        Args:
            nonce: the same for the same thing sent again, which then changes nothing and returns the same event.
            seconds: how long it took, from shown to sent.
            active: for how much of that time somebody worked (docs/labelling-statistics.md); None if nobody knows.
            expected_version: the version of the instructions that the person saw; None is the newest.
            token: that of the `Assignment` that a page shows. The answer then names places on its screen, and counts only
                while the person still holds that assignment. Without it the answer names candidates, as those of chats do.

        Raises NotHeldError if the person does not hold the item, DataError if the answer is not one that the task takes.
        """
        sent = Sent(answer, nonce, seconds, comment, flags, expected_version, token, active)
        return self._store.do(lambda t: labelling.label(t, self.settings, person_id, item_id, sent))

    def add_labels(
        self,
        person_id: str,
        answers: Sequence[tuple[str, Mapping[str, Any]]],
        beside: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Record labels that were given elsewhere, as ``(item id, answer)``, and return how many were new.

        Nobody has to hold their items. A person's second answer to an item is not added. Raises DataError, and adds none, if
        an answer is not one that its task takes; chats cannot be added. Many are added `AT_A_TIME`, as `add_items` does.
        """
        items = {item.item_id: item for item in self.items(also_withdrawn=True)}
        contents = labelling.label_contents(items, answers, self.settings.criteria_asked, beside or {})
        return sum(
            self._store.do(partial(labelling.add_labels, person_id=person_id, contents=some))
            for some in _some_at_a_time(contents)
        )

    def skip(
        self, person_id: str, item_id: str, reason: str, flags: Sequence[str], nonce: str, *, token: str | None = None
    ) -> Event:
        """Record that a person does not label the item that they hold; they are not given it again. Raises as `label`."""

        return self._store.do(
            lambda t: labelling.skip(
                t, self.settings, person_id, item_id, nonce=nonce, reason=reason, flags=flags, token=token
            )
        )

    def undo(self, person_id: str, nonce: str, *, session: str | None = None) -> tuple[Event, Assignment | None] | None:
        """Take back a person's last label or skip that counts, and give them its item again with the old answer as draft.

        An item that they skipped, and that others have by now, stays with those. The same nonce again returns the same event.
        The second value is what the person holds now. None if there is nothing to take back. With the token of a
        ``session``, only what was done in it can be taken back.

        Raises NotHeldError if that was done before the session began, or for a label that a round has trained on.
        """
        trained, rounds = trained_on(self.folder)

        def work(transaction: Transaction) -> tuple[Event, Assignment | None] | None:
            row = None if session is None else transaction.leases.get("session", token_hash(session))
            limits = UndoLimits(0 if row is None else row.value.get("since", 0), trained, rounds)
            return labelling.undo(transaction, self.settings, person_id, nonce, limits)

        return self._store.do(work)

    def redo(self, person_id: str, nonce: str) -> tuple[Event, Assignment | None] | None:
        """Put back what a person took back last, as it was, unless they have labelled or skipped something since.

        Returns the new event and what the person holds now; None if there is nothing to put back. The same nonce again
        returns the same event. Raises NotHeldError if others have the item by now.
        """
        return self._store.do(lambda t: labelling.redo(t, self.settings, person_id, nonce))

    def undone(self, person_id: str) -> bool:
        """True if `redo` has something to put back."""
        return self._store.look(lambda state, *_: bool(state.undone.get(person_id)))

    def correct(
        self, person_id: str, event_id: str, answer: Mapping[str, Any], *, nonce: str, reason: str = ""
    ) -> Event:
        """Put another answer in place of a label's, as an owner. The label counts with it; both stay among the events.

        Args:
            event_id: the label's event id.
            answer: the fields that change, in terms of candidates.

        Raises DataError for a person who is no owner, a label that does not count, and an answer that its task does not take.
        """
        return self._store.do(
            lambda t: labelling.correct(t, self.settings, person_id, event_id, answer, nonce=nonce, reason=reason)
        )

    def corrections(self, event_id: str) -> list[Event]:
        """Return what owners changed of a label, the oldest first."""
        return self._store.look(lambda state, *_: list(state.corrections.get(event_id, ())))

    def save_draft(
        self, person_id: str, item_id: str, draft: Any, *, token: str | None = None, saved: Saved | None = None
    ) -> tuple[Mapping[str, str], ...]:
        """Keep what a person has so far of the item that they hold, and keep the item for them. Raises NotHeldError.

        A draft of None only keeps the item. Each tab (``saved``) has a draft of its own; returns the ``text`` and ``comment``
        of those of others.
        """
        return self._store.do(
            lambda t: labelling.save_draft(
                t, self.settings, person_id, item_id, draft, token=token, saved=saved or Saved()
            )
        )

    def progress(self, person_id: str) -> dict[str, int]:
        """Return counts for a person's page.

        ``done``, ``left``: the project's items that are done and that are not; for somebody in screening, of their screening
        items, and for somebody who labels for evaluation only, of what they have labelled themselves. ``own``: this person's
        labels that count; ``today``: those of this day in UTC.
        """
        today = iso(self._store.time_of_day())[:10]
        return self._store.look(lambda state, *_: progress(state, self.settings, person_id, today))

    def waiting(self) -> int:
        """Return how many items wait at least for each person who labels, whoever else is labelling now.

        What somebody has labelled or skipped does not wait for them, though it may still need others. Below 0 if there are
        fewer items than people.
        """
        return self._store.look(lambda state, *_: waiting(state))

    def why(self, person_id: str, *, chats: bool = True) -> str:
        """Return why `next_item` has nothing for a person.

        ``viewer``, ``removed``, ``refused``, ``screening`` (the owner's labels or screening items are missing), ``empty`` (no
        items were added), ``done`` (all items are), ``through`` (this person is, who labels for evaluation only), ``others``
        (others hold what the person could still get), ``second`` (what is left waits for other people's labels, and there are
        such people), ``people`` (some items need more people than there are), or, without ``chats``, ``no-model`` (what is
        left for the person are chats).
        """
        return self.why_counted(person_id, chats=chats)[0]

    def why_counted(self, person_id: str, *, chats: bool = True) -> tuple[str, int]:
        """Return what `why` returns, and of how many items that is said; 0 for reasons that are about no items."""
        return self._store.look(lambda state, *_: why_nothing(state, person_id, chats=chats))

    def is_over(self) -> bool:
        """True if somebody has labelled or skipped every item, screening items apart, and nobody holds one now."""
        return self._store.look(is_over)

    def chats_left(self) -> int:
        """Return how many chats are not done."""
        return self._store.look(lambda state, *_: chats_left(state))

    def set_instructions(self, text: str) -> int:
        """Set the instructions that people see, and return their version: 1, 2, ..."""
        check_words("instructions", text, 1_000_000)

        def work(transaction: Transaction) -> int:
            version = len(transaction.state.instructions) + 1
            transaction.add("instructions", None, {"version": version, "text": text})
            return version

        return self._store.do(work)

    def instructions(self) -> tuple[int, str]:
        """Return the version of the instructions and their text; 0 and an empty text if there are none."""
        return self._store.look(lambda s, *_: (len(s.instructions), s.instructions[-1] if s.instructions else ""))

    # What came of it

    def labels(self, *, also_withdrawn: bool = False) -> list[LabelledItem]:
        """Return the labels that count, in their order: screening, repeats and those for evaluation only among them."""
        return self._store.look(lambda state, *_: state.labels(also_withdrawn=also_withdrawn))

    def events(self, since: int = 0) -> list[Event]:
        """Return the events with a ``seq`` above ``since``."""
        return self._store.look(lambda state, *_: state.events[max(0, since) :])

    def content_hash(self) -> str:
        """Return the SHA-256 of the checksums of all events, as 64 hexadecimal digits."""
        checksums = self._store.look(lambda state, *_: [row_of(event)[-1] for event in state.events])
        return hashlib.sha256("".join(checksums).encode()).hexdigest()

    def event(self, event_id: str) -> Event | None:
        """Return an event, also one that was retracted; None if there is none with that id."""
        return next((event for event in reversed(self.events()) if event.event_id == event_id), None)
