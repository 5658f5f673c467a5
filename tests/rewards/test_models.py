"""Reward models as rewards: what they read, in which batches, and whether they can read what a policy may write."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from heedful import (
    ConfigError,
    GRPOConfig,
    Message,
    PPOConfig,
    Prompt,
    Ranking,
    Reward,
    RewardError,
    ScoresConfig,
    evaluate_scores,
    train_ppo,
)
from heedful.algorithms.online.metrics import score_metrics
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.data.chat import Renderer, RewardInputs
from heedful.models import RewardModel, byte_tokenizer, load_reward_model, load_tokenizer, save_reward_model
from heedful.rewards import Completion, score
from heedful.rewards.models import ModelReward, agreement_with, check_context, load_model_reward
from heedful.rewards.resolve import resolve_rewards
from heedful.rewards.results import Truncated
from heedful.types import Episode, MicroBatch
from refusals import refused

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
ANSWERS = ["好", "一个长得多的回答，用来让长度各不相同。", "ok", "苹果和梨", "a longer English answer", "二"]


@pytest.fixture(scope="module")
def decoder(tiny, tmp_path_factory):
    """A reward model from a tiny qwen2, its head drawn at random."""
    return saved(tiny("qwen2"), tmp_path_factory.mktemp("rm") / "decoder")


def saved(model, folder):
    tokenizer = load_tokenizer(model)
    save_reward_model(load_reward_model(model, tokenizer, seed=3, **CPU), tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def reading(decoder, tiny):
    """``reading(name)`` is the reward of the decoder, or of an encoder."""
    folders = {"decoder": decoder, "encoder": tiny("deberta-v2")}
    return {name: resolve_rewards([f"model:{folder}"], **CPU)[0] for name, folder in folders.items()}.__getitem__


def completed(prompts, answers=ANSWERS):
    """Completions with the policy's ids, which mean nothing to a reward model."""
    return [
        Completion(Prompt(prompt, f"d:{i}"), answer, ids=(250, 251))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def raw_scores(folder, *rows):
    """The scores that plain transformers gives to rows of ids."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = [float(model(input_ids=torch.tensor([list(row)])).logits) for row in rows]
    return pytest.approx(scores, abs=1e-5)


def test_a_decoder_reads_prompt_and_response_as_one_text(decoder, reading):
    """A conversation goes through its own template. A truncated response has no end: the policy never wrote one."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    cut = Completion(Prompt("问", "d:1"), "答", truncated=True)
    chat = completed([(Message("user", "你好"),)], ["您好"])
    scores, _ = score([reading("decoder")], [*completed(["问题："] * 6), cut, *chat])
    said = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好"}]
    rows = [[*tokenizer("问题：" + answer).input_ids, tokenizer.eos_token_id] for answer in ANSWERS]
    text = tokenizer.apply_chat_template(said, tokenize=False).removesuffix("\n")
    assert scores == raw_scores(decoder, *rows, tokenizer("问答").input_ids, tokenizer(text).input_ids)
    assert len({round(s, 4) for s in scores}) == 8


def test_a_decoder_reads_all_turns_of_an_episode(decoder, reading):
    """As its template writes the whole conversation; an answer in the middle changes the score."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)

    def episode(first):
        turns = (Message("assistant", first), Message("user", "用法语呢？"), Message("assistant", "chat"))
        played = Episode(turns=turns, rewards=(), ends=(3, 8), ended="turns")
        return Completion(Prompt((Message("user", "猫？"),), "d:1"), "", ids=(250,), episode=played)

    def ids(first):
        said = [("user", "猫？"), ("assistant", first), ("user", "用法语呢？"), ("assistant", "chat")]
        text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in said], tokenize=False)
        return tokenizer(text.removesuffix("\n")).input_ids

    scores, _ = score([reading("decoder")], [episode("cat"), episode("笨蛋")])
    assert scores == raw_scores(decoder, ids("cat"), ids("笨蛋"))
    assert abs(scores[0] - scores[1]) > 1e-4


def test_an_encoder_reads_a_pair(tiny, reading):
    """It has no template: one user message is itself, so both forms of a prompt score the same."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(tiny("deberta-v2")), [reading("encoder")]
    scores, _ = score(encoder, completed(["问题"] * 6))
    assert scores == raw_scores(tiny("deberta-v2"), *(tokenizer("问题", answer).input_ids for answer in ANSWERS))
    assert tokenizer("问", "答").input_ids.count(tokenizer.sep_token_id) == 2
    conversation, _ = score(encoder, completed([(Message("user", "问题"),)] * 6))
    longer, _ = score(encoder, completed([(Message("system", "短"), Message("user", "问题"))] * 6))
    assert scores == conversation != longer


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_scores_keep_their_order_whatever_the_batches(reading, name):
    """Rows are batched by length and put back; neither batch nor padding moves a score."""
    function = reading(name).function

    def scored(rows, size):
        prompts, answers = ["问题" + "长" * (3 * i % 5) for i in rows], [ANSWERS[i] for i in rows]
        batched = ModelReward(function.model, function.inputs, micro_batch=MicroBatch(size))
        return batched(prompts, answers, [i % 2 == 0 for i in rows])

    alone = [scored([i], 1)[0] for i in range(6)]
    for size in (1, 2, 4, 100):
        assert scored(range(6), size) == pytest.approx(alone, abs=1e-5)
    assert scored([5, 0, 3, 1, 4, 2], 4) == pytest.approx([alone[i] for i in (5, 0, 3, 1, 4, 2)], abs=1e-5)


def test_too_long_for_the_reward_model(reading):
    with refused(RewardError, "2 of 3", "128 tokens", "longest 304", "长长长"):
        score([reading("decoder")], completed(["短", "短", "短"], ["好", "长" * 100, "长" * 50]))
    assert len(score([reading("decoder")], completed(["a"], ["b" * 126]))[0]) == 1  # with the end, 128
    with pytest.raises(RewardError, match="longest 129"):
        score([reading("decoder")], completed(["a"], ["b" * 127]))


def test_a_decoder_without_a_template_reads_conversations_as_plain_text(decoder, reading, tmp_path):
    """Through the plain template with its end of turn; where there is a template, that one is used."""
    tokenizer, bare = AutoTokenizer.from_pretrained(decoder), AutoTokenizer.from_pretrained(decoder)
    bare.chat_template = None
    AutoModelForSequenceClassification.from_pretrained(decoder).save_pretrained(tmp_path)
    bare.save_pretrained(tmp_path)
    assert not load_tokenizer(str(tmp_path)).chat_template
    turns = (Message("system", "短"), Message("user", "你好"))
    asked = completed([turns, "你好"], ["您好", "您好"])
    scores, _ = score(resolve_rewards([f"model:{tmp_path}"], **CPU), asked)
    texts = ("System: 短\nUser: 你好\nAssistant: 您好", "你好您好")
    assert scores == raw_scores(tmp_path, *([*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts))
    own = Renderer(tokenizer)
    with_template, _ = score([reading("decoder")], asked[:1])
    assert with_template == raw_scores(decoder, own.prompt_ids(turns) + own.response_ids("您好", prompt=turns))
    assert with_template != pytest.approx(scores[:1], abs=1e-4)


def test_limits_of_rows_and_tokens_are_honoured(decoder, monkeypatch):
    """And change no score; more than asked for would be out of memory on somebody's device. The longest is read alone."""
    lengths = []
    forward = RewardModel.forward

    def spy(self, batch):
        lengths.append([len(row["input_ids"]) for row in batch])
        return forward(self, batch)

    monkeypatch.setattr(RewardModel, "forward", spy)
    completions = completed(["问"] * 6, ["长" * n for n in (1, 12, 2, 3, 1, 2)])

    def scored(*limit):
        lengths.clear()
        return score(resolve_rewards([f"model:{decoder}"], micro_batch=MicroBatch(*limit), **CPU), completions)[0]

    expected = pytest.approx(scored(100), abs=1e-5)
    [ordered] = lengths
    assert scored(4) == expected
    assert list(map(len, lengths)) == [4, 2]
    tokens = 3 * ordered[2]
    assert scored(6, tokens) == expected
    assert [length for part in lengths for length in part] == ordered
    assert all(len(part) == 1 or len(part) * part[-1] <= tokens for part in lengths)
    assert (lengths[0], lengths[-1]) == (ordered[:3], ordered[-1:])


def test_agreement_with_rankings_counts_lengths_in_characters():
    """Three and four characters are of similar length, in whatever script; three and five are not."""
    rankings = [Ranking("问", ("abc", "好好好好", "okay!"), (0, 1, 2), "排序.jsonl:3")]
    result = agreement_with(rankings, [[1.0, 2.0, 0.0]])
    assert (result["pairs"], result["pairs_similar_length"]) == (3, 2)
    assert result["accuracy"] == pytest.approx(2 / 3)
    assert result["accuracy_similar_length"] == 1 / 2
    assert result["length_correlation"] == pytest.approx(-1 / 2)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_agreement_with_a_score_that_is_not_finite_is_refused(score):
    rankings = [Ranking("问", ("a", "b"), (0, 1), "排序.jsonl:3")]
    with pytest.raises(RewardError, match=r"排序.jsonl:3: the reward model gives \[0.5, (nan|inf)\]; scores must be"):
        agreement_with(rankings, [[0.5, score]])


RENDERER = Renderer(byte_tokenizer())
WORDS = byte_tokenizer()
"""A tokenizer that knows two more tokens than the policy's: "the cat " and "一"."""
WORDS.add_tokens(["the cat ", "一"])


@pytest.fixture(scope="module")
def rewards(tiny, tmp_path_factory):
    """A reward model that reads 128 tokens, with the policy's tokenizer."""
    folder = saved(tiny("gpt2"), tmp_path_factory.mktemp("rm") / "短")
    return [Reward("model:rm", load_model_reward(folder, micro_batch=MicroBatch(8), **CPU))]


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


@pytest.fixture(scope="module")
def reads_40(tiny, tmp_path_factory):
    """The folder of a reward model that reads 40 tokens."""
    return saved(tiny("gpt2", max_length=40), tmp_path_factory.mktemp("rm") / "更短")


@pytest.fixture
def settings(tiny, reads_40, written):
    def make(**changes):
        words = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")
        data = written("问题.jsonl", [{"prompt": f"say {word}"} for word in words])
        common = {"data": data, "model": tiny("gpt2"), "device": "cpu", "dtype": "float32"}
        return common | {"rewards": (f"model:{reads_40}",)} | changes

    return make


RUN = {"steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "eval_fraction": 0.0, "sample_every": 0}


def test_it_is_refused_before_anything_is_written(settings, tmp_path):
    """By training, for rewards and judges; and by what samples to evaluate."""
    said = r"reads 40 tokens, but the prompt at .*jsonl:1 has 6 there and a response of --max-new-tokens 35 35: lower"
    output = tmp_path / "run"
    with pytest.raises(ConfigError, match=said):
        train_ppo(PPOConfig(**settings(max_new_tokens=35), **RUN, output=output))
    judged = settings(max_new_tokens=35, rewards=("rule:digits",), selection_rewards=settings()["rewards"])
    small = {"eval_fraction": 0.5, "rollout_batch_size": 2, "minibatch_size": 2}
    with pytest.raises(ConfigError, match=said):
        train_ppo(PPOConfig(**judged, **RUN | small, output=output))
    assert not output.exists()
    with pytest.raises(ConfigError, match=said):
        evaluate_scores(ScoresConfig(**settings(max_new_tokens=35)))


def test_what_is_longer_all_the_same_is_counted_and_ends_nothing(settings, tmp_path, capsys):
    """A random policy writes half characters; each is one token of its own and three bytes of text."""
    config = PPOConfig(**settings(max_new_tokens=34, response_length="fixed"), **RUN, output=tmp_path / "run")
    summary = train_ppo(config)
    assert summary["steps"] == 2
    assert 0 < summary["last_step"]["reward/unread_frac"] <= 1
    assert capsys.readouterr().err.count("some responses exceed a reward model's context") == 1


def test_of_a_batch_that_was_refilled_the_share_is_its_own(settings, tmp_path):
    """Not that of the last round, whose responses were mostly dropped."""
    sizes = {"samples_per_prompt": 4, "rollout_batch_size": 12, "minibatch_size": 12, "dynamic_sampling_rounds": 1}
    sampled = settings(max_new_tokens=18, response_length="fixed", reward_weights=(0.0, 1.0))
    config = GRPOConfig(**sampled | RUN | sizes, output=tmp_path / "run")

    def some_tie(prompts):
        return [float(i) if prompt < "say gh" else 0.0 for i, prompt in enumerate(prompts)]

    learner, found = start(config, [some_tie]).learner, []
    for _ in range(2):
        scored = rollout(learner, next(learner.prompts))
        model = learner.rewards[0].function
        rows = [
            model.inputs.encode(one.prompt.prompt, one.response, truncated=True)["input_ids"]
            for one in scored.completions
        ]
        found.append(sum(len(row) > model.model.max_length for row in rows))
        assert scored.sampled.metrics["rollout/sampled_responses"] > 12
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


def test_the_longest_beginning_of_an_episode_ends_within_an_answer():
    inputs = RewardInputs(byte_tokenizer())
    prompt = (Message("user", "猫？"),)
    said = (Message("assistant", "一二三"), Message("user", "用法语呢？"), Message("assistant", "四五六"))
    first = inputs.encode(prompt, "一二三", truncated=True)["input_ids"]
    last = inputs.encode((*prompt, *said[:2]), "", truncated=True)["input_ids"]
    whole = inputs.encode(prompt, said, truncated=True)["input_ids"]
    assert len(whole) == len(last) + 9  # three bytes a character
    for limit in range(len(first), len(whole)):
        row = inputs.encode_beginning(prompt, said, max_length=limit)["input_ids"]
        assert row == (first if limit < len(last) else whole[: limit - (limit - len(last)) % 3])


def test_of_an_encoders_two_texts_the_response_is_cut(tiny):
    inputs = RewardInputs(AutoTokenizer.from_pretrained(tiny("deberta-v2")))
    row = inputs.encode_beginning("p" * 50, "r" * 20, max_length=60)["input_ids"]
    assert row.count(inputs.tokenizer("p", add_special_tokens=False).input_ids[0]) == 50
    assert len(row) == 60
