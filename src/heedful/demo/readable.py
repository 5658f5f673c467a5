"""Find responses that are not text: empty, or bytes that are not valid UTF-8. Token ids show this; decoded text hides it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import pre_tokenizers

from heedful.models.tiny import byte_tokenizer


def unreadable(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Score 1 for a response that is empty, white space or invalid UTF-8, else 0: a reward function for measuring.

    Args:
        completion_ids: ids of the byte tokenizer, without the stop token. Any other special token is invalid.
    """
    return [float(not is_readable(ids)) for ids in completion_ids]


def is_readable(ids: Sequence[int]) -> bool:
    """Return whether ids of the byte tokenizer spell text: valid UTF-8 that is more than white space."""
    spelled = [_byte_of_id().get(token) for token in ids]
    known = bytes(byte for byte in spelled if byte is not None)
    if len(known) < len(spelled):
        return False
    try:
        return bool(known.decode("utf-8").strip())
    except UnicodeDecodeError:
        return False


@cache
def _byte_of_id() -> dict[int, int]:
    """Return the byte of each id of the byte tokenizer. Special tokens have none.

    The byte-level alphabet writes printable bytes of Latin-1 as themselves, and the others, in order, from U+0100 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = [ord(letter) for letter in alphabet if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in themselves]
    vocabulary = byte_tokenizer().get_vocab()
    return {vocabulary[letter]: byte for letter, byte in zip(alphabet, themselves + others, strict=True)}
