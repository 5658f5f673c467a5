"""Compare the token ids of training, scoring and sampling with the chat template's own rendering of whole conversations."""

import itertools
import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from heedful.data.chat import Renderer
from heedful.data.fitting import naming
from heedful.errors import CheckpointError
from heedful.types import THINK, THINK_END, Conversation, Message, Text, Turn, plain_response, split_thinking

FIRST = 3
"""Number of conversations to compare, besides the first of each kind."""
ORDINARY = 20
"""Number of answers to check whether a prompt ends at a token boundary."""
AROUND = 4
"""Tokens shown before and after the first difference of two renderings."""

THOUGHT = re.compile(rf"({THINK}\s*)?({THINK_END}\s*)?$")
"""A thinking block at the end of a prompt, open or empty."""
SPACED = re.compile(rf"\s*({THINK}|{THINK_END})\s*")
"""A tag with the white space around it, which differs between templates."""


SPACED_PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""The earlier form of ``--chat-template plain``, which older models have. Only its prompts differ."""


class Sample(NamedTuple):
    """A conversation that a template renders: a prompt and the response to it, not cut off."""

    prompt: Text
    response: Turn
    source: str
    """Where it was read."""


def check_rendering(renderer: Renderer, samples: Iterable[Sample], *, read: bool = False) -> None:
    """Check that the ids of prompt and response equal the template's rendering of the whole, up to the end of the turn.

    Compares the first conversations, and the first of each kind: with tools, with thinking, with an earlier answer. Some
    differences are intended: thinking that the template omits or writes with other white space, which is learned unchanged;
    an empty thinking block that only the prompt has; the end token after an answer if the template has none. Raw text is
    skipped. With ``read`` the model only reads responses, so `Renderer.read_ids` is checked.

    Raises CheckpointError, which shows the first difference token by token, or that the template omits tools or their calls.
    """
    for prompt, response, source in _chosen(samples):
        with naming(source):
            whole = renderer.whole_ids(prompt, response, apart=read)
            if whole is None:
                continue
            _check_tools(renderer, (*prompt, *([response] if isinstance(response, Message) else [])), whole)
            ours = renderer.read_ids(prompt, response) if read else renderer.written_ids(prompt, response)
            if not _agree(renderer, ours, whole) and not _is_meant(renderer, prompt, response, ours, whole):
                raise CheckpointError(_report(renderer, ours, whole, response))


def check_sampling(renderer: Renderer, samples: Iterable[Sample], *, learns: bool = True) -> None:
    """Check that the prompt ids for sampling are a prefix of the ids for training.

    They are not if a prompt's last token changes when an answer follows: the space of ``ASSISTANT: `` and the first word of
    an answer may be one token, and two line breaks may be one token only at the end of a text. The policy would then train
    on other prompt tokens than it samples after. A single answer with an unusual beginning, such as a line break, is no
    fault, so half of the first answers must differ. White space at their beginning is ignored, raw text is skipped.

    Raises CheckpointError, which shows the first difference token by token; if nothing is trained (``learns``), only warns.
    """
    compared, parted = 0, []
    for prompt, response, source in samples:
        if isinstance(prompt, str):
            continue
        if compared == ORDINARY:
            break
        answer = response.lstrip() if isinstance(response, str) else response
        with naming(source):
            asked, whole = renderer.prompt_ids(prompt), renderer.written_ids(prompt, answer)
        compared += 1
        if whole[: len(asked)] != asked:
            parted.append((asked, whole, source))
    if parted and 2 * len(parted) >= compared:
        asked, whole, source = parted[0]
        at, table = _table(renderer, asked, whole, ("prompt", "prompt and answer"))
        if renderer.tokenizer.get_chat_template().endswith(SPACED_PLAIN):
            advice = (
                "The model has an earlier form of the template plain. Give --chat-template plain (in a round: chat_template: "
                "plain in the file of --ppo-config). It renders conversations in the same way, but its prompts end before "
                "the space"
            )
        else:
            advice = (
                "Give a --chat-template whose prompt ends with a special token, or before its last white space, with that "
                "white space before every answer: {{ 'ASSISTANT:' }} and {{ ' ' + message.content }}, not {{ 'ASSISTANT: ' }}"
            )
        message = (
            f"{source}: with the chat template of {renderer.template.name}, the prompt's last token changes when an answer "
            f"follows; from token {at} on, the prompt alone (for sampling) differs from the prompt with its answer (for "
            f"training):\n{table}\n{advice}"
        )
        if learns:
            raise CheckpointError(message)
        warnings.warn(message, stacklevel=2)


def ordinary_answers(renderer: Renderer, prompt: Text) -> list[str]:
    """Return plausible answers to a prompt: its own last words, and words of the vocabulary.

    If the rendered prompt ends with a space, they are words whose token includes a leading space.
    """
    if isinstance(prompt, str):
        return []
    words = [prompt[-1].content.strip() or "an answer", "你好", "an answer"]
    if renderer.template.text(prompt, add_generation_prompt=True).endswith(" "):
        vocabulary = sorted(renderer.tokenizer.get_vocab().items(), key=lambda item: item[1])
        spaced = (i for token, i in vocabulary if token[:1] in ("\u0120", "\u2581", " ") and token[1:].isalpha())
        texts = (renderer.encoder.decode_after([i], [i]) for i in itertools.islice(spaced, ORDINARY))
        words = [text.strip() for text in texts] + words
    thought = renderer.opening + "some thought\n</think>\n\n" if renderer.opening else ""
    return [thought + word for word in words]


def _chosen(samples: Iterable[Sample]) -> list[tuple[Conversation, Turn, str]]:
    """Return the conversations to compare: the first ones, and the first of each kind."""
    chosen: list[tuple[Conversation, Turn, str]] = []
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
    if renderer.ends_turns:
        return whole[: len(ours)] == ours
    return renderer.decode(whole).startswith(renderer.decode(ours[:-1]))


def _is_meant(renderer: Renderer, prompt: Conversation, response: Turn, ours: list[int], whole: list[int]) -> bool:
    """True if the only difference is thinking that the template omits or writes with other white space."""
    end = renderer.decode([renderer.turn_end_id]) if renderer.ends_turns else ""
    thinking, answer = split_thinking(plain_response(response))
    if answer is None or (thinking is None and not renderer.closes_thinking):
        return False
    texts = (SPACED.sub(r"\1", renderer.decode(ids)) for ids in (whole, ours if renderer.ends_turns else ours[:-1]))
    if next(texts).startswith(next(texts)):
        return True
    asked = renderer.decode(renderer.prompt_ids(prompt))
    before = re.escape(THOUGHT.sub("", asked)) + r"\s*" + THOUGHT.pattern.removesuffix("$")
    return re.match(before + re.escape(answer.strip() + end), renderer.decode(whole)) is not None


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


def _table(renderer: Renderer, left: list[int], right: list[int], names: tuple[str, str]) -> tuple[int, str]:
    """Return the position of the first difference of two lists of ids, and a table of the tokens around it."""
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    rows: list[tuple[str, ...]] = [("token", *names)]
    for i in range(max(0, at - AROUND), min(max(len(left), len(right)), at + AROUND + 1)):
        pieces = [ids[i : i + 1] for ids in (left, right)]
        texts = [repr(renderer.encoder.decode_after(piece, piece)) if piece else "(ended)" for piece in pieces]
        rows.append((f"{'>' if i == at else ' '} {i}", *texts))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return at, "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _report(renderer: Renderer, ours: list[int], whole: list[int], response: Turn) -> str:
    at, table = _table(renderer, ours, whole, ("prompt, then response", "template's rendering"))
    thinks = split_thinking(plain_response(response))[0] is not None
    if renderer.opening and not thinks:
        advice = (
            "the prompt opens a thought and this response has none. Give responses that think, or --thinking off if the "
            "template has that switch"
        )
    elif renderer.lacks_header:
        advice = "the template ignores add_generation_prompt, so a prompt does not end where an answer begins. Fix that"
    else:
        advice = "a prompt ends in another way than the conversation continues. Fix the template"
    return (
        f"the chat template of {renderer.template.name} renders the whole conversation in another way than its prompt and "
        f"the response after it; from token {at} on they differ:\n{table}\n"
        f"The cause: {advice}, or give another --chat-template"
    )
