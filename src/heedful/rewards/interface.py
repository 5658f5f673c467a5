"""The interface that all rewards share, and the checks on what they return.

A reward is a function ``reward(prompts, completions, completion_ids=..., truncated=..., **columns)`` that returns one
score per response; this is the signature of TRL's reward functions. Prompts and completions are strings if the prompt is raw
text, and lists of ``{"role": ..., "content": ...}`` if it is a conversation. ``thinking_parts`` and ``answer_parts`` are what
stands in ``<think>`` and after it. ``columns`` are the other fields of the prompt's record. A function needs to name only the
arguments that it uses. The score None means "does not apply to this response". A list of
numbers, one for each of a response's ``completion_ids``, is a dense score.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

from heedful.configs.scoring import Combination
from heedful.errors import RewardError
from heedful.rewards.calling import as_messages, call_rewards, sample
from heedful.rewards.combine import combine_scores, shares
from heedful.rewards.returned import Measured, OfBeginning, OneScore, Problem, RewardFunction
from heedful.types import Completion

__all__ = ["Ensemble", "Reward", "RewardFunction", "Scores", "as_messages", "score", "score_tokens"]


@dataclass(frozen=True)
class Reward:
    """A reward function, its name in metrics and messages, and the weight that multiplies its scores."""

    name: str
    function: RewardFunction
    weight: float = 1.0


@dataclass(frozen=True)
class Ensemble(Sequence[Reward]):
    """Rewards and how their weighted scores are combined (`heedful.rewards.combine`). A plain list of rewards is summed."""

    rewards: tuple[Reward, ...]
    combine: Combination = "sum"
    std_coef: float = 1.0
    """How many standard deviations ``mean-std`` subtracts."""
    max_failed: float = 0.0
    """The largest share of responses on which a reward may fail. 0 makes every failure an error."""
    told: set[str] = field(default_factory=set, compare=False, repr=False)
    """What failed calls gave as their reason, so that each is reported once."""

    @overload
    def __getitem__(self, index: int) -> Reward: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Reward]: ...

    def __getitem__(self, index: int | slice) -> Reward | Sequence[Reward]:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class Scores:
    """The scores that rewards gave to responses."""

    totals: list[float]
    """The combined score of each response; a dense one is summed over its tokens. NaN if a reward failed on it."""
    tokens: list[list[float]] | None
    """The part of each total that belongs to tokens: one number for each of a response's ids. None if no reward is dense."""
    means: dict[str, float]
    """Mean score of each reward by its name, before weighting, over the responses to which it applies."""
    failed: tuple[int, ...] = ()
    """The responses without a score, because a reward failed on them. They have no part in ``means``."""
    unread: tuple[int, ...] = ()
    """The responses of which a reward model could read only the beginning."""
    note: str | None = None
    """What went wrong, if anything that was not reported before."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """What each reward by its name gave each response, before weighting; None if it does not apply, or failed."""
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics that rewards have of their own calls, such as the tokens that a judge read."""

    @property
    def scored(self) -> list[int]:
        """The responses that have a score."""
        failed = set(self.failed)
        return [row for row in range(len(self.totals)) if row not in failed]

    def without_failed(self) -> "Scores":
        """The scores of the responses that have one."""
        tokens = None if self.tokens is None else [self.tokens[row] for row in self.scored]
        totals = [self.totals[row] for row in self.scored]
        parts = {name: [column[row] for row in self.scored] for name, column in self.parts.items()}
        unread = tuple(at for at, row in enumerate(self.scored) if row in self.unread)
        return replace(self, totals=totals, tokens=tokens, parts=parts, failed=(), unread=unread)


def score(rewards: Sequence[Reward], completions: Sequence[Completion]) -> tuple[list[float], dict[str, float]]:
    """Score completions as `score_tokens` does, with every failure an error.

    Returns the total of each completion and the mean of each reward by name.
    """
    scores = score_tokens(replace(_ensemble(rewards), max_failed=0.0), completions)
    return scores.totals, scores.means


def score_tokens(rewards: Sequence[Reward], completions: Sequence[Completion]) -> Scores:
    """Score each completion with all rewards and combine the scores.

    A reward that returns None for a response is left out of that response's combination. A response on which a reward fails
    (it raises, is stopped, crashes, or returns something that is not a finite number) or to which none applies has no score:
    never 0, but NaN in ``totals``, and its row is in ``failed``.

    Args:
        rewards: rewards whose scores are summed, or an `Ensemble`, which says how to combine them and how many may fail.
        completions: the responses to score.

    Raises RewardError, naming the reward and a sample, if more fail than ``max_failed`` allows, or a reward needs a column
    that is missing, or does not return one entry per response.
    """
    ensemble = _ensemble(rewards)
    called = call_rewards([(reward.name, reward.function) for reward in rewards], completions)
    failures = _failures(rewards, [column for column, _ in called], completions)
    note = _check(ensemble, failures, len(completions))
    recovered = [
        _Failure(f"reward {reward.name} {first}", f"; for {sample(completions[0])}", first.cause)
        for reward, (_, first) in zip(rewards, called, strict=True)
        if first is not None
    ]
    if recovered and not failures:
        note = _check_recovered(ensemble, recovered[0])
    columns = [[None if isinstance(one, Problem) else one for one in column] for column, _ in called]
    parts = {r.name: [None if one is None else _total(one) for one in c] for r, c in zip(rewards, columns, strict=True)}
    means = {}
    for reward, column in zip(rewards, columns, strict=True):
        applied = [_total(one) for row, one in enumerate(column) if one is not None and row not in failures]
        if applied:
            means[reward.name] = sum(applied) / len(applied)
    is_dense = any(isinstance(one, list) for column in columns for one in column)
    totals, tokens = [], []
    for row, completion in enumerate(completions):
        applied_here = [(r.weight, c[row]) for r, c in zip(rewards, columns, strict=True) if c[row] is not None]
        if row in failures:
            totals.append(math.nan)
            tokens.append([math.nan] * len(completion.ids))
            continue
        weighted = [weight * _total(one) for weight, one in applied_here]
        totals.append(combine_scores(weighted, ensemble.combine, std_coef=ensemble.std_coef))
        if is_dense:
            placed = [0.0] * len(completion.ids)
            for share, (weight, one) in zip(shares(weighted, ensemble.combine), applied_here, strict=True):
                if isinstance(one, list):
                    placed = [sum_so_far + share * weight * x for sum_so_far, x in zip(placed, one, strict=True)]
            tokens.append(placed)
    return Scores(
        totals,
        tokens if is_dense else None,
        means,
        tuple(failures),
        tuple(row for row in range(len(completions)) if any(isinstance(c[row], OfBeginning) for c in columns)),
        note,
        parts=parts,
        measured=_measured(rewards),
    )


def _measured(rewards: Sequence[Reward]) -> dict[str, float]:
    """What rewards measured of their last calls; the names of several have the reward's at their end."""
    functions: dict[str, Any] = {reward.name: reward.function for reward in rewards}
    measured = {name: function.measured for name, function in functions.items() if isinstance(function, Measured)}
    return {
        f"{metric}/{name}" if len(measured) > 1 else metric: value
        for name, own in measured.items()
        for metric, value in own.items()
    }


class _Failure(NamedTuple):
    """Why a response has no score."""

    reason: str
    where: str
    """The sample, as the end of the sentence."""
    cause: BaseException | None


def _failures(
    rewards: Sequence[Reward], columns: Sequence[Sequence[OneScore | Problem]], completions: Sequence[Completion]
) -> dict[int, _Failure]:
    """The rows without a score, each with the first reward that failed on it."""
    failures = {}
    for row, completion in enumerate(completions):
        problems = [
            _Failure(f"reward {reward.name} {one}", f"; for {sample(completion)}", one.cause)
            for reward, one in zip(rewards, (column[row] for column in columns), strict=True)
            if isinstance(one, Problem)
        ]
        if problems:
            failures[row] = problems[0]
        elif all(column[row] is None for column in columns):
            names = ", ".join(reward.name for reward in rewards)
            reason = f"no reward applies (all of {names} returned None)"
            failures[row] = _Failure(reason, f" to {sample(completion)}", None)
    return failures


def _check(ensemble: Ensemble, failures: Mapping[int, _Failure], count: int) -> str | None:
    """Raise RewardError if too many responses have no score. Returns what is to be said of those few, if it is new."""
    if not failures:
        return None
    first = failures[min(failures)]
    if len(failures) / count > ensemble.max_failed:
        allowed = (
            f"{len(failures)} of {count} responses have no score, more than --max-failed-rewards {ensemble.max_failed:g} "
            "allows; correct the reward, or raise it. The first: "
        )
        raise RewardError((allowed if ensemble.max_failed else "") + first.reason + first.where) from first.cause
    new = [failure for failure in failures.values() if failure.reason not in ensemble.told]
    ensemble.told.update(failure.reason for failure in new)
    if not new:
        return None
    return f"{len(failures)} of {count} responses have no score and are left out; {new[0].reason}{new[0].where}"


def _check_recovered(ensemble: Ensemble, failure: _Failure) -> str | None:
    """What is to be said of a call that failed, though calls with fewer responses did not. Raises RewardError if none may."""
    if not ensemble.max_failed:
        raise RewardError(failure.reason + failure.where) from failure.cause
    if failure.reason in ensemble.told:
        return None
    ensemble.told.add(failure.reason)
    return f"{failure.reason}; called again with fewer responses at a time, it scored all of them"


def _ensemble(rewards: Sequence[Reward]) -> Ensemble:
    return rewards if isinstance(rewards, Ensemble) else Ensemble(tuple(rewards))


def _total(one: OneScore) -> float:
    assert one is not None
    return float(sum(one)) if isinstance(one, list) else float(one)
