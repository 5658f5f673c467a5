"""The process that writes answers while people label: asked, dying, failing, not starting."""

import contextlib
import sqlite3
import threading
from types import SimpleNamespace

import pytest

from heedful.apps.label.server import policy as module
from heedful.apps.label.server import run
from heedful.apps.label.server.policy import AwayError, Buffer
from heedful.apps.label.server.run import Closing
from heedful.errors import MachineError


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(module, "END_SECONDS", 0.5)


def test_answers_come_to_whom_they_are_for_whatever_else_is_printed_and_refused(policy, capsys):
    """Neither JSON of another kind nor bytes that are no text end the thread that reads."""
    found = {}

    def ask(i):
        found[i] = [one["response"] for one in policy.answers([f"题目 {i}"], 2)[0]]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [f"题目 {i} 😀\u20280", f"题目 {i} 😀\u20281"] for i in range(20)}
    assert len(policy.answers(["stray"], 3, seconds=120)[0]) == 3
    with pytest.raises(AwayError, match="could not answer"):
        policy.answers(["fail"], 2)
    assert "runs/secret-policy: no room for an answer" in capsys.readouterr().err
    policy.answers(["fine"], 2)
    assert policy.starts == 1


def test_a_process_that_dies_is_started_again(policy, until):
    with pytest.raises(AwayError, match="ended while it answered"):
        policy.answers(["die"], 2)
    until(lambda: policy.starts == 2 and policy.is_ready)
    assert len(policy.answers(["again"], 3)[0]) == 3
    assert policy.problem is None
    with pytest.raises(AwayError, match=r"within 0\.2 seconds"):
        policy.answers(["hang"], 2, seconds=0.2)
    # and the end waits for nobody either: a process that hangs is killed


@pytest.fixture
def unreadable(project):
    """``with unreadable():`` the database cannot be read, and what failed to be written has to be read again."""

    @contextlib.contextmanager
    def broken():
        with contextlib.closing(sqlite3.connect(project.folder / "events.sqlite", isolation_level=None)) as database:
            database.execute("ALTER TABLE events RENAME TO away")
            with pytest.raises(MachineError):
                project.set_instructions("一")
            yield
            database.execute("ALTER TABLE away RENAME TO events")

    return broken


def test_new_items_come_again_once_the_disk_can_be_read(project, policy, unreadable, until, monkeypatch, capsys):
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.02)
    said = []
    buffer = Buffer(project, policy, ["新"], 2, 50)
    with unreadable():
        buffer.__enter__()
        until(lambda: said.append(capsys.readouterr().err) or "no new items could be added" in "".join(said))
    until(lambda: not buffer.left)
    buffer.__exit__()
    assert project.items()[-1].prompt == "新"


def test_a_server_ends_once_everything_is_labelled_though_the_disk_could_not_be_read(
    project, unreadable, until, monkeypatch, capsys
):
    monkeypatch.setattr(run, "UNSEEN_SECONDS", 0.0)
    server = SimpleNamespace(should_exit=False)
    watching, said = threading.Thread(target=Closing(project, 0.0).watch, args=(server,)), []
    with unreadable():
        watching.start()
        until(lambda: said.append(capsys.readouterr().err) or "cannot check" in "".join(said))
    project.withdraw("p1", items=[item.item_id for item in project.items()[1:]])
    project.skip("p2", project.next_item("p2").item.item_id, "", [], "n")
    watching.join(120)
    assert server.should_exit
    assert "".join([*said, capsys.readouterr().err]).count("cannot check whether everything is labelled") == 1


def test_one_that_cannot_start_says_why(new_worker, until):
    with new_worker("cannot start.yaml") as worker:
        until(lambda: worker.problem is not None)
        assert "there is no such model" in worker.problem
        assert "policy.log" in worker.problem
        with pytest.raises(AwayError, match="not ready yet") as caught:
            worker.answers(["x"], 2)
        assert "secret" not in str(caught.value)
