"""What training makes of scores: normalisation, clipping, dense scores, several rewards, ties."""

import pytest

from cases import tuples_often
from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, Reward, RewardError, train_ppo
from heedful.core import ScoreNorm
from heedful.models import load_causal_lm
from jsonl import read_metrics
from trainers import TRAIN
from trees import differing

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


def letters(completions, **_):
    return [float(sum(x.isalpha() for x in c)) for c in completions]


def test_clipping_is_counted_and_reaches_training(config, make_learner, experience_of):
    """Normalised, the scores are -1.5, -0.5, 3 and 0."""
    planned = [Reward("planned", lambda completions: [0.0, 2.0, 9.0, 3.0])]
    for clip, counted in ((1.0, {"reward/clip_frac": 2 / 4}), (None, {})):
        settings = config(
            score_clip=clip, kl_coef=0.0, gae_lambda=1.0, samples_per_prompt=1, rollout_batch_size=4, minibatch_size=4
        )
        found = experience_of(make_learner(settings, rewards=planned, score_norm=ScoreNorm(3.0, 2.0)))
        shaped = [-1.0, -0.5, 1.0, 0.0] if clip else [-1.5, -0.5, 3.0, 0.0]
        assert found.returns[:, 0].tolist() == pytest.approx(shaped, abs=1e-6)
        assert found.metrics["reward/shaped_mean"] == pytest.approx(sum(shaped) / 4)
        assert {name: value for name, value in found.metrics.items() if "clip" in name} == counted


def early(completion_ids, **_):
    """A point for each even token."""
    return [[float(token % 2 == 0) for token in ids] for ids in completion_ids]


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


def test_weights_and_combination_reach_training(settings, length):
    """Means of the rewards are their own, the score is the combined one, in the order in which strings and functions are
    given. They are written down, strings so that the file of settings repeats the run."""
    common = {"steps": 1, "rewards": ("rule:digits",), "eval_fraction": 0.0}
    weighted = settings(PPOConfig, reward_weights=(0.0, 2.0, -1.0, 0.0), **common)
    smallest = settings(PPOConfig, output="min", reward_combine="min", **common)
    rewards = [length, letters, "rule:digits"]
    summary, _ = (train_ppo(config, rewards=rewards) for config in (weighted, smallest))
    one, two = (lines(config)[0] for config in (weighted, smallest))
    assert one["reward/length"] == two["reward/length"] > one["reward/letters"] > 0
    assert one["reward/score_mean"] == pytest.approx(2 * one["reward/length"] - one["reward/letters"])
    assert two["reward/score_mean"] == pytest.approx(two["reward/rule:digits"])
    assert two["reward/rule:digits"] < two["reward/letters"]
    assert differing(weights(weighted), weights(smallest))
    assert summary["rewards"] == ["rule:digits", "length", "letters", "rule:digits#2"]
    saved = (weighted.output / "config.yaml").read_text(encoding="utf-8")
    assert "rewards:\n- rule:digits\n- rule:digits\n" in saved


def test_weights_that_do_not_fit_are_told_before_anything_is_loaded(settings, length):
    config = settings(PPOConfig, model="没有", reward_weights=(1.0,))
    with pytest.raises(ConfigError, match="reward_weights has 1 number for 2 rewards"):
        train_ppo(config, rewards=[length, Reward("l", letters)])


COMPARE = [(GRPOConfig, {"kl_coef": 0.0, "advantage": advantage}) for advantage in ("grpo", "dr_grpo", "rloo")]
COMPARE += [(OnlineDPOConfig, {})]


@pytest.mark.parametrize(("kind", "changes"), tuples_often(COMPARE, [COMPARE[0], COMPARE[-1]]))
def test_steps_of_ties_teach_nothing_and_are_told_once(settings, capfd, kind, changes):
    """With a score that rounding could tell apart (0.1 is no binary number), three to a group."""
    sizes = {"samples_per_prompt": 3, "rollout_batch_size": 9, "minibatch_size": 9, "steps": 4, "eval_fraction": 0.0}
    config = settings(kind, **changes, **sizes)
    TRAIN[kind](config, rewards=[lambda completions, **_: [0.1] * len(completions)])
    assert [line["reward/tied_frac"] for line in lines(config)] == [1.0] * 4
    said = capfd.readouterr().err
    assert said.count("all responses to each prompt scored equally") == 1
    assert "step 3: scores-tied: all responses" in said
    assert "--samples-per-prompt or --temperature" in said
    assert differing(weights(config), load_causal_lm(config.model).state_dict()) == []
