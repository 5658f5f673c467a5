"""What a model has learned to read, conversations or raw text: a record that is saved with its tokenizer.

A string is raw text everywhere: it does not go through the chat template. That is right for a model that learned from
strings, and for a base model, whatever template its tokenizer has. A model that learned conversations continues a string
instead of answering it, and nothing else shows that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from heedful.data.chat import Renderer
from heedful.data.readers import parse_columns
from heedful.data.schemas import HH_MARKER
from heedful.data.splits import HasPrompt
from heedful.display import say, shown
from heedful.types import LEARNED, Demonstration, Text

CONVERSATIONS, STRINGS = "conversations", "strings"
"""The kinds of prompts in the record of a tokenizer."""


def remember(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Text]) -> None:
    """Add what a model is about to learn to the record of its tokenizer, which is saved with the model.

    Text without a prompt (plain language modelling) adds nothing: it may be mixed into either.
    """
    kinds = {STRINGS if isinstance(prompt, str) else CONVERSATIONS for prompt in prompts if prompt}
    tokenizer.init_kwargs[LEARNED] = sorted(kinds | learned(tokenizer))


@dataclass(frozen=True)
class Strings:
    """Prompts that are strings, for a model that learned only conversations."""

    first: HasPrompt
    number: int
    of: int
    why: str
    """How the model is known to have learned conversations."""

    @property
    def what(self) -> str:
        """In words."""
        which = "1 prompt is a string" if self.of == 1 else f"{self.number:,} of {self.of:,} prompts are strings"
        return f"{which}, which the chat template does not render, but {self.why}"

    @property
    def evidence(self) -> str:
        """The first one."""
        prompt = self.first.prompt
        return f"{self.first.source}: {shown(prompt if isinstance(prompt, str) else '', 60)!r}"

    def fix(self, columns: str) -> str:
        """Both ways out, for data that is read with ``--columns``."""
        return f"{self._rendered(columns)}; --raw-prompts keeps raw text and ends this question"

    def _rendered(self, columns: str) -> str:
        prompt = self.first.prompt
        if isinstance(prompt, str) and prompt.endswith(HH_MARKER):
            return "write these dialogues as messages, which are rendered"
        read = parse_columns(columns)
        has_answer = isinstance(self.first, Demonstration) and not getattr(self.first, "of_a_pair", False)
        names = {"instruction": "prompt"} | ({"output": "completion"} if has_answer else {})
        mapping = {new: read.pop(old, old) for new, old in names.items()} | read
        flag = ",".join(f"{name}={column}" for name, column in mapping.items())
        return f"--columns {flag} renders them, as a user's message"


def strings_for_chat(
    renderer: Renderer, records: Sequence[HasPrompt], generation_eos: int | Sequence[int] | None = None
) -> Strings | None:
    """Strings among the prompts of ``records`` that meet a model which learned only conversations; None if there are none.

    What heedful trained has a record. Of other models the end tokens tell: an instruct model is published with a generation
    config that ends responses at the token with which its chat template ends a turn, besides the one that ends a text. A base
    model's ends at the latter only, though its tokenizer may have the same template.

    Args:
        renderer: the model's. Strings that a template has already rendered (``--special-tokens read``) are meant.
        records: prompts, demonstrations or rankings.
        generation_eos: the end tokens of the model's generation config.
    """
    strings = [one for one in records if isinstance(one.prompt, str) and one.prompt]
    why = _why(renderer, generation_eos) if strings and renderer.special_tokens == "literal" else ""
    return Strings(strings[0], len(strings), sum(bool(one.prompt) for one in records), why) if why else None


def learned(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The record of a tokenizer. It may be somebody else's file."""
    written = tokenizer.init_kwargs.get(LEARNED)
    return {kind for kind in (CONVERSATIONS, STRINGS) if isinstance(written, list) and kind in written}


def _why(renderer: Renderer, generation_eos: int | Sequence[int] | None) -> str:
    if LEARNED in renderer.tokenizer.init_kwargs:
        return "the model learned conversations" if learned(renderer.tokenizer) == {CONVERSATIONS} else ""
    ends = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or ())
    if not renderer.ends_turns or renderer.turn_end_id not in ends or len(set(ends)) == 1:
        return ""
    end = renderer.tokenizer.convert_ids_to_tokens(renderer.turn_end_id)
    return f"the model is published for chats: its generation config ends responses at the end of a turn, {end!r}"


def ask(
    name: str,
    renderer: Renderer,
    records: Sequence[HasPrompt],
    generation_eos: int | Sequence[int] | None = None,
    *,
    columns: str = "",
) -> None:
    """Print a warning of one line if strings meet the model ``name``, which learned conversations (`strings_for_chat`)."""
    found = strings_for_chat(renderer, records, generation_eos)
    if found is not None:
        say(f"WARNING: {name}: {found.what} ({found.evidence}). Fix: {found.fix(columns)}")
