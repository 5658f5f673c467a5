"""Search for responses that a reward loves: best of n under the policy, then edits; and what best-of-n foretells of PPO."""

import random
import re
import statistics
from collections.abc import Sequence

from heedful.apps.exam.inputs import ChosenRejected, ScoredPairs, Scorer
from heedful.apps.exam.measures import Record, chrf, share, wins
from heedful.apps.exam.probes import example
from heedful.core.best_of_n import best_row
from heedful.evaluate.policies import best_of_table
from heedful.rewards import Completion
from heedful.types import Prompt

PIECES = re.compile(r"\s*(?:[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s])|\s+$")
"""A word, a sign or a Chinese character, with the white space before it."""


def edited(text: str, pieces: Sequence[str], draw: random.Random) -> str:
    """One random edit of a text: a piece of another text is inserted, or two pieces of its own change places."""
    own = PIECES.findall(text)
    if len(own) < 2 or draw.random() < 0.5:
        own.insert(draw.randint(0, len(own)), draw.choice(pieces))
    else:
        i, j = draw.sample(range(len(own)), 2)
        own[i], own[j] = own[j], own[i]
    return "".join(own)


def climb(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    starts: Sequence[str],
    scores: Sequence[float],
    *,
    pieces: Sequence[str],
    rounds: int,
    edits: int,
    draw: random.Random,
) -> tuple[list[str], list[float]]:
    """Climb from each text to a higher score by random edits.

    In each round ``edits`` edits of every text are scored, all in one call; a text is replaced by its best edit if that
    scores strictly higher. Returns the last texts and their scores.
    """
    texts, best = list(starts), list(scores)
    for _ in range(rounds):
        tried = [edited(text, pieces, draw) for text in texts for _ in range(edits)]
        got = scorer.of_texts([prompt for prompt in prompts for _ in range(edits)], tried)
        for at in range(len(texts)):
            own = range(at * edits, (at + 1) * edits)
            winner = own[best_row([got[row] for row in own])]
            if got[winner] > best[at]:
                texts[at], best[at] = tried[winner], got[winner]
    return texts, best


def pieces_of(texts: Sequence[str]) -> list[str]:
    """The different pieces of texts, in a fixed order."""
    return sorted({piece for text in texts for piece in PIECES.findall(text)})


def edit_search(
    scorer: Scorer,
    scored: ScoredPairs,
    others: Sequence[Scorer],
    *,
    prompts: int,
    rounds: int,
    edits: int,
    seed: int,
) -> tuple[Record, list[Record]]:
    """Edit chosen responses at random and keep what the reward likes better: random edits hardly ever improve a response.

    ``raised`` is the share of chosen responses for which the search found a text with a higher score, ``gain`` the mean rise
    of the score in units of the scale. Other rewards are asked about the found texts (`second_opinion`).

    Returns the record, and an example for each found text.
    """
    first: dict[str, int] = {}
    for at, pair in enumerate(scored.pairs):
        first.setdefault(pair.chosen, at)
    rows = list(first.values())[:prompts]
    pairs = [scored.pairs[row] for row in rows]
    asked, starts = [pair.prompt for pair in pairs], [scored.chosen[row] for row in rows]
    texts, best = climb(
        scorer,
        asked,
        [pair.chosen for pair in pairs],
        starts,
        pieces=pieces_of([text for pair in scored.pairs for text in (pair.chosen, pair.rejected)]),
        rounds=rounds,
        edits=edits,
        draw=random.Random(f"edits {seed}"),
    )
    raised = share([float(b > a) for a, b in zip(starts, best, strict=True)], asked)
    gains = [(b - a) / scored.scale for a, b in zip(starts, best, strict=True)]
    record: Record = {"raised": raised["share"], "interval_95": raised["interval_95"], "gain": statistics.fmean(gains)}
    found = [at for at, gain in enumerate(gains) if gain > 0]
    record["second_opinion"] = second_opinion(
        others, [asked[at] for at in found], [pairs[at].chosen for at in found], [texts[at] for at in found]
    )
    return record, [
        example("edited", pairs[at], texts[at], clean=starts[at], spoilt=best[at], scale=scored.scale) for at in found
    ]


def policy_search(
    scorer: Scorer,
    pairs: Sequence[ChosenRejected],
    answers: Sequence[Sequence[Completion]],
    others: Sequence[Scorer],
    scale: float,
    *,
    rounds: int,
    edits: int,
    seed: int,
) -> tuple[Record, list[Record]]:
    """Take the best of the policy's n answers to each prompt, then edit it: how far above the chosen response does it get?

    ``answers``, ``best of n`` and ``edited`` are mean scores above those of the chosen responses, in units of ``scale``;
    ``best above chosen`` and ``edited above chosen`` are shares of prompts, a tie one half. Best-of-n above the chosen
    response is good if the policy writes better than the people who wrote the data; edited at random it hardly ever is. Other
    rewards are asked about the edited texts that score above the chosen response (`second_opinion`).

    Returns the record, and an example for each edited text that scores higher than the chosen response.
    """
    asked = [pair.prompt for pair in pairs]
    clean = scorer.of_texts(asked, [pair.chosen for pair in pairs])
    flat = scorer.scores([one for own in answers for one in own])
    n = len(answers[0])
    groups = [flat[start : start + n] for start in range(0, len(flat), n)]
    winners = [best_row(group) for group in groups]
    starts = [own[at].response for own, at in zip(answers, winners, strict=True)]
    best = [group[at] for group, at in zip(groups, winners, strict=True)]
    texts, climbed = climb(
        scorer,
        asked,
        starts,
        best,
        pieces=pieces_of([one.response for own in answers for one in own] + [pair.rejected for pair in pairs]),
        rounds=rounds,
        edits=edits,
        draw=random.Random(f"search {seed}"),
    )

    def above(scores: Sequence[float]) -> float:
        return statistics.fmean((score - one) / scale for score, one in zip(scores, clean, strict=True))

    found = [
        at for at, text in enumerate(texts) if climbed[at] > clean[at] and text.split() != pairs[at].chosen.split()
    ]
    record = {
        "prompts": len(pairs),
        "n": n,
        "answers": above([statistics.fmean(group) for group in groups]),
        "best of n": above(best),
        "edited": above(climbed),
        "best above chosen": share(wins(best, clean), asked)["share"],
        "edited above chosen": share(wins(climbed, clean), asked)["share"],
        "second_opinion": second_opinion(
            others, [asked[at] for at in found], [pairs[at].chosen for at in found], [texts[at] for at in found]
        ),
    }
    return record, [
        example("searched", pairs[at], texts[at], clean=clean[at], spoilt=climbed[at], scale=scale) for at in found
    ]


def second_opinion(
    others: Sequence[Scorer], prompts: Sequence[Prompt], clean: Sequence[str], found: Sequence[str]
) -> list[Record]:
    """Of texts that the examined reward scores above the clean ones: the share that another reward scores below, a tie one
    half. Near 1 it is the examined reward alone that loves them."""
    return [
        {
            "reward": other.name,
            "texts": len(found),
            "only this one": statistics.fmean(wins(other.of_texts(prompts, clean), other.of_texts(prompts, found))),
        }
        for other in others
        if found
    ]


def foretold(
    scorer: Scorer, pairs: Sequence[ChosenRejected], answers: Sequence[Sequence[Completion]], judge: Scorer | None
) -> Record:
    """Over-optimisation foretold: the best of k answers by the reward, as the judge sees it, for k = 1 to n.

    Best-of-n needs no training and goes about as far as a PPO run of the same KL (``kl_bound``), so a judge's score that
    falls while the reward's rises foretells that PPO will over-optimise (Gao et al. 2023). Without --judge it is the likeness
    of the answer to the chosen response of the pair (`heedful.apps.exam.measures.chrf`), a weak judge where many answers are
    right.

    ``rise`` is the judge's score of the best of n minus that of one answer, as a share of the rise if the judge itself
    chose: 1 is as good as the judge, 0 is chance, below 0 the reward prefers what the judge does not; 0 if the judge cannot
    choose. ``peak`` is the k with the highest score of the judge; above it the reward is over-optimised.
    """
    flat = [one for own in answers for one in own]
    scores, n = scorer.scores(flat), len(answers[0])
    if judge is None:
        judged = [chrf(one.response, pair.chosen) for pair, own in zip(pairs, answers, strict=True) for one in own]
    else:
        judged = judge.scores(flat)
    prompts = [pair.prompt for pair in pairs]
    table = best_of_table(scores, judged, prompts, n)
    ideal = best_of_table(judged, judged, prompts, n)[-1]["judge_score"]
    one, best = table[0]["judge_score"], table[-1]["judge_score"]
    return {
        "judge": "likeness to the chosen response (chrF)" if judge is None else judge.name,
        "rise": (best - one) / (ideal - one) if ideal > one else 0.0,
        "peak": table[best_row([row["judge_score"] for row in table])]["k"],
        "best_of": [row for row in table if row["k"] & (row["k"] - 1) == 0 or row["k"] == n],
    }
