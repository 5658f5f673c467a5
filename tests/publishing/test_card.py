"""What a model card says of a run, and that no path of this machine and no secret is in it."""

import json
import re
import subprocess
import sys
import typing

import pytest
import yaml

from heedful import DPOConfig, OnlineDPOConfig
from heedful.cli.main import main
from heedful.training.provenance import IN_PYTHON


@pytest.fixture
def card(tmp_path, capsys):
    """``card(run, ...)``: metadata and text of the card that would go out, without a picture of the curves."""

    def write(run, *words):
        (run / "metrics.jsonl").unlink(missing_ok=True)
        folder = tmp_path / f"out {len(list(tmp_path.iterdir()))}"
        status = main(["push", str(run), "org/name", "--license", "mit", "--dry-run", "--folder", str(folder), *words])
        assert status == 0, capsys.readouterr().err
        _, metadata, text = (folder / "README.md").read_text("utf-8").split("---\n", 2)
        return yaml.safe_load(metadata), text

    return write


def test_the_card_of_a_run(card, edited, runs, tmp_path):
    metadata, text = card(edited("sft", tmp_path / "run"), "--language", "zh", "en")
    assert metadata == {
        "license": "mit",
        "language": ["zh", "en"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["heedful", "sft"],
    }
    facts, summary = (
        json.loads((runs("sft") / name).read_text("utf-8")) for name in ("environment.json", "summary.json")
    )
    for digest in (*facts["models"].values(), *facts["data"].values()):
        assert (digest in text) is (digest != "none")
    before, after = (summary[name]["eval/loss"] for name in ("first_evaluation", "last_evaluation"))
    assert f"| `eval/loss` | {before:.4g} | {after:.4g} | the loss of training; lower is better |" in text
    assert f"On {summary['data']['held_out']} records that were held out from training" in text
    assert "learning_rate: 1.0e-05" in text
    assert text.endswith("</details>\n")


LONG = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sft", "reward", "dpo", "encoder", "critic")]


@pytest.mark.parametrize("name", LONG)
def test_the_code_of_the_card_runs_in_transformers_alone(name, card, edited, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", card(edited(name, tmp_path / "run"))[1], flags=re.DOTALL)
    assert code.count('"org/name"') == (3 if name == "critic" else 2)
    (published,) = tmp_path.glob("out *")
    code = code.replace('"org/name"', repr(str(published))).replace("max_new_tokens=256", "max_new_tokens=4")
    code = code.replace("hf_hub_download(", "'/'.join((").replace('.safetensors"))', '.safetensors")))')
    blocked = "import sys; sys.modules['heedful'] = None\n"
    done = subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if name in ("reward", "encoder"):
        float(done.stdout)


def test_a_critic_is_pushed_with_its_head(card, edited, heedful, tmp_path):
    """And a folder that lost it is not pushed."""
    metadata, text = card(edited("critic", tmp_path / "critic"))
    (published,) = tmp_path.glob("out *")
    assert (published / "value_head" / "value_head.safetensors").is_file()
    assert metadata["tags"] == ["heedful", "critic", "value-model"]
    assert "A critic for PPO made from a model that is not on the Hub by value pretraining, with heedful." in text
    assert "`heedful ppo --critic separate --value-model org/name ...` starts from it" in text
    (tmp_path / "critic" / "final" / "value_head" / "value_head.safetensors").unlink()
    outcome = heedful("push", tmp_path / "critic", "org/name", "--license", "mit", "--dry-run")
    assert outcome.status == 2
    assert "is a critic without value_head/value_head.safetensors; train it again (heedful critic)" in outcome.message


def test_an_absolute_path_is_cut_to_its_last_two_parts_and_a_secret_is_hidden(card, edited, tmp_path):
    stay = [
        "judge:http://host:8000/v1#Qwen/Qwen3-8B",
        "see https://huggingface.co/docs/a/b, 或 http://h/数据/x/y",
        "s3://bucket/a/b/c",
        "org/name",
        "数据/家/我.jsonl",
        "and/or, 1/2/3",
        "/no_think",
    ]
    cut = {
        "/家/我/x.jsonl": "我/x.jsonl",
        "model:/home/me/runs/rm/final": "model:rm/final",
        "python:/home/me/奖励.py:分": "python:me/奖励.py:分",
        "file:///home/me/mlruns": "me/mlruns",
        "sqlite:////home/me/a.db": "sqlite:///me/a.db",
        "at /home/me/a/b, /c/d/e": "at a/b, d/e",
        "hf_" + "aB3" * 11: "***",
    }
    text = card(edited("sft", tmp_path / "run", config={"notes": [*stay, *cut]}))[1]
    shown = text.partition("notes:\n")[2].splitlines()
    assert shown[: len(stay) + len(cut)] == [f"- {one}" for one in (*stay, *cut.values())]


def test_no_part_of_a_path_with_spaces_is_in_a_card(card, edited, tmp_path):
    """In settings, the tables of models and data, limits, and the results of an evaluation."""
    home = "/home/John Smith"
    data, model = f"{home}/数据/x y.jsonl", f"{home}/runs/sft/final"
    rewards = [f"model:{home}/rm/final", "python:/home/J S/奖 励.py:f", "judge:http://host:8000/v1#Qwen/Qwen3-8B"]
    run = edited(
        "sft",
        tmp_path / "run",
        config={"data": data, "eval_data": f"{data}.gz", "model": model, "rewards": rewards},
        environment={"command": "heedful grpo", "data": {data: "a" * 64}, "models": {model: "b" * 64}},
        summary={"rewards": rewards},
    )
    result = tmp_path / "评测.json"
    measured = {
        f"reward/model:{home}/rm/final": 0.5,
        "settings": {"data": f"{home}/eval set.jsonl", "rewards": rewards},
    }
    result.write_text(json.dumps(measured), encoding="utf-8")
    text = card(run, "--results", str(result))[1]
    assert not re.search(r"/home|home/", text)
    assert f"| `数据/x y.jsonl` | `{'a' * 64}` |" in text
    assert f"| `sft/final` | `{'b' * 64}` |" in text
    assert "under `model:rm/final`, `python:J S/奖 励.py:f`, `judge:http://host:8000/v1#Qwen/Qwen3-8B`" in text
    assert "measured with heedful evaluate on John Smith/eval set.jsonl" in text
    assert "| `reward/model:rm/final` | 0.5 |" in text
    assert "eval_data: 数据/x y.jsonl.gz" in text


def test_a_file_that_is_away_is_no_data_set_on_the_hub(card, edited, tmp_path):
    """Told by its hash: world/prompts.jsonl and sft/base look like ORG/NAME from another working folder. Code has one too."""
    data = {
        "world/prompts.jsonl": "a" * 64,
        "/家/我/奖励.py": "c" * 64,
        IN_PYTHON: "长度 0123456789ab",
        "no function": "none",
    }
    run = edited(
        "sft",
        tmp_path / "run",
        config={"data": "world/prompts.jsonl", "model": "sft/base"},
        environment={"data": data, "models": {"sft/base": "b" * 64}},
        summary=None,
    )
    metadata, text = card(run)
    assert not {"datasets", "base_model"} & metadata.keys()
    for name, digest in (("world/prompts.jsonl", "a" * 64), ("我/奖励.py", "c" * 64), (IN_PYTHON, "长度 0123456789ab")):
        assert f"| `{name}` | `{digest}` |\n" in text
    assert "no function" not in text
    assert "Training has not come to its end" in text
    assert "Nothing was held out" not in text


def test_the_base_and_the_stages_are_those_of_the_runs_before(card, edited, tmp_path):
    base = "Qwen/Qwen3-0.6B-Base"
    first = edited("sft", tmp_path / "a" / "sft", config={"model": base, "data": "org/prompts:train"})
    model = {"model": str(first / "final"), "data": "org/prompts:train"}
    metadata, text = card(edited("dpo", tmp_path / "a" / "dpo", config=model | {"loss": "simpo"}))
    assert (metadata["base_model"], metadata["base_model_relation"]) == (base, "finetune")
    assert metadata["datasets"] == ["org/prompts"]
    assert (
        f"made from [{base}](https://huggingface.co/{base}) by supervised fine-tuning and then DPO (simpo), with"
        in text
    )
    assert "| `org/prompts:train` | not a local file |" in text


def test_a_critic_comes_from_what_it_started_from(card, edited, tmp_path):
    """Which may be another model than the policy whose returns it learned."""
    base, small = "Qwen/Qwen3-0.6B-Base", "org/small"
    reward = edited("reward", tmp_path / "rm", config={"model": base}) / "final"
    for place, (changes, came_from) in enumerate(
        [
            ({"model": base}, base),
            ({"model": base, "value_model": small}, small),
            ({"model": small, "critic": "reward", "rewards": ["rule:digits", f"model:{reward}"]}, base),
        ]
    ):
        metadata, text = card(edited("critic", tmp_path / f"{place}", config=changes))
        assert metadata["base_model"] == came_from
        stages = "reward modelling and then value pretraining" if place == 2 else "value pretraining"
        assert f"A critic for PPO made from [{came_from}](https://huggingface.co/{came_from}) by {stages}, with" in text


OWN = "python:/家/我/损失.py:mine"
LOSSES = {
    "dpo": (*typing.get_args(typing.get_args(typing.get_type_hints(DPOConfig)["loss"])[0]), OWN),
    "online-dpo": typing.get_args(typing.get_type_hints(OnlineDPOConfig)["loss"]),
}
STAGES = [(name, "sigmoid") for name in ("sft", "reward", "kto", "ppo", "a2c", "grpo")]
STAGES += [(name, loss) for name, losses in LOSSES.items() for loss in losses]


@pytest.mark.parametrize(
    "stages",
    [
        [("sft", "sigmoid"), ("ppo", "sigmoid"), ("dpo", "simpo"), ("dpo", OWN), ("online-dpo", "ipo")],
        pytest.param(STAGES, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_every_algorithm_and_loss_says_its_limits(card, edited, tmp_path, stages):
    assert set(stages) <= set(STAGES)
    titles = {"sft": "supervised fine-tuning", "reward": "reward modelling", "online-dpo": "online DPO"}
    for place, (algorithm, loss) in enumerate(stages):
        is_online = algorithm in ("ppo", "a2c", "grpo", "online-dpo")
        run = edited(
            "sft",
            tmp_path / f"{place}",
            config={"loss": loss},
            environment={"command": f"heedful {algorithm}"},
            summary={"rewards": ["rule:digits"]} if is_online else {},
        )
        metadata, text = card(run)
        shown = {"sigmoid": "", OWN: " with a loss of the author's own"}.get(loss, f" ({loss})")
        title = titles.get(algorithm, algorithm.upper())
        assert f" made from a model that is not on the Hub by {title}{shown}, with heedful." in text
        assert metadata["tags"][:2] == ["heedful", algorithm]
        assert "## Limits\n\n- It" in text
        assert "## Limits\n\n- Its safety" not in text, "it has no limit of its own"


@pytest.mark.parametrize(
    ("best", "flags", "said"),
    [
        (0, (), "The best evaluation was the one before training, so this model is not the one that did best."),
        (3, ("--best",), "The best evaluation was that of step 3, and this is that model."),
    ],
)
def test_the_results_say_what_was_measured_and_on_what(best, flags, said, card, edited, runs, tmp_path):
    """How many records, which rewards with which weights, whether it was trained on them, and if this is the best model."""
    data = yaml.safe_load((runs("sft") / "config.yaml").read_text("utf-8"))["data"]
    run = edited(
        "sft",
        tmp_path / "run",
        config={"reward_weights": [1.0, 0.5]},
        environment={"command": "heedful grpo"},
        summary={
            "rewards": ["rule:digits", "rule:json"],
            "steps": 4,
            "best": {"step": best, "eval/score_mean": 0.5},
            "data": {"held_out": 7},
            "first_evaluation": {"eval/score_mean": 0.25},
            "last_evaluation": {"eval/score_mean": 0.5, "eval/自己": 2.0},
        },
    )
    results = [tmp_path / "评测.json", tmp_path / "other.json"]
    own = {"score_mean": 0.5, "settings": {"data": data, "rewards": ["rule:digits"]}}
    other = {"interval_95": [0.4, 0.6], "samples": [], "rows": [{}, {}], "settings": {"data": "别的.jsonl"}}
    for path, content in zip(results, (own, other), strict=True):
        path.write_text(json.dumps(content), encoding="utf-8")
    text = card(run, *flags, "--results", *map(str, results))[1]
    assert "On 7 records that were held out from training (not a public benchmark), before and after training:" in text
    meaning = "mean score of its responses under what it was trained on; higher is better"
    assert f"| `eval/score_mean` | 0.25 | 0.5 | {meaning} |" in text
    assert "| `eval/自己` | not measured | 2 |  |" in text
    assert said in text
    assert "`评测.json`, measured with heedful evaluate on" in text
    assert "(the file that it was trained on) under `rule:digits`:\n" in text
    (table,) = re.findall(r"measured with heedful evaluate on 别的.jsonl:\n\n((?:\|.*\n)+)", text)
    assert table.splitlines()[2:] == ["| `interval_95` | 0.4 to 0.6 |"]
    assert "`rule:digits` (weight 1), `rule:json` (weight 0.5)" in text
