"""Names and choices that follow from content alone: ids of items, orders on the screen, draws by hash, hashes of tokens."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from heedful.errors import DataError
from heedful.label.records import Candidate


def to_line(value: Any, *, sort_keys: bool = False) -> str:
    """Return JSON on one line, without spaces. Raises DataError for what JSON or UTF-8 cannot hold."""
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys, default=_plain
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("a text holds half of a character (a lone surrogate), which UTF-8 cannot hold") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"not something that JSON can hold: {error}") from error
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def item_id(task: str, prompt: Any, candidates: Sequence[Candidate] = ()) -> str:
    """Return the id of an item: the first 20 hexadecimal digits of the SHA-256 of its task, prompt and responses.

    What wrote the responses, and in which order they are, does not count: the same question is not asked twice.
    """
    responses = sorted((candidate.response for candidate in candidates), key=_key)
    content = to_line([task, prompt, responses], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


def places_in(there: Sequence[Candidate], given: Sequence[Candidate]) -> list[int]:
    """Return for each of some candidates which one of ``there``, the same ones in another order, it is."""
    free: dict[str, list[int]] = {}
    for i, candidate in enumerate(there):
        free.setdefault(_key(candidate.response), []).append(i)
    return [free[_key(candidate.response)].pop(0) for candidate in given]


def _key(response: Any) -> str:
    return to_line(response, sort_keys=True)


def order_of(seed: int, item: str, person: str, repeat: bool | int, places: int) -> tuple[int, ...]:
    """Return which candidate is at each place on the screen, always the same for the same item and person.

    ``repeat`` tells the hidden repeat of an item from the first time, and of a chat the turns from each other.
    """
    order = list(range(places))
    random.Random(f"{seed}:{item}:{person}:{repeat}").shuffle(order)
    return tuple(order)


def draw(*parts: Any) -> float:
    """Return a number from 0 to below 1 that follows from the parts."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def token_hash(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
