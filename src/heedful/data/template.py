"""Render conversations with a tokenizer's chat template, so that nothing that was typed is read as a special token."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from heedful.data import sandbox
from heedful.data.encoding import Encoder
from heedful.data.messages import as_dict
from heedful.errors import CheckpointError, DataError, RefusedError
from heedful.types import THINK, THINK_END, Conversation, Message


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
        self.encoder = Encoder(tokenizer)
        self.name = tokenizer.name_or_path or "the tokenizer"

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""
        template = self.tokenizer.get_chat_template(tools=[])
        environment = _compile_jinja_template("").environment
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))

    def ids(self, messages: Conversation, *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of a conversation's rendering. Raises CheckpointError as `text` does."""
        return self.encoder.read(self.text(messages, add_generation_prompt=add_generation_prompt))

    def marked(self, text: str) -> str:
        """Return a text of the assistant's as it stands in a rendering, with markers."""
        return self.encoder.marked(text, but=(THINK, THINK_END))

    def text(self, messages: Conversation, *, add_generation_prompt: bool) -> str:
        """Return a conversation's rendering with markers for what `Encoder.read` shall read as letters.

        Raises CheckpointError if there is no chat template, or if it refuses the conversation or takes too long over it.
        """
        if not self.tokenizer.chat_template:
            raise CheckpointError(
                f"{self.name} has no chat template, but the data has messages; "
                "use --chat-template plain (User: ... Assistant: ...), --chat-template FILE.jinja, "
                "or data whose prompts are strings"
            )
        try:
            return self._rendered(messages, add_generation_prompt)
        except sandbox.TimeUpError as error:
            count = f"{len(messages)} message{'s' * (len(messages) != 1)}"
            raise CheckpointError(
                f"the chat template of {self.name} did not render a conversation of {count} within {sandbox.SECONDS:g} "
                "seconds: it probably loops; use another --chat-template"
            ) from error
        except sandbox.LimitError as error:
            raise CheckpointError(
                f"the chat template of {self.name} computes too much for a conversation: {error}; use another --chat-template"
            ) from error
        except Exception as error:
            raise RefusedError(f"the chat template refuses this conversation: {error}") from error

    def _rendered(self, messages: Conversation, add_generation_prompt: bool) -> str:
        marks = {"assistant": self.marked}
        turns = [_in_all(_for_template(one), marks.get(one.role, self.encoder.marked)) for one in messages]
        tools = json.loads(messages[0].tools) if messages and messages[0].tools else None
        tools = _in_all(tools, self.encoder.marked)
        try:
            return self._applied(turns, tools, add_generation_prompt)
        except TypeError:  # DeepSeek's want arguments as text
            if not any(message.tool_calls for message in messages):
                raise
            for call in (call["function"] for turn in turns for call in turn.get("tool_calls", [])):
                call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
            return self._applied(turns, tools, add_generation_prompt)

    def _applied(self, turns: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        """Return what ``tokenizer.apply_chat_template`` returns."""
        tokenizer = self.tokenizer
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:  # code of its own
            return tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        return sandbox.render(
            tokenizer.get_chat_template(tools=tools),
            **tokenizer.special_tokens_map
            | {"messages": turns, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt},
        )


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message with its thinking under both names that templates read."""
    return as_dict(message) | ({} if message.thinking is None else {"thinking": message.thinking})


def _in_all(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with all its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _in_all(item, change) for key, item in value.items()}
    return [_in_all(item, change) for item in value] if isinstance(value, list) else value
