"""Projects in memory and on the disk, with a clock that the test sets."""

import itertools
import sqlite3

import pytest

from heedful.configs.label import ProjectSettings
from heedful.label import Candidate, Item, Project, item_id, labelling, people
from heedful.label.labelling import Sent
from heedful.label.state import State
from heedful.label.store import SCHEMA, Leases, Transaction

ANSWERS = {
    "pair": {"preferred": 0, "strength": 3, "both_bad": False},
    "ranking": {"ranks": [1, 2, 2]},
    "rating": {"rating": 6, "flags": ["hallucination"]},
    "demonstration": {"text": "猫是动物。"},
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
    """A project without a disk: the operations of the store on a state of their own."""

    def __init__(self, **settings):
        self.settings = ProjectSettings(**settings)
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.executescript(SCHEMA)
        self.transaction = Transaction(database, State(), Leases(database), 1_000_000.0)
        self.state, self.leases = self.transaction.state, self.transaction.leases
        self._nonces = itertools.count()
        self.owner = self.person("owner", "owner")

    def person(self, name="张伟", role="annotator", standing=None):
        return people.add_person(self.transaction, self.settings, name, role, standing).person_id

    def add(self, count, task="pair", **fields):
        items = list(make_items(count, task, start=len(self.state.items), **fields))
        assert labelling.add_items(self.transaction, self.settings, items) == count
        return items

    def pass_minutes(self, minutes):
        self.transaction.now += 60 * minutes

    def next(self, person, *, chats=True):
        return labelling.next_item(self.transaction, self.settings, person, chats=chats)

    def label(self, person, item_id, answer=None, *, nonce=None, seconds=2.5, version=None, comment="", flags=()):
        answer = ANSWERS[self.state.items[item_id].task] if answer is None else answer
        sent = Sent(answer, nonce or f"n{next(self._nonces)}", seconds, comment, flags, version)
        return labelling.label(self.transaction, self.settings, person, item_id, sent)

    def skip(self, person, item_id, nonce=None):
        nonce = nonce or f"n{next(self._nonces)}"
        return labelling.skip(
            self.transaction, self.settings, person, item_id, nonce=nonce, reason="看不懂", flags=["broken"]
        )

    def undo(self, person, nonce=None):
        return labelling.undo(self.transaction, self.settings, person, nonce or f"n{next(self._nonces)}")

    def draft(self, person, item_id, draft):
        labelling.save_draft(self.transaction, self.settings, person, item_id, draft)

    def change(self, person, **changes):
        return people.change_person(self.transaction, person, changes)

    def work_through(self, person, most=1000):
        """Label all that a person is given; return the ids."""
        done = []
        while len(done) < most and (given := self.next(person)) is not None:
            self.label(person, given.item.item_id)
            done.append(given.item.item_id)
        return done


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
def project(tmp_path):
    """A project on the disk, with an annotator p2 beside its owner p1 and 20 pairs. Without overlap and repeats."""
    with Project.create(tmp_path / "项目", ProjectSettings(name="猫🐈", overlap=0, repeats=0)) as made:
        made.add_person("张伟", "annotator")
        made.add_items(list(make_items(20)))
        yield made
