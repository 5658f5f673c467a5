"""What each kind of reward reads of an episode: all of it, or the policy's last turn; never somebody else's words as the
policy's."""

from dataclasses import replace

import pytest
import torch

from heedful import Message, Prompt, Reward
from heedful.data.chat import RewardInputs
from heedful.models import load_reward_model, load_tokenizer
from heedful.rewards import Completion
from heedful.rewards.http import HTTPReward
from heedful.rewards.judge_questions import NO_ANSWER, case_of
from heedful.rewards.models import ModelReward
from heedful.rewards.rules import exact_number
from heedful.rewards.scoring import Ensemble, score_tokens
from heedful.types import Episode, ToolCall

ASKED = (Message("user", "1+1？"),)
CALL = Message("assistant", "算", thinking="想", tool_calls=(ToolCall("加", '{"x": 1}', "call00001"),))
TURNS = (CALL, Message("tool", "7", name="加", tool_call_id="call00001"), Message("assistant", "<think>嗯</think>是2"))


@pytest.fixture
def episode():
    ended = Episode(TURNS, (0.0, 1.0), (3, 6), "environment", calls=1)
    return Completion(Prompt(ASKED, "局.jsonl:1", {"answer": "2"}), "…", ids=range(5), episode=ended)


def test_functions_get_the_last_turns_thinking_and_answer(episode):
    """Not what the tool said, nor the whole episode as one answer."""
    seen = {}

    def reads(answer_parts, thinking_parts, completions, **_):
        seen.update(answers=answer_parts, thinking=thinking_parts, roles=[one["role"] for one in completions[0]])
        return [0.0, 0.0]

    nothing = replace(episode, response="还没", episode=Episode((CALL,), (), (3,), "turns"))
    score_tokens([Reward("读", reads)], [episode, nothing])
    assert seen == {"answers": ["是2", "算"], "thinking": ["嗯", "想"], "roles": ["assistant", "tool", "assistant"]}


def test_rules_read_the_last_turn(episode):
    assert score_tokens([Reward("对", exact_number)], [episode]).totals == [1.0]
    tool = (*TURNS[:2], Message("assistant", "不知道"))
    said_by_the_tool = replace(
        episode, prompt=Prompt(ASKED, "局.jsonl:1", {"answer": "7"}), episode=replace(episode.episode, turns=tool)
    )
    assert score_tokens([Reward("对", exact_number)], [said_by_the_tool]).totals == [0.0]


TEMPLATE = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' }}{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "{{- '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def model_reward(tiny):
    """``model_reward(template)``: of a tiny reward model with this chat template."""

    def make(template):
        tokenizer = load_tokenizer(tiny("qwen2"))
        tokenizer.chat_template = template
        cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
        return ModelReward(load_reward_model(tiny("qwen2"), tokenizer, seed=1, **cpu), RewardInputs(tokenizer))

    return make


def test_a_reward_model_reads_all_turns(episode, model_reward):
    reward = model_reward(TEMPLATE)
    whole = reward.inputs.renderer.template.text(
        (*ASKED, *TURNS[:2], Message("assistant", "是2")), add_generation_prompt=False
    )
    expected = reward.model([{"input_ids": reward.inputs.renderer.encoder.read(whole)}]).tolist()
    assert score_tokens([Reward("模型", reward)], [episode]).totals == pytest.approx(expected)


def test_a_reward_model_reads_the_beginning_of_a_long_episode(episode, model_reward):
    reward = model_reward(TEMPLATE)
    reward.reads_beginnings, limit = True, reward.model.max_length
    turns = (CALL, Message("tool", "7" * limit, name="加", tool_call_id="call00001"), TURNS[2])
    first = reward.inputs.encode(ASKED, turns[:1], truncated=True)  # all that fits is the call
    scores = score_tokens([Reward("模型", reward)], [replace(episode, episode=replace(episode.episode, turns=turns))])
    assert scores.totals == pytest.approx(reward.model([first]).tolist())
    assert scores.unread == (0,)


def test_an_episode_that_a_reward_models_template_refuses_costs_its_score_only(episode, model_reward):
    """Llama's takes one call in a turn, Gemma's no tools at all."""
    refuses = "{%- for m in messages if m.role == 'tool' %}{{ raise_exception('不行') }}{% endfor %}"
    talk = replace(episode, episode=replace(episode.episode, turns=TURNS[2:]))
    rewards = Ensemble((Reward("模型", model_reward(refuses + TEMPLATE)),), max_failed=0.5)
    scores = score_tokens(rewards, [episode, talk])
    assert scores.failed == (0,)
    assert "reward 模型 cannot read it: the chat template refuses this conversation: 不行" in scores.note


def test_a_judge_sees_all_turns_without_thinking(episode):
    said = case_of([{"role": "user", "content": "1+1？"}], episode_messages(episode), True, {}).answer
    assert said.startswith("[assistant]\n算\n")
    assert '"name": "加"' in said
    assert "[tool]\n7\n" in said
    assert "[assistant]\n是2\n(It was cut off here" in said
    assert "想" not in said
    assert "嗯" not in said
    thought = [*episode_messages(episode)[:2], {"role": "assistant", "content": "<think>没完"}]
    assert case_of("问", thought, False, {}).answer.endswith(f"[assistant]\n{NO_ANSWER}")


def episode_messages(completion):
    seen = []
    score_tokens([Reward("读", lambda completions, **_: seen.extend(completions) or [0.0])], [completion])
    return seen[0]


def test_a_server_gets_the_turns_as_messages(episode, answering):
    server = answering(lambda count: (200, b'{"scores": [0.5]}'))
    assert score_tokens([Reward("服务", HTTPReward(server.url))], [episode]).totals == [0.5]
    (body,) = server.bodies()
    assert [one["role"] for one in body["completions"][0]] == ["assistant", "tool", "assistant"]
    assert body["columns"] == {"answer": ["2"]}
