"""What ends an online run or is said about it: KL beyond a limit, alarms."""

from dataclasses import replace

import pytest

from cases import often
from heedful import (
    ConfigError,
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    TrainingError,
    make_tiny_model,
    train_ppo,
)
from heedful.algorithms.online.loop import alarms_of
from heedful.training.thresholds import STILL_STEPS
from jsonl import read_jsonl, read_metrics
from trainers import ONLINE


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A policy and a reference that are far from each other."""
    root = tmp_path_factory.mktemp("远")
    for name, seed in (("policy", 0), ("reference", 1)):
        make_tiny_model(
            "gpt2", root / name, hidden_size=16, num_layers=1, max_length=64, initializer_range=0.5, seed=seed
        )
    return {name: str(root / name) for name in ("policy", "reference")}


@pytest.mark.parametrize("kind", often(ONLINE, [PPOConfig]))
def test_a_policy_that_left_its_reference_behind_ends_the_run(config, apart, length, kind):
    """After the third step in a row, which is logged; with status 4, and what was learned is kept."""
    far = {"model": apart["policy"], "reference": apart["reference"], "eval_fraction": 0.0, "steps": 4}
    settings = config(kind, **far, max_kl=1.0, learning_rate=1e-6)
    said = r"reference/kl, .* at step 3, has been above --max-kl 1 in 3 steps"
    with pytest.raises(TrainingError, match=said) as caught:
        ONLINE[kind](settings, rewards=[length])
    assert caught.value.status == 4
    lines = read_metrics(settings.output)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert min(line["reference/kl"] for line in lines) > 1
    assert (settings.output / "checkpoints" / "step-000003").is_dir()
    above = max(line["reference/kl"] for line in lines) * 2
    quiet = config(kind, **far, max_kl=above, learning_rate=1e-6, output=settings.output.with_name("quiet"))
    assert ONLINE[kind](quiet, rewards=[length])["steps"] == 4


def test_a_limit_of_what_is_not_measured_is_refused(config):
    with pytest.raises(ConfigError, match=r"--max-kl 5\.0 limits the KL to the reference, which is not measured"):
        config(kl_coef=0.0, max_kl=5.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [GRPOConfig, OnlineDPOConfig])
def test_a_run_whose_policy_has_hardly_moved_says_which_setting_to_raise(config, length, kind, capsys):
    quiet = config(kind, eval_fraction=0.0, steps=STILL_STEPS, learning_rate=1e-9, max_new_tokens=4)
    ONLINE[kind](quiet, rewards=[length])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the policy has hardly moved, so it has learned next to nothing") == 1
    assert "Raise --learning-rate (it was 1e-09; try 1e-08) or --steps" in said


def tied(completions):
    return [1.0] * len(completions)


def test_stop_on_ends_a_run_with_a_checkpoint_from_which_it_resumes(config, capsys):
    """It ends again after the next step for as long as its alarm holds; without the setting it comes to its end."""
    fixed = {"steps": 5, "eval_fraction": 0.0, "response_length": "fixed", "max_new_tokens": 4}
    settings = config(GRPOConfig, **fixed, stop_on=("scores-tied",))
    for step in (3, 4):
        with pytest.raises(TrainingError, match=r"scores-tied: all .*docs/alarms.md#scores-tied") as caught:
            train_ppo(settings, rewards=[tied])
        assert caught.value.status == 4
        assert read_metrics(settings.output)[-1]["step"] == step
        said = " ".join(capsys.readouterr().err.split())
        assert f"stopped by TrainingError after step {step} of 5; the same command resumes from" in said
    done = train_ppo(replace(settings, stop_on=()), rewards=[tied])
    assert done["steps"] == 5
    (line,) = read_jsonl(settings.output / "alarms.jsonl")
    assert (line["step"], line["alarm"], line["evidence"]) == (3, "scores-tied", {"reward/tied_frac": 1.0})
    assert line["message"].endswith("or use a reward that tells responses apart")
    assert done["alarms"] == [{"step": 3, "alarm": "scores-tied"}]


def test_stop_on_ends_a_run_after_an_evaluation(config):
    """A judge that falls with every evaluation, while the reward rises with every call, is seen there."""
    calls = {"reward": 0, "judge": 0}

    def rises(completions):
        calls["reward"] += 1
        return [calls["reward"] + 0.1 * len(one) for one in completions]

    def falls(completions):
        calls["judge"] += 1
        return [-calls["judge"] - 0.1 * len(one) for one in completions]

    settings = config(steps=12, eval_every=1, selection_rewards=(falls,), stop_on=("judge-falling",))
    with pytest.raises(TrainingError, match="judge-falling: eval/judge_mean fell from"):
        train_ppo(settings, rewards=[rises])
    assert read_jsonl(settings.output / "alarms.jsonl")[-1]["alarm"] == "judge-falling"
    assert max(line["step"] for line in read_metrics(settings.output)) == 3, "not a step later"


def test_alarms_compare_with_the_settings(config):
    servers = {"sampler": ("vllm:http://127.0.0.1:8000",), "importance": "token-truncate"}
    found = alarms_of(config(async_steps=1, top_p=0.5, max_kl=3.0, **servers)).history.limits
    assert (found.async_steps, found.filters_on_servers, found.max_kl) == (1, True, 3.0)
    assert not alarms_of(config(**servers)).history.limits.filters_on_servers
    assert alarms_of(config(response_length="fixed")).history.limits.max_new_tokens is None


def test_a_run_that_was_killed_has_every_alarm_once(config, killed, tmp_path, capsys):
    """Also one that spoke after the checkpoint from which the run continues: its line is forgotten and written again."""
    whole = config(GRPOConfig, steps=5, eval_fraction=0.0, save_every=2, max_new_tokens=4)
    train_ppo(whole, rewards=[tied])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("of the responses were cut at --max-new-tokens") == 1
    cut = replace(whole, output=tmp_path / "cut")
    killed("step.learned:kill@4", lambda: train_ppo(cut, rewards=[tied]))
    before = read_jsonl(cut.output / "alarms.jsonl")
    assert [line["alarm"] for line in before] == ["responses-cut", "scores-tied"]
    assert [line["step"] for line in before] == [1, 3], "the second is after the checkpoint"
    train_ppo(cut, rewards=[tied])
    assert read_jsonl(cut.output / "alarms.jsonl") == read_jsonl(whole.output / "alarms.jsonl") == before
