"""Prompts that are too long: which part goes, and when none can."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_tokenizers import with_bos
from heedful import ConfigError, DataError, Message
from heedful.data.chat import Renderer
from heedful.data.fitting import max_length, prompt_limit
from heedful.data.loading import cut_prompt

RENDERER = Renderer(with_bos("{{ bos_token }}"))
"""One token per byte: BOS comes first, in raw text and in the template's rendering."""
BOS = RENDERER.tokenizer.bos_token_id
SYSTEM, OLD, REPLY = (
    Message("system", "你要有礼貌。"),
    Message("user", "What is a cat?"),
    Message("assistant", "An animal."),
)
LAST = Message("user", "And now, 请告诉我 what a dog is.")
TALK = (SYSTEM, OLD, REPLY, LAST)


def length(prompt):
    return len(RENDERER.prompt_ids(prompt))


def cut(prompt, limit):
    found = cut_prompt(prompt, RENDERER, limit=limit, source="题.jsonl:7")
    ids = RENDERER.prompt_ids(found)
    assert len(ids) <= limit
    assert ids[0] == BOS
    assert BOS not in ids[1:]
    return found


def test_raw_text_loses_its_beginning():
    """What fits stays as it is. No character is split, of three bytes each; special tokens in a text stay text."""
    assert cut(TALK, length(TALK)) is TALK
    assert cut("abc", 4) == "abc"
    assert cut("abcdef", 4) == "def"
    assert cut("a" * 1000 + "z", 9) == "a" * 7 + "z"
    assert cut("一二三", 6) == "三"
    assert cut("abc <|end|> def", 10) == "end|> def"


def test_a_conversation_loses_its_oldest_turns_and_keeps_its_system_message():
    assert cut(TALK, length(TALK) - 1) == (SYSTEM, LAST)
    turns = (SYSTEM, OLD, REPLY, OLD, REPLY, LAST)
    assert cut(turns, length(turns) - 1) == TALK
    assert cut(turns[1:], length(turns[1:]) - 1) == TALK[1:]


def test_what_is_left_begins_with_a_user():
    """A template may refuse a conversation that begins with an answer."""
    turns = (REPLY, OLD, REPLY, LAST)
    assert cut(turns, length(turns) - 1) == (OLD, REPLY, LAST)


def test_then_the_last_question_loses_its_beginning():
    limit = length((SYSTEM, LAST)) - 3
    assert cut(TALK, limit) == (SYSTEM, Message("user", LAST.content[3:]))


def test_what_follows_the_last_question_stays():
    """A result of a tool, without which there would be nothing to answer."""
    tool = Message("tool", "42")
    assert cut((*TALK, tool), length((SYSTEM, LAST, tool)) - 4) == (SYSTEM, Message("user", LAST.content[4:]), tool)


def test_tools_stay_and_count():
    """They stand on the first message, whichever that is, and a template writes them out."""
    renderer = Renderer(with_bos("{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"))
    tools = '[{"type": "function", "function": {"name": "add"}}]'

    def count(prompt):
        return len(renderer.prompt_ids(prompt))

    turns = (replace(OLD, tools=tools), REPLY, OLD, REPLY, LAST)
    in_system, last = (replace(SYSTEM, tools=tools), OLD, REPLY, LAST), replace(LAST, tools=tools)
    for prompt, limit, expected in [
        (turns, count(turns) - 1, (turns[0], REPLY, LAST)),
        (turns, count((turns[0], REPLY, LAST)) - 1, (last,)),
        (turns, count((last,)) - 3, (replace(last, content=LAST.content[3:]),)),
        (in_system, count(in_system) - 1, (in_system[0], LAST)),
    ]:
        found = cut_prompt(prompt, renderer, limit=limit, source="")
        assert found == expected
        assert count(found) <= limit
        assert "add" in renderer.decode(renderer.prompt_ids(found))


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), limit=st.integers(2, 40))
def test_the_longest_end_that_fits_is_kept(text, limit):
    if length(text) <= limit:
        return
    try:
        found = cut(text, limit)
    except DataError:
        assert length(text[-1]) > limit or not text[len(text) - limit :].strip()
        return
    assert text.endswith(found)
    assert length(text[-len(found) - 1 :]) > limit


def test_a_prompt_that_cannot_be_cut_is_named():
    for prompt, limit in (
        (TALK, length((SYSTEM, Message("user", "."))) - 1),
        ((SYSTEM, Message("tool", "x" * 99)), 20),
    ):
        said = rf"题.jsonl:7: the prompt has \d+ tokens and cannot be cut to {limit}: the system message.*--max-prompt"
        with pytest.raises(DataError, match=said):
            cut(prompt, limit)
    for text, limit in (("一二三", 2), ("abc   ", 4)):  # of which nothing would be left
        with pytest.raises(DataError, match=rf"题.jsonl:7: the prompt cannot be cut to {limit} tokens"):
            cut(text, limit)


def test_the_default_limit_is_a_quarter_of_the_context_within_256_and_1024():
    assert prompt_limit(None, 64, 2048) == 512
    assert prompt_limit(None, 64, 512) == 256, "memory is no reason to refuse the prompts of a tiny model"
    assert prompt_limit(None, 64, 128) == 64
    assert prompt_limit(None, 64, 40960) == 1024
    assert prompt_limit(None, 64, 2**31) == 1024
    assert prompt_limit(None, 500, 512) == 12, "with a long response only the rest"
    assert prompt_limit(300, 64, 512) == 300
    assert prompt_limit(448, 64, 512) == 448
    with pytest.raises(ConfigError, match=r"--max-prompt-tokens 449 and --max-new-tokens 64 .* 512 .* at most 448"):
        prompt_limit(449, 64, 512)
    assert (max_length(None, 512), max_length(2, 512), max_length(512, 512)) == (512, 2, 512)
