"""The turns of a conversation that goes on: the tokens of what the other one says, and the policy's calls of tools.

Ids only grow: behind the policy's own tokens come those that the chat template writes for what the other one said, up to
where the policy speaks again. Nothing is tokenised a second time.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import JSONDecoder
from typing import Any, NamedTuple

from heedful.data.chat import PROBE, Renderer
from heedful.errors import CheckpointError, RefusedError
from heedful.types import THINK_END, Conversation, Message, ToolCall, split_thinking

CALL_ID = "call00001"
"""An id of a call: nine letters and digits, as Mistral's templates want them."""
CALL = ToolCall("probe_tool", '{"probe_key": "probe value"}', CALL_ID)


class JSONCalls(NamedTuple):
    """Calls as objects in JSON behind a marker, as in the templates of Hermes, Qwen, Llama and Mistral."""

    marker: str
    """The text before a call, without white space at its ends; nothing if the answer begins with the object."""
    name: str
    """The key of the tool's name."""
    arguments: str
    """The key of the arguments."""

    def read(self, text: str) -> list[ToolCall] | None:
        """The calls in a turn; None if one cannot be read."""
        if not self.marker:
            return self._objects(text) if text.lstrip().startswith("{") else []
        found = []
        for part in text.split(self.marker)[1:]:
            objects = self._objects(part)
            if not objects:
                return None
            found += objects
        return found

    def _objects(self, text: str) -> list[ToolCall] | None:
        """The calls at the beginning of a text, one after the other; None if one cannot be read."""
        decoder, rest, found = JSONDecoder(parse_constant=_refuse), text.lstrip(" \r\n\t["), list[ToolCall]()
        while rest.startswith("{"):
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            arguments = value.get(self.arguments, {})
            if not isinstance(value.get(self.name), str) or not isinstance(arguments, dict):
                return None
            found.append(_call(value[self.name], arguments))
            rest = rest[end:].lstrip(" \r\n\t,;")
        return found

    def content(self, text: str) -> str:
        """The words before the calls."""
        return text.partition(self.marker)[0].strip() if self.marker else ""


class TaggedCalls(NamedTuple):
    """Calls in tags, as in the templates of Qwen3-Coder and Qwen3.5."""

    types: Mapping[str, Mapping[str, str]]
    """The types of each tool's arguments: those that are no strings are read as JSON."""

    def read(self, text: str) -> list[ToolCall] | None:
        """The calls in a turn; None if one cannot be read."""
        found = []
        for body in re.split(r"<function=", text)[1:]:
            name, begun, rest = body.partition(">")
            inside, ended, _ = rest.partition("</function>")
            if not begun or not ended:
                return None
            arguments = {}
            for key, value in re.findall(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", inside, flags=re.DOTALL):
                arguments[key.strip()] = value
                if self.types.get(name.strip(), {}).get(key.strip(), "string") != "string":
                    with contextlib.suppress(ValueError, RecursionError):
                        arguments[key.strip()] = json.loads(value, parse_constant=_refuse)
            found.append(_call(name.strip(), arguments))
        return found

    def content(self, text: str) -> str:
        """The words before the calls."""
        return text.partition("<function=")[0].strip().removesuffix("<tool_call>").strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(whole(name), whole(json.dumps(arguments, ensure_ascii=False)), CALL_ID)


def whole(text: str) -> str:
    """A text with a question mark for each half of a character that JSON may name, and that no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


class Dialogue:
    """Writes and reads the turns of a policy's conversations with one chat template.

    Args:
        renderer: the policy's.
        tools: JSON schemas of the tools that the policy may call.
        replies: whether the other one answers turns without a tool.

    Raises CheckpointError for a template that cannot write calls of tools that can be read again, or writes earlier turns
    in another way once others follow.
    """

    def __init__(self, renderer: Renderer, tools: Sequence[Mapping[str, Any]], *, replies: bool) -> None:
        self.renderer, self.template, self.tools = renderer, renderer.template, tools
        self.form = self._call_form() if tools else None
        if tools:
            self._check_growing((Message("tool", "a", name=CALL.name, tool_call_id=CALL.id),))
        if replies:
            self._check_growing((Message("user", "a"),))

    def prompt(self, prompt: Conversation) -> Conversation:
        """A prompt with the tools of the environment beside those that it offers itself."""
        if not self.tools:
            return prompt
        own = json.loads(prompt[0].tools) if prompt[0].tools else []
        return (replace(prompt[0], tools=json.dumps([*own, *self.tools], ensure_ascii=False)), *prompt[1:])

    def said_ids(self, said: Conversation, prompt: Conversation) -> list[int]:
        """The ids of what the other one said to the policy's turn, from behind its end to where the policy speaks again."""
        before, whole = self._around(said, prompt[:1] if prompt[0].role == "system" else ())
        return self.renderer.encoder.read(whole[len(before) :])

    def message(self, text: str) -> Message:
        """The policy's turn as a message, with its calls of tools behind its thinking. A turn whose calls cannot be read has
        none."""
        thinking, answer = split_thinking(text)
        calls = self.form.read(answer) if self.form is not None and answer is not None else None
        if not calls:
            return Message("assistant", text)
        assert self.form is not None
        assert answer is not None
        return Message("assistant", self.form.content(answer), thinking=thinking, tool_calls=tuple(calls))

    def _around(self, said: Conversation, system: Conversation = ()) -> tuple[str, str]:
        """A short conversation up to the end of an answer, and with what the other one said to it."""
        if said[0].role != "tool":
            return self._answered(Message("assistant", PROBE), said, system)
        calls = tuple(replace(CALL, name=one.name or CALL.name) for one in said)
        try:
            return self._answered(Message("assistant", "", tool_calls=calls), said, system)
        except RefusedError:  # Llama's templates take one call in a message, and several results
            if len(calls) == 1:
                raise
            return self._answered(Message("assistant", "", tool_calls=calls[:1]), said, system)

    def _answered(self, answer: Message, said: Conversation, system: Conversation) -> tuple[str, str]:
        """`_around` with this answer, and a thought if it needs one."""
        if self.renderer.shows_thinking and not self.renderer.closes_thinking:
            answer = replace(answer, thinking=PROBE)
        asked = (*system, Message("user", "a"), answer)
        if self.tools:
            asked = self.prompt(asked)
        answered = self.template.text(asked, add_generation_prompt=False)
        whole = self.template.text((*asked, *said), add_generation_prompt=True)
        before = self._up_to_end(answered, answer.content)
        if not whole.startswith(before):
            raise self._rewrites()
        return before, whole

    def _up_to_end(self, text: str, says: str) -> str:
        """A rendering up to the end of its last answer, which ``says`` this."""
        if self.renderer.ends_turns:
            end = self.renderer.end_token
            return text[: text.rindex(end) + len(end)]
        return text[: text.rindex(PROBE) + len(PROBE)] if says == PROBE else text.rstrip()

    def _check_growing(self, said: Conversation) -> None:
        """Raise CheckpointError if a turn is written in another way once another follows: a policy that wrote it, and then
        reads on, would have other ids before it than the template writes."""
        question = self.prompt((Message("user", "a"),))
        before = self.template.text(question, add_generation_prompt=True)
        _, whole = self._around(said)
        header = before.removeprefix(self.template.text(question, add_generation_prompt=False))
        if header.strip() and not whole.startswith(before):
            raise self._rewrites()
        if self.renderer.opening or self.renderer.shows_thinking:
            thought = Message("assistant", "b", thinking=PROBE)
            if said[0].role == "tool":
                thought = replace(thought, content="", tool_calls=(CALL,))
            if PROBE not in self.template.text((*question, thought, *said), add_generation_prompt=True):
                raise self._rewrites()

    def _rewrites(self) -> CheckpointError:
        return CheckpointError(
            f"the chat template of {self.template.name} writes an answer in another way once other turns follow it (most "
            "leave out its thinking), so a policy that speaks several times would read what it never wrote. Give a "
            "--chat-template that keeps earlier turns as they were"
        )

    def _call_form(self) -> JSONCalls | TaggedCalls:
        """How the template writes a call."""
        question = self.prompt((Message("user", "a"),))
        refusal = CheckpointError(
            f"the chat template of {self.template.name} cannot call tools in a form that heedful reads (objects in JSON with "
            "the tool's name and its arguments, or tags such as <function=NAME>), but the environment has tools: "
            f"{', '.join(tool['function']['name'] for tool in self.tools)}. Use a model whose template can, or "
            "--chat-template"
        )
        before = self.template.text(question, add_generation_prompt=False)
        called = self.template.text(
            (*question, Message("assistant", "", tool_calls=(CALL,))), add_generation_prompt=False
        )
        if CALL.name not in called or not called.startswith(before):
            raise refusal
        shown, decoder = called[len(before) :].rpartition(THINK_END)[2], JSONDecoder()
        if f"<function={CALL.name}>" in shown:
            return TaggedCalls({tool["function"]["name"]: _types(tool) for tool in self.tools})
        for start in (place for place, letter in enumerate(shown) if letter == "{"):
            try:
                value, _ = decoder.raw_decode(shown[start:])
            except ValueError:
                continue
            names = [key for key, one in value.items() if one == CALL.name]
            arguments = [key for key, one in value.items() if one == json.loads(CALL.arguments)]
            if names and arguments:
                asked = self.template.text(question, add_generation_prompt=True).removeprefix(before)
                return JSONCalls(
                    shown[:start].removeprefix(asked).strip().removesuffix("[").strip(), names[0], arguments[0]
                )
        raise refusal


def _types(tool: Mapping[str, Any]) -> dict[str, str]:
    """The type of each argument of a tool."""
    properties = tool["function"].get("parameters", {}).get("properties", {})
    return {name: str(one.get("type", "string")) for name, one in properties.items()}
