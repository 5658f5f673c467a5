"""Responses on which a reward failed: in no loss, baseline, norm or mean, and counted; too many of them end the run."""

import math

import pytest
import torch

import heedful
from cases import often
from folders import contents
from heedful import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig, Reward, RewardError, train_grpo, train_ppo
from heedful.models import load_causal_lm
from heedful.rewards import Ensemble
from jsonl import read_metrics
from trainers import TRAIN

RUNS = {
    "PPO": (PPOConfig, {}),
    "PPO in minibatches": (PPOConfig, {"minibatch_size": 4, "ppo_epochs": 2, "approx_kl_limit": 100.0}),
    "PPO with a critic of its own": (PPOConfig, {"critic": "separate"}),
    "A2C per response": (A2CConfig, {"importance_level": "sequence"}),
    "REINFORCE++": (PPOConfig, {"advantage": "reinforce++"}),
    "GRPO": (GRPOConfig, {}),
    "RLOO": (GRPOConfig, {"advantage": "rloo", "importance_level": "sequence", "kl_in": "reward"}),
    "REINFORCE": (GRPOConfig, {"advantage": "reinforce", "kl_in": "reward"}),
    "online DPO": (OnlineDPOConfig, {}),
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


@pytest.mark.parametrize("name", often(RUNS, ["PPO", "online DPO"]))
def test_a_run_goes_on_without_them(config, capsys, name):
    """Its numbers stay numbers, the failure is told once, and every step counts it."""
    kind, changes = RUNS[name]
    settings = config(kind, max_failed_rewards=0.2, learning_rate=1e-3, **changes)
    TRAIN[kind](settings, rewards=[without({2})])
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


def test_more_than_may_fail_end_the_run(config):
    """What was learned before is kept."""
    calls = []

    def fails_later(completions):
        calls.append(0)
        return without({1, 4} if len(calls) > 2 else ())(completions)

    settings = config(GRPOConfig, max_failed_rewards=0.2, eval_fraction=0.0, steps=5)
    with pytest.raises(
        RewardError, match=r"2 of 8 responses have no score, more than --max-failed-rewards 0\.2 allows"
    ):
        train_grpo(settings, rewards=[fails_later])
    assert len(lines(settings.output)) == 1
    assert [path.name for path in (settings.output / "checkpoints").iterdir()] == ["step-000001"]


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
"""Rewards that score the few responses of the trial and of the evaluation before the first step, but not those of a step."""


def test_a_reward_that_fails_in_the_first_step(heedful, tiny, written, tmp_path):
    """Exit status 4, as in later steps; there is what was there: nothing, or the run that would have been replaced."""
    code = written("评分.py", FAILS_IN_STEPS)
    data = written("题目.jsonl", [{"prompt": f"第{i}问"} for i in range(12)])
    flags = {"model": tiny(), "data": data, "output": tmp_path / "运行", "rollout_batch_size": 8, "steps": 1}
    flags |= {"minibatch_size": 8, "max_new_tokens": 4, "eval_fraction": 0.25, "dtype": "float32"}

    def fails(*words, reward, said):
        before = contents(tmp_path)
        outcome = heedful("ppo", *words, **flags, rewards=f"python:{code}:{reward}")
        assert outcome.status == 4, outcome.err
        assert said in outcome.message
        assert not any(word in outcome.err for word in ("Traceback", "resumes"))
        assert contents(tmp_path) == before

    fails(reward="falls_short", said="returned 4 scores")
    assert heedful("ppo", **flags, rewards="rule:digits").status == 0
    fails("--overwrite", reward="raises", said="raised ValueError: 坏了")


def learned_from(config, make_learner, experience_of, rows, kind=PPOConfig, **changes):
    """The experience of a learner of four prompts, with a reward that fails on these rows."""
    settings = config(kind, whiten_advantages=False, kl_coef=0.0, **changes)
    size = 4 * settings.samples_per_prompt
    rewards = Ensemble((Reward("r", without(rows, size)),), max_failed=0.9)
    torch.manual_seed(0)  # of the value head
    return experience_of(make_learner(settings, rewards=rewards))


ALONE = [{}, {"critic": "separate"}, {"importance_level": "sequence"}, {"advantage": "reinforce++"}]


@pytest.mark.parametrize("changes", often(ALONE, ALONE[:2]), ids=str)
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


@pytest.mark.parametrize("advantage", often(["grpo", "rloo"], ["grpo"]))
def test_a_prompt_with_a_failed_response_is_left_out(config, make_learner, experience_of, advantage):
    """Four prompts of four: the others are as if it had not been sampled, and both shares are counted."""
    beside = {} if advantage == "grpo" else {"importance_level": "sequence", "kl_in": "reward"}
    whole = learned_from(config, make_learner, experience_of, (), GRPOConfig, advantage=advantage, **beside)
    part = learned_from(config, make_learner, experience_of, (1, 8, 11), GRPOConfig, advantage=advantage, **beside)
    kept = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])
    torch.testing.assert_close(part.advantages, whole.advantages[kept])
    assert torch.equal(part.batch.ids, whole.batch.ids[kept])
    assert part.scores == [whole.scores[row] for row in kept]
    assert part.metrics["reward/failed_frac"] == 3 / 16
    assert part.metrics["reward/dropped_frac"] == 8 / 16
    assert "reward/dropped_frac" not in whole.metrics


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
    """The reward fails on the first held-out prompt, after its trial."""
    sizes = []

    def fails_on_the_first(completions):
        sizes.append(len(completions))
        return [math.nan if i == 0 and len(sizes) == 2 else varied(c) for i, c in enumerate(completions)]

    settings = config(max_failed_rewards=0.6, steps=1, eval_fraction=0.5)
    first = train_ppo(settings, rewards=[fails_on_the_first])["first_evaluation"]
    assert first["eval/failed_frac"] == 1 / sizes[1]
    assert sizes[1] >= 3
    assert all(math.isfinite(value) for value in first.values())


def test_measurements_leave_them_out_and_count_them(tiny, prompts):
    """Scores one by one, comparisons if either fails, choices if one of their responses fails."""

    def nan_at(*rows):
        return lambda completions: [math.nan if i in rows else varied(c) for i, c in enumerate(completions)]

    measured = {"model": tiny("gpt2"), "data": prompts, "max_new_tokens": 8, "dtype": "float32", "device": "cpu"}
    plain = heedful.evaluate_scores(heedful.ScoresConfig(**measured, num_samples=10), rewards=[nan_at()])
    scores = [row["score"] for row in plain["samples"]]
    part = heedful.evaluate_scores(heedful.ScoresConfig(**measured, num_samples=10), rewards=[nan_at(4)])
    assert part["score_mean"] == pytest.approx((sum(scores) - scores[4]) / 9)
    assert [row["score"] for row in part["samples"]] == scores[:4] + scores[5:]
    assert (part["failed"], plain.get("failed")) == (1, None)
    assert "1 of 10 responses have no score" in part["first_failure"]
    wins = heedful.evaluate_win_rate(heedful.WinRateConfig(**measured, baseline=measured["model"]), rewards=[nan_at(4)])
    assert (wins["failed"], wins["win_rate"], wins["ties"]) == (1, 0.5, 9)
    assert wins["score_mean"] == wins["baseline_score_mean"] == pytest.approx(part["score_mean"])
    best = heedful.evaluate_best_of_n(heedful.BestOfNConfig(**measured, n=2), rewards=[nan_at(3)], judge=[nan_at(8, 9)])
    assert best["failed"] == 2
    assert all(math.isfinite(row["score"]) for row in best["best_of"])
    with pytest.raises(RewardError, match=r"2 of 10 responses have no score, more than --max-failed-rewards 0\.1"):
        heedful.evaluate_scores(heedful.ScoresConfig(**measured), rewards=[nan_at(4, 5)])


HANGS = """
import os, time
def length(completions):
    if len(completions) >= 8 and not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        os.fork()
        time.sleep(1000)
    return [float(len(c)) for c in completions]
"""


def test_a_function_that_hangs_once_costs_a_run_a_timeout(heedful, tiny, prompts, tmp_path):
    """By the command: the first batch of a step is stopped after two seconds and scored in parts; the run is complete."""
    path = tmp_path / "奖励.py"
    path.write_text(HANGS.format(flag=str(tmp_path / "hung")), encoding="utf-8")
    flags = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "eval_fraction": 0, "steps": 1}
    flags |= {"rollout_batch_size": 8, "minibatch_size": 8, "max_new_tokens": 4, "sample_every": 0, "dtype": "float32"}
    done = heedful("ppo", **flags, rewards=f"python:{path}:length", device="cpu", reward_timeout=2)
    assert done.status == 0
    assert "did not end within 2 s and was stopped" in done.err
    assert "called again with fewer responses at a time, it scored all of them" in done.err
    assert len(lines(tmp_path / "run")) == 1
