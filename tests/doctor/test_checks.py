"""Checks by themselves: each finds its fault, and nothing in the healthy twin beside it."""

import os
import statistics
import sys
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import worlds
from heedful import DPOConfig, KTOConfig, PPOConfig, RewardConfig, SFTConfig
from heedful.apps.doctor import episodes, first_step, rewards
from heedful.checks import encoded, loaded
from heedful.checks.findings import TokenRow, token_texts
from heedful.data.batches import Batch, collate
from heedful.data.chat import Renderer
from heedful.engines.responses import Responses
from heedful.environments.processes import Environments
from heedful.models.tiny import byte_tokenizer, tiny_config
from heedful.planning.memory import Lengths
from heedful.rewards import Reward
from heedful.types import Completion, Episode, Message, Prompt, ToolCall

TOKENIZER = byte_tokenizer()
PAD, EOS, TURN_END = (TOKENIZER.convert_tokens_to_ids(t) for t in ("<|pad|>", "<|endoftext|>", "<|end|>"))
STOPS = (EOS, TURN_END)


def rows(*responses, prompt="问"):
    """Rows of a prompt and these responses, which are texts; ``END`` is the turn's end."""
    return [
        TokenRow(f"数据.jsonl:{i}", ids(f"<|user|>{prompt}<|end|><|assistant|>"), ids(response))
        for i, response in enumerate(responses, 1)
    ]


def ids(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


def found(finding):
    return None if finding is None else (finding.check, finding.level)


WHOLE, CUT = "好的<|end|>", "好的"


@pytest.mark.parametrize(
    ("responses", "marked", "level"),
    [
        ([WHOLE] * 4, 0.0, None),
        ([WHOLE, WHOLE, CUT, CUT], 0.0, None),
        ([WHOLE, CUT, CUT, CUT], 0.0, "warn"),
        ([CUT] * 4, 0.5, "fail"),
        ([CUT] * 4, 1.0, "warn"),
        (["好的<|pad|>"] * 4, 0.0, "fail"),
    ],
)
def test_responses_end_where_sampling_stops(responses, marked, level):
    one = encoded.end_token(rows(*responses), STOPS, TOKENIZER, marked_frac=marked)
    assert found(one) == (level and ("no-end-token", level))
    if one is not None:
        assert "'<|endoftext|>' or '<|end|>'" in one.what
        assert one.evidence.startswith(f"数据.jsonl:{responses.index(responses[-1]) + 1} ends with ")


def test_a_stop_token_inside_responses_but_not_in_one_of_a_hundred():
    inside = "好<|end|>的<|end|>"
    one = encoded.stop_inside(rows(*[inside] * 8), STOPS, TOKENIZER)
    assert found(one) == ("stops-early", "warn")
    assert one.what.startswith("8 of 8 ")
    assert encoded.stop_inside(rows(*[WHOLE] * 8), STOPS, TOKENIZER) is None
    assert encoded.stop_inside(rows(inside, *[WHOLE] * 99), STOPS, TOKENIZER) is None


@pytest.mark.parametrize(
    ("check", "counts", "name"),
    [
        (encoded.equal_pairs, {}, None),
        (encoded.equal_pairs, {"dropped_equal": 5}, None),
        (encoded.equal_pairs, {"dropped_equal": 6}, "equal-pairs"),
        (encoded.equal_pairs, {"unusable/equal answers": 7, "truncated": 3}, "equal-pairs"),
        (encoded.share_cut, {"truncated": 10}, None),
        (encoded.share_cut, {"truncated": 11}, "share-cut"),
        (encoded.share_cut, {"truncated": 6, "dropped_too_long": 6}, "share-cut"),
    ],
)
def test_counts(check, counts, name):
    assert found(check({"records": 100} | counts)) == (name and (name, "warn"))


def test_training_data_are_not_copied_to_look_for_held_out_prompts():
    train = [Prompt(f"问{i}" * 1000, f"训.jsonl:{i}") for i in range(500)]
    tracemalloc.start()
    try:
        encoded.held_out_trained_on(train, [Prompt("另一个", "留.jsonl:1")])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 0.1 * sum(sys.getsizeof(one.prompt) for one in train)


# ------------------------------------------------------------------------------------------------- models and settings


@pytest.fixture(scope="module")
def model():
    config = tiny_config("llama", vocab_size=len(TOKENIZER), hidden_size=16, num_layers=1, max_length=32)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("change", "is_found"), [("none", False), ("zero", True), ("mean", True), ("unused", False)])
def test_embeddings_that_nobody_trained(model, change, is_found):
    weight = model.get_input_embeddings().weight
    before, letter = weight.detach().clone(), ids("好")[0]
    with torch.no_grad():
        weight[PAD] = before[PAD + 1]
        if change in ("zero", "mean"):
            weight[letter] = 0.0 if change == "zero" else before.mean(dim=0) + 1e-6
        if change == "unused":
            weight[ids("z")[0]] = 0.0
    one = loaded.untrained_tokens(model, rows("好<|end|>"), TOKENIZER, needs=STOPS)
    with torch.no_grad():
        weight.copy_(before)
    assert found(one) == (("untrained-tokens", "warn") if is_found else None)
    assert one is None or (f"({letter})" in one.evidence and "数据.jsonl:1" in one.evidence)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma", "qwen3_next"])
def test_a_norm_of_zeros(model_type):
    """Gemma's norms begin at 0, and their factor is 1 + weight."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(model_type, vocab_size=32, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    assert loaded.zero_layer(model) is None
    name, norm = next((n, m) for n, m in model.named_modules() if n.endswith((".1.input_layernorm", ".1.ln_1")))
    with torch.no_grad():
        norm.weight.zero_()
    one = loaded.zero_layer(model)
    is_found = model_type in ("llama", "gpt2")
    assert found(one) == (("zero-layer", "fail") if is_found else None)
    assert one is None or one.what == f"all weights of {name} are zero"


@pytest.mark.parametrize(
    ("kind", "settings", "measured", "default"),
    [
        (SFTConfig, {}, 0.48 / 1000, SFTConfig.learning_rate),
        (RewardConfig, {}, 0.48 / 1000, RewardConfig.learning_rate),
        (SFTConfig, {"lora_rank": 4}, 0.48 / 100, 10 * SFTConfig.learning_rate),
        (PPOConfig, {}, 0.23 / 1000, PPOConfig.learning_rate),
        (PPOConfig, {"lora_rank": 4}, 0.23 / 100, 10 * PPOConfig.learning_rate),
        (DPOConfig, {}, 0.23 / 1000, DPOConfig.learning_rate),
        (KTOConfig, {"lora_rank": 4}, 0.23 / 100, 10 * KTOConfig.learning_rate),
    ],
)
def test_a_rate_that_is_too_high_is_told_with_the_measured_one(kind, settings, measured, default):
    """Up to twice the rate that was measured, at a width of 1000, nothing is said."""
    assert loaded.learning_rate(kind(**settings, learning_rate=1.99 * measured), 1000) is None
    one = loaded.learning_rate(kind(**settings, learning_rate=2.01 * measured), 1000)
    assert one.what == f"--learning-rate {2.01 * measured:g} is high for a model of width 1000"
    assert f"stay below {measured:.2g} at this width; the default is {default:g}" in one.evidence
    assert one.fix.endswith(f"lower it to {measured:.2g}")


@pytest.mark.parametrize("kind", [SFTConfig, PPOConfig])
def test_a_rate_of_all_weights_for_adapters(kind):
    default = kind.learning_rate
    assert loaded.learning_rate(kind(lora_rank=4, learning_rate=2.01 * default), 64) is None
    one = loaded.learning_rate(kind(lora_rank=4, learning_rate=2 * default), 64)
    assert one.evidence == f"the default is {10 * default:g} for adapters and {default:g} for all weights"
    assert one.fix == f"leave --learning-rate out, or give about {10 * default:g}"


# ---------------------------------------------------------------------------------------------------------- rewards


def answered(*responses):
    return [Completion(Prompt("问", f"问.jsonl:{i}"), text, ids(text)) for i, text in enumerate(responses, 1)]


def grouped(completions, size):
    """So many in a row are to the same prompt."""
    return [replace(one, prompt=completions[i // size * size].prompt) for i, one in enumerate(completions)]


TEXTS = [f"{'字' * (i % 5 + 1)}{chr(97 + i)}" for i in range(20)]


def scored_by(function, responses=TEXTS, per_prompt=1):
    completions = grouped(answered(*responses), per_prompt)
    return rewards.score_each([Reward("分", function)], completions)[0], completions


def last_letter(completions, **_):
    return [float(ord(text.strip()[-1])) for text in completions]


def standardised(completions):
    scores = last_letter(completions)
    return [(one - statistics.fmean(scores)) / statistics.pstdev(scores) for one in scores]


def among_equals(prompts, completions):
    """The rank among the responses to the same prompt."""
    scores = list(zip(prompts, last_letter(completions), strict=True))
    return [float(sum(prompt == own and other < score for own, other in scores)) for prompt, score in scores]


@pytest.mark.parametrize(("function", "is_found"), [(last_letter, False), (standardised, True), (among_equals, False)])
def test_a_score_that_depends_on_the_others_of_its_batch(function, is_found):
    scored, completions = scored_by(function, TEXTS, per_prompt=4)
    one = rewards.random_scores(scored, completions)
    assert found(one) == (("reward-random", "warn") if is_found else None)
    assert one is None or "without the others of their batch" in one.what


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (last_letter, None),
        (lambda completions: [len(text) for text in completions], "+1.00"),
        (lambda completion_ids: [-len(ids) / 100 for ids in completion_ids], "-1.00"),
        (lambda completion_ids: [[-1.0] * len(ids) for ids in completion_ids], "-1.00"),
    ],
)
def test_a_reward_of_length_alone(function, sign):
    scored, completions = scored_by(function)
    one = rewards.length_alone(scored, completions)
    assert found(one) == (sign and ("reward-length", "warn"))
    assert one is None or f"rank correlation {sign} with their" in one.what


def test_a_policy_that_always_writes_the_same_is_no_fault_of_a_reward():
    scored, completions = scored_by(lambda completions: [1.0] * 20, ["同"] * 20)
    assert rewards.constant(scored, grouped(completions, 20)) is None
    assert rewards.constant(scored, completions) is not None  # to different prompts


@pytest.mark.parametrize(("broken", "level"), [(0, None), (1, "warn"), (5, "fail")])
def test_a_reward_that_fails_on_some(broken, level):
    def function(completions):
        return [float("nan") if row < broken else 1.0 for row in range(len(completions))]

    scored, completions = scored_by(function)
    one = rewards.fails(scored, completions, 0.1)
    assert found(one) == (level and ("reward-fails", level))
    assert one is None or ("returned nan" in one.evidence and "问.jsonl:1" in one.evidence)


@pytest.mark.parametrize(
    ("function", "check"),
    [
        (lambda completions: [float(len(text) % 3) for text in completions], None),
        (lambda completions: [float(ord(text[0]) % 3) for text in completions], "reward-fails"),
        (lambda completions: [float("nan") if not text else 1.0 for text in completions], "reward-fails"),
        (lambda completions: [float(text in "问题") for text in completions], "reward-empty"),
        (lambda completions: [0.0 for text in completions], None),
        (lambda completions: [-float(len(text)) for text in completions], "reward-empty"),
    ],
)
def test_a_reward_of_an_empty_response(function, check):
    one = rewards.empty_response(*scored_by(function))
    assert found(one) == (check and (check, "warn"))


def as_episode(completion):
    """The completion as an episode of two turns, of which it is the last."""
    turns = (Message("assistant", "先"), Message("user", "然后呢？"), Message("assistant", completion.response))
    ended = Episode(turns, (), (2, 2 + len(completion.ids)), "environment")
    return replace(completion, prompt=replace(completion.prompt, prompt=(Message("user", "问"),)), episode=ended)


@pytest.mark.parametrize(
    ("function", "checks"),
    [
        (lambda completions: [float(ord(turns[-1]["content"].strip()[-1:] or "0")) for turns in completions], set()),
        (lambda completions: [float(len(turns[-1]["content"])) for turns in completions], {"reward-white-space"}),
        (
            lambda completions: [-float(len(turns[-1]["content"])) for turns in completions],
            {"reward-empty", "reward-white-space"},
        ),
        (lambda completions: [float(place) for place, _ in enumerate(completions)], {"reward-ignores-responses"}),
    ],
    ids=["fine", "white space", "empty", "blind"],
)
def test_a_reward_of_episodes_is_asked_about_other_episodes(function, checks):
    """It reads the turns: with another text alone each would score as it did, and no check or a wrong one would speak."""
    completions = [as_episode(one) for one in answered(*TEXTS)]
    (scored,) = rewards.score_each([Reward("分", function)], completions)
    asked = (
        rewards.ignores_responses(scored, completions),
        rewards.empty_response(scored, completions),
        rewards.white_space(scored, completions, Renderer(TOKENIZER)),
    )
    assert {one.check for one in asked if one is not None} == checks


def test_a_critic_that_was_trained_does_not_start_at_0():
    scores = [1000.0 + place for place in range(64)]
    settings = PPOConfig(model="m", data="d", output="o", rewards=("rule:digits",), critic="separate")
    assert rewards.scale(scores, settings, 1.0).check == "reward-scale"
    assert rewards.scale(scores, replace(settings, value_model="critic"), 1.0) is None


@pytest.mark.parametrize(
    ("totals", "is_found"), [([1.0, 1.0, 2.0, 2.0], True), ([1.0, 0.5, 2.0, 2.0], False), ([1.0, 1.0, 1.0, 1.0], False)]
)
def test_responses_that_tie_within_their_prompts(totals, is_found):
    """If prompts do not differ either, the reward is constant, which is another finding."""
    one = rewards.ties(totals, grouped(answered("甲", "乙", "丙", "丁"), 2))
    assert found(one) == (("reward-ties", "warn") if is_found else None)


@pytest.mark.parametrize(
    ("seconds", "step", "is_found"), [(0.1, 1.0, False), (10.0, 100.0, False), (10.0, 12.0, True), (4.0, 4.0, False)]
)
def test_a_slow_reward(seconds, step, is_found):
    scored = rewards.RewardScores(Reward("分", last_letter), [1.0] * 64, seconds)
    one = rewards.slow(scored, responses=64, step_seconds=step)
    assert found(one) == (("reward-slow", "warn") if is_found else None)


# ------------------------------------------------------------------------------------------------ before the first step


def passes(**changes):
    mask = torch.tensor([[True, True, True], [True, False, False]])
    logprobs = torch.where(mask, -1.0, float("nan"))
    parts = {"sampler": logprobs, "old": logprobs, "new": logprobs, "reference": logprobs}
    moved = {name: parts[name] + off for name, off in changes.items() if name in parts}
    dtype = changes.get("dtype", torch.float32)
    return first_step.FirstPasses(**{"mask": mask, "dtype": dtype} | parts | moved)


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [({}, False), ({"new": 1e-4}, False), ({"new": 0.02}, True), ({"new": 0.02, "dtype": torch.bfloat16}, False)],
)
def test_the_ratio_before_the_first_step(changes, is_found):
    assert found(first_step.ratio(passes(**changes))) == (("ratio-not-one", "fail") if is_found else None)


@pytest.mark.parametrize(
    ("off", "reference", "level"),
    [(0.0, None, None), (0.1, None, "fail"), (0.1, "另一个", None), (3.0, "另一个", "warn")],
)
def test_the_kl_before_the_first_step(off, reference, level):
    one = first_step.kl(passes(reference=off), reference)
    assert found(one) == (level and ("kl-not-zero", level))


SETTINGS = {"rewards": ("rule:digits",), "max_new_tokens": 8}


@pytest.mark.parametrize(
    ("off", "settings", "level"),
    [
        (1e-4, {}, None),
        (0.2, {}, "warn"),
        (1.0, {}, "fail"),
        (1.0, {"importance": "token-truncate"}, "warn"),
        (1.0, {"importance": "token-truncate", "sampler": ("vllm:http://127.0.0.1:8000",), "top_p": 0.5}, None),
    ],
)
def test_a_sampler_with_other_probabilities(off, settings, level):
    one = first_step.sampler_mismatch(passes(sampler=off), PPOConfig(**SETTINGS | settings))
    assert found(one) == (level and ("sampler-mismatch", level))


@pytest.mark.parametrize(
    ("cut", "settings", "is_found"), [(5, {}, False), (6, {}, True), (10, {"response_length": "fixed"}, False)]
)
def test_responses_without_an_end(cut, settings, is_found):
    ids = torch.ones(10, 8, dtype=torch.long)
    batch = Batch(ids, ids.bool(), ids.bool())
    responses = Responses(batch, truncated=torch.arange(10) < cut, logprobs=torch.zeros(10, 8))
    one = first_step.responses_cut(responses, PPOConfig(**SETTINGS | settings))
    assert found(one) == (("responses-cut", "warn") if is_found else None)


# ------------------------------------------------------------------------------------------------------------- episodes


def played(*said, place=0, **more):
    """An episode in which the policy says these texts, and the other one 嗯 between them."""
    turns = [Message("assistant", one) for one in said]
    between = [turn for one in turns for turn in (one, Message("user", "嗯"))][:-1]
    episode = Episode(tuple(between), (), tuple(range(1, len(said) + 1)), **{"ended": "environment"} | more)
    prompt = Prompt((Message("user", f"问 {place}"),), f"局.jsonl:{place}", columns={"goal": 3})
    return Completion(prompt, "", ids(said[-1]), truncated=episode.ended == "tokens", episode=episode)


@pytest.mark.parametrize(("failed", "level"), [(0, None), (1, "warn"), (2, "fail")])
def test_environments_that_fail(failed, level):
    one = episodes.fails([played("甲", failure="Game raised X" if i < failed else "") for i in range(10)], 0.1)
    assert found(one) == (level and ("environment-fails", level))


@pytest.mark.parametrize(("by_turns", "max_turns", "is_found"), [(4, 2, True), (3, 2, False), (4, 1, False)])
def test_episodes_without_an_end(by_turns, max_turns, is_found):
    some = [played("甲", "乙", ended="turns" if i < by_turns else "environment") for i in range(4)]
    assert found(episodes.endless("Game", some, max_turns)) == (("episodes-endless", "warn") if is_found else None)


@pytest.mark.parametrize(
    ("heard", "said", "is_found"),
    [(0, "甲<|end|>", False), (35, "甲<|end|>", False), (37, "甲<|end|>", True)],
)
def test_what_the_environment_says_fills_the_tokens(heard, said, is_found):
    """Four tokens of the policy, and so many of the other one."""
    own = ids(said)
    batch = collate([[5]] * 4, [[*[7] * heard, *own]] * 4, own=[[False] * heard + [True] * 4] * 4, pad_id=PAD)
    some = [played("甲") for _ in range(4)]
    responses = Responses(batch, torch.zeros(4, dtype=torch.bool), torch.zeros(batch.response_mask.shape), some)
    one = episodes.observations_long(responses, STOPS, 99)
    assert found(one) == (("observations-long", "warn") if is_found else None)


@pytest.mark.parametrize(("said", "is_found"), [("甲<|end|>", True), ("甲", False)])
def test_what_the_environment_says_does_not_fit(said, is_found):
    """A turn that is cut has no end; one that ended is cut by what follows."""
    batch = collate([[5]] * 4, [ids(said)] * 4, pad_id=PAD)
    some = [played(said, ended="tokens") for _ in range(4)]
    responses = Responses(batch, torch.ones(4, dtype=torch.bool), torch.zeros(batch.response_mask.shape), some)
    one = episodes.observations_long(responses, STOPS, 99)
    assert found(one) == (("observations-long", "warn") if is_found else None)


def test_tools_that_nobody_calls_and_tools_that_fail():
    call = ToolCall("看", "{}", "c")
    turns = (
        Message("assistant", "", tool_calls=(call, call)),
        Message("tool", "好"),
        Message("tool", "{'error': '坏'}"),
    )
    silent, half, worse = (
        replace(played("甲"), episode=Episode(turns, (), (1,), "environment", calls=calls, failed_calls=failed))
        for calls, failed in ((0, 0), (2, 1), (2, 2))
    )
    assert found(episodes.tools_not_called("Game", [silent], ["看"])) == ("tools-not-called", "warn")
    assert episodes.tools_not_called("Game", [silent], []) is None
    assert episodes.tools_not_called("Game", [silent, half], ["看"]) is None
    assert episodes.tools_fail("Game", [silent]) is None
    assert episodes.tools_fail("Game", [half]) is None
    one = episodes.tools_fail("Game", [half, worse])
    assert (one.what, one.evidence) == (
        "3 of 4 calls of tools of Game fail",
        "局.jsonl:0: 看 with {} gives {'error': '坏'}",
    )


@pytest.mark.parametrize(("name", "check"), [("Dice", None), ("Faulty", "environment-keeps-state")])
def test_turns_that_are_taken_again(name, check):
    """Dice draws from random, which is seeded; Faulty counts its episodes."""
    with closing(Environments(f"python:{Path(worlds.__file__)}:{name}", timeout=20.0)) as environment:
        some = [played("甲", "乙", place=place) for place in range(3)]
        one = episodes.not_repeatable(environment, some, seed=0)
    assert found(one) == (check and (check, "warn"))
    assert one is None or "in 3 of 3 episodes" in one.what


# ---------------------------------------------------------------------------------------------------------- the machine


@pytest.mark.parametrize(("gigabytes", "is_found"), [(64, False), (0.001, True)])
def test_a_plan_that_hardly_fits(tiny, monkeypatch, gigabytes, is_found):
    monkeypatch.setattr(os, "sysconf", lambda name: int(gigabytes * 1e6) if name == "SC_PHYS_PAGES" else 1000)
    one = first_step.memory(SFTConfig(model=tiny("gpt2")), Lengths(64), torch.device("cpu"), torch.float32)
    assert found(one) == (("memory", "warn") if is_found else None)


def test_tokens_that_share_a_character_are_one_text():
    assert token_texts(TOKENIZER, ids("a好<|end|>")) == ["a", "好", "<|end|>"]
    assert token_texts(TOKENIZER, ids("好")[:2]) == ["\ufffd"]
    assert "".join(token_texts(TOKENIZER, ids("😀好"))) == "😀好"
