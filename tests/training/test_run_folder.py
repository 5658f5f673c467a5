"""A run's folder holds what is promised, in formats that other tools read, and is never half-replaced."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from heedful.models import load_causal_lm
from jsonl import read_jsonl, read_metrics


@pytest.fixture(scope="module")
def run(sft_into, tmp_path_factory):
    """A run of four steps, evaluated, saved and sampled from in every other one, and its summary."""
    folder = tmp_path_factory.mktemp("运行") / "一"
    return folder, sft_into(folder, max_steps=4, eval_every=2, save_every=2, sample_every=2)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_folder_is_complete_and_readable(run, demonstrations):
    run, result = run
    assert {path.name for path in run.iterdir()} == {
        "run.json", "config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json", "tensorboard",
        "checkpoints", "best", "final",
    }  # fmt: skip
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert read_json(run / "summary.json") == result.summary
    config_keys = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert "output" not in config_keys
    assert config_keys["data"] == demonstrations
    environment = read_json(run / "environment.json")
    assert environment["data"] == {demonstrations: hashlib.sha256(Path(demonstrations).read_bytes()).hexdigest()}
    assert environment["versions"]["torch"]
    assert environment["seed"] == 0
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2, 2, 3, 4, 4]
    assert read_jsonl(run / "samples.jsonl")[0].keys() == {"step", "prompt", "demonstration", "response"}
    for model in ("best", "final", "checkpoints/step-000002"):
        load_causal_lm(str(run / model))


def test_tensorboard_holds_the_same_numbers(run):
    events = EventAccumulator(str(run[0] / "tensorboard")).Reload()
    written = [(line["step"], line["loss/sft"]) for line in read_metrics(run[0], having="loss/sft")]
    assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("loss/sft")] == written


def test_secrets_are_not_written_down(sft, tmp_path, monkeypatch):
    """Of addresses, of flags and of the environment; and nothing of the arguments of a program that calls heedful."""
    monkeypatch.setattr("sys.argv", ["mine.py", "--wandb-key", "sk-verysecret"])
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    sft(max_steps=1, system_prompt="see https://me:pa55word@host/x?token=s3cret and hf_abcdefghijklmnopqrst")
    run = tmp_path / "run"
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.suffix in (".json", ".yaml"))
    for secret in (b"sk-verysecret", b"pa55word", b"s3cret", b"hf_abcdefghijklmnopqrst"):
        assert secret not in written
    assert read_json(run / "environment.json")["arguments"] == []


def test_the_state_to_resume_from_is_read_once_a_step(sft_into, tmp_path, monkeypatch):
    """And when the run measures its free disk and begins, and after each evaluation: that of the first model and the last."""
    read, plain = [], torch.optim.AdamW.state_dict
    monkeypatch.setattr(torch.optim.AdamW, "state_dict", lambda optimizer: read.append(1) or plain(optimizer))
    sft_into(tmp_path / "运行", max_steps=4, eval_every=0, sample_every=0)
    assert len(read) == 2 + 4 + 2
