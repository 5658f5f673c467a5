"""Turn prompts and responses into token ids.

A conversation has the ids of its chat template's rendering, tokenised as one text. The response begins where the rendering
of the prompt ends. Raw text stays raw: the prompt is tokenised alone, as a policy reads it, and the response continues it.
Text in messages never becomes a special token: ``<|im_end|>`` inside a message is encoded letter by letter.
"""

import bisect
import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from heedful.data import sandbox
from heedful.data.encoding import Encoder
from heedful.data.messages import as_dict
from heedful.display import counted
from heedful.errors import CheckpointError, DataError, RefusedError
from heedful.types import (
    THINK,
    THINK_END,
    Completion,
    Conversation,
    Message,
    Prompt,
    Reading,
    Response,
    SpecialTokens,
    Text,
    Turn,
    as_message,
    last_answer,
    parts_of,
    plain_response,
)


class ChatTemplate:
    """A tokenizer's chat template.

    Texts of special tokens inside messages pass through the template as markers that no message contains, and are then
    encoded literally. In an assistant's messages ``<think>`` and ``</think>`` stay unchanged.
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

    def marked(self, text: str) -> str:
        """Return the assistant's text as it appears in a rendering, with markers."""
        return self.encoder.marked(text, but=(THINK, THINK_END))

    def text(self, messages: Conversation, *, add_generation_prompt: bool) -> str:
        """Return a conversation's rendering, with markers for text that `Encoder.read` encodes literally.

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
            count = counted(len(messages), "message")
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


PROBE = "heedful"
PROMPTS_KEPT = 4096
"""Number of prompts whose ids are cached: a prompt has several responses, not always in succession."""
OPENED = re.compile(rf"{THINK}\s*$")
CLOSED = re.compile(rf"{THINK_END}\s*$")


def plain_text(prompt: Text) -> str:
    """Write a prompt for a model without a chat template: its text, or messages, each after its role's name."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0].content
    return "\n".join(f"{message.role}: {plain_response(message)}" for message in prompt)


class Written(NamedTuple):
    """The token ids of a prompt and of its response, as a policy has to generate them."""

    prompt: list[int]
    response: list[int]
    learned: list[bool]
    """For each token of the response: False for what somebody else said, such as a tool, and for a given beginning."""


class Renderer:
    """Encodes prompts and responses with one tokenizer and its chat template, and decodes a policy's responses.

    Args:
        tokenizer: the model's, with its chat template.
        special_tokens: how special tokens in raw text are encoded: ``literal``, as letters, or ``read``, as the tokens.

    Raises CheckpointError if the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special_tokens: SpecialTokens = "literal") -> None:
        if tokenizer.eos_token_id is None:
            raise CheckpointError(
                f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token, so a response could never end; "
                'set "eos_token" in its tokenizer_config.json'
            )
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.template = ChatTemplate(tokenizer)
        self.encoder = self.template.encoder
        self.special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        plain = tokenizer("a").input_ids
        adds_bos = tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id]
        self.bos = [tokenizer.bos_token_id] if adds_bos else []
        self.pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        """The token that fills padding. Masks tell padding from text, so EOS is safe if there is no padding token."""
        self.turn_end_id: int = tokenizer.eos_token_id
        """The token that ends an answer in a conversation."""
        self.opening = ""
        """``<think>`` and the white space after it, if the template's generation prompt ends with open thinking."""
        self.closes_thinking = False
        """True if the generation prompt ends with ``</think>``: thinking is off."""
        self.shows_thinking = False
        """True if the template shows the thinking of the last answer."""
        self.ends_turns = False
        """True if the template ends an answer with a special token."""
        self.lacks_header = False
        """True if the template adds no generation prompt although its answers have a header."""
        self._tail = ""
        """The template's text after an answer."""
        self._to_end = 0
        """Number of its characters up to the end of the token that ends the turn."""
        self.end_token: str = tokenizer.eos_token
        """The text of the token that ends an answer."""
        self._spaces = "", ""
        """White space that the template itself writes between generation prompt and answer, and between answer and end."""
        self._last: tuple[str, list[int]] = ("", [])
        """Text and ids of the last encoded conversation: the next one may continue it."""
        self._prompt = lru_cache(PROMPTS_KEPT)(self._encoded_prompt)
        if tokenizer.chat_template:
            self._probe()

    def prompt_ids(self, prompt: Text, prefill: str = "") -> list[int]:
        """Return the ids of a prompt: raw text after a BOS if the model uses one, or messages as rendered.

        ``prefill`` is a beginning of the answer that the policy continues.
        """
        return list(self._prompt(prompt, prefill)[1])

    def written(self, prompt: Text, response: Response, *, truncated: bool = False, prefill: str = "") -> Written:
        """Return the ids of a prompt and of its response, with the end token, as a policy has to generate them.

        In a conversation they are the template's own rendering of prompt and response, tokenised as one text, up to the end
        of the turn. A token with the end of the prompt and the beginning of the response belongs to the response.
        Thinking that the template omits is added after the prompt unchanged. Raw text after a raw prompt has the ids that
        continue those of the prompt; if one token would overlap both, the response is tokenised alone.

        A response of several turns has the ids of the whole conversation; learned are the assistant's answers, each with
        its end. They are one text only if the template renders an answer alike whether or not something follows it.

        Args:
            prompt: the prompt. A response to raw text ends with EOS, an answer in a conversation with the template's end of
                turn.
            response: the response.
            truncated: the response was cut off, so no end token follows.
            prefill: the beginning of the response that is given, and not learned.

        Raises DataError for a response with thinking if the generation prompt has closed the thinking, CheckpointError if
        the template does not render it, RefusedError if it renders an earlier turn in another way once others follow.
        """
        if isinstance(response, tuple):
            assert isinstance(prompt, tuple)
            return self._turns(prompt, response, truncated=truncated, prefill=prefill)
        if isinstance(prompt, str):
            asked, answer = self._raw(prompt, plain_response(response), truncated=truncated)
            return Written(asked, answer, [True] * len(answer))
        turn = as_message(response)
        before, asked_ids = self._prompt(prompt, prefill)
        text = self._text(prompt, turn, truncated=truncated)
        if not text.startswith(before):
            raise RefusedError(
                f"the chat template does not render an answer right after the generation prompt, so it cannot begin with "
                f"{prefill[:40]!r}, as the prompt does. Take the beginning of the answer out of the prompt"
            )
        read = self.encoder.read_on(text, before, asked_ids)
        self._last = text, read
        ids = read + self._added_end(truncated=truncated)
        is_continued = ids[: len(asked_ids)] == asked_ids.tolist()
        start = len(asked_ids) if is_continued else self.encoder.tokens_within(text, len(before))
        return Written(ids[:start], ids[start:], [True] * (len(ids) - start))

    def _turns(self, prompt: Conversation, response: Conversation, *, truncated: bool, prefill: str) -> Written:
        """Return `written` of a response of several turns."""
        text = self._text((*prompt, *response[:-1]), response[-1], truncated=truncated)
        ids = self.encoder.read(text) + self._added_end(truncated=truncated)
        learned, first = [False] * len(ids), 0
        for place, turn in enumerate(response):
            if turn.role != "assistant":
                continue
            given, is_last = prefill if place == 0 else "", place == len(response) - 1
            before, _ = self._prompt((*prompt, *response[:place]), given)
            end = len(text)
            if not is_last:
                end = self._end_of_turn(text, len(before), (*prompt, *response[: place + 1]), response[place + 1])
            shown = given + text[len(before) : end]
            parts = [self.template.marked((part or "").strip()) for part in parts_of(turn)]
            if not text.startswith(before) or any(part not in shown for part in parts):
                raise RefusedError(
                    "the chat template renders an answer in another way once other turns follow it (most leave out its "
                    "thinking), so the turns of this response are not one text that a policy could have written. Take the "
                    "thinking out of the earlier answers, or give a --chat-template that keeps it"
                )
            start = self.encoder.tokens_within(text, len(before))
            stop = len(ids) if is_last else self.encoder.tokens_within(text, end)
            learned[start:stop] = [turn.learned] * (stop - start)
            first = first or start
        return Written(ids[:first], ids[first:], learned[first:])

    def _end_of_turn(self, text: str, start: int, said: Conversation, follows: Message) -> int:
        """Return the place in a rendering behind the token that ends the turn at ``start``, the last one of ``said``.

        Raises RefusedError if the token is not before what the next message, ``follows``, says.
        """
        place = text.find(self.end_token, start) if self.ends_turns else -1
        end = place + len(self.end_token)
        shown = self.template.text((*said, replace(follows, content=PROBE)), add_generation_prompt=False)
        if place < 0 or end > shown.rfind(PROBE) >= 0:  # a template that leaves out the message is refused elsewhere
            raise RefusedError(
                f"the chat template does not end an answer that other turns follow as it ends the last one, with "
                f"{self.end_token!r}, so the turns of this response are not one text that a policy could have written. Give "
                "responses of one turn, or a --chat-template that ends every answer in this way"
            )
        return end

    def response_ids(self, response: Response, *, prompt: Text, truncated: bool = False) -> list[int]:
        """Return the response's ids of `written`."""
        return self.written(prompt, response, truncated=truncated).response

    def written_ids(self, prompt: Text, response: Response, *, truncated: bool = False) -> list[int]:
        """Return the ids of `written` as one list."""
        asked, answer, _ = self.written(prompt, response, truncated=truncated)
        return asked + answer

    def read_ids(self, prompt: Text, response: Response, *, truncated: bool = False) -> list[int]:
        """Return the ids of a prompt and a response for a model that only reads them, such as a reward model.

        The template renders the whole conversation, with the response's thinking and answer apart, so the template decides
        whether to show the thinking. A response whose thinking never ends is encoded unchanged, or as an empty answer if the
        template shows no thinking. A response that was cut off (``truncated``) has no end token.
        """
        prompt, response = last_answer(prompt, response)
        if isinstance(prompt, str):
            return self.written_ids(prompt, response, truncated=truncated)
        text = self.whole_text(prompt, response, apart=True)
        if text is None:
            is_shown = self.shows_thinking and not self.closes_thinking
            shown = self._as_written(plain_response(response)) if is_shown else ""
            text = self._prompt(prompt)[0] + shown + self._end(truncated=truncated)
        else:
            text = self._up_to_end(text, truncated=truncated)
        return self.encoder.read_on(text, *self._prompt(prompt)) + self._added_end(truncated=truncated)

    def whole_text(self, prompt: Conversation, response: Turn, *, apart: bool = False) -> str | None:
        """Return the template's own rendering of a prompt and a response, or None if the thinking never ends.

        With ``apart`` the template gets the response's thinking and answer separately, even if they are one text.
        """
        turn = as_message(response)
        thinking, answer = parts_of(turn)
        if answer is None:
            return None
        turn = replace(turn, content=answer, thinking=thinking) if apart else turn
        return self.template.text((*prompt, turn), add_generation_prompt=False)

    def whole_ids(self, prompt: Conversation, response: Turn, *, apart: bool = False) -> list[int] | None:
        """Return the ids of `whole_text`."""
        text = self.whole_text(prompt, response, apart=apart)
        return None if text is None else self.encoder.read(text)

    def response_text(self, ids: Sequence[int], *, prompt: Text, truncated: bool = False, prefill: str = "") -> str:
        """Return the text of a policy's response, beginning with ``<think>`` if the rendered prompt ended with it.

        ``ids`` are without the end token and are decoded as a continuation of the prompt. White space that the template
        adds before and (unless the response was ``truncated``) after every answer is removed. ``prefill`` is the beginning
        of the response that the policy continued.
        """
        text = self.encoder.decode_after(self._prompt(prompt, prefill)[1], ids)
        if isinstance(prompt, str):
            opened = OPENED.search(prompt)
            return (opened.group() if opened else "") + text
        before, after = self._spaces
        text = prefill + text if prefill else self.opening + text.removeprefix(before)
        return text if truncated else text.removesuffix(after)

    def turn_text(self, before: Sequence[int], ids: Sequence[int], *, truncated: bool) -> str:
        """Return the text of a policy's later turn in a conversation, as `response_text` does of its first."""
        text = self.encoder.decode_after(before, ids)
        start, end = self._spaces
        text = self.opening + text.removeprefix(start)
        return text if truncated else text.removesuffix(end)

    def completion(
        self, prompt: Prompt, ids: Sequence[int], *, truncated: bool, own: Sequence[bool] | None = None
    ) -> Completion:
        """Return a response as text, and as the ids that the policy wrote.

        ``ids`` end with a stop token unless it was ``truncated``; ``own`` is True for those that the policy wrote.
        """
        end = len(ids) if truncated else len(ids) - 1
        text = self.response_text(ids[:end], prompt=prompt.prompt, truncated=truncated, prefill=prompt.prefill)
        written = [token for token, is_own in zip(ids[:end], own or [True] * len(ids), strict=False) if is_own]
        return Completion(prompt, text, written, truncated=truncated)

    def conversation_ids(self, prompt: Conversation, response: Turn) -> list[int]:
        """Return the ids of ``tokenizer.apply_chat_template`` of a conversation with its answer, ends included."""
        turn = as_message(response)
        return self.encoder.read(self.template.text((*prompt, turn), add_generation_prompt=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids alone, unchanged, with special tokens."""
        return self.encoder.decode(ids)

    def _encoded_prompt(self, prompt: Text, prefill: str = "") -> "tuple[str, array[int]]":
        """Return a prompt's text, with the given beginning of its answer, and its ids."""
        if not isinstance(prompt, str):
            text = self.template.text(prompt, add_generation_prompt=True) if prompt else self._before_first_answer()
            if prefill:
                text = self._begun(prompt, text, prefill)
            return text, array("i", self.encoder.read_on(text, *self._last))
        if self.special_tokens == "literal":
            return prompt, array("i", self.bos + self.encoder.literal(prompt))
        has_bos = bool(self.bos) and prompt.startswith(self.tokenizer.bos_token)
        return prompt, array("i", ([] if has_bos else self.bos) + self.encoder.read(prompt))

    def _before_first_answer(self) -> str:
        """Return the text that the template shows before an answer that begins a conversation."""
        question = (Message("user", PROBE),)
        asked = self.template.text(question, add_generation_prompt=True)
        header = asked.removeprefix(self.template.text(question, add_generation_prompt=False))
        whole = self.template.text((Message("assistant", PROBE),), add_generation_prompt=False)
        return whole[: whole.index(header) + len(header)] if header and header in whole else whole.partition(PROBE)[0]

    def _begun(self, prompt: Conversation, before: str, prefill: str) -> str:
        """Return the template's rendering of a conversation and the beginning of its answer, up to its last letter.

        ``before`` is the rendering of the prompt. A beginning of the thinking follows it unchanged.
        """
        if prefill.lstrip().startswith(THINK):
            return before + self._as_written(prefill)
        rendered = self.template.text((*prompt, Message("assistant", prefill)), add_generation_prompt=False)
        words = self.template.marked(prefill.strip())
        start, found, _ = rendered.rpartition(words)
        if not found:
            raise RefusedError(
                f"the chat template does not show the beginning of the answer, {prefill[:40]!r}, as it is"
            )
        return start + words + prefill[len(prefill.rstrip()) :]

    def _raw(self, prompt: str, response: str, *, truncated: bool) -> tuple[list[int], list[int]]:
        end = [] if truncated else [self.tokenizer.eos_token_id]
        is_read = self.special_tokens == "read"
        if is_read and response.rstrip().endswith((self.tokenizer.eos_token, self.end_token)):
            response, end = response.rstrip(), []
        asked, whole = self.prompt_ids(prompt), self._encoded_prompt(prompt + response)[1].tolist()
        if whole[: len(asked)] == asked:
            return asked, whole[len(asked) :] + end
        return asked, self.encoder.within(response, with_specials=is_read) + end

    def _text(self, prompt: Conversation, turn: Message, *, truncated: bool) -> str:
        """Return the text of a prompt and of its answer, up to the end of the turn, as a policy has to generate it."""
        before, _ = self._prompt(prompt)
        thinking, answer = parts_of(turn)
        if answer is not None:
            rendered = self._continued(prompt, turn, before)
            if rendered is not None:
                return self._up_to_end(rendered, truncated=truncated)
            if turn.tool_calls:
                raise CheckpointError(
                    "the chat template leaves out the thinking of a message that calls a tool, or does not render it right "
                    "after the generation prompt"
                )
        if answer is not None and not thinking and (thinking is None or self.closes_thinking):
            written = self.template.marked(answer)
        else:
            written = self._as_written(plain_response(turn))
        return before + written + self._end(truncated=truncated)

    def _end(self, *, truncated: bool) -> str:
        """Return the ending of an answer that the template does not render."""
        return "" if truncated or not self.ends_turns else self._spaces[1] + self.end_token

    def _continued(self, prompt: Conversation, turn: Message, before: str) -> str | None:
        """Return the template's rendering of the whole, or None if it does not begin with ``before``, the prompt's rendering.

        Also None if it omits the turn's thinking or its answer.
        """
        if self.lacks_header:
            return None
        rendered = self.template.text((*prompt, turn), add_generation_prompt=False)
        shown = rendered[len(before) :]
        parts = [self.template.marked((part or "").strip()) for part in parts_of(turn)]
        if not rendered.startswith(before) or any(part not in shown for part in parts):
            return None
        return None if turn.thinking is not None and not self.shows_thinking else rendered

    def _up_to_end(self, rendered: str, *, truncated: bool) -> str:
        """Return a rendering up to the end of its last turn, without the template's text after it."""
        if self._tail and rendered.endswith(self._tail):
            end = len(rendered) - len(self._tail)
            return rendered[: end if truncated else end + self._to_end]
        if not self.ends_turns:
            return rendered
        start, length = max((rendered.rfind(special), len(special)) for special in self.encoder.special_texts)
        return rendered[: start if truncated else start + length]

    def _added_end(self, *, truncated: bool) -> list[int]:
        """Return the token that ends a turn, if the template has none."""
        return [] if truncated or self.ends_turns else [self.turn_end_id]

    def _as_written(self, text: str) -> str:
        """Return a response with thinking in the form that follows the generation prompt. Its tags may be special tokens."""
        if self.closes_thinking:
            raise DataError(
                f"the response has thinking ({text[:40]!r}), but the chat template ends the prompt with {THINK_END}: "
                "thinking is off. Use --thinking on, or take the thinking out of the data"
            )
        if self.opening:
            written = text.lstrip()
            text = written.removeprefix(self.opening if written.startswith(self.opening) else THINK)
        return self.template.marked(text)

    def _probe(self) -> None:
        """Determine from short conversations how the template renders an answer."""
        question = (Message("user", "a"),)
        before = self.template.text(question, add_generation_prompt=True)
        whole = self.template.text((*question, Message("assistant", PROBE)), add_generation_prompt=False)
        self._tail = whole.rpartition(PROBE)[2] if PROBE in whole else ""
        end = self._special_in(self._tail)
        self.ends_turns = end is not None
        if end is not None:
            self.turn_end_id = end
            self.end_token = self.tokenizer.convert_ids_to_tokens(end)
        between = self._tail.partition(self.end_token)[0] if self.ends_turns else ""
        self._to_end = len(between + self.end_token) if self.ends_turns else 0
        header = whole.removeprefix(before).partition(PROBE)[0]
        is_continued = whole.startswith(before)
        self._spaces = header if is_continued and header.isspace() else "", between if between.isspace() else ""
        without_prompt = self.template.text(question, add_generation_prompt=False)
        self.lacks_header = before == without_prompt and self._special_in(header) is not None
        opened = OPENED.search(before)
        self.opening = opened.group() if opened else ""
        self.closes_thinking = CLOSED.search(before) is not None
        thought = (*question, Message("assistant", "b", thinking=PROBE))
        self.shows_thinking = PROBE in self.template.text(thought, add_generation_prompt=False)

    def _special_in(self, text: str) -> int | None:
        """Return the first special token that the text contains by name; an unknown letter may have a special token's id."""
        tokens = [
            (i, self.tokenizer.convert_ids_to_tokens(i)) for i in self.encoder.read(text) if i in self.special_ids
        ]
        return next((i for i, token in tokens if token in text), None)


class RewardInputs:
    """Encodes a prompt and a response as a reward model reads them, always with its own ``tokenizer``.

    A decoder reads them as one text, a conversation as rendered by its chat template, so the template decides whether to
    show the thinking. An encoder (its tokenizer has CLS and SEP tokens) reads them as a pair of texts, in conversations
    without thinking.

    Args:
        tokenizer: the reward model's.
        reads: where a conversation ends for a decoder. ``turn-end``: at the end of the turn, as in a policy's response.
            ``template``: after the chat template's whole rendering, the input of a reward model in other tools.
        written: encode as a policy generates (`Renderer.written`), for training on pairs without a reward model.
        special_tokens: how special tokens in raw text are encoded, as in `Renderer`. An encoder reads them as letters.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reads: Reading | None = "turn-end",
        *,
        written: bool = False,
        special_tokens: SpecialTokens = "literal",
    ) -> None:
        self.tokenizer = tokenizer
        self.reads = reads
        self.written = written
        reads_pairs = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        self.renderer = None if reads_pairs else Renderer(tokenizer, special_tokens)

    def encode(
        self, prompt: Text, response: Response, *, truncated: bool = False, max_length: int | None = None
    ) -> dict[str, list[int]]:
        """Return the token ids (and an encoder's token types) of one prompt and response.

        After a response that was cut off (``truncated``) a decoder reads no end of turn. With ``reads="template"`` it still
        does, because it never saw a rendering without its end. A decoder's text is cut at its end to ``max_length`` tokens;
        of an encoder's two texts, the longer one is cut.
        """
        if self.renderer is not None and self.written:
            ids = self.renderer.written_ids(prompt, response, truncated=truncated)
            return {"input_ids": ids[:max_length]}
        prompt, response = last_answer(prompt, response)
        if self.renderer is None:
            turn = as_message(response)
            answer = plain_response(replace(turn, content=parts_of(turn)[1] or "", thinking=None))
            # As a batch of one: alone, an empty response would count as no response.
            encoded = self.tokenizer(
                [plain_text(prompt)],
                [plain_response(response) if isinstance(prompt, str) else answer],
                split_special_tokens=True,
                truncation="longest_first" if max_length else False,
                max_length=max_length,
            )
            return {name: list(rows[0]) for name, rows in encoded.items() if name != "attention_mask"}
        if self.reads == "template" and not isinstance(prompt, str):
            return {"input_ids": self.renderer.conversation_ids(prompt, response)[:max_length]}
        return {"input_ids": self.renderer.read_ids(prompt, response, truncated=truncated)[:max_length]}

    def encode_beginning(self, prompt: Text, response: Response, *, max_length: int) -> dict[str, list[int]]:
        """Return the ids of a prompt with the longest beginning of its response that fits, as a truncated response.

        A response of several turns ends within an answer. If not even the prompt fits, return the ids of the prompt with an
        empty response.
        """
        asked, answer = last_answer(prompt, response)
        text = plain_response(answer)

        def row(end: int) -> dict[str, list[int]]:
            return self.encode(asked, text[:end], truncated=True)

        if isinstance(response, tuple):
            whole = self.encode(prompt, response, truncated=True)
            if len(whole["input_ids"]) <= max_length:
                return whole
            earlier = [place for place, turn in enumerate(response[:-1]) if turn.role == "assistant"]
            if earlier and len(row(0)["input_ids"]) > max_length:
                return self.encode_beginning(prompt, response[: earlier[-1] + 1], max_length=max_length)
        end = bisect.bisect_right(range(len(text)), max_length, key=lambda k: len(row(k)["input_ids"]))
        while end > 0 and len(row(end)["input_ids"]) > max_length:
            end -= 1
        return row(end)


def stop_ids(renderer: Renderer, generation_eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """Every token that ends a response: the generation config's, the tokenizer's EOS and the template's end of turn."""
    configured = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    return tuple(sorted({*configured, renderer.tokenizer.eos_token_id, renderer.turn_end_id}))
