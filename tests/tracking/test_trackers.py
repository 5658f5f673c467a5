"""A tracker that hangs, fails or is slow changes nothing in a run; it gets every line once, in the run or afterwards."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from heedful import ConfigError, SFTConfig, faults, train_sft
from heedful.cli import main as cli


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    faults.plan("")


def main(words):
    """The exit status of a command. What is wrong with a setting by itself ends it as wrong flags do."""
    try:
        return cli.main(words)
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory):
    """``settings(folder, track=("wandb",))``: of a short run on demonstrations."""
    data = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    turns = [(f"第{i}问", f"好的 {i}") for i in range(8)]
    records = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def make(folder, **changes):
        common = {"max_steps": 4, "batch_size": 2, "learning_rate": 1e-2, "eval_fraction": 0.3, "eval_every": 2}
        common |= {"sample_every": 0, "dtype": "float32", "save_every": 2, "save_total_limit": 0}
        return SFTConfig(model=tiny("gpt2"), data=str(data), output=folder, **{**common, **changes})

    return make


@pytest.fixture(scope="module")
def untracked(settings, tmp_path_factory):
    """What a run without a tracker has learned and measured."""
    folder = tmp_path_factory.mktemp("untracked") / "run"
    train_sft(settings(folder))
    return contents(folder)


def contents(run):
    """What a run has learned and measured, without times."""
    metrics = [
        {name: x for name, x in json.loads(line).items() if not name.startswith(("time/", "perf/"))}
        for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    return metrics, {path.name: path.read_bytes() for path in (run / "final").iterdir()}


def steps(notes):
    return [record["step"] for record in notes("log")]


def told(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_a_tracker_that_fails_for_a_while_gets_all_of_a_run_once(plant, settings, tmp_path, monkeypatch, capsys):
    """Lines, settings without secrets, summary."""
    monkeypatch.setenv("MY_API_KEY", "plain-looking-秘密")
    again = str(tmp_path / "again")
    notes = plant(log=f"if not os.path.exists({again!r}): open({again!r}, 'w').close(); raise OSError('away')")
    run = tmp_path / "运行"
    train_sft(settings(run, track=("wandb",), track_project="项目", system_prompt="plain-looking-秘密"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert notes("log") == records
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    (opened,) = notes("init")
    assert opened["id"] == json.loads((run / "run.json").read_text("utf-8"))["run"]
    assert (opened["name"], opened["project"], opened["resume"]) == ("运行", "项目", "allow")
    assert (opened["config"]["learning_rate"], opened["config"]["system_prompt"]) == (1e-2, "***")
    assert opened["config"]["heedful"]["versions"]["torch"]
    assert "秘密" not in json.dumps(opened, ensure_ascii=False)
    assert opened["settings"] == {"console": "off", "silent": True, "save_code": False, "x_disable_meta": True}
    ((status, summary),) = notes("finish")
    assert (status, summary["summary/steps"]) == (0, 4)
    said = told(capsys)
    assert said.count("wandb: failed: away (OSError); the run continues without it") == 1
    assert "wandb: http://tracker/run" in said


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ({"log": "hang()"}, "Send the rest: heedful track"),
        ({"log": "raise ValueError('服务器不接受')"}, "failed: 服务器不接受 (ValueError); the run continues"),
        pytest.param({"init": "hang()"}, "Send the rest: heedful track", marks=pytest.mark.exhaustive),
        pytest.param(
            {"init": "sys.exit(7)"}, "failed: 7 (SystemExit); the run continues", marks=pytest.mark.exhaustive
        ),
        pytest.param({"finish": "hang()"}, "Send the rest: wandb sync somewhere", marks=pytest.mark.exhaustive),
    ],
)
def test_a_tracker_that_hangs_or_fails_changes_nothing(
    does, said, plant, settings, untracked, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("heedful.tracking.trackers.AT_THE_END", 0.3)
    plant(**does)
    run = tmp_path / "with"
    train_sft(settings(run, track=("wandb",)))
    assert contents(run) == untracked
    assert (run / "summary.json").is_file()
    ended = told(capsys)
    assert ended.count(said) == 1
    assert "wandb: not everything was sent; all of it is in the run's files. Send the rest: " in ended


def test_a_run_that_was_killed_goes_on_in_the_same_place_without_a_point_twice(plant, settings, tmp_path):
    """Killed after step 3, whose checkpoint is that of step 2: step 3 is learned twice and sent once, by the command."""
    notes = plant()
    run = tmp_path / "run"
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        faults.plan("step.logged:kill@4")
        train_sft(settings(run))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 2, 3, 4]
    train_sft(settings(run, track=("wandb",)))
    assert steps(notes) == [0, 1, 2, 2, 3, 4, 4]
    assert len({opened["id"] for opened in notes("init")}) == 1
    assert [status for status, _ in notes("finish")] == [1, 0], "a run that is not finished is not marked so"


@pytest.mark.exhaustive
def test_a_client_that_hangs_does_not_keep_the_process_from_ending(plant, settings, tmp_path):
    """Neither in its thread, nor in a thread of its own, nor in what it does at the end of a process."""
    code = "import atexit, threading; atexit.register(time.sleep, 3600); "
    plant(init=code + "threading.Thread(target=time.sleep, args=[3600]).start()", log="hang()")
    config = settings(tmp_path / "run")
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
    assert "wandb: not everything was sent" in " ".join(done.stderr.split())
    assert (config.output / "summary.json").is_file()


def test_the_command_that_is_said_sends_the_rest_to_the_same_place(plant, run_folder, tmp_path, capsys):
    """The command of the message, which needs no flags."""
    away = tmp_path / "away"
    away.touch()
    notes = plant(log=f"if os.path.exists({str(away)!r}) and metrics['step'] > 1: raise OSError('away')")
    run = run_folder("运行 1")
    assert main(["track", str(run), "wandb", "--project", "项目 1", "--name", "实验 7"]) == 3
    assert f"Send the rest: heedful track '{run}' wandb" in told(capsys)
    assert steps(notes) == [0, 1]
    away.unlink()
    assert main(["track", str(run), "wandb"]) == 0
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3]
    assert [(one["name"], one["project"]) for one in notes("init")] == [("实验 7", "项目 1")] * 3
    assert notes("finish")[-1] == [0, {"summary/steps": 3}]


def test_each_place_gets_the_whole_run_once(plant, run_folder, monkeypatch):
    """Another server, and another project; the settings name the first project. No password is written down."""
    notes = plant()
    run = run_folder("run", track_project="项目")
    for server, words in (
        ("https://我:秘密-word@one", []),
        ("https://two", ["--project", "other"]),
        ("https://我:秘密-word@one", ["--project", "项目"]),
    ):
        monkeypatch.setenv("WANDB_BASE_URL", server)
        assert main(["track", str(run), "wandb", *words]) == 0
    assert steps(notes) == [0, 1, 2, 3] * 2
    assert [one["project"] for one in notes("init")] == ["项目", "other", "项目"]
    assert "秘密" not in (run / "tracking" / "wandb.json").read_text("utf-8")


TRACKIO = """
import json, os
class Run:
    def log(self, metrics, step): pass
    def finish(self): pass
def init(**k):
    with open({notes!r}, "a", encoding="utf-8") as file:
        print(json.dumps([k["name"], k["resume"]]), file=file)
    return Run()
"""


def test_what_a_tracker_calls_the_run_is_not_said_to_another(run_folder, tmp_path, monkeypatch):
    """A run of this machine is none of a Space."""
    notes = tmp_path / "notes.jsonl"
    (tmp_path / "trackio.py").write_text(TRACKIO.format(notes=str(notes)), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "trackio", None)
    del sys.modules["trackio"]
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    run = run_folder("运行")
    for space in ("", "组/空间", ""):
        monkeypatch.setenv("TRACKIO_SPACE_ID", space)
        assert main(["track", str(run), "trackio"]) == 0
    opened = [json.loads(line) for line in notes.read_text("utf-8").splitlines()]
    assert opened == [["运行-aaaaaaaa", how] for how in ("never", "never", "allow")]


def test_lines_are_whole_and_hold_numbers(plant, run_folder):
    """A number that is not finite is NaN; texts, lines torn by a kill and one that is being written are left out."""
    notes = plant()
    run = run_folder("run")
    lines = ['{"step": 0, "x": null, "note": "猫", "y": [1]}', '{"st', "[1]", '{"step": 0, "eval/x": 2}', '{"step": 1}']
    (run / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main(["track", str(run), "wandb"]) == 0
    assert str(notes("log")) == "[{'step': 0, 'x': nan}, {'step': 0, 'eval/x': 2.0}]"
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[3], '{"step": 1, "x": 3}', ""]), encoding="utf-8")
    assert main(["track", str(run), "wandb"]) == 0
    assert notes("log")[2:] == [{"step": 1, "x": 3.0}], "the file has other bytes, and the same lines"


def test_a_tracker_that_comes_back_after_the_wait_touches_no_run_that_has_taken_the_folder(plant, run_folder):
    notes = plant(log="if metrics['step'] > 1: hang()")
    run = run_folder("run")
    assert main(["track", str(run), "wandb", "--wait", "1"]) == 3
    shutil.move(run, run.with_name("aside"))  # what --overwrite does
    run_folder("run", "b" * 32, steps=9)
    (run / "tracking").mkdir()
    notes.let_go()
    assert steps(notes) == [0, 1, 2], "the third was on its way"
    assert list((run / "tracking").iterdir()) == []
    assert notes("finish") == []


def test_what_is_known_of_a_run_that_was_replaced_is_forgotten(plant, run_folder, capsys):
    notes = plant()
    run = run_folder("run")
    assert main(["track", str(run), "wandb"]) == 0
    (run / "run.json").write_text(json.dumps({"run": "b" * 32}), encoding="utf-8")
    assert main(["track", str(run), "wandb"]) == 0
    assert steps(notes) == [0, 1, 2, 3] * 2
    assert [one["id"] for one in notes("init")] == ["a" * 32, "b" * 32]
    for content in ("", '{"run": "%s", "destinations": {"x": {"sent": 3}}}' % ("b" * 32)):
        (run / "tracking" / "wandb.json").write_text(content, encoding="utf-8")
        assert main(["track", str(run), "wandb"]) == 2
        assert "wandb.json: it is " in (said := told(capsys))
        assert "remove it to send the whole run again" in said


def test_no_password_is_said(plant, run_folder, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:秘密-word@server/db")
    for does, status in (("init", 3), ("login", 2), ("finish", 3)):
        plant(**{does: "raise ImportError('no driver for ' + os.environ['MLFLOW_TRACKING_URI'])"})
        assert main(["track", str(run_folder(does)), "wandb"]) == status
        assert "no driver for postgresql://***@server/db" in (said := told(capsys))
        assert "秘密" not in said
    assert "Send the rest: wandb sync somewhere" in said, "the tracker has every line, and may not have sent it"


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ("return False", "you are not logged in: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"),
        ("raise ImportError('libwandb.so is missing')", "it is installed but does not work: ImportError: libwandb.so"),
        (None, 'wandb is not installed; pip install "heedful[wandb]"'),
    ],
)
def test_a_tracker_that_is_not_ready_is_refused_before_anything_is_written(
    login, reason, plant, settings, tmp_path, monkeypatch
):
    if login is None:
        monkeypatch.setattr("sys.path", [str(tmp_path)])
        monkeypatch.setitem(sys.modules, "wandb", None)
        monkeypatch.delitem(sys.modules, "wandb")
    else:
        plant(login=login)
    config = settings(tmp_path / "run", track=("wandb",))
    with pytest.raises(ConfigError, match="--track wandb: ") as refused:
        train_sft(config)
    assert reason in str(refused.value)
    assert not config.output.exists()


def test_a_run_that_fails_before_its_first_step_leaves_nothing_in_a_tracker(plant, settings, tmp_path):
    notes = plant()
    config = settings(tmp_path / "run", track=("wandb",))
    faults.plan("run.started:raise")
    with pytest.raises(RuntimeError):
        train_sft(config)
    assert notes("init") == []
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{run}", "excel"], "--to must be one of wandb, trackio, mlflow, swanlab, got 'excel'"),
        (["{run}", "wandb", "--name", ""], "--name is empty; name one, or leave it out"),
        (
            ["{run}/..", "wandb"],
            "is not a run: it needs run.json, config.yaml, metrics.jsonl; name the folder of a run",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(words, reason, run_folder, capsys):
    run = run_folder("run")
    assert main(["track", *(word.format(run=run) for word in words)]) == 2
    assert reason in told(capsys)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"track": ("wandb", "wandb")}, "names a tracker twice"),
        ({"track_project": "x"}, "--track-project x belongs to --track"),
        ({"track": ("wandb",), "track_project": ""}, "--track-project is empty"),
    ],
)
def test_settings_that_make_no_sense(changes, reason, settings, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        settings(tmp_path / "run", **changes)
