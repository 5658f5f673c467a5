"""Checks of a reward on responses that the policy, as it starts, has just written."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from heedful.core.agreement import correlation
from heedful.data.chat import Renderer
from heedful.doctor.findings import Finding, ending, finding
from heedful.rewards import Reward
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.models import ModelReward
from heedful.rewards.results import OneScore, Problem, Remote
from heedful.rewards.scoring import call_rewards, sample
from heedful.training.thresholds import (
    FEWEST,
    LENGTH_ALONE,
    SLOW_SECONDS,
    SLOW_SHARE,
    SPACE_SIZE,
)
from heedful.types import Completion


@dataclass(frozen=True)
class RewardScores:
    """What one reward gave to the sampled responses."""

    reward: Reward
    scores: list[OneScore | Problem]
    seconds: float

    @property
    def totals(self) -> list[tuple[float, int]]:
        """The scores that are numbers, dense ones summed, each with its row."""
        return [
            (float(sum(one)) if isinstance(one, list) else float(one), row)
            for row, one in enumerate(self.scores)
            if one is not None and not isinstance(one, Problem)
        ]


def score_each(rewards: Sequence[Reward], completions: Sequence[Completion]) -> list[RewardScores]:
    """Call each reward by itself and take its time. Raises RewardError if one cannot be called at all."""
    found = []
    for reward in rewards:
        started = time.perf_counter()
        ((scores, _),) = call_rewards([(reward.name, reward.function)], completions)
        found.append(RewardScores(reward, scores, time.perf_counter() - started))
    return found


def fails(scored: RewardScores, completions: Sequence[Completion], max_failed: float) -> Finding | None:
    """On how many responses does a reward fail?"""
    failed = [row for row, one in enumerate(scored.scores) if isinstance(one, Problem)]
    if not failed:
        return None
    share = len(failed) / len(scored.scores)
    return finding(
        "reward-fails",
        "fail" if share > max_failed else "warn",
        f"{scored.reward.name} fails on {len(failed)} of {len(scored.scores)} responses; {max_failed:.0%} may fail",
        f"it {scored.scores[failed[0]]}; for {sample(completions[failed[0]])}",
    )


def constant(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Do all responses have the same score? Of a reward model different ones never do, if its head was trained."""
    totals = [total for total, _ in scored.totals]
    different = {(completions[row].prompt.source, completions[row].response) for _, row in scored.totals}
    if len(different) < FEWEST or len(set(totals)) > 1:
        return None
    return finding(
        "reward-constant",
        "fail" if isinstance(scored.reward.function, ModelReward) else "warn",
        f"{scored.reward.name} gives all {len(totals)} sampled responses the score {totals[0]:g}",
        "a task that this policy never solves looks the same"
        if not isinstance(scored.reward.function, ModelReward)
        else "a reward model reads each response, so its scores differ at least by rounding",
    )


def length_alone(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Does the score depend on length alone, in tokens or in characters?"""
    totals = [total for total, _ in scored.totals]
    if len(totals) < FEWEST:
        return None
    lengths = {
        "tokens": [len(completions[row].ids) for _, row in scored.totals],
        "characters": [len(completions[row].response) for _, row in scored.totals],
    }
    by_unit = {unit: rank_correlation(totals, of_unit) or 0.0 for unit, of_unit in lengths.items()}
    unit, value = max(by_unit.items(), key=lambda item: abs(item[1]))
    if abs(value) < LENGTH_ALONE:
        return None
    best, worst = totals.index(max(totals)), totals.index(min(totals))
    return finding(
        "reward-length",
        "warn",
        f"{scored.reward.name} orders responses by their length: rank correlation {value:+.2f} with their {unit}",
        f"best of {len(totals)} ({totals[best]:.3g}) has {lengths[unit][best]} {unit}, worst ({totals[worst]:.3g}) "
        f"{lengths[unit][worst]}",
    )


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rho: Pearson's correlation of ranks, equal values sharing their mean rank; None if all are equal."""
    return correlation(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def white_space(scored: RewardScores, completions: Sequence[Completion], renderer: Renderer) -> Finding | None:
    """How far do scores move with a space before a response and a line break behind it?

    A server or judge is not asked again: that may cost money.
    """
    function = scored.reward.function
    is_on_a_server = isinstance(function, Remote) and not isinstance(function, FunctionProcess)
    if is_on_a_server or len(scored.totals) < FEWEST:
        return None
    spaced = [_spaced(completion, renderer) for completion in completions]
    before = {row: total for total, row in scored.totals}
    after = {row: total for total, row in score_each([scored.reward], spaced)[0].totals}
    moves = {row: abs(after[row] - before[row]) for row in before.keys() & after.keys()}
    spread = statistics.pstdev(before.values())
    if not moves or spread == 0 or statistics.fmean(moves.values()) <= SPACE_SIZE * spread:
        return None
    row = max(moves, key=moves.__getitem__)
    return finding(
        "reward-white-space",
        "warn",
        f"{scored.reward.name} moves by {statistics.fmean(moves.values()):.2g} when only white space changes, and scores of "
        f"different responses spread by {spread:.2g}",
        f"{before[row]:.3g} for {completions[row].response[:60]!r}, {after[row]:.3g} with a space before and a line break "
        "behind it",
    )


def _spaced(completion: Completion, renderer: Renderer) -> Completion:
    ids = [*renderer.encoder.within(" "), *completion.ids, *renderer.encoder.within("\n")]
    return replace(completion, response=f" {completion.response}\n", ids=ids)


@torch.no_grad()
def reads_early(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Does the last token of a finished response change nothing in a reward model's score? Encoders read no end, and a score
    that is always the same is another fault."""
    reward = scored.reward.function
    finished = [completion for completion in completions if not completion.truncated][:FEWEST]
    if not isinstance(reward, ModelReward) or reward.model.reads is None or not finished:
        return None
    rows = [
        reward.inputs.encode(completion.prompt.prompt, completion.response, max_length=reward.model.max_length)
        for completion in finished
    ]
    shorter = [{"input_ids": row["input_ids"][:-1]} for row in rows]
    scores, without = reward.model(rows), reward.model(shorter)
    if not torch.allclose(scores, without, rtol=1e-5, atol=1e-6) or len(set(scores.tolist())) == 1:
        return None
    ids = rows[0]["input_ids"]
    return finding(
        "score-position",
        "warn",
        f"{scored.reward.name} gives the same score without the last token of each of {len(rows)} responses",
        f"the texts end with {ending(reward.inputs.tokenizer, ids)}; {float(scores[0]):.4g} and {float(without[0]):.4g}",
    )


def slow(scored: RewardScores, *, responses: int, step_seconds: float) -> Finding | None:
    """Does a reward take most of a step of so many responses?"""
    seconds = scored.seconds * responses / max(1, len(scored.scores))
    if seconds < SLOW_SECONDS or seconds < SLOW_SHARE * step_seconds or not math.isfinite(seconds):
        return None
    return finding(
        "reward-slow",
        "warn",
        f"{scored.reward.name} takes {seconds:.1f} s of a step of {step_seconds:.1f} s",
        f"{scored.seconds:.2f} s for {len(scored.scores)} responses, and a step has {responses}",
    )
