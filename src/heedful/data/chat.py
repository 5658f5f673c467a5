"""Turn prompts and responses into token ids.

Prompt and response are tokenised separately and concatenated, so that a response has the same tokens in training as
when the model wrote it. Raw text stays raw; conversations go through the model's chat template. What a person typed is
never read as a special token: ``<|im_end|>`` inside a message is encoded letter by letter.
"""

import bisect
import itertools
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from heedful.errors import CheckpointError
from heedful.types import Conversation, Message, Reading, Text


def plain_text(prompt: Text) -> str:
    """Write a prompt as text for a model without a chat template.

    Raw text and a single message stay as they are; in longer conversations each message follows the name of its role.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


class Renderer:
    """Writes prompts and responses as the token ids of one tokenizer.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        thinking: for thinking models, render the generation prompt with thinking on.

    Raises CheckpointError if the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False) -> None:
        if tokenizer.eos_token_id is None:
            raise CheckpointError(
                f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token, so a response could never end; "
                'set "eos_token" in its tokenizer_config.json'
            )
        self.tokenizer = tokenizer
        self.thinking = thinking
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special_texts = sorted(specials, key=len, reverse=True)
        plain = tokenizer("a").input_ids
        adds_bos = tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id]
        self.bos = [tokenizer.bos_token_id] if adds_bos else []
        self.pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        """The token that fills padding. Masks tell padding from text, so EOS is safe if there is no padding token."""
        self.turn_end_id = self._find_turn_end() if tokenizer.chat_template else tokenizer.eos_token_id

    def prompt_ids(self, prompt: Text) -> list[int]:
        """Return the ids of a prompt: raw text after one BOS if the model uses one, or messages as the template renders them.

        Raises CheckpointError for messages if the tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return self.bos + self._literal(prompt)
        return self._rendered(prompt, add_generation_prompt=True)

    def response_ids(self, response: str, *, prompt: Text, truncated: bool = False) -> list[int]:
        """Return the ids of a response, with the token that ends it.

        Args:
            response: the response's text.
            prompt: what it responds to. A response to raw text ends with EOS, an answer in a conversation with the
                template's end of turn.
            truncated: the response was cut off, so no end follows.
        """
        if truncated:
            return self._literal(response)
        end = self.tokenizer.eos_token_id if isinstance(prompt, str) else self.turn_end_id
        return [*self._literal(response), end]

    def conversation_ids(self, prompt: Conversation, response: str) -> list[int]:
        """Return the ids of a conversation with its answer as the template renders them in one piece, ends included.

        They are those of ``tokenizer.apply_chat_template(messages)``. Raises CheckpointError if there is no template.
        """
        return self._rendered((*prompt, Message("assistant", response)), add_generation_prompt=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included: what the model wrote is shown as it is."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _literal(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def _rendered(self, messages: Conversation, *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of the template's rendering. Texts of special tokens inside messages are encoded literally.

        If there are any, they pass through the template as markers that no message contains.
        """
        typed = [text for text in self.special_texts if any(text in message.content for message in messages)]
        if not typed:
            text = self._apply_template(messages, add_generation_prompt=add_generation_prompt)
            return self.tokenizer(text, add_special_tokens=False).input_ids
        start = next(
            start
            for number in itertools.count()
            if not any((start := f"\ue000{number}.") in message.content for message in messages)
        )
        markers = {text: f"{start}{i}\ue001" for i, text in enumerate(typed)}
        specials = re.compile("|".join(re.escape(text) for text in typed))
        marked = tuple(Message(m.role, specials.sub(lambda match: markers[match.group()], m.content)) for m in messages)
        rendered = self._apply_template(marked, add_generation_prompt=add_generation_prompt)
        ids: list[int] = []
        texts = {marker: text for text, marker in markers.items()}
        for piece in re.split(f"({'|'.join(re.escape(marker) for marker in texts)})", rendered):
            ids += (
                self._literal(texts[piece])
                if piece in texts
                else self.tokenizer(piece, add_special_tokens=False).input_ids
            )
        return ids

    def _apply_template(self, messages: Conversation, *, add_generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise CheckpointError(
                f"{self.tokenizer.name_or_path or 'the tokenizer'} has no chat template, but the data has messages; "
                "use --chat-template plain (User: ... Assistant: ...), --chat-template FILE.jinja, "
                "or data whose prompts are strings"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **({"enable_thinking": self.thinking} if add_generation_prompt else {}),
            )
        except Exception as error:
            raise CheckpointError(f"the chat template refuses this conversation: {error}") from error

    def _find_turn_end(self) -> int:
        """Return the special token that closes an assistant's turn in the template; EOS if there is none."""
        probe = "heedful"
        turns = (Message("user", "a"), Message("assistant", probe))
        text = self._apply_template(turns, add_generation_prompt=False)
        after = self.tokenizer(text.rpartition(probe)[2], add_special_tokens=False).input_ids if probe in text else []
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return next((i for i in after if i in special), self.tokenizer.eos_token_id)


class RewardInputs:
    """Encodes a prompt and a response as a reward model reads them, always with its own ``tokenizer``.

    A decoder reads them as one text. An encoder (its tokenizer has CLS and SEP tokens) reads them as a pair of texts.

    Args:
        tokenizer: the reward model's.
        reads: how a conversation is written for a decoder. ``turn-end``: as a policy writes it. ``template``: as the chat
            template renders all of it, which is what other tools give a reward model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reads: Reading | None = "turn-end") -> None:
        self.tokenizer = tokenizer
        self.reads = reads
        reads_pairs = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        self.renderer = None if reads_pairs else Renderer(tokenizer)

    def encode(
        self, prompt: Text, response: str, *, truncated: bool = False, max_length: int | None = None
    ) -> dict[str, list[int]]:
        """Return the token ids (and an encoder's token types) of one prompt and response.

        Args:
            prompt: raw text or messages.
            response: the response's text.
            truncated: the response was cut off, so no end of turn follows it; unless the model reads the whole template,
                which it was never shown without its end.
            max_length: the most tokens; None keeps all. A decoder's text is cut at its end; of an encoder's two texts, the
                longer one is cut.
        """
        if self.renderer is None:
            # As a batch of one: given by itself, an empty response would be taken for no response.
            encoded = self.tokenizer(
                [plain_text(prompt)],
                [response],
                split_special_tokens=True,
                truncation="longest_first" if max_length else False,
                max_length=max_length,
            )
            return {name: list(rows[0]) for name, rows in encoded.items() if name != "attention_mask"}
        if self.reads == "template" and not isinstance(prompt, str):
            return {"input_ids": self.renderer.conversation_ids(prompt, response)[:max_length]}
        response_ids = self.renderer.response_ids(response, prompt=prompt, truncated=truncated)
        return {"input_ids": (self.renderer.prompt_ids(prompt) + response_ids)[:max_length]}

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
