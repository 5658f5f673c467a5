"""What a step says of itself: ratios, lengths, repetition, the critic's gradient, speed and memory, by hand."""

import math
import re
from pathlib import Path

import pytest
import torch

from cases import often
from heedful import GRPOConfig, OnlineDPOConfig, PPOConfig, core, train_grpo, train_online_dpo, train_ppo
from heedful.algorithms.online.advantages import Rewards
from heedful.algorithms.online.metrics import critic_metrics, rollout_metrics, with_effective_frac
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.values import backward_critic
from heedful.algorithms.ppo import backward_minibatch, learn
from heedful.training.metric_sums import MetricSums
from heedful.training.performance import online_performance
from jsonl import read_metrics

ANY = {"model": "m", "data": "d", "output": "o", "rewards": ("rule:digits",)}


def rewards_of(values, returns, mask):
    """Rewards with these Monte Carlo returns: the difference of one to the next."""
    after = torch.where(mask, returns, 0.0)[:, 1:]
    per_token = torch.where(mask, returns - torch.nn.functional.pad(after, (0, 1)), 0.0)
    return Rewards(per_token=per_token, per_response=per_token.sum(dim=1), values=values, response_mask=mask)


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_golden_explained_variance(scale):
    """Returns 1, 2, 3 and values 1, 1, 3: errors 0, 1, 0 of variance 2/9, a third of 2/3. The unit does not matter."""
    returns, values = scale * torch.tensor([[1.0, 2.0, 3.0, 99.0]]), scale * torch.tensor([[1.0, 1.0, 3.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    found = critic_metrics(rewards_of(values, returns, mask), PPOConfig(**ANY))
    assert found["value/mean"] == pytest.approx(scale * 5 / 3)
    assert found["value/explained_variance"] == pytest.approx(2 / 3, rel=1e-5)
    assert found["value/explained_variance_prompt"] == pytest.approx(0, abs=1e-5), "one value at all tokens"
    assert "value/explained_variance_first" not in found, "one response has one first return"


def test_golden_explained_variance_at_the_first_token():
    """First returns 1, 2, 3 and values 1, 1, 3: 2/3; later ones, which are worse, do not count."""
    returns, values = torch.tensor([[1.0, 9.0], [2.0, 5.0], [3.0, 7.0]]), torch.tensor([[1.0, 4], [1, 8], [3, 1]])
    found = critic_metrics(rewards_of(values, returns, torch.ones(3, 2, dtype=torch.bool)), PPOConfig(**ANY))
    assert found["value/explained_variance_first"] == pytest.approx(2 / 3, rel=1e-5)
    assert found["value/explained_variance"] < 0


def test_values_do_not_explain_themselves():
    """Targets of GAE at lambda 0 are the next value, which a value that drifts is near, though returns have none of it."""
    values, generator = (
        torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),
        torch.Generator().manual_seed(1),
    )
    rewards, mask = torch.zeros(64, 32), torch.ones(64, 32, dtype=torch.bool)
    rewards[:, -1] = torch.randn(64, generator=generator)
    smooth = values.cumsum(dim=1)  # each is near the next
    given = Rewards(per_token=rewards, per_response=rewards.sum(dim=1), values=smooth, response_mask=mask)
    _, targets = core.gae(rewards, smooth, mask, gae_lambda=0.0)
    assert core.explained_variance(smooth, targets, mask) > 0.8
    assert critic_metrics(given, PPOConfig(**ANY | {"gae_lambda": 0.0}))["value/explained_variance"] < 0


def test_lambdas_by_length_are_told():
    """Alpha 0.5: 0 for one and two tokens, 1/2 for four."""
    mask = torch.tensor([[True, False, False, False], [True, True, False, False], [True] * 4])
    zeros = torch.zeros(3, 4)
    given = Rewards(per_token=zeros, per_response=zeros.sum(dim=1), values=zeros, response_mask=mask)
    found = critic_metrics(given, PPOConfig(**ANY, gae_lambda_alpha=0.5))
    assert found["value/lambda_mean"] == pytest.approx(0.5 / 3)
    assert found["value/lambda_zero_frac"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("spread", "is_there"), [(0.0, False), (5e-7, False), (2e-6, True), (1e-3, True)])
def test_returns_that_differ_only_by_rounding_have_no_explained_variance(spread, is_there):
    """Half of the returns are that share above 0.1 and half of them below, so it is their deviation."""
    signs = torch.tensor([[1.0, -1.0] * 8], dtype=torch.float64)
    returns, mask = 0.1 * (1 + spread * signs), torch.ones(1, 16, dtype=torch.bool)
    found = critic_metrics(rewards_of(torch.zeros(1, 16, dtype=torch.float64), returns, mask), PPOConfig(**ANY))
    assert ("value/explained_variance" in found) is is_there


def test_a_loss_without_a_ratio_has_none_of_them():
    _, metrics = core.a2c_policy_loss(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
    assert metrics.keys() == {"loss/policy"}
    assert with_effective_frac({"loss/policy": 1.0}) == {"loss/policy": 1.0}


def test_a_ratio_too_large_for_a_square_is_still_a_number():
    """Ratio e^60: its square is none in float32. An update with one ratio per response is not left out for that."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    new = torch.tensor([[30.0, 30.0]])
    _, found = core.ppo_policy_loss(
        new, torch.zeros(1, 2), torch.ones(1, 2), mask, clip_range=0.2, importance_level="sequence"
    )
    assert all(bool(value.isfinite()) for value in found.values())


def test_maxima_are_kept_and_not_divided():
    sums = MetricSums()
    for ratio, loss in ((1.5, 1.0), (3.0, 2.0), (2.0, 3.0)):
        sums.add({"policy/ratio_max": torch.tensor(ratio), "loss/policy": torch.tensor(loss)})
    assert sums.means(3) == {"policy/ratio_max": 3.0, "loss/policy": 2.0}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_ratios_of_micro_batches_are_those_of_all_at_once(
    config, make_learner, experience_of, moved, gradient, level
):
    """By their definition."""
    learner = make_learner(config(PPOConfig, importance_level=level))
    experience = moved(experience_of(learner))
    found = with_effective_frac(gradient(learner, experience, micro_batch_size=3)[1])
    assert found["policy/clip_frac_low"] > 0
    low_and_high = found["policy/clip_frac_low"] + found["policy/clip_frac_high"]
    assert found["policy/clip_frac"] == pytest.approx(low_and_high)
    batch, mask = experience.batch, experience.batch.response_mask
    with torch.no_grad():
        logprobs = learner.policy(batch.ids, batch.attention_mask, mask).logprobs
    log_ratio = torch.where(mask, logprobs - experience.old_logprobs, 0.0)
    ratio = log_ratio.sum(dim=1).exp() if level == "sequence" else log_ratio.exp()[mask]
    assert found["policy/ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-6)
    expected = float(ratio.mean() ** 2 / ratio.square().mean())
    assert found["policy/effective_frac"] == pytest.approx(expected, rel=1e-6)


def test_lengths_and_repetition_of_a_batch(config, make_learner, experience_of):
    learner = make_learner(config(GRPOConfig, max_new_tokens=20))
    object.__setattr__(learner.sampler, "stop_ids", tuple(range(0, 256, 12)))
    experience = experience_of(learner)
    mask = experience.batch.response_mask
    lengths = mask.sum(dim=1).double()
    for name, q in (("length_p10", 0.1), ("length_p50", 0.5), ("length_p90", 0.9), ("length_max", 1.0)):
        assert experience.metrics[f"rollout/{name}"] == pytest.approx(float(lengths.quantile(q)), rel=1e-6), name
    ids = experience.batch.ids[:, -mask.shape[1] :]
    shares = []
    for row, m in zip(ids, mask, strict=True):
        own = row[m].tolist()
        grams = [tuple(own[i : i + 4]) for i in range(len(own) - 3)]
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    assert experience.metrics["rollout/repeated_frac"] == pytest.approx(sum(shares) / len(shares))


def norm_of(module):
    return math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))


def test_the_norm_of_a_critic_with_its_own_network(config, make_learner, experience_of):
    settings = config(PPOConfig, critic="separate", ppo_epochs=1)
    learner = make_learner(settings)
    experience = experience_of(learner)
    backward_minibatch(learner, experience, Recorder(learner, experience.kl), learner.micro_batch)
    backward_critic(learner, experience, torch.arange(len(experience.rows)), MetricSums())
    critic, policy = norm_of(learner.critic), norm_of(learner.policy)
    learner.optimizer.zero_grad(set_to_none=True)
    metrics = learn(learner, experience).metrics
    assert metrics["value/grad_norm"] == pytest.approx(critic, rel=1e-6)
    assert metrics["optimizer/grad_norm"] == pytest.approx(policy, rel=1e-6)
    assert critic != pytest.approx(policy)


def test_the_norm_of_a_value_head(config, make_learner, experience_of):
    """Of the head's own passes; the mean over them."""
    learner = make_learner(config(PPOConfig, value_epochs=1))
    experience = experience_of(learner)
    head, mask = learner.policy.value_head, experience.batch.response_mask
    values = head(torch.cat(list(experience.states.values())), mask)
    values = values if values.dim() == 2 else torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)
    loss, _ = core.value_loss(
        values, experience.old_values, experience.returns, mask, clip_range=learner.config.value_clip_range
    )
    loss.backward()
    expected = norm_of(head)
    learner.optimizer.zero_grad(set_to_none=True)
    assert learn(learner, experience).metrics["value/grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_speed_of_each_phase():
    seconds = {"time/rollout": 2.0, "time/score": 1.0, "time/update": 5.0}
    found = online_performance(seconds, 80.0, torch.device("cpu"), sampled_tokens=240.0)
    assert found.pop("perf/memory_gb") > 0.05
    assert found == {
        "perf/tokens_per_second": 10.0,
        "perf/rollout_tokens_per_second": 120.0,
        "perf/score_tokens_per_second": 80.0,
        "perf/update_tokens_per_second": 16.0,
    }


def test_an_algorithm_of_ones_own_has_the_seconds_of_sampling_and_scoring(config, make_learner):
    """`online_performance` asks for both, and an algorithm need not write them."""
    learner = make_learner(config(GRPOConfig))
    scored = rollout(learner, next(learner.prompts))
    metrics = rollout_metrics(scored, None, None, shaped=scored.shaped)
    assert min(metrics["time/rollout"], metrics["time/score"]) > 0
    assert metrics["time/rollout"] + metrics["time/score"] == pytest.approx(scored.seconds)


RUNS = {
    "ppo": (PPOConfig, train_ppo, {"kl_target": 6.0, "approx_kl_limit": 9.0, "target_entropy": 1.0, "top_p": 0.9}),
    "separate": (PPOConfig, train_ppo, {"critic": "separate", "importance": "token-truncate", "top_k": 50}),
    "grpo": (GRPOConfig, train_grpo, {"dynamic_sampling_rounds": 1, "mask_truncated": True, "score_clip": 9.0}),
    "online-dpo": (OnlineDPOConfig, train_online_dpo, {"overlong_buffer": 3}),
}


@pytest.mark.parametrize("name", often(RUNS, ["separate", "online-dpo"]))
def test_every_metric_of_a_run_is_on_the_page(config, length, name):
    kind, train, changes = RUNS[name]
    settings = config(kind, steps=1, **changes)
    train(settings, rewards=[length])
    logged = {metric for line in read_metrics(settings.output) for metric in line} - {"step"}
    on_page = set(re.findall(r"`([a-z]+/\w+)`", PAGE))
    assert logged - on_page == set()
    assert len(logged) > 25
