"""A labelling project: the only interface through which pages, commands and rounds read and change it.

All methods are synchronous and thread-safe; methods that change something return once it is on disk.
"""

import contextlib
import functools
import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from heedful.apps.label import assignment, backups, labelling
from heedful.apps.label import people as persons
from heedful.apps.label.answers import check_words
from heedful.apps.label.assignment import NotHeldError
from heedful.apps.label.records import Assignment, Event, Item, LabelledItem, Person, Snapshot
from heedful.apps.label.rounds_page import trained_on
from heedful.apps.label.settings_file import read_settings, write_settings
from heedful.apps.label.store import Reader, Store, Transaction, row_of
from heedful.configs.label import ProjectSettings
from heedful.display import say
from heedful.errors import ConfigError
from heedful.files import make_private
from heedful.lock import FolderLock

__all__ = ["Assignment", "LabelledItem", "NotHeldError", "Project"]

AT_A_TIME = 100
"""Items or labels added per transaction: a few hundredths of a second."""
P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])


def _some_at_a_time(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[at : at + AT_A_TIME] for at in range(0, max(1, len(values)), AT_A_TIME))


def _operation(work: Callable[Concatenate[Transaction, P], T]) -> "Callable[Concatenate[Project, P], T]":
    """Turn an operation of the store into a method of `Project`."""

    def method(self: "Project", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._store.do(lambda transaction: work(transaction, *args, **kwargs))

    return _named_after(work, method)


def _question(work: Callable[Concatenate[Transaction, P], T]) -> "Callable[Concatenate[Project, P], T]":
    """Turn a read-only function into a method of `Project`."""

    def method(self: "Project", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._store.look(lambda transaction: work(transaction, *args, **kwargs))

    return _named_after(work, method)


def _named_after(work: Callable[..., Any], method: M) -> M:
    """Give a method the signature and docstring of its function, with ``self`` instead of the transaction."""
    functools.update_wrapper(method, work)
    signature = inspect.signature(work)
    transaction, *others = signature.parameters.values()
    first = transaction.replace(name="self", annotation=inspect.Parameter.empty)
    vars(method)["__signature__"] = signature.replace(parameters=[first, *others])
    method.__qualname__ = f"Project.{work.__name__}"
    return method


class Project:
    """An open project, from `create` or `open`; as a context manager it closes itself.

    ``settings`` are those of project.yaml, ``folder`` is its path.
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
        """Create a project in an empty or new folder, with one person, its owner. Raises ConfigError."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder; choose another name for the project")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(folder)
        write_settings(folder, settings)
        return cls.open(folder, clock=clock)

    @classmethod
    def open(cls, folder: Path | str, read_only: bool = False, *, clock: Callable[[], float] = time.time) -> "Project":
        """Open a project: for writing in one process at a time, with ``read_only`` in any number.

        Opening for writing checks all data, makes the folder and its files readable for their owner only, and keeps a backup.

        Raises ConfigError if it is not a project, or if another process has it open for writing; DataError if it is damaged.
        """
        folder = Path(folder)
        settings = read_settings(folder)
        if read_only:
            backups.refuse_missing(folder)
            return cls(folder, settings, Reader(folder, settings, clock), None)
        refusal = (
            f"the project {folder} is open in another process ({{owner}}), and only one may write to it; stop that "
            "process first, or do this on its pages"
        )
        with contextlib.ExitStack() as on_failure:
            lock = on_failure.enter_context(FolderLock(folder, refusal))
            backups.refuse_missing(folder)
            project = on_failure.enter_context(cls(folder, settings, Store(folder, settings, clock), lock))
            if refused := make_private(folder):
                say(
                    f"warning: {refused[0]} belongs to another user, so others may be able to read it; make it your own"
                )
            if not any(map(persons.is_owner, project.people())):  # also after `create` was killed in between
                project.add_person("owner", "owner")
            project.keep_backup()
            on_failure.pop_all()
        return project

    def keep_backup(self) -> None:
        """Keep a backup in the project's folder, unless the newest one has the same events. A failure is only reported."""
        try:
            backups.keep_backup(self.folder)
        except OSError as error:
            say(f"warning: no backup of {self.folder} was made ({error})")

    def close(self) -> None:
        """Finish writing and let others open the project. A second call does nothing."""
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

    begin_batch = _operation(labelling.begin_batch)
    withdraw = _operation(labelling.withdraw)

    def add_items(self, items: Sequence[Item]) -> int:
        """Add items, and return how many were new: an item with a known id is not added again.

        Of all pairs, rankings and ratings together, exactly ``round(overlap * count)`` need several people; a hash selects
        them among the new items. Items with their own ``needed`` keep it and are counted. Raises DataError, and adds none, if
        one of them is incomplete.

        Many items are added `AT_A_TIME`, so that labellers do not wait. If the program ends in between, some are added;
        adding the same items again adds the others.
        """
        checked = labelling.checked_items(items)
        return sum(self._store.do(partial(labelling.add_items, items=some)) for some in _some_at_a_time(checked))

    def items(self, *, also_withdrawn: bool = False) -> list[Item]:
        """Return all items except withdrawn ones, in the order in which they were added."""
        return self._store.look(
            lambda seen: [
                item for item in seen.state.items.values() if also_withdrawn or item.item_id not in seen.state.withdrawn
            ]
        )

    def batches(self) -> list[dict[str, Any]]:
        """Return each import, the newest first: ``batch``, ``at``, and how many ``items``, ``labels``, ``withdrawn``."""

        def look(seen: Transaction) -> list[dict[str, Any]]:
            state = seen.state
            labels = Counter(one.item.batch for one in state.labels(also_withdrawn=True))
            items = Counter(item.batch for item in state.items.values())
            gone = Counter(state.items[one].batch for one in state.withdrawn)
            return [
                {"batch": name, "at": event.at, "items": items[name], "labels": labels[name], "withdrawn": gone[name]}
                for name, event in reversed(state.batches.items())
            ]

        return self._store.look(look)

    def withdrawn(self) -> set[str]:
        """Return the ids of the items that are withdrawn."""
        return self._store.look(lambda seen: set(seen.state.withdrawn))

    def tasks(self) -> list[str]:
        """Return the tasks of the items, each once."""
        return self._store.look(lambda seen: sorted(seen.state.tasks))

    # People

    add_person = _operation(persons.add_person)
    set_person = _operation(persons.set_person)
    invite = _operation(persons.invite)
    session = _question(persons.session)
    end_session = _operation(persons.end_session)

    def people(self) -> list[Person]:
        """Return everybody, in the order in which they were added."""
        return self._store.look(lambda seen: list(seen.state.people.values()))

    def redeem(self, token: str, hours: float = persons.SESSION_HOURS) -> str | None:
        """Exchange the token of an invitation, or of the owner's link, for that of a new session.

        The person's other sessions end. None if the token is not valid (any more).
        """
        session = self._store.do(lambda transaction: persons.redeem(transaction, token, hours))
        if session is None and persons.take_owner_link(self.folder, token):
            return self._store.do(lambda transaction: persons.sign_in_owner(transaction, hours))
        return session

    # Labelling

    next_item = _operation(labelling.next_item)
    held = _question(labelling.held)
    label = _operation(labelling.label)
    skip = _operation(labelling.skip)
    redo = _operation(labelling.redo)
    correct = _operation(labelling.correct)
    save_draft = _operation(labelling.save_draft)

    def undo(self, person_id: str, nonce: str, *, session: str | None = None) -> tuple[Event, Assignment | None] | None:
        """Take back a person's last counting label or skip, and give them its item again with the old answer as draft.

        A skipped item that others have by now stays with them. A repeated nonce returns the same event. The second value is
        the item that the person holds now. None if there is nothing to take back. With the token of a ``session``, only its
        own labels and skips can be taken back.

        Raises NotHeldError for one from before the session, or for a label that a round has trained on.
        """
        undo = partial(labelling.undo, session=session, trained=trained_on(self.folder))
        return self._store.do(lambda transaction: undo(transaction, person_id, nonce))

    def undone(self, person_id: str) -> bool:
        """True if `redo` has something to restore."""
        return self._store.look(lambda seen: bool(seen.state.undone.get(person_id)))

    def add_labels(
        self,
        person_id: str,
        answers: Sequence[tuple[str, Mapping[str, Any]]],
        beside: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Record imported labels, as ``(item id, answer)``, and return how many were new.

        No leases are needed. A person's second answer to an item is not added. Raises DataError, and adds none, if an answer
        is invalid for its task or belongs to a chat. Many are added `AT_A_TIME`, as in `add_items`.
        """
        items = {item.item_id: item for item in self.items(also_withdrawn=True)}
        contents = labelling.label_contents(items, answers, self.settings.criteria_asked, beside or {})
        return sum(
            self._store.do(partial(labelling.add_labels, person_id=person_id, contents=some))
            for some in _some_at_a_time(contents)
        )

    def corrections(self, event_id: str) -> list[Event]:
        """Return the corrections of a label, the oldest first."""
        return self._store.look(lambda seen: list(seen.state.corrections.get(event_id, ())))

    # Progress

    progress = _question(assignment.progress)
    waiting = _question(assignment.waiting)
    why_counted = _question(assignment.why_counted)
    is_over = _question(assignment.is_over)
    chats_left = _question(assignment.chats_left)

    def set_instructions(self, text: str) -> int:
        """Set the instructions for labellers, and return their version: 1, 2, ..."""
        check_words("instructions", text, 1_000_000)

        def work(transaction: Transaction) -> int:
            version = len(transaction.state.instructions) + 1
            transaction.add("instructions", None, {"version": version, "text": text})
            return version

        return self._store.do(work)

    def instructions(self) -> tuple[int, str]:
        """Return the version of the instructions and their text; 0 and an empty text if there are none."""
        texts = self._store.look(lambda seen: seen.state.instructions[:])
        return len(texts), texts[-1] if texts else ""

    # Results

    def snapshot(self) -> Snapshot:
        """Return all items, labels, events and people at one moment, also while people label."""

        def look(seen: Transaction) -> Snapshot:
            state = seen.state
            labels = state.labels(also_withdrawn=True)
            return Snapshot(
                [*state.items.values()], labels, state.events[:], [*state.people.values()], {*state.withdrawn}
            )

        return self._store.look(look)

    def labels(self, *, also_withdrawn: bool = False) -> list[LabelledItem]:
        """Return the counting labels in order, including screening, repeats and those for evaluation only."""
        return self._store.look(lambda seen: seen.state.labels(also_withdrawn=also_withdrawn))

    def events(self, since: int = 0) -> list[Event]:
        """Return the events with a ``seq`` above ``since``."""
        return self._store.look(lambda seen: seen.state.events[max(0, since) :])

    def content_hash(self) -> str:
        """Return the SHA-256 of the checksums of all events, as 64 hexadecimal digits."""
        return hashlib.sha256("".join(row_of(event)[-1] for event in self.events()).encode()).hexdigest()
