"""Reward models as rewards: text in, whatever their vocabulary, architecture and batch."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from heedful.data.chat import Renderer, RewardInputs
from heedful.errors import RewardError
from heedful.models.load_reward_model import load_reward_model
from heedful.models.reward_model import RewardModel
from heedful.models.save import save_reward_model
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards import Completion, Reward, score
from heedful.rewards.models import ModelReward, agreement_with, score_texts
from heedful.rewards.resolve import resolve_rewards
from heedful.types import Message, MicroBatch, Prompt, Ranking

ANSWERS = ["好", "一个长得多的回答，用来让长度各不相同。", "ok", "苹果和梨", "a longer English answer", "二"]


@pytest.fixture(scope="module")
def decoder(tiny, tmp_path_factory):
    """A reward model from a tiny qwen2, its head drawn at random."""
    tokenizer = load_tokenizer(tiny("qwen2"))
    model = load_reward_model(tiny("qwen2"), tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3)
    folder = tmp_path_factory.mktemp("rm") / "decoder"
    save_reward_model(model, tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory):
    """A reward model whose tokenizer shares no ids with the byte tokenizer: one token a character of a short list."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification

    characters = ["<pad>", "<eos>", "<unk>", *"好一二个梨苹果和ok回答"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(dict.fromkeys(characters))}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("rm") / "other"
    LlamaForSequenceClassification(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


def completed(prompts, answers=ANSWERS):
    return [
        Completion(Prompt(prompt, f"d:{i}"), answer)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def raw_score(folder, ids):
    """The score that plain transformers gives."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits)


def test_a_decoder_reads_prompt_and_response_as_one_text(decoder, cpu):
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    rewards = resolve_rewards([f"model:{decoder}"], **cpu)
    scores, _ = score(rewards, completed(["问题："] * 6))
    expected = [
        raw_score(decoder, [*tokenizer("问题：" + answer).input_ids, tokenizer.eos_token_id]) for answer in ANSWERS
    ]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(s, 4) for s in scores}) == 6


def test_a_conversation_goes_through_the_reward_models_own_template(decoder, cpu):
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    turns = (Message("user", "你好"),)
    scores, _ = score(resolve_rewards([f"model:{decoder}"], **cpu), completed([turns], ["您好"]))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好"}], tokenize=False
    ).removesuffix("\n")
    assert scores == pytest.approx([raw_score(decoder, tokenizer(text).input_ids)], abs=1e-5)


def test_a_truncated_response_has_no_end(decoder, cpu):
    """Otherwise the reward model would read an end that the policy never wrote."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    cut = Completion(Prompt("问", "d:1"), "答", truncated=True)
    scores, _ = score(resolve_rewards([f"model:{decoder}"], **cpu), [cut])
    assert scores == pytest.approx([raw_score(decoder, tokenizer("问答").input_ids)], abs=1e-5)


def test_another_vocabulary_reads_the_text_again(other_vocabulary, cpu):
    """The policy's ids, which mean nothing to the reward model, must not reach it."""
    tokenizer = AutoTokenizer.from_pretrained(other_vocabulary)
    answers = ["苹果和梨", "好", "一个回答"]
    completions = [Completion(Prompt("二", "d:1"), answer, ids=(250, 251)) for answer in answers]
    scores, _ = score(resolve_rewards([f"model:{other_vocabulary}"], **cpu), completions)
    expected = [raw_score(other_vocabulary, [*tokenizer("二" + answer).input_ids, 1]) for answer in answers]
    assert 2 not in tokenizer("二" + "".join(answers)).input_ids
    assert scores == pytest.approx(expected, abs=1e-5)


def test_an_encoder_reads_a_pair(tiny, cpu):
    folder = tiny("deberta-v2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores, _ = score(resolve_rewards([f"model:{folder}"], **cpu), completed(["问题"] * 6))
    expected = [raw_score(folder, tokenizer("问题", answer).input_ids) for answer in ANSWERS]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert tokenizer("问", "答").input_ids.count(tokenizer.sep_token_id) == 2


def test_an_encoder_reads_a_conversation_as_text(tiny, cpu):
    """It has no template: one user message is itself, so both forms of a prompt score the same."""
    rewards = resolve_rewards([f"model:{tiny('deberta-v2')}"], **cpu)
    raw, _ = score(rewards, completed(["问题"], ["答"]))
    conversation, _ = score(rewards, completed([(Message("user", "问题"),)], ["答"]))
    longer, _ = score(rewards, completed([(Message("system", "短"), Message("user", "问题"))], ["答"]))
    assert raw == conversation != longer


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_scores_keep_their_order_whatever_the_batches(request, tiny, architecture, size, cpu):
    """Rows are batched by length and put back; neither batch nor padding moves a score."""
    folder = request.getfixturevalue("decoder") if architecture == "decoder" else tiny("deberta-v2")
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(folder, tokenizer, **cpu).eval()
    inputs = RewardInputs(tokenizer)

    def scored(rows, size):
        prompts, answers = ["问题" + "长" * (3 * i % 5) for i in rows], [ANSWERS[i] for i in rows]
        return score_texts(model, inputs, prompts, answers, [i % 2 == 0 for i in rows], micro_batch=MicroBatch(size))

    alone = [scored([i], 1)[0] for i in range(6)]
    assert scored(range(6), size) == pytest.approx(alone, abs=1e-5)
    assert scored([5, 0, 3, 1, 4, 2], size) == pytest.approx([alone[i] for i in (5, 0, 3, 1, 4, 2)], abs=1e-5)


def test_too_long_for_the_reward_model(decoder, cpu):
    completions = completed(["短", "短", "短"], ["好", "长" * 100, "长" * 50])
    with pytest.raises(RewardError) as error:
        score(resolve_rewards([f"model:{decoder}"], **cpu), completions)
    for fragment in ("2 of 3", "128 tokens", "longest 304", "长长长"):
        assert fragment in str(error.value)


def test_exactly_as_long_as_it_can_read(decoder, cpu):
    rewards = resolve_rewards([f"model:{decoder}"], **cpu)
    assert len(score(rewards, completed(["a"], ["b" * 126]))[0]) == 1  # with the end, 128
    with pytest.raises(RewardError, match="longest 129"):
        score(rewards, completed(["a"], ["b" * 127]))


def test_a_decoder_without_a_template_reads_conversations_as_plain_text(decoder, cpu, tmp_path):
    """Through the plain template with its end of turn; where there is a template, that one is used."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    bare = AutoTokenizer.from_pretrained(decoder)
    bare.chat_template = None
    AutoModelForSequenceClassification.from_pretrained(decoder).save_pretrained(tmp_path)
    bare.save_pretrained(tmp_path)
    assert not load_tokenizer(str(tmp_path)).chat_template
    turns = (Message("system", "短"), Message("user", "你好"))
    scores, _ = score(resolve_rewards([f"model:{tmp_path}"], **cpu), completed([turns], ["您好"]))
    text = tokenizer("System: 短\nUser: 你好\nAssistant: 您好").input_ids
    expected = raw_score(tmp_path, [*text, tokenizer.eos_token_id])
    assert scores == pytest.approx([expected], abs=1e-5)
    with_template, _ = score(resolve_rewards([f"model:{decoder}"], **cpu), completed([turns], ["您好"]))
    own = Renderer(tokenizer)
    own_ids = own.prompt_ids(turns) + own.response_ids("您好", prompt=turns)
    assert with_template == pytest.approx([raw_score(decoder, own_ids)], abs=1e-5)
    assert with_template != pytest.approx(scores, abs=1e-4)
    raw, _ = score(resolve_rewards([f"model:{tmp_path}"], **cpu), completed(["你好"], ["您好"]))
    assert raw == pytest.approx(
        [raw_score(tmp_path, [*tokenizer("你好您好").input_ids, tokenizer.eos_token_id])], abs=1e-5
    )


@pytest.fixture
def rows_of_passes(monkeypatch):
    """How many rows each forward pass of a reward model gets."""
    rows = []
    forward = RewardModel.forward

    def spy(self, batch):
        rows.append(len(batch))
        return forward(self, batch)

    monkeypatch.setattr(RewardModel, "forward", spy)
    return rows


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 6), (4, [4, 2]), (6, [6]), (100, [6])])
def test_the_micro_batch_size_is_honoured(decoder, cpu, rows_of_passes, size, expected):
    """More rows than asked for would be out of memory on somebody's device."""
    rewards = resolve_rewards([f"model:{decoder}"], micro_batch=MicroBatch(size), **cpu)
    scores, _ = score(rewards, completed(["问题"] * 6))
    assert rows_of_passes == expected
    assert scores == pytest.approx(
        score(resolve_rewards([f"model:{decoder}"], **cpu), completed(["问题"] * 6))[0], abs=1e-5
    )


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_a_limit_of_tokens_is_honoured(request, tiny, architecture, cpu, monkeypatch):
    """And changes no score; the longest response is read alone."""
    folder = request.getfixturevalue("decoder") if architecture == "decoder" else tiny("deberta-v2")
    lengths = []
    forward = RewardModel.forward

    def spy(self, batch):
        lengths.append([len(row["input_ids"]) for row in batch])
        return forward(self, batch)

    monkeypatch.setattr(RewardModel, "forward", spy)
    completions = completed(["问"] * 6, ["长" * n for n in (1, 12, 2, 3, 1, 2)])
    expected, _ = score(resolve_rewards([f"model:{folder}"], **cpu), completions)
    [ordered] = lengths
    tokens = 3 * ordered[2]
    lengths.clear()
    limited = resolve_rewards([f"model:{folder}"], micro_batch=MicroBatch(6, tokens), **cpu)
    assert score(limited, completions)[0] == pytest.approx(expected, abs=1e-5)
    assert [length for part in lengths for length in part] == ordered
    assert all(len(part) == 1 or len(part) * part[-1] <= tokens for part in lengths)
    assert lengths[0] == ordered[:3]
    assert lengths[-1] == ordered[-1:]


def test_thirty_two_rows_by_default(decoder, cpu, rows_of_passes):
    completions = completed(["问"] * 70, ["答"] * 70)
    score(resolve_rewards([f"model:{decoder}"], **cpu), completions)
    tokenizer = load_tokenizer(decoder)
    model = load_reward_model(decoder, tokenizer, **cpu)
    score([Reward("m", ModelReward(model, RewardInputs(tokenizer)))], completions)
    score_texts(model, RewardInputs(tokenizer), ["问"] * 70, ["答"] * 70, [False] * 70)
    score([Reward("m", ModelReward(model, RewardInputs(tokenizer), micro_batch=MicroBatch(50)))], completions)
    assert rows_of_passes == [32, 32, 6] * 3 + [50, 20]


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
