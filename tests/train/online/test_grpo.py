"""GRPO and its relatives: advantages by hand, what an update must not depend on, what options do, and that it learns."""

import json
from dataclasses import replace

import pytest
import torch

from heedful import core
from heedful.checkpoints.load import load_causal_lm
from heedful.checkpoints.tiny import make_tiny_model
from heedful.checkpoints.tokenizer import load_tokenizer
from heedful.commands import grpo
from heedful.configs.grpo import GRPOConfig
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.errors import ConfigError
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy, freeze
from heedful.rewards import Reward
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.train.online.grpo import accumulate, collect, train_grpo
from heedful.train.optimization import MetricSums
from heedful.types import Message, Prompt

PROMPTS = [Prompt("say ab", "p:1"), Prompt("一只猫", "p:2"), Prompt((Message("user", "hello there!"),), "p:3")]
VARIANTS = {
    "grpo": {},
    "dr-grpo": {"advantage": "group-mean", "aggregate": "fixed"},
    "dapo": {"aggregate": "token", "clip_range_high": 0.28, "kl_coef": 0.0},
    "rloo": {"advantage": "leave-one-out", "ratio": "sequence", "kl_in": "reward"},
    "gspo": {"ratio": "sequence-mean", "clip_range": 0.02, "kl_coef": 0.0},
    "reinforce": {"advantage": "batch-mean", "ratio": "sequence", "kl_in": "reward"},
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def share_of_a(completions, **_):
    return [completion.count("a") / max(1, len(completion)) for completion in completions]


def length(completions, **_):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]


@pytest.fixture
def config(tiny, prompts, tmp_path):
    def make(**changes):
        settings = {
            "model": tiny("gpt2"),
            "data": prompts,
            "output": tmp_path / "run",
            "eval_fraction": 0.3,
            "steps": 2,
            "rollout_batch_size": 8,
            "samples_per_prompt": 4,
            "minibatch_size": 8,
            "max_new_tokens": 12,
            "sample_every": 0,
            "eval_every": 0,
            "dtype": "float32",
        }
        return GRPOConfig(**(settings | changes))

    return make


def model(folder, dtype=torch.float64, *, noise=0.0):
    policy = Policy(load_causal_lm(folder).to(dtype))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    disable_dropout(policy)
    return policy


def groups_of(policy, reference, settings):
    renderer = Renderer(load_tokenizer(settings.model))
    asked = [EncodedPrompt(p, renderer.prompt_ids(p.prompt)) for p in PROMPTS for _ in range(4)]
    sampler = make_sampler(settings, renderer, policy)
    generator = torch.Generator().manual_seed(0)
    rewards = [Reward("length", length)]
    return collect(policy, reference, asked, rewards=rewards, sampler=sampler, config=settings, generator=generator)


@pytest.mark.parametrize("setting", [("gpt2", torch.float64, 1e-10), ("qwen3", torch.float32, 1e-5)])
def test_before_the_first_update_the_ratio_is_1_and_the_kl_is_0(config, tiny, setting):
    architecture, dtype, limit = setting
    settings = config(model=tiny(architecture), micro_batch_size=5, temperature=0.7)
    policy = model(settings.model, dtype)
    groups, metrics = groups_of(policy, freeze(model(settings.model, dtype)), settings)
    batch = groups.batch
    now = policy(batch.ids, batch.attention_mask, batch.response_mask, temperature=0.7).logprobs.detach()
    assert float((now - groups.old_logprobs).exp().sub(1).abs().max()) < limit
    assert float(groups.kl.abs().max()) < limit
    assert abs(metrics["reference/kl"]) < limit


def test_advantages_by_hand(config):
    """Scores 1, 2, 3, 6 of a group: mean 3, deviations -2, -1, 0, 3, sample variance 14 / 3; the others' means 11/3, 10/3,
    3, 2. The second group's scores are equal."""
    scores = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0])
    deviation = (14 / 3) ** 0.5 + 1e-4
    for advantage, expected in {
        "group": [-2 / deviation, -1 / deviation, 0.0, 3 / deviation],
        "group-mean": [-2.0, -1.0, 0.0, 3.0],
        "leave-one-out": [1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0],
    }.items():
        found = grpo.advantages_of(scores, config(advantage=advantage)).tolist()
        assert found == pytest.approx([*expected, 0, 0, 0, 0], abs=1e-5), advantage
    found = grpo.advantages_of(scores, config(advantage="batch-mean", samples_per_prompt=1)).tolist()
    assert found == pytest.approx([-3, -2, -1, 2, 1, 1, 1, 1], abs=1e-5), "the mean of all eight is 4"


@pytest.mark.parametrize(("ratio", "aggregate"), [("token", "token"), ("sequence", "sequence")])
def test_one_step_against_the_batchs_mean_is_reinforce(config, ratio, aggregate):
    """The gradient of -mean((score - mean score) * log pi), over tokens or whole responses; at ratio 1 nothing is clipped."""
    settings = config(
        advantage="batch-mean", samples_per_prompt=1, ratio=ratio, aggregate=aggregate, kl_coef=0.0, ppo_epochs=1
    )
    policy = model(settings.model)
    groups, _ = groups_of(policy, freeze(model(settings.model)), settings)
    scores = torch.tensor(length([c.response for c in groups.completions])).double()
    assert scores.std() > 0.1
    found, _ = gradient(policy, groups, settings)
    policy.zero_grad()
    batch, mask = groups.batch, groups.batch.response_mask
    logprobs, advantages = policy(batch.ids, batch.attention_mask, mask).logprobs, scores - scores.mean()
    if ratio == "token":
        core.a2c_policy_loss(logprobs, advantages.unsqueeze(1).expand_as(logprobs), mask)[0].backward()
    else:
        core.a2c_policy_loss(logprobs.sum(dim=1), advantages, mask.any(dim=1))[0].backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_replaced_scores_of_cut_responses_are_compared(config):
    settings = config(advantage="group-mean", missing_eos="replace", missing_eos_penalty=7.0, kl_coef=0.0)
    policy = model(settings.model)
    groups, _ = groups_of(policy, freeze(model(settings.model)), settings)
    cut = torch.tensor([completion.truncated for completion in groups.completions])
    assert 0 < cut.sum() < len(cut)
    shaped = torch.where(cut, -7.0, torch.tensor(length([c.response for c in groups.completions]))).view(-1, 4)
    torch.testing.assert_close(groups.advantages, (shaped - shaped.mean(dim=1, keepdim=True)).flatten())


def test_penalties_come_off_the_score_before_groups_are_compared(config, tiny):
    """Cut responses lose the penalty, and with ``kl_in`` reward each loses kl_coef times its own KL."""
    settings = config(advantage="group-mean", missing_eos_penalty=7.0, kl_in="reward", kl_coef=0.5)
    policy, reference = model(settings.model), freeze(model(settings.model, noise=0.05))
    groups, metrics = groups_of(policy, reference, settings)
    mask = groups.batch.response_mask
    kl = ((groups.old_logprobs - groups.ref_logprobs) * mask).sum(dim=1)
    cut = torch.tensor([completion.truncated for completion in groups.completions])
    assert 0 < cut.sum() < len(cut)
    assert kl.abs().min() > 1e-3
    shaped = torch.tensor(length([c.response for c in groups.completions])) - 7.0 * cut - 0.5 * kl
    expected = (shaped.view(-1, 4) - shaped.view(-1, 4).mean(dim=1, keepdim=True)).flatten()
    torch.testing.assert_close(groups.advantages.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert metrics["reward/shaped_mean"] == pytest.approx(float(shaped.mean()), rel=1e-5)
    in_loss, _ = groups_of(policy, reference, replace(settings, kl_in="loss"))
    assert not torch.allclose(in_loss.advantages.double(), groups.advantages.double())


def gradient(policy, groups, settings):
    policy.zero_grad()
    sums = MetricSums()
    accumulate(policy, groups, settings, sums)
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]), sums.means(1)


def off_policy(config, **changes):
    """A policy that has moved since it sampled, so that ratios are not 1 and some are clipped."""
    settings = config(temperature=0.7, **changes)
    groups, _ = groups_of(model(settings.model), freeze(model(settings.model, noise=0.02)), settings)
    torch.manual_seed(3)
    return model(settings.model, noise=0.02), groups, settings


@variants
def test_micro_batch_size_does_not_change_the_gradient(config, variant):
    policy, groups, settings = off_policy(config, **VARIANTS[variant])
    whole, metrics = gradient(policy, groups, replace(settings, micro_batch_size=12))
    assert 0 < metrics["policy/clip_frac"] < 1
    for size in (1, 5):
        split, same = gradient(policy, groups, replace(settings, micro_batch_size=size))
        assert float((split - whole).norm() / whole.norm()) < 1e-12
        assert same == pytest.approx(metrics, rel=1e-9)


@variants
def test_a_limit_of_tokens_does_not_change_the_gradient(config, passes, variant):
    policy, groups, settings = off_policy(config, **VARIANTS[variant])
    whole, metrics = gradient(policy, groups, replace(settings, micro_batch_size=12))
    for tokens in (1, 70, 100):
        seen = passes(policy)
        split, same = gradient(policy, groups, replace(settings, micro_batch_size=12, micro_batch_tokens=tokens))
        assert float((split - whole).norm() / whole.norm()) < 1e-12
        assert same == pytest.approx(metrics, rel=1e-9)
        assert all(rows == 1 or taken <= tokens for rows, taken in seen)
        assert sum(rows for rows, _ in seen) == 12
        assert (len(seen) == 12) == (tokens == 1)


def test_the_loss_is_the_formula_on_the_whole_minibatch(config):
    """Also that temperature, ranges, penalty and the three ways to average reach it."""
    policy, groups, settings = off_policy(config)
    batch, mask = groups.batch, groups.batch.response_mask
    now = policy(batch.ids, batch.attention_mask, mask, temperature=0.7).logprobs.detach()
    for changes in ({}, {"aggregate": "token"}, {"aggregate": "fixed"}, {"clip_range_high": 0.6}, {"kl_coef": 3.0}):
        changed = replace(settings, **changes)
        loss, _ = core.grpo_loss(
            now,
            groups.old_logprobs,
            groups.ref_logprobs,
            groups.advantages,
            mask,
            clip_range=0.2,
            clip_range_high=changes.get("clip_range_high"),
            kl_coef=changes.get("kl_coef", 0.04),
            aggregate=changes.get("aggregate", "sequence"),
            max_new_tokens=12,
        )
        assert gradient(policy, groups, changed)[1]["loss/policy"] == pytest.approx(float(loss), rel=1e-9)
    for ratio, normalise in (("sequence", False), ("sequence-mean", True)):
        loss, _ = core.sequence_policy_loss(
            now, groups.old_logprobs, groups.advantages, mask, clip_range=0.2, length_normalise=normalise
        )
        changed = replace(settings, ratio=ratio, kl_coef=0.0)
        assert gradient(policy, groups, changed)[1]["loss/policy"] == pytest.approx(float(loss), rel=1e-9)


def test_every_option_of_the_loss_changes_the_gradient(config):
    policy, groups, settings = off_policy(config)
    standard, _ = gradient(policy, groups, settings)
    for changes in (
        {"aggregate": "token"},
        {"aggregate": "fixed"},
        {"clip_range": 0.05},
        {"clip_range_high": 0.01},
        {"kl_coef": 0.0},
        {"kl_in": "reward", "advantage": "group-mean"},
        {"ratio": "sequence", "kl_coef": 0.0},
        {"ratio": "sequence-mean", "kl_coef": 0.0},
        {"temperature": 1.0},
    ):
        changed, _ = gradient(policy, groups, replace(settings, **changes))
        assert float((changed - standard).norm() / standard.norm()) > 1e-3, changes


def test_ties_are_counted_after_penalties(config, monkeypatch):
    """Of three prompts the second and third have equal scores; the third's second response was cut and loses 1."""
    settings = config(missing_eos_penalty=1.0)
    policy, scores = model(settings.model), [1.0, 2.0, 3.0, 4.0, *[5.0] * 8]
    monkeypatch.setattr(grpo, "score", lambda _, completions: (scores, {}))
    respond = Sampler.respond

    def cut(*arguments):
        rollouts, completions = respond(*arguments)
        return replace(rollouts, truncated=torch.arange(12) == 9), completions

    monkeypatch.setattr(Sampler, "respond", cut)
    groups, metrics = groups_of(policy, freeze(model(settings.model)), settings)
    assert metrics["reward/tied_frac"] == pytest.approx(1 / 3)
    assert groups.advantages[4:8].tolist() == [0.0] * 4
    assert groups.advantages[9] < 0 < groups.advantages[8]


def test_the_whole_batch_is_one_group_of_reinforce(config):
    """It ties where all scores are equal, however few samples a prompt has."""
    settings = config(advantage="batch-mean", samples_per_prompt=1)
    policy = model(settings.model)
    _, metrics = groups_of(policy, freeze(model(settings.model)), settings)
    assert metrics["reward/tied_frac"] == 0.0


def test_another_reference_is_what_the_kl_is_measured_against(config, tmp_path):
    other = tmp_path / "参考"
    make_tiny_model("gpt2", other, hidden_size=32, num_layers=2, max_length=128, seed=5)
    own, theirs = (
        train_grpo(config(reference=reference, steps=1, output=tmp_path / name), rewards=[length])
        for name, reference in (("own", None), ("theirs", str(other)))
    )
    assert own["first_evaluation"]["eval/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(theirs["first_evaluation"]["eval/kl"]) > 1e-3


@pytest.mark.parametrize(("epochs", "size", "steps"), [(1, 8, 1), (1, 4, 2), (3, 2, 12)])
def test_each_minibatch_of_each_epoch_is_one_optimizer_step(config, monkeypatch, epochs, size, steps):
    step, calls = grpo.optimizer_step, []

    def counted(*arguments):
        calls.append(1)
        return step(*arguments)

    monkeypatch.setattr(grpo, "optimizer_step", counted)
    train_grpo(config(ppo_epochs=epochs, minibatch_size=size, steps=1), rewards=[length])
    assert len(calls) == steps


def test_groups_of_equal_scores_teach_nothing(config, tmp_path):
    """Advantages are exactly 0, numbers finite, and without a penalty the weights stay bit for bit."""
    settings = config(kl_coef=0.0, learning_rate=1e-2)
    summary = train_grpo(settings, rewards=[lambda completions, **_: [1.0] * len(completions)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["reward/tied_frac"] for line in lines if "reward/tied_frac" in line] == [1.0, 1.0]
    before, after = (load_causal_lm(str(f)).state_dict() for f in (settings.model, settings.output / "final"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert summary["last_evaluation"]["eval/kl"] == pytest.approx(0, abs=1e-5)


def learning(config, variant, **changes):
    settings = {
        "steps": 40,
        "rollout_batch_size": 64,
        "samples_per_prompt": 8,
        "minibatch_size": 32,
        "micro_batch_size": 32,
        "learning_rate": 2e-3,
        "ppo_epochs": 2,
        "lr_schedule": "constant",
        "response_length": "fixed",
    }
    return config(**(settings | VARIANTS[variant] | {"kl_coef": 0.0} | changes))


@variants
def test_raises_the_share_of_a_letter(config, variant):
    summary = train_grpo(learning(config, variant), rewards=[share_of_a])
    first, last = (summary[name]["eval/score_mean"] for name in ("first_evaluation", "last_evaluation"))
    assert last - first >= 0.3


def test_a_wrong_sign_in_the_loss_would_be_noticed(config, monkeypatch):
    """Negative control of the learning test."""
    right = core.grpo_loss

    def wrong(*tensors, **options):
        loss, metrics = right(*tensors, **options)
        return -loss, metrics

    monkeypatch.setattr(grpo.core, "grpo_loss", wrong)
    summary = train_grpo(learning(config, "grpo"), rewards=[share_of_a])
    assert summary["last_evaluation"]["eval/score_mean"] - summary["first_evaluation"]["eval/score_mean"] < 0.3


@pytest.mark.parametrize(("where", "advantage"), [("loss", "group"), ("reward", "group-mean")])
def test_a_kl_penalty_keeps_the_policy_near_its_reference(config, tmp_path, where, advantage):
    kl = {}
    for coef in (0.0, 3.0):
        changes = {"kl_coef": coef, "kl_in": where, "advantage": advantage, "output": tmp_path / str(coef)}
        settings = learning(config, "grpo", **changes)
        kl[coef] = train_grpo(settings, rewards=[share_of_a])["last_evaluation"]["eval/kl"]
    assert kl[3.0] < 0.3 * kl[0.0]


def test_same_seed_same_run_bit_for_bit(config, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_grpo(config(output=tmp_path / name, seed=seed, learning_rate=1e-3), rewards=[length])
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 1}, "--samples-per-prompt is 1, but responses are compared .* at least 2"),
        ({"ratio": "sequence", "aggregate": "token", "kl_coef": 0.0}, "--aggregate token averages tokens, but --ratio"),
        ({"ratio": "sequence-mean"}, "--ratio sequence-mean has no penalty a token .* --kl-in reward, or --kl-coef 0"),
        (
            {"kl_in": "reward"},
            "--kl-in reward does not go with --advantage group.*--advantage group-mean, or --advantage leave-one-out",
        ),
        ({"clip_range_high": 0.0}, "--clip-range-high must be greater than 0"),
        ({"rollout_batch_size": 9, "minibatch_size": 3}, "--rollout-batch-size 9 is not a multiple of --samples-per"),
    ],
)
def test_settings_that_make_no_sense_are_named(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_rewards_are_needed(config):
    with pytest.raises(ConfigError, match="--rewards is missing"):
        train_grpo(config())
    assert not config().output.exists()


def test_without_a_price_on_kl_the_reference_has_no_pass(config):
    """And no KL is made up: neither among the metrics nor in the table of samples. Evaluations still measure it."""
    settings = config(kl_coef=0.0, num_samples=1, sample_every=1, eval_every=1)
    policy, reference = model(settings.model), freeze(model(settings.model))
    passes = []
    reference.register_forward_hook(lambda *_: passes.append(1))
    _, metrics = groups_of(policy, reference, settings)
    assert not passes
    assert "reference/kl" not in metrics
    groups_of(policy, reference, replace(settings, kl_coef=0.1))
    assert passes
    summary = train_grpo(settings, rewards=[length])
    assert "eval/kl" in summary["last_evaluation"]
    rows = [json.loads(line) for line in (settings.output / "samples.jsonl").read_text("utf-8").splitlines()]
    assert rows
    assert all("kl" not in row for row in rows)
