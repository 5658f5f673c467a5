"""A critic that is trained before the policy moves: by its command, from its folder, and with parts that stay."""

import json
import math

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from heedful import (
    CheckpointError,
    ConfigError,
    CriticConfig,
    PPOConfig,
    core,
    make_tiny_model,
    train_critic,
    train_ppo,
)
from heedful.algorithms.critic import GROUP, Evaluation
from heedful.algorithms.online.start import start
from heedful.models import load_causal_lm, load_tokenizer, load_value_model
from heedful.models.save import VALUE_HEAD, load_tensors
from jsonl import write_jsonl

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


@pytest.fixture
def first(config):
    """``first(**changes)``: settings of three steps of a critic."""

    def make(**changes):
        sizes = {"steps": 3, "samples_per_prompt": 1, "eval_every": 1, "learning_rate": 1e-2}
        return config(CriticConfig, **(sizes | changes))

    return make


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in completion)) for completion in completions]


def each_token(completion_ids, **_):
    """What is still to come falls from token to token."""
    return [[1 / 16] * len(ids) for ids in completion_ids]


def test_a_critic_learns_the_returns_of_a_policy_that_stays(first, numbers, tmp_path):
    """final/ is a value model and nothing else; PPO that starts from it begins with what it knows."""
    settings = first(steps=40, output=tmp_path / "评论家", eval_every=20, response_length="stop", max_new_tokens=16)
    result = train_critic(settings, rewards=[each_token])
    evaluations = [line for line in numbers(settings.output) if "eval/value_error" in line]
    assert [line["step"] for line in evaluations] == [0, 20, 40]
    assert evaluations[-1]["eval/value_error"] < 0.5 * evaluations[0]["eval/value_error"]
    assert evaluations[0]["eval/explained_variance"] == 0, "a new head says 0 of everything"
    assert evaluations[-1]["eval/explained_variance"] > 0.5
    assert evaluations[0]["eval/explained_variance_group"] == evaluations[-1]["eval/explained_variance_group"]
    assert result.verdict.metric == "eval/value_error"
    final = settings.output / "final"
    assert (final / VALUE_HEAD).is_file()
    assert not (final / "value_model").exists()
    with pytest.raises(CheckpointError, match=r"is a critic, not a policy; name it with critic='separate'"):
        _ = result.policy

    ppo = {"critic": "separate", "steps": 1, "kl_coef": 0.0, "eval_fraction": 0.0, "output": tmp_path / "ppo"}
    same = {"model": settings.model, "data": settings.data, "dtype": "float32", "max_new_tokens": 16}
    same |= {"rollout_batch_size": 8, "minibatch_size": 8, "response_length": "stop"}
    known = train_ppo(PPOConfig(**ppo, **same, value_model=str(final)), rewards=[each_token])
    fresh = train_ppo(PPOConfig(**(ppo | {"output": tmp_path / "fresh"}), **same), rewards=[each_token])
    assert "value/explained_variance" in known["last_step"]
    assert known["last_step"]["value/mean"] > 0.3
    assert fresh["last_step"]["value/mean"] == 0


def test_held_out_responses_are_drawn_and_scored_once(first):
    """The policy stays, so each evaluation is of the same ones: a judge of them is not paid again."""
    asked = []

    def counted(completions, **_):
        asked.append(len(completions))
        return digits(completions)

    train_critic(first(steps=4, eval_prompts=1), rewards=[counted])
    assert asked[1:] == [GROUP, 8, 8, 8, 8], "the first few are to see whether the reward works"


def test_an_evaluation_says_how_many_rewards_failed(first):
    """What is left of a group is no baseline."""

    calls = []

    def fails(completions, **_):
        calls.append(completions)
        return [math.nan if i == 1 and len(calls) == 2 else x for i, x in enumerate(digits(completions))]

    settings = first(steps=1, eval_prompts=1, max_failed_rewards=0.5)
    evaluation = train_critic(settings, rewards=[fails])["last_evaluation"]
    assert evaluation["eval/failed_frac"] == 1 / GROUP
    assert "eval/explained_variance_group" not in evaluation


def test_a_critic_that_still_learns_the_mean_goes_on(first):
    """That explains no variance, but its values are nearer to the returns at each evaluation."""
    same = {"steps": 8, "early_stopping_patience": 2, "learning_rate": 1e-3}
    result = train_critic(first(**same), rewards=[lambda completions, **_: [3 + x for x in digits(completions)]])
    assert (result["stopped_by"], result["best"]["step"]) == (None, 8)
    assert result["best"]["eval/value_error"] == result["last_evaluation"]["eval/value_error"]


def test_the_run_ends_when_the_values_come_no_nearer(first, tmp_path):
    """Returns that are noise: nothing is to be learned, and patience is over after the evaluations it has."""
    state = {"calls": 0}

    def noise(completions, **_):
        state["calls"] += 1
        generator = torch.Generator().manual_seed(state["calls"])
        return torch.randn(len(completions), generator=generator).tolist()

    result = train_critic(first(steps=50, early_stopping_patience=2), rewards=[noise])
    assert result["stopped_by"].startswith("early stopping: 2 evaluations")
    assert result["steps"] < 50


def test_returns_that_are_all_equal_leave_nothing_to_explain(first, numbers):
    """Then there is no share of a variance, and no best model by it."""
    train_critic(first(), rewards=[lambda completions, **_: [1.0] * len(completions)])
    evaluations = [line for line in numbers(first().output) if "eval/value_error" in line]
    assert all("eval/explained_variance" not in line for line in evaluations)
    assert evaluations[-1]["eval/value_error"] < evaluations[0]["eval/value_error"]


def test_golden_evaluation(first, monkeypatch):
    """Values, returns and the mean of the others by hand, from the responses that the evaluation samples."""
    started = start(first(), [digits])
    learner, held_out = started.learner, started.held_out
    torch.nn.init.normal_(learner.critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    seen, generate = [], type(learner.sampler).generate

    def kept(*args, **kwargs):
        seen.append(generate(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(type(learner.sampler), "generate", kept)
    shares, evaluate = [], Evaluation()
    found = evaluate(learner, held_out, shares)
    (responses,) = seen
    mask = responses.mask
    assert len(mask) == GROUP * len(held_out) > GROUP
    scores = torch.tensor(digits([one.response for one in responses.completions]))
    returns = torch.where(mask, scores.unsqueeze(1), 0.0)
    assert len(scores.unique()) > 1
    values = learner.critic(responses.ids, responses.attention_mask, mask).detach()
    others = torch.tensor([(sum(g) - s) / (GROUP - 1) for g in scores.view(-1, GROUP).tolist() for s in g])
    n = mask.sum()

    def explained(predicted, where):
        left, all_of_it = (returns - predicted)[where], returns[where]
        return float(1 - left.var(correction=0) / all_of_it.var(correction=0))

    assert found["eval/score_mean"] == pytest.approx(float(scores.mean()))
    assert found["eval/explained_variance"] == pytest.approx(explained(values, mask), rel=1e-4)
    assert found["eval/explained_variance_first"] == pytest.approx(
        explained(values, core.first_in_mask(mask)), rel=1e-4
    )
    assert found["eval/explained_variance_group"] == pytest.approx(
        explained(others.unsqueeze(1).expand_as(returns), mask), rel=1e-4
    )
    assert found["eval/value_bias"] == pytest.approx(float((returns - values)[mask].sum() / n), rel=1e-4)
    errors = torch.where(mask, (returns - values).square(), 0.0).sum(dim=1) / mask.sum(dim=1)
    assert found["eval/value_error"] == pytest.approx(float(errors.mean()), rel=1e-4)
    assert shares == [(pytest.approx(error, rel=1e-4), 1.0) for error in errors.tolist()]
    assert evaluate(learner, held_out) == found, "the same responses at each evaluation"


def test_the_policy_is_only_read(first):
    """Nothing of it learns, and one gradient scaler is the critic's, as steps and checkpoints look for it at the policy."""
    learner = start(first(dtype="float16"), [digits]).learner
    assert learner.trained == [learner.critic]
    assert not any(weight.requires_grad for weight in learner.policy.parameters())
    assert learner.critic.grad_scaler is learner.policy.grad_scaler is not None


def test_parts_of_a_critic_stay_bit_for_bit(config, length, tiny, tmp_path):
    """The named ones, and no others."""
    settings = config(critic="separate", value_freeze=("attn", "wte"), value_learning_rate=1e-2, eval_fraction=0.0)
    train_ppo(settings, rewards=[length])
    before = load_value_model(tiny("gpt2"), **CPU).state_dict()
    after = load_value_model(str(settings.output / "final" / "value_model"), **CPU).state_dict()
    stays = {name for name in before if torch.equal(before[name], after[name])}
    assert stays == {name for name in before if ".attn." in name or ".wte." in name}


def test_what_cannot_be_frozen_is_refused(config, length):
    with pytest.raises(ConfigError, match=r"--value-freeze selfattn is no part of the critic; choose from .*attn.*wte"):
        train_ppo(config(critic="separate", value_freeze=("selfattn",)), rewards=[length])
    with pytest.raises(ConfigError, match="leaves nothing of the critic but its head"):
        train_ppo(config(critic="separate", value_freeze=("h", "wte", "wpe", "ln_f")), rewards=[length])
    with pytest.raises(ConfigError, match=r"--value-freeze .* --critic shared"):
        config(value_freeze=("attn",))
    with pytest.raises(ConfigError, match=r"--value-freeze wte has no weight that would learn; leave it out"):
        train_ppo(config(critic="separate", value_freeze=("attn", "wte"), lora_rank=2), rewards=[length])


def test_a_critics_folder_that_does_not_fit_is_refused(config, first, length, tiny, tmp_path):
    """Of another tokenizer, in place of a policy, or the head of a shared critic."""
    make_tiny_model("gpt2", tmp_path / "other", hidden_size=32, num_layers=2, max_length=128, seed=5)
    tokenizer = load_tokenizer(str(tmp_path / "other"))
    tokenizer.add_tokens(["恭喜"])
    grown = load_causal_lm(str(tmp_path / "other"))
    grown.resize_token_embeddings(len(tokenizer))
    grown.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    train_critic(first(output=tmp_path / "critic", steps=1), rewards=[length])
    critic = str(tmp_path / "critic" / "final")
    with pytest.raises(ConfigError, match=r"--value-model .* has another vocabulary than the policy: 1 of"):
        train_ppo(config(model=str(tmp_path / "other"), critic="separate", value_model=critic), rewards=[length])
    train_critic(first(output=tmp_path / "lora", steps=1, lora_rank=2), rewards=[length])
    for one in (critic, str(tmp_path / "lora" / "final")):
        with pytest.raises(CheckpointError, match=r"is a critic .* cannot generate; .* --value-model names a critic"):
            train_ppo(config(model=one), rewards=[length])
    train_ppo(config(steps=1, output=tmp_path / "shared"), rewards=[length])
    with pytest.raises(CheckpointError, match="the head of a shared critic, which a separate critic cannot use"):
        train_ppo(config(critic="separate", value_model=str(tmp_path / "shared" / "final")), rewards=[length])
    assert not (tmp_path / "run").exists()


def test_a_token_that_only_the_tokenizer_has_is_no_difference(first, config, length, tmp_path):
    """transformers gives a Qwen2 tokenizer without an unknown token one, for which neither policy nor critic has a row."""
    words = ["<pad>", "<end>", *"题0123456789"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model, sizes = tmp_path / "m", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 16, "eos_token_id": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **sizes)).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>").save_pretrained(model)
    assert len(load_tokenizer(str(model))) == len(words) + 1
    data = write_jsonl(tmp_path / "题.jsonl", [{"prompt": f"题{i}"} for i in range(24)])
    train_critic(first(model=str(model), data=data, output=tmp_path / "critic", steps=1), rewards=[length])
    critic = {"critic": "separate", "value_model": str(tmp_path / "critic" / "final")}
    train_ppo(config(model=str(model), data=data, steps=1, **critic), rewards=[length])


REFUSED = [
    (CriticConfig, {"critic": "shared"}, "--critic shared is a head on the policy's trunk"),
    (CriticConfig, {"clip_range": 0.1}, "--clip-range 0.1 is about a policy that learns"),
    (CriticConfig, {"kl_coef": 0.1}, "--kl-coef 0.1 is about a policy that learns"),
    (CriticConfig, {"value_lambda": 0.9}, "--value-lambda 0.9 is about a policy that learns"),
    (CriticConfig, {"eval_fraction": 0.0}, "nothing is held out: set --eval-fraction or --eval-data"),
    (PPOConfig, {"gae_lambda": 0.9, "gae_lambda_alpha": 0.05}, "--gae-lambda 0.9 is one lambda for all responses"),
    (PPOConfig, {"gae_lambda_alpha": 0.0}, "--gae-lambda-alpha must be greater than 0"),
    (PPOConfig, {"value_lambda": 1.5}, "--value-lambda must lie between 0 and 1"),
    (PPOConfig, {"gae_lambda_alpha": 0.05, "importance_level": "sequence"}, "--gae-lambda-alpha .* is one action"),
    (PPOConfig, {"value_lambda": 1.0, "importance_level": "sequence"}, "--value-lambda .* one action"),
    (PPOConfig, {"advantage": "reinforce++", "value_epochs": 3}, "--value-epochs 3 belongs to a critic"),
    (PPOConfig, {"advantage": "reinforce++", "gae_lambda_alpha": 0.05}, "--gae-lambda-alpha .* a critic's values"),
    (PPOConfig, {"value_lambda": 1.0, "value_clip_range": 0.1}, "--value-clip-range 0.1 bounds how far a value moves"),
    (PPOConfig, {"policy_loss": "sao", "importance": "token-mask"}, "--importance token-mask does not go with .* sao"),
    (PPOConfig, {"policy_loss": "sao", "clip_range": 1.0}, "--clip-range 1 is no lower bound"),
    (PPOConfig, {"correct_from": 0.5}, "--correct-from 0.5 says which responses --positive-coef imitates"),
]


@pytest.mark.parametrize(("kind", "settings", "match"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_refused(kind, settings, match):
    needed = {"model": "m", "data": "d", "output": "o", "rewards": ("rule:digits",)}
    with pytest.raises(ConfigError, match=match):
        kind(**needed, **settings)


def test_value_clipping_is_off_where_values_must_move_freely(config, length, capfd):
    """Monte Carlo targets, a lambda by length, more passes of a critic of its own: said in a line, and shown by clip_frac."""
    for changes in ({"value_lambda": 1.0}, {"gae_lambda_alpha": 1.5}, {"critic": "separate", "value_epochs": 3}):
        assert config(**changes).value_clip is None
    for changes in ({}, {"value_lambda": 0.9}, {"critic": "separate"}, {"value_epochs": 3}):
        assert config(**changes).value_clip == 0.2
    rate = {"value_learning_rate": 1.0, "allow": ("learning-rate",), "eval_fraction": 0.0, "ppo_epochs": 4}
    clipped = train_ppo(config(**rate), rewards=[length])
    assert clipped["last_step"]["value/clip_frac"] > 0
    assert "values are not clipped" not in capfd.readouterr().err
    free = train_ppo(config(**rate, value_lambda=1.0, output=config().output.with_name("free")), rewards=[length])
    assert free["last_step"]["value/clip_frac"] == 0
    assert "values are not clipped (--value-clip-range)" in capfd.readouterr().err


def test_the_positive_example_loss_is_of_correct_responses(config, length, numbers):
    """The share of tokens of responses with the score or a higher one; a threshold above every score makes it 0."""
    same = {"positive_coef": 0.1, "kl_coef": 0.0, "eval_fraction": 0.0, "steps": 1}
    train_ppo(config(**same, correct_from=1e9), rewards=[length])
    (none,) = [line for line in numbers(config().output) if "loss/policy" in line]
    assert none["loss/positive"] == 0
    settings = config(**same, correct_from=-1e9, output=config().output.with_name("all"))
    train_ppo(settings, rewards=[length])
    (everything,) = [line for line in numbers(settings.output) if "loss/policy" in line]
    assert everything["loss/positive"] > 0


def test_the_command(tmp_path, tiny, capsys):
    """From the command line, with a reward by name; the folder says what it is."""
    from heedful.cli.main import main

    data = write_jsonl(tmp_path / "题.jsonl", [{"prompt": f"第{i}题 say {i}"} for i in range(24)])
    words = [
        "critic",
        "--model",
        tiny("gpt2"),
        "--data",
        data,
        "--rewards",
        "rule:digits",
        "--output",
        str(tmp_path / "c"),
    ]
    sizes = ["--steps", "2", "--rollout-batch-size", "8", "--minibatch-size", "8", "--max-new-tokens", "6"]
    assert main([*words, *sizes, "--eval-fraction", "0.3", "--device", "cpu"]) == 0
    use = f"use it:  heedful ppo --critic separate --value-model {tmp_path / 'c'}/final ..."
    printed = capsys.readouterr()
    assert use in printed.out.splitlines()
    assert "values are not clipped" not in printed.err, "a range that the command refuses"
    about = json.loads((tmp_path / "c" / "summary.json").read_text(encoding="utf-8"))
    assert about["algorithm"] == "critic"
    assert load_tensors(tmp_path / "c" / "final" / VALUE_HEAD)["weight"].abs().max() > 0
