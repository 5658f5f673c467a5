"""Learning from a rollout batch: what the gradient must not depend on, minibatches and epochs, and where an update ends."""

import contextlib
from dataclasses import replace

import pytest
import torch

from heedful import GRPOConfig, TrainingError, core, train_grpo, train_ppo
from heedful.algorithms import ppo
from heedful.algorithms.online import update
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.values import learn_values
from heedful.algorithms.ppo import backward_minibatch, learn
from heedful.data.batches import Batch
from heedful.models.value_model import ValueHead

CRITICS = pytest.mark.parametrize("critic", ["shared", "separate"])


def test_micro_batch_size_does_not_change_the_gradient(variant, make_learner, experience_of, moved, gradient, distance):
    learner = make_learner(variant(temperature=0.7), noise=0.05)
    experience = moved(experience_of(learner))
    assert len(set(experience.batch.response_mask.sum(dim=1).tolist())) > 1, "rows of equal length would prove nothing"
    whole, metrics, approx_kl = gradient(learner, experience, micro_batch_size=16)
    assert metrics.get("policy/clip_frac", 0.5) not in (0.0, 1.0)
    for size in (1, 3, 5):
        split, same_metrics, same_kl = gradient(learner, experience, micro_batch_size=size)
        assert distance(split, whole) < 1e-12
        assert same_metrics == pytest.approx(metrics, rel=1e-9)
        assert same_kl == pytest.approx(approx_kl, rel=1e-9)


@CRITICS
def test_micro_batch_size_does_not_change_the_gradient_in_float32(
    config, make_learner, experience_of, moved, gradient, distance, critic
):
    learner = make_learner(config(critic=critic, entropy_coef=0.01), torch.float32)
    experience = moved(experience_of(learner))
    whole, _, _ = gradient(learner, experience, micro_batch_size=8)
    for size in (1, 3):
        split, _, _ = gradient(learner, experience, micro_batch_size=size)
        assert distance(split, whole) < 1e-6


@pytest.mark.exhaustive
def test_a_limit_of_tokens_does_not_change_the_gradient(
    variant, make_learner, experience_of, moved, gradient, distance, passes
):
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


def test_on_the_first_minibatch_the_ratio_is_1(variant, make_learner, experience_of, gradient):
    learner = make_learner(variant(micro_batch_size=3, temperature=0.7), noise=0.05)
    _, metrics, approx_kl = gradient(learner, experience_of(learner))
    assert approx_kl == metrics.get("policy/approx_kl", 0.0)
    assert approx_kl < 1e-10
    assert metrics.get("policy/clip_frac", 0.0) == 0.0


def test_padding_does_not_change_the_gradient(variant, make_learner, experience_of, moved, gradient, distance):
    """The same rows with four more columns of padding on either side, filled with a real token's id."""
    learner = make_learner(variant(), noise=0.05)
    e = moved(experience_of(learner))
    pad = torch.nn.functional.pad
    batch = Batch(
        pad(e.batch.ids, (4, 4), value=77), pad(e.batch.attention_mask, (4, 4)), pad(e.batch.response_mask, (0, 4))
    )
    names = ("old_logprobs", "ref_logprobs", "advantages", "old_values", "returns")
    tensors = {name: pad(x, (0, 4), value=1e3) for name in names if (x := getattr(e, name)) is not None}
    whole, metrics, _ = gradient(learner, e)
    padded, same, _ = gradient(learner, replace(e, batch=batch, **tensors))
    assert distance(padded, whole) < 1e-12
    assert same == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_critics_gradient_while_it_warms_up(
    config, make_learner, experience_of, moved, gradient, flat_gradient, distance, level
):
    """That of the value loss alone, whatever the micro-batch size: for a critic of its own."""
    learner = make_learner(config(critic="separate", importance_level=level), noise=0.05)
    experience = moved(experience_of(learner))
    found = []
    for size, tokens in ((8, None), (3, None), (8, 70)):
        learner.critic.zero_grad()
        changed = replace(learner.config, micro_batch_size=size, micro_batch_tokens=tokens)
        smaller = replace(learner, config=changed)
        backward_minibatch(
            smaller, experience, Recorder(smaller, experience.kl), smaller.micro_batch, is_warming_up=True
        )
        assert all(parameter.grad is None for parameter in learner.policy.parameters())
        found.append(flat_gradient(learner.critic))
    assert distance(found[1], found[0]) < 1e-12
    assert distance(found[2], found[0]) < 1e-12
    whole, _, _ = gradient(learner, experience)
    number = sum(parameter.numel() for parameter in learner.critic.parameters())
    assert distance(found[0], whole[-number:]) < 1e-12, "the policy loss says nothing to the critic"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_value_heads_gradient(
    config, make_learner, experience_of, moved, flat_gradient, distance, monkeypatch, level
):
    """That of the value loss of a pass through the whole policy, at each minibatch; the trunk has none."""
    learner = make_learner(config(importance_level=level, value_epochs=3), noise=0.05)
    e, found = moved(experience_of(learner)), []

    def noted(_, modules, *__):
        found.append(flat_gradient(*modules))
        assert all(parameter.grad is None for parameter in learner.policy.lm.parameters())
        modules[0].zero_grad()
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


def test_a_loss_that_is_no_number_leaves_the_weights_as_they_were(config, make_learner, experience_of):
    learner = make_learner(config(), torch.float32)
    experience = experience_of(learner)
    experience.advantages[0, 0] = float("nan")
    before = [p.detach().clone() for p in learner.policy.lm.parameters()]
    for _ in range(4):
        learn(learner, experience)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.lm.parameters(), strict=True))
    with pytest.raises(TrainingError, match=r"4 steps in a row were skipped .* update 4: loss/policy nan"):
        learner.non_finite_guard.check()


SIZES = [(1, 8, 1), (1, 4, 2), (3, 2, 12)]


@pytest.mark.parametrize(
    ("train", "epochs", "size", "steps"),
    [
        pytest.param(train, *sizes, marks=() if sizes == SIZES[2] else pytest.mark.exhaustive)
        for train in (train_ppo, train_grpo)
        for sizes in SIZES
    ],
)
def test_each_minibatch_of_each_epoch_is_one_optimizer_step(config, length, monkeypatch, train, epochs, size, steps):
    """A value head has steps of its own besides."""
    step, calls = update.optimizer_step, []

    def counted(optimizer, modules, *options):
        calls.append(isinstance(modules[0], ValueHead))
        return step(optimizer, modules, *options)

    monkeypatch.setattr(update, "optimizer_step", counted)
    kind = {"kind": GRPOConfig} if train is train_grpo else {"value_epochs": 3}
    train(config(**kind, ppo_epochs=epochs, minibatch_size=size, steps=1), rewards=[length])
    assert calls.count(False) == steps
    assert calls.count(True) == (0 if train is train_grpo else 3 * 8 // size)


# --------------------------------------------------------------------------------------------- the end of an update


@pytest.fixture
def learned(make_learner, experience_of, moved):
    """``learned(settings)``: a learner after one rollout batch, the metrics, and approx_kl of each minibatch visited."""

    def run(settings, *, sampled_by_another=False):
        torch.manual_seed(3)
        learner = make_learner(settings)
        experience = experience_of(learner)
        experience = moved(experience) if sampled_by_another else experience
        learner, visited = replace(learner, generator=torch.Generator().manual_seed(1)), []

        def noted(learner, minibatch, recorder, *arguments, **options):
            backward_minibatch(learner, minibatch, recorder, *arguments, **options)
            visited.append(recorder.approx_kl)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo, "backward_minibatch", noted)
            metrics = learn(learner, experience).metrics
        return learner, metrics, [float(kl) for kl in visited]

    return run


def equal_policies(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.policy.parameters(), b.policy.parameters(), strict=True))


@contextlib.contextmanager
def no_more_steps_than(number):
    """Of the policy."""
    right, steps = update.optimizer_step, []

    def step(optimizer, modules, *options):
        if isinstance(modules[0], ValueHead):
            return right(optimizer, modules, *options)
        steps.append(1)
        return right(optimizer, modules, *options) if len(steps) <= number else 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "optimizer_step", step)
        yield


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_update_ends_before_the_step_at_which_the_policy_is_too_far(config, learned, level):
    settings = config(importance_level=level, minibatch_size=4, ppo_epochs=3, learning_rate=3e-3)
    _, free, without = learned(settings)
    assert len(without) == 6
    assert "policy/update_frac" not in free
    limit = sorted(without)[3]
    stop = next(i for i, kl in enumerate(without) if kl > limit)
    assert 1 < stop < 5
    learner, metrics, visited = learned(replace(settings, approx_kl_limit=limit))
    assert visited == without[: stop + 1]
    assert metrics["policy/update_frac"] == pytest.approx(stop / 6)
    assert metrics["policy/approx_kl"] == pytest.approx(sum(visited) / len(visited))
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
    with no_more_steps_than(stop):  # the same steps without a limit
        same, _, _ = learned(settings)
    assert equal_policies(learner, same)


def test_a_limit_that_is_not_reached_changes_nothing(config, learned):
    settings = config(minibatch_size=4, learning_rate=1e-3)
    free, _, _ = learned(settings)
    limited, metrics, _ = learned(replace(settings, approx_kl_limit=1e3))
    assert metrics["policy/update_frac"] == 1
    assert equal_policies(free, limited)


def test_the_first_minibatch_is_always_learned_from(config, learned):
    """However far it says the policy is: it has not moved in this update, and a step must do something."""
    settings = config(minibatch_size=4, ppo_epochs=2, learning_rate=1e-3, approx_kl_limit=1e-9)
    _, metrics, visited = learned(settings, sampled_by_another=True)
    assert len(visited) == 2
    assert visited[0] > 1e-3
    assert metrics["policy/update_frac"] == pytest.approx(1 / 4)
