"""What pairs say about a reward: accuracy, calibration, margins, length, baselines, agreement with other rewards.

Each part of an exam is a function that returns a record: numbers by their names, and tables (lists of rows).
"""

import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from heedful.apps.exam.inputs import ChosenRejected, ScoredPairs
from heedful.core.agreement import BINS, SIMILAR, agreement
from heedful.core.intervals import share_interval
from heedful.data.splits import prompt_key
from heedful.evaluate.measuring import by_prompt
from heedful.types import Prompt

Record = dict[str, Any]
WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
"""A word, a sign, or a Chinese character."""
CHRF_LONGEST, CHRF_BETA = 6, 2.0


def wins(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """1 where the first score is higher, 0 where it is lower, one half for a tie."""
    return [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True)]


def share(values: Sequence[float], prompts: Sequence[Prompt]) -> Record:
    """A share with its 95 % interval over prompts (`heedful.core.intervals.share_interval`) and the number of values."""
    interval = share_interval(by_prompt(values, prompts))
    return {"share": statistics.fmean(values), "interval_95": interval, "count": len(values)}


def accuracy(scored: ScoredPairs) -> Record:
    """Share of pairs whose chosen response scores strictly higher, with its 95 % interval, and how many pairs tie."""
    right = share([float(margin > 0) for margin in scored.margins], scored.prompts)
    return {
        "accuracy": right["share"],
        "interval_95": right["interval_95"],
        "pairs": right["count"],
        "prompts": len(by_prompt(scored.margins, scored.prompts)),
        "ties": scored.margins.count(0.0),
    }


def calibration(scored: ScoredPairs) -> Record:
    """Expected calibration error of sigmoid(margin), and its reliability table (`heedful.core.agreement.calibration_error`).

    A row is a bin of confidence ``max(p, 1 - p)``, ``p = sigmoid(margin)``: the number of pairs, their mean confidence and
    the share that the reward orders rightly; a tie is half right. It means something only for scores of the Bradley-Terry
    model, such as those of reward models.
    """
    rows: list[list[tuple[float, float]]] = [[] for _ in range(BINS)]
    for margin in scored.margins:
        certainty = math.tanh(abs(margin) / 2)
        right = 0.5 if margin == 0 else float(margin > 0)
        rows[min(int(BINS * certainty), BINS - 1)].append(((1 + certainty) / 2, right))
    table = [
        {
            "confidence": f"{0.5 + at / (2 * BINS):.2f} to {0.5 + (at + 1) / (2 * BINS):.2f}",
            "pairs": len(row),
            "mean confidence": statistics.fmean(confidence for confidence, _ in row),
            "right": statistics.fmean(right for _, right in row),
        }
        for at, row in enumerate(rows)
        if row
    ]
    return {"ece": _agreement(scored)["ece"], "reliability": table}


def margins(scored: ScoredPairs) -> Record:
    """Quantiles of the margins (score of the chosen response minus that of the rejected one), and the scale of scores.

    ``scale`` is the standard deviation of all scores; PPO's ``--kl-coef`` is a price in their unit.
    """
    found = torch.tensor(scored.margins, dtype=torch.float64)
    points = {f"{percent} %": found.quantile(percent / 100).item() for percent in (5, 25, 50, 75, 95)}
    return points | {
        "mean": statistics.fmean(scored.margins),
        "scale": scored.scale,
    }


def by_length(scored: ScoredPairs) -> Record:
    """Accuracy where the chosen response is shorter, similar or longer, and the correlation of score and length.

    Lengths are in characters; two are similar if the shorter one has at least 75 % of the longer one's. A reward that
    follows length is good in one bucket and bad in the other.
    """
    buckets: dict[str, list[int]] = {"chosen is shorter": [], "similar": [], "chosen is longer": []}
    for at, pair in enumerate(scored.pairs):
        ours, theirs = len(pair.chosen), len(pair.rejected)
        similar = min(ours, theirs) >= SIMILAR * max(ours, theirs)
        buckets["similar" if similar else "chosen is shorter" if ours < theirs else "chosen is longer"].append(at)
    rows = []
    for name, members in buckets.items():
        if members:
            right = share([float(scored.margins[at] > 0) for at in members], [scored.prompts[at] for at in members])
            rows.append(
                {"lengths": name, "pairs": right["count"], "accuracy": right["share"], "95 %": right["interval_95"]}
            )
    return {"length_correlation": _agreement(scored).get("length_correlation"), "buckets": rows}


def baselines(scored: ScoredPairs, seed: int) -> Record:
    """Accuracy of "the longer one" and of a bag of words, and how often the reward agrees with them.

    ``the longer one`` prefers the response with more characters, on all pairs. The bag of words is fitted on the pairs of one
    half of the prompts and tested on those of the other half, beside the reward; a tie is half right. A reward that is no
    better has learned no more than that.
    """
    longer = [float(len(pair.chosen) - len(pair.rejected)) for pair in scored.pairs]
    rows = [_beside("the longer one", longer, scored, range(len(longer)))]
    keys = sorted({prompt_key(prompt.prompt) for prompt in scored.prompts})
    random.Random(f"halves {seed}").shuffle(keys)
    fitted = set(keys[: len(keys) // 2])
    train = [at for at, prompt in enumerate(scored.prompts) if prompt_key(prompt.prompt) in fitted]
    test = [at for at in range(len(longer)) if at not in set(train)]
    if train:
        values = bag_of_words([scored.pairs[at] for at in train], [scored.pairs[at] for at in test])
        rows.append(_beside("a bag of words", values, scored, test))
    return {"baselines": rows}


def _beside(name: str, baseline: Sequence[float], scored: ScoredPairs, rows: Sequence[int]) -> Record:
    ours = [scored.margins[at] for at in rows]
    nothing = [0.0] * len(ours)
    same = [float((a > 0) == (b > 0)) for a, b in zip(ours, baseline, strict=True) if a and b]
    return {
        "baseline": name,
        "pairs": len(ours),
        "its accuracy": statistics.fmean(wins(baseline, nothing)),
        "the reward's": statistics.fmean(wins(ours, nothing)),
        "same order": statistics.fmean(same) if same else None,
    }


def bag_of_words(train: Sequence[ChosenRejected], test: Sequence[ChosenRejected]) -> list[float]:
    """Margins of a linear reward on counts of words that was fitted on other pairs.

        w = argmin mean softplus(-w . (counts(chosen) - counts(rejected))) + 0.005 |w|^2

    The problem is convex, so the result does not depend on where it starts. Words that only ``test`` has count 0.
    """
    known = sorted({word for pair in train for text in (pair.chosen, pair.rejected) for word in WORDS.findall(text)})
    places = {word: at for at, word in enumerate(known)}

    def differences(pairs: Sequence[ChosenRejected]) -> torch.Tensor:
        rows = torch.zeros(len(pairs), len(known) + 1)
        for row, pair in zip(rows, pairs, strict=True):
            for text, sign in ((pair.chosen, 1), (pair.rejected, -1)):
                for word, count in Counter(WORDS.findall(text)).items():
                    row[places.get(word, -1)] += sign * count
        return rows[:, :-1]

    x, weights = differences(train), torch.zeros(len(known), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.softplus(-x @ weights).mean() + 0.005 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found: list[float] = (differences(test) @ weights.detach()).tolist()
    return found


def ensemble(scored: ScoredPairs, others: Sequence[tuple[str, ScoredPairs]]) -> Record:
    """How often each other reward orders a pair in another way, a tie one half, and the correlation of both margins."""
    rows = []
    for name, other in others:
        apart = [abs(a - b) for a, b in zip(*(wins(one.chosen, one.rejected) for one in (scored, other)), strict=True)]
        against = share(apart, scored.prompts)
        constant = any(len(set(one.margins)) < 2 for one in (scored, other))
        rows.append(
            {
                "reward": name,
                "its accuracy": accuracy(other)["accuracy"],
                "other order": against["share"],
                "95 %": against["interval_95"],
                "correlation": None if constant else statistics.correlation(scored.margins, other.margins),
            }
        )
    return {"members": rows}


def chrf(text: str, reference: str) -> float:
    """Character n-gram F-score of a text against a reference, from 0 to 1 (Popovic 2015, chrF2, for one sentence).

        F = (1 + beta^2) P R / (beta^2 P + R)        beta = 2

    P and R are the means over n = 1 to 6 of the shares of n-grams of the text that the reference has, and the other way
    round; white space is left out, and n that are longer than one of both texts are too.
    """
    ours, theirs = ("".join(one.split()) for one in (text, reference))
    longest = min(CHRF_LONGEST, len(ours), len(theirs))
    if not longest:
        return float(ours == theirs)
    precisions, recalls = [], []
    for n in range(1, longest + 1):
        a, b = (Counter(one[at : at + n] for at in range(len(one) - n + 1)) for one in (ours, theirs))
        common = sum((a & b).values())
        precisions.append(common / a.total())
        recalls.append(common / b.total())
    p, r = statistics.fmean(precisions), statistics.fmean(recalls)
    return (1 + CHRF_BETA**2) * p * r / (CHRF_BETA**2 * p + r) if p + r else 0.0


def _agreement(scored: ScoredPairs) -> dict[str, float]:
    return agreement(
        [(0, 1)] * len(scored.pairs),
        list(zip(scored.chosen, scored.rejected, strict=True)),
        [(len(pair.chosen), len(pair.rejected)) for pair in scored.pairs],
    )
