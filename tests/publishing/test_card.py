"""What a model card says of paths, addresses and algorithms."""

import json
import shutil
import typing
from dataclasses import replace

import pytest
import yaml

from heedful import DPOConfig, OnlineDPOConfig
from heedful.cli.main import main
from heedful.configs.tools import PushConfig
from heedful.publishing.push import Form, card, paths_in, public, read_facts
from heedful.training.provenance import IN_PYTHON


@pytest.mark.parametrize(
    "text",
    [
        "judge:http://host:8000/v1#Qwen/Qwen3-8B",
        "https://huggingface.co/a/b/c",
        "see https://huggingface.co/docs/a/b, 或 http://h/数据/x/y",
        "s3://bucket/a/b/c",
        "org/name",
        "数据/家/我.jsonl",
        "and/or, 1/2/3",
        "/no_think",
    ],
)
def test_what_is_no_absolute_path_stays(text):
    assert public(text) == text
    assert public({"a": [text]}, ["/v1/x", "/docs/a"]) == {"a": [text]}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/家/我/x.jsonl", "我/x.jsonl"),
        ("model:/home/me/runs/rm/final", "model:rm/final"),
        ("python:/home/me/奖励.py:分", "python:me/奖励.py:分"),
        ("file:///home/me/mlruns", "me/mlruns"),
        ("sqlite:////home/me/a.db", "sqlite:///me/a.db"),
        ("at '/home/me/a/b', '/c/d/e'", "at 'a/b', 'd/e'"),
    ],
)
def test_an_absolute_path_is_cut_to_its_last_two_parts(text, kept):
    assert public(text) == kept


def test_a_path_with_spaces_is_known_from_the_settings():
    settings = {
        "model": "/home/John Smith/runs/sft/final/",
        "data": "/home/John Smith/数据/x y.jsonl",
        "eval_data": "/home/John Smith/数据/x y.jsonl.gz",
        "rewards": [
            "model:/home/John Smith/runs/rm/final",
            "python:/home/J S/奖 励.py:f",
            "http://h/a/b",
            "rule:/a/b/c",
        ],
        "results": ["/home/John Smith/a.json"],
        "output": None,
        "system_prompt": "/think step by step about a/b/c",
        "seed": 1,
    }
    paths = list(paths_in(settings))
    kept = public(settings | {"metrics": {"reward/model:/home/John Smith/runs/rm/final": 0.5}}, paths)
    assert kept == {
        "model": "sft/final",
        "data": "数据/x y.jsonl",
        "eval_data": "数据/x y.jsonl.gz",
        "rewards": ["model:rm/final", "python:J S/奖 励.py:f", "http://h/a/b", "rule:b/c"],
        "results": ["John Smith/a.json"],
        "output": None,
        "system_prompt": "/think step by step about a/b/c",
        "seed": 1,
        "metrics": {"reward/model:rm/final": 0.5},
    }


def test_no_part_of_a_path_with_spaces_is_in_a_card(runs, tmp_path):
    """In the settings, the tables of models and data, the limits, and the results of an evaluation."""
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    data, model, reward = (
        "/home/John Smith/数据/x y.jsonl",
        "/home/John Smith/runs/sft/final",
        "/home/John Smith/rm/final",
    )
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    config |= {"data": data, "model": model, "rewards": [f"model:{reward}", "judge:http://host:8000/v1#Qwen/Qwen3-8B"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    facts = json.loads((run / "environment.json").read_text("utf-8"))
    facts |= {"command": "heedful grpo", "data": {data: "a" * 64}, "models": {model: "b" * 64}}
    (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text("utf-8")) | {"rewards": config["rewards"]}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    result = tmp_path / "评测.json"
    result.write_text(json.dumps({"a": 0.5, "settings": {"data": "/home/John Smith/eval set.jsonl", "output": ""}}))
    words = ["push", str(run), "org/name", "--license", "mit", "--dry-run", "--results", str(result)]
    assert main(words) == 0
    text = (tmp_path / "run-push" / "README.md").read_text("utf-8")
    assert "/home" not in text
    assert "home/" not in text
    assert "| `数据/x y.jsonl` |" in text
    assert "`model:rm/final`, `judge:http://host:8000/v1#Qwen/Qwen3-8B`" in text
    assert "measured with heedful evaluate on John Smith/eval set.jsonl" in text


def test_no_function_is_a_data_set(runs, tmp_path):
    """Functions given in Python and files of code have a table of their own; without any there is none."""
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    facts = json.loads((run / "environment.json").read_text("utf-8"))
    assert len(facts["data"]) == 1

    def tables(**more):
        changed = facts | {"data": facts["data"] | more}
        (run / "environment.json").write_text(json.dumps(changed), encoding="utf-8")
        words = ["push", str(run), "org/name", "--license", "mit", "--dry-run"]
        assert main([*words, "--folder", str(tmp_path / f"{len(more)}")]) == 0
        text = (tmp_path / f"{len(more)}" / "README.md").read_text("utf-8")
        _, _, rest = text.partition("Data of the last stage:")
        ours, _, others = rest.partition("Functions and other files that the last stage used:")
        return ours, others.partition("Made with")[0]

    ours, others = tables(**{IN_PYTHON: "none"})
    assert others == ""
    assert IN_PYTHON not in ours
    ours, others = tables(**{IN_PYTHON: "长度 0123456789ab", "/家/我/奖励.py": "c" * 64})
    assert ours.count("\n| `") == 1
    assert f"| `{IN_PYTHON}` | `长度 0123456789ab` |" in others
    assert f"| `我/奖励.py` | `{'c' * 64}` |" in others


def test_every_algorithm_and_loss_has_a_title_and_says_its_limits(runs):
    losses = {
        "dpo": (*typing.get_args(typing.get_args(typing.get_type_hints(DPOConfig)["loss"])[0]), "own"),
        "online-dpo": typing.get_args(typing.get_type_hints(OnlineDPOConfig)["loss"]),
    }
    assert {"sigmoid", "simpo", "own"} <= set(losses["dpo"])
    facts = read_facts(runs("sft"), ())
    config, form = PushConfig(run=runs("sft"), to="org/name", license="mit"), Form(False, False, False, False)
    for algorithm in ("sft", "reward", "dpo", "kto", "ppo", "a2c", "grpo", "online-dpo"):
        for loss in losses.get(algorithm, ("sigmoid",)):
            stage = algorithm if loss == "sigmoid" else f"{algorithm} {loss}"
            summary = {"rewards": ["rule:digits"]} if algorithm in ("ppo", "a2c", "grpo", "online-dpo") else {}
            this = replace(facts, algorithm=algorithm, stages=(stage,), summary=summary)
            text = card(config, this, form, has_curves=False)
            assert " made from a model that is not on the Hub by " in text
            assert f" by {stage}, with heedful" not in text, "it has no title"
            assert "## Limits\n\n- It" in text
            assert "## Limits\n\n- Its safety" not in text, "it has no limit of its own"


@pytest.mark.parametrize(("loss", "title"), [
    ("simpo", "SimPO"), (None, "DPO"), ("python:/家/我/损失.py:mine", "DPO with a loss of the author's own"),
    ("python:in Python:mine (source 0123456789ab)", "DPO with a loss of the author's own"),
])  # fmt: skip
def test_the_loss_is_named(loss, title, runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    facts = json.loads((run / "environment.json").read_text("utf-8")) | {"command": "heedful dpo"}
    (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8")) | ({"loss": loss} if loss else {})
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["push", str(run), "org/name", "--license", "mit", "--dry-run"]) == 0
    text = (tmp_path / "run-push" / "README.md").read_text("utf-8")
    assert f"made from a model that is not on the Hub by {title}, with heedful" in text
    assert read_facts(run, ()).algorithm == "dpo"


def test_the_card_of_kto(runs, tmp_path):
    out = tmp_path / "out"
    assert main(["push", str(runs("kto")), "org/name", "--license", "mit", "--dry-run", "--folder", str(out)]) == 0
    text = (out / "README.md").read_text("utf-8")
    assert "by supervised fine-tuning and then KTO, with heedful" in text
    assert "It learned which responses were called good and which bad, not why." in text


@pytest.mark.parametrize(
    ("best", "flags", "said"),
    [
        (0, (), "The best evaluation was the one before training, so this model is not the one that did best."),
        (3, (), "The best evaluation was that of step 3, so this model is not the one that did best."),
        (3, ("--best",), "The best evaluation was that of step 3, and this is that model."),
    ],
)
def test_the_results_say_what_was_measured_and_on_what(best, flags, said, runs, tmp_path):
    """How many records, which rewards with which weights, whether it was trained on them, and if this is the best model."""
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8")) | {"reward_weights": [1.0, 0.5]}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    facts = json.loads((run / "environment.json").read_text("utf-8")) | {"command": "heedful grpo"}
    (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    summary |= {"rewards": ["rule:digits", "rule:json"], "steps": 4, "best": {"step": best, "eval/score_mean": 0.5}}
    summary |= {"data": {"held_out": 7}, "first_evaluation": {"eval/score_mean": 0.25, "eval/自己": 1.0}}
    summary |= {"last_evaluation": {"eval/score_mean": 0.5, "eval/自己": 2.0}}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    results = [tmp_path / "评测.json", tmp_path / "other.json"]
    settings = {"data": config["data"], "rewards": ["rule:digits"]}
    results[0].write_text(json.dumps({"score_mean": 0.5, "settings": settings}), encoding="utf-8")
    results[1].write_text(json.dumps({"score_mean": 0.5, "settings": {"data": "别的.jsonl"}}), encoding="utf-8")
    words = ["push", str(run), "org/name", "--license", "mit", "--dry-run", *flags]
    assert main([*words, "--results", *map(str, results)]) == 0
    text = (tmp_path / "run-push" / "README.md").read_text("utf-8")
    assert "On 7 records that were held out from training (not a public benchmark), before and after training:" in text
    assert (
        "| `eval/score_mean` | 0.25 | 0.5 | mean score of its responses under what it was trained on; higher is" in text
    )
    assert "| `eval/自己` | 1 | 2 |  |" in text
    assert said in text
    assert "(the file that it was trained on) under `rule:digits`:" in text
    assert "measured with heedful evaluate on 别的.jsonl:" in text
    assert "`rule:digits` (weight 1), `rule:json` (weight 0.5)" in text
