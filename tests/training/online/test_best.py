"""Which model is best/: not the one with the highest score at any price, but by the objective, or by a judge."""

import shutil
from dataclasses import replace

import pytest

from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, Reward, train_ppo
from heedful.algorithms.online.evaluation import evaluate
from heedful.configs.online import OnlineConfig
from heedful.core import ScoreNorm
from jsonl import read_metrics
from trainers import TRAIN

JUDGE = """
def brief(completions):
    return [-len(c) for c in completions]
"""


@pytest.fixture
def judge(tmp_path):
    """The string of a judge that likes the opposite of what `length` likes."""
    (tmp_path / "法官.py").write_text(JUDGE, encoding="utf-8")
    return f"python:{tmp_path / '法官.py'}:brief"


FIVE = [Reward("five", lambda completions: [5.0] * len(completions))]
OBJECTIVES = {
    "online DPO": (OnlineDPOConfig, {"beta": 0.75, "missing_eos_penalty": 2.0}, {},
                   lambda score, cut, kl: score - 2.0 * cut - 0.75 * kl),
    "normalised": (PPOConfig, {"kl_coef": 0.5, "missing_eos_penalty": 2.0}, {"score_norm": ScoreNorm(mean=7.0, std=3.0)},
                   lambda score, cut, kl: score - 3.0 * (2.0 * cut + 0.5 * kl)),
    "clipped": (GRPOConfig, {"kl_coef": 0.0, "score_clip": 3.0, "missing_eos_penalty": 1.0}, {"rewards": FIVE},
                lambda score, cut, kl: 3.0 - cut),
}  # fmt: skip
"""Under normalisation penalty and price are in standard deviations: times the deviation, the mean being no matter."""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_by_hand(make_learner, config, name):
    """Score, minus the penalty of responses that were cut, minus the price of a nat times the nats."""
    kind, changes, own, by_hand = OBJECTIVES[name]
    settings = config(kind, **changes)
    known = settings if isinstance(settings, OnlineConfig) else config(PPOConfig)
    learner = replace(make_learner(known, noise=0.3, **own), config=settings)
    found = evaluate(learner, learner.prompts.prompts)
    cut = 1 - found["eval/eos_frac"]
    assert found["eval/kl"] > 0.05, "no KL to have a price"
    assert cut > 0, "nothing was cut"
    assert found["eval/objective"] == pytest.approx(by_hand(found["eval/score_mean"], cut, found["eval/kl"]), rel=1e-6)
    assert "eval/judge_mean" not in found


def evaluations(run):
    return {line["step"]: line for line in read_metrics(run, having="eval/kl")}


def highest(found, metric):
    return max(found, key=lambda step: (found[step][metric], -step))


RUN = {"steps": 6, "eval_every": 1, "save_total_limit": 0, "learning_rate": 5e-3, "lr_schedule": "constant"}


@pytest.mark.exhaustive
def test_the_policy_that_pays_too_much_for_its_score_is_not_best(config, length):
    """The price of KL, which is high here, puts another model first than the score does."""
    settings = config(**RUN, save_every=1, kl_coef=2.0, response_length="fixed")
    summary = train_ppo(settings, rewards=[length])
    found = evaluations(settings.output)
    best = highest(found, "eval/objective")
    assert summary["best"] == {"step": best, "eval/objective": found[best]["eval/objective"]}
    assert best not in (0, highest(found, "eval/score_mean")), "the run no longer tells the two apart"
    name = "model.safetensors"
    kept = settings.output / "checkpoints" / f"step-{best:06d}" / name
    assert (settings.output / "best" / name).read_bytes() == kept.read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [PPOConfig, OnlineDPOConfig])
def test_a_judge_chooses_and_teaches_nothing(config, length, judge, kind):
    """By --selection-rewards the model is best that the judge likes most; what is learned stays, bit for bit."""
    judged = config(kind, **RUN, selection_rewards=(judge,))
    plain = config(kind, **RUN, output=judged.output.with_name("plain"))
    summary = TRAIN[kind](judged, rewards=[length])
    TRAIN[kind](plain, rewards=[length])
    found = evaluations(judged.output)
    best = highest(found, "eval/judge_mean")
    assert summary["best"] == {"step": best, "eval/judge_mean": found[best]["eval/judge_mean"]}
    assert all(line["eval/judge_mean"] == pytest.approx(-line["eval/score_mean"]) for line in found.values())
    assert len({line["eval/judge_mean"] for line in found.values()}) > 1
    weights = [(s.output / "final" / "model.safetensors").read_bytes() for s in (judged, plain)]
    assert weights[0] == weights[1]


def test_a_judge_that_cannot_judge_is_refused_before_anything_is_written(config, length, judge, tmp_path):
    with pytest.raises(ConfigError, match=r"^--selection-rewards rule:digits is one of --rewards: a reward used in"):
        config(rewards=("rule:digits", "rule:json"), selection_rewards=(judge, "rule:digits"))
    for judges, changes, said in (
        (judge, {"eval_fraction": 0.0}, " judges held-out responses, .* set --eval-fraction or --eval-data"),
        ("digits", {}, ": 'digits' is not a reward; use model:PATH"),
        (judge.replace(":brief", ":long"), {}, ": .* has no function or class 'long'"),
    ):
        with pytest.raises(ConfigError, match=f"^--selection-rewards{said}"):
            train_ppo(config(selection_rewards=(judges,), **changes), rewards=[length])
    assert not (tmp_path / "run").exists()


def test_files_that_a_run_needs_are_not_deleted_by_overwrite(config, length, judge, demonstrations):
    """The judge's, and records of --ptx-data."""
    settings = config(steps=1, selection_rewards=(judge,))
    train_ppo(settings, rewards=[length])
    (settings.output / "法官.py").write_text(JUDGE, encoding="utf-8")
    shutil.copy(demonstrations, settings.output / "演示.jsonl")
    for needed in (
        {"selection_rewards": (f"python:{settings.output / '法官.py'}:brief",)},
        {"ptx_data": str(settings.output / "演示.jsonl"), "ptx_coef": 2.0, "minibatch_size": 4},
    ):
        with pytest.raises(ConfigError, match="which this run needs and --overwrite would delete"):
            train_ppo(config(steps=1, overwrite=True, **needed), rewards=[length])
