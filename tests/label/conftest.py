"""Projects in memory and on the disk, with a clock that the test sets."""

import contextlib
import itertools
import sqlite3
from pathlib import Path

import pytest

from heedful.apps.label import Candidate, Item, Project, item_id
from heedful.apps.label.state import State
from heedful.apps.label.store import SCHEMA, Leases, Transaction, iso
from heedful.configs.label import ProjectSettings

ANSWERS = {
    "pair": {"preferred": 0, "strength": 3, "both_bad": False},
    "ranking": {"ranks": [1, 2, 2]},
    "rating": {"rating": 6, "flags": ["hallucination"]},
    "demonstration": {"text": "猫是动物。\u2028🐈"},
    "correction": {"text": "better 🐈"},
}
"""An answer to each task but chat."""
COUNTS = {"pair": 2, "ranking": 3, "rating": 1, "demonstration": 0, "correction": 1, "chat": 0}


def make_items(count, task="pair", *, start=0, **fields):
    """``count`` different items, with texts that are easily damaged."""
    for i in range(start, start + count):
        candidates = tuple(
            Candidate(f"回答 {k} 🐈\u2028{i}", {"checkpoint": f"secret-{k}", "seed": k}) for k in range(COUNTS[task])
        )
        prompt = f"问题 {i}\n\u2028🐈"
        yield Item(item_id(task, prompt, candidates), task, prompt, candidates, **fields)


class Memory:
    """A project without a disk: the operations of `Project` on a state of their own."""

    def __init__(self, **settings):
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.executescript(SCHEMA)
        self.database, self.state, self.leases, self.now = database, State(), Leases(database), 1_000_000.0
        self.project = Project(Path(), ProjectSettings(**settings), self, None)
        self._nonces = itertools.count()
        self.owner = self.person("owner", "owner")

    def do(self, work):
        settings = self.project.settings
        return work(Transaction(settings, self.state, self.leases, self.now, iso(self.now), self.database))

    look = do

    def person(self, name="张伟", role="annotator", standing=None):
        return self.project.add_person(name, role, standing).person_id

    def add(self, count, task="pair", **fields):
        items = list(make_items(count, task, start=len(self.state.items), **fields))
        assert self.project.add_items(items) == count
        return items

    def pass_minutes(self, minutes):
        self.now += 60 * minutes

    def next(self, person, *, chats=True):
        return self.project.next_item(person, chats=chats)

    def label(self, person, item_id, answer=None, *, nonce=None, seconds=2.5, version=None, **more):
        answer = ANSWERS[self.state.items[item_id].task] if answer is None else answer
        more |= {"nonce": nonce or f"n{next(self._nonces)}", "seconds": seconds, "expected_version": version}
        return self.project.label(person, item_id, answer, **more)

    def skip(self, person, item_id, nonce=None):
        return self.project.skip(person, item_id, "看不懂", ["broken"], nonce or f"n{next(self._nonces)}")

    def undo(self, person, nonce=None):
        return self.project.undo(person, nonce or f"n{next(self._nonces)}")

    def draft(self, person, item_id, draft):
        self.project.save_draft(person, item_id, draft)

    def change(self, person, **changes):
        return self.project.set_person(person, **changes)

    def work_through(self, person, most=1000):
        """Label all that a person is given; return the ids."""
        done = []
        while len(done) < most and (given := self.next(person)) is not None:
            self.label(person, given.item.item_id)
            done.append(given.item.item_id)
        return done


@pytest.fixture(name="item")
def _item():
    """``item(task, prompt, *answers, **fields)`` is an item."""

    def make(task, prompt, *answers, **fields):
        candidates = tuple(map(Candidate, answers))
        return Item(item_id(task, prompt, candidates), task, prompt, candidates, **fields)

    return make


@pytest.fixture
def memory():
    """``memory(**settings)`` is a project in memory."""
    return Memory


@pytest.fixture
def items():
    """``items(count, task)`` are different items."""
    return lambda *arguments, **fields: list(make_items(*arguments, **fields))


@pytest.fixture
def answers():
    """An answer to each task but chat."""
    return ANSWERS


@pytest.fixture
def new_project(tmp_path):
    """``new_project(**settings)``: on the disk, with the annotators p2 (张伟) and p3 (Ada). Without overlap and repeats."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            settings = ProjectSettings(**{"overlap": 0, "repeats": 0} | settings)
            made = stack.enter_context(Project.create(tmp_path / "项目", settings))
            for name in ("张伟", "Ada"):
                made.add_person(name, "annotator")
            return made

        yield make


@pytest.fixture
def project(tmp_path):
    """A project on the disk, with an annotator p2 beside its owner p1 and 20 pairs. Without overlap and repeats."""
    with Project.create(tmp_path / "项目", ProjectSettings(name="猫🐈", overlap=0, repeats=0)) as made:
        made.add_person("张伟", "annotator")
        made.add_items(list(make_items(20)))
        yield made
