"""Handle records that are too long for a model: refuse, drop or truncate them, and count them."""

from collections.abc import Sequence
from typing import Literal

from heedful.errors import ConfigError, DataError

TooLong = Literal["error", "drop", "truncate"]
PROMPT_TOKENS = (256, 1024)
"""Least and most that a quarter of the context is taken for if ``--max-prompt-tokens`` is not set."""

CAUSE_FLAGS = {
    "dropped_too_long": "--too-long",
    "dropped_unusable": "--unusable",
    "dropped_equal": "--equal-pairs",
}
Counts = dict[str, int]
"""How many records a file has and what was done with them: ``records``, ``dropped_too_long``, ``truncated`` and so on."""


def max_length(wanted: int | None, context: int) -> int:
    """Return the most tokens that a record may have.

    Args:
        wanted: the setting ``--max-length``; None means all that the model can read.
        context: the most tokens that the model can read.

    Raises ConfigError if ``wanted`` is below 2 or above ``context``.
    """
    if wanted is not None and not 2 <= wanted <= context:
        raise ConfigError(
            f"--max-length must be between 2 and the {context} tokens that the model can read, got {wanted}"
        )
    return wanted or context


def prompt_room(max_new_tokens: int, context: int) -> int:
    """Return how many tokens of a context the longest response leaves for its prompt. Raises ConfigError if none."""
    if max_new_tokens >= context:
        raise ConfigError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the {context} tokens that the model can read"
        )
    return context - max_new_tokens


def prompt_limit(wanted: int | None, max_new_tokens: int, context: int) -> int:
    """Return the most tokens that a prompt may have in training on a policy's own responses.

    Args:
        wanted: the setting ``--max-prompt-tokens``; None means a quarter of the context, within `PROMPT_TOKENS`,
            or what the longest response leaves if that is less.
        max_new_tokens: the longest response.
        context: the most tokens that the model can read.

    Raises ConfigError if the longest prompt and the longest response do not fit together.
    """
    room = prompt_room(max_new_tokens, context)
    if wanted is not None and wanted > room:
        raise ConfigError(
            f"--max-prompt-tokens {wanted} and --max-new-tokens {max_new_tokens} together exceed the {context} tokens that "
            f"the model can read; make --max-prompt-tokens at most {room}, or lower --max-new-tokens"
        )
    least, most = PROMPT_TOKENS
    return wanted or min(max(context // 4, least), most, room)


def too_long(
    lengths: Sequence[int],
    sources: Sequence[str],
    *,
    limit: int,
    action: TooLong,
    what: str,
    remedy: str = "a model with a longer context",
) -> list[int]:
    """Return the indices of the records that are longer than ``limit`` tokens, for the caller to drop or truncate.

    Args:
        lengths: the length of each record in tokens.
        sources: where each record was read, for messages.
        limit: the most tokens per record.
        action: what happens to longer records.
        what: what the records are called in messages, such as "pairs".
        remedy: what else the message advises.

    Raises DataError, with the count and the first records, if there are any and ``action`` is "error".
    """
    offenders = [i for i, length in enumerate(lengths) if length > limit]
    if offenders and action == "error":
        first = ", ".join(f"{sources[i]} ({lengths[i]} tokens)" for i in offenders[:5])
        more = ", ..." if len(offenders) > 5 else ""
        raise DataError(
            f"{len(offenders)} of {len(lengths)} {what} are longer than {limit} tokens: {first}{more}. "
            f"Use --too-long drop or --too-long truncate, or {remedy}"
        )
    return offenders


def check_dropped(counts: Counts, *, max_dropped: float, path: str) -> None:
    """Refuse to go on if too many records were dropped.

    Args:
        counts: ``records``, and any number of ``dropped_...``.
        max_dropped: the largest share of records that may be dropped, in [0, 1]. Dropping all is always refused.
        path: the data file, for the message.

    Raises DataError.
    """
    causes = {name: count for name, count in counts.items() if name.startswith("dropped_") and count}
    dropped = sum(causes.values())
    if dropped > max_dropped * counts["records"] or (dropped and dropped == counts["records"]):
        flags = [f"{flag} error" for name, flag in CAUSE_FLAGS.items() if name in causes]
        naming = f"; {' or '.join(flags)} names the first" if flags else ""
        listed = ", ".join(
            f"{count} {name.removeprefix('dropped_').replace('_', ' ')}" for name, count in causes.items()
        )
        raise DataError(
            f"{path}: {dropped} of {counts['records']} records ({dropped / counts['records']:.1%}) would be dropped "
            f"({listed}), more than --max-dropped {max_dropped}. Fix the data or raise it{naming}"
        )
