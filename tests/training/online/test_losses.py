"""The loss of a minibatch is that of the formulas, and every option of it counts."""

import typing
from dataclasses import replace

import pytest
import torch

from heedful import GRPOConfig, core
from heedful.algorithms.online.policy_losses import objective_loss
from heedful.configs.online import PolicyLoss
from losses import grpo_loss, sequence_policy_loss

A2C = {"policy_loss": "a2c", "ppo_epochs": 1}


def formula(learner, e):
    """The loss written out row by row from the definitions in docs/ppo.md and docs/grpo.md, and its surrogate alone."""
    config, batch, mask = learner.config, e.batch, e.batch.response_mask
    out = learner.policy(batch.ids, batch.attention_mask, mask, temperature=config.temperature, with_entropy=True)
    values = out.values
    if learner.critic is not None:
        values = learner.critic(batch.ids, batch.attention_mask, mask)
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    is_whole = config.importance_level != "token"
    surrogates, errors, kls = [], [], []
    for row, n in enumerate(mask.sum(dim=1).tolist()):
        surrogates.append([])
        for action in [slice(0, n)] if is_whole else [slice(t, t + 1) for t in range(n)]:
            logprob, a = out.logprobs[row, action].sum(), e.advantages[row, action.start]
            log_ratio = logprob - e.old_logprobs[row, action].sum()
            ratio = (log_ratio / n if config.importance_level == "sequence-mean" else log_ratio).exp()
            clipped = torch.min(ratio * a, ratio.clamp(1 - config.clip_range, 1 + high) * a)
            if config.dual_clip is not None and a < 0:
                clipped = torch.max(clipped, config.dual_clip * a)
            weight = ratio.detach().clamp(1 - config.clip_range, 1 + high)
            kinds = {"clip": clipped, "a2c": logprob * a, "cispo": weight * a * logprob}
            surrogates[-1].append(kinds[config.policy_loss])
            if values is not None:
                v, old, target = (x[row, action.start] for x in (values, e.old_values, e.returns))
                errors.append(torch.max((v - target) ** 2, (old + (v - old).clamp(-0.2, 0.2) - target) ** 2))
        if e.ref_logprobs is None:
            continue
        d = (out.logprobs - e.ref_logprobs)[row, :n]
        kl = 0.5 * d**2 if config.kl_kind == "k2" else (-d).exp() - 1 + d
        if config.kl_kind == "weighted-k3":
            kl = kl * (out.logprobs - e.old_logprobs)[row, :n].exp()
        kls.append(kl)

    def mean(rows, how):
        rows = [torch.stack(list(row)) for row in rows]
        if how == "sequence":
            return torch.stack([row.mean() for row in rows]).mean()
        return torch.cat(rows).mean() if how == "token" else torch.cat(rows).sum() / len(rows) / config.max_new_tokens

    surrogate = -mean(surrogates, "token" if is_whole else config.loss_reduction)
    loss = surrogate
    if values is not None:
        loss = loss + (1.0 if learner.critic is not None else config.value_coef) * 0.5 * torch.stack(errors).mean()
    if kls and config.kl_in == "loss":
        loss = loss + config.kl_coef * mean(kls, config.loss_reduction)
    return loss - config.entropy_coef * out.entropy[mask].mean(), float(surrogate.detach())


def test_the_gradient_is_that_of_the_formula(
    variant, make_learner, experience_of, moved, gradient, flat_gradient, distance
):
    """Without micro-batches and masks, at a temperature."""
    settings = variant(temperature=0.7, micro_batch_size=3)
    if settings.estimator.critic and settings.critic == "shared":
        settings = replace(settings, value_coef=0.3)
    learner = make_learner(settings, noise=0.05)
    experience = moved(experience_of(learner))
    trained, metrics, _ = gradient(learner, experience)
    assert settings.policy_loss == "a2c" or 0 < metrics["policy/clip_frac"] < 1
    for module in learner.trained:
        module.zero_grad()
    loss, surrogate = formula(learner, experience)
    loss.backward()
    assert distance(trained, flat_gradient(*learner.trained)) < 1e-12
    assert metrics["loss/policy"] == pytest.approx(surrogate, rel=1e-9)


def test_ranges_and_coefficients_reach_the_loss(
    config, make_learner, experience_of, moved, gradient, flat_gradient, distance
):
    """PPO's gradient against one written out from the paper's formulas, for all rows at once."""
    settings = config(entropy_coef=0.02, value_coef=0.3, clip_range=0.1, value_clip_range=0.15, temperature=0.8)
    learner = make_learner(settings)
    e = moved(experience_of(learner))
    trained, _, _ = gradient(learner, e, micro_batch_size=3)
    learner.policy.zero_grad()
    m = e.batch.response_mask
    out = learner.policy(e.batch.ids, e.batch.attention_mask, m, temperature=0.8, with_entropy=True)
    ratio, a = (out.logprobs - e.old_logprobs).exp()[m], e.advantages[m]
    surrogate = torch.min(ratio * a, ratio.clamp(0.9, 1.1) * a)
    v, old, ret = out.values[m], e.old_values[m], e.returns[m]
    clipped = old + (v - old).clamp(-0.15, 0.15)
    value = 0.5 * torch.max((v - ret) ** 2, (clipped - ret) ** 2)
    (-surrogate.mean() + 0.3 * value.mean() - 0.02 * out.entropy[m].mean()).backward()
    assert distance(trained, flat_gradient(learner.policy)) < 1e-12


def test_the_loss_is_that_of_core_on_the_whole_minibatch(config, make_learner, experience_of, moved, gradient):
    """Also that temperature, ranges, penalty and the three ways to average reach it."""
    learner = make_learner(config(GRPOConfig, temperature=0.7, ppo_epochs=2), noise=0.02)
    e = moved(experience_of(learner))
    batch, mask = e.batch, e.batch.response_mask
    now = learner.policy(batch.ids, batch.attention_mask, mask, temperature=0.7).logprobs.detach()
    for changes in (
        {},
        {"loss_reduction": "token"},
        {"loss_reduction": "fixed"},
        {"clip_range_high": 0.6},
        {"kl_coef": 3.0},
    ):
        loss, _ = grpo_loss(
            now,
            e.old_logprobs,
            e.ref_logprobs,
            e.advantages[:, 0],
            mask,
            high=changes.get("clip_range_high"),
            kl_coef=changes.get("kl_coef", 0.04),
            how=changes.get("loss_reduction", "sequence"),
            max_new_tokens=12,
        )
        _, metrics, _ = gradient(learner, e, **changes)
        assert metrics["loss/policy"] + metrics["loss/kl"] == pytest.approx(float(loss), rel=1e-9)
        assert metrics["loss/kl"] > 0
    for level, normalise in (("sequence", False), ("sequence-mean", True)):
        loss, _ = sequence_policy_loss(
            now, e.old_logprobs, e.advantages[:, 0], mask, clip_range=0.2, length_normalise=normalise
        )
        _, metrics, _ = gradient(learner, e, importance_level=level, kl_coef=0.0)
        assert metrics["loss/policy"] == pytest.approx(float(loss), rel=1e-9)


OPTIONS = {
    "ppo": [
        {"importance_level": "sequence"},
        A2C,
        {"policy_loss": "cispo"},
        {"clip_range_high": 0.05},
        {"dual_clip": 1.05},
        {"kl_in": "loss", "kl_kind": "k2"},
        {"kl_in": "loss", "kl_kind": "k3"},
        {"kl_in": "loss", "kl_kind": "weighted-k3"},
    ],
    "grpo": [
        {"loss_reduction": "token"},
        {"loss_reduction": "fixed"},
        {"clip_range": 0.05},
        {"clip_range_high": 0.01},
        {"kl_coef": 0.0},
        {"kl_in": "reward", "advantage": "dr_grpo"},
        {"importance_level": "sequence", "kl_coef": 0.0},
        {"importance_level": "sequence-mean", "kl_coef": 0.0},
        {"temperature": 1.0},
    ],
}


@pytest.mark.parametrize("preset", OPTIONS)
def test_every_option_of_the_loss_changes_the_gradient(
    config, make_learner, experience_of, moved, gradient, distance, preset
):
    settings = (
        config(value_coef=0.0, kl_coef=0.1) if preset == "ppo" else config(GRPOConfig, temperature=0.7, ppo_epochs=2)
    )
    learner = make_learner(settings, noise=0.05)
    experience = moved(experience_of(learner))
    standard, _, _ = gradient(learner, experience)
    for changes in OPTIONS[preset]:
        assert distance(gradient(learner, experience, **changes)[0], standard) > 1e-3, changes


def test_a2c_is_ppo_at_ratio_1(config, make_learner, experience_of, gradient, distance):
    learner = make_learner(config(), noise=0.05)
    experience = experience_of(learner)
    clipped, _, _ = gradient(learner, experience)
    unclipped, metrics, _ = gradient(learner, experience, **A2C)
    assert distance(unclipped, clipped) < 1e-12
    assert "policy/approx_kl" not in metrics


@pytest.mark.parametrize(("level", "reduction"), [("token", "token"), ("sequence", "sequence")])
def test_one_step_against_the_batchs_mean_is_reinforce(
    config, make_learner, experience_of, gradient, flat_gradient, distance, level, reduction
):
    """The gradient of -mean((score - mean score) * log pi), over tokens or whole responses; at ratio 1 nothing is clipped."""
    settings = config(
        GRPOConfig,
        advantage="reinforce",
        samples_per_prompt=1,
        rollout_batch_size=4,
        minibatch_size=4,
        importance_level=level,
        loss_reduction=reduction,
        kl_coef=0.0,
        ppo_epochs=1,
    )
    learner = make_learner(settings)
    e = experience_of(learner)
    scores = torch.tensor(e.scores).double()
    assert scores.std() > 0.1
    found, _, _ = gradient(learner, e)
    learner.policy.zero_grad()
    batch, mask = e.batch, e.batch.response_mask
    logprobs, advantages = learner.policy(batch.ids, batch.attention_mask, mask).logprobs, scores - scores.mean()
    if level == "token":
        core.a2c_policy_loss(logprobs, advantages.unsqueeze(1).expand_as(logprobs), mask)[0].backward()
    else:
        core.a2c_policy_loss(logprobs.sum(dim=1), advantages, mask.any(dim=1))[0].backward()
    assert distance(found, flat_gradient(learner.policy)) < 1e-6


def test_k1_in_a_loss_has_no_gradient_on_average():
    """Why it is refused: over all tokens, weighted by their probability, the gradient of log pi is zero; k2's is the KL's."""
    torch.manual_seed(0)
    logits, ref = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    logp, logq = torch.log_softmax(logits, dim=0), torch.log_softmax(ref, dim=0)
    p = logp.detach().exp()
    (true,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    for kind, expected in (("k1", torch.zeros_like(true)), ("k2", true)):
        estimate = (p * core.kl_estimate(logp, logq, kind=kind)).sum()
        (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", typing.get_args(PolicyLoss))
def test_every_policy_loss_that_settings_can_ask_for_is_there(config, name):
    """At a ratio of 1: minus the mean advantage; of A2C and CISPO, times the log-prob."""
    logprobs, advantages = torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.5, 1.0]])
    mask, epochs = torch.ones_like(logprobs, dtype=torch.bool), {} if name == "clip" else {"ppo_epochs": 1}
    settings = replace(config(**epochs, minibatch_size=8), policy_loss=name)
    reduction = core.Reduction("token", mask.sum(), 1, 2)
    loss, _ = objective_loss(logprobs, logprobs, advantages, mask, config=settings, reduction=reduction)
    assert float(loss) == pytest.approx(
        {"a2c": 0.5 * 1.0 + 1.0 * 2.0, "cispo": 0.5 * 1.0 + 1.0 * 2.0}.get(name, -1.5) / 2
    )


@pytest.mark.parametrize(
    ("level", "expected"), [("token", (1 * 1 + 1 * 2 + 3 * 4) / 3), ("sequence", (1 * 3 + 3 * 4) / 2)]
)
def test_the_action_of_a2c_is_a_token_or_a_response(config, level, expected):
    """Two responses, of two tokens and of one; advantages 1 and 3, log-probs -1, -2 and -4."""
    logprobs, advantages = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]]), torch.tensor([[1.0, 1.0], [3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    settings = replace(config(**A2C, minibatch_size=8), importance_level=level)
    reduction = core.Reduction("token", mask.sum(), 2, 2)
    loss, _ = objective_loss(logprobs, logprobs, advantages, mask, config=settings, reduction=reduction)
    assert float(loss) == pytest.approx(expected)
