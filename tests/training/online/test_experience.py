"""From prompts to experience: what holds before the first update, and rewards, advantages and returns by their formulas."""

from dataclasses import replace

import pytest
import torch

from heedful import GRPOConfig, PPOConfig, Reward
from heedful.algorithms.online.start import reference_score_norm
from heedful.core import ScoreNorm
from heedful.engines.teacher_forced import token_outputs
from heedful.models import freeze
from heedful.types import MicroBatch

CRITICS = {
    "shared": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "none": (GRPOConfig, {"ppo_epochs": 2}),
}


@pytest.mark.parametrize(
    ("critic", "architecture", "dtype", "limit"),
    [*((critic, "gpt2", torch.float64, 1e-10) for critic in CRITICS), ("shared", "qwen3", torch.float32, 1e-5)],
)
def test_before_the_first_update_the_ratio_is_1_and_the_kl_is_0(
    config, tiny, make_learner, experience_of, critic, architecture, dtype, limit
):
    """Also in micro-batches of another size than the old log-probs were computed in, so with other padding and kernels."""
    kind, changes = CRITICS[critic]
    settings = config(kind, model=tiny(architecture), micro_batch_size=3, temperature=0.7, **changes)
    learner = make_learner(settings, dtype)
    experience = experience_of(learner)
    mask = experience.batch.response_mask
    outputs = learner.policy(experience.batch.ids, experience.batch.attention_mask, mask, temperature=0.7)
    ratio = (outputs.logprobs.detach() - experience.old_logprobs).exp()
    assert float((ratio - 1).abs().max()) < limit
    assert float(experience.kl.abs().max()) < limit
    assert abs(experience.metrics["reference/kl"]) < limit
    assert (experience.old_values is None) == (experience.returns is None) == (critic == "none")


@pytest.mark.parametrize(("kl_kind", "whiten_rewards"), [("k1", False), ("k2", True), ("k3", False)])
def test_experience_is_that_of_the_formulas(config, make_learner, experience_of, kl_kind, whiten_rewards):
    """Rewards, advantages and returns recomputed with loops over single rows."""
    shaped = {"missing_eos_penalty": 0.7, "kl_coef": 0.2, "kl_kind": kl_kind, "whiten_rewards": whiten_rewards}
    learner = make_learner(
        config(gae_lambda=0.9, gamma=0.95, **shaped), noise=0.02, score_norm=ScoreNorm(mean=3.0, std=2.0)
    )
    experience = experience_of(learner)
    ref = token_outputs(learner.reference, experience.batch, temperature=1.0, micro_batch=MicroBatch(8)).logprobs
    mask = experience.batch.response_mask
    lengths = mask.sum(dim=1).tolist()
    d = experience.old_logprobs - ref
    rewards = -0.2 * {"k1": d, "k2": 0.5 * d**2, "k3": (-d).exp() - 1 + d}[kl_kind]
    for row, completion in enumerate(experience.completions):
        rewards[row, lengths[row] - 1] += (experience.scores[row] - 3.0) / 2.0 - 0.7 * completion.truncated
        kl = d[row, : lengths[row]].sum()
        assert float(experience.kl[row]) == pytest.approx(float(kl), rel=1e-9)
    if whiten_rewards:
        mean, std = rewards[mask].mean(), rewards[mask].std(correction=0)
        rewards = (rewards - mean) / std + mean
    raw = torch.zeros_like(ref)
    for row, n in enumerate(lengths):
        values = [*experience.old_values[row, :n].tolist(), 0.0]
        for t in range(n):
            raw[row, t] = sum(
                (0.95 * 0.9) ** (k - t) * (float(rewards[row, k]) + 0.95 * values[k + 1] - values[k])
                for k in range(t, n)
            )
    expected = (raw - raw[mask].mean()) / raw[mask].std(correction=0)
    torch.testing.assert_close(experience.advantages[mask], expected[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(experience.returns[mask], (raw + experience.old_values)[mask], rtol=1e-6, atol=1e-6)
    assert experience.metrics["reward/score_mean"] == pytest.approx(sum(experience.scores) / 8)


def test_a_response_is_one_action(config, make_learner, experience_of):
    """Advantage: score - kl_coef * KL - V(prompt), whitened over the responses. The value's target: all but the V.

    value/mean and value/explained_variance count one value a response.
    """
    settings = config(importance_level="sequence", missing_eos_penalty=0.7, kl_coef=0.2)
    learner = make_learner(settings, noise=0.05)
    e = experience_of(learner)
    mask, value = e.batch.response_mask, e.old_values[:, 0]
    kl = torch.where(mask, e.old_logprobs - e.ref_logprobs, 0.0).sum(dim=1)
    assert kl.abs().min() > 1e-3
    cut = torch.tensor([completion.truncated for completion in e.completions])
    target = torch.tensor(e.scores) - 0.7 * cut - 0.2 * kl
    torch.testing.assert_close(e.returns[:, 0], target, rtol=1e-6, atol=1e-6)
    raw = target - value
    torch.testing.assert_close(e.advantages[:, 0], (raw - raw.mean()) / raw.std(correction=0), rtol=1e-6, atol=1e-6)
    assert not e.advantages[:, 1:].any()
    assert not e.returns[:, 1:].any()
    assert e.metrics["value/mean"] == pytest.approx(float(value.mean()), rel=1e-9)
    explained = 1 - raw.var(correction=0) / target.var(correction=0)
    assert e.metrics["value/explained_variance"] == pytest.approx(float(explained), rel=1e-6)
    whitened = experience_of(replace(learner, config=replace(settings, whiten_rewards=True))).returns[:, 0]
    expected = (target - target.mean()) / target.std(correction=0) + target.mean()
    torch.testing.assert_close(whitened, expected, rtol=1e-6, atol=1e-6)


def test_a_penalty_in_the_loss_is_not_in_the_reward_and_is_told(config, make_learner, experience_of, gradient):
    learner = make_learner(config(kl_in="loss", kl_kind="k3", gae_lambda=1.0, kl_coef=0.25), noise=0.05)
    e = experience_of(learner)
    torch.testing.assert_close(e.returns[:, 0], torch.tensor(e.scores).double(), rtol=1e-6, atol=1e-6)
    d = (e.old_logprobs - e.ref_logprobs)[e.batch.response_mask]
    _, metrics, _ = gradient(learner, e)
    assert metrics["loss/kl"] == pytest.approx(0.25 * float(((-d).exp() - 1 + d).mean()), rel=1e-9)


def test_penalties_come_off_the_score_before_groups_are_compared(config, make_learner, experience_of):
    """Cut responses lose the penalty, and with ``kl_in`` reward each loses kl_coef times its own KL."""
    settings = config(GRPOConfig, advantage="dr_grpo", missing_eos_penalty=7.0, kl_in="reward", kl_coef=0.5)
    learner = make_learner(settings, noise=0.05)
    e = experience_of(learner)
    mask = e.batch.response_mask
    kl = ((e.old_logprobs - e.ref_logprobs) * mask).sum(dim=1)
    cut = torch.tensor([completion.truncated for completion in e.completions])
    assert 0 < cut.sum() < len(cut)
    assert kl.abs().min() > 1e-3
    shaped = torch.tensor(e.scores) - 7.0 * cut - 0.5 * kl
    expected = (shaped.view(-1, 4) - shaped.view(-1, 4).mean(dim=1, keepdim=True)).view(-1, 1).expand_as(mask)
    found = e.advantages.double()
    torch.testing.assert_close(found[mask], expected.double()[mask], rtol=1e-5, atol=1e-5)
    assert not found[~mask].any()
    assert e.metrics["reward/shaped_mean"] == pytest.approx(float(shaped.mean()), rel=1e-5)
    in_loss = experience_of(replace(learner, config=replace(settings, kl_in="loss")))
    assert not torch.allclose(in_loss.advantages.double(), found)


def test_ties_are_counted_after_clipping_and_penalties(config, make_learner, experience_of):
    """Scores that differ above the clip tie; equal ones do not where one was cut."""
    clipped = make_learner(config(GRPOConfig, score_clip=0.1))
    e = experience_of(clipped)
    assert len(set(e.scores)) > 1
    assert e.metrics["reward/tied_frac"] == 1.0
    assert not e.advantages.any()
    equal = [Reward("equal", lambda completions: [5.0] * len(completions))]
    e = experience_of(make_learner(config(GRPOConfig, missing_eos_penalty=1.0, max_new_tokens=50), rewards=equal))
    cut = torch.tensor([completion.truncated for completion in e.completions]).view(-1, 4).sum(dim=1)
    ties = (cut == 0) | (cut == 4)
    assert e.metrics["reward/tied_frac"] == float(ties.float().mean()) < 1


def test_the_whole_batch_is_one_group_of_reinforce(config, make_learner, experience_of):
    """It ties where all scores are equal, however few samples a prompt has."""
    settings = config(GRPOConfig, advantage="reinforce", samples_per_prompt=1, rollout_batch_size=4, minibatch_size=4)
    assert experience_of(make_learner(settings)).metrics["reward/tied_frac"] == 0.0


def test_score_normalisation_uses_reference_samples(config, make_learner, length):
    learner = make_learner(config(), torch.float32)
    with torch.no_grad():
        learner.policy.lm.get_output_embeddings().weight[7] += 100.0  # it says one thing, the reference does not
    seen = []

    def remembered(completions, completion_ids, **_):
        assert len({token for ids in completion_ids for token in ids}) > 20
        seen.extend(length(completions))
        return seen

    norm = reference_score_norm(
        freeze(learner.reference),
        list(learner.prompts.prompts) * 4,
        rewards=[Reward("remembered", remembered)],
        sampler=learner.sampler,
        generator=torch.Generator().manual_seed(0),
    )
    scores = torch.tensor(seen)
    assert norm.mean == pytest.approx(float(scores.mean()), rel=1e-6)
    assert norm.std == pytest.approx(float(scores.std(correction=0)), rel=1e-6)
