"""Learning from a rollout batch: what the gradient must not depend on, minibatches and epochs, and where an update ends."""

from dataclasses import replace

import pytest
import torch

from cases import often, pairs_often
from gradients import distance, flat_gradient
from heedful import GRPOConfig, PPOConfig, core
from heedful.algorithms import ppo
from heedful.algorithms.online import update
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.values import backward_critic, learn_values
from heedful.algorithms.ppo import backward_minibatch, learn, make_experience
from heedful.models import Policy
from heedful.training.metric_sums import MetricSums

LEVELS = pytest.mark.parametrize("level", often(["token", "sequence"], ["token"]))


@pytest.mark.exhaustive
def test_a_limit_of_tokens_does_not_change_the_gradient(variant, make_learner, experience_of, moved, gradient, passes):
    """Nor what the losses hold constant; the limit holds for every pass of every model."""
    learner = make_learner(variant(micro_batch_size=16), noise=0.05)
    as_sampled = experience_of(learner)
    experience, rows = moved(as_sampled), len(as_sampled.rows)
    whole, metrics, _ = gradient(learner, experience)
    for tokens in (1, 70, 100):
        limited = replace(learner, config=replace(learner.config, micro_batch_tokens=tokens))
        trained, reference = [passes(module) for module in learner.trained], passes(learner.reference)
        split, same_metrics, _ = gradient(limited, experience)
        assert distance(split, whole) < 1e-12
        assert same_metrics == pytest.approx(metrics, rel=1e-9)
        assert trained[0] == trained[-1]
        again = experience_of(limited)
        for name in ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns"):
            before, after = getattr(as_sampled, name), getattr(again, name)
            assert before is after is None or torch.allclose(after, before, rtol=1e-9, atol=1e-9), name
        of_reference = [(reference, 1)] if learner.config.kl_coef else []
        assert bool(reference) == bool(learner.config.kl_coef)
        for seen, times in [*((seen, 2) for seen in trained), *of_reference]:
            assert all(number == 1 or taken <= tokens for number, taken in seen)
            assert sum(number for number, _ in seen) == rows * times
            assert (len(seen) == rows * times) == (tokens == 1)


@LEVELS
def test_the_gradient_of_a_critic_of_its_own(config, make_learner, experience_of, moved, gradient, level):
    """That of the value loss alone, whatever the micro-batch size."""
    learner = make_learner(config(critic="separate", importance_level=level), noise=0.05)
    experience = moved(experience_of(learner))
    found = []
    for size, tokens in ((8, None), (3, None), (8, 70)):
        learner.critic.zero_grad()
        changed = replace(learner.config, micro_batch_size=size, micro_batch_tokens=tokens)
        smaller = replace(learner, config=changed)
        backward_critic(smaller, experience, torch.arange(len(experience.rows)), MetricSums())
        assert all(parameter.grad is None for parameter in learner.policy.parameters())
        found.append(flat_gradient(learner.critic))
    assert distance(found[1], found[0]) < 1e-12
    assert distance(found[2], found[0]) < 1e-12
    whole, _, _ = gradient(learner, experience)
    number = sum(parameter.numel() for parameter in learner.critic.parameters())
    assert distance(found[0], whole[-number:]) < 1e-12, "the policy loss says nothing to the critic"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_value_heads_gradient(config, make_learner, experience_of, moved, monkeypatch, level):
    """That of the value loss of a pass through the whole policy, at each minibatch; the trunk has none."""
    learner = make_learner(config(importance_level=level, value_epochs=3), noise=0.05)
    e, found = moved(experience_of(learner)), []

    def noted(_, module, *__):
        found.append(flat_gradient(module))
        assert all(parameter.grad is None for parameter in learner.policy.lm.parameters())
        module.zero_grad()
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", noted)
    learn_values(learner, e)
    mask = e.batch.response_mask
    values = learner.policy(e.batch.ids, e.batch.attention_mask, mask).values
    actions = mask if level == "token" else core.first_in_mask(mask)
    loss, _ = core.value_loss(values, e.old_values, e.returns, actions, clip_range=0.2)
    expected = torch.autograd.grad(loss, list(learner.policy.value_head.parameters()))
    expected = torch.cat([gradient.flatten() for gradient in expected])
    assert len(found) == 3
    assert all(distance(gradient, expected) < 1e-9 for gradient in found)


@pytest.fixture
def learned(make_learner, experience_of, moved, monkeypatch):
    """``learned(settings)``: a learner after one rollout batch, the metrics, approx_kl of each minibatch visited, and
    whether each optimizer step was the policy's (or a critic's)."""
    step = update.optimizer_step

    def run(settings, *, sampled_by_another=False):
        torch.manual_seed(3)
        learner = make_learner(settings)
        experience = experience_of(learner)
        experience = moved(experience) if sampled_by_another else experience
        learner, visited, steps = replace(learner, generator=torch.Generator().manual_seed(1)), [], []

        def noted(learner, minibatch, recorder, *arguments, **options):
            backward_minibatch(learner, minibatch, recorder, *arguments, **options)
            visited.append(float(recorder.approx_kl))

        def counted(optimizer, module, *options):
            steps.append(isinstance(module, Policy))
            return step(optimizer, module, *options)

        monkeypatch.setattr(ppo, "backward_minibatch", noted)
        monkeypatch.setattr(update, "optimizer_step", counted)
        return learner, learn(learner, experience).metrics, visited, steps

    return run


SIZES = [(1, 8, 1), (1, 4, 2), (3, 2, 12)]


@pytest.mark.parametrize(("kind", "sizes"), pairs_often([PPOConfig, GRPOConfig], SIZES, [(PPOConfig, SIZES[2])]))
def test_each_minibatch_of_each_epoch_is_one_optimizer_step(config, learned, kind, sizes):
    """A value head has steps of its own besides."""
    epochs, size, expected = sizes
    own = {"samples_per_prompt": 2} if kind is GRPOConfig else {"value_epochs": 3}
    *_, steps = learned(config(kind, ppo_epochs=epochs, minibatch_size=size, **own))
    assert steps.count(True) == expected
    assert steps.count(False) == (0 if kind is GRPOConfig else 3 * 8 // size)


@LEVELS
def test_an_update_ends_before_the_step_at_which_the_policy_is_too_far(config, learned, level):
    settings = config(importance_level=level, minibatch_size=4, ppo_epochs=3, learning_rate=3e-3)
    unlimited, free, without, steps = learned(settings)
    assert len(without) == steps.count(True) == 6
    assert "policy/update_frac" not in free
    limit = sorted(without)[3]
    stop = next(i for i, kl in enumerate(without) if kl > limit)
    assert 1 < stop < 5
    learner, metrics, visited, steps = learned(replace(settings, approx_kl_limit=limit))
    assert visited == without[: stop + 1]
    assert steps.count(True) == stop
    assert metrics["policy/update_frac"] == pytest.approx(stop / 6)
    assert metrics["policy/approx_kl"] == pytest.approx(sum(visited) / len(visited))
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
    unreached, metrics, *_ = learned(replace(settings, approx_kl_limit=1e3))
    assert metrics["policy/update_frac"] == 1
    assert all(map(torch.equal, unreached.policy.parameters(), unlimited.policy.parameters()))


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_critics_epochs_are_its_own(config, learned, critic):
    """More than the policy's, and to their end though the policy is too far after its first step."""
    own = {"critic": critic, "value_epochs": 3, "ppo_epochs": 2, "minibatch_size": 4}
    *_, steps = learned(config(learning_rate=1e-3, approx_kl_limit=1e-9, **own))
    assert (steps.count(False), steps.count(True)) == (3 * 2, 1)


def test_a_critic_of_its_own_has_the_policys_epochs_if_none_are_named(config, learned):
    *_, steps = learned(config(critic="separate", ppo_epochs=3, minibatch_size=4))
    assert (steps.count(False), steps.count(True)) == (3 * 2, 3 * 2)


def test_sao_reads_nothing_before_its_update(config, make_learner, experience_of, passes):
    """Whatever the number of minibatches: each response is read once, with its gradient, and says entropy and mismatch."""
    sizes = {"minibatch_size": 4, "ppo_epochs": 1, "kl_coef": 0.0, "critic": "separate"}
    for loss, epochs, times in (("sao", 1, 1), ("sao", 2, 3), ("clip", 1, 2)):
        learner = make_learner(config(**(sizes | {"policy_loss": loss, "ppo_epochs": epochs})))
        asked = [p for p in learner.prompts.prompts for _ in range(2)]
        scored = rollout(learner, asked)
        seen = passes(learner.policy)
        metrics = learn(learner, make_experience(learner, scored)).metrics
        assert sum(rows for rows, _ in seen) == times * len(asked), (loss, epochs)
        assert metrics["policy/entropy"] > 0
        assert metrics["rollout/sampler_mismatch"] < 1


def test_sao_says_entropy_and_kl_while_the_critic_warms_up(config, make_learner, passes):
    """The policy has no pass of an update then, so one before it reads each response once."""
    settings = config(
        policy_loss="sao", kl_in="loss", kl_kind="k3", critic="separate", critic_warmup_steps=1, ppo_epochs=1
    )
    learner = make_learner(settings, noise=0.05)
    asked = [p for p in learner.prompts.prompts for _ in range(2)]
    scored = rollout(learner, asked)
    seen = passes(learner.policy)
    metrics = learn(learner, make_experience(learner, scored)).metrics
    assert sum(rows for rows, _ in seen) == len(asked)
    assert metrics["policy/entropy"] > 0
    assert metrics["reference/kl"] != 0


def test_a_critic_of_its_own_sees_the_minibatches_of_the_policy(config, make_learner, experience_of):
    """In the same order, and goes on when the policy's epochs are over."""
    own = {"critic": "separate", "ppo_epochs": 2, "value_epochs": 3, "minibatch_size": 4, "micro_batch_size": 4}
    learner = make_learner(config(**own))
    experience, read = experience_of(learner), {"policy": [], "critic": []}
    for name, seen in read.items():
        model = getattr(learner, name)
        model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].tolist()))
    learn(learner, experience)
    assert (len(read["policy"]), len(read["critic"])) == (4, 6)
    assert read["critic"][:4] == read["policy"]
    assert read["policy"][:2] != read["policy"][2:], "an order for each epoch"


def test_the_first_minibatch_is_always_learned_from(config, learned):
    """However far it says the policy is: it has not moved in this update, and a step must do something."""
    settings = config(minibatch_size=4, ppo_epochs=2, learning_rate=1e-3, approx_kl_limit=1e-9)
    _, metrics, visited, steps = learned(settings, sampled_by_another=True)
    assert (len(visited), steps.count(True)) == (2, 1)
    assert visited[0] > 1e-3
    assert metrics["policy/update_frac"] == pytest.approx(1 / 4)
