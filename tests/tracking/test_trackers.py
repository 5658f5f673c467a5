"""A tracker that hangs, fails, dies or is slow changes nothing in the run, and what it lacks is said."""

import json
import os
import signal
import subprocess
import sys

import pytest

from heedful import ConfigError, faults, train_sft
from heedful.cli.main import main

HANG = "hang()"


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    faults.plan("")


def contents(run):
    """What a run has learned and measured, without times."""
    metrics = [
        {name: x for name, x in json.loads(line).items() if not name.startswith(("time/", "perf/"))}
        for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    return metrics, {path.name: path.read_bytes() for path in (run / "final").iterdir()}


def told(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_tracker_has_what_the_run_has(plant, train, capsys):
    notes = plant()
    run = train("运行", track=("wandb",), track_project="项目")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert notes("log") == records
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    ((identity, name, project, config, resume),) = notes("init")
    assert identity == json.loads((run / "run.json").read_text("utf-8"))["run"]
    assert (name, project, resume) == ("运行", "项目", "allow")
    assert config["learning_rate"] == 1e-2
    assert config["heedful"]["versions"]["torch"]
    assert next(iter(config["heedful"]["data"].values()))
    ((how, summary),) = notes("finish")
    assert how == {"exit_code": 0}
    assert summary["summary/steps"] == 4
    assert notes("settings") == [{"console": "off", "silent": True, "save_code": False, "x_disable_meta": True}]
    assert "wandb: http://tracker/run" in told(capsys)


@pytest.mark.parametrize(
    "where", ["log", *(pytest.param(where, marks=pytest.mark.exhaustive) for where in ("init", "finish"))]
)
def test_a_tracker_that_hangs_changes_nothing(where, plant, train, capsys, monkeypatch):
    monkeypatch.setattr("heedful.tracking.trackers.AT_THE_END", 1.0)
    untracked = train("without")
    plant(**{where: HANG})
    capsys.readouterr()
    run = train("with", track=("wandb",))
    assert contents(run) == contents(untracked)
    said = told(capsys)
    how = {"init": "it has 0 of 7 records", "log": "it has 0 of 7 records", "finish": "its last records may not"}[where]
    assert f"wandb: {how}" in said
    assert "after 1 s; all are in the run's files" in said
    assert f"heedful track {run} wandb" in said or "wandb sync somewhere" in said
    assert (run / "summary.json").is_file()


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ({"log": "raise ValueError('服务器不接受')"}, "failed: 服务器不接受 (ValueError); the run continues"),
        ({"init": "sys.exit(7)"}, "failed: 7 (SystemExit); the run continues"),
    ],
)
def test_a_tracker_that_fails_changes_nothing_and_is_said_once(does, reason, plant, train, capsys):
    untracked = train("without")
    plant(**does)
    capsys.readouterr()
    run = train("with", track=("wandb",))
    assert contents(run) == contents(untracked)
    said = told(capsys)
    assert said.count(reason) == 1
    assert "it has 0 of 7 records" in said
    assert f"Send the rest: heedful track {run} wandb" in said


def test_files_that_cannot_be_read_at_the_end_fail_no_finished_run(plant, train, tmp_path, capsys):
    """A flaky disk, when final/ is there and a tracker has failed."""
    path = tmp_path / "run" / "metrics.jsonl"
    plant(finish=f"os.rename({str(path)!r}, {str(tmp_path / 'away')!r}); os.mkdir({str(path)!r}); raise OSError")
    run = train("run", track=("wandb",))
    said = told(capsys)
    assert (
        f"wandb: unsent records are not known, because the run's files cannot be read ([Errno 21] Is a directory: '{path}')"
        in said
    )
    assert f"Send it: heedful track {run} wandb" in said
    assert (run / "final" / "model.safetensors").is_file()
    assert (run / "summary.json").is_file()


def test_a_tracker_that_fails_for_a_while_gets_everything(plant, train, tmp_path, capsys):
    """The file is the queue: what could not be sent is sent when it can be, once."""
    again = tmp_path / "again"
    notes = plant(
        log=f"if not os.path.exists({str(again)!r}): open({str(again)!r}, 'w').close(); raise OSError('away')"
    )
    run = train("run", track=("wandb",))
    assert [record["step"] for record in notes("log")] == [0, 1, 2, 2, 3, 4, 4]
    assert "failed: away (OSError)" in told(capsys)
    assert (run / "tracking" / "wandb.log").read_text("utf-8") == "OSError: away\n"


@pytest.mark.exhaustive
def test_a_slow_tracker_does_not_slow_the_steps(plant, train):
    plant(log="time.sleep(0.7)")
    run = train("run", track=("wandb",))
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert summary["seconds"] < 7 * 0.7
    assert json.loads((run / "tracking" / "wandb.json").read_text("utf-8"))["destinations"][-1]["complete"]


def in_child(action):
    child = os.fork()
    if child == 0:
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_run_that_was_killed_goes_on_in_the_same_place_without_a_point_twice(plant, settings):
    """Killed after step 3, whose checkpoint is that of step 2: step 3 is learned twice and sent once."""
    notes = plant()
    config = settings("run", track=("wandb",))

    def killed():
        faults.plan("step.logged:kill@4")
        train_sft(settings("run"))

    assert in_child(killed) == signal.SIGKILL
    assert main(["track", str(config.output), "wandb"]) == 0
    assert [record["step"] for record in notes("log")] == [0, 1, 2, 2, 3, 4]
    train_sft(config)
    assert [record["step"] for record in notes("log")] == [0, 1, 2, 2, 3, 4, 4]
    assert len({init[0] for init in notes("init")}) == 1
    assert [how["exit_code"] for how, *_ in notes("finish")] == [1, 0]


def test_what_a_kill_takes_from_a_client_is_sent_again(plant, settings, monkeypatch):
    """A client sends from a queue of its own, which a kill empties: nothing is noted as sent too early."""
    monkeypatch.setattr("heedful.tracking.trackers.BEHIND", 3600)
    notes = plant()
    config = settings("run", track=("wandb",))

    def killed():
        faults.plan("step.logged:kill@4")
        train_sft(config)

    assert in_child(killed) == signal.SIGKILL
    before = len(notes("log"))
    train_sft(config)
    assert [record["step"] for record in notes("log")][before:] == [0, 1, 2, 2, 3, 4, 4]


AT_ITS_END = """
import atexit, threading
atexit.register(time.sleep, 3600)
threading.Thread(target=time.sleep, args=[3600]).start()
"""


@pytest.mark.exhaustive
def test_a_client_that_hangs_does_not_keep_the_process_from_ending(plant, settings, tmp_path):
    """Neither in its thread, nor in a thread of its own, nor in what it does at the end of a process."""
    plant(init=AT_ITS_END.strip().replace("\n", "; "), log=HANG)
    config = settings("run")
    words = ["sft", "--model", config.model, "--data", config.data, "--output", str(config.output), "--max-steps", "2"]
    words += ["--batch-size", "2", "--dtype", "float32", "--eval-fraction", "0.3", "--track", "wandb"]
    program = "import heedful.tracking.trackers as t; t.AT_THE_END = 1.0; from heedful.cli.main import main; main()"
    paths = os.pathsep.join([str(tmp_path / "planted"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "records after 1 s; all are in the run's files" in " ".join(done.stderr.split())
    assert (config.output / "summary.json").is_file()


def test_what_did_not_get_out_is_sent_afterwards(plant, train, capsys):
    plant(init="raise OSError('away')")
    run = train("run", track=("wandb",))
    capsys.readouterr()
    assert main(["track", str(run), "wandb", "--wait", "20"]) == 3
    assert "it has 0 of 7 records" in told(capsys)
    notes = plant()
    assert main(["track", str(run), "wandb"]) == 0
    assert [record["step"] for record in notes("log")] == [0, 1, 2, 2, 3, 4, 4]
    assert notes("finish")[0][0] == {"exit_code": 0}
    assert main(["track", str(run), "wandb"]) == 0
    assert len(notes("log")) == 7, "nothing is sent twice"


def test_no_secret_reaches_a_tracker(plant, train, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "plain-looking-秘密")
    notes = plant()
    train("run", track=("wandb",), system_prompt="plain-looking-秘密")
    ((_, _, _, config, _),) = notes("init")
    assert config["system_prompt"] == "***"
    assert "秘密" not in json.dumps(config, ensure_ascii=False)


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    config = settings("run", track=("trackio",))
    with pytest.raises(ConfigError, match=r'trackio is not installed; pip install "heedful\[trackio\]"'):
        train_sft(config)
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("return False", "you are not logged in: run `wandb login`, or set WANDB_API_KEY; or add --track-"),
        (
            "raise ImportError('libwandb.so is missing')",
            "it is installed but does not work: ImportError: libwandb.so",
        ),
    ],
)
def test_a_tracker_that_is_not_ready_is_refused_before_anything_is_written(does, reason, plant, settings, capsys):
    plant(login=does)
    config = settings("run", track=("wandb",))
    with pytest.raises(ConfigError, match="--track wandb: ") as refused:
        train_sft(config)
    assert reason in str(refused.value)
    assert refused.value.status == 2
    assert not config.output.exists()


def test_offline_needs_no_login(plant, train):
    notes = plant(login="return False")
    train("run", track=("wandb",), track_offline=True)
    assert len(notes("log")) == 7


def test_a_check_that_hangs_does_not_keep_a_run_from_beginning(plant, train, monkeypatch, capsys):
    monkeypatch.setattr("heedful.tracking.trackers.LONGEST_CHECK", 1.0)
    notes = plant(login=HANG)
    train("run", track=("wandb",))
    assert len(notes("log")) == 7
    assert "--track wandb has not answered for 1 s; the run starts anyway" in told(capsys)


def test_a_run_that_fails_before_its_first_step_leaves_nothing_in_a_tracker(plant, settings):
    notes = plant()
    config = settings("run", track=("wandb",))
    faults.plan("run.started:raise")
    with pytest.raises(RuntimeError):
        train_sft(config)
    assert notes("init") == []
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"track": ("wandb", "wandb")}, "names a tracker twice"),
        ({"track_project": "x"}, "--track-project x belongs to --track"),
        ({"track_offline": True}, "--track-offline True belongs to --track"),
        ({"track": ("wandb",), "track_project": ""}, "--track-project is empty"),
    ],
)
def test_settings_that_make_no_sense(changes, reason, settings):
    with pytest.raises(ConfigError) as refused:
        settings("run", **changes)
    assert reason in str(refused.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["track", str(tmp_path), "wandb"]) == 2
    assert "is not a run" in told(capsys)
    assert main(["track", str(tmp_path), "excel"]) == 2
    assert "--to must be one of wandb, trackio, mlflow, swanlab, got 'excel'" in told(capsys)
