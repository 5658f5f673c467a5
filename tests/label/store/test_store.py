"""The store on the disk: kills, full disks, damaged files, several threads and processes."""

import hashlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from heedful import faults
from heedful.cli import main
from heedful.configs.label import ProjectSettings
from heedful.errors import ConfigError, DataError, MachineError
from heedful.label import store
from heedful.label.project import NotHeldError, Project
from heedful.label.rebuild import rebuild

PAIR = {"preferred": 0, "strength": 3, "both_bad": False}
LABELLER = Path(__file__).with_name("labeller.py")


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    faults.plan("")


def send(project, nonce, person="p2"):
    """Label the next item."""
    return project.label(person, project.next_item(person).item.item_id, PAIR, nonce=nonce, seconds=1)


def journal_of(project_or_folder):
    folder = getattr(project_or_folder, "folder", project_or_folder)
    return folder / "journal.jsonl"


def check_equal(folder):
    """The database is sound and has the lines of the journal; so has what is made of the journal."""
    lines = journal_of(folder).read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    database = sqlite3.connect(folder / "labels.sqlite")
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert [line for (line,) in database.execute("SELECT line FROM events ORDER BY seq")] == lines
    database.close()
    assert rebuild(folder)[-1].startswith(
        f"labels.sqlite is sound, and equal to what journal.jsonl gives: {len(lines)} "
    )
    return [json.loads(line) for line in lines]


def test_what_was_confirmed_is_there_again(project):
    event = send(project, "一")
    project.save_draft("p2", project.next_item("p2").item.item_id, {"answer": "🐈\u2028"})
    before = (project.items(), project.people(), project.labels(), project.events(), project.next_item("p2"))
    project.set_instructions("谨慎\u2028")
    found = project.content_hash()
    assert found == hashlib.sha256(journal_of(project).read_bytes()).hexdigest()
    project.close()
    with Project.open(project.folder) as again:
        assert again.content_hash() == found
        after = (again.items(), again.people(), again.labels(), again.events()[:-1], again.next_item("p2"))
        assert after[:4] == before[:4]
        assert after[4].draft == before[4].draft
        assert after[4].item == before[4].item
        assert again.instructions() == (1, "谨慎\u2028")
        assert again.label("p2", event.content["item"], PAIR, nonce="一", seconds=9) == event
        assert again.event(event.event_id) == event
        assert again.event("nothing") is None
    check_equal(project.folder)


def test_events_since(project):
    event = send(project, "n")
    assert project.events(event.seq - 1)[0] == event
    assert project.events(event.seq) == []
    assert [one.seq for one in project.events()] == list(range(1, event.seq + 1))


def at_once(*works):
    """Run functions in threads that begin together; return what they return or raise."""
    gate, results = threading.Barrier(len(works)), [None] * len(works)

    def run(i):
        gate.wait()
        try:
            results[i] = works[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_the_same_thing_sent_by_many_threads_is_one_event(project):
    item = project.next_item("p2").item.item_id
    results = at_once(*[lambda: project.label("p2", item, PAIR, nonce="n", seconds=1)] * 8)
    assert len({event.event_id for event in results}) == 1
    others = [lambda i=i: project.label("p2", item, PAIR, nonce=f"other {i}", seconds=1) for i in range(4)]
    assert all(isinstance(error, NotHeldError) for error in at_once(*others))
    assert len(project.labels()) == 1


def test_people_in_threads_never_hold_one_item(tmp_path, items):
    """Eight people, as fast as they can, on 24 items of which some need two; operations share their way to the disk."""
    faults.plan("label.committed:raise@1000000")  # counts visits
    with Project.create(tmp_path / "p", ProjectSettings(overlap=0.25, repeats=0)) as project:
        project.add_items(items(24))
        people = [project.add_person(f"{i}", "annotator").person_id for i in range(8)]
        held, doubles, lock = Counter(), [], threading.Lock()
        needed = {item.item_id: item.needed for item in project.items()}

        def work(person):
            count = 0
            while (given := project.next_item(person)) is not None:
                item = given.item.item_id
                with lock:
                    held[item] += 1
                    if held[item] > needed[item]:
                        doubles.append(item)
                project.label(person, item, PAIR, nonce=f"{count}", seconds=1)
                count += 1
            return count

        before = faults.visits()["label.committed"]
        counts = at_once(*[lambda person=person: work(person) for person in people])
        assert sum(counts) == sum(needed.values()) == 24 + 6
        assert doubles == []
        assert Counter(one.item.item_id for one in project.labels()) == needed
        assert faults.visits()["label.committed"] - before < 2 * sum(counts)


def test_people_label_while_many_items_are_added(project, items):
    """Nobody waits until all are there; the share that several people label is exact all the same."""
    events = []
    adding = threading.Thread(target=project.add_items, args=(items(4000, start=100),))
    adding.start()
    while adding.is_alive() and len(events) < 20:
        events.append(send(project, f"n{len(events)}"))
    adding.join()
    added = [event.seq for event in project.events() if event.kind == "item"]
    assert len(added) == 4020
    assert any(added[20] < event.seq < added[-1] for event in events)


def test_labels_from_elsewhere_are_added_while_people_label(project, items):
    more = items(3000, start=100)
    project.add_items(more)
    other = project.add_person("别处", "annotator").person_id
    events = []
    answers = [(item.item_id, PAIR) for item in more]
    adding = threading.Thread(target=project.add_labels, args=(other, answers))
    adding.start()
    while adding.is_alive() and len(events) < 20:
        events.append(send(project, f"n{len(events)}"))
    adding.join()
    added = [event.seq for event in project.events() if event.person == other]
    assert len(added) == 3000
    assert any(added[0] < event.seq < added[-1] for event in events)


def test_an_operation_that_fails_half_way_leaves_nothing(project):
    """A mistake of our own, beside operations of others in the same transaction."""

    def half(transaction):
        transaction.add("instructions", None, {"version": 1, "text": "half"})
        transaction.desk.drop("lease", "p2")
        raise RuntimeError("a mistake")

    item = project.next_item("p2").item.item_id
    right = [partial(project.set_instructions, f"right {i}") for i in range(3)]
    wrong = partial(project._store.do, half)
    results = at_once(right[0], wrong, right[1], wrong, right[2])
    assert [str(one) for one in results if isinstance(one, Exception)] == ["a mistake"] * 2
    assert sorted(one for one in results if isinstance(one, int)) == [1, 2, 3]
    assert [e.content["text"][:5] for e in project.events() if e.kind == "instructions"] == ["right"] * 3
    assert project.label("p2", item, PAIR, nonce="n", seconds=1)
    project.close()
    check_equal(project.folder)


# Kills


class Child:
    """A running `labeller.py`, and what it has confirmed."""

    def __init__(self, folder, first, plan=""):
        self.process = subprocess.Popen(
            [sys.executable, str(LABELLER), str(folder), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HEEDFUL_FAULTS": plan},
        )

    def lines(self):
        """Wait for its end; return what it confirmed."""
        said, _ = self.process.communicate(timeout=60)
        return [line for line in said.split("\n") if line and line != "open"]


def check_confirmed(folder, said):
    """Everything that was confirmed is there once; what was sent again is not doubled."""
    with Project.open(folder) as project:
        events = project.events()
        nonces = Counter(event.nonce for event in events if event.nonce is not None)
        assert set(nonces.values()) <= {1}
        for line in said:
            kind, _, number = line.partition(" ")
            assert nonces[number if kind == "label" else line] == 1, f"{line} was confirmed, and is lost"
        retracted = {event.content["event"] for event in events if event.kind == "retract"}
        assert {one.event.event_id for one in project.labels(also_withdrawn=True)} == {
            event.event_id for event in events if event.kind == "label"
        } - retracted
        last = next((event for event in reversed(events) if event.kind == "label"), None)
        if last is not None:
            said = {"comment": last.content["comment"], "nonce": last.nonce, "seconds": 0}
            assert project.label("p2", last.content["item"], last.content["answer"], **said) == last
            assert len(project.events()) == len(events)
        return max((int(event.nonce) for event in events if event.kind == "label"), default=0) + 1


@pytest.mark.parametrize("point", faults.LABEL_POINTS)
def test_killed_anywhere_nothing_confirmed_is_lost(project, point):
    """At every step of writing, in the middle of a session."""
    project.close()
    child = Child(project.folder, 1, f"{point}:kill@9")
    said = child.lines()
    assert child.process.returncode == -signal.SIGKILL
    assert said, "it confirmed something before"
    first = check_confirmed(project.folder, said)
    check_equal(project.folder)
    assert first > 2
    with Project.open(project.folder) as again:
        assert again.next_item("p2").draft is None or again.next_item("p2").draft["answer"]["preferred"] in (0, 1)


@pytest.mark.exhaustive
def test_two_hundred_kills_at_random_times(tmp_path, items):
    """Of one project, one after the other: each session goes on where the killed one was."""
    source, first = random.Random(23), 1
    folder = tmp_path / "p"
    with Project.create(folder, ProjectSettings(overlap=0, repeats=0.05)) as project:
        project.add_items(items(4_000))
        project.add_person("张伟", "annotator")
    said = []
    for kill in range(200):
        child = Child(folder, first)
        assert child.process.stdout.readline() == "open\n"
        time.sleep(source.uniform(0, 0.4))
        child.process.kill()
        said += child.lines()
        first = check_confirmed(folder, said)
        if kill % 20 == 19:
            check_equal(folder)
    assert len(said) > 500
    check_equal(folder)


# Disks and files


@pytest.mark.parametrize("point", faults.LABEL_POINTS)
@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_fails_loses_nothing(project, point, fault):
    """The same label, sent again, is recorded once."""
    item = project.next_item("p2").item.item_id
    faults.plan(f"{point}:{fault}")
    with pytest.raises(MachineError, match="not confirmed, send it again"):
        project.label("p2", item, PAIR, nonce="n", seconds=1)
    whole = journal_of(project).read_bytes()
    assert whole.endswith(b"\n")
    event = project.label("p2", item, PAIR, nonce="n", seconds=1)
    assert [one.event for one in project.labels()] == [event]
    send(project, "m")
    project.close()
    assert journal_of(project).read_bytes().startswith(whole)
    check_equal(project.folder)


def test_what_no_disk_took_is_not_seen(project):
    """Whoever looks after the failure sees what is on the disk, not what the label would have made of it."""
    item = project.next_item("p2").item.item_id
    faults.plan("label.began:enospc")
    with pytest.raises(MachineError):
        project.label("p2", item, PAIR, nonce="n", seconds=1)
    assert list(project.labels()) == []
    assert project.progress("p2")["own"] == 0


def test_a_full_disk(project):
    """The system takes no byte more, first of either file, then of the database."""
    item = project.next_item("p2").item.item_id
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (journal_of(project).stat().st_size + 50, (project.folder / "labels.sqlite-wal").stat().st_size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(MachineError, match="not confirmed, send it again"):
                project.label("p2", item, PAIR, nonce="n", seconds=1, comment="x" * 5000)
            assert project.progress("p2")["own"] in (0, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    event = project.label("p2", item, PAIR, nonce="n", seconds=1, comment="x" * 5000)
    assert [one.event for one in project.labels()] == [event]
    project.close()
    check_equal(project.folder)


def test_a_full_database(project):
    pages = project._store._database.execute("PRAGMA page_count").fetchone()[0]
    project._store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(MachineError, match="the disk is full; make room"):
        project.set_instructions("x" * 100_000)
    project._store._database.execute("PRAGMA max_page_count = 100000")
    assert project.set_instructions("x" * 100_000) == 1


def test_a_database_that_cannot_be_written(project):
    project._store._database.execute("PRAGMA query_only = 1")
    with pytest.raises(MachineError, match="cannot be written to; look at the permissions"):
        send(project, "n")
    project._store._database.execute("PRAGMA query_only = 0")
    send(project, "n")


def test_a_database_that_another_program_has_locked(project):
    """A backup, say. It is waited for, but not for ever."""
    project._store._database.execute("PRAGMA busy_timeout = 100")
    other = sqlite3.connect(project.folder / "labels.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(MachineError, match="another program has kept it locked"):
        send(project, "n")
    project._store._database.execute("PRAGMA busy_timeout = 20000")
    threading.Timer(0.2, other.execute, ["ROLLBACK"]).start()
    assert send(project, "n").nonce == "n"
    other.close()


def test_a_torn_last_line_is_cut(project):
    project.close()
    whole = journal_of(project).read_bytes()
    with journal_of(project).open("ab") as file:
        file.write('{"seq":99,"event_id":"猫'.encode()[:-1])
    with Project.open(project.folder) as again:
        assert len(again.events()) == whole.count(b"\n")
    assert journal_of(project).read_bytes() == whole


def test_a_journal_that_lost_its_end_gets_it_from_the_database(project):
    send(project, "n")
    project.close()
    whole = journal_of(project).read_bytes()
    with journal_of(project).open("r+b") as file:
        file.truncate(len(whole) // 2)
    Project.open(project.folder).close()
    assert journal_of(project).read_bytes() == whole
    journal_of(project).unlink()
    Project.open(project.folder).close()
    assert journal_of(project).read_bytes() == whole


def test_a_database_that_lost_events_gets_them_from_the_journal(project):
    send(project, "n")
    found, labels = project.content_hash(), project.labels()
    project.close()
    database = sqlite3.connect(project.folder / "labels.sqlite")
    with database:
        database.execute("DELETE FROM events WHERE seq > 5")
    database.close()
    with Project.open(project.folder) as again:
        assert again.content_hash() == found
    check_equal(project.folder)
    (project.folder / "labels.sqlite").unlink()
    with Project.open(project.folder) as again:
        assert again.content_hash() == found
        assert again.labels() == labels
    check_equal(project.folder)


def damage(folder, how):
    path = folder / "labels.sqlite"
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "header":
            file.write(b"not a database, " * 8)
        elif how == "pages":
            file.seek(4096)
            file.write(os.urandom(size - 4096))
        else:
            file.truncate(size // 2)


@pytest.mark.parametrize("how", ["header", "pages", "half"])
def test_a_damaged_database_is_made_anew_from_the_journal(project, how, capsys):
    """Opening says so, and names the command; after it, all is there."""
    session = project.redeem(project.invite("p2"))
    send(project, "n")
    found, labels = project.content_hash(), project.labels()
    project.close()
    damage(project.folder, how)
    with pytest.raises(DataError, match=r"is damaged .*`heedful label rebuild .*` makes it anew from journal\.jsonl"):
        Project.open(project.folder)
    assert main(["label", "rebuild", str(project.folder)]) == 0
    said = capsys.readouterr().out
    assert "made anew from journal.jsonl" in said
    assert "labels.replaced.sqlite" in said
    assert "invite people anew" in said
    assert (project.folder / "labels.replaced.sqlite").is_file()
    with Project.open(project.folder) as again:
        assert again.content_hash() == found
        assert again.labels() == labels
        assert again.session(session) is None
        send(again, "m")
    check_equal(project.folder)


def test_a_database_that_contradicts_the_journal(project, capsys):
    """The journal counts; the old database stays beside it, and people stay signed in."""
    session = project.redeem(project.invite("p2"))
    send(project, "n")
    found = project.content_hash()
    project.close()
    database = sqlite3.connect(project.folder / "labels.sqlite")
    with database:
        database.execute("UPDATE events SET line = replace(line, '张伟', '李娜') WHERE seq = 2")
    database.close()
    with pytest.raises(DataError, match=r"event 2 differs between labels.sqlite and line 2 of journal.jsonl; `heedful"):
        Project.open(project.folder)
    assert main(["label", "rebuild", str(project.folder)]) == 0
    assert "differed from event 2 on" in capsys.readouterr().out
    with Project.open(project.folder) as again:
        assert again.content_hash() == found
        assert again.session(session).name == "张伟"
    check_equal(project.folder)


def test_rebuild_keeps_what_only_the_database_has(project):
    send(project, "n")
    project.close()
    whole = journal_of(project).read_bytes()
    journal_of(project).write_bytes(b"".join(whole.splitlines(keepends=True)[:-2]))
    assert rebuild(project.folder)[0] == "2 events of labels.sqlite were not in journal.jsonl, and are now"
    assert journal_of(project).read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (b"{}", "not an event"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"seq":4,"event_id":"x","at":"","person":null,"kind":"label","content":{}}', "not complete"),
        (b'{"seq":9,"event_id":"x","at":"","person":null,"kind":"item","content":{}}', "missing"),
    ],
)
def test_a_damaged_journal_is_named_with_its_line(project, line, fragment):
    project.close()
    lines = journal_of(project).read_bytes().split(b"\n")
    journal_of(project).write_bytes(b"\n".join([*lines[:3], line, b""]))
    (project.folder / "labels.sqlite").unlink()
    for call in (Project.open, lambda folder: Project.open(folder, read_only=True)):
        with pytest.raises(DataError, match=rf"journal.jsonl:4: .*{fragment}.*`heedful label rebuild .*`"):
            call(project.folder)
    rebuild(project.folder)
    with Project.open(project.folder) as again:
        assert [event.kind for event in again.events()][:3] == ["person", "person", "item"]
    assert (project.folder / "journal.damaged.jsonl").read_bytes() == line + b"\n"


def two_nuls(lines, at):
    lines[at] = lines[at][:9] + b"\0\0" + lines[at][11:]


def another_letter(lines, at):
    """Of a text: it is still JSON."""
    lines[at] = lines[at].replace(b'"at":"2', b'"at":"3')


def no_text(lines, at):
    lines[at] = b"\xff\xfe" + lines[at]


def its_end_is_gone(lines, at):
    lines[at] = lines[at][:-30]


def gone(lines, at):
    del lines[at]


def two_in_one(lines, at):
    lines[at - 1 : at + 1] = [lines[at - 1] + b" " + lines[at]]


def one_in_two(lines, at):
    lines[at : at + 1] = [lines[at][:50], lines[at][50:]]


def twice(lines, at):
    lines[at] = lines[at - 1]


def nothing_but_nuls(lines, at):
    lines[at] = b"\0" * len(lines[at])


DAMAGES = [
    two_nuls,
    another_letter,
    no_text,
    its_end_is_gone,
    gone,
    two_in_one,
    one_in_two,
    twice,
    nothing_but_nuls,
]


@pytest.mark.parametrize(("at", "has_database"), [(1, False), (5, False), (23, True), (-1, True)])
@pytest.mark.parametrize("how", DAMAGES)
def test_what_is_intact_outlives_a_damaged_journal(project, how, at, has_database, capsys):
    """One remedy, which every command names: the line goes aside, what it held comes from the database, the rest stays."""
    for number in range(8):
        send(project, f"n{number}")
    project.set_instructions("一\u2028二")
    send(project, "last")
    events, folder = project.events(), project.folder
    project.close()
    lines = journal_of(folder).read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["kind"] for line in (lines[1], lines[5], lines[23])] == ["person", "item", "label"]
    how(lines, at if at >= 0 else len(lines) - 1)
    journal_of(folder).write_bytes(b"".join(line + b"\n" for line in lines))
    if not has_database:
        for path in folder.glob("labels.sqlite*"):
            path.unlink()
    cut_short = how is gone and at == -1
    if not cut_short:
        with pytest.raises(DataError, match="`heedful label rebuild "):
            Project.open(folder)
        assert main(["label", "stats", str(folder)]) == 2
        assert "heedful label rebuild" in capsys.readouterr().err.replace("\n", "")
    assert main(["label", "rebuild", str(folder)]) == 0
    said = capsys.readouterr().out
    assert ("journal.damaged.jsonl" in said) == (
        how not in (gone, two_in_one) or (how is gone and at == 5 and not has_database)
    )
    with Project.open(folder) as again:
        found = again.events()
        if has_database:
            assert found == events
        else:
            kept = {event.event_id for event in found}
            hurt = set() if how is two_in_one else {events[at].event_id}
            item = events[at].content.get("item_id", "none")
            assert {event.event_id for event in events} - kept <= hurt | {
                event.event_id for event in events if event.content.get("item") == item
            }
        owner = next(person.person_id for person in again.people() if person.role == "owner")
        send(again, "after", owner)
    assert main(["label", "rebuild", str(folder)]) == 0
    assert "is sound, and equal" in capsys.readouterr().out
    check_equal(folder)


def test_a_lost_person_keeps_their_labels(project):
    """Their name is gone with both copies of its line; the owner can give them one again."""
    for number in range(3):
        send(project, f"n{number}")
    third = project.add_person("李娜", "annotator").person_id
    labels = [one.event for one in project.labels()]
    project.close()
    lines = journal_of(project).read_bytes().split(b"\n")
    lines[1] = lines[1][:-4] + b"....."
    journal_of(project).write_bytes(b"\n".join(lines))
    (project.folder / "labels.sqlite").unlink()
    assert any("p2 stand for them, with their labels" in line for line in rebuild(project.folder))
    with Project.open(project.folder) as again:
        assert [one.event for one in again.labels()] == labels
        people = {person.person_id: person for person in again.people()}
        assert (people["p2"].name, people["p2"].standing) == ("p2", "removed")
        assert people[third].name == "李娜"
        again.set_person("p2", name="张伟", standing="active")
        send(again, "more")


def test_journals_without_checksums_are_read_and_go_on_with_them(project):
    send(project, "n")
    events = project.events()
    project.close()
    journal_of(project).write_text(without_checksums(journal_of(project).read_text(encoding="utf-8")), encoding="utf-8")
    settings = project.folder / "project.yaml"
    settings.write_text(settings.read_text(encoding="utf-8").replace("format: 2\n", "# 我的\n"), encoding="utf-8")
    (project.folder / "labels.sqlite").unlink()
    with Project.open(project.folder) as again:
        assert again.events() == events
        assert again.content_hash() == hashlib.sha256(journal_of(project).read_bytes()).hexdigest()
        send(again, "m")
    old, new = journal_of(project).read_text(encoding="utf-8").split("\n")[-4], None
    new = journal_of(project).read_text(encoding="utf-8").split("\n")[-2]
    assert ("crc" in json.loads(old), "crc" in json.loads(new)) == (False, True)
    assert "# 我的\n" in settings.read_text(encoding="utf-8")
    assert "format: 2\n" in settings.read_text(encoding="utf-8"), "an older heedful says that it is too old"
    check_equal(project.folder)


def without_checksums(text):
    """A journal as an older heedful wrote it."""
    return "".join(line.rpartition(',"crc":')[0] + "}\n" for line in text.split("\n")[:-1])


@pytest.mark.parametrize("how", ["kind", "format"])
def test_what_a_newer_heedful_wrote_is_not_called_damaged(project, how):
    """Nobody is told to cut what their other machine wrote; a line that is only damaged keeps that advice."""
    project.close()
    if how == "kind":
        lines = journal_of(project).read_bytes().split(b"\n")
        newer = '{"seq":4,"event_id":"x","at":"","person":null,"kind":"看\\u2028","content":{}}'.encode()
        journal_of(project).write_bytes(b"\n".join([*lines[:3], newer, b""]))
        (project.folder / "labels.sqlite").unlink()
    else:
        settings = project.folder / "project.yaml"
        assert settings.read_text(encoding="utf-8").startswith("format: 2\n")
        settings.write_text("name: 🐈\nnew_key: 1\nformat: 3\n", encoding="utf-8")
    place = {"kind": r"journal.jsonl:4: events of the kind '看\\u2028'", "format": "project.yaml:3: format 3"}[how]
    wanted = f"{place}.* not known.*: the project was written by a newer heedful; update heedful, do not edit the file$"
    for call in (Project.open, rebuild, lambda folder: Project.open(folder, read_only=True)):
        with pytest.raises(DataError, match=wanted):
            call(project.folder)


# Several processes


def test_one_process_writes(project):
    with pytest.raises(ConfigError, match=rf"open in another process \(process {os.getpid()} on "):
        Project.open(project.folder)
    with pytest.raises(ConfigError, match="open in another process"):
        rebuild(project.folder)
    project.close()
    Project.open(project.folder).close()


def test_readers_see_what_was_confirmed_while_the_server_writes(project):
    reader = Project.open(project.folder, read_only=True)
    before = len(reader.events())
    event = send(project, "n")
    assert reader.events(before) == [event]
    assert reader.labels() == project.labels()
    assert reader.content_hash() == project.content_hash()
    assert (reader.items(), reader.people(), reader.instructions()) == (project.items(), project.people(), (0, ""))
    with journal_of(project).open("ab") as file:
        file.write(b'{"seq"')
    assert reader.labels() == project.labels()
    for change in (lambda: reader.next_item("p2"), lambda: reader.add_items([]), lambda: reader.set_instructions("")):
        with pytest.raises(ConfigError, match="opened to read only"):
            change()
    reader.close()


def test_a_reader_leaves_no_trace(project):
    project.close()
    (project.folder / "labels.sqlite").unlink()
    before = sorted(project.folder.iterdir())
    with Project.open(project.folder, read_only=True) as reader:
        assert len(reader.items()) == 20
        assert reader.session("x") is None
        assert reader.progress("p2")["left"] == 20
    assert sorted(project.folder.iterdir()) == before


def test_a_closed_project_says_so(project):
    project.close()
    project.close()
    with pytest.raises(ConfigError, match="is closed"):
        project.next_item("p2")


def test_what_waits_when_a_project_is_closed_is_still_done(project):
    results = at_once(*[lambda i=i: project.set_instructions(f"{i}") for i in range(6)], project.close)
    done = [one for one in results if isinstance(one, int)]
    with Project.open(project.folder) as again:
        assert again.instructions()[0] == len(done)
    assert store.MOST_AT_ONCE >= 6
