"""A response longer than the reward model reads is found before training, and never ends a run that has begun."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from heedful.configs.evaluate import BestOfNConfig, ScoresConfig, WinRateConfig
from heedful.configs.grpo import GRPOConfig
from heedful.configs.ppo import PPOConfig
from heedful.data.chat import Renderer, RewardInputs
from heedful.errors import ConfigError
from heedful.evaluate.policies import evaluate_best_of_n, evaluate_scores, evaluate_win_rate
from heedful.models.load_reward_model import load_reward_model
from heedful.models.save import save_reward_model
from heedful.models.tiny import byte_tokenizer
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards import Reward
from heedful.rewards.models import check_context, load_model_reward
from heedful.rewards.results import Truncated
from heedful.train.online.engine import train_ppo
from heedful.train.online.metrics import score_metrics
from heedful.train.online.respond import respond
from heedful.train.online.start import start
from heedful.types import Message, MicroBatch, Prompt

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
RENDERER = Renderer(byte_tokenizer())
WORDS = byte_tokenizer()
"""A tokenizer that knows two more tokens than the policy's: "the cat " and "一"."""
WORDS.add_tokens(["the cat ", "一"])


@pytest.fixture(scope="module")
def reads_128(tiny, tmp_path_factory):
    """A reward model that reads 128 tokens, with the policy's tokenizer; its folder."""
    folder = tmp_path_factory.mktemp("rm") / "短"
    tokenizer = load_tokenizer(tiny("gpt2"))
    model = load_reward_model(tiny("gpt2"), tokenizer, seed=3, **CPU)
    save_reward_model(model, tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def rewards(reads_128):
    return [Reward("model:rm", load_model_reward(reads_128, micro_batch=MicroBatch(8), **CPU))]


def prompts(*texts):
    return [Prompt(text, f"d:{i}") for i, text in enumerate(texts, 1)]


def test_with_the_same_tokenizer_the_longest_response_just_fits(rewards):
    """Bytes of the longest prompt plus new tokens: 28 + 100 of 128, and what is named fits."""
    asked = prompts("短", "a" * 28, "b" * 27)
    check_context(rewards, asked, RENDERER, max_new_tokens=100)
    with pytest.raises(ConfigError) as error:
        check_context(rewards, asked, RENDERER, max_new_tokens=101)
    assert str(error.value) == (
        "model:rm reads 128 tokens, but the prompt at d:2 has 28 there and a response of --max-new-tokens 101 101: lower "
        "--max-new-tokens to 100, shorten the longest prompts, or use a reward model that reads more"
    )
    with pytest.raises(ConfigError, match=r"has 128 there and .* 1: shorten the longest prompts, or use"):
        check_context(rewards, prompts("a" * 128), RENDERER, max_new_tokens=1)


def test_leaving_out_is_named_where_it_helps(rewards):
    """With the number that leaves out what does not fit and nothing else: of 28 bytes and more, with 101 to come."""
    asked = prompts("a" * 27, "a" * 30, "a" * 28)
    with pytest.raises(ConfigError, match=r", leave out .* --max-prompt-tokens 27 --too-long drop \(truncate .*\), sh"):
        check_context(rewards, asked, RENDERER, max_new_tokens=101, can_leave_out=True)
    check_context(rewards, asked[:1], RENDERER, max_new_tokens=101, can_leave_out=True)


def test_what_the_template_adds_counts(rewards):
    """In a conversation, two tokens of the user's turn and one that begins the answer."""
    asked = [Prompt((Message("user", "a" * 25),), "d:1")]
    check_context(rewards, asked, RENDERER, max_new_tokens=100)
    with pytest.raises(ConfigError, match="has 28 there"):
        check_context(rewards, asked, RENDERER, max_new_tokens=101)


@pytest.mark.parametrize(("text", "ours", "theirs"), [("the cat ", 8, 1), ("一", 3, 1)])
def test_another_tokenizer_is_measured_on_the_prompts(rewards, text, ours, theirs):
    """Here the policy's tokenizer has fewer tokens for a text than the reward model's: 8 or 3 bytes for each of its own."""
    asked, renderer = prompts(text * 4), Renderer(WORDS)
    fitting = (128 - 4 * ours) // ours
    check_context(rewards, asked, renderer, max_new_tokens=fitting)
    with pytest.raises(
        ConfigError, match=rf"{ours / theirs:.2f} of its tokens for one of the policy's, .* to {fitting},"
    ):
        check_context(rewards, asked, renderer, max_new_tokens=fitting + 1)


def test_other_rewards_have_no_limit():
    check_context([Reward("f", len)], prompts("a" * 10_000), RENDERER, max_new_tokens=10_000)


@pytest.fixture
def settings(tiny, reads_128, tmp_path):
    def make(**changes):
        data = tmp_path / "问题.jsonl"
        rows = [
            json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")
        ]
        data.write_text("".join(rows), encoding="utf-8")
        common = {"data": str(data), "model": tiny("gpt2", max_length=512), "device": "cpu", "dtype": "float32"}
        return common | {"rewards": (f"model:{reads_128}",)} | changes

    return make


RUN = {"steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "eval_fraction": 0.0, "sample_every": 0}


def test_it_is_refused_before_anything_is_written(settings, tmp_path, tiny):
    """By training, for rewards and judges; and by what samples to evaluate."""
    said = (
        r"reads 128 tokens, but the prompt at .*jsonl:1 has 6 there and a response of --max-new-tokens 123 123: lower"
    )
    with pytest.raises(ConfigError, match=said):
        train_ppo(PPOConfig(**settings(max_new_tokens=123), **RUN, output=tmp_path / "run"))
    judged = settings(max_new_tokens=123, rewards=("rule:digits",), best_by=settings()["rewards"])
    with pytest.raises(ConfigError, match=said):
        train_ppo(
            PPOConfig(
                **judged,
                **RUN | {"eval_fraction": 0.5, "rollout_batch_size": 2, "minibatch_size": 2},
                output=tmp_path / "run",
            )
        )
    assert not (tmp_path / "run").exists()
    for config, measure in ((ScoresConfig, evaluate_scores), (BestOfNConfig, evaluate_best_of_n)):
        with pytest.raises(ConfigError, match=said):
            measure(config(**settings(max_new_tokens=123)))
    with pytest.raises(ConfigError, match=said):
        evaluate_win_rate(WinRateConfig(**settings(max_new_tokens=123), baseline=tiny("gpt2", max_length=512)))


def test_what_is_longer_all_the_same_is_counted_and_ends_nothing(settings, tmp_path, capsys):
    """A random policy writes half characters; each is one token of its own and three bytes of text."""
    summary = train_ppo(
        PPOConfig(**settings(max_new_tokens=122, response_length="fixed"), **RUN, output=tmp_path / "run")
    )
    assert summary["steps"] == 2
    assert 0 < summary["last_step"]["reward/unread_frac"] <= 1
    assert capsys.readouterr().err.count("a reward model could not read every response to its end") == 1
    short = train_ppo(PPOConfig(**settings(max_new_tokens=8), **RUN, output=tmp_path / "short"))
    assert "reward/unread_frac" not in short["last_step"]


def test_of_a_batch_that_was_refilled_the_share_is_its_own(settings, tmp_path):
    """Not that of the last round, whose responses were mostly dropped."""
    sizes = {"samples_per_prompt": 4, "rollout_batch_size": 12, "minibatch_size": 12, "dynamic_sampling_rounds": 1}
    sampled = settings(max_new_tokens=62, response_length="fixed", reward_weights=(0.0, 1.0))
    config = GRPOConfig(**sampled | RUN | sizes, output=tmp_path / "run")

    def some_tie(prompts):
        return [float(i) if prompt < "say gh" else 0.0 for i, prompt in enumerate(prompts)]

    learner, found = start(config, [some_tie]).learner, []
    for _ in range(2):
        scored = respond(learner, next(learner.prompts))
        model = learner.rewards[0].function
        rows = [
            model.inputs.encode(one.prompt.prompt, one.response, truncated=True)["input_ids"]
            for one in scored.completions
        ]
        found.append(sum(len(row) > model.model.max_length for row in rows))
        assert scored.drawn.metrics["rollout/sampled_responses"] > 12
        assert score_metrics(scored, config).get("reward/unread_frac", 0.0) == found[-1] / 12
    assert 0 < found[-1] < 12


def test_the_beginning_of_a_response_is_scored_as_if_it_was_cut(rewards):
    (reward,) = rewards
    function = reward.function
    function.reads_beginnings = True
    try:
        long, same, short = function(["问"] * 3, ["长" * 50, "长" * 42, "好"], [False, True, False])
        assert [isinstance(one, Truncated) for one in (long, same, short)] == [True, True, False]
    finally:
        function.reads_beginnings = False
    cut = function(["问"], ["长" * 41], [True])
    assert [long, same] == pytest.approx(cut * 2, abs=1e-6)
    assert abs(short - long) > 1e-3


@pytest.mark.parametrize("reads", ["turn-end", "template"])
@pytest.mark.parametrize("prompt", ["问题", (Message("user", "问题"),)])
def test_the_longest_beginning_that_fits(reads, prompt):
    """One more character would not; the template keeps its end, and the prompt is whole."""
    inputs, response = RewardInputs(byte_tokenizer(), reads), "一二a三四b五六🙂七八"
    whole = len(inputs.encode(prompt, response, truncated=True)["input_ids"])
    smallest = len(inputs.encode(prompt, "", truncated=True)["input_ids"])
    for limit in range(smallest, whole + 1):
        row = inputs.encode_beginning(prompt, response, max_length=limit)["input_ids"]
        taken = [k for k in range(len(response) + 1)
                 if inputs.encode(prompt, response[:k], truncated=True)["input_ids"] == row]  # fmt: skip
        assert len(row) <= limit
        assert len(taken) == 1
        following = inputs.encode(prompt, response[: taken[0] + 1], truncated=True)["input_ids"]
        assert taken[0] == len(response) or len(following) > limit
    assert (
        inputs.encode_beginning(prompt, response, max_length=1)["input_ids"]
        == (inputs.encode(prompt, "", truncated=True)["input_ids"])
    )


def test_of_an_encoders_two_texts_the_response_is_cut(tiny):
    inputs = RewardInputs(AutoTokenizer.from_pretrained(tiny("deberta-v2")))
    row = inputs.encode_beginning("p" * 50, "r" * 20, max_length=60)["input_ids"]
    assert row.count(inputs.tokenizer("p", add_special_tokens=False).input_ids[0]) == 50
    assert len(row) == 60
