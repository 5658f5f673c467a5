"""The text of each token, so that a character of several tokens is shown whole."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from heedful.data.encoding import decode_inside

SHOWN = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})
"""Symbols for white space."""
INVALID = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for bytes that are no character."""
PART = "‥"
"""Symbol for a token that ends inside a character; the token that completes the character shows it."""
LONGEST_CHARACTER = 4
"""Number of bytes of a UTF-8 character."""


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token, its leading space and special tokens included.

    A character of several tokens, such as a Chinese one in a byte-level tokenizer, is the text of the last of them; the
    others are ‥. Invalid bytes are �, on the last of their tokens.
    """
    texts: list[str] = []
    begun: list[int] = []
    for token in ids:
        before, begun = begun, [*begun, token]
        text = decode_inside(begun, tokenizer)
        if before and INVALID in text and INVALID not in (own := decode_inside([token], tokenizer)):
            texts[-1] = decode_inside(before, tokenizer)  # no character came of them
            begun, text = [token], own
        is_part = text.endswith(INVALID) and len(begun) < LONGEST_CHARACTER
        texts.append(PART if is_part else text)
        begun = begun if is_part else []
    return texts[: len(texts) - len(begun)] + [INVALID] * len(begun)
