"""Records that are too long for a model: an error, dropped, or truncated, and always counted."""

from collections.abc import Sequence
from typing import Literal

from heedful.errors import ConfigError, DataError

TooLong = Literal["error", "drop", "truncate"]

CAUSE_FLAGS = {
    "dropped_too_long": "--too-long",
    "dropped_unusable": "--unusable",
    "dropped_equal": "--equal-pairs",
}
Counts = dict[str, int]
"""What was done with the records of a file: ``records``, ``dropped_too_long``, ``truncated`` and so on."""


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


def too_long(lengths: Sequence[int], sources: Sequence[str], *, limit: int, action: TooLong, what: str) -> list[int]:
    """Indices of records longer than ``limit`` tokens, if the action may be taken on them.

    Raises DataError with the count and the first records where the action is "error".
    """
    offenders = [i for i, length in enumerate(lengths) if length > limit]
    if offenders and action == "error":
        first = ", ".join(f"{sources[i]} ({lengths[i]} tokens)" for i in offenders[:5])
        more = ", ..." if len(offenders) > 5 else ""
        raise DataError(
            f"{len(offenders)} of {len(lengths)} {what} are longer than {limit} tokens: {first}{more}. "
            "Use --too-long drop or --too-long truncate, or a model with a longer context"
        )
    return offenders


def check_dropped(counts: Counts, *, max_dropped: float, path: str) -> None:
    """Raises DataError where more than the share ``max_dropped`` of the records was dropped, or all of them."""
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
            f"({listed}), more than --max-dropped {max_dropped}. Mend the data or raise it{naming}"
        )
