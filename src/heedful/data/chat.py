"""Turn prompts and responses into token ids.

Prompt and response are tokenised separately and concatenated, so that a response has the same tokens in training as
when the model wrote it. Raw text stays raw; conversations go through the model's chat template. What a person typed is
never read as a special token: ``<|im_end|>`` inside a message is encoded letter by letter.
"""

import bisect
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from heedful.data.template import ChatTemplate, marked
from heedful.errors import CheckpointError, DataError
from heedful.types import (
    THINK,
    THINK_END,
    Conversation,
    Message,
    Reading,
    Response,
    Text,
    plain_response,
    split_thinking,
)

PROBE = "heedful"
PROMPTS_KEPT = 4096
"""How many prompts are remembered with their ids: a prompt has several responses, and not always one after another."""
OPENED = re.compile(rf"{THINK}\s*$")
CLOSED = re.compile(rf"{THINK_END}\s*$")


def plain_text(prompt: Text) -> str:
    """Write a prompt as text for a model without a chat template.

    Raw text and a single message stay as they are; in longer conversations each message follows the name of its role.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0].content
    return "\n".join(f"{message.role}: {plain_response(message)}" for message in prompt)


class Renderer:
    """Writes prompts and responses as the token ids of one tokenizer, and reads what a policy wrote.

    Raises CheckpointError if the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise CheckpointError(
                f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token, so a response could never end; "
                'set "eos_token" in its tokenizer_config.json'
            )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        plain = tokenizer("a").input_ids
        adds_bos = tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id]
        self.bos = [tokenizer.bos_token_id] if adds_bos else []
        self.pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        """The token that fills padding. Masks tell padding from text, so EOS is safe if there is no padding token."""
        self.turn_end_id: int = tokenizer.eos_token_id
        """The token that ends an answer in a conversation."""
        self.opening = ""
        """``<think>`` and what follows it, if the template's generation prompt ends with an open thought."""
        self.closes_thinking = False
        """True if the generation prompt ends with ``</think>``: thinking is off."""
        self.shows_thinking = False
        """True if the template shows the thinking of the last answer."""
        self.ends_turns = False
        """True if the template ends an answer with a special token."""
        self.lacks_header = False
        """True if the template writes no generation prompt, although an answer has a header."""
        self._is_verbatim = True
        self._prompt_ids = lru_cache(PROMPTS_KEPT)(self._encoded_prompt)
        self._tail: list[int] = []
        if tokenizer.chat_template:
            self._probe()

    def prompt_ids(self, prompt: Text) -> list[int]:
        """Return the ids of a prompt: raw text after one BOS if the model uses one, or messages as the template renders them.

        Raises CheckpointError for messages if the tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return self.bos + self.template.literal(prompt)
        return list(self._prompt_ids(prompt))

    def _encoded_prompt(self, prompt: Conversation) -> "array[int]":
        return array("i", self.template.ids(prompt, add_generation_prompt=True))

    def response_ids(self, response: Response, *, prompt: Text, truncated: bool = False) -> list[int]:
        """Return the ids that a policy has to write after `prompt_ids` to give a response, with the token that ends it.

        In a conversation these are the ones that follow the generation prompt in the template's own rendering of prompt and
        response. Thinking that the template does not show follows the prompt as it is.

        Args:
            response: the response.
            prompt: what it responds to. A response to raw text ends with EOS, an answer in a conversation with the
                template's end of turn.
            truncated: the response was cut off, so no end follows.

        Raises DataError for a response that thinks where the generation prompt has closed the thought, CheckpointError if the
        template does not render it.
        """
        end = [] if truncated else [self.tokenizer.eos_token_id if isinstance(prompt, str) else self.turn_end_id]
        if isinstance(prompt, str):
            return self.template.literal(plain_response(response)) + end
        if self._writes_verbatim(response):
            return self.template.literal(plain_response(response)) + end
        turn = Message("assistant", response) if isinstance(response, str) else response
        thinking, answer = _parts(turn)
        if answer is None:  # a thought without an end
            return self._as_written(plain_response(response)) + end
        rendered = self._continued(prompt, turn)
        if rendered is not None:
            return self._ended(rendered, truncated=truncated)
        if turn.tool_calls:
            raise CheckpointError(
                "the chat template leaves out the thinking of a message that calls a tool, or does not render it right after "
                "the generation prompt"
            )
        if not thinking and (thinking is None or self.closes_thinking):
            return self.template.literal(answer) + end
        return self._as_written(plain_response(response)) + end

    def written_ids(self, prompt: Text, response: Response, *, truncated: bool = False) -> list[int]:
        """Return the ids of a prompt and of a response that a policy has to write after it."""
        return self.prompt_ids(prompt) + self.response_ids(response, prompt=prompt, truncated=truncated)

    def read_ids(self, prompt: Text, response: Response, *, truncated: bool = False) -> list[int]:
        """Return the ids of a prompt and a response as a model reads them that writes neither.

        A conversation is read as the template renders it whole, with the response's thinking and answer apart, so that the
        template decides what it shows of the thinking. A response whose thought never ended is read as it is, or as an empty
        answer if the template shows no thinking.

        Args:
            prompt: raw text or messages.
            response: the response.
            truncated: the response was cut off, so no end follows.
        """
        if isinstance(prompt, str) or self._writes_verbatim(response):
            return self.written_ids(prompt, response, truncated=truncated)
        whole = self.whole_ids(prompt, response, apart=True)
        if whole is not None:
            return self._ended(whole, truncated=truncated)
        is_shown = self.shows_thinking and not self.closes_thinking
        shown = self._as_written(plain_response(response)) if is_shown else []
        return self.prompt_ids(prompt) + shown + ([] if truncated else [self.turn_end_id])

    def whole_ids(self, prompt: Conversation, response: Response, *, apart: bool = False) -> list[int] | None:
        """Return the template's own rendering of a prompt and a response, or None for a thought without an end.

        Args:
            prompt: the messages so far.
            response: the response.
            apart: give the template the response's thinking and answer apart, also if they stand in one text.
        """
        turn = Message("assistant", response) if isinstance(response, str) else response
        thinking, answer = _parts(turn)
        if answer is None:
            return None
        turn = replace(turn, content=answer, thinking=thinking) if apart else turn
        return self.template.ids((*prompt, turn), add_generation_prompt=False)

    def response_text(self, ids: Sequence[int], *, prompt: Text) -> str:
        """Return a response that a policy wrote, after the ``<think>`` with which the prompt's rendering may have ended."""
        if isinstance(prompt, str):
            opened = OPENED.search(prompt)
            return (opened.group() if opened else "") + self.decode(ids)
        return self.opening + self.decode(ids)

    def conversation_ids(self, prompt: Conversation, response: Response) -> list[int]:
        """Return the ids of a conversation with its answer as the template renders them in one piece, ends included.

        They are those of ``tokenizer.apply_chat_template(messages)``. Raises CheckpointError if there is no template.
        """
        turn = Message("assistant", response) if isinstance(response, str) else response
        return self.template.ids((*prompt, turn), add_generation_prompt=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included: what the model wrote is shown as it is."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _writes_verbatim(self, response: Response) -> bool:
        """The template writes nothing but this answer between the generation prompt and the end of the turn."""
        return self._is_verbatim and isinstance(response, str) and split_thinking(response)[0] is None

    def _continued(self, prompt: Conversation, turn: Message) -> list[int] | None:
        """Return what the template writes after the generation prompt, or None if it does not go on from there.

        None too if it leaves out the turn's thinking or its answer.
        """
        if self.lacks_header:
            return None
        whole = (*prompt, turn)
        marks = self.template.marks(whole)
        before = self.template.text(prompt, marks, add_generation_prompt=True)
        rendered = self.template.text(whole, marks, add_generation_prompt=False)
        shown = rendered[len(before) :]
        parts = [marked((part or "").strip(), marks) for part in _parts(turn)]
        if not rendered.startswith(before) or any(part not in shown for part in parts):
            return None
        if turn.thinking is not None and not self.shows_thinking:
            return None
        ids, start = self.template.encoded(rendered, marks), self.template.encoded(before, marks)
        return ids[len(start) :] if ids[: len(start)] == start else self.template.encoded(shown, marks)

    def _ended(self, rendered: list[int], *, truncated: bool) -> list[int]:
        """Return the ids of a rendering up to the end of its last turn, without what the template writes after that."""
        if self.ends_turns:
            last = max(i for i, token in enumerate(rendered) if token in self.special_ids)
            return rendered[: last + (not truncated)]
        end = len(rendered) - len(self._tail)
        body = rendered[:end] if rendered[end:] == self._tail else rendered
        return body + ([] if truncated else [self.turn_end_id])

    def _as_written(self, text: str) -> list[int]:
        """Return the ids of a response that thinks, after the generation prompt. Its tags may be special tokens."""
        if self.closes_thinking:
            raise DataError(
                f"the response thinks ({text[:40]!r}), but the prompt as the chat template renders it ends with {THINK_END}: "
                "thinking is off. Use --thinking on, or take the thinking out of the data"
            )
        if self.opening:
            written = text.lstrip()
            text = written.removeprefix(self.opening if written.startswith(self.opening) else THINK)
        marks = self.template.marks((Message("assistant", text),))
        return self.template.encoded(marked(text, marks), marks)

    def _probe(self) -> None:
        """Find out how the template writes an answer, from short conversations."""
        question = (Message("user", "a"),)
        before = self.template.text(question, {}, add_generation_prompt=True)
        whole = self.template.text((*question, Message("assistant", PROBE)), {}, add_generation_prompt=False)
        tail = whole.rpartition(PROBE)[2] if PROBE in whole else ""
        self._tail = self.tokenizer(tail, add_special_tokens=False).input_ids
        ends = [token for token in self._tail if token in self.special_ids]
        self.ends_turns = bool(ends)
        self.turn_end_id = ends[0] if ends else self.tokenizer.eos_token_id
        self._is_verbatim = whole == before + PROBE + tail
        without_prompt = self.template.text(question, {}, add_generation_prompt=False)
        header = self.tokenizer(whole.removeprefix(before).partition(PROBE)[0], add_special_tokens=False).input_ids
        self.lacks_header = before == without_prompt and not self.special_ids.isdisjoint(header)
        opened = OPENED.search(before)
        self.opening = opened.group() if opened else ""
        self.closes_thinking = CLOSED.search(before) is not None
        thought = (*question, Message("assistant", "b", thinking=PROBE))
        self.shows_thinking = PROBE in self.template.text(thought, {}, add_generation_prompt=False)


def _parts(turn: Message) -> tuple[str | None, str | None]:
    """Return the thinking and the answer of an assistant's message, as `split_thinking` does."""
    return (turn.thinking, turn.content) if turn.thinking is not None else split_thinking(turn.content)


class RewardInputs:
    """Encodes a prompt and a response as a reward model reads them, always with its own ``tokenizer``.

    A decoder reads them as one text, a conversation as its chat template renders it, so the template decides what is shown of
    the thinking. An encoder (its tokenizer has CLS and SEP tokens) reads them as a pair of texts, and no thinking in
    conversations.

    Args:
        tokenizer: the reward model's.
        reads: where a conversation ends for a decoder. ``turn-end``: with the turn, as a policy writes it. ``template``: as
            the chat template renders all of it, which is what other tools give a reward model.
        written: encode what a policy has to write after the prompt instead, for training on pairs without a reward model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, reads: Reading | None = "turn-end", *, written: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.reads = reads
        self.written = written
        reads_pairs = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        self.renderer = None if reads_pairs else Renderer(tokenizer)

    def encode(
        self, prompt: Text, response: Response, *, truncated: bool = False, max_length: int | None = None
    ) -> dict[str, list[int]]:
        """Return the token ids (and an encoder's token types) of one prompt and response.

        Args:
            prompt: raw text or messages.
            response: the response.
            truncated: the response was cut off, so a decoder reads no end of turn after it; unless it reads the whole
                template, which it was never shown without its end.
            max_length: the most tokens; None keeps all. A decoder's text is cut at its end; of an encoder's two texts, the
                longer one is cut.
        """
        if self.renderer is None:
            turn = Message("assistant", response) if isinstance(response, str) else response
            answer = plain_response(replace(turn, content=_parts(turn)[1] or "", thinking=None))
            # As a batch of one: given by itself, an empty response would be taken for no response.
            encoded = self.tokenizer(
                [plain_text(prompt)],
                [plain_response(response) if isinstance(prompt, str) else answer],
                split_special_tokens=True,
                truncation="longest_first" if max_length else False,
                max_length=max_length,
            )
            return {name: list(rows[0]) for name, rows in encoded.items() if name != "attention_mask"}
        if self.reads == "template" and not self.written and not isinstance(prompt, str):
            return {"input_ids": self.renderer.conversation_ids(prompt, response)[:max_length]}
        ids = self.renderer.written_ids if self.written else self.renderer.read_ids
        return {"input_ids": ids(prompt, response, truncated=truncated)[:max_length]}

    def encode_beginning(self, prompt: Text, response: str, *, max_length: int) -> dict[str, list[int]]:
        """Return the ids of a prompt with the longest beginning of a response that fits, as of a response that was cut.

        If not even the prompt fits, they are those of the prompt alone.
        """

        def row(end: int) -> dict[str, list[int]]:
            return self.encode(prompt, response[:end], truncated=True)

        end = bisect.bisect_right(range(len(response)), max_length, key=lambda k: len(row(k)["input_ids"]))
        while end > 0 and len(row(end)["input_ids"]) > max_length:
            end -= 1
        return row(end)


def stop_ids(renderer: Renderer, generation_eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return every token that ends a response: the generation config's, the tokenizer's EOS and the template's end of turn.

    Args:
        renderer: of the policy's tokenizer.
        generation_eos: ``eos_token_id`` of the policy's generation config.
    """
    configured = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    return tuple(sorted({*configured, renderer.tokenizer.eos_token_id, renderer.turn_end_id}))
