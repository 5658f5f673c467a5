"""The facade on the disk: projects and their settings, people and their tokens, labels from elsewhere, the commands."""

import os
import pydoc
import threading
import time
from dataclasses import replace

import pytest

from heedful import ConfigError, DataError, faults
from heedful.apps.label import NotHeldError, Project, store
from heedful.apps.label.records import Person
from heedful.apps.label.server.security import Audit
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from heedful.errors import MachineError
from refusals import refused

SETTINGS = ProjectSettings(
    **{"name": "猫 🐈: #1", "task": "ranking", "overlap": 0.35, "overlap_people": 4, "repeats": 0.1},
    **{"screening_items": 7, "screening_agreement": 0.65, "lease_minutes": 2.5, "seed": 2**62, "markdown": True},
)


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        return self.now

    def pass_hours(self, hours):
        self.now += 3600 * hours


def test_settings_are_read_back(tmp_path):
    Project.create(tmp_path / "p", SETTINGS).close()
    with Project.open(tmp_path / "p") as project:
        assert project.settings == SETTINGS
        assert project.people() == [Person("p1", "owner", "owner", "active")]


WRONG = [
    ("name: x\noverlap: 0.1\nover-lap: 1\n", "project.yaml:3: over_lap is not a setting of a project; it has name, "),
    ("seed: 0\noverlap: 2\n", "project.yaml:2: --overlap must lie between 0 and 1"),
    ("seed: 0.5\n", "project.yaml:1: --seed must be a whole number"),
    ("\nrepeats: often\n", "project.yaml:2: --repeats must be a number"),
    ("task: duel\n", "project.yaml:1: --task must be one of pair, ranking"),
    ("markdown: maybe\n", "project.yaml:1: --markdown must be true or false"),
    ("name: a\nname: b\n", "project.yaml:2: the key 'name' is set twice"),
    ("overlap: [0.1]\n", "project.yaml:1: overlap takes one value"),
    ("name: ''\n", "project.yaml:1: --name is empty"),
    ("repeats: nan\n", "project.yaml:1: --repeats must be"),
    ("format: 一\n", "project.yaml:1: format must be a whole number, got '一'"),
    ("format: []\n", "project.yaml:1: format must be a whole number, got ()"),
    ("format: 0\n", "project.yaml:1: format must be 3, got 0"),
    ("- a\n", "expected 'key: value' lines"),
]


def test_settings_that_cannot_be_are_named_with_their_line(tmp_path):
    for text, fragment in WRONG:
        (tmp_path / "project.yaml").write_text(text, encoding="utf-8")
        with refused(ConfigError, fragment):
            Project.open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["project.yaml"]


def test_what_is_no_project_is_left_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a labelling project: .* `heedful label new"):
        Project.open(tmp_path)
    (tmp_path / "thesis.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        Project.create(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="is not an empty folder"):
        Project.create(tmp_path / "thesis.txt", SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


def test_an_item_is_added_once_and_whole(project, items):
    before = project.items()
    assert project.add_items(items(25)) == 5
    assert project.items()[:20] == before
    assert project.add_items([*items(1, start=30), *items(1, start=30)]) == 1
    assert project.items()[20:] == [*items(5, start=20), *items(1, start=30)]
    good, bad = items(2, start=60)
    for wrong, said in (
        ({"task": "duel"}, "task must be one of"),
        ({"columns": {"x": float("nan")}}, "JSON"),
        ({"prompt": "\ud800"}, "surrogate"),
    ):
        with pytest.raises(DataError, match=said):
            project.add_items([good, replace(bad, **wrong)])
    columns = {"z": [1, {"猫": None}], "a": "\u2028", "m": 1.5}
    (item,) = items(1, start=50, columns=columns, chosen_by="active", round=3)
    assert project.add_items([item]) == 1
    project.close()
    with Project.open(project.folder) as again:
        assert again.items()[26:] == [item], "a batch is added whole or not at all"
        assert list(again.items()[-1].columns) == ["z", "a", "m"]


def test_an_invitation_signs_in_once(tmp_path):
    clock = Clock()
    with Project.create(tmp_path / "p", SETTINGS, clock=clock) as project:
        person = project.add_person("张伟", "annotator")
        assert person == Person("p2", "张伟", "annotator", "screening")
        token = project.invite("p2")
        session = project.redeem(token)
        assert project.session(session) == person
        assert project.redeem(token) is None
        for other in ("", "x", token, session[:-1], session + "x", "猫", "\ud800"):
            assert project.session(other) is None
            assert project.redeem(other) is None
        first, second = project.invite("p2"), project.invite("p2")
        assert project.redeem(first) is None, "a new link takes the place of the one before"
        assert project.session(session) is None, "and ends their sessions"
        other = project.redeem(second)
        project.end_session(other)
        assert project.session(other) is None
        session = project.redeem(project.invite("p2"))
        changed = project.set_person("p2", name="李娜", role="viewer", standing="active")
        assert project.session(session) == changed == Person("p2", "李娜", "viewer", "active")
        with pytest.raises(DataError, match="no person 'p9'"):
            project.invite("p9")


def test_tokens_end(tmp_path):
    clock = Clock()
    with Project.create(tmp_path / "p", SETTINGS, clock=clock) as project:
        project.add_person("张伟", "owner")
        late = project.redeem(project.invite("p2"))
        token = project.invite("p1", hours=72)
        clock.pass_hours(71.9)
        session = project.redeem(token, hours=10)
        token = project.invite("p1", hours=1, session=session)
        clock.pass_hours(1)
        assert project.redeem(token) is None
        assert project.session(session) is not None
        clock.pass_hours(9)
        assert project.session(session) is None
        assert project.session(late) is not None
    with Project.open(tmp_path / "p", clock=clock) as project:
        assert project.session(late).role == "owner"
        clock.pass_hours(24 * 14)
        assert project.session(late) is None


def readable_for_others(folder):
    """What in a folder, or the folder itself, somebody else has any right to."""
    return sorted(str(path) for path in (folder, *folder.rglob("*")) if path.lstat().st_mode & 0o077)


@pytest.mark.parametrize("there", [True, False])
def test_a_project_is_for_its_owner_only(tmp_path, items, answers, there):
    """It has the seed from which the order on the screen follows, answers and names."""
    folder, before = tmp_path / "项目", os.umask(0)
    try:
        if there:
            folder.mkdir(mode=0o777)
        assert main(["label", "new", str(folder)]) == 0
        with Project.open(folder) as project:
            project.add_items(items(2))
            project.label("p1", project.next_item("p1").item.item_id, answers["pair"], nonce="n", seconds=1)
            Audit(folder / "audit.jsonl").note("signed in", person="p1", address="127.0.0.1")
            assert (folder / "events.sqlite-wal").is_file()
            assert readable_for_others(folder) == []
            assert main(["label", "backup", str(folder)]) == 0
            assert readable_for_others(folder) == []
        (folder / "events.sqlite").write_bytes(b"damaged " * 1000)
        assert main(["label", "restore", str(folder)]) == 0
        assert {"events.damaged.sqlite", "audit.jsonl", "project.yaml"} < {path.name for path in folder.iterdir()}
        assert readable_for_others(folder) == []
    finally:
        os.umask(before)


def test_a_project_that_others_could_read_is_tightened(tmp_path, items):
    """All but what is behind links; reading it changes nothing."""
    folder, outside = tmp_path / "p", tmp_path / "模型"
    outside.mkdir(mode=0o755)
    (outside / "weights").write_bytes(b"x")
    for path in (outside, outside / "weights"):
        path.chmod(0o755)
    with Project.create(folder, SETTINGS) as project:
        project.add_items(items(1))
    (folder / "rounds" / "1").mkdir(parents=True)
    (folder / "rounds" / "1" / "answers.jsonl").write_text("{}", encoding="utf-8")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o664)
    (folder / "rounds" / "model").symlink_to(outside)
    Project.open(folder, read_only=True).close()
    assert len(readable_for_others(folder)) > 5
    Project.open(folder).close()
    assert readable_for_others(folder) == [str(folder / "rounds" / "model")]
    assert [path.stat().st_mode & 0o777 for path in (outside, outside / "weights")] == [0o755] * 2
    assert (folder.stat().st_mode & 0o777, (folder / "project.yaml").stat().st_mode & 0o777) == (0o700, 0o600)


HOURS_OF_A_YEAR = 365 * 24


@pytest.mark.parametrize("restarts", [True, False])
def test_a_clock_that_was_ahead_reserves_nothing(tmp_path, items, restarts):
    """Nor does it lock anybody out, or let a link or a session live longer than it was given for."""
    clock, folder = Clock(), tmp_path / "p"
    project = Project.create(folder, ProjectSettings(overlap=0), clock=clock)

    def set_clock(hours):
        nonlocal project
        clock.pass_hours(hours)
        if restarts:
            project.close()
            project = Project.open(folder, clock=clock)

    project.add_items(items(1))
    ada, bo, cem = (project.add_person(name, "annotator").person_id for name in ("张伟", "Bo", "Cem"))
    before = project.redeem(project.invite(cem))
    set_clock(HOURS_OF_A_YEAR)
    assert project.session(before) is None
    held = project.next_item(ada)
    project.save_draft(ada, held.item.item_id, {"answer": "猫\u2028"})
    session, link = project.redeem(project.invite(ada)), project.invite(bo)
    set_clock(-HOURS_OF_A_YEAR)
    assert project.next_item(bo).item == held.item, "it is not kept for a year"
    with pytest.raises(NotHeldError):
        project.label(ada, held.item.item_id, {}, nonce="n", seconds=1)
    assert project.session(before).person_id == cem, "what ended only by the wrong clock has not ended"
    assert project.session(session).person_id == ada
    set_clock(71.9)
    assert project.redeem(link) is not None
    set_clock(14 * 24 - 72.1)
    assert project.session(session).person_id == ada
    link = project.invite(bo)
    set_clock(0.3)
    assert project.session(session) is None, "it is 14 days old"
    set_clock(72)
    assert project.redeem(link) is None
    project.close()


def test_a_late_label_counts_also_after_a_clock_was_set_back(tmp_path, items, answers):
    clock = Clock()
    with Project.create(tmp_path / "p", ProjectSettings(overlap=0), clock=clock) as project:
        project.add_items(items(2))
        ada, bo = (project.add_person(name, "annotator").person_id for name in ("张伟", "Bo"))
        held = project.next_item(ada).item.item_id
        clock.pass_hours(-30)
        assert project.label(ada, held, answers["pair"], nonce="n", seconds=1).content["item"] == held
        held = project.next_item(ada).item.item_id
        clock.pass_hours(-2 / 3600)
        assert project.next_item(bo) is None, "a step of two seconds takes nothing away"
        assert project.next_item(ada).item.item_id == held


def test_a_clock_that_was_set_back_counts_though_the_first_write_failed(tmp_path):
    """What was put right is undone with all of a failed transaction, and is put right in the next one."""
    clock, folder = Clock(), tmp_path / "p"
    with Project.create(folder, ProjectSettings(), clock=clock) as project:
        clock.pass_hours(HOURS_OF_A_YEAR)
        session = project.redeem(project.invite("p1"))
    clock.pass_hours(-HOURS_OF_A_YEAR)
    with Project.open(folder, clock=clock) as project:
        faults.plan("label.began:enospc")
        with pytest.raises(MachineError):
            project.set_instructions("一")
        faults.plan("")
        project.set_instructions("一")
        clock.pass_hours(14 * 24 + 1)
        assert project.session(session) is None


def test_the_clock_of_leases_runs_on_evenly(monkeypatch):
    """While a server runs, nothing ends or is kept because somebody sets the machine's clock."""
    real, shift = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    clock = store.steady()
    shift = 3600.0 * HOURS_OF_A_YEAR
    assert time.time() - real() > shift / 2
    assert abs(clock() - real()) < 60


def test_who_is_removed_is_signed_out(project):
    session, token = project.redeem(project.invite("p2")), project.invite("p2")
    project.set_person("p2", standing="removed")
    assert project.session(session) is None
    assert project.redeem(token) is None
    with pytest.raises(DataError, match="was removed"):
        project.invite("p2")
    project.set_person("p2", standing="active")
    assert project.session(session) is None


def test_labels_from_elsewhere(project, answers):
    """Nobody has to hold their items; they count, and are not added twice."""
    first, second, *_ = [item.item_id for item in project.items()]
    unknown = {"preferred": 1, "strength": None, "both_bad": False}
    imported = project.add_person("elsewhere", "annotator").person_id
    assert project.add_labels(imported, [(first, answers["pair"]), (second, unknown), (first, unknown)]) == 2
    assert project.add_labels(imported, [(first, unknown)]) == 0
    assert [one.event.content["answer"] for one in project.labels()] == [answers["pair"], unknown]
    assert {one.event.content["seconds"] for one in project.labels()} == {None}
    assert project.progress("p2")["left"] == 18
    assert project.undo(imported, "u") is None, "an import is not taken back by a click"
    before = len(project.events())
    for wrong in (("nothing", unknown), (second, {"ranks": [1, 2]})):
        with pytest.raises(DataError):
            project.add_labels(imported, [(project.items()[5].item_id, unknown), wrong])
    assert len(project.events()) == before


def test_instructions_have_versions(project):
    assert project.instructions() == (0, "")
    assert project.set_instructions("一") == 1
    assert project.next_item("p2").instructions_version == 1
    assert project.set_instructions("二\u2028") == 2
    assert project.instructions() == (2, "二\u2028")


def test_help_shows_the_methods_as_they_are_called():
    """Not with the transaction that operations of the store begin with."""
    assert Project.label.__qualname__ == "Project.label"
    shown = pydoc.render_doc(Project, renderer=pydoc.plaintext)
    assert "next_item(self, person_id: str, *, chats: bool = True)" in shown
    assert "transaction" not in shown


def test_a_project_that_cannot_be_opened_is_left_to_others(tmp_path):
    """The disk is full when its owner is added: no lock, connection or thread of it is left."""
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "project.yaml").write_text("name: x\n", encoding="utf-8")  # its making was cut short
    faults.plan("label.began:enospc")
    with pytest.raises(MachineError):
        Project.open(folder)
    faults.plan("")
    with Project.open(folder) as project:
        assert [person.role for person in project.people()] == ["owner"]
    assert not any(thread.name.startswith("label-store") for thread in threading.enumerate())


def test_the_command_that_makes_a_project(tmp_path, capsys):
    folder = tmp_path / "标注"
    assert main(["label", "new", str(folder), "--name", "猫", "--overlap", "0.5", "--markdown", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert f"the project '猫' is in {folder}" in said.replace("\n", "")
    with Project.open(folder) as project:
        assert project.settings == ProjectSettings(name="猫", overlap=0.5, markdown=True, seed=3)
    assert main(["label", "new", str(folder)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    for command in ("backup", "restore"):
        assert main(["label", command, str(folder)]) == 0
        assert main(["label", command, str(tmp_path)]) == 2
        assert "is not a labelling project" in capsys.readouterr().err


def test_the_order_on_the_screen_cannot_be_worked_out(tmp_path, monkeypatch):
    """Browsers know the ids of items and people; the seed is the rest."""
    monkeypatch.chdir(tmp_path)
    given = {"a": (), "反馈 🐈": (), "零": ("--seed", "0"), "七": ("--seed", "7")}
    for name, flags in given.items():
        assert main(["label", "new", name, *flags]) == 0
    settings = [Project.open(name, read_only=True).settings for name in given]
    assert [one.name for one in settings] == list(given), "a project is called like its folder"
    a, b, zero, seven = (one.seed for one in settings)
    assert len({a, b, 0}) == 3
    assert (zero, seven) == (0, 7)
