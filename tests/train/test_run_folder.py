"""A run's folder holds what is promised, in formats that other tools read, and is never half-replaced."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from heedful import ConfigError, DataError, SFTConfig, train_sft
from heedful.models import load_causal_lm
from heedful.train import run_folder


@pytest.fixture
def config(tiny, demonstrations, tmp_path):
    def make(**changes):
        settings = {
            "model": tiny("gpt2"),
            "data": demonstrations,
            "output": tmp_path / "运行" / "一",
            "eval_fraction": 0.4,
            "batch_size": 2,
            "max_steps": 4,
            "eval_every": 2,
            "save_every": 2,
            "sample_every": 2,
        }
        return SFTConfig(**(settings | changes))

    return make


def test_a_run_folder_is_complete_and_readable(config, demonstrations):
    settings = config()
    summary = train_sft(settings)
    run = settings.output
    names = {path.name for path in run.iterdir()}
    assert names == {
        "run.json",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "tensorboard",
        "checkpoints",
        "best",
        "final",
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert json.loads((run / "summary.json").read_text(encoding="utf-8")) == summary
    config_keys = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert "output" not in config_keys
    assert config_keys["data"] == demonstrations
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(Path(demonstrations).read_bytes()).hexdigest()
    assert environment["data"] == {demonstrations: digest}
    assert environment["versions"]["torch"]
    assert environment["seed"] == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == [0, 1, 2, 2, 3, 4, 4]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert samples[0].keys() == {"step", "prompt", "demonstration", "response"}
    for model in ("best", "final", "checkpoints/step-000002"):
        load_causal_lm(str(run / model))


def test_tensorboard_holds_the_same_numbers(config):
    settings = config()
    train_sft(settings)
    events = EventAccumulator(str(settings.output / "tensorboard")).Reload()
    lines = [json.loads(x) for x in (settings.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    written = [(line["step"], line["loss/sft"]) for line in lines if "loss/sft" in line]
    assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("loss/sft")] == written


def test_an_existing_run_is_replaced_only_when_asked(config):
    settings = config(max_steps=1)
    train_sft(settings)
    mark = settings.output / "final" / "mark"
    mark.touch()
    with pytest.raises(ConfigError, match=r"already holds a run.*--overwrite"):
        train_sft(settings)
    assert mark.exists()
    train_sft(config(max_steps=1, overwrite=True))
    assert not mark.exists()


def test_a_run_that_cannot_start_leaves_the_old_one_alone(config, tmp_path):
    """--overwrite deletes the old run only when the new one has its data and models."""
    settings = config(max_steps=1)
    train_sft(settings)
    with pytest.raises(DataError):
        train_sft(config(overwrite=True, data=str(tmp_path / "missing.jsonl")))
    load_causal_lm(str(settings.output / "final"))


def test_a_folder_that_cannot_be_written_leaves_the_old_run_alone(config, monkeypatch, tmp_path):
    """A disk that is full when the new run writes its first files."""
    settings = config(max_steps=1)
    train_sft(settings)
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "to_yaml", full)
    with pytest.raises(OSError, match="No space left"):
        train_sft(config(max_steps=1, overwrite=True))
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_folder_that_is_no_run_is_never_deleted(config, tmp_path):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.txt").write_text("important", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a heedful run"):
        train_sft(config(output=precious, overwrite=True))
    assert (precious / "chapter1.txt").read_text(encoding="utf-8") == "important"


def test_secrets_are_not_written_down(config, tmp_path, monkeypatch, capsys):
    """Of addresses, of flags and of the environment; and nothing of the arguments of a program that calls heedful."""
    monkeypatch.setattr("sys.argv", ["mine.py", "--wandb-key", "sk-verysecret"])
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    settings = config(
        max_steps=1, system_prompt="see https://me:pa55word@host/x?token=s3cret and hf_abcdefghijklmnopqrst"
    )
    train_sft(settings)
    written = b"".join(path.read_bytes() for path in settings.output.rglob("*") if path.suffix in (".json", ".yaml"))
    for secret in (b"sk-verysecret", b"pa55word", b"s3cret", b"hf_abcdefghijklmnopqrst"):
        assert secret not in written
    assert json.loads((settings.output / "environment.json").read_text("utf-8"))["arguments"] == []
