"""Render conversations with a tokenizer's chat template, so that nothing that was typed is read as a special token."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from heedful.data.deadline import TimeLimit, TimeUpError
from heedful.data.messages import as_dict
from heedful.data.template_limits import LimitError, limited
from heedful.errors import CheckpointError, DataError
from heedful.types import THINK, THINK_END, Conversation, Message

TIME_LIMIT = TimeLimit(10.0)
"""Of one rendering, which takes less than a millisecond."""

Marks = Mapping[str, str]
"""For each text of a special token that somebody typed, the marker that stands for it while a template is rendered."""


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the place of a record before the errors that its rendering raises."""
    try:
        yield
    except (CheckpointError, DataError) as error:
        raise type(error)(f"{source}: {error}") from error


class ChatTemplate:
    """A tokenizer's chat template.

    Texts of special tokens inside messages pass through the template as markers that no message contains, and are then
    encoded literally. In an assistant's messages ``<think>`` and ``</think>`` stay what they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special_texts = sorted(specials, key=len, reverse=True)
        self.name = tokenizer.name_or_path or "the tokenizer"

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""
        template = self.tokenizer.get_chat_template(tools=[])
        environment = _compile_jinja_template("").environment
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))

    def literal(self, text: str) -> list[int]:
        """Return the ids of a text, of which no part is read as a special token."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def ids(self, messages: Conversation, *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of a conversation's rendering. Raises CheckpointError as `text` does."""
        marks = self.marks(messages)
        return self.encoded(self.text(messages, marks, add_generation_prompt=add_generation_prompt), marks)

    def marks(self, messages: Conversation) -> Marks:
        """Return markers for the texts of special tokens that occur in messages."""
        typed = [
            text for text in self.special_texts if any(text in part for message in messages for part in _parts(message))
        ]
        if not typed:
            return {}
        everything = "".join(part for message in messages for part in _parts(message))
        start = next(start for i in itertools.count() if (start := f"\ue000{i}.") not in everything)
        return {text: f"{start}{i}\ue001" for i, text in enumerate(typed)}

    def text(self, messages: Conversation, marks: Marks, *, add_generation_prompt: bool) -> str:
        """Return a conversation's rendering with markers.

        Raises CheckpointError if there is no chat template, or if it refuses the conversation or takes too long over it.
        """
        if not self.tokenizer.chat_template:
            raise CheckpointError(
                f"{self.name} has no chat template, but the data has messages; "
                "use --chat-template plain (User: ... Assistant: ...), --chat-template FILE.jinja, "
                "or data whose prompts are strings"
            )
        tools = messages[0].tools if messages else ""
        try:
            with TIME_LIMIT(), limited([*map(_parts, messages)]):
                return self._rendered(messages, marks, json.loads(tools) if tools else None, add_generation_prompt)
        except TimeUpError as error:
            count = f"{len(messages)} message{'s' * (len(messages) != 1)}"
            raise CheckpointError(
                f"the chat template of {self.name} did not render a conversation of {count} within {TIME_LIMIT.seconds:g} "
                "seconds: it probably loops; use another --chat-template"
            ) from error
        except LimitError as error:
            raise CheckpointError(
                f"the chat template of {self.name} computes too much for a conversation: {error}; use another --chat-template"
            ) from error
        except Exception as error:
            raise CheckpointError(f"the chat template refuses this conversation: {error}") from error

    def _rendered(self, messages: Conversation, marks: Marks, tools: Any, add_generation_prompt: bool) -> str:
        turns = [_marked(_for_template(message), _marks_for(message.role, marks)) for message in messages]
        options = {
            "tools": _marked(tools, marks), "tokenize": False, "add_generation_prompt": add_generation_prompt
        }  # fmt: skip
        try:
            return self.tokenizer.apply_chat_template(turns, **options)
        except TypeError:  # DeepSeek's want arguments as text
            if not any(message.tool_calls for message in messages):
                raise
            for call in (call["function"] for turn in turns for call in turn.get("tool_calls", [])):
                call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
            return self.tokenizer.apply_chat_template(turns, **options)

    def encoded(self, rendered: str, marks: Marks) -> list[int]:
        """Return the ids of a rendering, or of a part of one, with markers."""
        if not marks:
            return self.tokenizer(rendered, add_special_tokens=False).input_ids
        texts = {marker: text for text, marker in marks.items()}
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(re.escape(marker) for marker in texts)})", rendered):
            if piece in texts:
                ids += self.literal(texts[piece])
            else:
                ids += self.tokenizer(piece, add_special_tokens=False).input_ids
        return ids


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message with its thinking under both names that templates read."""
    return as_dict(message) | ({} if message.thinking is None else {"thinking": message.thinking})


def marked(text: str, marks: Marks, *, role: str = "assistant") -> str:
    """Return a text as it stands in a rendering with markers."""
    found = _marked(text, _marks_for(role, marks))
    assert isinstance(found, str)
    return found


def _parts(message: Message) -> Sequence[str]:
    """Return every text in a message that somebody may have typed."""
    calls = [part for call in message.tool_calls for part in (call.name, call.arguments)]
    return [message.content, message.thinking or "", message.tools, *calls]


def _marks_for(role: str, marks: Marks) -> Marks:
    if role != "assistant":
        return marks
    return {text: marker for text, marker in marks.items() if text not in (THINK, THINK_END)}


def _marked(value: Any, marks: Marks) -> Any:
    """Return a value with markers in all its strings."""
    if isinstance(value, str) and marks:
        return re.sub("|".join(re.escape(text) for text in marks), lambda match: marks[match.group()], value)
    if isinstance(value, dict):
        return {key: _marked(item, marks) for key, item in value.items()}
    return [_marked(item, marks) for item in value] if isinstance(value, list) else value
