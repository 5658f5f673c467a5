"""Runs in the trackers themselves, without a network, and read back from what they keep."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from heedful import faults, train_sft
from heedful.cli.main import main


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nobody is logged in, and what trackers keep for themselves is thrown away."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "SWANLAB_API_KEY", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    faults.plan("")


@pytest.fixture
def twice(settings, monkeypatch):
    """``twice("wandb")``: the folder of a run that was killed in its third step, was sent, and went on, all offline."""

    def run(tracker, project="项目-1"):
        monkeypatch.setattr("sys.argv", ["heedful", "sft", "--some-token=秘密-of-the-command-line"])
        config = settings("运行", track=(tracker,), track_project=project, track_offline=True)
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            faults.plan("step.logged:kill@4")
            train_sft(settings("运行"))
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 9
        assert main(["track", str(config.output), tracker, "--project", project, "--offline"]) == 0
        train_sft(config)
        folder = config.output / "tracking"
        assert json.loads((folder / f"{tracker}.json").read_text("utf-8"))["destinations"][-1]["complete"]
        commands = [b"of-the-command-line", Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").strip()]
        for path in folder.rglob("*"):
            assert not path.is_file() or not any(command in path.read_bytes() for command in commands), path
        return config.output

    return run


def points(run):
    """(step, metric, value) of everything in metrics.jsonl but times, which differ when a step is done again."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return sorted((record["step"], k, v) for record in records for k, v in record.items() if is_kept(k))


def is_kept(name):
    return name != "step" and not name.startswith(("time/", "perf/", "summary/", "_"))


def leveldb(path, header):
    """The records of a LevelDB log, whose blocks have 32 KiB: what wandb and swanlab write offline."""
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


def test_wandb(twice):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    run = twice("wandb")
    from wandb.proto import wandb_internal_pb2

    found, identities, summary, config = [], set(), {}, {}
    for path in sorted((run / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")):
        for content in leveldb(path, 7):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                found += [(items["step"], name, value) for name, value in items.items() if is_kept(name)]
            elif record.WhichOneof("record_type") == "run":
                identities.add((record.run.run_id, record.run.project, record.run.display_name))
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif record.WhichOneof("record_type") == "summary":
                summary |= {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.summary.update}
    assert sorted(found) == points(run)
    identity = json.loads((run / "run.json").read_text("utf-8"))["run"]
    assert identities == {(identity, "项目-1", "运行")}
    assert config["learning_rate"] == 1e-2
    assert summary["summary/steps"] == 4


def test_trackio(twice):
    pytest.importorskip("trackio", reason="trackio is not installed: pip install trackio")
    run = twice("trackio")
    code = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
    code += "names = S.get_runs('项目-1'); print(json.dumps([names, S.get_logs('项目-1', names[0])], default=str))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, logs = json.loads(done.stdout.splitlines()[-1])
    identity = json.loads((run / "run.json").read_text("utf-8"))["run"]
    assert names == [f"运行-{identity[:8]}"]
    found = [(log["step"], k, v) for log in logs for k, v in log.items() if is_kept(k) and k != "timestamp"]
    assert sorted(found) == points(run)
    assert [log["summary/steps"] for log in logs if "summary/steps" in log] == [4]


def test_mlflow(twice):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    run = twice("mlflow")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(tracking_uri=(run / "tracking" / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("项目-1")
    (tracked,) = client.search_runs([experiment.experiment_id])
    found = [
        (point.step, name, point.value)
        for name in tracked.data.metrics
        if is_kept(name)
        for point in client.get_metric_history(tracked.info.run_id, name)
    ]
    assert sorted(found) == points(run)
    assert (tracked.info.run_name, tracked.info.status) == ("运行", "FINISHED")
    assert tracked.data.params["learning_rate"] == "0.01"
    assert tracked.data.tags["summary/steps"] == "4"


def test_mlflow_offline_and_then_on_a_server(twice, tmp_path, monkeypatch):
    """The number that the run had in its own folder means nothing there; another server gets all of it, once."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = twice("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "服务器").as_uri())
    assert main(["track", str(run), "mlflow"]) == 0
    assert main(["track", str(run), "mlflow"]) == 0
    client = mlflow.MlflowClient()
    (tracked,) = client.search_runs([client.get_experiment_by_name("项目-1").experiment_id])
    for name in ("loss/sft", "eval/loss"):
        steps = [point.step for point in client.get_metric_history(tracked.info.run_id, name)]
        assert steps == [step for step, metric, _ in points(run) if metric == name]
    assert (tracked.info.run_name, tracked.info.status) == ("运行", "FINISHED")


def test_swanlab(twice):
    pytest.importorskip("swanlab", reason="swanlab is not installed: pip install swanlab")
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
    identity = json.loads((run / "run.json").read_text("utf-8"))["run"]
    assert starts == [["project-1", "运行", identity[:21]]] * 2, "the second part goes on with the first"
    assert sorted(tuple(line) for line in lines if isinstance(line[0], int) and is_kept(line[1])) == points(run)


def test_numbers_that_are_not_finite(settings, tmp_path):
    """null in metrics.jsonl is NaN in a tracker, not 0 and not left out."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/规则": null, "loss": 0.5}\n', "utf-8")
    (run / "config.yaml").write_text("seed: 0\n", "utf-8")
    assert main(["track", str(run), "mlflow", "--offline"]) == 0
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(tracking_uri=(run / "tracking" / "mlruns").resolve().as_uri())
    (tracked,) = client.search_runs([client.get_experiment_by_name("heedful").experiment_id])
    assert tracked.data.metrics["loss"] == 0.5
    assert math.isnan(tracked.data.metrics["reward/_89c4__5219_"])


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_nobody_is_logged_in(tracker, settings, capsys):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: pip install {tracker}")
    config = settings("run", track=(tracker,))
    with pytest.raises(ValueError, match=rf"you are not logged in: run `{tracker} login`.*or add --track-offline"):
        train_sft(config)
    assert not config.output.exists()
