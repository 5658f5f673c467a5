"""Encode text with one tokenizer and decode it, also in the middle of another text.

A tokenizer may add a space before a text or before each part of it (SentencePiece's do), and remove it when it decodes. So a
text after another one has other tokens than the same text alone.
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
"""Tokens that are letters of texts, even if the tokenizer marks them as special."""


class _PutsSpace(NamedTuple):
    """Where a tokenizer adds a space that is not in the text, found by decoding."""

    everywhere: bool
    """Its tokens do not encode a space before them, as with WordPiece."""
    at_start: bool
    after_special: bool
    before_spaces: bool
    """Also before a text that begins with one."""


def decode_inside(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of token ids inside a text, with the leading space that SentencePiece's decoders remove."""
    alone, before = _decode(ids, tokenizer), tokenizer.eos_token_id
    if before is None:
        return alone
    start, text = _decode([before], tokenizer), _decode([before, *ids], tokenizer)
    return text.removeprefix(start) if text.startswith(start) else alone


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Encoder:
    """Encodes and decodes with one tokenizer.

    Typed text never becomes a special token. In a text with both, markers replace the typed ones (`marked`). A marker has a
    random number, so that no text contains it; ids do not depend on that number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials -= BYTES
        self.special_texts = sorted(specials, key=lambda text: (-len(text), text))
        self._special = re.compile("|".join(map(re.escape, self.special_texts)) or r"(?!)")
        number = f"{secrets.randbelow(10**18):018}"
        self._sign = f"\ue000{number}."
        self._marker = re.compile(rf"{re.escape(self._sign)}[0-9]{{5}}\ue001")
        self._markers = {text: f"{self._sign}{i:05}\ue001" for i, text in enumerate(self.special_texts)}
        self._typed = {marker: text for text, marker in self._markers.items()}
        self._names = {text: f"h{number}n{i:05}h" for i, text in enumerate(self.special_texts)}
        """The names of special tokens in `_renamed`."""

    def specials_in(self, *texts: str) -> list[str]:
        """Return the texts of the special tokens in the given texts, longest first."""
        found = {special for text in texts for special in self._special.findall(text)}
        return sorted(found, key=self._markers.__getitem__)

    def marked(self, text: str, but: Sequence[str] = ()) -> str:
        """Return a text with markers for the special tokens in it, except those named in ``but``."""
        return self._special.sub(lambda found: found[0] if found[0] in but else self._markers[found[0]], text)

    def literal(self, text: str) -> list[int]:
        """Return the ids of a text alone, without special tokens."""
        if self._renamed is not None:
            return self._renamed.encode(text, add_special_tokens=False).ids
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def read(self, text: str) -> list[int]:
        """Return the ids of a text alone, with its special tokens; markers become the letters they replace."""
        if self._sign not in text and not self._makes_specials:
            return self.tokenizer(text, add_special_tokens=False).input_ids
        if self._renamed is not None:
            return self._renamed.encode(self._unmarked(text), add_special_tokens=False).ids
        ids, start = [], 0
        for marker in self._marker.finditer(text):
            ids += self.read(text[start : marker.start()]) + self.literal(self._typed[marker[0]])
            start = marker.end()
        return ids + self.read(text[start:])

    def read_on(self, text: str, known: str, ids: Sequence[int]) -> list[int]:
        """Return `read` of a text, given the ids of a text with which it begins.

        A special token separates the tokens of the texts around it, so only the text after the last one is encoded.
        """
        place = next((k for k in reversed(range(len(ids))) if ids[k] in self._borders), -1)
        start = known.rfind(self._borders[ids[place]]) if place >= 0 and text.startswith(known) else -1
        if start <= 0:
            return self.read(text)
        rest = self.read(text[start:])
        return [*ids[:place], *rest] if rest[:1] == [ids[place]] else self.read(text)

    def tokens_within(self, text: str, end: int) -> int:
        """Return the number of leading tokens of `read` that end before ``end``.

        A special token may include white space beside it. Its position is that of its own text.
        """
        if self._renamed is None:  # without offsets: the common prefix with the text up to there
            pairs = zip(self.read(text), self.read(text[:end]), strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.read(text[:end])))
        whole = self._unmarked(text)
        border = len(self._unmarked(text[:end]))
        encoding = self._renamed.encode(whole, add_special_tokens=False)
        names = self._names_by_id
        for i, (token, (start, stop)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            name = names.get(token, "")
            place = whole.find(name, start, stop) if name else -1  # -1 too for text that is unknown
            first, last = (start, stop) if place < 0 else (place, place + len(name))
            if last > border or first >= border:
                return i
        return len(encoding.ids)

    def within(self, text: str, *, with_specials: bool = False) -> list[int]:
        """Return the ids of a text inside another one: without the space that the tokenizer adds before a text."""
        if self._unprefixed is None:
            return self.read(text) if with_specials else self.literal(text)
        return self._unprefixed.encode(self._unmarked(text) if with_specials else text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids alone, special tokens included."""
        return _decode(ids, self.tokenizer)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of token ids that follow others.

        Decoders remove a space at the beginning. Here it is removed only if the tokenizer added it: at the beginning of all
        text, or after each added token.
        """
        texts, known = [], list(before)
        for is_added, group in groupby(ids, self._added.__contains__):
            run = list(group)
            text = decode_inside(run, self.tokenizer)
            texts.append(text[1:] if text.startswith(" ") and not is_added and self._is_put(text, known) else text)
            known += run
        return "".join(texts)

    def _is_put(self, text: str, before: Sequence[int]) -> bool:
        """Whether the tokenizer itself added the leading space of a text after these ids."""
        puts = self._puts_space
        if text.startswith("  ") and not puts.before_spaces:
            return False
        at_start = not before or list(before) == [self.tokenizer.bos_token_id]
        follows_added = bool(before) and before[-1] in self._added
        return puts.everywhere or (puts.at_start if at_start else follows_added and puts.after_special)

    @cached_property
    def _added(self) -> set[int]:
        """Added tokens, which split a text in two, except those that are letters."""
        tokens = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.content not in BYTES}
        return tokens - ({self.tokenizer.unk_token_id} - {self.tokenizer.eos_token_id})

    @cached_property
    def _puts_space(self) -> "_PutsSpace":
        end, by_itself = self.tokenizer.eos_token, self.literal("a")
        ids = self.read(end)
        at_start, after_special = (
            self.decode(row).removeprefix(self.decode(ids)) for row in (ids + by_itself, self.read(f"{end}a"))
        )
        return _PutsSpace(
            everywhere=self.literal(".a") == self.literal(". a"),
            at_start=at_start.startswith(" "),
            after_special=after_special.startswith(" "),
            before_spaces=self.literal(" a") != by_itself,
        )

    def _unmarked(self, text: str) -> str:
        """Return a text for `_renamed`: typed special tokens unchanged, the others under their new names."""
        named = self._special.sub(lambda found: self._names[found[0]], text)
        return self._marker.sub(lambda found: self._typed[found[0]], named)

    @cached_property
    def _borders(self) -> dict[int, str]:
        """Special tokens that the tokenizer matches before any other processing, and whose ids have no other source."""
        tokens = self.tokenizer.added_tokens_decoder.items() if self.tokenizer.is_fast else ()
        unknown = self.tokenizer.unk_token_id  # which stands for other texts too
        return {
            i: token.content
            for i, token in tokens
            if token.content in self._names and not token.normalized and not token.single_word and i != unknown
        }

    @cached_property
    def _makes_specials(self) -> bool:
        """True if letters may become a special token once they are normalized: a full-width ``＜/s＞``, with Unigram."""
        return self.tokenizer.is_fast and type(self.tokenizer.backend_tokenizer.model).__name__ == "Unigram"

    @cached_property
    def _names_by_id(self) -> dict[int, str]:
        return {self.tokenizer.convert_tokens_to_ids(special): name for special, name in self._names.items()}

    @cached_property
    def _renamed(self) -> Tokenizer | None:
        """The tokenizer with other names for its special tokens and true offsets; None if it does not use `tokenizers`."""
        return self._copy(lambda spec: spec)

    @cached_property
    def _unprefixed(self) -> Tokenizer | None:
        """`_renamed`, without the space added before a text."""
        return self._copy(_without_prefix)

    def _copy(self, change: Callable[[Any], Any]) -> Tokenizer | None:
        if not self.tokenizer.is_fast:
            return None
        spec = json.loads(self.tokenizer.backend_tokenizer.to_str())
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        for token in spec["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        model, names = spec["model"], self._names
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        spec["normalizer"], spec["pre_tokenizer"] = change(spec["normalizer"]), change(spec["pre_tokenizer"])
        return Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))


def _without_prefix(spec: Any) -> Any:
    """Return a normalizer or a pre-tokenizer that adds no space before a text."""
    if not isinstance(spec, dict):
        return spec
    if spec["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in spec:
            spec[name] = [part for part in map(_without_prefix, spec[name]) if part is not None]
    return spec | {
        name: off for name, off in (("prepend_scheme", "never"), ("add_prefix_space", False)) if name in spec
    }
