"""Benchmarks by lm-evaluation-harness, on a task of our own that needs no network."""

import importlib.util
import json
import sys

import pytest
import torch

from heedful.cli import main as cli

TASK = """
task: 小任务
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install lm-eval"
)


def main(words):
    """The exit status of a command. What is wrong with a setting by itself ends it as wrong flags do."""
    try:
        return cli.main(words)
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture
def folder(tmp_path):
    records = [{"question": f"第{i}问：", "choices": ["是的。", "不"], "answer": i % 2} for i in range(6)]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    tasks = tmp_path / "任务"
    tasks.mkdir()
    (tasks / "task.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    return tasks


def told(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def accuracy(model, tasks):
    """The same by hand: the answer whose tokens are likelier in sum."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    right = []
    for line in (tasks.parent / "questions.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        sums = []
        for choice in record["choices"]:
            ids = tokenizer(record["question"] + " " + choice, return_tensors="pt").input_ids
            start = tokenizer(record["question"], return_tensors="pt").input_ids.shape[1]
            with torch.no_grad():
                logprobs = lm(ids).logits.log_softmax(-1)
            sums.append(sum(float(logprobs[0, at - 1, ids[0, at]]) for at in range(start, ids.shape[1])))
        right.append(sums.index(max(sums)) == record["answer"])
    return sum(right) / len(right)


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_our_own(tiny, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    output, model = tmp_path / "结果.json", tiny("gpt2")
    words = ["--model", model, "--tasks", "小任务", "--task-folder", folder, "--output", output, "--device", "cpu"]
    assert main(["evaluate", "tasks", *map(str, words)]) == 0, told(capsys)
    result = json.loads(output.read_text("utf-8"))
    assert result["小任务/acc"] == pytest.approx(accuracy(model, folder))
    assert 0 < result["小任务/acc_stderr"] < 0.3
    assert result["小任务/documents"] == 6
    assert result["harness"].startswith("lm-eval 0.4")
    assert result["settings"]["tasks"] == ["小任务"]
    assert main(["evaluate", "tasks", *map(str, words), "--limit", "2", "--overwrite"]) == 0
    assert json.loads(output.read_text("utf-8"))["小任务/documents"] == 2


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_is_not_there(tiny, folder, capsys):
    words = ["--model", tiny("gpt2"), "--task-folder", str(folder)]
    assert main(["evaluate", "tasks", *words, "--tasks", "gsm9k"]) == 2
    assert "--tasks gsm9k: lm-evaluation-harness has no such task; did you mean gsm8k" in told(capsys)


def test_the_harness_is_not_installed(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "tasks", "--model", tiny("gpt2"), "--tasks", "gsm8k"]) == 2
    assert 'which is not installed: pip install "heedful[lm-eval]"' in told(capsys)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tasks", "gsm8k", "--task-folder", "nowhere"], "--task-folder nowhere is no folder"),
        (["--tasks", "gsm8k", "--limit", "0"], "--limit must be greater than 0"),
        (["--tasks", "gsm8k", "--few-shot", "-1"], "--few-shot must be at least 0"),
    ],
)
def test_settings_that_make_no_sense(words, reason, tiny, capsys):
    assert main(["evaluate", "tasks", "--model", tiny("gpt2"), *words]) == 2
    assert reason in told(capsys)


def test_a_folder_without_tasks_is_refused(tiny, tmp_path, capsys):
    words = ["--model", tiny("gpt2"), "--tasks", "x", "--task-folder", str(tmp_path)]
    assert main(["evaluate", "tasks", *words]) == 2
    assert "holds no .yaml file" in told(capsys)


def test_what_the_harness_says_becomes_names_and_numbers():
    from heedful.evaluate.tasks import numbers_of

    measured = {
        "results": {
            "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"}
        },
        "groups": {"mmlu": {"acc,none": 0.5}},
        "n-samples": {"gsm8k": {"original": 1319, "effective": 8}},
    }
    assert numbers_of(measured) == {"gsm8k/exact_match (strict-match)": 0.25, "gsm8k/documents": 8, "mmlu/acc": 0.5}
