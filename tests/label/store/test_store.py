"""The store on the disk: kills, full disks, damaged files, several threads and processes."""

import contextlib
import io
import os
import random
import resource
import shutil
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

from cases import often
from heedful import ConfigError, DataError, faults
from heedful.apps.label import NotHeldError, Project, store
from heedful.apps.label.records import Event
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from heedful.errors import MachineError

PAIR = {"preferred": 0, "strength": 3, "both_bad": False}
LABELLER = Path(__file__).with_name("labeller.py")


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    faults.plan("")


def send(project, nonce, person="p2"):
    """Label the next item."""
    return project.label(person, project.next_item(person).item.item_id, PAIR, nonce=nonce, seconds=1)


def database_of(folder):
    """The database, opened as anybody can."""
    return contextlib.closing(sqlite3.connect(folder / "events.sqlite", isolation_level=None))


def change(folder, statement):
    """Change rows of events, which the database itself refuses."""
    with database_of(folder) as database:
        with pytest.raises(sqlite3.IntegrityError, match="only ever added"):
            database.execute(statement)
        for trigger in ("events_never_change", "events_are_never_deleted"):
            database.execute(f"DROP TRIGGER {trigger}")
        assert database.execute(statement).rowcount > 0


def check_sound(folder):
    """SQLite and heedful find the database sound; a reader sees in it what a writer sees."""
    with database_of(folder) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with Project.open(folder, read_only=True) as reader:
        seen = reader.events(), reader.labels(), reader.content_hash()
    with Project.open(folder) as project:
        assert (project.events(), project.labels(), project.content_hash()) == seen
    assert restored(folder) == [f"events.sqlite is sound: {len(seen[0]):,} events; nothing to do"]


def restored(folder, *flags):
    """What `heedful label restore` says."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["label", "restore", str(folder), *flags]) == 0
    return said.getvalue().splitlines()


def test_what_was_confirmed_is_there_again(project):
    event = send(project, "一")
    project.save_draft("p2", project.next_item("p2").item.item_id, {"answer": "🐈\u2028"})
    before = (project.items(), project.people(), project.labels(), project.events(), project.next_item("p2"))
    project.set_instructions("谨慎\u2028")
    found = project.content_hash()
    project.close()
    assert sorted(path.name for path in project.folder.iterdir()) == ["backups", "events.sqlite", "project.yaml"]
    with Project.open(project.folder) as again:
        assert again.content_hash() == found
        after = (again.items(), again.people(), again.labels(), again.events()[:-1], again.next_item("p2"))
        assert after[:4] == before[:4]
        assert after[4].draft == before[4].draft
        assert after[4].item == before[4].item
        assert again.instructions() == (1, "谨慎\u2028")
        assert again.label("p2", event.content["item"], PAIR, nonce="一", seconds=9) == event
    check_sound(project.folder)


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


@pytest.mark.parametrize("what", ["items", "labels from elsewhere"])
def test_people_label_while_many_are_added(project, items, what):
    """Nobody waits until all are there."""
    more, events = items(1000, start=100), []
    if what == "items":
        adding = threading.Thread(target=project.add_items, args=(more,))
    else:
        project.add_items(more)
        other = project.add_person("别处", "annotator").person_id
        adding = threading.Thread(target=project.add_labels, args=(other, [(item.item_id, PAIR) for item in more]))
    before = project.events()[-1].seq
    adding.start()
    while adding.is_alive() and len(events) < 20:
        events.append(send(project, f"n{len(events)}"))
    adding.join()
    added = [event.seq for event in project.events(before) if event.person != "p2"]
    assert len(added) == 1000
    assert any(added[0] < event.seq < added[-1] for event in events)


def test_an_operation_that_fails_half_way_leaves_nothing(project):
    """A mistake of our own, beside operations of others in the same transaction."""

    def half(transaction):
        transaction.add("instructions", None, {"version": 1, "text": "half"})
        transaction.leases.drop("lease", "p2")
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
    check_sound(project.folder)


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
    check_sound(project.folder)
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
            check_sound(folder)
    assert len(said) > 500
    check_sound(folder)


# Disks and files


@pytest.mark.parametrize("point", faults.LABEL_POINTS)
@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_fails_loses_nothing(project, point, fault):
    """The same label, sent again, is recorded once."""
    item = project.next_item("p2").item.item_id
    faults.plan(f"{point}:{fault}")
    with pytest.raises(MachineError, match="not confirmed, send it again"):
        project.label("p2", item, PAIR, nonce="n", seconds=1)
    there = int(point == "label.committed")
    assert (len(project.labels()), project.progress("p2")["own"]) == (there, there), "what is on the disk is seen"
    event = project.label("p2", item, PAIR, nonce="n", seconds=1)
    assert [one.event for one in project.labels()] == [event]
    send(project, "m")
    project.close()
    check_sound(project.folder)


def test_a_full_disk(project):
    """The system takes no byte more."""
    item = project.next_item("p2").item.item_id
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (project.folder / "events.sqlite-wal").stat().st_size
    for limit in (size, size + 50, size + 5000):
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
    check_sound(project.folder)


def test_a_database_that_is_full_cannot_be_written_or_is_locked_by_another_program(project):
    """A lock, of a backup, say, is waited for, but not for ever."""
    database = project._store._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(MachineError, match="the disk is full; make room"):
        project.set_instructions("x" * 100_000)
    database.execute("PRAGMA max_page_count = 100000")
    assert project.set_instructions("x" * 100_000) == 1
    database.execute("PRAGMA query_only = 1")
    with pytest.raises(MachineError, match="cannot be written; check the permissions"):
        send(project, "n")
    database.execute("PRAGMA query_only = 0")
    send(project, "n")
    database.execute("PRAGMA busy_timeout = 100")
    other = sqlite3.connect(project.folder / "events.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(MachineError, match="another program has kept it locked"):
        send(project, "m")
    database.execute("PRAGMA busy_timeout = 20000")
    threading.Timer(0.2, other.execute, ["ROLLBACK"]).start()
    assert send(project, "m").nonce == "m"
    other.close()


# Damage, backups and what puts it right


def overwrite(path, at, content):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def header(path):
    overwrite(path, 0, b"not a database, " * 8)


def pages(path):
    overwrite(path, 4096, random.Random(7).randbytes(path.stat().st_size - 4096))


def root_page(path):
    overwrite(path, 4100, b"\xff" * 3000)


def last_page(path):
    overwrite(path, path.stat().st_size - 4096, b"\0" * 4096)


def half(path):
    os.truncate(path, path.stat().st_size // 2)


def gone(path):
    path.unlink()


def empty(path):
    os.truncate(path, 0)


def reopened(project, labels):
    """The project closed and opened again, which keeps a backup, and then with some more labels."""
    send(project, "before 1")
    send(project, "before 2")
    project.close()
    with Project.open(project.folder) as again:
        for number in range(labels):
            send(again, f"after {number}")
        return again.events(), again.labels()


@pytest.mark.parametrize(
    "how", often([header, pages, root_page, last_page, half, gone, empty], [header, last_page, half, gone])
)
def test_a_damaged_database_is_restored_from_the_backup(project, how, capsys):
    """Every command says so and names the remedy; what came after the backup is kept as far as it can be read."""
    session = project.redeem(project.invite("p2"))
    events, _ = reopened(project, labels=6)
    backup = max((project.folder / "backups").iterdir())
    before = Project.open(project.folder, read_only=True)
    how(project.folder / "events.sqlite")
    for call in (Project.open, lambda folder: Project.open(folder, read_only=True).labels()):
        with pytest.raises(
            DataError, match=r"events\.sqlite is damaged: .*; run `heedful label restore .*`: it combines the newest"
        ):
            call(project.folder)
    assert main(["label", "stats", str(project.folder)]) == 2
    assert "heedful label restore" in capsys.readouterr().err.replace("\n", "")
    said = restored(project.folder)
    assert ("events.sqlite is damaged" in said[0]) == (how not in (gone, empty)), "what was found comes first"
    assert any("are lost; their number is unknown" in line for line in said)
    assert any(f"events are from the backup {backup}" in line for line in said)
    with Project.open(project.folder) as again:
        kept = again.events()
        assert len(kept) <= len(events), "what is damaged says nothing of how many there were"
        assert [one.event.nonce for one in again.labels()][:2] == ["before 1", "before 2"]
        lost = [event for event in events if event not in kept]
        assert all(event.nonce is not None and event.nonce.startswith("after") for event in lost)
        assert again.session(session) is None or how in (root_page, last_page)
        again.label("p2", again.next_item("p2").item.item_id, PAIR, nonce="more", seconds=1)
    assert (project.folder / "events.damaged.sqlite").exists() == (how is not gone)
    assert before.events()[-1].nonce == "more", "a reader that was open continues with the new file"
    check_sound(project.folder)


def test_a_damaged_file_says_nothing_of_how_many_events_there_were(tmp_path, items):
    """Its largest number may be of bytes that are none: nothing is called lost that never was."""
    folder = tmp_path / "p"
    with Project.create(folder, ProjectSettings(overlap=0)) as project:
        project.add_items(items(3))
    Project.open(folder).close()
    root_page(folder / "events.sqlite")
    assert not any("events are lost" in line for line in restored(folder))
    with Project.open(folder) as again:
        assert [event.kind for event in again.events()] == ["person", "item", "item", "item"]


@pytest.mark.parametrize("has_backup", [True, False])
def test_only_damaged_events_are_lost(project, has_backup):
    """Each has a checksum: what was changed is named, and all that was not is kept, before it and after it."""
    events, labels = reopened(project, labels=6)
    if not has_backup:
        shutil.rmtree(project.folder / "backups")
    first = next(event for event in events if event.nonce == "after 0")
    last = next(event for event in events if event.nonce == "after 5")
    change(
        project.folder,
        f"UPDATE events SET content = replace(content, 'strength\":3', 'strength\":2') WHERE seq = {first.seq}",
    )
    with database_of(project.folder) as database:
        database.execute(f"UPDATE events SET content = CAST(x'7bff7d' AS TEXT) WHERE seq = {last.seq}")
        held = database.execute("SELECT * FROM leases").fetchall()
    with pytest.raises(DataError, match=f"event {first.seq} does not match its checksum; run"):
        Project.open(project.folder)
    said = "\n".join(restored(project.folder))
    assert f"2 events are lost, or depend on a lost one: {first.seq}, {last.seq}\n" in said
    with Project.open(project.folder) as again:
        kept = [one for one in labels if one.event.nonce not in ("after 0", "after 5")]
        assert again.labels() == kept
        assert again.events()[first.seq - 1].kind == "lost"
    with database_of(project.folder) as database:
        assert database.execute("SELECT * FROM leases").fetchall() == held
    check_sound(project.folder)


def test_what_cannot_be_without_a_lost_event_is_lost_too(project):
    """A label of an item that nobody has any more; other labels stay."""
    for number in range(3):
        send(project, f"{number}")
    lost, *kept = project.labels()
    item = next(event.seq for event in project.events() if event.content.get("item_id") == lost.item.item_id)
    project.close()
    shutil.rmtree(project.folder / "backups")
    change(project.folder, f"DELETE FROM events WHERE seq = {item}")
    missing = f"event {item + 1} follows event {item - 1}; the events in between are missing"
    with pytest.raises(DataError, match=missing):
        Project.open(project.folder)
    said = "\n".join(restored(project.folder))
    assert f"2 events are lost, or depend on a lost one: {item}, {lost.event.seq}" in said
    with Project.open(project.folder) as again:
        assert again.labels() == kept
    check_sound(project.folder)


def test_who_holds_a_lost_item_or_is_lost_holds_nobody_up(project, items):
    """Leases, drafts and sessions of what is lost go; the others stay."""
    project.close()
    with Project.open(project.folder) as again:
        shutil.rmtree(project.folder / "backups")
        newcomer = again.add_person("李娜", "annotator").person_id
        again.add_items(items(1, start=100))
        (late,) = again.items()[20:]
        sessions = {one: again.redeem(again.invite(one)) for one in ("p2", newcomer)}
        holds = again.next_item(newcomer).item.item_id
        again.save_draft(newcomer, holds, {"answer": "草稿"})
        while again.next_item("p2").item != late:
            send(again, f"{len(again.events())}")
        again.save_draft("p2", late.item_id, {"answer": "草稿"})
        lost = [
            e.seq for e in again.events() if late.item_id == e.content.get("item_id") or e.content.get("name") == "李娜"
        ]
    change(project.folder, f"UPDATE events SET at = '' WHERE seq IN ({', '.join(map(str, lost))})")
    said = restored(project.folder)
    assert "leases, drafts, invitations and sessions were kept, except 5 of lost items or people" in said
    with Project.open(project.folder) as again:
        assert again.session(sessions["p2"]).person_id == "p2"
        assert again.session(sessions[newcomer]) is None
        assert again.next_item("p2").item.item_id == holds
    check_sound(project.folder)


def test_an_earlier_damage_is_not_read_as_this_one(project):
    """The database is gone now; that a file from before has nothing more does not say that nothing is lost."""
    events, _ = reopened(project, labels=2)
    change(project.folder, f"UPDATE events SET at = '' WHERE seq = {events[-1].seq}")
    restored(project.folder)
    with Project.open(project.folder) as again:
        kept = again.events()
        send(again, "later")
    gone(project.folder / "events.sqlite")
    said = "\n".join(restored(project.folder))
    assert "were read from the damaged file" not in said
    assert f"events after {len(kept)}, if any, are lost; their number is unknown" in said
    with Project.open(project.folder) as again:
        assert again.events() == kept
    check_sound(project.folder)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_restore_that_was_killed_is_finished(project, is_written):
    """What it had put aside is of this damage, not of one before."""
    events, _ = reopened(project, labels=3)
    change(project.folder, f"UPDATE events SET at = '' WHERE seq = {events[-1].seq}")
    if is_written:
        restored(project.folder)
    put_aside = f"events{'.damaged' if is_written else ''}.sqlite"
    (project.folder / put_aside).rename(project.folder / "events.restoring.sqlite")
    restored(project.folder)
    with Project.open(project.folder) as again:
        assert again.events()[:-1] == events[:-1]
    names = {path.name for path in project.folder.iterdir()}
    assert names == {"backups", "events.damaged.sqlite", "events.sqlite", "project.yaml"}
    check_sound(project.folder)


def test_a_project_that_was_taken_back_to_an_older_backup_stays_there(project, tmp_path):
    """Later backups are of it, however many events those had that it has left, and so is a later restore."""
    assert main(["label", "backup", str(project.folder), "--output", str(tmp_path / "older")]) == 0
    for number in range(7):
        send(project, f"left {number}")
        project.keep_backup()
    project.close()
    header(project.folder / "events.sqlite")
    restored(project.folder, "--backup", str(tmp_path / "older"))
    for number in range(2):
        with Project.open(project.folder) as again:
            send(again, f"new {number}")
            events = again.events()
    Project.open(project.folder).close()
    header(project.folder / "events.sqlite")
    restored(project.folder)
    with Project.open(project.folder) as again:
        assert again.events() == events
    assert len(list((project.folder / "backups").glob("*.other"))) == 5, "what was left is kept"


@pytest.mark.parametrize("command", ["backup as a project", "restore"])
def test_a_full_disk_while_a_backup_or_what_is_restored_is_written(project, tmp_path, command, capsys):
    """It is said in a sentence, and nothing half-written stays."""
    project.close()
    words = ["label", command.partition(" ")[0], str(project.folder)]
    words += [] if command == "restore" else ["--output", str(tmp_path / "copy")]
    (header if command == "restore" else gone)(max((project.folder / "backups").iterdir()))
    if command == "restore":
        last_page(project.folder / "events.sqlite")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        assert main(words) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "it was not written, try again later" in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.rglob("*heedful-partial*"))
    assert main(words) == 0
    check_sound(project.folder)


def test_a_backup_that_is_damaged_is_passed_over(project):
    events, _ = reopened(project, labels=2)
    Project.open(project.folder).close()
    newest = max((project.folder / "backups").iterdir())
    pages(newest)
    header(project.folder / "events.sqlite")
    restored(project.folder)
    assert newest.with_suffix(".damaged").exists()
    with Project.open(project.folder) as again:
        assert again.events() == [event for event in events if not str(event.nonce).startswith("after")]


def test_backups_are_kept_at_each_start_and_the_oldest_go(project):
    counts = []
    for number in range(8):
        project.close()
        project = Project.open(project.folder)
        send(project, f"{number}")
        counts.append(len(project.events()))
    project.close()
    Project.open(project.folder).close()
    Project.open(project.folder).close()
    found = sorted((project.folder / "backups").iterdir())
    assert [int(path.name.split("-")[1]) for path in found] == counts[-5:], (
        "each once, also if nothing was labelled since"
    )


def test_the_command_backs_up_while_people_label(project, tmp_path, capsys):
    """Into the project, and as a copy that every command opens."""
    send(project, "n")
    assert main(["label", "backup", str(project.folder)]) == 0
    assert f"{len(project.events())} events, 1 label, all checked" in capsys.readouterr().out
    output = tmp_path / "备份" / "今天"
    assert main(["label", "backup", str(project.folder), "--output", str(output)]) == 0
    events = project.events()
    send(project, "later")
    with Project.open(output, read_only=True) as copy:
        assert (copy.events(), copy.settings) == (events, project.settings)
    assert [path for path in (output, *output.iterdir()) if path.stat().st_mode & 0o077] == []
    assert main(["label", "backup", str(project.folder), "--output", str(output)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    project.close()
    shutil.rmtree(project.folder / "backups")
    (project.folder / "events.sqlite").rename(project.folder / "events.damaged.sqlite")
    header(project.folder / "events.damaged.sqlite")
    assert f"{len(events)} events are from the backup {output}" in restored(project.folder, "--backup", str(output))[0]
    check_sound(project.folder)
    (project.folder / "events.sqlite").unlink()
    assert main(["label", "restore", str(project.folder), "--backup", str(tmp_path / "没有")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_start_without_room_for_a_backup_says_so(project, capsys):
    send(project, "n")
    project.close()
    shutil.rmtree(project.folder / "backups")
    (project.folder / "backups").write_bytes(b"in the way")
    with Project.open(project.folder) as again:
        send(again, "m")
    assert "warning: no backup of" in capsys.readouterr().err


# What newer versions wrote


@pytest.mark.parametrize("how", ["kind", "format"])
def test_what_a_newer_heedful_wrote_is_not_called_damaged(project, how):
    """Nobody is told to restore what their other machine wrote."""
    project.close()
    if how == "kind":
        row = store.row_of(Event(23, "x", "", None, "看\u2028", {}))
        with database_of(project.folder) as database:
            database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    else:
        settings = project.folder / "project.yaml"
        assert settings.read_text(encoding="utf-8").startswith("format: 3\n")
        settings.write_text("name: 🐈\nnew_key: 1\nformat: 4\n", encoding="utf-8")
    place = {"kind": r"events.sqlite: events of the kind '看\\u2028'", "format": "project.yaml:3: format 4"}[how]
    wanted = f"{place}.* not known.*: the project was written by a newer heedful; update heedful, do not edit the file"
    for call in (Project.open, lambda folder: Project.open(folder, read_only=True)):
        with pytest.raises(DataError, match=wanted):
            call(project.folder)
    assert main(["label", "restore", str(project.folder)]) == 2


# Several processes


def test_one_process_writes(project):
    with pytest.raises(ConfigError, match=rf"open in another process \(process {os.getpid()} on "):
        Project.open(project.folder)
    assert main(["label", "restore", str(project.folder)]) == 2
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
    for change in (lambda: reader.next_item("p2"), lambda: reader.add_items([]), lambda: reader.set_instructions("")):
        with pytest.raises(ConfigError, match="opened read-only"):
            change()
    reader.close()


def test_a_reader_leaves_no_trace(project):
    project.close()
    before = sorted(project.folder.iterdir())
    with Project.open(project.folder, read_only=True) as reader:
        assert (len(reader.items()), reader.session("x"), reader.progress("p2")["left"]) == (20, None, 20)
    assert sorted(project.folder.iterdir()) == before


def test_what_waits_when_a_project_is_closed_is_still_done(project):
    results = at_once(*[lambda i=i: project.set_instructions(f"{i}") for i in range(6)], project.close)
    project.close()
    with pytest.raises(ConfigError, match="is closed"):
        project.next_item("p2")
    done = [one for one in results if isinstance(one, int)]
    with Project.open(project.folder) as again:
        assert again.instructions()[0] == len(done)
    assert store.MOST_AT_ONCE >= 6
