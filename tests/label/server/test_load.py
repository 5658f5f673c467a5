"""L1 and L2: many people at once, with double submits, undos and reloads; and a server that is killed again and again.

The server is the real command in a process of its own. What it acknowledged is what has to be there.
"""

import io
import itertools
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from http.client import HTTPException

import pytest

from heedful.apps.label import Project
from heedful.apps.label.importing import add, read_items_text
from heedful.apps.label.server.run import invite
from heedful.apps.label.store import read_checked
from heedful.configs.label import ProjectSettings
from heedful.configs.label_server import InviteConfig
from jsonl import lines

ADDRESS = re.compile(r"--owner --url (http://127\.0\.0\.1:(\d+))")


class Command:
    """`heedful label serve`, as a user starts it."""

    def __init__(self, folder, *flags):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "heedful", "label", "serve", str(folder), "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = ADDRESS.search(self.process.stdout.readline())
        if said is None:
            self.process.kill()
            raise AssertionError(self.process.communicate())
        links = []
        invite(InviteConfig(project=folder, owner=True, url=said[1]), links.append)
        self.port, self.token = int(said[2]), links[0].partition("/join#")[2]

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        self.process.communicate(timeout=300)
        return self.process.returncode


class Labeller(threading.Thread):
    """Somebody who labels until nothing is left, or the server is gone: clumsily, and taking down what was acknowledged."""

    def __init__(self, client, seed, *, think=0.0, most=None):
        super().__init__()
        self.client = client
        self.random = random.Random(seed)
        self.think = think
        self.most = most
        self.sent = 0
        self.acknowledged = {}
        """Event id of each label that the server has said to have, and was not asked to take back, by nonce."""
        self.unsure = {}
        """What was sent without an answer: it may be there or not."""
        self.trouble = None

    def run(self):
        try:
            self._work()
        except Exception as error:
            self.trouble = error

    def _ask(self, method, path, body=None):
        answer = self.client.get(path) if method == "GET" else self.client.post(path, body)
        assert answer.status == 200, (answer.status, path, answer.bytes)
        return answer.json

    def _work(self):
        while self.most is None or self.sent < self.most:
            item = self._ask("GET", "/api/next")["item"]
            if item is None:
                return
            time.sleep(self.random.uniform(0, self.think))
            if self.random.random() < 0.05:  # a reload in the middle of an item
                shown = self.client.shown(item)
                self._ask("POST", "/api/draft", {**shown, "draft": {"answer": {"preferred": 1}}})
                again = self._ask("GET", "/api/next")["item"]
                assert (again["id"], again["answers"]) == (item["id"], item["answers"])
                assert again["draft"] == {"answer": {"preferred": 1}}
            self._label(item)
            if self.random.random() < 0.1:
                self.acknowledged.popitem()
                undone = self._ask("POST", "/api/undo", {"nonce": self._nonce()})["item"]
                assert undone["id"] == item["id"]
                self._label(undone)

    def _nonce(self):
        return f"{self.random.getrandbits(96):024x}"

    def _label(self, item):
        nonce = self._nonce()
        preferred = self.random.choice([0, 1, None])
        answer = {"preferred": preferred, "strength": None if preferred is None else 2, "both_bad": False}
        body = {"nonce": nonce, **self.client.shown(item), "answer": answer, "seconds": 1.5}
        body |= {"comment": "好 😀\u2028", "flags": []}
        self.unsure[nonce] = body
        event = self._ask("POST", "/api/label", body)["label"]
        del self.unsure[nonce]
        self.acknowledged[nonce] = event
        self.sent += 1
        if self.random.random() < 0.1:
            assert self._ask("POST", "/api/label", body)["label"] == event


def project_with(folder, items, people, **settings):
    """A project with people who have not signed in yet, and their links' tokens."""
    with Project.create(folder, ProjectSettings(repeats=0.0, **settings)) as project:
        assert project.add_items(items) == len(items)
        added = [project.add_person(f"人 {i}", "annotator") for i in range(people)]
        return {person.person_id: project.invite(person.person_id) for person in added}


def check(folder, labellers, items, overlap):
    """Nothing is lost or doubled, nobody labelled an item twice. Returns the labels of each item, and how many it needs."""
    with Project.open(folder) as project:
        labels = project.labels()
        by_nonce = Counter((one.person.person_id, one.event.nonce) for one in labels)
        assert [nonce for nonce, count in by_nonce.items() if count > 1] == [], "a label is there twice"
        kept = {one.event.event_id for one in labels}
        for one in labellers:
            lost = [nonce for nonce, event in one.acknowledged.items() if event not in kept]
            assert lost == [], "an acknowledged label is lost"
        assert sum(item.needed == 2 for item in project.items()) == round(overlap * items)
        people = Counter((one.item.item_id, one.person.person_id) for one in labels)
        assert max(people.values()) == 1, "somebody labelled an item twice"
        return Counter(item for item, _ in people), {item.item_id: item.needed for item in project.items()}


@pytest.mark.parametrize(
    ("people", "labels_each", "think"), [(6, 8, 0.0), pytest.param(50, 40, 2.0, marks=pytest.mark.exhaustive)]
)
def test_people_at_once(tmp_path, new_client, pair_item, people, labels_each, think):
    count = round(people * labels_each / 1.2)
    tokens = project_with(tmp_path / "项目", [pair_item(i) for i in range(count)], people, overlap=0.2)
    server = Command(tmp_path / "项目")
    try:
        labellers = []
        for i, token in enumerate(tokens.values()):
            client = new_client(server.port)
            assert client.join(token).status == 200
            labellers.append(Labeller(client, i, think=think))
        for one in labellers:
            one.start()
        for one in labellers:
            one.join()
    finally:
        status = server.end()
    assert [one.trouble for one in labellers if one.trouble] == []
    assert status == 0
    labels, needed = check(tmp_path / "项目", labellers, count, 0.2)
    assert labels == needed, "every item has exactly as many labels as the overlap asks for"
    assert labels.total() == people * labels_each


def file_of(count, name):
    """The text of a file with ``count`` pairs."""
    words = ("好的 answer " * 12, "不行 answer " * 12)
    return lines({"prompt": f"{name} 题目 {i}", "responses": [f"{one}{i}" for one in words]} for i in range(count))


def sign_in(new_client, port, person, token, cookies):
    """Somebody's browser, which keeps its cookie while the server is gone."""
    client = new_client(port)
    if person in cookies:
        client.cookie, client.csrf = cookies[person]
    else:
        assert client.join(token).status == 200
        cookies[person] = client.cookie, client.csrf
    return client


def resend(client, labeller):
    """Send what was not answered once more, twice: it is there now, once."""
    for nonce, body in list(labeller.unsure.items()):
        first, second = (client.post("/api/label", body) for _ in range(2))
        assert (first.status, second.status) == (200, 200), (first.bytes, second.bytes)
        assert first.json["label"] == second.json["label"]
        labeller.acknowledged[nonce] = first.json["label"]
        del labeller.unsure[nonce]


class Importer(threading.Thread):
    """An owner who imports one file after the other, and exports in between, until the server is gone."""

    RECORDS = 1000

    def __init__(self, client, name):
        super().__init__()
        self.client = client
        self.name_of_files = name
        self.confirmed = []
        """Files that the server has said to have taken in."""
        self.unsure = None
        """The file of which it has not said so."""
        self.trouble = None

    def run(self):
        try:
            for number in itertools.count():
                self.unsure = f"{self.name_of_files} {number}"
                text = file_of(self.RECORDS, self.unsure)
                answer = self.client.post("/api/import", {"text": text, "name": "数据.jsonl"})
                assert (answer.status, answer.json.get("added")) == (200, self.RECORDS), answer.bytes
                self.confirmed.append(self.unsure)
                self.unsure = None
                packed = self.client.get("/api/export?eval_fraction=0.2")
                with zipfile.ZipFile(io.BytesIO(packed.bytes)) as archive:
                    assert archive.testzip() is None
        except Exception as error:
            self.trouble = error


def kill_again_and_again(folder, new_client, pair_item, *, kills, seed, people=3, importers=None):
    """Label while the server is killed at random, and return everybody's lives."""
    chance = random.Random(seed)
    tokens = project_with(folder, [pair_item(i) for i in range(40 * kills)], people, overlap=0.2)
    cookies, last, lives = {}, {}, []
    for life in range(kills + 1):
        server = Command(folder)
        labellers = []
        for person, token in tokens.items():
            client = sign_in(new_client, server.port, person, token, cookies)
            if person in last:
                resend(client, last[person])
            last[person] = Labeller(client, f"{seed} {life} {person}", most=2 if life == kills else None)
            labellers.append(last[person])
        lives += labellers
        others = []
        if importers is not None and life < kills:
            owner = new_client(server.port)
            assert owner.join(server.token).status == 200
            others = [Importer(owner, f"{seed} {life}")]
            importers += others
        for one in labellers + others:
            one.start()
        if life < kills:
            time.sleep(chance.uniform(0.0, 0.3 if importers is None else 2.0))
            server.process.kill()
        for one in labellers + others:
            one.join()
        if life == kills:
            assert [one.trouble for one in labellers if one.trouble] == []
            assert server.end() == 0
        server.process.communicate()
        everybody = labellers + others
        trouble = [one.trouble for one in everybody if not isinstance(one.trouble, OSError | HTTPException | None)]
        assert trouble == []
        assert_sound(folder)
    return lives


def assert_sound(folder):
    """The database and all its checksums are sound. Looked at in a copy: the server finds what the kill left."""
    copy = folder.parent / "copy"
    copy.mkdir(exist_ok=True)
    for name in ("events.sqlite", "events.sqlite-wal"):
        (copy / name).unlink(missing_ok=True)
        if (folder / name).exists():
            shutil.copy(folder / name, copy)
    assert read_checked(copy / "events.sqlite").seq > 0


def killed(tmp_path, new_client, pair_item, kills, people=3):
    folder = tmp_path / "项目"
    lives = kill_again_and_again(folder, new_client, pair_item, kills=kills, seed=kills, people=people)
    labels, needed = check(folder, lives, 40 * kills, 0.2)
    assert all(count <= needed[item] for item, count in labels.items())


def test_a_server_that_is_killed(tmp_path, new_client, pair_item):
    """What was acknowledged, what was in the air, and then a draft of somebody who holds an item."""
    killed(tmp_path, new_client, pair_item, 1, people=2)
    folder, cookies = tmp_path / "项目", {}
    with Project.open(folder) as project:
        person = project.add_person("草 😀", "annotator").person_id
        token = project.invite(person)
    server = Command(folder)
    client = sign_in(new_client, server.port, person, token, cookies)
    item = client.get("/api/next").json["item"]
    draft = {"answer": {"preferred": 1}, "comment": "好 😀\u2028"}
    assert client.post("/api/draft", {**client.shown(item), "draft": draft}).status == 200
    server.end(signal.SIGKILL)
    server = Command(folder)
    again = sign_in(new_client, server.port, person, token, cookies).get("/api/next").json["item"]
    assert server.end() == 0
    assert (again["id"], again["answers"], again["draft"]) == (item["id"], item["answers"], draft)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_20_times_while_it_imports_and_exports(tmp_path, new_client, pair_item):
    folder, importers = tmp_path / "项目", []
    more = {"people": 4, "importers": importers}
    lives = kill_again_and_again(folder, new_client, pair_item, kills=20, seed=11, **more)
    with Project.open(folder) as project:
        kept = {one.event.event_id for one in project.labels()}
        lost = [event for one in lives for event in one.acknowledged.values() if event not in kept]
        assert lost == [], "an acknowledged label is lost"
        there = Counter(item.prompt for item in project.items())
        assert max(there.values()) == 1
        for one in importers:
            for name in one.confirmed:
                assert all(f"{name} 题目 {i}" in there for i in range(one.RECORDS)), (
                    f"{name} was confirmed, and is lost"
                )
            if one.unsure is not None:  # the same import again adds what is missing
                before = sum(f"{one.unsure} 题目 {i}" in there for i in range(one.RECORDS))
                added = add(project, read_items_text(file_of(one.RECORDS, one.unsure)))
                assert added["items"] == one.RECORDS - before
        judged = sum(item.needed == 2 for item in project.items())
        assert judged == round(0.2 * len(project.items())), "the share that two people label is exact all the same"
    assert_sound(folder)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_200_times(tmp_path, new_client, pair_item):
    killed(tmp_path, new_client, pair_item, 200)
