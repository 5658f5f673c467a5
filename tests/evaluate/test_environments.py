"""Policies measured in environments: by `heedful evaluate`, and with an engine in Python."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
import worlds
from heedful import ConfigError, DataError, KLConfig, LocalEngine, Policy, RewardError, ScoresConfig, WinRateConfig
from heedful.evaluate.policies import evaluate_kl, evaluate_scores, evaluate_win_rate
from jsonl import write_jsonl

WORLDS = Path(worlds.__file__)
TALK, DICE, ONCE = (f"python:{WORLDS}:{name}" for name in ("Talk", "Dice", "Once"))
ASKED = [{"prompt": [{"role": "user", "content": f"你好 {i}"}], "goal": i % 3 + 1} for i in range(12)]
PAID = {0: 10.0, 1: 10.5, 2: 11.5, 3: 13.0}
"""What Talk pays for so many turns that were not cut."""


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """A policy that ends its turn at every second token or so: whatever it reads, that token is the likeliest."""
    folder = tmp_path_factory.mktemp("短") / "policy"
    heedful.make_tiny_model("gpt2", folder, hidden_size=32, num_layers=1, max_length=256)
    policy = Policy.from_pretrained(str(folder), device="cpu", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(500 * model.transformer.wte.weight[end])
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def settings(brief, tmp_path):
    write_jsonl(tmp_path / "问.jsonl", ASKED)
    measured = {"model": brief, "data": str(tmp_path / "问.jsonl"), "max_new_tokens": 120, "num_samples": 12}
    return measured | {"micro_batch_size": 5, "device": "cpu", "dtype": "float32"}


def turns(completions, **_):
    """Number of the policy's turns."""
    return [float(sum(turn["role"] == "assistant" for turn in said)) for said in completions]


def test_an_environment_pays_in_a_measurement(settings):
    """Episodes end when the other one says so; its rewards are added to those of functions, which read all turns."""
    alone = evaluate_scores(ScoresConfig(**settings, environment=(TALK,)))
    both = evaluate_scores(ScoresConfig(**settings, environment=(TALK,)), rewards=[turns])
    assert alone["prompts"] == 12
    for row, asked, counted in zip(alone["samples"], ASKED, both["samples"], strict=True):
        said = row["response"].count("assistant: ") or 1
        assert row["score"] in (PAID[said], PAID[said - 1])
        assert counted["score"] == row["score"] + said
        assert said <= asked["goal"]
    assert {row["response"].count("user: 问 ") for row in alone["samples"]} == {0, 1, 2}
    two = evaluate_scores(ScoresConfig(**settings, environment=(TALK,), max_turns=2), rewards=[turns])
    assert max(row["response"].count("assistant: ") for row in two["samples"]) == 2


def test_two_policies_play_the_same_games(settings):
    """A policy ties with itself, although the dice are thrown anew in each game."""
    config = WinRateConfig(**settings, baseline=settings["model"], environment=(DICE,), max_turns=2)
    result = evaluate_win_rate(config)
    assert (result["win_rate"], result["ties"]) == (0.5, 12)
    assert len({row["score"] for row in result["samples"]}) == 12
    played = KLConfig(**settings, reference=settings["model"], environment=(DICE,), max_turns=2)
    assert evaluate_kl(played)["kl"] == 0.0


def test_an_engine_plays_episodes(brief):
    policy = Policy.from_pretrained(brief, device="cpu", dtype="float32")
    engine = LocalEngine(policy, max_new_tokens=120, environment=TALK, max_turns=2, micro_batch_size=5)
    batch = engine.generate(ASKED)
    engine.close()
    episodes = [one.episode for one in batch.completions]
    assert {one.ended for one in episodes} >= {"environment", "turns"}
    torch.testing.assert_close(heedful.logprobs(policy, batch), batch.logprobs, rtol=1e-4, atol=1e-5)
    assert batch.mask.sum(dim=1).tolist() == [one.ends[-1] for one in episodes]
    said = [float(sum(turn.role == "assistant" for turn in one.turns)) for one in episodes]
    assert heedful.score([turns], batch).tolist() == said
    with pytest.raises(DataError, match="prompt 0: the prompt is raw text, but an environment speaks in turns"):
        LocalEngine(policy, environment=[TALK], raw_prompts=True).generate(["你好"])


def test_what_does_not_go_together_is_refused(settings):
    with pytest.raises(ConfigError, match="--max-turns 3 is about an environment, and there is none"):
        ScoresConfig(**settings, max_turns=3)
    with pytest.raises(ConfigError, match="--response-length fixed does not go with --environment"):
        ScoresConfig(**settings, environment=(TALK,), response_length="fixed")
    with pytest.raises(RewardError, match="no reward applies"):
        evaluate_scores(ScoresConfig(**settings, environment=(ONCE,)))
