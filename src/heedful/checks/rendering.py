"""Checks of a chat template: conversations that differ must be rendered differently."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from heedful.checks.findings import Finding, finding, spread
from heedful.data.chat import ChatTemplate, Renderer
from heedful.data.splits import HasPrompt
from heedful.errors import CheckpointError, RefusedError
from heedful.training.thresholds import LOOKED_AT
from heedful.types import Conversation, Message

OTHER = "heedful\u7532"
"""What a changed turn has more, or instead."""
WORST = {"user": "fail", "tools": "fail"}
"""What is left out of a user's turn, or of the tools, is a question that the model never reads."""


def template_omits(records: Sequence[HasPrompt], renderer: Renderer) -> Finding | None:
    """Does the template render two conversations alike that differ in one turn only, or in its beginning or end?"""
    found: list[tuple[str, str, str, str]] = []
    for source, messages in _looked_at(records):
        for role, how, changed in _twins(messages):
            with contextlib.suppress(RefusedError, CheckpointError):
                if _alike(renderer.template, messages, changed):
                    found.append((role, how, source, messages[-1].content))
    if not found:
        return None
    role, how, source, last = min(found, key=lambda one: (WORST.get(one[0], "warn"), one[0]))
    what = "the tools" if role == "tools" else f"{'an earlier' if role == 'assistant' else 'a'} {role} turn"
    return finding(
        "template-omits",
        "fail" if role in WORST else "warn",
        f"the chat template leaves out {how}{what}: conversations that differ only there are rendered alike",
        f"{source}: {len({one[2] for one in found})} of the conversations looked at, such as the one that ends with {last!r}",
    )


def roles_alike(renderer: Renderer, records: Sequence[HasPrompt]) -> Finding | None:
    """Does the template write the same between a question and its answer as between an answer and the next question?"""
    if not any(not isinstance(one.prompt, str) and len(one.prompt) > 1 for one in records):
        return None  # nothing to tell apart
    texts = "heedful1", "heedful2", "heedful3"
    turns = tuple(Message(role, text) for role, text in zip(("user", "assistant", "user"), texts, strict=True))
    try:
        text = renderer.template.text(turns, add_generation_prompt=False)
    except (RefusedError, CheckpointError):
        return None
    if not all(one in text for one in texts):
        return None  # another check's
    to_answer, to_question = (text.partition(a)[2].partition(b)[0] for a, b in itertools.pairwise(texts))
    if to_answer != to_question:
        return None
    return finding(
        "roles-alike",
        "warn",
        "the chat template renders a user's turn as it renders an assistant's",
        f"{to_answer!r} is before an answer and before a question",
    )


def _looked_at(records: Sequence[HasPrompt]) -> list[tuple[str, Conversation]]:
    """Some conversations, the one with the longest turn, which a template might cut, and the one with the most turns."""
    chats = [(one.source, one.prompt) for one in records if not isinstance(one.prompt, str)]
    if not chats:
        return []
    longest = max(spread(chats, 500), key=lambda chat: max(len(turn.content) for turn in chat[1]))
    most = max(spread(chats, 500), key=lambda chat: len(chat[1]))
    return list(dict.fromkeys([*spread(chats, LOOKED_AT), longest, most]))


def _twins(messages: Conversation) -> Iterator[tuple[str, str, Conversation]]:
    """Conversations that differ in the first or last turn of a role: which one, how much of it, and the conversation."""
    if messages[0].tools:
        tools = json.loads(messages[0].tools)
        for tool in tools:
            named = tool.get("function", tool) if isinstance(tool, dict) else {}
            if isinstance(named, dict) and "name" in named:
                named["name"] += "heedful"
        yield "tools", "", (replace(messages[0], tools=json.dumps(tools)), *messages[1:])
    places = {(turn.role, which): i for which in ("first", "last") for i, turn in _ordered(messages, which)}
    for i in dict.fromkeys(places.values()):
        turn = messages[i]
        if turn.tool_calls:
            continue  # several templates write only the calls
        ways = {"": OTHER, "the end of ": turn.content + OTHER}
        if turn.role != "assistant":  # its beginning may be a thought, which templates leave out later on
            ways["the beginning of "] = OTHER + turn.content
        for how, content in ways.items():
            changed = replace(turn, content=content)
            yield turn.role, how, (*messages[:i], changed, *messages[i + 1 :])


def _ordered(messages: Conversation, which: str) -> list[tuple[int, Message]]:
    """The turns with their places, so that the first or the last of each role comes last."""
    turns = list(enumerate(messages))
    return turns[::-1] if which == "first" else turns


def _alike(template: ChatTemplate, one: Conversation, other: Conversation) -> bool:
    return template.text(one, add_generation_prompt=True) == template.text(other, add_generation_prompt=True)
