"""Responses of several turns, given beginnings of an answer, and conversations in an order of their own."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import heedful
from heedful import core
from heedful.data import read_demonstrations, read_prompts, read_rankings
from heedful.data.chat import Renderer
from heedful.errors import RefusedError

TOOLS = [{"type": "function", "function": {"name": "加", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "加", "arguments": {"x": 1}}}
USER = {"role": "user", "content": "1+1？"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "结果2", "name": "加"}
ANSWER = {"role": "assistant", "content": "二"}
SYSTEM = {"role": "system", "content": "简短"}


def spans(renderer, record, response=None):
    """The text of a prompt, and the texts of the runs of tokens that are learned after it."""
    asked, said, own = renderer.written(record.prompt, response or record.response, prefill=record.prefill)
    runs = itertools.groupby(zip(said, own, strict=True), key=lambda one: one[1])
    learned = [renderer.decode([token for token, _ in run]) for is_own, run in runs if is_own]
    return renderer.decode(asked), learned


def text_of(completion):
    """What a reward function reads of an answer, in raw text or in a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([ANSWER, USER, ANSWER], [("", "二"), ("1+1？", "二")]),
        ([USER, ANSWER, {**ANSWER, "content": "三"}], [("1+1？", "二"), ("二", "三")]),
        ([USER, SYSTEM, ANSWER], [("简短", "二")]),
        ([USER, {**ANSWER, "weight": 0}, {**ANSWER, "content": "三"}], [("二", "三")]),
    ],
    ids=["assistant first", "two answers in a row", "system before an answer", "weight 0"],
)
def test_each_assistant_turn_is_learned_after_what_the_template_shows_before_it(written, renderer, messages, expected):
    found = read_demonstrations(written("对话.jsonl", [{"messages": messages}]))
    assert len(found) == len(expected)
    for record, (before, answer) in zip(found, expected, strict=True):
        asked, (said,) = spans(renderer, record)
        assert asked.endswith("<|im_start|>assistant\n")
        assert asked.removesuffix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n").endswith(before)
        assert said.removeprefix("<think>\n\n</think>\n\n") == answer + "<|im_end|>"


def test_a_completion_of_several_turns_is_the_joined_messages(written):
    joined = read_demonstrations(
        written("joined.jsonl", [{"messages": [USER, CALLING, RESULT, ANSWER], "tools": TOOLS}])
    )
    record = {"prompt": [USER], "completion": [CALLING, RESULT, ANSWER], "tools": TOOLS}
    apart = read_demonstrations(written("apart.jsonl", [record]))
    assert [(one.prompt, one.response) for one in apart] == [(one.prompt, one.response) for one in joined]
    assert len(apart) == 2


def test_of_a_response_with_a_tool_the_assistants_tokens_are_learned(written, renderer):
    record = {"prompt": [USER], "chosen": [CALLING, RESULT, ANSWER], "rejected": "不知道", "tools": TOOLS}
    (pair,) = read_rankings(written("pairs.jsonl", [record]))
    asked, said = spans(renderer, pair, pair.responses[0])
    assert asked.endswith("1+1？<|im_end|>\n<|im_start|>assistant\n")
    assert len(said) == 2
    assert said[0].startswith("<tool_call>")
    assert said[0].endswith("</tool_call><|im_end|>")
    assert said[1] == "<think>\n\n</think>\n\n二<|im_end|>"
    assert "结果2" in renderer.decode([*renderer.written(pair.prompt, pair.responses[0]).response])
    assert "结果2" not in "".join(said)


def test_earlier_thinking_that_the_template_leaves_out_is_refused_by_name(written, heedful, thinker):
    again = {"role": "user", "content": "再说一遍"}
    record = {"prompt": [USER], "chosen": [{**ANSWER, "reasoning_content": "想"}, again, ANSWER], "rejected": "不知道"}
    path = written("pairs.jsonl", [record, record])
    found = heedful("dpo", model=thinker(), data=path, eval_fraction="0", output="x", device="cpu")
    assert found.status == 2
    assert "renders an answer in another way once other turns follow it" in found.message
    assert "pairs.jsonl:1" in found.message


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
HEAD += "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    "end",
    ["{{ '<|endoftext|>' if m.role == 'assistant' and not loop.last else '<|im_end|>' }}", "{{ '\n' }}"],
    ids=["another end than the last one", "no end"],
)
def test_a_template_without_one_end_for_all_answers_is_refused(written, thinker, end):
    """As those of gpt-oss and GLM. The tool's result would be learned as the policy's, or the call not at all."""
    renderer = Renderer(AutoTokenizer.from_pretrained(thinker(HEAD + end + TAIL)))
    record = {"prompt": [USER], "chosen": [CALLING, RESULT, ANSWER], "rejected": "不知道", "tools": TOOLS}
    (pair,) = read_rankings(written("pairs.jsonl", [record]))
    with pytest.raises(RefusedError, match="does not end an answer that other turns follow as it ends the last one"):
        renderer.written(pair.prompt, pair.responses[0])
    assert spans(renderer, pair, pair.responses[1])[1] == ["不知道" + renderer.end_token]


def test_dpo_sums_log_probs_of_the_assistants_tokens_only(written, thinker, tmp_path):
    """The loss of the first step, worked out with plain transformers from the mask above."""
    records = [
        {"prompt": [USER], "chosen": [CALLING, RESULT, ANSWER], "rejected": f"不知道{i}", "tools": TOOLS}
        for i in range(2)
    ]
    path, other = written("pairs.jsonl", records), tmp_path / "参考"
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(thinker()), AutoTokenizer.from_pretrained(thinker())
    renderer, reference = Renderer(tokenizer), AutoModelForCausalLM.from_pretrained(thinker())
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    reference.save_pretrained(other)
    tokenizer.save_pretrained(other)
    config = heedful.DPOConfig(
        model=thinker(), reference=str(other), data=path, eval_fraction=0.0, output=tmp_path / "运行", device="cpu",
        dtype="float32", max_steps=1, batch_size=2, beta=0.5,
    )  # fmt: skip
    result = heedful.train_dpo(config)

    def total(model, prompt, response):
        asked, said, own = renderer.written(prompt, response)
        with torch.no_grad():
            logprobs = model(torch.tensor([asked + said])).logits[0].log_softmax(-1)
        return sum(logprobs[len(asked) + i - 1, token] for i, token in enumerate(said) if own[i])

    sums = [
        [total(model, pair.prompt, response) for pair in read_rankings(path) for response in pair.responses]
        for model in (policy, reference)
    ]
    ours, theirs = (torch.stack(one).view(2, 2).T for one in sums)
    expected, _ = core.dpo_loss(ours[0], ours[1], theirs[0], theirs[1], beta=0.5, num_pairs=2)
    assert result.metrics["loss/dpo"].iloc[0] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "train"), [(heedful.RewardConfig, heedful.train_reward), (heedful.KTOConfig, heedful.train_kto)]
)
def test_trainers_take_responses_of_several_turns_and_given_beginnings(written, thinker, tmp_path, kind, train):
    said = {"prompt": [USER], "chosen": [CALLING, RESULT, ANSWER], "rejected": "不知道", "tools": TOOLS}
    begun = [
        {"prompt": [USER, {"role": "assistant", "content": text}], "chosen": "二", "rejected": "五"}
        for text in ("答案是", "是")
    ]
    config = kind(
        model=thinker(), data=written("data.jsonl", [said, *begun]), eval_fraction=0.0, output=tmp_path / "运行",
        device="cpu", max_steps=1, batch_size=2,
    )  # fmt: skip
    assert train(config).summary["steps"] == 1


def test_a_given_beginning_is_read_and_not_learned(written, renderer):
    begun = {"role": "assistant", "content": "答案是"}
    (one,) = read_demonstrations(written("sft.jsonl", [{"prompt": [USER, begun], "completion": "二"}]))
    assert one.response == "答案是二"
    asked, said = spans(renderer, one)
    assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n答案是")
    assert said == ["二<|im_end|>"]
    (asked,) = read_prompts(written("ppo.jsonl", [{"prompt": [USER, begun]}]))
    assert asked.prefill == "答案是"
    assert renderer.decode(renderer.prompt_ids(asked.prompt, asked.prefill)).endswith("</think>\n\n答案是")


def test_a_policy_continues_the_given_beginning_and_rewards_see_both(thinker):
    policy = heedful.Policy.from_pretrained(thinker(), device="cpu")
    engine, seen = heedful.LocalEngine(policy, max_new_tokens=5), []
    batch = engine.generate([[USER, {"role": "assistant", "content": "答案是"}], [USER]])
    heedful.score(lambda prompts, completions, **_: seen.append((prompts, completions)) or [0.0] * 2, batch)
    ((prompts, completions),) = seen
    assert prompts[0] == prompts[1] == [USER]
    assert [text_of(one).startswith("答案是") for one in completions] == [True, False]
    asked = batch.ids[0, : -batch.mask.shape[1]][batch.attention_mask[0, : -batch.mask.shape[1]]].tolist()
    assert policy.tokenizer.decode(asked).endswith("</think>\n\n答案是")
    assert len(batch.completions[0].ids) <= 5


def test_ppo_from_given_beginnings(written, thinker, tmp_path):
    beginnings = {f"第{i}，" for i in range(4)}
    data = written("ppo.jsonl", [{"prompt": [USER, {"role": "assistant", "content": one}]} for one in beginnings])
    seen = set()

    def begins(completions, **_):
        seen.update(text_of(one)[:3] for one in completions)
        return [float(len(one)) for one in completions]

    config = heedful.PPOConfig(
        model=thinker(), data=data, eval_fraction=0.0, output=tmp_path / "运行", device="cpu", steps=1, max_new_tokens=4,
        rollout_batch_size=4, minibatch_size=4, kl_coef=0.0, rollouts="all",
    )  # fmt: skip
    heedful.train_ppo(config, rewards=[begins])
    assert seen == beginnings
