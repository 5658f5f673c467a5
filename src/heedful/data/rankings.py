"""Turn rankings of two or more responses into the rows that a reward model reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from heedful.data.chat import RewardInputs
from heedful.data.fitting import Counts, Refusal, TooLong, each_rendered, too_long
from heedful.data.template import naming
from heedful.data.template_check import Sample, check_rendering, check_sampling
from heedful.errors import DataError
from heedful.types import Ranking

Row = dict[str, list[int]]


@dataclass(frozen=True)
class RankingRows:
    """A ranking as a reward model reads it, best response first."""

    ranking: Ranking
    """The ranking with its responses sorted, best first, and ranks 0, 1, 2, ... (equal if they tie)."""
    rows: tuple[Row, ...]
    """One row per response, in that order."""

    @property
    def has_pairs(self) -> bool:
        """True if any response is preferred to another."""
        return self.ranking.ranks[-1] > self.ranking.ranks[0]

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per row; batches are sorted by it."""
        return sum(len(row["input_ids"]) for row in self.rows) / len(self.rows)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(row["input_ids"]) for row in self.rows)


def encode_rankings(
    rankings: Sequence[Ranking],
    inputs: RewardInputs,
    *,
    max_length: int,
    action: TooLong,
    equal_pairs: str,
    refused: list[Refusal] | None = None,
) -> tuple[list[RankingRows], Counts]:
    """Encode rankings as rows of token ids, and count what was dropped or truncated.

    Args:
        rankings: the rankings to encode.
        inputs: how the reward model reads a prompt with a response.
        max_length: the most tokens per row. A ranking is too long if one of its responses is.
        action: what to do with rankings that are too long; `RewardInputs.encode` says how they are truncated.
        equal_pairs: what to do with a ranking that prefers a response to an equal one, before or after truncation: "error"
            or "drop". "unusable": if all its responses are equal, it goes to ``refused``, else it is an error.
        refused: collects what is wrong with rankings that the chat template refuses; None raises the first.

    Raises DataError for what ``action`` or ``equal_pairs`` calls an error, CheckpointError as `check_rendering` does.
    """
    what = "pairs" if all(len(ranking.responses) == 2 for ranking in rankings) else "rankings"
    rankings, encoded = each_rendered(rankings, lambda ranking: _encode(best_first(ranking), inputs, None), refused)
    if inputs.renderer is not None:
        samples = [Sample(r.prompt, text, r.source) for r in rankings if not r.truncated for text in r.responses]
        check_rendering(inputs.renderer, samples, read=not inputs.written)
        if inputs.written:
            check_sampling(inputs.renderer, samples)
    lengths = [one.longest for one in encoded]
    sources = [ranking.source for ranking in rankings]
    offenders = set(too_long(lengths, sources, limit=max_length, action=action, what=what))
    if action == "drop":
        encoded = [one for i, one in enumerate(encoded) if i not in offenders]
    else:
        encoded = [_encode(one.ranking, inputs, max_length) if i in offenders else one for i, one in enumerate(encoded)]
    if equal_pairs == "unusable" and refused is not None:
        same = [all(row == one.rows[0] for row in one.rows) for one in encoded]
        refused += [_all_equal(one.ranking) for one, is_same in zip(encoded, same, strict=True) if is_same]
        encoded = [one for one, is_same in zip(encoded, same, strict=True) if not is_same]
    contradictory = [_contradictory(one.ranking, [row["input_ids"] for row in one.rows]) for one in encoded]
    equal = [one.ranking.source for one, is_equal in zip(encoded, contradictory, strict=True) if is_equal]
    if equal and equal_pairs != "drop":
        whole = sum(_contradictory(one.ranking, one.ranking.responses) for one in encoded)
        how = "truncation" if offenders else "tokenisation"
        after = f" after {how}" if len(equal) > whole else ""
        fault = "have equal chosen and rejected responses" if what == "pairs" else "prefer a response to an equal one"
        raise DataError(
            f"{len(equal)} of {len(encoded)} {what} {fault}{after}: {', '.join(equal[:5])}. Fix the data, or use "
            f"--equal-pairs drop{' or --unusable drop' if what == 'pairs' else ''}"
        )
    counts = {
        "dropped_too_long": len(offenders) if action == "drop" else 0,
        "truncated": len(offenders) if action == "truncate" else 0,
        "dropped_equal": len(equal),
    }
    return [one for one, is_equal in zip(encoded, contradictory, strict=True) if not is_equal], counts


def best_first(ranking: Ranking) -> Ranking:
    """Sort a ranking's responses by rank and renumber the ranks 0, 1, 2, ...; responses that tie keep their order."""
    order = sorted(range(len(ranking.ranks)), key=ranking.ranks.__getitem__)
    place = {rank: i for i, rank in enumerate(sorted(set(ranking.ranks)))}
    return replace(
        ranking,
        responses=tuple(ranking.responses[i] for i in order),
        ranks=tuple(place[ranking.ranks[i]] for i in order),
    )


def _encode(ranking: Ranking, inputs: RewardInputs, max_length: int | None) -> RankingRows:
    with naming(ranking.source):
        rows = tuple(
            inputs.encode(ranking.prompt, response, truncated=ranking.truncated, max_length=max_length)
            for response in ranking.responses
        )
    return RankingRows(ranking, rows)


def _all_equal(ranking: Ranking) -> DataError:
    error = DataError(f"{ranking.source}: all {len(ranking.responses)} responses are equal. Accepted: different ones.")
    error.cause = "equal answers"
    return error


def _contradictory(ranking: Ranking, items: Sequence[Any]) -> bool:
    """True if one of two equal items is preferred to the other. ``items`` stand for the ranking's responses, in its order."""
    return any(
        one == other and rank != other_rank
        for (one, rank), (other, other_rank) in combinations(zip(items, ranking.ranks, strict=True), 2)
    )
