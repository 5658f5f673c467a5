"""Tokens that were added to a tokenizer without rows of embeddings for them: refused where a text has one, before the run."""

import io
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from heedful.cli.main import main

NEW = "<新词>"


@pytest.fixture
def model(tiny, tmp_path):
    """264 rows of embeddings, and a tokenizer with 266 tokens."""
    folder = shutil.copytree(tiny("qwen3"), tmp_path / "模型")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens(["<旧词>", NEW]) == 2
    tokenizer.save_pretrained(folder)
    return folder


RECORDS = {
    "sft": {"prompt": "问", "completion": f"答{NEW}"},
    "reward": {"prompt": "问", "chosen": f"好{NEW}", "rejected": "坏"},
    "ppo": {"prompt": f"问{NEW}"},
}


def test_a_trainer_refuses_a_text_with_such_a_token(train, data, model, written, tmp_path):
    for command in ("sft", "reward", "ppo"):
        good = [json.loads(line) for line in Path(data(command)).read_text("utf-8").splitlines()]
        path = written("新.jsonl", [*good, RECORDS[command]])
        outcome = train(command, model=model, data_file=path)
        assert outcome.status == 2, outcome.err
        assert f"{path}:9: the token '{NEW}' has the id 265" in outcome.message
        assert f"only for 264 tokens (0 to 263): it was added to the tokenizer in {model}" in outcome.message
        assert "model.resize_token_embeddings(266)" in outcome.message
        assert "Traceback" not in outcome.err
        assert not (tmp_path / "运行").exists()


def test_so_does_a_measurement(heedful, train, model, written, tmp_path):
    """A model whose texts have no such token is trained."""
    assert train("reward", model=model, output=tmp_path / "分").status == 0
    flags = {"perplexity": ["--model", model], "accuracy": ["--reward-model", tmp_path / "分" / "final"]}
    for measure, command in (("perplexity", "sft"), ("accuracy", "reward")):
        path = written("新.jsonl", [RECORDS[command]])
        outcome = heedful("evaluate", measure, *flags[measure], "--data", path)
        assert outcome.status == 2, outcome.err
        assert f"{path}:1: the token '{NEW}' has the id 265" in outcome.message


def test_special_tokens_need_rows(train, model, tmp_path):
    path = model / "tokenizer_config.json"
    own = json.loads(path.read_text("utf-8"))
    for command, name in (("sft", "pad_token"), ("grpo", "eos_token")):
        path.write_text(json.dumps(own | {name: NEW}, ensure_ascii=False), "utf-8")
        outcome = train(command, model=model)
        assert outcome.status == 2, outcome.err
        assert f"the token '{NEW}' has the id 265" in outcome.message
        assert not (tmp_path / "运行").exists()


def test_somebody_who_talks_is_told_and_may_go_on(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"你好{NEW}\n你好\n/quit\n"))
    assert main(["chat", "--model", str(model), "--max-new-tokens", "4", "--raw"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"(this line: the token '{NEW}' has the id 265" in said
