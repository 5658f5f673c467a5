"""The process that writes answers while people label: asked, dying, failing, not starting."""

import sys
import threading
import time
from pathlib import Path

import pytest

from heedful.label.server import policy as module
from heedful.label.server.policy import AwayError, PolicyWorker

PROGRAM = (sys.executable, str(Path(__file__).parent / "fake_policy.py"))


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(module, "END_SECONDS", 0.5)


def test_answers_come_to_whom_they_are_for(tmp_path):
    found = {}

    def ask(i):
        found[i] = [one["response"] for one in worker.answers([f"题目 {i}"], 2)[0]]

    with PolicyWorker(tmp_path / "policy.yaml", tmp_path / "policy.log", PROGRAM) as worker:
        until(lambda: worker.is_ready)
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: [f"题目 {i} 😀\u20280", f"题目 {i} 😀\u20281"] for i in range(20)}


def test_a_process_that_dies_is_started_again(tmp_path):
    with PolicyWorker(tmp_path / "policy.yaml", tmp_path / "policy.log", PROGRAM) as worker:
        until(lambda: worker.is_ready)
        with pytest.raises(AwayError, match="ended while it answered"):
            worker.answers(["die"], 2)
        until(lambda: worker.starts == 2 and worker.is_ready)
        assert len(worker.answers(["again"], 3)[0]) == 3
        assert worker.problem is None


def test_a_refusal_is_said_and_the_process_goes_on(tmp_path, capsys):
    with PolicyWorker(tmp_path / "policy.yaml", tmp_path / "policy.log", PROGRAM) as worker:
        until(lambda: worker.is_ready)
        with pytest.raises(AwayError, match="could not answer"):
            worker.answers(["fail"], 2)
        assert "runs/secret-policy: no room for an answer" in capsys.readouterr().err
        worker.answers(["fine"], 2)
        assert worker.starts == 1


def test_nobody_waits_without_end(tmp_path):
    with PolicyWorker(tmp_path / "policy.yaml", tmp_path / "policy.log", PROGRAM) as worker:
        until(lambda: worker.is_ready)
        with pytest.raises(AwayError, match=r"within 0\.2 seconds"):
            worker.answers(["hang"], 2, seconds=0.2)
        began = time.monotonic()
        module_seconds = module.END_SECONDS
    assert time.monotonic() - began < module_seconds + 5  # a process that hangs is killed


def test_one_that_cannot_start_says_why(tmp_path):
    with PolicyWorker(tmp_path / "cannot start.yaml", tmp_path / "policy.log", PROGRAM) as worker:
        until(lambda: worker.problem is not None)
        assert "there is no such model" in worker.problem
        assert "policy.log" in worker.problem
        with pytest.raises(AwayError, match="not ready yet") as caught:
            worker.answers(["x"], 2)
        assert "secret" not in str(caught.value)
