"""The trackers themselves, without a network: a run that is sent in two parts is read back from what they keep."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.cli.main import main

POINTS = [(0, "eval/loss", 0.5), (0, "损失", 0.0), (1, "损失", 0.5), (2, "损失", 1.0), (3, "损失", 1.5)]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nobody is logged in, and what trackers keep for themselves is thrown away."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture
def twice(run_folder, monkeypatch):
    """``twice("wandb")``: the folder of a run that was killed after two steps, sent, resumed and sent again."""

    def run(tracker, project="项目-1"):
        pytest.importorskip(tracker, reason=f"{tracker} is not installed: pip install {tracker}")
        monkeypatch.setattr("sys.argv", ["heedful", "sft", "--some-token=秘密-of-the-command-line"])
        folder = run_folder("运行", learning_rate=0.01)
        metrics, summary = folder / "metrics.jsonl", (folder / "summary.json").read_bytes()
        lines = metrics.read_text("utf-8").splitlines(keepends=True)
        lines.insert(1, '{"step": 0, "eval/loss": 0.5}\n')
        metrics.write_text("".join(lines[:3]), encoding="utf-8")
        (folder / "summary.json").unlink()
        assert main(["track", str(folder), tracker, "--project", project]) == 0
        metrics.write_text("".join(lines), encoding="utf-8")
        (folder / "summary.json").write_bytes(summary)
        assert main(["track", str(folder), tracker]) == 0
        commands = [b"of-the-command-line", Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").strip()]
        for path in (folder / "tracking").rglob("*"):
            assert not path.is_file() or not any(command in path.read_bytes() for command in commands), path
        return folder

    return run


def leveldb(path, header):
    """The records of a LevelDB log, whose blocks have 32 KiB: what wandb writes offline."""
    content, place, parts = path.read_bytes(), header, []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        parts.append(content[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def points(step, metrics):
    return [(step, name, value) for name, value in metrics.items() if name in ("eval/loss", "损失")]


def test_wandb(twice):
    run = twice("wandb")
    from wandb.proto import wandb_internal_pb2

    found, identities, summary, config = [], set(), {}, {}
    for path in sorted((run / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")):
        for content in leveldb(path, 7):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                found += points(items["step"], items)
            elif record.WhichOneof("record_type") == "run":
                identities.add((record.run.run_id, record.run.project, record.run.display_name))
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif record.WhichOneof("record_type") == "summary":
                summary |= {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.summary.update}
    assert sorted(found) == POINTS
    assert identities == {("a" * 32, "项目-1", "运行")}
    assert (config["learning_rate"], summary["summary/steps"]) == (0.01, 3)


def test_trackio(twice):
    twice("trackio")
    code = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
    code += "names = S.get_runs('项目-1'); print(json.dumps([names, S.get_logs('项目-1', names[0])], default=str))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, logs = json.loads(done.stdout.splitlines()[-1])
    assert names == ["运行-aaaaaaaa"]
    assert sorted(point for log in logs for point in points(log["step"], log)) == POINTS
    assert [log["summary/steps"] for log in logs if "summary/steps" in log] == [3]


def test_mlflow(twice, run_folder):
    twice("mlflow")
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("项目-1")
    (tracked,) = client.search_runs([experiment.experiment_id])
    for name, coded in (("eval/loss", "eval/loss"), ("损失", "_635f__5931_")):
        history = client.get_metric_history(tracked.info.run_id, coded)
        assert [(point.step, name, point.value) for point in history] == [one for one in POINTS if one[1] == name]
    assert (tracked.info.run_name, tracked.info.status) == ("运行", "FINISHED")
    assert (tracked.data.params["learning_rate"], tracked.data.tags["summary/steps"]) == ("0.01", "3")


def test_swanlab(twice):
    run = twice("swanlab", project="project-1")
    code = """
import json, sys
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
for name in sys.argv[1:]:
    reader = DataStoreReader(); reader.open(name)
    for record in map(Record.FromString, reader):
        if record.HasField("scalar"):
            print(json.dumps([record.scalar.step, record.scalar.key, record.scalar.value.number]))
        elif record.HasField("start"):
            print(json.dumps([record.start.project, record.start.name, record.start.id]))
"""
    files = sorted(str(path) for path in (run / "tracking" / "swanlab").glob("run-*/*.swanlab"))
    assert len(files) == 2
    said = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in said.splitlines()]
    starts = [line for line in lines if isinstance(line[0], str)]
    assert starts == [["project-1", "运行", "a" * 21]] * 2, "the second part goes on with the first"
    found = [point for line in lines if isinstance(line[0], int) for point in points(line[0], {line[1]: line[2]})]
    assert sorted(found) == POINTS


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_nobody_is_logged_in(tracker, run_folder, monkeypatch, capsys):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: pip install {tracker}")
    for name in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.delenv(name)
    assert main(["track", str(run_folder("run")), tracker]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"you are not logged in: run `{tracker} login`" in said
