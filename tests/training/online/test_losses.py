"""The loss of a minibatch is that of the formulas, with every option of it, and what its gradient must not depend on."""

from dataclasses import replace

import pytest
import torch

from heedful import core
from heedful.algorithms.online.policy_losses import objective_loss
from heedful.data.batches import Batch

A2C = {"policy_loss": "a2c", "ppo_epochs": 1}


def formula(learner, e):
    """The loss written out row by row from the definitions in docs/ppo.md and docs/grpo.md, and its surrogate alone."""
    config, batch, mask = learner.config, e.batch, e.batch.response_mask
    out = learner.policy(batch.ids, batch.attention_mask, mask, temperature=config.temperature, with_entropy=True)
    values = out.values
    if learner.critic is not None:
        values = learner.critic(batch.ids, batch.attention_mask, mask)
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    bound = float("inf") if config.value_clip is None else config.value_clip
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
            of_sampler = (logprob.detach() - e.drawn_logprobs[row, action].sum()).exp()
            kept = of_sampler if 1 - config.clip_range < of_sampler < 1 + high else 0.0
            kinds = {"clip": clipped, "a2c": logprob * a, "cispo": weight * a * logprob, "sao": kept * a * logprob}
            surrogates[-1].append(kinds[config.policy_loss])
            if values is not None:
                v, old, target = (x[row, action.start] for x in (values, e.old_values, e.returns))
                errors.append(torch.max((v - target) ** 2, (old + (v - old).clamp(-bound, bound) - target) ** 2))
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
    if config.positive_coef:
        good = [row for row, score in enumerate(e.completions) if len(score.response) >= config.positive_score]
        assert 0 < len(good) < len(mask), "all or none would prove nothing"
        said = torch.cat([out.logprobs[row][mask[row]] for row in good])
        loss = loss - config.positive_coef * said.mean()
    return loss - config.entropy_coef * out.entropy[mask].mean(), float(surrogate.detach())


CHANGES = {
    "grpo": [
        {"loss_reduction": "token"},
        {"loss_reduction": "fixed"},
        {"clip_range_high": 0.6},
        {"kl_coef": 3.0},
        {"importance_level": "sequence", "kl_coef": 0.0},
    ],
    "k3-in-loss": [
        {"importance_level": "token", "kl_kind": "weighted-k3"},
        {"importance_level": "token", "kl_kind": "k2"},
    ],
    "ppo": [{"clip_range": 0.1, "value_clip_range": 0.15}],
    "bounds": [{"dual_clip": 1.05}],
}
"""Options that are tried on the same experience."""


def test_the_gradient_is_that_of_the_formula_whatever_micro_batches_and_padding(
    variant, variant_name, make_learner, experience_of, moved, gradient, flat_gradient, distance
):
    """At a temperature; and before the policy has moved the ratio is 1."""
    settings = variant(temperature=0.7, micro_batch_size=3)
    if settings.estimator.critic and settings.critic == "shared":
        settings = replace(settings, value_coef=0.3)
    learner = make_learner(settings, noise=0.05)
    as_sampled = experience_of(learner)
    assert len(set(as_sampled.batch.response_mask.sum(dim=1).tolist())) > 1, "rows of equal length would prove nothing"
    _, at_first, first_kl = gradient(learner, as_sampled)
    assert first_kl == at_first.get("policy/approx_kl", 0.0)
    assert first_kl < 1e-10
    assert at_first.get("policy/clip_frac", 0.0) == 0.0

    e = moved(as_sampled)
    for changes in ({}, *CHANGES.get(variant_name, ())):
        trained, metrics, approx_kl = gradient(learner, e, **changes)
        for module in learner.trained:
            module.zero_grad()
        loss, surrogate = formula(replace(learner, config=replace(settings, **changes)), e)
        loss.backward()
        assert distance(trained, flat_gradient(*learner.trained)) < 1e-12, changes
        assert metrics["loss/policy"] == pytest.approx(surrogate, rel=1e-9)

    trained, metrics, approx_kl = gradient(learner, e)
    assert ("policy/approx_kl" in metrics) == (settings.policy_loss != "a2c")
    assert metrics.get("policy/clip_frac", 0.5) not in (0.0, 1.0)
    for size in (1, 5, 16):
        other, same, same_kl = gradient(learner, e, micro_batch_size=size)
        assert distance(other, trained) < 1e-12, size
        assert same == pytest.approx(metrics, rel=1e-9)
        assert same_kl == pytest.approx(approx_kl, rel=1e-9)
    pad = torch.nn.functional.pad  # four more columns on either side, filled with a real token's id
    batch = Batch(
        pad(e.batch.ids, (4, 4), value=77), pad(e.batch.attention_mask, (4, 4)), pad(e.batch.response_mask, (0, 4))
    )
    names = ("old_logprobs", "ref_logprobs", "advantages", "old_values", "returns", "drawn_logprobs")
    tensors = {name: pad(x, (0, 4), value=1e3) for name in names if (x := getattr(e, name)) is not None}
    padded, same, _ = gradient(learner, replace(e, batch=batch, **tensors))
    assert distance(padded, trained) < 1e-12
    assert same == pytest.approx(metrics, rel=1e-9)


A2C_TOKENS, A2C_RESPONSES = (1 * 1 + 1 * 2 + 3 * 4) / 3, (1 * 3 + 3 * 4) / 2


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("clip", "token", -5 / 3),
        ("cispo", "token", A2C_TOKENS),
        ("sao", "token", A2C_TOKENS),
        ("a2c", "token", A2C_TOKENS),
        ("a2c", "sequence", A2C_RESPONSES),
    ],
)
def test_golden_policy_losses_at_a_ratio_of_1(config, name, level, expected):
    """Two responses, of two tokens and of one; advantages 1 and 3, log-probs -1, -2 and -4."""
    logprobs, advantages = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]]), torch.tensor([[1.0, 1.0], [3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    settings = replace(config(**A2C, minibatch_size=8), policy_loss=name, importance_level=level)
    reduction = core.Reduction("token", mask.sum(), 2, 2)
    loss, _ = objective_loss(logprobs, logprobs, advantages, mask, config=settings, reduction=reduction)
    assert float(loss) == pytest.approx(expected)
