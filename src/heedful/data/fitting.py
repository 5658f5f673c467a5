"""Handle records that are too long for a model: refuse, drop or truncate them, and count them."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Literal, TypeVar

from heedful.configs.offline import DPOConfig, RewardConfig
from heedful.configs.options import RecordOptions
from heedful.data.splits import HasPrompt
from heedful.errors import CheckpointError, ConfigError, DataError, RefusedError

Item = TypeVar("Item", bound=HasPrompt)
Encoded = TypeVar("Encoded")


Refusal = DataError | RefusedError
"""The error of one unusable record."""

TooLong = Literal["error", "drop", "truncate"]
PROMPT_TOKENS = (256, 1024)
"""Lower and upper bound for a quarter of the context, the prompt limit if ``--max-prompt-tokens`` is not set."""

CAUSE_FLAGS = {"dropped_too_long": "--too-long", "dropped_unusable": "--unusable", "dropped_equal": "--equal-pairs"}
Counts = dict[str, int]
"""Counts of a file's records: ``records``, ``dropped_too_long``, ``truncated`` and so on.

The ``unusable/CAUSE`` counts add up to ``dropped_unusable``.
"""


def max_length(wanted: int | None, context: int) -> int:
    """Return the maximal tokens per record: ``--max-length``, or the model's whole context.

    Raises ConfigError if ``wanted`` is below 2 or above ``context``.
    """
    if wanted is not None and not 2 <= wanted <= context:
        raise ConfigError(
            f"--max-length must be between 2 and the {context} tokens that the model can read, got {wanted}"
        )
    return wanted or context


def prompt_room(max_new_tokens: int, context: int) -> int:
    """Return the tokens of a context that the longest response leaves for its prompt. Raises ConfigError if none."""
    if max_new_tokens >= context:
        raise ConfigError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the {context} tokens that the model can read"
        )
    return context - max_new_tokens


def prompt_limit(wanted: int | None, max_new_tokens: int, context: int) -> int:
    """Return the maximal tokens per prompt for training on a policy's own responses: ``--max-prompt-tokens``.

    Its default is a quarter of the context, within `PROMPT_TOKENS`, or less if the longest response leaves less room.

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
) -> set[int]:
    """Return the indices of the records that are longer than ``limit`` tokens, for the caller to drop or truncate.

    If there are any and ``action`` is "error", raises DataError with their count and first ``sources``; ``what`` names them
    (such as "pairs"), ``remedy`` is further advice.
    """
    offenders = [i for i, length in enumerate(lengths) if length > limit]
    if offenders and action == "error":
        first = ", ".join(f"{sources[i]} ({lengths[i]} tokens)" for i in offenders[:5])
        more = ", ..." if len(offenders) > 5 else ""
        raise DataError(
            f"{len(offenders)} of {len(lengths)} {what} are longer than {limit} tokens: {first}{more}. "
            f"Use --too-long drop or --too-long truncate, or {remedy}"
        )
    return set(offenders)


def fitted(
    encoded: Sequence[Encoded],
    lengths: Sequence[int],
    sources: Sequence[str],
    shortened: Callable[[int], Encoded | None],
    *,
    limit: int,
    action: TooLong,
    what: str,
    remedy: str = "a model with a longer context",
) -> tuple[list[Encoded], Counts]:
    """Drop or shorten records longer than ``limit`` tokens, and count them.

    ``shortened`` returns the record at an index with no more tokens than that, or None to drop it too.

    Raises DataError as `too_long` does.
    """
    offenders = too_long(lengths, sources, limit=limit, action=action, what=what, remedy=remedy)
    cut = {i: shortened(i) for i in sorted(offenders) if action == "truncate"}
    fitting = [cut.get(i) if i in offenders else one for i, one in enumerate(encoded)]
    kept = [one for one in fitting if one is not None]
    dropped = len(encoded) - len(kept)
    return kept, {"dropped_too_long": dropped, "truncated": len(offenders) - dropped}


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Prefix errors of a record's rendering with its file and line."""
    try:
        yield
    except (CheckpointError, DataError) as error:
        raise type(error)(f"{source}: {error}") from error


def each_rendered(
    records: Sequence[Item], encode: Callable[[Item], Encoded], refused: list[Refusal] | None
) -> tuple[list[Item], list[Encoded]]:
    """Encode every record that can be encoded. Returns these records and their encodings.

    ``refused`` collects the errors of the others, with file and line (DataError, RefusedError); None raises the first.
    """
    kept, encoded = [], []
    for record in records:
        try:
            with naming(record.source):
                one = encode(record)
        except (DataError, RefusedError) as error:
            if refused is None:
                raise
            error.cause = error.cause or "no place in the chat template"
            refused.append(error)
            continue
        kept.append(record)
        encoded.append(one)
    return kept, encoded


def settle(refused: Sequence[Refusal], kept: int, options: RecordOptions) -> Counts:
    """Count unusable records by cause, if ``options.unusable`` is drop; ``kept`` is the number of the others.

    Otherwise raises the first of ``refused`` with advice how to drop them; without advice if no record would be left.
    """
    if refused and options.unusable == "error":
        first, total = refused[0], kept + len(refused)
        if not kept:
            raise first
        share = len(refused) / total
        more = f" --max-dropped {math.ceil(share * 100) / 100}" if share > options.max_dropped else ""
        raise type(first)(
            f"{first} To leave out such records ({len(refused)} of {total}) and count them: --unusable drop{more}."
        ) from first
    causes = Counter(error.cause or "other" for error in refused)
    return {"dropped_unusable": len(refused)} | {f"unusable/{cause}": count for cause, count in causes.most_common()}


def if_equal(config: DPOConfig | RewardConfig) -> str:
    """Return ``equal_pairs`` of `encode_rankings` from --equal-pairs and --unusable."""
    return "unusable" if config.unusable == "drop" and config.equal_pairs == "error" else config.equal_pairs


def added(*counts: Counts) -> Counts:
    """Add up counts by name, in order of first appearance."""
    return {name: sum(one.get(name, 0) for one in counts) for name in dict.fromkeys(chain.from_iterable(counts))}


def check_dropped(counts: Counts, *, max_dropped: float, path: str) -> None:
    """Raise DataError if ``dropped_...`` in ``counts`` are more than this share of ``records``, or all of them."""
    causes = {name: count for name, count in counts.items() if name.startswith("dropped_") and count}
    dropped = sum(causes.values())
    if dropped > max_dropped * counts["records"] or (dropped and dropped == counts["records"]):
        flags = [f"{flag} error" for name, flag in CAUSE_FLAGS.items() if name in causes]
        named = f"; {' or '.join(flags)} names the first" if flags else ""
        listed = ", ".join(
            f"{count} {name.removeprefix('dropped_').replace('_', ' ')}" for name, count in causes.items()
        )
        raise DataError(
            f"{path}: {dropped} of {counts['records']} records ({dropped / counts['records']:.1%}) would be dropped "
            f"({listed}), more than --max-dropped {max_dropped}. Fix the data or raise it{named}"
        )
