"""What training makes of scores: normalisation, clipping, dense scores, several rewards.

The functions themselves are tested in tests/core/test_score_norm.py.
"""

from dataclasses import replace

import pytest
import torch

from cases import often
from heedful import ConfigError, GRPOConfig, PPOConfig, Reward, RewardError, train_grpo, train_ppo
from heedful.algorithms.online.metrics import score_metrics
from heedful.algorithms.online.rollout import SampledBatch, ScoredBatch
from heedful.core import ScoreNorm
from heedful.models import load_causal_lm
from heedful.rewards.scoring import Scores
from jsonl import read_metrics

SIZES = {"rollout_batch_size": 8, "samples_per_prompt": 4, "minibatch_size": 8, "max_new_tokens": 8}


@pytest.fixture
def settings(config, tmp_path):
    """``settings(PPOConfig, output="名", ...)``: two short steps on a tiny model."""

    def make(config_class, *, output="run", **changes):
        return config(config_class, output=tmp_path / output, **({"learning_rate": 1e-3} | SIZES | changes))

    return make


def lines(config):
    return read_metrics(config.output, having="reward/score_mean")


def weights(config):
    return load_causal_lm(str(config.output / "final")).state_dict()


def differ(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a)


def letters(completions, **_):
    return [float(sum(x.isalpha() for x in c)) for c in completions]


# Clipping -------------------------------------------------------------------------------------------------------------


def test_metrics_of_clipping(settings):
    def metrics(scores, norm, clip):
        nothing = torch.zeros(len(scores))
        given = Scores(scores, None, {"one": 0.0})
        drawn = SampledBatch(None, given, 0.0, 0)
        scored = ScoredBatch(None, given, norm, nothing, drawn, 0.0)
        return score_metrics(scored, settings(PPOConfig, score_clip=clip, kl_coef=0.0))

    assert metrics([-3.0, -1.0, 0.5, 2.0], ScoreNorm(), 1.0) == {"reward/clip_frac": 2 / 4}
    assert metrics([1.0, 2.0, 9.0], ScoreNorm(3.0, 2.0), 1.0) == {"reward/clip_frac": 1 / 3}
    assert metrics([9.0], ScoreNorm(), None) == {}


@pytest.mark.parametrize(
    ("config_class", "train"),
    [(PPOConfig, train_ppo), pytest.param(GRPOConfig, train_grpo, marks=pytest.mark.exhaustive)],
)
def test_clipping_in_training_is_counted(settings, config_class, train):
    """Every score lies above the limit, so that is what each becomes; without the flag nothing is clipped or counted."""
    clipped, plain = settings(config_class, score_clip=0.5), settings(config_class, output="plain")
    for config in (clipped, plain):
        train(config, rewards=[lambda completions, **_: [1.0 + len(c) for c in completions]])
    assert [line["reward/clip_frac"] for line in lines(clipped)] == [1.0, 1.0]
    assert [line["reward/shaped_mean"] for line in lines(clipped)] == [0.5, 0.5]
    assert lines(clipped)[0]["reward/score_mean"] == lines(plain)[0]["reward/score_mean"] > 1
    assert all("reward/clip_frac" not in line for line in lines(plain))
    assert differ(weights(clipped), weights(plain))


# Dense scores ---------------------------------------------------------------------------------------------------------


def early(completion_ids, **_):
    """A point for each even token."""
    return [[float(token % 2 == 0) for token in ids] for ids in completion_ids]


def early_summed(completion_ids, **_):
    return [float(sum(row)) for row in early(completion_ids)]


@pytest.mark.exhaustive
def test_ppo_learns_from_the_places_of_a_dense_reward(settings):
    """The same totals and metrics of scores in the first step, other credit, so other weights; GRPO has no use for places."""
    runs = {}
    for name, reward in (("dense", early), ("summed", early_summed)):
        for config_class, train in ((PPOConfig, train_ppo), (GRPOConfig, train_grpo)):
            config = settings(config_class, output=f"{name}-{config_class.__name__}", missing_eos_penalty=0.5)
            train(config, rewards=[reward])
            runs[name, config_class] = config
    for config_class in (PPOConfig, GRPOConfig):
        one, other = (lines(runs[name, config_class])[0] for name in ("dense", "summed"))
        for metric in ("reward/score_mean", "reward/score_std", "reward/shaped_mean"):
            assert one[metric] == other[metric]
    assert differ(weights(runs["dense", PPOConfig]), weights(runs["summed", PPOConfig]))
    assert not differ(weights(runs["dense", GRPOConfig]), weights(runs["summed", GRPOConfig]))


def test_a_dense_reward_with_a_scalar_is_normalised_as_a_whole(settings, length):
    config = settings(PPOConfig, score_norm_samples=16, steps=1)
    norm = train_ppo(config, rewards=[early, length])["score_norm"]
    (line,) = lines(config)
    assert line["reward/score_mean"] == pytest.approx(line["reward/early"] + line["reward/length"])
    assert line["reward/shaped_mean"] == pytest.approx(
        (line["reward/score_mean"] - norm["mean"]) / norm["std"], abs=1e-5
    )


def test_a_dense_reward_of_the_wrong_length_stops_before_anything_is_written(settings):
    config = settings(PPOConfig)
    with pytest.raises(RewardError, match="a list with one number for each of completion_ids"):
        train_ppo(config, rewards=[lambda completion_ids: [[0.0] * (len(ids) + 1) for ids in completion_ids]])
    assert not config.output.exists()


# Several rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "train"),
    [(PPOConfig, train_ppo), pytest.param(GRPOConfig, train_grpo, marks=pytest.mark.exhaustive)],
)
def test_weights_and_combination_reach_training(settings, length, config_class, train):
    """Means of the rewards are their own, the score is the combined one, and what is learned differs."""
    plain = settings(config_class, output="plain", steps=1)
    weighted = replace(plain, output=plain.output.with_name("weighted"), reward_weights=(2.0, -1.0))
    smallest = replace(plain, output=plain.output.with_name("min"), reward_combine="min")
    for config in (plain, weighted, smallest):
        train(config, rewards=[length, letters])
    one, two, three = (lines(config)[0] for config in (plain, weighted, smallest))
    assert one["reward/length"] == two["reward/length"] == three["reward/length"] > one["reward/letters"] > 0
    assert one["reward/score_mean"] == pytest.approx(one["reward/length"] + one["reward/letters"])
    assert two["reward/score_mean"] == pytest.approx(2 * one["reward/length"] - one["reward/letters"])
    assert three["reward/score_mean"] == pytest.approx(one["reward/letters"])
    assert differ(weights(plain), weights(weighted))
    assert differ(weights(plain), weights(smallest))


def test_strings_and_functions_keep_the_order_that_weights_have(settings, length):
    config = settings(PPOConfig, steps=1, rewards=("rule:digits",), reward_weights=(0.0, 1.0, 0.0))
    train_ppo(config, rewards=[length, "rule:repetition:1"])
    (line,) = lines(config)
    assert line["reward/score_mean"] == line["reward/length"]
    saved = (config.output / "config.yaml").read_text(encoding="utf-8")
    assert "rewards:\n- rule:digits\n- rule:repetition:1\n" in saved


def test_weights_that_do_not_fit_are_told_before_anything_is_loaded(settings, length):
    config = settings(PPOConfig, model="没有", reward_weights=(1.0,))
    with pytest.raises(ConfigError, match="reward_weights has 1 number for 2 rewards"):
        train_ppo(config, rewards=[length, Reward("l", letters)])


# A step in which nothing is learned -----------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", often(["grpo", "dr_grpo", "rloo"], ["grpo", "rloo"]))
def test_steps_of_ties_are_told_once(settings, capfd, advantage):
    """With a score that rounding could tell apart (0.1 is no binary number), three to a group."""
    config = settings(
        GRPOConfig,
        advantage=advantage,
        kl_coef=0.0,
        samples_per_prompt=3,
        rollout_batch_size=9,
        minibatch_size=9,
        steps=4,
    )
    train_grpo(config, rewards=[lambda completions, **_: [0.1] * len(completions)])
    said = capfd.readouterr().err
    assert said.count("all responses to each prompt scored equally") == 1
    assert "step 3: scores-tied: all responses" in said
    assert "--samples-per-prompt or --temperature" in said
    assert not differ(weights(config), load_causal_lm(config.model).state_dict())


def test_no_ties_nothing_told(settings, capfd):
    train_grpo(settings(GRPOConfig), rewards=[lambda prompts, **_: [float(i % 4 == 0) for i in range(len(prompts))]])
    assert "scored equally" not in capfd.readouterr().err
