"""Options of PPO: what each does, by its formula, and what none of them may break."""

import json
from dataclasses import replace

import pytest
import torch

from heedful import core
from heedful.checkpoints.load import load_causal_lm, load_value_model
from heedful.checkpoints.save import VALUE_HEAD, load_tensors
from heedful.checkpoints.tokenizer import load_tokenizer
from heedful.commands import ppo
from heedful.configs.a2c import A2CConfig
from heedful.configs.ppo import PPOConfig
from heedful.core.score_norm import ScoreNorm
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy, freeze
from heedful.rewards import Reward
from heedful.sampling.sampler import make_sampler
from heedful.train.online.experience import Models, collect
from heedful.train.online.ppo import accumulate, accumulate_critic, learn, train_ppo
from heedful.train.online.shared import penalise_missing_eos
from heedful.train.optimization import MetricSums, make_optimizer
from heedful.types import Message, Prompt

CPU = torch.device("cpu")
PROMPTS = [
    Prompt("say ab", "p:1"),
    Prompt("一只猫", "p:2"),
    Prompt((Message("user", "hello there, how are you?"),), "p:3"),
    Prompt("x", "p:4"),
]
A2C = {"policy_loss": "a2c", "ppo_epochs": 1}
VARIANTS = {
    "response": {"action": "response"},
    "a2c": A2C,
    "a2c-response": {**A2C, "action": "response"},
    "bounds": {"clip_range_high": 0.05, "dual_clip": 1.1},
    "response-bounds": {"action": "response", "clip_range_high": 0.05, "dual_clip": 1.1},
    "k2-in-loss": {"kl_in": "loss", "kl_kind": "k2"},
    "k3-in-loss": {"kl_in": "loss", "kl_kind": "k3", "action": "response", "entropy_coef": 0.02},
    "separate-response": {"action": "response", "critic": "separate"},
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def share_of_a(completions, **_):
    return [completion.count("a") / max(1, len(completion)) for completion in completions]


def length(completions, **_):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]


@pytest.fixture
def config(tiny, prompts, tmp_path):
    def make(config_class=PPOConfig, **changes):
        settings = {
            "model": tiny("gpt2"),
            "data": prompts,
            "output": tmp_path / "run",
            "eval_fraction": 0.3,
            "steps": 2,
            "rollout_batch_size": 8,
            "samples_per_prompt": 2,
            "minibatch_size": 8,
            "max_new_tokens": 12,
            "sample_every": 0,
            "eval_every": 0,
            "dtype": "float32",
        }
        return config_class(**(settings | changes))

    return make


def make_policy(folder, *, noise=0.0, with_value_head=False):
    policy = Policy(load_causal_lm(folder).double(), with_value_head=with_value_head)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    disable_dropout(policy)
    return policy


def make_models(settings, *, noise=0.05):
    """Policy and critic from one checkpoint with a value head that is not zero, and a reference ``noise`` away."""
    policy = make_policy(settings.model, with_value_head=settings.critic == "shared")
    value_model = None
    if settings.critic == "separate":
        value_model = load_value_model(settings.model, device=CPU, compute_dtype=torch.float32).double()
        disable_dropout(value_model)
    head = policy.value_head if value_model is None else value_model.value_head
    torch.nn.init.normal_(head.weight, std=0.3)
    return Models(policy, freeze(make_policy(settings.model, noise=noise)), value_model)


def make_experience(models, settings, **options):
    renderer = Renderer(load_tokenizer(settings.model))
    encoded = [EncodedPrompt(p, renderer.prompt_ids(p.prompt)) for p in PROMPTS for _ in range(2)]
    arguments = {
        "rewards": [Reward("length", length)],
        "score_norm": ScoreNorm(),
        "kl_coef": 0.1,
        "generator": torch.Generator().manual_seed(0),
    }
    sampler = make_sampler(settings, renderer, models.policy)
    return collect(models, encoded, sampler=sampler, config=settings, **(arguments | options))[0]


def moved(experience):
    """Old log-probs and values as if the policy had moved since, so that ratios are not 1 and some are clipped."""
    generator = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(experience.old_logprobs.shape, generator=generator, dtype=torch.float64)
    return replace(experience, old_logprobs=experience.old_logprobs + noise, old_values=experience.old_values + noise)


def flat_gradient(models):
    return torch.cat([p.grad.flatten() for module in models.trained for p in module.parameters() if p.grad is not None])


def gradient(models, experience, settings, **changes):
    for module in models.trained:
        module.zero_grad()
    sums = MetricSums()
    approx_kl = accumulate(models, experience, replace(settings, **changes), sums)
    return flat_gradient(models), sums.means(1), float(approx_kl)


def distance(a, b):
    return float((a - b).norm() / b.norm())


@variants
def test_micro_batch_size_does_not_change_the_gradient(config, variant):
    settings = config(**VARIANTS[variant])
    models = make_models(settings)
    experience = moved(make_experience(models, settings))
    assert len(set(experience.batch.response_mask.sum(dim=1).tolist())) > 1, "rows of equal length would prove nothing"
    whole, metrics, approx_kl = gradient(models, experience, settings, micro_batch_size=8)
    for size in (1, 3):
        split, same_metrics, same_kl = gradient(models, experience, settings, micro_batch_size=size)
        assert distance(split, whole) < 1e-12
        assert same_metrics == pytest.approx(metrics, rel=1e-9)
        assert same_kl == pytest.approx(approx_kl, rel=1e-9)


@variants
def test_on_the_first_minibatch_the_ratio_is_1(config, variant):
    settings = config(**VARIANTS[variant], micro_batch_size=3, temperature=0.7)
    models = make_models(settings)
    _, metrics, approx_kl = gradient(models, make_experience(models, settings), settings)
    assert approx_kl == metrics.get("policy/approx_kl", 0.0)
    assert approx_kl < 1e-10
    assert metrics.get("policy/clip_frac", 0.0) == 0.0


def formula(models, e, settings):
    """The loss written out row by row from the definitions in docs/ppo.md, and its surrogate alone."""
    batch, mask = e.batch, e.batch.response_mask
    out = models.policy(batch.ids, batch.attention_mask, mask, temperature=settings.temperature, with_entropy=True)
    values = out.values
    if models.value_model is not None:
        values = models.value_model(batch.ids, batch.attention_mask, mask)
    high = settings.clip_range if settings.clip_range_high is None else settings.clip_range_high
    surrogates, errors = [], []
    for row, n in enumerate(mask.sum(dim=1).tolist()):
        actions = [slice(0, n)] if settings.action == "response" else [slice(t, t + 1) for t in range(n)]
        for action in actions:
            logprob, a = out.logprobs[row, action].sum(), e.advantages[row, action.start]
            ratio = (logprob - e.old_logprobs[row, action].sum()).exp()
            clipped = torch.min(ratio * a, ratio.clamp(1 - settings.clip_range, 1 + high) * a)
            if settings.dual_clip is not None and a < 0:
                clipped = torch.max(clipped, settings.dual_clip * a)
            surrogates.append(logprob * a if settings.policy_loss == "a2c" else clipped)
            v, old, target = (x[row, action.start] for x in (values, e.old_values, e.returns))
            errors.append(torch.max((v - target) ** 2, (old + (v - old).clamp(-0.2, 0.2) - target) ** 2))
    weight = 1.0 if models.value_model is not None else settings.value_coef
    surrogate = -torch.stack(surrogates).mean()
    loss = surrogate + weight * 0.5 * torch.stack(errors).mean()
    if settings.kl_in == "loss":
        d = (out.logprobs - e.ref_logprobs)[mask]
        loss = loss + 0.1 * {"k2": 0.5 * d**2, "k3": (-d).exp() - 1 + d}[settings.kl_kind].mean()
    return loss - settings.entropy_coef * out.entropy[mask].mean(), float(surrogate.detach())


@variants
def test_the_gradient_is_that_of_the_formula(config, variant):
    settings = config(**VARIANTS[variant], temperature=0.7, value_coef=0.3, micro_batch_size=3)
    models = make_models(settings)
    experience = moved(make_experience(models, settings))
    trained, metrics, _ = gradient(models, experience, settings)
    for module in models.trained:
        module.zero_grad()
    loss, surrogate = formula(models, experience, settings)
    loss.backward()
    assert distance(trained, flat_gradient(models)) < 1e-12
    assert metrics["loss/policy"] == pytest.approx(surrogate, rel=1e-9)


def test_every_option_of_the_loss_changes_the_gradient(config):
    settings = config(value_coef=0.0)
    models = make_models(settings)
    experience = moved(make_experience(models, settings))
    standard, _, _ = gradient(models, experience, settings)
    for changes in (
        {"action": "response"},
        A2C,
        {"clip_range_high": 0.05},
        {"dual_clip": 1.05},
        {"kl_in": "loss", "kl_kind": "k2"},
        {"kl_in": "loss", "kl_kind": "k3"},
    ):
        assert distance(gradient(models, experience, settings, **changes)[0], standard) > 1e-3, changes


# ------------------------------------------------------------------------------------------------------ response level


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_response_is_one_action(config, critic):
    """Advantage: score - kl_coef * KL - V(prompt), whitened over the responses. The value's target: all but the V."""
    settings = config(action="response", critic=critic, missing_eos_penalty=0.7)
    models = make_models(settings)
    e = make_experience(models, settings, kl_coef=0.2)
    mask = e.batch.response_mask
    kl = torch.where(mask, e.old_logprobs - e.ref_logprobs, 0.0).sum(dim=1)
    assert kl.abs().min() > 1e-3
    cut = torch.tensor([completion.truncated for completion in e.completions])
    target = torch.tensor(e.scores) - 0.7 * cut - 0.2 * kl
    torch.testing.assert_close(e.returns[:, 0], target, rtol=1e-6, atol=1e-6)
    raw = target - e.old_values[:, 0]
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(e.advantages[:, 0], expected, rtol=1e-6, atol=1e-6)
    assert not e.advantages[:, 1:].any()
    assert not e.returns[:, 1:].any()


def test_values_of_a_response_are_measured_at_the_prompt(config):
    """value/mean and value/explained_variance count one value a response."""
    settings = config(action="response")
    models = make_models(settings)
    renderer = Renderer(load_tokenizer(settings.model))
    encoded = [EncodedPrompt(p, renderer.prompt_ids(p.prompt)) for p in PROMPTS for _ in range(2)]
    e, metrics = collect(
        models,
        encoded,
        rewards=[Reward("length", length)],
        sampler=make_sampler(settings, renderer, models.policy),
        score_norm=ScoreNorm(),
        kl_coef=0.1,
        config=settings,
        generator=torch.Generator().manual_seed(0),
    )
    value, target = e.old_values[:, 0], e.returns[:, 0]
    assert metrics["value/mean"] == pytest.approx(float(value.mean()), rel=1e-9)
    explained = 1 - (target - value).var(correction=0) / target.var(correction=0)
    assert metrics["value/explained_variance"] == pytest.approx(float(explained), rel=1e-9)


def test_rewards_of_whole_responses_can_be_whitened(config):
    settings = config(action="response", whiten_rewards=True)
    models = make_models(settings)
    plain = make_experience(models, replace(settings, whiten_rewards=False)).returns[:, 0]
    scaled = make_experience(models, settings).returns[:, 0]
    expected = (plain - plain.mean()) / plain.std(correction=0) + plain.mean()
    torch.testing.assert_close(scaled, expected, rtol=1e-9, atol=1e-9)


# ----------------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kind_of_penalty_in_the_reward(config, kind):
    """With discount and lambda 1 the first return is the sum of a response's rewards."""
    settings = config(kl_kind=kind, gae_lambda=1.0)
    models = make_models(settings)
    e = make_experience(models, settings)
    d = e.old_logprobs - e.ref_logprobs
    penalty = {"k1": d, "k2": 0.5 * d**2, "k3": (-d).exp() - 1 + d}[kind]
    total = torch.tensor(e.scores) - 0.1 * torch.where(e.batch.response_mask, penalty, 0.0).sum(dim=1)
    torch.testing.assert_close(e.returns[:, 0], total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(e.kl, torch.where(e.batch.response_mask, d, 0.0).sum(dim=1))


def test_a_penalty_in_the_loss_is_not_in_the_reward_and_is_told(config):
    settings = config(kl_in="loss", kl_kind="k3", gae_lambda=1.0)
    models = make_models(settings)
    e = make_experience(models, settings, kl_coef=0.25)
    torch.testing.assert_close(e.returns[:, 0], torch.tensor(e.scores).double(), rtol=1e-6, atol=1e-6)
    d = (e.old_logprobs - e.ref_logprobs)[e.batch.response_mask]
    _, metrics, _ = gradient(models, e, settings)
    assert metrics["loss/kl"] == pytest.approx(0.25 * float(((-d).exp() - 1 + d).mean()), rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------- a2c


def test_a2c_is_ppo_at_ratio_1(config):
    settings = config()
    models = make_models(settings)
    experience = make_experience(models, settings)
    clipped, _, _ = gradient(models, experience, settings)
    unclipped, metrics, _ = gradient(models, experience, settings, **A2C)
    assert distance(unclipped, clipped) < 1e-12
    assert "policy/approx_kl" not in metrics


def test_an_a2c_run_is_its_own_algorithm(config):
    settings = config(A2CConfig, minibatch_size=0, steps=1)
    assert train_ppo(settings, rewards=[length])["algorithm"] == "a2c"
    environment = json.loads((settings.output / "environment.json").read_text(encoding="utf-8"))
    assert environment["command"] == "heedful a2c"


# ------------------------------------------------------------------------------------------------------- missing EOS


@pytest.mark.parametrize(("missing_eos", "expected"), [("subtract", [2.0, 0.5]), ("replace", [2.0, -1.5])])
def test_scores_of_cut_responses(config, missing_eos, expected):
    settings = config(missing_eos=missing_eos, missing_eos_penalty=1.5)
    scores = penalise_missing_eos(torch.tensor([2.0, 2.0]), torch.tensor([False, True]), settings)
    assert scores.tolist() == expected


def test_a_replaced_score_is_not_normalised(config):
    """Minus the penalty on the scale of normalised scores, where 1 is a standard deviation."""
    settings = config(missing_eos="replace", missing_eos_penalty=1.0, gae_lambda=1.0)
    models = make_models(settings)
    e = make_experience(models, settings, score_norm=ScoreNorm(mean=3.0, std=2.0), kl_coef=0.0)
    cut = [completion.truncated for completion in e.completions]
    assert 0 < sum(cut) < len(cut)
    expected = [-1.0 if c else (score - 3.0) / 2.0 for c, score in zip(cut, e.scores, strict=True)]
    assert e.returns[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


# --------------------------------------------------------------------------------------------- the end of an update


def optimizer_of(models, settings):
    groups = [(module, settings.learning_rate) for module in models.trained]
    return make_optimizer(groups, settings)


def learned(settings, *, sampled_by_another=False):
    """A policy after one rollout batch, the metrics, and approx_kl of every minibatch visited."""
    torch.manual_seed(3)
    models = make_models(settings, noise=0.0)
    experience = make_experience(models, settings)
    experience = moved(experience) if sampled_by_another else experience
    visited = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "accumulate", lambda *a: visited.append(accumulate(*a)) or visited[-1])
        generator = torch.Generator().manual_seed(1)
        metrics = learn(models, experience, optimizer_of(models, settings), settings, generator)
    return models, metrics, [float(kl) for kl in visited]


@pytest.mark.parametrize("action", ["token", "response"])
def test_an_update_ends_before_the_step_at_which_the_policy_is_too_far(config, action):
    settings = config(action=action, minibatch_size=4, ppo_epochs=3, learning_rate=3e-3)
    _, free, without = learned(settings)
    assert len(without) == 6
    assert "policy/update_frac" not in free
    limit = sorted(without)[3]
    stop = next(i for i, kl in enumerate(without) if kl > limit)
    assert 1 < stop < 5
    models, metrics, visited = learned(replace(settings, approx_kl_limit=limit))
    assert visited == without[: stop + 1]
    assert metrics["policy/update_frac"] == pytest.approx(stop / 6)
    assert metrics["policy/approx_kl"] == pytest.approx(sum(visited) / len(visited))
    assert all(parameter.grad is None for parameter in models.policy.parameters())
    steps = []
    with pytest.MonkeyPatch.context() as patch:  # the same steps without a limit, and no more
        right = ppo.optimizer_step
        patch.setattr(ppo, "optimizer_step", lambda *a: steps.append(1) or (right(*a) if len(steps) <= stop else 0.0))
        same, _, _ = learned(settings)
    assert all(torch.equal(a, b) for a, b in zip(models.policy.parameters(), same.policy.parameters(), strict=True))


def test_a_limit_that_is_not_reached_changes_nothing(config):
    settings = config(minibatch_size=4, learning_rate=1e-3)
    free, _, _ = learned(settings)
    limited, metrics, _ = learned(replace(settings, approx_kl_limit=1e3))
    assert metrics["policy/update_frac"] == 1
    assert all(torch.equal(a, b) for a, b in zip(free.policy.parameters(), limited.policy.parameters(), strict=True))


def test_the_first_minibatch_is_always_learned_from(config):
    """However far it says the policy is: it has not moved in this update, and a step must do something."""
    settings = config(minibatch_size=4, ppo_epochs=2, learning_rate=1e-3, approx_kl_limit=1e-9)
    _, metrics, visited = learned(settings, sampled_by_another=True)
    assert len(visited) == 2
    assert visited[0] > 1e-3
    assert metrics["policy/update_frac"] == pytest.approx(1 / 4)


# ------------------------------------------------------------------------------------------------------------ warm-up


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_while_the_critic_warms_up_the_policy_stays_bit_for_bit(config, critic):
    """Weight decay is on, which would move weights without a gradient too; the next step then moves them."""
    settings = config(
        critic=critic,
        critic_warmup_steps=1,
        save_every=1,
        learning_rate=1e-3,
        weight_decay=0.1,
        kl_target=1.0,
        kl_horizon=100,
        entropy_coef=0.01,
    )
    train_ppo(settings, rewards=[length])
    first, second = (settings.output / "checkpoints" / f"step-00000{i}" for i in (1, 2))
    start, warmed, trained = (load_causal_lm(str(f)).state_dict() for f in (settings.model, first, second))
    assert all(torch.equal(start[name], warmed[name]) for name in start)
    assert not all(torch.equal(start[name], trained[name]) for name in start)
    head = (first if critic == "shared" else first / "value_model") / VALUE_HEAD
    assert float(load_tensors(head)["weight"].abs().max()) > 1e-3
    lines = [json.loads(line) for line in (settings.output / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if "loss/value" in line]
    assert ["loss/policy" in line for line in steps] == [False, True]
    assert steps[1]["reference/kl_coef"] == settings.kl_coef, "a policy that stands still does not steer it"


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("action", ["token", "response"])
def test_the_critics_gradient_while_it_warms_up(config, critic, action):
    """That of the value loss alone, whatever the micro-batch size."""
    settings = config(critic=critic, action=action)
    models = make_models(settings)
    experience = moved(make_experience(models, settings))
    found = []
    for size, tokens in ((8, None), (3, None), (8, 70)):
        for module in models.trained:
            module.zero_grad()
        changed = replace(settings, micro_batch_size=size, micro_batch_tokens=tokens)
        accumulate_critic(models, experience, changed, MetricSums())
        assert all(parameter.grad is None for parameter in models.policy.lm.parameters())
        found.append(flat_gradient(models))
    assert distance(found[1], found[0]) < 1e-12
    assert distance(found[2], found[0]) < 1e-12
    accumulate_gradient, _, _ = gradient(models, experience, settings)
    head = models.policy.value_head if models.value_model is None else models.value_model
    number = sum(parameter.numel() for parameter in head.parameters())
    assert distance(found[0], accumulate_gradient[-number:]) < 1e-12, "the policy loss says nothing to the head"


# ----------------------------------------------------------------------------------------------------------- learning


def learning(config, config_class=PPOConfig, **changes):
    settings = {
        "steps": 24,
        "rollout_batch_size": 64,
        "samples_per_prompt": 8,
        "minibatch_size": 32,
        "micro_batch_size": 32,
        "learning_rate": 2e-3,
        "value_learning_rate": 1e-2,
        "lr_schedule": "constant",
        "kl_coef": 0.0,
        "response_length": "fixed",
    }
    return config(config_class, **(settings | changes))


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (PPOConfig, {"action": "response"}),
        (A2CConfig, {"minibatch_size": 0, "learning_rate": 1e-2}),
        (A2CConfig, {"minibatch_size": 0, "learning_rate": 1e-2, "action": "response"}),
    ],
    ids=["response", "a2c", "a2c-response"],
)
def test_raises_the_share_of_a_letter(config, config_class, changes):
    summary = train_ppo(learning(config, config_class, **changes), rewards=[share_of_a])
    first, last = (summary[name]["eval/score_mean"] for name in ("first_evaluation", "last_evaluation"))
    assert last - first >= 0.3


def test_a_penalty_in_the_loss_keeps_the_policy_near_its_reference(config, tmp_path):
    kl = {}
    for coef in (0.0, 30.0):
        settings = learning(
            config, kl_in="loss", kl_kind="k2", kl_coef=coef, steps=10, output=tmp_path / str(coef), eval_fraction=0.3
        )
        kl[coef] = train_ppo(settings, rewards=[share_of_a])["last_step"]["reference/kl"]
    assert kl[30.0] < 0.2 * kl[0.0]


def test_k1_in_a_loss_has_no_gradient_on_average(config):
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


def test_everything_at_once(config, demonstrations, tmp_path):
    """Options that are independent of each other work together: a run with nearly all of them is finite throughout."""
    settings = config(
        action="response",
        critic="separate",
        clip_range_high=0.3,
        dual_clip=3.0,
        kl_in="loss",
        kl_kind="k3",
        kl_target=3.0,
        approx_kl_limit=1.0,
        critic_warmup_steps=1,
        ptx_data=demonstrations,
        ptx_coef=0.5,
        ema_decay=0.9,
        missing_eos="replace",
        missing_eos_penalty=1.0,
        score_norm_samples=8,
        whiten_rewards=True,
        entropy_coef=0.01,
        minibatch_size=4,
        steps=3,
    )
    summary = train_ppo(settings, rewards=[length])
    expected = {"loss/kl", "loss/ptx", "loss/policy", "loss/value", "policy/update_frac", "reference/kl_coef"}
    assert expected <= set(summary["last_step"])
    assert all(abs(value) < 1e6 for value in summary["last_step"].values())
    again = tmp_path / "再来"
    assert train_ppo(replace(settings, output=again), rewards=[length])["steps"] == 3
    models = [(run / "final" / "model.safetensors").read_bytes() for run in (settings.output, again)]
    assert models[0] == models[1], "the same seed, the same run"
