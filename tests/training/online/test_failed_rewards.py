"""Responses on which a reward failed: in no loss, baseline, norm or mean, and counted; too many of them end the run."""

import math

import pytest
import torch

from cases import often
from heedful import (
    A2CConfig,
    BestOfNConfig,
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    Reward,
    RewardError,
    ScoresConfig,
    WinRateConfig,
    evaluate_best_of_n,
    evaluate_scores,
    evaluate_win_rate,
    train_grpo,
    train_online_dpo,
    train_ppo,
)
from heedful.algorithms.online.evaluation import sample_rows
from heedful.algorithms.online.rollout import rollout
from heedful.models import load_causal_lm
from heedful.rewards import Ensemble
from jsonl import read_metrics

RUNS = {
    "PPO": (PPOConfig, {}, train_ppo),
    "PPO in minibatches": (PPOConfig, {"minibatch_size": 4, "ppo_epochs": 2, "approx_kl_limit": 100.0}, train_ppo),
    "PPO with a critic of its own": (PPOConfig, {"critic": "separate"}, train_ppo),
    "A2C per response": (A2CConfig, {"importance_level": "sequence"}, train_ppo),
    "REINFORCE++": (PPOConfig, {"advantage": "reinforce++"}, train_ppo),
    "GRPO": (GRPOConfig, {}, train_grpo),
    "RLOO": (GRPOConfig, {"advantage": "rloo", "importance_level": "sequence", "kl_in": "reward"}, train_grpo),
    "REINFORCE": (GRPOConfig, {"advantage": "reinforce", "kl_in": "reward"}, train_grpo),
    "online DPO": (OnlineDPOConfig, {}, train_online_dpo),
}


def varied(completion):
    return float(sum(map(ord, completion)) % 101) / 10


def without(rows, size=8):
    """A reward that is not a number at these rows of each batch of a step."""

    def reward(completions):
        scores = [varied(c if isinstance(c, str) else c[0]["content"]) for c in completions]
        return [math.nan if len(scores) == size and row in rows else score for row, score in enumerate(scores)]

    return reward


def lines(run):
    return read_metrics(run, having="reward/score_mean")


OFTEN = ("PPO", "PPO with a critic of its own", "GRPO", "online DPO")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNS]
)
def test_a_run_goes_on_without_them(config, capsys, name):
    """Its numbers stay numbers, the failure is told once, and every step counts it."""
    kind, changes, train = RUNS[name]
    settings = config(kind, max_failed_rewards=0.2, learning_rate=1e-3, **changes)
    train(settings, rewards=[without({2})])
    said = capsys.readouterr().err
    assert [line["reward/failed_frac"] for line in lines(settings.output)] == [1 / 8, 1 / 8]
    assert said.count("1 of 8 responses have no score and are left out; reward reward returned nan (float)") == 1
    for line in lines(settings.output):
        assert all(math.isfinite(value) for value in line.values()), line
        assert line.get("policy/update_frac", 1) == 1
    weights = load_causal_lm(str(settings.output / "final")).state_dict()
    before = load_causal_lm(settings.model).state_dict()
    assert all(bool(w.isfinite().all()) for w in weights.values())
    assert any(not torch.equal(weights[key], before[key]) for key in weights)


@pytest.mark.parametrize("kind", often([PPOConfig, GRPOConfig], [GRPOConfig]))
def test_where_nothing_fails_nothing_changes(config, tmp_path, kind):
    """The same weights bit for bit, whatever may fail, and no metric of failures."""
    train = next(train for of, _, train in RUNS.values() if of is kind)
    left = []
    for most in (0.0, 0.5):
        settings = config(kind, max_failed_rewards=most, output=tmp_path / str(most), learning_rate=1e-3)
        train(settings, rewards=[without(())])
        left.append((settings.output / "final" / "model.safetensors").read_bytes())
        assert all("reward/failed_frac" not in line for line in lines(settings.output))
    assert left[0] == left[1]


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_more_than_may_fail_end_the_run(config, kind):
    """What was learned before is kept."""
    train = next(train for of, _, train in RUNS.values() if of is kind)
    calls = []

    def fails_later(completions):
        calls.append(0)
        rows = {1, 4} if len(completions) == 8 and len(calls) > 3 else set()
        return without(rows)(completions)

    settings = config(kind, max_failed_rewards=0.2, eval_fraction=0.0, steps=5)
    with pytest.raises(
        RewardError, match=r"2 of 8 responses have no score, more than --max-failed-rewards 0\.2 allows"
    ):
        train(settings, rewards=[fails_later])
    assert len(lines(settings.output)) == 2
    assert list((settings.output / "checkpoints").iterdir()) != []


FAILS_IN_STEPS = """
broken = []

def raises(completions, **columns):
    broken.extend(completions[4:])
    if broken:
        raise ValueError("坏了")
    return [0.5] * len(completions)

def falls_short(completions, **columns):
    return [0.5] * min(4, len(completions))
"""
"""Rewards that score the few responses on which every reward is tried, but not those of a step."""


@pytest.mark.parametrize(
    ("name", "said", "command"),
    [
        ("raises", "raised ValueError: 坏了", ("ppo", "--minibatch-size", "8")),
        ("falls_short", "returned 4 scores", ("grpo", "--samples-per-prompt", "2", "--minibatch-size", "8")),
    ],
    ids=["ppo, raises", "grpo, falls short"],
)
def test_a_reward_that_fails_in_the_first_step(heedful, tiny, written, tmp_path, command, name, said):
    """Exit status 4, as in later steps, and the folder is as it was: nothing, or the run that would have been replaced."""
    reward = f"python:{written('评分.py', FAILS_IN_STEPS)}:{name}"
    data = written("题目.jsonl", [{"prompt": f"第{i}问"} for i in range(8)])
    flags = {"model": tiny(), "data": data, "output": tmp_path / "运行", "rollout_batch_size": 8, "steps": 1}
    flags |= {"max_new_tokens": 4, "eval_fraction": 0, "dtype": "float32"}
    outcome = heedful(*command, **flags, rewards=reward)
    assert outcome.status == 4, outcome.err
    assert said in outcome.message
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "运行").exists()
    if name == "raises":
        assert heedful(*command, **flags, rewards="rule:digits").status == 0
        before = (tmp_path / "运行" / "summary.json").read_bytes()
        assert heedful(*command, "--overwrite", **flags, rewards=reward).status == 4
        assert (tmp_path / "运行" / "summary.json").read_bytes() == before


def failing_learner(config, make_learner, rows, kind=PPOConfig, **changes):
    """A learner of four prompts, with a reward that fails on these rows."""
    settings = config(kind, whiten_advantages=False, kl_coef=0.0, **changes)
    size = 4 * settings.samples_per_prompt
    rewards = Ensemble((Reward("r", without(rows, size)),), max_failed=0.9)
    torch.manual_seed(0)  # of the value head
    return make_learner(settings, rewards=rewards)


def learned_from(config, make_learner, experience_of, rows, kind=PPOConfig, **changes):
    """Its experience."""
    return experience_of(failing_learner(config, make_learner, rows, kind, **changes))


@pytest.mark.parametrize(
    "changes", [{}, {"critic": "separate"}, {"importance_level": "sequence"}, {"advantage": "reinforce++"}], ids=str
)
def test_the_others_are_as_if_it_had_not_been_sampled(config, make_learner, experience_of, changes):
    """Each response by itself: all rows but those that failed, and their number in every mean."""
    whole = learned_from(config, make_learner, experience_of, (), **changes)
    part = learned_from(config, make_learner, experience_of, (2, 7), **changes)
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    torch.testing.assert_close(part.advantages, whole.advantages[kept])
    assert torch.equal(part.batch.ids, whole.batch.ids[kept])
    assert part.scores == [whole.scores[row] for row in kept]
    assert [c.response for c in part.completions] == [whole.completions[row].response for row in kept]
    assert part.metrics["reward/score_mean"] == pytest.approx(sum(part.scores) / 6)
    assert part.metrics["reward/failed_frac"] == 2 / 8


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_prompt_with_a_failed_response_is_left_out(config, make_learner, experience_of, advantage):
    """Four prompts of four: the others are as if it had not been sampled, and both shares are counted."""
    beside = {"grpo": {}, "dr_grpo": {}, "rloo": {"importance_level": "sequence", "kl_in": "reward"}}[advantage]
    whole = learned_from(config, make_learner, experience_of, (), GRPOConfig, advantage=advantage, **beside)
    part = learned_from(config, make_learner, experience_of, (1, 8, 11), GRPOConfig, advantage=advantage, **beside)
    kept = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])
    torch.testing.assert_close(part.advantages, whole.advantages[kept])
    assert torch.equal(part.batch.ids, whole.batch.ids[kept])
    assert part.scores == [whole.scores[row] for row in kept]
    assert part.metrics["reward/failed_frac"] == 3 / 16
    assert part.metrics["reward/dropped_frac"] == 8 / 16
    assert "reward/dropped_frac" not in whole.metrics
    learner = failing_learner(config, make_learner, (1, 8, 11), GRPOConfig, advantage=advantage, **beside)
    scored = rollout(learner, [prompt for prompt in learner.prompts.prompts for _ in range(4)])
    shown = sample_rows(scored, part.kl, learner.config)
    assert [row["score"] for row in shown] == [scored.scores[0], scored.scores[4]]


def test_a_failed_response_costs_no_other_where_the_batch_is_compared(config, make_learner, experience_of):
    beside = {"advantage": "reinforce", "kl_in": "reward"}
    part = learned_from(config, make_learner, experience_of, (1, 8, 11), GRPOConfig, **beside)
    scores = torch.tensor(part.scores)
    assert len(scores) == 13
    torch.testing.assert_close(part.advantages[:, 0], scores - scores.mean())
    assert "reward/dropped_frac" not in part.metrics


def test_with_no_whole_prompt_left_the_run_stops(config, make_learner, experience_of):
    with pytest.raises(RewardError, match="4 of 16 responses have no score, and no complete group is left"):
        learned_from(config, make_learner, experience_of, (0, 5, 10, 15), GRPOConfig)


def test_evaluations_leave_them_out_and_count_them(config):
    """The reward fails on the first held-out prompt."""
    sizes = []

    def fails_on_the_first(completions):
        sizes.append(len(completions))
        scores = [varied(c) for c in completions]
        return scores if len(sizes) == 1 or len(scores) == 8 else [math.nan, *scores[1:]]  # the first call is the trial

    settings = config(max_failed_rewards=0.6, steps=1, eval_fraction=0.5)
    summary = train_ppo(settings, rewards=[fails_on_the_first])
    first = summary["first_evaluation"]
    assert first["eval/failed_frac"] == 1 / sizes[1]
    assert sizes[1] >= 3
    assert all(math.isfinite(value) for value in first.values())


@pytest.fixture
def measured(tiny, prompts):
    """Settings of a measurement on ten prompts."""
    return {"model": tiny("gpt2"), "data": prompts, "max_new_tokens": 8, "dtype": "float32", "device": "cpu"}


def nan_at(*rows):
    def reward(completions):
        return [math.nan if i in rows else varied(c) for i, c in enumerate(completions)]

    return reward


def test_measurements_leave_them_out_and_count_them(measured):
    """Scores one by one, comparisons if either fails, choices if one of their responses fails."""
    plain = evaluate_scores(ScoresConfig(**measured, num_samples=10), rewards=[nan_at()])
    scores = [row["score"] for row in plain["samples"]]
    part = evaluate_scores(ScoresConfig(**measured, num_samples=10), rewards=[nan_at(4)])
    assert part["score_mean"] == pytest.approx((sum(scores) - scores[4]) / 9)
    assert [row["score"] for row in part["samples"]] == scores[:4] + scores[5:]
    assert (part["failed"], plain.get("failed")) == (1, None)
    assert "1 of 10 responses have no score" in part["first_failure"]
    wins = evaluate_win_rate(WinRateConfig(**measured, baseline=measured["model"]), rewards=[nan_at(4)])
    assert (wins["failed"], wins["win_rate"], wins["ties"]) == (1, 0.5, 9)
    assert wins["score_mean"] == wins["baseline_score_mean"] == pytest.approx(part["score_mean"])
    best = evaluate_best_of_n(BestOfNConfig(**measured, n=2), rewards=[nan_at(3)], judge=[nan_at(8, 9)])
    assert best["failed"] == 2
    assert all(math.isfinite(row["score"]) for row in best["best_of"])
    with pytest.raises(RewardError, match=r"2 of 10 responses have no score, more than --max-failed-rewards 0\.1"):
        evaluate_scores(ScoresConfig(**measured), rewards=[nan_at(4, 5)])


HANGS = """
import os, time
def length(completions):
    if {most} <= len(completions) and not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        os.fork()
        time.sleep(1000)
    return [float(len(c)) for c in completions]
"""


def test_a_function_that_hangs_once_costs_a_run_a_timeout(heedful, tiny, prompts, tmp_path):
    """By the command: the first batch of a step is stopped after three seconds and scored in parts; the run is complete."""
    path = tmp_path / "奖励.py"
    path.write_text(HANGS.format(flag=str(tmp_path / "hung"), most=8), encoding="utf-8")
    flags = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "eval_fraction": 0, "steps": 2}
    flags |= {"rollout_batch_size": 8, "minibatch_size": 8, "max_new_tokens": 4, "sample_every": 0, "dtype": "float32"}
    done = heedful("ppo", **flags, rewards=f"python:{path}:length", device="cpu", reward_timeout=3)
    assert done.status == 0
    assert "did not end within 3 s and was stopped" in done.err
    assert "called again with fewer responses at a time, it scored all of them" in done.err
    assert len(lines(tmp_path / "run")) == 2
