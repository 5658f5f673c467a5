"""Where the points of a run go: all of them to each place, none twice, and none of another run that takes its folder."""

import json
import shlex
import sys
import threading
import time

import pytest

from heedful import ConfigError
from heedful.cli.main import main
from heedful.configs.tracking import TrackConfig, TrackingOptions
from heedful.tracking.clients import CLIENTS, Client
from heedful.tracking.trackers import Trackers, check_trackers, identity_of

A, B = "a" * 32, "b" * 32


def make_run(folder, identity=A, steps=4, *, finished=True, **settings):
    """The folder of a run as heedful leaves it, as far as trackers look at it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"model": "模型", **settings}), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"run": identity}), encoding="utf-8")
    lines = [json.dumps({"step": step, "损失": step / 2}) + "\n" for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if finished:
        (folder / "summary.json").write_text('{"steps": 3}', encoding="utf-8")
    return folder


def follow(run, *, finished=True, wait=20.0, **options):
    """What trackers lack of a run that they follow to its end."""
    trackers = Trackers(TrackingOptions(track=("wandb",), **options), run)
    trackers.follow()
    return trackers.close(finished=finished, wait=wait)


def steps(notes):
    return [record["step"] for record in notes("log")]


def wait_for(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def told(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


@pytest.fixture
def away(tmp_path):
    """A file: while it is there, the planted tracker does not take the points from step 2 on."""
    path = tmp_path / "away"
    path.touch()
    return path


def failing(away):
    return f"if os.path.exists({str(away)!r}) and metrics['step'] > 1: raise OSError('away')"


def waiting(away):
    return f"while os.path.exists({str(away)!r}) and metrics['step'] > 1: time.sleep(0.05)"


def test_the_command_that_is_said_sends_the_rest_to_the_same_place(plant, tmp_path, away, capsys):
    notes = plant(log=failing(away))
    run = make_run(tmp_path / "运行 1")
    *_, said = follow(run, track_project="项目 1")
    command = shlex.split(said.partition("Send the rest: ")[2])
    assert command == ["heedful", "track", str(run), "wandb", "--project", "项目 1", "--name", "运行 1"]
    away.unlink()
    assert main(command[1:]) == 0
    assert steps(notes) == [0, 1, 2, 3]
    assert [init[1:3] for init in notes("init")] == [["运行 1", "项目 1"]] * 2


def test_the_command_without_flags_goes_where_the_run_was_sent(plant, tmp_path, away):
    notes = plant(log=failing(away))
    run = make_run(tmp_path / "run")
    assert main(["track", str(run), "wandb", "--project", "项目", "--name", "exp7"]) == 3
    away.unlink()
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3]
    assert [init[1:3] for init in notes("init")] == [["exp7", "项目"]] * 2


def test_the_command_without_flags_goes_where_the_settings_say(plant, tmp_path):
    """A run whose tracker never came to write anything, or that named another tracker."""
    notes = plant()
    run = make_run(tmp_path / "run", track_project="项目")
    assert main(["track", str(run), "wandb"]) == 0
    assert main(["track", str(make_run(tmp_path / "other", B)), "wandb"]) == 0
    assert [init[1:3] for init in notes("init")] == [["run", "项目"], ["other", "heedful"]]


@pytest.mark.parametrize(("first", "words"), [({"track_offline": True}, []), ({}, ["--project", "other"])])
def test_another_place_gets_the_whole_run(first, words, plant, tmp_path):
    notes = plant()
    run = make_run(tmp_path / "run")
    follow(run, **first)
    assert main(["track", str(run), "wandb", *words]) == 0
    assert steps(notes) == [0, 1, 2, 3] * 2
    assert main(["track", str(run), "wandb", *words]) == 0
    assert steps(notes) == [0, 1, 2, 3] * 2, "nothing is sent twice"


def test_another_server_gets_the_whole_run(plant, tmp_path, monkeypatch):
    notes = plant()
    run = make_run(tmp_path / "run")
    for server in ("https://one", "https://two", "https://one"):
        monkeypatch.setenv("WANDB_BASE_URL", server)
        assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3] * 2, "the first server has all of it already"


TRACKIO = """
import json, os
class Run:
    def log(self, metrics, step): pass
    def finish(self): pass
def init(**k):
    with open({notes!r}, "a", encoding="utf-8") as file:
        print(json.dumps([k["name"], k["resume"], os.environ.get("TRACKIO_SPACE_ID")]), file=file)
    return Run()
"""


def test_what_a_tracker_calls_the_run_is_not_said_to_another(tmp_path, monkeypatch):
    """A name on this machine means nothing in a Space. Offline, the Space is hidden from the client, but not for good."""
    notes = tmp_path / "notes.jsonl"
    (tmp_path / "trackio.py").write_text(TRACKIO.format(notes=str(notes)), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "trackio", None)
    del sys.modules["trackio"]
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "组/空间")
    run = make_run(tmp_path / "运行")
    for words in (["--offline"], [], ["--offline"], []):
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
            print('{"step": 9, "损失": 1}', file=file)
        assert main(["track", str(run), "trackio", *words]) == 0
    name = f"运行-{A[:8]}"
    opened = [json.loads(line) for line in notes.read_text("utf-8").splitlines()]
    assert opened == [
        [name, "never", None],
        [name, "never", "组/空间"],
        [name, "allow", None],
        [name, "allow", "组/空间"],
    ]


@pytest.mark.parametrize("content", ["", '{"run": "%s", "destinations": [{"sent": 3}]}' % A])  # noqa: UP031
def test_progress_that_cannot_be_read_is_none(content, plant, tmp_path):
    notes = plant()
    run = make_run(tmp_path / "run")
    (run / "tracking").mkdir()
    (run / "tracking" / "wandb.json").write_text(content, encoding="utf-8")
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tracker", "variables", "online"),
    [
        ("wandb", {}, "https://api.wandb.ai"),
        (
            "wandb",
            {"WANDB_BASE_URL": "https://我:秘@h/", "WANDB_ENTITY": "队"},
            "WANDB_BASE_URL=https://***@h/ WANDB_ENTITY=队",
        ),
        ("wandb", {"WANDB_MODE": "offline"}, "WANDB_MODE=offline"),
        ("trackio", {}, "this machine"),
        ("trackio", {"TRACKIO_SPACE_ID": "org/space"}, "TRACKIO_SPACE_ID=org/space"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://u:p@h:5000"}, "MLFLOW_TRACKING_URI=http://***@h:5000"),
        ("swanlab", {}, "https://api.swanlab.cn"),
        ("swanlab", {"SWANLAB_MODE": "local"}, "SWANLAB_MODE=local"),
    ],
)
def test_the_environment_says_where_a_tracker_sends(tracker, variables, online, monkeypatch):
    client = CLIENTS[tracker]
    for name in client.addresses:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert client.destination(offline=False) == online
    assert client.destination(offline=True) == "this machine"


@pytest.mark.parametrize("lacking", ["__init__", "check", "log", "close"])
def test_a_client_without_one_of_its_calls_cannot_be_made(lacking):
    """Else it would send nothing, and nobody would know."""
    calls = {name: lambda *_: None for name in ("__init__", "check", "log", "close") if name != lacking}
    with pytest.raises(TypeError, match=lacking):
        type("Other", (Client,), calls)(None)


def test_a_tracker_that_comes_back_after_the_wait_touches_no_run_that_has_taken_the_folder(plant, tmp_path, away):
    notes = plant(log=waiting(away))
    run = make_run(tmp_path / "run")
    (said,) = follow(run, wait=2.0)
    assert said.startswith("wandb: it has 2 of 4 records after 2 s")
    run.rename(tmp_path / "aside")  # what --overwrite does
    make_run(run, B, steps=9)
    (run / "tracking").mkdir()
    away.unlink()
    wait_for(lambda: steps(notes) == [0, 1, 2])
    wait_for(lambda: not any(thread.name == "heedful tracker wandb" for thread in threading.enumerate()))
    assert steps(notes) == [0, 1, 2], "the third was on its way"
    assert list((run / "tracking").iterdir()) == []
    assert notes("finish") == []
    assert follow(run) == []
    assert steps(notes) == [0, 1, 2, *range(9)]


def test_progress_of_a_run_that_was_replaced_is_no_progress(plant, tmp_path):
    notes = plant()
    run = make_run(tmp_path / "run")
    follow(run)
    (run / "run.json").write_text(json.dumps({"run": B}), encoding="utf-8")
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3] * 2
    assert [init[0] for init in notes("init")] == [A, B]


def test_a_run_without_a_name_of_its_own_has_that_of_its_folder(tmp_path):
    run = make_run(tmp_path / "run")
    assert identity_of(run) == A
    (run / "run.json").unlink()
    assert identity_of(run) == identity_of(run) != identity_of(tmp_path / "other")
    assert len(identity_of(run)) == 32


@pytest.mark.exhaustive
@pytest.mark.parametrize(("finished", "status"), [pytest.param(True, 0, marks=pytest.mark.exhaustive), (False, 1)])
def test_a_run_that_is_not_finished_is_not_marked_so(finished, status, plant, tmp_path, away):
    """Nor has it less time than was asked for."""
    notes = plant(log="time.sleep(3)")
    run = make_run(tmp_path / "run", finished=finished)
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3]
    ((how, summary),) = notes("finish")
    assert how == {"exit_code": status}
    assert summary == ({"summary/steps": 3} if finished else {})


SERVER = "postgresql://me:秘密-word@server/db"


def test_no_password_in_the_log_and_in_what_is_said(plant, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    plant(init="raise OSError('cannot reach ' + 'x' * 270 + ' ' + os.environ['MLFLOW_TRACKING_URI'])")
    run = make_run(tmp_path / "run")
    said = " ".join(follow(run)) + told(capsys)
    log = (run / "tracking" / "wandb.log").read_text("utf-8")
    assert "cannot reach" in said
    assert "postgresql://***@server/db" in log
    assert "秘密" not in said + log
    assert "me:" not in said + log


def test_no_password_in_why_a_tracker_cannot_be_used(plant, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    plant(login="raise ImportError('no driver for ' + os.environ['MLFLOW_TRACKING_URI'])")
    with pytest.raises(ConfigError, match=r"no driver for postgresql://\*\*\*@server/db") as refused:
        check_trackers(TrackingOptions(track=("wandb",)))
    assert "秘密" not in str(refused.value)


def test_settings_that_make_no_sense(tmp_path, capsys):
    for name in ("project", "name"):
        with pytest.raises(ConfigError, match=f"--{name} is empty; name one, or leave it out"):
            TrackConfig(run=tmp_path, to="wandb", **{name: ""})
    run = make_run(tmp_path / "run")
    for content, reason in (
        ("- 1", "it holds a list, and must hold key: value lines"),
        ("a: [", "line 1 is not valid YAML"),
    ):
        (run / "config.yaml").write_text(content, encoding="utf-8")
        assert main(["track", str(run), "wandb"]) == 2
        assert f"config.yaml: {reason}" in told(capsys)
