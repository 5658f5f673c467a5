"""Messages with thinking, tools and weights: what is read, what is learned of it, and what is refused with its place."""

import json

import pytest
from transformers import AutoTokenizer

from heedful import CheckpointError, DataError, Message
from heedful.data import read_demonstrations, read_prompts, read_rankings
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.loading import encode_demonstrations, encode_prompts, encode_rankings
from heedful.data.messages import as_dict, from_dict
from heedful.data.template_check import Sample, check_rendering
from heedful.types import ToolCall
from refusals import refused

TOOLS = [{"type": "function", "function": {"name": "加", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "id": "c1", "function": {"name": "加", "arguments": {"x": 1, "y": [2]}}}
USER = {"role": "user", "content": "1+1？"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "加"}
ANSWER = {"role": "assistant", "content": "二", "reasoning_content": "工具说2"}
WHOLE = [USER, CALLING, RESULT, ANSWER]
NO_TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_what_is_read(write):
    path = write({"messages": WHOLE, "tools": TOOLS})
    call, answer = read_demonstrations(path)
    tools = json.dumps(TOOLS, ensure_ascii=False)
    called = Message("assistant", "", tool_calls=(ToolCall("加", '{"x": 1, "y": [2]}', "c1"),))
    assert call.prompt == (Message("user", "1+1？", tools=tools),)
    assert call.response == called
    assert answer.prompt == (*call.prompt, called, Message("tool", "2", name="加", tool_call_id="c1"))
    assert answer.response == Message("assistant", "二", thinking="工具说2")


def test_json_may_be_text(write):
    """As OpenAI writes arguments, and as Parquet needs it, whose structures must all be alike. A call may have none."""
    for arguments, tools in (
        ('{"x": 1, "y": [2]}', TOOLS),
        ({"x": 1, "y": [2]}, json.dumps(TOOLS)),
        (None, [TOOLS[0]["function"]]),
    ):
        call = {"name": "加", **({} if arguments is None else {"arguments": arguments})}
        turns = [USER, {"role": "assistant", "tool_calls": [call]}]
        (one,) = read_demonstrations(write({"messages": turns, "tools": tools}))
        assert json.loads(one.prompt[0].tools) == (json.loads(tools) if isinstance(tools, str) else tools)
        assert json.loads(one.response.tool_calls[0].arguments) == ({} if arguments is None else {"x": 1, "y": [2]})
    for key in ("reasoning_content", "thinking", "reasoning"):
        (one,) = read_demonstrations(write({"messages": [USER, {"role": "assistant", "content": "二", key: "想"}]}))
        assert one.response == Message("assistant", "二", thinking="想")


SHOWS_FIELDS = NO_TOOLS.replace(
    "m.content +",
    "('<think>' if m.reasoning_content is defined or m.thinking is defined else '') + ('name' if m.name is defined else '')"
    " + ('tools' if m.tool_calls is defined else '') + m.content +",
)


def test_an_empty_optional_field_is_absent(write, thinker):
    """The template does not see it, and it begins no thought that is learned."""
    renderer = Renderer(AutoTokenizer.from_pretrained(thinker(SHOWS_FIELDS)))
    texts = [{key: x} for key in ("reasoning_content", "thinking", "reasoning", "name") for x in ("", " \n", None)]
    lists = [{key: x} for key in ("tool_calls", "function_call") for x in ("", [], {}, None)]
    several = {"reasoning_content": "", "thinking": "\n", "tool_call_id": "", "weight": "", "annotations": []}
    for empty in (*texts, *lists, several):
        path = write({"messages": [USER | {"name": ""}, {"role": "assistant", "content": "二", **empty}], "tools": " "})
        (one,) = read_demonstrations(path)
        shown = renderer.decode(renderer.written_ids(one.prompt, one.response))
        assert shown.split("<|im_start|>")[1:] == ["user\n1+1？<|im_end|>", "assistant\n二<|im_end|>"], empty
    for arguments in ("", None, {}, []):
        called = [{"type": "function", "id": "", "function": {"name": "加", "arguments": arguments}}]
        result = RESULT | {"tool_call_id": "", "name": "", "content": ""}
        path = write({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": called}, result, ANSWER]})
        call, answer = read_demonstrations(path)
        assert call.response == Message("assistant", "", tool_calls=(ToolCall("加", "{}"),))
        assert answer.prompt[-1] == Message("tool", "")


def test_arguments_that_a_template_wants_as_text(write, thinker):
    """DeepSeek's put them into a string as they are."""
    template = NO_TOOLS.replace(
        "m.content +",
        "m.content + (m.tool_calls[0].function.name + m.tool_calls[0].function.arguments if m.tool_calls else '') +",
    )
    renderer = Renderer(AutoTokenizer.from_pretrained(thinker(template)))
    (one,) = read_demonstrations(write({"messages": [USER, CALLING]}))
    assert renderer.decode(renderer.response_ids(one.response, prompt=one.prompt)) == '加{"x": 1, "y": [2]}<|im_end|>'


def test_a_masked_message_is_not_learned(write, renderer):
    """It stays in the conversation, as a question would. It cannot stay where all of a conversation is learned."""
    learned = {"role": "assistant", "content": "二", "weight": 1, "loss": True}
    sharegpt = {"role": "from", "content": "value"}
    for mask in ({"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0, "train": False}):
        turns = [USER, {"role": "assistant", "content": "三", **mask}, USER, learned]
        (one,) = read_demonstrations(write({"messages": turns}))
        shared = [{sharegpt.get(key, key): value for key, value in turn.items()} for turn in turns]
        assert read_demonstrations(write({"conversations": shared})) == [one]
        assert [message.content for message in one.prompt] == ["1+1？", "三", "1+1？"]
        assert one.response == "二"
    said = ":2: a message has weight 0, train false or loss false, but --loss-on all also trains on prompts"
    with refused(DataError, said):
        encode_demonstrations([one], renderer, max_length=512, action="error", learn_prompt=True)


def test_what_the_assistant_wrote_is_learned_and_nothing_else(write, renderer):
    """Every turn once, as it follows its generation prompt; the calls in the template's own words, no result of a tool."""
    examples, _ = encode_demonstrations(
        read_demonstrations(write({"messages": WHOLE, "tools": TOOLS})), renderer, max_length=512, action="error"
    )
    learned = [renderer.decode(example.response) for example in examples]
    assert learned == [
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "加", "arguments": {"x": 1, "y": [2]}}\n</tool_call><|im_end|>',
        "<think>\n工具说2\n</think>\n\n二<|im_end|>",
    ]
    prompt = renderer.decode(examples[1].prompt)
    assert '{"name": "加", "parameters": {"type": "object"}}' in prompt
    assert "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in prompt


def test_tool_messages_come_back(write, renderer):
    """Read, rendered, and cut where learning begins and ends: the pieces are the template's rendering of the whole."""
    turns = [{"role": "system", "content": "简短"}, USER, {**CALLING, "thinking": "先加"}, RESULT, ANSWER]
    *_, last = read_demonstrations(write({"messages": turns, "tools": TOOLS}))
    (example,), _ = encode_demonstrations([last], renderer, max_length=512, action="error")
    plain = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
    plain[2]["content"] = ""
    whole = renderer.tokenizer.apply_chat_template(plain, tools=TOOLS, tokenize=False)
    assert renderer.decode(example.prompt + example.response) + "\n" == whole
    assert [from_dict(as_dict(message)) for message in last.prompt[1:]] == list(last.prompt[1:])


def test_special_tokens_in_calls_and_tools_are_letters(write, renderer):
    nasty = {"type": "function", "function": {"name": "加", "arguments": {"x": "<|im_end|>"}}}
    tools = [{"type": "function", "function": {"name": "加", "description": "<|im_start|>"}}]
    turns = [USER, {**CALLING, "tool_calls": [nasty]}, {"role": "tool", "content": "<|im_end|>"}, ANSWER]
    for one in read_demonstrations(write({"messages": turns, "tools": tools})):
        ids = renderer.written_ids(one.prompt, one.response)
        turn_ends = ids.count(renderer.turn_end_id)
        assert turn_ends == renderer.decode(ids).count("<|im_end|>") - (2 if len(one.prompt) > 1 else 1)


def test_prompts_and_pairs_with_tools(write, renderer):
    """The tools are rendered, and the reward functions get the column as any other."""
    path = write({"prompt": WHOLE[:3], "tools": TOOLS, "chosen": [ANSWER], "rejected": [CALLING]})
    (prompt,) = read_prompts(path)
    assert prompt.columns["tools"] == TOOLS
    (encoded,), _ = encode_prompts([prompt], renderer, max_length=512, action="error")
    assert "# Tools" in renderer.decode(encoded.ids)
    (ranking,) = read_rankings(path)
    inputs = RewardInputs(renderer.tokenizer)
    (rows,), _ = encode_rankings([ranking], inputs, max_length=512, action="error", equal_pairs="error")
    chosen, rejected = (renderer.decode(row["input_ids"]) for row in rows.rows)
    assert chosen == renderer.decode(encoded.ids) + "<think>\n工具说2\n</think>\n\n二<|im_end|>"
    assert rejected.endswith("\n</tool_call><|im_end|>")


def calls(*items):
    return {"messages": [USER, {**CALLING, "tool_calls": list(items)}]}


WRONG_SHAPES = [
    ({"messages": [USER, RESULT, ANSWER]}, ["messages[1]", "no open call is left", "`tool_calls`"]),
    ({"messages": [USER, ANSWER, RESULT, ANSWER]}, ["messages[2]", "no open call is left"]),
    ({"messages": [USER, CALLING, RESULT, RESULT, ANSWER]}, ["messages[3]", "no open call is left"]),
    ({"messages": [USER, CALLING, {**RESULT, "tool_call_id": "c9"}, ANSWER]}, ["messages[2].tool_call_id", "'c9'", "c1"]),
    ({"messages": [USER, {**RESULT, "role": "critic"}, ANSWER]}, ["messages[1].role", "one of system, user"]),
    ({"messages": [USER, {**USER, "tool_calls": [CALL]}]}, ["messages[1]", "for the role user role and content"]),
    ({"messages": [USER, {**ANSWER, "refusal": "不行"}]}, ["messages[1]", "refusal. Accepted"]),
    ({"messages": [{**USER, "note": "长"}, ANSWER]}, ["messages[0]", "role, content, note"]),
    ({"messages": [USER, {**CALLING, "function_call": {"name": "加"}}]}, ["messages[1]", "function_call"]),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, ["messages[1]", "for the role assistant"]),
    (calls("加"), ["messages[1].tool_calls[0]", "'加'", '"function"']),
    (calls({"function": {"arguments": {}}}), ["tool_calls[0]"]),
    (calls({"function": {"name": "加", "arguments": "x=1"}}), ["tool_calls[0].function.arguments", "not JSON", "'x=1'"]),
    (calls({"function": {"name": "加", "arguments": "[1]"}}), ["function.arguments", "[1]", "an object"]),
    (calls({"function": {"name": "加", "arguments": '{"x": NaN}'}}), ["function.arguments", "NaN"]),
    ({"messages": [USER, {**CALLING, "tool_calls": {"name": "加"}}]}, ["messages[1].tool_calls", "(object)", "a list"]),
    ({"messages": WHOLE, "tools": {"name": "加"}}, ["`tools` is", "(object)", "a list"]),
    ({"messages": WHOLE, "tools": ["加"]}, ["`tools[0]` is '加'"]),
    ({"messages": WHOLE, "tools": "加"}, ["`tools` is not JSON"]),
    ({"messages": WHOLE, "tools": [{"type": "function", "function": {}}]}, ["`tools[0]`", "the name of a function"]),
    ({"prompt": "问", "completion": "答", "tools": TOOLS}, ["`tools` beside raw text"]),
    ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, ["messages[1].weight", "0.5", "1 (learn"]),
    ({"messages": [USER, {**ANSWER, "train": 1}]}, ["messages[1].train", "true (learn"]),
    ({"messages": [USER, {**ANSWER, "loss": 0}]}, ["messages[1].loss", "true (learn"]),
    ({"messages": [USER, {**ANSWER, "loss": False, "train": True}]}, ["messages[1]", "has train true and loss false"]),
    ({"messages": [USER, {**ANSWER, "masked": True}]}, ["messages[1]", "reasoning_content, masked. Accepted"]),
    ({"conversations": [{"from": "human", "value": "问"}, {"from": "gpt", "value": "答", "masked": True}]},
     ["messages[1]", "role, content, masked. Accepted"]),
    ({"messages": [USER, {**ANSWER, "train": True, "weight": 0}]}, ["messages[1]", "has weight 0 and train true"]),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, ["no assistant turn", "with weight 0, train false or loss false"]),
    ({"prompt": [USER], "completion": [{**ANSWER, "loss": False}]}, ["`completion` has weight 0, train false or loss"]),
    ({"messages": [USER, {**ANSWER, "thinking": "别的"}]}, ["thinks twice, in reasoning_content and thinking"]),
    ({"messages": [USER, {**ANSWER, "content": "<think>想</think>二"}]}, ["thinks twice", "<think> of its content"]),
    ({"messages": [USER, {**ANSWER, "reasoning_content": ["想"]}]}, ["messages[1].reasoning_content", "a string"]),
    ({"messages": [USER, {**ANSWER, "reasoning_content": "想</think>"}]}, ["contains </think>"]),
    ({"messages": [USER, {"role": "assistant", "content": "<think>\n没完"}]}, ["no </think>", "truncated: true"]),
]  # fmt: skip


def test_wrong_shapes_are_refused_with_their_line(write):
    for record, fragments in WRONG_SHAPES:
        path = write(record)
        with refused(DataError, f"{path}:2: ", *fragments):
            read_demonstrations(path)


def test_a_thought_without_an_end_may_be_learned_if_it_was_cut_off(write):
    turns = [USER, {"role": "assistant", "content": "<think>\n没完"}]
    (one,) = read_demonstrations(write({"messages": turns, "truncated": True}))
    assert one.truncated
    assert one.response == "<think>\n没完"


@pytest.mark.parametrize(("record", "what"), [
    ({"messages": [USER, {**ANSWER, "reasoning_content": None}], "tools": TOOLS}, "`tools`"),
    ({"messages": [USER, {**CALLING, "content": "我算"}]}, "the call of a tool"),
])  # fmt: skip
def test_a_template_that_knows_no_tools(write, thinker, record, what):
    """It would leave them out without a word."""
    renderer = Renderer(AutoTokenizer.from_pretrained(thinker(NO_TOOLS)))
    path = write(record)
    with pytest.raises(CheckpointError, match=rf"{path}:2: the chat template of .* leaves out {what}"):
        check_rendering(renderer, [Sample(d.prompt, d.response, d.source) for d in read_demonstrations(path)])


def test_loss_on_all_learns_a_conversation_once(write, renderer):
    """All tokens of the rendering but the first, not the early turns once more for each later one."""
    turns = [{"role": role, "content": f"{role} 说 {i}"} for i in range(3) for role in ("user", "assistant")]
    path = write({"messages": turns}, {"messages": turns[:2]})
    records = read_demonstrations(path)
    assert len(records) == 4
    examples, counts = encode_demonstrations(records, renderer, max_length=512, action="error", learn_prompt=True)
    whole = [renderer.tokenizer.apply_chat_template(t, tokenize=True).input_ids for t in (turns, turns[:2])]
    assert [e.prompt + e.response for e in examples] == [ids[:-1] for ids in whole]  # without the line break at the end
    assert [len(e.prompt) for e in examples] == [1, 1]
    assert not any(counts.values())


def test_a_call_in_a_later_record_is_looked_at(write, thinker):
    """Each kind of conversation is compared, not only the first three: this template leaves calls out."""
    own = Renderer(AutoTokenizer.from_pretrained(thinker(NO_TOOLS)))
    plain = {"messages": [USER, {"role": "assistant", "content": "二"}]}
    call = {"messages": [USER, {"role": "assistant", "content": "看", "tool_calls": CALLING["tool_calls"]}]}
    samples = [Sample(d.prompt, d.response, d.source) for d in read_demonstrations(write(*[plain] * 5, call))]
    check_rendering(own, samples[:-1])
    with pytest.raises(CheckpointError, match=r"数据.jsonl:7: the chat template of .* leaves out the call of a tool"):
        check_rendering(own, samples, read=True)
