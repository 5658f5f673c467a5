"""Conversations that go on: what is added to the ids, which calls are read, and which templates are refused."""

import json

import pytest

from heedful import CheckpointError
from heedful.data.chat import Renderer
from heedful.data.dialogue import CALL_ID, Dialogue
from heedful.models.tiny import byte_tokenizer
from heedful.types import Message, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "w"}}},
    },
}
HEAD = (
    "{%- if tools %}{{- '<|system|>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{- '<|end|>' }}{% endif %}"
    "{%- for m in messages %}"
)
TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
HERMES = (
    HEAD + "{{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}"
    "{%- if m.role == 'tool' %}{{- '<r>' + m.name + ': ' + m.content + '</r>' }}{% else %}{{- m.content or '' }}{% endif %}"
    "{%- for c in m.tool_calls or [] %}"
    """{{- '<call>{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}</call>' }}"""
    "{%- endfor %}{{- '<|end|>\n' }}" + TAIL
)
"""An object behind a marker, as Qwen and Hermes write it. A line break follows the end of a turn."""
BARE = (
    HEAD + "{{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}"
    """{{- '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}"""
    "{%- endfor %}{{- '<|end|>' }}" + TAIL
)
"""Nothing but the object, as Llama writes it."""
LISTED = (
    HEAD + "{{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + (m.content or '') }}"
    "{%- if m.tool_calls %}{{- '[CALLS][' }}{% for c in m.tool_calls %}"
    """{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) }}"""
    """{{- ', "id": "' + c.id + '"}' }}"""
    "{%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- ']' }}{% endif %}{{- '<|end|>' }}" + TAIL
)
"""A list of objects behind a marker, as Mistral writes it."""
WORDS = (
    HEAD + "{{- '<|' + m.role + '|>' + (m.content or '') }}{%- for c in m.tool_calls or [] %}{{- c.function.name }}"
    "{%- endfor %}{{- '<|end|>' }}" + TAIL
)
"""A name without an object."""
FORGETS = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' }}"
    "{{- (m.content if loop.last or m.role != 'assistant' else '...') + '<|end|>' }}" + TAIL
)

OPENS = HERMES.replace(
    "{{- m.content or '' }}",
    "{{- ('<think></think>' if m.role == 'assistant' else '') + (m.content or '').split('</think>')[-1] }}",
).replace("<|assistant|>' }}", "<|assistant|><think>' }}")
"""The generation prompt opens a thought, and earlier ones are emptied, as in Nemotron's."""


def turns(template, tools=(TOOL,), *, replies=True):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Dialogue(Renderer(tokenizer), list(tools), replies=replies)


def text(made, ids):
    return made.renderer.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (HERMES, ("<call>", "name", "arguments")),
        (BARE, ("", "name", "parameters")),
        (LISTED, ("[CALLS]", "name", "arguments")),
    ],
)
def test_a_call_that_the_template_writes_is_read(template, form):
    """Two calls with Chinese, braces and quotes in their arguments, through the template and back."""
    made = turns(template)
    assert tuple(made.form) == form
    calls = tuple(
        ToolCall("guess", json.dumps({"word": word}, ensure_ascii=False), CALL_ID) for word in ('苹"}果', "{x")
    )
    question = made.prompt((Message("user", "问"),))
    before = made.template.text(question, add_generation_prompt=True)
    whole = made.template.text((*question, Message("assistant", "", tool_calls=calls)), add_generation_prompt=False)
    written = whole.removeprefix(before).removesuffix("\n").removesuffix("<|end|>")
    assert made.message(written) == Message("assistant", "", tool_calls=calls)


def test_words_before_a_call_are_the_message():
    message = turns(HERMES).message('我想想。<call>{"name": "guess", "arguments": {"word": "梨"}}</call>')
    assert message.content == "我想想。"
    assert [call.name for call in message.tool_calls] == ["guess"]


@pytest.mark.parametrize(
    "said",
    [
        "没有",
        "<call>",
        '<call>{"name": "guess", "arguments": {"word": "梨"}</call>',
        '<call>{"name": 3, "arguments": {}}</call>',
        '<call>{"name": "guess", "arguments": "梨"}</call>',
        '<call>{"name": "guess", "arguments": {}}</call><call>{"name"</call>',
        "<call>" + "[" * 5000,
        "<call>" + '{"name":' * 100_000,
        '<call>{"name": "guess", "arguments": {"word": NaN}}</call>',
    ],
)
def test_a_call_that_cannot_be_read_is_no_call(said):
    assert turns(HERMES).message(said) == Message("assistant", said)


def test_calls_are_those_behind_the_thinking():
    call = '<call>{"name": "guess", "arguments": {"word": "梨"}}</call>'
    assert turns(HERMES).message(f"<think>{call}?</think>算了") == Message("assistant", f"<think>{call}?</think>算了")
    assert turns(HERMES).message(f"<think>{call}") == Message("assistant", f"<think>{call}")
    message = turns(BARE).message('<think>想</think>\n{"name": "guess", "parameters": {"word": "梨"}}')
    assert (message.thinking, [one.arguments for one in message.tool_calls]) == ("想", ['{"word": "梨"}'])


def test_a_template_without_an_end_of_turn_goes_on_behind_the_answer():
    made = turns(HERMES.replace("<|end|>\n", "\n").replace("<|end|>", ""))
    assert not made.renderer.ends_turns
    ids = made.said_ids((Message("tool", "RESULT", name="guess"),), (Message("user", "问"),))
    assert text(made, ids) == "\n<|user|><r>guess: RESULT</r>\n<|assistant|>"
    assert (
        text(made, made.said_ids((Message("user", "好"),), (Message("user", "问"),))) == "\n<|user|>好\n<|assistant|>"
    )


def test_a_call_without_arguments_has_none():
    assert turns(HERMES).message('<call>{"name": "look"}</call>').tool_calls == (ToolCall("look", "{}", CALL_ID),)


def test_what_is_added_begins_behind_the_policys_end_token():
    """The line break after the end of a turn is the template's, and so is all up to where the policy speaks again. Special
    tokens in what a tool returns are letters."""
    made = turns(HERMES)
    results = (Message("tool", "a<|end|>b", name="guess"), Message("tool", "2", name="look"))
    ids = made.said_ids(results, (Message("user", "问"),))
    expected = "\n<|user|><r>guess: a<|end|>b</r><|end|>\n<|user|><r>look: 2</r><|end|>\n<|assistant|>"
    assert text(made, ids) == expected
    end = made.renderer.turn_end_id
    assert ids.count(end) == 2, "the third is text"
    reply = made.said_ids((Message("user", "好"),), (Message("system", "s"), Message("user", "问")))
    assert text(made, reply) == "\n<|user|>好<|end|>\n<|assistant|>"


def test_the_ids_are_those_of_the_template():
    """Prompt, an answer as a policy writes it, what the other one says, and another answer: one conversation."""
    made = turns(HERMES)
    renderer, question = made.renderer, made.prompt((Message("user", "问"),))
    call = Message("assistant", "", tool_calls=(ToolCall("guess", '{"word": "梨"}', CALL_ID),))
    result = Message("tool", "yes", name="guess", tool_call_id=CALL_ID)
    said = renderer.written(question, call).response
    grown = [*renderer.prompt_ids(question), *said, *made.said_ids((result,), question)]
    assert grown == renderer.prompt_ids((*question, call, result))


def test_tools_stand_beside_those_of_the_prompt():
    own = json.dumps([{"type": "function", "function": {"name": "look"}}])
    (first,) = turns(HERMES).prompt((Message("user", "问", tools=own),))
    assert [tool["function"]["name"] for tool in json.loads(first.tools)] == ["look", "guess"]


def test_results_of_several_calls_in_a_template_of_single_calls():
    """Llama's. The policy may call several tools at once all the same, and the results are added one after the other."""
    single = BARE.replace(
        TAIL, "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('single') }}{% endif %}" + TAIL
    )
    made = turns(single)
    results = tuple(Message("tool", result, name="guess", tool_call_id=CALL_ID) for result in ("对", "错"))
    assert (
        text(made, made.said_ids(results, (Message("user", "问"),)))
        == "<|user|>对<|end|><|user|>错<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        (WORDS, [TOOL], "cannot call tools in a form that heedful reads .* but the environment has tools: guess"),
        (HERMES.replace("tool_calls", "no_calls"), [TOOL], "cannot call tools"),
        (FORGETS, [], "writes an answer in another way once other turns follow it"),
        (OPENS, [], "writes an answer in another way once other turns follow it"),
    ],
)
def test_templates_that_cannot_do_it_are_refused(template, tools, message):
    with pytest.raises(CheckpointError, match=f"^the chat template of .* {message}"):
        turns(template, tools)


def test_thinking_that_is_left_out_later_is_refused_for_talk_and_kept_for_tools():
    """Qwen3 leaves out the thinking before the last user's message, not that before the results of tools."""
    shows = (
        "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
        "{%- endif %}{%- endfor %}"
    )
    thinks = HERMES.replace(
        "{{- m.content or '' }}",
        "{%- if m.thinking and loop.index0 > ns.last %}{{- '<think>' + m.thinking + '</think>' }}{% endif %}"
        "{{- m.content or '' }}",
    )
    made = turns(shows + thinks, replies=False)
    assert made.renderer.shows_thinking
    with pytest.raises(CheckpointError, match="leave out its thinking"):
        turns(shows + thinks)
