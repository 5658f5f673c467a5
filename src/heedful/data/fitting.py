"""Records that are too long for a model: an error, dropped, or truncated, and always counted."""

from collections.abc import Sequence
from typing import Literal

from heedful.errors import ConfigError, DataError

TooLong = Literal["error", "drop", "truncate", "refuse"]
"""``refuse`` is ``error`` for commands that have no ``--too-long``."""


def max_length(wanted: int | None, context: int) -> int:
    """The longest record in tokens. Raises ConfigError where more is wanted than the model can read."""
    if wanted is not None and not 2 <= wanted <= context:
        raise ConfigError(
            f"--max-length must lie between 2 and the {context} tokens that the model can read, got {wanted}"
        )
    return wanted or context


def prompt_room(max_new_tokens: int, context: int) -> int:
    """Tokens that a response leaves for its prompt. Raises ConfigError where it leaves none."""
    if max_new_tokens >= context:
        raise ConfigError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the {context} tokens that the model can read"
        )
    return context - max_new_tokens


def too_long(
    lengths: Sequence[int], sources: Sequence[str], *, limit: int, action: TooLong, max_dropped: float, what: str
) -> list[int]:
    """Indices of records longer than ``limit`` tokens, if the action may be taken on them.

    Raises DataError with the count and the first records where the action is "error", or where dropping would take more
    than the share ``max_dropped``.
    """
    offenders = [i for i, length in enumerate(lengths) if length > limit]
    if not offenders:
        return []
    first = ", ".join(f"{sources[i]} ({lengths[i]} tokens)" for i in offenders[:5])
    found = f"{len(offenders)} of {len(lengths)} {what} are longer than {limit} tokens: {first}" + (
        ", ..." if len(offenders) > 5 else ""
    )
    if action == "refuse":
        raise DataError(f"{found}. Leave them out, or use a model with a longer context")
    if action == "error":
        raise DataError(f"{found}. Use --too-long drop or --too-long truncate, or a model with a longer context")
    if action == "drop":
        check_share(len(offenders), len(lengths), max_dropped=max_dropped, found=found)
    return offenders


def check_share(dropped: int, total: int, *, max_dropped: float, found: str) -> None:
    """Raises DataError where more than the share ``max_dropped`` of the records would be dropped, or all of them."""
    if dropped > max_dropped * total or dropped == total:
        raise DataError(
            f"{found}. Dropping them would lose {dropped / total:.1%} of the data, more than --max-dropped {max_dropped}"
        )
