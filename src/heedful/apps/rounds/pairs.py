"""Select pairs to label: those on which reward models disagree most, and always some at random.

The disagreement of an ensemble about a pair is the standard deviation, over its members m, of the difference of scores

    d = sqrt(mean_m (x_m - mean x)^2),        x_m = s_m(answer i) - s_m(answer j)

(Christiano et al. 2017, section 2.2.4, use the variance of the members' predictions. A preference depends only on the
difference, so a constant added to all scores of a member changes nothing). Random pairs are drawn first and from all pairs,
so they are a representative sample for statistics.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from heedful.apps.label.records import Candidate, Item, item_id, to_line

Row = Mapping[str, Any]
"""A line written by `heedful sample`: ``prompt``, ``responses`` and other columns."""
Comparison = tuple[str, frozenset[str]]
"""A prompt, and an unordered pair of texts."""


class Pair(NamedTuple):
    """Two answers to one prompt, by their indices, the lower first."""

    first: int
    second: int


@dataclass(frozen=True)
class Choice:
    """A pair that is asked about."""

    prompt: int
    """Index of the prompt."""
    pair: Pair
    chosen_by: Literal["random", "active"]
    disagreement: float | None
    """None without an ensemble."""


def different_pairs(answers: Sequence[str]) -> list[Pair]:
    """All pairs of different texts, each text by its first answer; white space at the ends is ignored."""
    first: dict[str, int] = {}
    for i, answer in enumerate(answers):
        first.setdefault(answer.strip(), i)
    return [Pair(i, j) for i, j in itertools.combinations(first.values(), 2)]


def compared(item: Item) -> set[Comparison]:
    """The pairs of texts that an item compares, unordered; white space at the ends is ignored."""
    if item.task not in ("pair", "ranking"):
        return set()
    texts = [
        one.response.strip() if isinstance(one.response, str) else to_line(one.response, sort_keys=True)
        for one in item.candidates
    ]
    prompt = to_line(item.prompt, sort_keys=True)
    return {(prompt, frozenset(two)) for two in itertools.combinations(texts, 2)}


def new_pairs(row: Row, earlier: set[Comparison]) -> list[Pair]:
    """The different pairs of a prompt's answers that were not asked before."""
    found = different_pairs([answer["response"] for answer in row["responses"]])
    return [pair for pair in found if not compared(item_of(row, Choice(0, pair, "random", None), 0)) & earlier]


def item_of(row: Row, choice: Choice, number: int) -> Item:
    """The item that asks about a selected pair in round ``number``."""
    candidates = tuple(Candidate(row["responses"][i]["response"], row["responses"][i]["source"]) for i in choice.pair)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "responses")}
    if choice.disagreement is not None:
        columns["disagreement"] = choice.disagreement
    return Item(
        item_id("pair", row["prompt"], candidates),
        "pair",
        row["prompt"],
        candidates,
        round=number,
        chosen_by=choice.chosen_by,
        columns=columns,
    )


def disagreement(scores: Sequence[Sequence[float]], pair: Pair) -> float:
    """Disagreement d about a pair (see the module); ``scores`` has one row per member, one column per answer."""
    differences = [member[pair.first] - member[pair.second] for member in scores]
    mean = sum(differences) / len(differences)
    return math.sqrt(sum((x - mean) ** 2 for x in differences) / len(differences))


def choose(
    pairs: Sequence[Sequence[Pair]],
    number: int,
    seed: str,
    *,
    disagreements: Sequence[Sequence[float]] | None = None,
    random_share: float = 1.0,
) -> list[Choice]:
    """Choose ``number`` pairs, or all if there are fewer, in a random order.

    In each part, every prompt with pairs gets one pair before any prompt gets a second.

    Args:
        pairs: the possible pairs of each prompt.
        number: how many to choose.
        seed: of the random draws.
        disagreements: of each of these pairs; None draws all at random.
        random_share: the share of chosen pairs, rounded up, that is drawn at random.
    """
    draw = random.Random(f"choose {seed}")
    number = min(number, sum(map(len, pairs)))
    known: dict[tuple[int, Pair], float] = {}
    num_random = number
    if disagreements is not None:
        num_random = math.ceil(random_share * number - 1e-9)
        for prompt, (found, values) in enumerate(zip(pairs, disagreements, strict=True)):
            known |= {(prompt, pair): value for pair, value in zip(found, values, strict=True)}
    shuffled = [draw.sample(found, len(found)) for found in pairs]
    taken: dict[tuple[int, Pair], Literal["random", "active"]] = {}
    for place in itertools.islice(_in_turns(shuffled, draw), num_random):
        taken[place] = "random"
    for place in _most_disagreed(shuffled, known, {prompt for prompt, _ in taken}):
        if len(taken) == number:
            break
        taken.setdefault(place, "active")
    chosen = [Choice(prompt, pair, by, known.get((prompt, pair))) for (prompt, pair), by in taken.items()]
    draw.shuffle(chosen)
    return chosen


def _in_turns(pairs: Sequence[Sequence[Pair]], draw: random.Random) -> Iterator[tuple[int, Pair]]:
    """The first pair of each prompt, then the second of each that has one, and so on; prompts in another order each time."""
    for turn in range(max(map(len, pairs), default=0)):
        prompts = [prompt for prompt, found in enumerate(pairs) if len(found) > turn]
        draw.shuffle(prompts)
        yield from ((prompt, pairs[prompt][turn]) for prompt in prompts)


def _most_disagreed(
    pairs: Sequence[Sequence[Pair]], known: Mapping[tuple[int, Pair], float], asked: set[int]
) -> list[tuple[int, Pair]]:
    """Pairs by falling disagreement: the best of each prompt that is not asked about yet, then the best that are left.

    Equal ones stay in the order of ``pairs``, which is random.
    """

    def by(place: tuple[int, Pair]) -> float:
        return -known.get(place, 0.0)

    places = [[(prompt, pair) for pair in found] for prompt, found in enumerate(pairs)]
    best = [min(found, key=by) for prompt, found in enumerate(places) if prompt not in asked and found]
    taken = set(best)
    left = [place for found in places for place in found if place not in taken]
    return [*sorted(best, key=by), *sorted(left, key=by)]
