"""PPO: what must hold before the first update, what an update must not depend on, and that it learns."""

import json
from dataclasses import replace

import pytest
import torch

from heedful import core
from heedful.checkpoints.load import load_causal_lm, load_value_model
from heedful.checkpoints.save import VALUE_HEAD
from heedful.checkpoints.tokenizer import load_tokenizer
from heedful.commands import ppo
from heedful.configs.ppo import PPOConfig
from heedful.core.score_norm import ScoreNorm
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.errors import ConfigError, RewardError, TrainingError
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy, freeze
from heedful.models.value_model import ValueModel
from heedful.rewards import Reward
from heedful.sampling.sampler import make_sampler
from heedful.sampling.teacher_forced import token_outputs
from heedful.train.online.experience import Experience, Models, collect, reference_score_norm
from heedful.train.online.ppo import accumulate, kl_control, learn, train_ppo
from heedful.train.optimization import MetricSums, make_optimizer
from heedful.types import Message, MicroBatch, Prompt

CPU = torch.device("cpu")


def share_of_a(completions, **_):
    return [completion.count("a") / max(1, len(completion)) for completion in completions]


def length(completions, **_):
    """Characters; a completion is a string, or a list with the assistant's message."""
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
            "samples_per_prompt": 2,
            "minibatch_size": 8,
            "max_new_tokens": 12,
            "sample_every": 0,
            "eval_every": 0,
            "dtype": "float32",
        }
        return PPOConfig(**(settings | changes))

    return make


PROMPTS = [
    Prompt("say ab", "p:1"),
    Prompt("一只猫", "p:2"),
    Prompt((Message("user", "hello there, how are you?"),), "p:3"),
    Prompt("x", "p:4"),
]


def make_models(folder: str, critic: str, dtype: torch.dtype) -> Models:
    """Policy, reference and critic from one checkpoint, with a value head that is not zero."""
    policy = Policy(load_causal_lm(folder).to(dtype), with_value_head=critic == "shared")
    value_model: ValueModel | None = None
    if critic == "separate":
        value_model = load_value_model(folder, device=CPU, compute_dtype=torch.float32).to(dtype)
        disable_dropout(value_model)
    head = policy.value_head if value_model is None else value_model.value_head
    torch.nn.init.normal_(head.weight, std=0.3)
    disable_dropout(policy)
    return Models(policy, freeze(Policy(load_causal_lm(folder).to(dtype))), value_model)


def make_experience(models: Models, config: PPOConfig, **options):
    renderer = Renderer(load_tokenizer(config.model))
    encoded = [EncodedPrompt(p, renderer.prompt_ids(p.prompt)) for p in PROMPTS for _ in range(2)]
    sampler = make_sampler(config, renderer, models.policy)
    arguments = {
        "rewards": [Reward("length", length)],
        "score_norm": ScoreNorm(),
        "kl_coef": 0.1,
        "generator": torch.Generator().manual_seed(0),
    }
    return collect(models, encoded, sampler=sampler, config=config, **(arguments | options))


critics = pytest.mark.parametrize("critic", ["shared", "separate"])


@critics
@pytest.mark.parametrize("setting", [("gpt2", torch.float64, 1e-10), ("qwen3", torch.float32, 1e-5)])
def test_before_the_first_update_the_ratio_is_1_and_the_kl_is_0(config, tiny, critic, setting):
    """Also in micro-batches of another size than the old log-probs were computed in, so with other padding and kernels."""
    architecture, dtype, limit = setting
    settings = config(model=tiny(architecture), critic=critic, micro_batch_size=3, temperature=0.7)
    models = make_models(settings.model, critic, dtype)
    experience, metrics = make_experience(models, settings)
    mask = experience.batch.response_mask
    now = models.policy(experience.batch.ids, experience.batch.attention_mask, mask, temperature=0.7).logprobs.detach()
    ratio = (now - experience.old_logprobs).exp()
    assert float((ratio - 1).abs().max()) < limit
    assert float(experience.kl.abs().max()) < limit
    assert abs(metrics["reference/kl"]) < limit


def test_ratio_and_kl_are_exact_where_batch_shapes_are_the_same(config, tiny):
    settings = config(model=tiny("qwen3"), micro_batch_size=8)
    models = make_models(settings.model, "shared", torch.float32)
    experience, metrics = make_experience(models, settings)
    batch = experience.batch
    now = models.policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs
    assert torch.equal(now, experience.old_logprobs)
    assert metrics["reference/kl"] == 0.0


def flat_gradient(models: Models) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for module in models.trained for p in module.parameters() if p.grad is not None])


def minibatch_gradient(models: Models, experience: Experience, config: PPOConfig, size: int) -> torch.Tensor:
    for module in models.trained:
        module.zero_grad()
    accumulate(models, experience, replace(config, micro_batch_size=size), MetricSums())
    return flat_gradient(models)


def moved(experience: Experience) -> Experience:
    """Old log-probs and values as if the policy had moved since, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(experience.old_logprobs.shape, generator=generator, dtype=experience.old_logprobs.dtype)
    return replace(experience, old_logprobs=experience.old_logprobs + noise, old_values=experience.old_values + noise)


@critics
def test_a_limit_of_tokens_does_not_change_the_gradient(config, critic, passes):
    """Nor what the losses hold constant; the limit holds for every pass of every model."""
    settings = config(critic=critic, entropy_coef=0.01)
    models = make_models(settings.model, critic, torch.float64)
    as_sampled, _ = make_experience(models, settings)
    experience = moved(as_sampled)
    whole = minibatch_gradient(models, experience, settings, 8)
    for tokens in (1, 70, 100):
        limited = replace(settings, micro_batch_tokens=tokens)
        trained, reference = [passes(module) for module in models.trained], passes(models.reference)
        split = minibatch_gradient(models, experience, limited, 8)
        assert float((split - whole).norm() / whole.norm()) < 1e-12
        assert trained[0] == trained[-1]
        again, _ = make_experience(models, limited)
        for name in ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns"):
            torch.testing.assert_close(getattr(again, name), getattr(as_sampled, name), rtol=1e-9, atol=1e-9)
        for seen, times in [*((seen, 2) for seen in trained), (reference, 1)]:
            assert all(rows == 1 or taken <= tokens for rows, taken in seen)
            assert sum(rows for rows, _ in seen) == 8 * times
            assert (len(seen) == 8 * times) == (tokens == 1)


@critics
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_micro_batch_size_does_not_change_the_gradient(config, critic, dtype, limit):
    settings = config(critic=critic, entropy_coef=0.01)
    models = make_models(settings.model, critic, dtype)
    experience = moved(make_experience(models, settings)[0])
    assert len(set(experience.batch.response_mask.sum(dim=1).tolist())) > 1, "rows of equal length would prove nothing"
    whole = minibatch_gradient(models, experience, settings, 8)
    for size in (1, 3):
        split = minibatch_gradient(models, experience, settings, size)
        assert float((split - whole).norm() / whole.norm()) < limit


def test_padding_does_not_change_the_gradient(config):
    """The same rows with four more columns of padding on either side, filled with a real token's id."""
    settings = config()
    models = make_models(settings.model, "shared", torch.float64)
    experience = moved(make_experience(models, settings)[0])
    pad = torch.nn.functional.pad
    wider = replace(
        experience,
        batch=replace(
            experience.batch,
            ids=pad(experience.batch.ids, (4, 4), value=77),
            attention_mask=pad(experience.batch.attention_mask, (4, 4)),
            response_mask=pad(experience.batch.response_mask, (0, 4)),
        ),
        **{
            name: pad(getattr(experience, name), (0, 4), value=1e3)
            for name in ("old_logprobs", "old_values", "advantages", "returns")
        },
    )
    whole = minibatch_gradient(models, experience, settings, 8)
    padded = minibatch_gradient(models, wider, settings, 8)
    assert float((padded - whole).norm() / whole.norm()) < 1e-12


def test_gradient_is_that_of_the_formulas(config):
    """The trainer's gradient against one written out from the paper's formulas, without micro-batches and masks."""
    settings = config(entropy_coef=0.02, value_coef=0.3, clip_range=0.1, value_clip_range=0.15, temperature=0.8)
    models = make_models(settings.model, "shared", torch.float64)
    e = moved(make_experience(models, settings)[0])
    trained = minibatch_gradient(models, e, settings, 3)
    models.policy.zero_grad()
    out = models.policy(e.batch.ids, e.batch.attention_mask, e.batch.response_mask, temperature=0.8, with_entropy=True)
    m = e.batch.response_mask
    ratio, a = (out.logprobs - e.old_logprobs).exp()[m], e.advantages[m]
    surrogate = torch.min(ratio * a, ratio.clamp(0.9, 1.1) * a)
    v, old, ret = out.values[m], e.old_values[m], e.returns[m]
    clipped = old + (v - old).clamp(-0.15, 0.15)
    value = 0.5 * torch.max((v - ret) ** 2, (clipped - ret) ** 2)
    (-surrogate.mean() + 0.3 * value.mean() - 0.02 * out.entropy[m].mean()).backward()
    expected = flat_gradient(models)
    assert float((trained - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_experience_is_that_of_the_formulas(config, whiten_rewards):
    """Rewards, advantages and returns recomputed with loops over single rows."""
    settings = config(missing_eos_penalty=0.7, gae_lambda=0.9, gamma=0.95, whiten_rewards=whiten_rewards)
    models = make_models(settings.model, "shared", torch.float64)
    norm = ScoreNorm(mean=3.0, std=2.0)
    reference = freeze(Policy(load_causal_lm(settings.model).double()))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    experience, metrics = make_experience(replace(models, reference=reference), settings, score_norm=norm, kl_coef=0.2)
    ref = token_outputs(reference, experience.batch, temperature=1.0, micro_batch=MicroBatch(8)).logprobs
    mask = experience.batch.response_mask
    lengths = mask.sum(dim=1).tolist()
    rewards = -0.2 * (experience.old_logprobs - ref)
    for row, completion in enumerate(experience.completions):
        rewards[row, lengths[row] - 1] += (experience.scores[row] - 3.0) / 2.0 - 0.7 * completion.truncated
        kl = (experience.old_logprobs - ref)[row, : lengths[row]].sum()
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
    assert metrics["reward/score_mean"] == pytest.approx(sum(experience.scores) / 8)


def numbers(run) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]


@critics
def test_same_seed_same_run_bit_for_bit(config, tmp_path, critic):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_ppo(config(output=tmp_path / name, seed=seed, critic=critic, learning_rate=1e-3), rewards=[length])
    a, b, c = (tmp_path / name for name in "abc")
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]
    assert numbers(a) == numbers(b) != numbers(c)


def learning_settings(config, seed):
    return config(
        seed=seed,
        steps=40,
        rollout_batch_size=64,
        samples_per_prompt=8,
        minibatch_size=32,
        micro_batch_size=32,
        learning_rate=2e-3,
        value_learning_rate=1e-2,
        lr_schedule="constant",
        kl_coef=0.0,
        response_length="fixed",
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_raises_the_share_of_a_letter(config, seed):
    summary = train_ppo(learning_settings(config, seed), rewards=[share_of_a])
    first, last = (summary[name]["eval/score_mean"] for name in ("first_evaluation", "last_evaluation"))
    assert last - first >= 0.3


def test_a_wrong_sign_in_the_policy_loss_would_be_noticed(config, monkeypatch):
    """Negative control of the learning test: with the sign flipped the score does not rise by 0.3."""
    right = core.ppo_policy_loss

    def wrong(*tensors, **options):
        loss, metrics = right(*tensors, **options)
        return -loss, metrics

    monkeypatch.setattr(ppo.core, "ppo_policy_loss", wrong)
    summary = train_ppo(learning_settings(config, 0), rewards=[share_of_a])
    assert summary["last_evaluation"]["eval/score_mean"] - summary["first_evaluation"]["eval/score_mean"] < 0.3


def test_a_kl_penalty_keeps_the_policy_near_its_reference(config, tmp_path):
    kl = {}
    for coef in (0.0, 3.0):
        settings = replace(learning_settings(config, 0), kl_coef=coef, output=tmp_path / str(coef))
        kl[coef] = train_ppo(settings, rewards=[share_of_a])["last_evaluation"]["eval/kl"]
    assert kl[3.0] < 0.2 * kl[0.0]


def test_adaptive_kl_moves_the_coefficient_towards_the_target(config, tmp_path):
    """Below the target the coefficient falls by n/horizon * 0.2 a step at most: KL starts at 0, so exactly that at first."""
    settings = config(kl_target=6.0, kl_horizon=40, kl_coef=0.1, steps=3)
    train_ppo(settings, rewards=[length])
    coefs = [line["reference/kl_coef"] for line in numbers(tmp_path / "run") if "reference/kl_coef" in line]
    assert coefs[0] == 0.1
    assert coefs[1] == pytest.approx(0.1 * (1 - 0.2 * 8 / 40))


def test_separate_critic_learns_at_its_own_rate_and_is_saved(config, tiny, tmp_path):
    """The policy does not move at a vanishing rate while the critic, with a rate of its own, does; final/ keeps both."""
    settings = config(critic="separate", learning_rate=1e-12, value_learning_rate=1e-2, steps=8, kl_coef=0.0)
    train_ppo(settings, rewards=[length])
    start = load_causal_lm(tiny("gpt2")).state_dict()
    end = load_causal_lm(str(tmp_path / "run" / "final")).state_dict()
    assert all(torch.allclose(end[name], start[name], atol=1e-6) for name in start)
    assert not (tmp_path / "run" / "final" / VALUE_HEAD).exists()
    critic = load_value_model(str(tmp_path / "run" / "final" / "value_model"), device=CPU, compute_dtype=torch.float32)
    assert float(critic.value_head.weight.detach().abs().max()) > 1e-3
    losses = [line["loss/value"] for line in numbers(tmp_path / "run") if "loss/value" in line]
    assert losses[-1] < losses[0]


def test_value_head_learns_at_its_own_rate(config, tmp_path):
    train_ppo(config(learning_rate=1e-12, value_learning_rate=1e-2, value_coef=1.0), rewards=[length])
    saved = tmp_path / "run" / "final" / VALUE_HEAD
    from safetensors.torch import load_file

    assert float(load_file(saved)["weight"].abs().max()) > 1e-3


def test_entropy_bonus_keeps_the_policy_diverse(config, tmp_path):
    entropy = {}
    for coef in (0.0, 1.0):
        settings = replace(learning_settings(config, 0), entropy_coef=coef, output=tmp_path / str(coef))
        train_ppo(settings, rewards=[share_of_a])
        entropy[coef] = numbers(tmp_path / str(coef))[-2]["policy/entropy"]
    assert entropy[1.0] > entropy[0.0] + 1.0


def test_score_normalisation_uses_reference_samples(config):
    settings = config()
    models = make_models(settings.model, "shared", torch.float32)
    with torch.no_grad():
        models.policy.lm.get_output_embeddings().weight[7] += 100.0  # the policy says one thing, the reference does not
    renderer = Renderer(load_tokenizer(settings.model))
    encoded = [EncodedPrompt(p, renderer.prompt_ids(p.prompt)) for p in PROMPTS] * 4
    sampler = make_sampler(settings, renderer, models.policy)
    seen = []

    def remembered(completions, completion_ids, **_):
        assert len({token for ids in completion_ids for token in ids}) > 20
        seen.extend(length(completions))
        return seen

    rewards = [Reward("remembered", remembered)]
    generator = torch.Generator().manual_seed(0)
    norm = reference_score_norm(models, encoded, rewards=rewards, sampler=sampler, generator=generator)
    scores = torch.tensor(seen)
    assert norm.mean == pytest.approx(float(scores.mean()), rel=1e-6)
    assert norm.std == pytest.approx(float(scores.std(correction=0)), rel=1e-6)


def test_equal_reference_scores_cannot_be_normalised(config, tmp_path):
    with pytest.raises(RewardError, match="no scale to normalise"):
        train_ppo(config(score_norm_samples=6), rewards=[lambda completions: [1.0] * len(completions)])
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_the_run_with_the_weights_before_it(config):
    settings = config()
    models = make_models(settings.model, "shared", torch.float32)
    experience, _ = make_experience(models, settings)
    experience.advantages[0, 0] = float("nan")
    before = [p.detach().clone() for p in models.policy.parameters()]
    optimizer = make_optimizer([(models.policy, 1e-3)], settings)
    with pytest.raises(TrainingError, match="gradient norm is nan"):
        learn(models, experience, optimizer, settings, torch.Generator())
    assert all(torch.equal(a, b) for a, b in zip(before, models.policy.parameters(), strict=True))


@critics
def test_dropout_is_off_in_training_mode_too(config, critic):
    """gpt2's default is 0.1, and a ratio of two passes under dropout means nothing."""
    models = ppo._load_models(config(critic=critic))
    ids = torch.arange(10, 22).unsqueeze(0)
    attention_mask, response_mask = torch.ones_like(ids, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)
    for module in models.trained:
        torch.nn.init.normal_(module.value_head.weight) if module.value_head is not None else None
        module.train()
        first, second = (module(ids, attention_mask, response_mask) for _ in range(2))
        for a, b in [(first, second)] if isinstance(first, torch.Tensor) else zip(first, second, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_kl_control_is_fixed_without_a_target(config):
    assert isinstance(kl_control(config()), core.FixedKL)
    control = kl_control(config(kl_target=6.0, kl_horizon=1000, kl_coef=0.2))
    assert isinstance(control, core.AdaptiveKL)
    assert (control.coef, control.target, control.horizon) == (0.2, 6.0, 1000)


def test_a_reward_is_required(config):
    with pytest.raises(ConfigError, match="--rewards is missing"):
        train_ppo(config())


def test_columns_reach_the_reward_and_samples_are_written(config, tmp_path):
    """Each prompt's own column arrives with its responses, repeated for every sample of it."""
    seen = []

    def reward(prompts, completions, number):
        seen.extend(zip(prompts, number, strict=True))
        return [0.1 * len(c) for c in completions]

    train_ppo(config(sample_every=1, steps=1), rewards=[reward])
    known = {f"say {w}": i for i, w in enumerate(["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "苹果", "梨"])}
    assert seen
    assert all(known[prompt] == number for prompt, number in seen)
    lines = (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    assert samples[0].keys() == {"step", "prompt", "response", "score", "kl"}
    assert len({s["prompt"] for s in samples}) == len(samples) == 4


def test_a_reference_of_another_vocabulary_is_refused_before_anything_is_written(config, tiny, tmp_path):
    """KL between unrelated ids would be a number all the same."""
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny("gpt2"), other)
    tokenizer = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(
        tokenizer.replace('"a":', '"@@":').replace('"b":', '"a":').replace('"@@":', '"b":'), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"--reference .*another vocabulary"):
        train_ppo(config(reference=str(other)), rewards=[length])
    with pytest.raises(ConfigError, match=r"--value-model .*another vocabulary"):
        train_ppo(config(value_model=str(other), critic="separate"), rewards=[length])
    assert not (tmp_path / "run").exists()


def test_a_reference_that_reads_too_little_is_refused(config, tiny):
    with pytest.raises(ConfigError, match=r"--reference .* reads 16 tokens, but prompts and responses need"):
        train_ppo(config(reference=tiny("gpt2", max_length=16)), rewards=[length])


def test_a_reward_that_fails_at_the_first_step_leaves_the_old_run(config, tmp_path):
    """--overwrite deletes the old run only when the new one has done a step."""
    calls = []

    def fails_later(completions):
        calls.append(len(completions))
        if len(calls) > 2:
            raise ValueError("坏了")
        return [1.0] * len(completions)

    train_ppo(config(steps=1), rewards=[length])
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(RewardError, match="坏了"):
        train_ppo(config(overwrite=True, eval_fraction=0.3), rewards=[fails_later])
    assert len(calls) > 2, "it failed at the first step, after the trial and the first evaluation"
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_run_that_fails_before_its_first_step_leaves_nothing(config, tmp_path):
    def fails_on_many(completions):
        if len(completions) > 4:
            raise ValueError("too many")
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="too many"):
        train_ppo(config(eval_fraction=0.0), rewards=[fails_on_many])
    assert not (tmp_path / "run").exists()


def test_the_sampler_takes_so_many_rows_at_a_time(config, monkeypatch):
    """rollout_micro_batch_size bounds the rows in the key-value cache."""
    from heedful.sampling import generate

    rows = []
    right = generate.decode

    def counted(policy, prompts, *arguments, **options):
        rows.append(len(prompts))
        return right(policy, prompts, *arguments, **options)

    monkeypatch.setattr(generate, "decode", counted)
    train_ppo(config(rollout_micro_batch_size=3, steps=1), rewards=[length])
    assert max(rows) == 3


def test_rewards_of_all_kinds_are_written_down(config, tmp_path):
    """String rewards handed in go into the config, so that it repeats the run; functions are named in the summary."""
    summary = train_ppo(config(steps=1, rewards=("rule:digits",)), rewards=["rule:digits", length])
    assert summary["rewards"] == ["rule:digits", "rule:digits#2", "length"]
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert written.count("- rule:digits") == 2


def test_constant_returns_have_no_explained_variance(config, tmp_path):
    train_ppo(config(steps=1, kl_coef=0.0), rewards=[lambda completions: [0.0] * len(completions)])
    assert all("value/explained_variance" not in line for line in numbers(tmp_path / "run"))
