"""Compare what is learned or read of a few records with the chat template's own rendering of the whole conversation."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from heedful.data.chat import Renderer
from heedful.data.template import naming
from heedful.errors import CheckpointError
from heedful.types import THINK, THINK_END, Conversation, Message, Response, Text, plain_response, split_thinking

FIRST = 3
"""How many conversations are compared, besides the first of each kind."""
AROUND = 4
"""Tokens shown before and after the place where two renderings part."""

THOUGHT = re.compile(rf"({THINK}\s*)?({THINK_END}\s*)?$")
"""A thought at the end of a prompt, open or empty."""
SPACED = re.compile(rf"\s*({THINK}|{THINK_END})\s*")
"""A tag with the white space around it, of which each template has its own."""


class Sample(NamedTuple):
    """A conversation that a template renders: a prompt and the response to it, not cut off."""

    prompt: Text
    response: Response
    source: str
    """Where it was read."""


def check_rendering(renderer: Renderer, samples: Iterable[Sample], *, read: bool = False) -> None:
    """Check that the ids of prompt and response are the template's rendering of the conversation, up to the end of the turn.

    Compared are the first conversations, and the first of each kind: with tools, with thinking, with an earlier answer. Some
    differences are meant: other tokens for the same text where prompt and response meet; white space around an answer that
    the template strips; thinking that the template never shows, which is learned as it is; an empty thought that only the
    prompt has.

    Args:
        renderer: writes the conversations.
        samples: prompts and responses; raw text is passed over, as no template renders it.
        read: the model reads the responses, and writes none: `Renderer.read_ids`, not `Renderer.written_ids`, is checked.

    Raises CheckpointError, which shows token by token where they part, or that the template leaves out tools or their calls.
    """
    for prompt, response, source in _chosen(samples):
        with naming(source):
            whole = renderer.whole_ids(prompt, response, apart=read)
            if whole is None:
                continue
            _check_tools(renderer, (*prompt, *([response] if isinstance(response, Message) else [])), whole)
            ours = renderer.read_ids(prompt, response) if read else renderer.written_ids(prompt, response)
            if not _agree(renderer, ours, whole) and not _is_meant(renderer, prompt, response, renderer.decode(whole)):
                raise CheckpointError(_report(renderer, ours, whole, response))


def _chosen(samples: Iterable[Sample]) -> list[tuple[Conversation, Response, str]]:
    """Return the conversations to compare: the first few, and the first of each kind."""
    chosen: list[tuple[Conversation, Response, str]] = []
    seen: set[str] = set()
    for prompt, response, source in samples:
        if isinstance(prompt, str):
            continue
        kinds = {message.role for message in prompt}
        kinds |= {f"thinks:{split_thinking(plain_response(response))[0] is not None}"}
        kinds |= {"tools" for message in prompt if message.tools}
        kinds |= {"calls" for message in (*prompt, response) if isinstance(message, Message) and message.tool_calls}
        if len(chosen) < FIRST or kinds - seen:
            chosen.append((prompt, response, source))
            seen |= kinds
    return chosen


def _agree(renderer: Renderer, ours: list[int], whole: list[int]) -> bool:
    """The template may write something after the end of the turn. Without a token that ends it, ours adds one."""
    ours = ours if renderer.ends_turns else ours[:-1]
    texts = (SPACED.sub(r"\1", renderer.decode(ids)) for ids in (whole, ours))
    return whole[: len(ours)] == ours or next(texts).startswith(next(texts))


def _is_meant(renderer: Renderer, prompt: Conversation, response: Response, whole: str) -> bool:
    """True if the template only strips white space around the answer, or shows no thought where the prompt or we have one."""
    end = renderer.decode([renderer.turn_end_id]) if renderer.ends_turns else ""
    thinking, answer = split_thinking(plain_response(response))
    asked = renderer.decode(renderer.prompt_ids(prompt))
    if thinking is None and whole.startswith(asked + plain_response(response).strip() + end):
        return True
    if answer is None or (thinking is None and not renderer.closes_thinking):
        return False
    before = re.escape(THOUGHT.sub("", asked)) + r"\s*" + THOUGHT.pattern.removesuffix("$")
    return re.match(before + re.escape(answer.strip() + end), whole) is not None


def _check_tools(renderer: Renderer, messages: Conversation, whole: list[int]) -> None:
    """Raise CheckpointError if the template shows nothing of a tool, a call, or the result of one."""
    text = renderer.decode(whole)
    missing = [call.name for message in messages for call in message.tool_calls if call.name not in text]
    results = [m.content for m in messages if m.role == "tool" and m.content.strip() not in text]
    offered = messages[0].tools and "tools" not in renderer.template.variables
    what = "the call of a tool" if missing else "the result of a tool" if results else "`tools`" if offered else None
    if what:
        raise CheckpointError(
            f"the chat template of {renderer.template.name} leaves out {what}: it was not made for tools. Give a "
            "--chat-template that shows them, or data without them"
        )


def _report(renderer: Renderer, ours: list[int], whole: list[int], response: Response) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, whole, strict=False)) if a != b), min(len(ours), len(whole)))
    rows: list[tuple[str, ...]] = [("token", "prompt, then response", "template's rendering")]
    for i in range(max(0, at - AROUND), min(max(len(ours), len(whole)), at + AROUND + 1)):
        texts = [repr(renderer.decode(ids[i : i + 1])) if i < len(ids) else "(ended)" for ids in (ours, whole)]
        rows.append((f"{'>' if i == at else ' '} {i}", *texts))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    thinks = split_thinking(plain_response(response))[0] is not None
    if renderer.opening and not thinks:
        advice = (
            "the prompt opens a thought and this response has none. Give responses that think, or --thinking off if the "
            "template has that switch"
        )
    elif renderer.lacks_header:
        advice = (
            "the template ignores add_generation_prompt, so a prompt does not end where an answer begins. Mend that"
        )
    else:
        advice = "a prompt ends in another way than the conversation goes on. Mend the template"
    return (
        f"the chat template of {renderer.template.name} renders the whole conversation in another way than its prompt and "
        f"the response after it; from token {at} on they differ:\n{table}\n"
        f"The cause: {advice}, or give another --chat-template"
    )
