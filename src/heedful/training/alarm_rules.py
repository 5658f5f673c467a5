"""What alarms see: functions of the metrics of a run so far, which return what is wrong, or None.

They are silent unless they are sure. Their thresholds are in `heedful.training.thresholds`; docs/clinic.md measures how
often they are right. What each means, and what to do about it, is in `heedful.training.alarms`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, variance
from typing import NamedTuple

from heedful.training.thresholds import (
    CHOSEN_NATS,
    CHOSEN_STEPS,
    COLLAPSE,
    COLLAPSE_STEPS,
    CUT,
    DEAD,
    DEAD_AFTER,
    DEAD_STEPS,
    DIVERGES,
    DIVERGES_STEPS,
    DRIFT,
    DRIFT_STEPS,
    DRIFT_TOKENS,
    ENDS_LOST,
    ENDS_STEPS,
    FALL,
    FALL_ERRORS,
    FALL_STEPS,
    JUDGE_EVALUATIONS,
    JUDGE_SHARE,
    JUMP,
    JUMP_AFTER,
    KL_MOST,
    KL_PER_TOKEN,
    KL_STEPS,
    LIGHT,
    LIGHT_STEPS,
    LOOPS,
    LOOPS_MORE,
    LOOPS_STEPS,
    MISMATCH_LEAST,
    MISMATCH_MOST,
    MISMATCH_STEPS,
    MISMATCH_TIMES,
    REFERENCE_SHARE,
    REFERENCE_STEPS,
    SKIPPED,
    SKIPPED_OF,
    STILL,
    STILL_STEPS,
    TAIL,
    TAIL_STEPS,
    TIED,
    TIED_STEPS,
)

FIRST, RECENT = 10, 40
"""How many of a run's first and of its latest values alarms can see."""
LEAST, LEAST_EQUAL, LEAST_GROUPS = 8, 4, 2
"""A value is a mean over at least so many responses (for scores that are equal: so many), or groups of them: of one step, or
of several that have fewer. An evaluation counts from as many prompts as groups."""
WATCHED = (
    "rollout/eos_frac", "rollout/response_length", "rollout/repeated_frac", "rollout/unfilled_frac", "rollout/masked_frac",
    "rollout/sampler_mismatch", "rollout/staleness_mean", "reward/score_mean", "reward/score_std", "reward/tied_frac",
    "reward/unread_frac", "reward/chosen", "reference/kl", "policy/entropy", "policy/ratio_max", "policy/approx_kl",
    "value/explained_variance", "importance/weight_mean", "optimizer/skipped_steps", "rollout/cut_by_turns_frac",
)  # fmt: skip
"""The metrics of a step that alarms read."""
JUDGED = ("eval/judge_mean", "eval/score_mean")
"""Those of an evaluation."""
MEANS = (
    "rollout/eos_frac", "rollout/response_length", "rollout/repeated_frac", "rollout/masked_frac",
    "rollout/sampler_mismatch", "reward/score_mean", "reward/score_std", "reference/kl", "policy/entropy",
    "policy/approx_kl", "value/explained_variance", "importance/weight_mean",
)  # fmt: skip
"""Metrics of a step that are means over its responses. ``reward/tied_frac`` is one over its groups."""


@dataclass(frozen=True)
class Limits:
    """What a run's settings say that alarms compare metrics with."""

    steps: int = 0
    """Of the whole run."""
    learning_rate: float = 0.0
    max_new_tokens: int | None = None
    """Where responses are cut; None if the policy does not choose where they end."""
    max_kl: float | None = None
    async_steps: int = 0
    filters_on_servers: bool = False
    """Servers sample with top-k or top-p: their log-probs are of what is kept, and so differ from the policy's."""
    beta: float | None = None
    """Of DPO: implicit rewards are this times a log-ratio."""
    responses: int = 64
    """Of a step."""
    groups: int = 64
    """Of a step: of responses that are compared with each other."""
    held_out: int = 64
    """Prompts of an evaluation."""


@dataclass
class History:
    """The metrics that alarms read. A metric that is NaN was not measured."""

    limits: Limits
    step: int = 0
    first: list[dict[str, float]] = field(default_factory=list)
    """The first steps: `FIRST` values."""
    recent: list[dict[str, float]] = field(default_factory=list)
    """The last steps: `RECENT` values."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Of the last `RECENT` evaluations."""
    largest_scores: float = 0.0
    """The largest root mean square of the scores of a step (or of as many `steps` as scores are judged over) before the last
    one."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what a step measured."""
        kept = {name: float(metrics[name]) for name in WATCHED if name in metrics}
        steps = self.steps("reward/score_mean", 1)
        self.step, self.first = step, [*self.first, kept][: FIRST * steps]
        self.recent = [*self.recent, kept][-RECENT * steps :]
        if len(self.recent) >= 2 * steps:
            self.largest_scores = max(self.largest_scores, score_size(self.recent[-2 * steps : -steps]))

    def add_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add what an evaluation measured."""
        kept = {name: float(metrics[name]) for name in JUDGED if name in metrics}
        self.evaluations = [*self.evaluations, kept][-RECENT:]

    def steps(self, name: str, count: int) -> int:
        """How many steps ``count`` values of a metric are of."""
        if name == "reward/tied_frac":
            return count * math.ceil(LEAST_GROUPS / self.limits.groups)
        least = {"reward/score_std": LEAST_EQUAL}.get(name, LEAST if name in MEANS else 1)
        return count * math.ceil(least / self.limits.responses)

    def last(self, name: str, count: int) -> list[float]:
        """The last ``count`` values of a metric, the oldest first; none if fewer are there."""
        steps = self.steps(name, count)
        return _means(_measured(self.recent, name)[-steps:], steps, count)

    def start(self, name: str, count: int) -> list[float]:
        """The first ``count`` values of a metric; none if fewer are there."""
        steps = self.steps(name, count)
        return _means(_measured(self.first, name)[:steps], steps, count)


class Symptom(NamedTuple):
    """What an alarm saw."""

    what: str
    """In words, as the beginning of a message."""
    evidence: dict[str, float]
    """The numbers, by the names of metrics."""


def _measured(steps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [value for step in steps if not math.isnan(value := step.get(name, math.nan))]


def _means(values: Sequence[float], steps: int, count: int) -> list[float]:
    """``count`` means over equal parts of ``steps`` values; none if fewer are there."""
    size = steps // count
    return [fmean(values[i : i + size]) for i in range(0, steps, size)] if len(values) == steps else []


def score_size(steps: Sequence[Mapping[str, float]]) -> float:
    """Root mean square of the scores of some steps."""
    squares = (step.get(f"reward/score_{which}", 0.0) ** 2 for step in steps for which in ("mean", "std"))
    return math.sqrt(math.fsum(squares) / len(steps))


# The responses -----------------------------------------------------------------------------------------------------------


def end_token_lost(history: History) -> Symptom | None:
    """Responses no longer end by themselves, as they did at first."""
    name = "rollout/eos_frac"
    start, last = history.start(name, ENDS_STEPS), history.last(name, ENDS_STEPS)
    if history.limits.max_new_tokens is None or not start or not last or fmean(start) - max(last) < ENDS_LOST:
        return None
    return Symptom(
        f"{last[-1]:.0%} of the responses end by themselves; in the first {history.steps(name, ENDS_STEPS)} steps it was "
        f"{fmean(start):.0%}",
        {name: last[-1], f"{name} at first": fmean(start)},
    )


def responses_cut(history: History) -> Symptom | None:
    """A tenth of the responses run into the limit of their length."""
    name, limit = "rollout/eos_frac", history.limits.max_new_tokens
    last, responses = history.last(name, 1), history.steps(name, 1) * history.limits.responses
    if limit is None or not last or 1 - last[0] < max(CUT, 1.5 / responses):
        return None
    return Symptom(
        f"{1 - last[0]:.0%} of the responses were cut at --max-new-tokens {limit}, before their end, and are scored as "
        "unfinished texts",
        {name: last[0]},
    )


def turns_cut(history: History) -> Symptom | None:
    """Episodes no longer end before the limit of turns, as they did at first."""
    name = "rollout/cut_by_turns_frac"
    start, last = history.start(name, ENDS_STEPS), history.last(name, ENDS_STEPS)
    if not start or not last or min(last) - fmean(start) < ENDS_LOST:
        return None
    return Symptom(
        f"--max-turns ended {last[-1]:.0%} of the episodes; in the first {history.steps(name, ENDS_STEPS)} steps it was "
        f"{fmean(start):.0%}",
        {name: last[-1], f"{name} at first": fmean(start)},
    )


def length_drift(history: History) -> Symptom | None:
    """Responses have become much longer or shorter."""
    name = "rollout/response_length"
    start, last = history.start(name, 3), history.last(name, DRIFT_STEPS)
    if not start or not last:
        return None
    first = fmean(start)
    is_longer, is_shorter = min(last) >= DRIFT * first, max(last) <= first / DRIFT
    if not (is_longer or is_shorter) or min(abs(value - first) for value in last) < DRIFT_TOKENS:
        return None
    return Symptom(
        f"responses have {last[-1]:.3g} tokens on average; in the first {history.steps(name, 3)} steps they had {first:.3g}",
        {name: last[-1], f"{name} at first": first},
    )


def repetition(history: History) -> Symptom | None:
    """Responses repeat themselves, and did not at first."""
    name = "rollout/repeated_frac"
    start, last = history.start(name, 3), history.last(name, LOOPS_STEPS)
    if not start or not last or min(last) < max(LOOPS, fmean(start) + LOOPS_MORE):
        return None
    return Symptom(
        f"{last[-1]:.0%} of the responses' 4-grams repeat; in the first {history.steps(name, 3)} steps it was "
        f"{fmean(start):.0%}",
        {name: last[-1], f"{name} at first": fmean(start)},
    )


# The policy --------------------------------------------------------------------------------------------------------------


def entropy_collapse(history: History) -> Symptom | None:
    """The policy has become nearly deterministic."""
    name = "policy/entropy"
    start, last = history.start(name, 3), history.last(name, COLLAPSE_STEPS)
    if not start or not last or max(last) > COLLAPSE * fmean(start):
        return None
    return Symptom(
        f"policy/entropy is {last[-1]:.2g} nats per token; in the first {history.steps(name, 3)} steps it was "
        f"{fmean(start):.2g}",
        {name: last[-1], f"{name} at first": fmean(start)},
    )


def kl_budget(history: History) -> Symptom | None:
    """The policy is too far from its reference."""
    name, limit = "reference/kl", history.limits.max_kl
    last = history.last(name, KL_STEPS)
    if not last:
        return None
    if limit is not None:
        if min(last) <= limit:
            return None
        return Symptom(
            f"reference/kl, {last[-1]:.4g} nats per response at step {history.step}, has been above --max-kl {limit:g} in "
            f"{history.steps(name, KL_STEPS)} steps in a row: the policy is too far from its reference",
            {name: last[-1], "max_kl": limit},
        )
    lengths = history.last("rollout/response_length", KL_STEPS)
    if not lengths or min(last) <= max(KL_MOST, KL_PER_TOKEN * max(lengths)):
        return None
    return Symptom(
        f"reference/kl is {last[-1]:.4g} nats per response of {lengths[-1]:.3g} tokens: the policy is far from its reference",
        {name: last[-1], "rollout/response_length": lengths[-1]},
    )


def ratio_tail(history: History) -> Symptom | None:
    """Some tokens' probability ratios are far from 1 in step after step."""
    name = "policy/ratio_max"
    last = history.last(name, TAIL_STEPS)
    if not last or min(last) < TAIL:
        return None
    return Symptom(f"policy/ratio_max is {last[-1]:.3g}: an update moves single tokens too far", {name: last[-1]})


def stale_sampler(history: History) -> Symptom | None:
    """What samples is not the policy that learns."""
    name, ahead = "rollout/staleness_mean", history.limits.async_steps
    old = history.last(name, MISMATCH_STEPS)
    if old and min(old) > ahead:
        return Symptom(
            f"responses come from weights {old[-1]:.3g} steps old, and --async-steps is {ahead}", {name: old[-1]}
        )
    name = "rollout/sampler_mismatch"
    start, last = history.start(name, 1), history.last(name, MISMATCH_STEPS)
    if ahead or not start or not last:
        return None
    most = math.inf if history.limits.filters_on_servers else MISMATCH_MOST
    if min(last) < most and min(last) < max(MISMATCH_LEAST, MISMATCH_TIMES * start[0]):
        return None
    return Symptom(
        f"rollout/sampler_mismatch is {last[-1]:.2g} nats per token (at first {start[0]:.2g}): the sampler's "
        "log-probabilities are not those of the policy that learns",
        {name: last[-1], f"{name} at first": start[0]},
    )


def reference_moves(history: History) -> Symptom | None:
    """Updates move the policy, but not away from its reference: the reference moves with it."""
    kl = history.last("reference/kl", REFERENCE_STEPS)
    moves = history.last("policy/approx_kl", REFERENCE_STEPS)
    lengths = history.last("rollout/response_length", REFERENCE_STEPS)
    if history.step <= REFERENCE_STEPS or not kl or not moves or not lengths:
        return None
    moved = fmean(move * length for move, length in zip(moves, lengths, strict=True))
    size = fmean(map(abs, kl))
    if moved <= 0 or size > REFERENCE_SHARE * moved:
        return None
    return Symptom(
        f"reference/kl is {size:.1g} nats per response, but a single update moves the policy by {moved:.1g}",
        {"reference/kl": size, "policy/approx_kl": fmean(moves)},
    )


# The critic --------------------------------------------------------------------------------------------------------------


def _scores_differ(history: History, count: int) -> bool:
    """Whether the scores of each of the last steps differ. Returns of equal scores, or of one, are noise, which says
    nothing of a critic."""
    spreads = history.last("reward/score_std", count)
    return bool(spreads) and 0.0 not in spreads


def critic_dead(history: History) -> Symptom | None:
    """The critic has learned nothing of the returns."""
    name = "value/explained_variance"
    last = history.last(name, DEAD_STEPS)
    if (
        history.step < DEAD_AFTER
        or not _scores_differ(history, DEAD_STEPS)
        or not last
        or max(last) > DEAD
        or min(last) < -DEAD
    ):
        return None
    return Symptom(
        f"value/explained_variance is {last[-1]:.2g}, and was at most {max(last):.2g} in "
        f"{history.steps(name, DEAD_STEPS)} steps: the critic has learned nothing of the returns",
        {name: last[-1]},
    )


def critic_diverging(history: History) -> Symptom | None:
    """The critic is much worse than a constant."""
    name = "value/explained_variance"
    last = history.last(name, DIVERGES_STEPS)
    if (
        history.step <= DIVERGES_STEPS
        or not _scores_differ(history, DIVERGES_STEPS)
        or not last
        or max(last) > DIVERGES
    ):
        return None
    return Symptom(
        f"value/explained_variance is {last[-1]:.3g}: the values are worse than a constant, and advantages are noise",
        {name: last[-1]},
    )


# The scores --------------------------------------------------------------------------------------------------------------


def scores_tied(history: History) -> Symptom | None:
    """There is nothing to learn from scores that do not differ."""
    name = "reward/tied_frac"
    last, unfilled = history.last(name, TIED_STEPS), history.last("rollout/unfilled_frac", 1)
    if last and fmean(last) > TIED and not any(unfilled):
        which = "each prompt" if min(last) == 1 else f"{fmean(last):.0%} of the prompts"
        return Symptom(
            f"all responses to {which} scored equally in the last {history.steps(name, TIED_STEPS)} steps, which teaches "
            "nothing",
            {name: last[-1]},
        )
    spreads = history.last("reward/score_std", TIED_STEPS)
    means = _measured(history.recent, "reward/score_mean")[-history.steps("reward/score_std", TIED_STEPS) :]
    if not means or not spreads or max(spreads) > 1e-6 * min(map(abs, means)):
        return None
    return Symptom(
        f"all responses of a step scored equally ({means[-1]:.4g}): there is nothing to learn",
        {"reward/score_std": spreads[-1]},
    )


def ties_unfilled(history: History) -> Symptom | None:
    """Dynamic sampling does not find enough prompts."""
    last = history.last("rollout/unfilled_frac", 1)
    if not last or not last[0]:
        return None
    return Symptom(
        "dynamic sampling could not replace all prompts whose responses score equally (rollout/unfilled_frac "
        f"{last[0]:.2g}); they have no gradient",
        {"rollout/unfilled_frac": last[0]},
    )


def scores_jump(history: History) -> Symptom | None:
    """The reward has changed its scale, or was hacked."""
    steps = history.steps("reward/score_mean", 1)
    size = score_size(history.recent[-steps:]) if history.recent else 0.0
    if history.step <= max(JUMP_AFTER, 2 * steps) or not 0 < JUMP * history.largest_scores < size:
        return None
    return Symptom(
        f"the scores are {size / history.largest_scores:.3g} times as large as in any step before (root mean square "
        f"{size:.3g})",
        {"root mean square of the scores": size, "largest before": history.largest_scores},
    )


def scores_unread(history: History) -> Symptom | None:
    """A reward model sees only the beginning of some responses."""
    last = history.last("reward/unread_frac", 1)
    if not last or not last[0]:
        return None
    return Symptom(
        "some responses exceed a reward model's context, so it scored only their beginning (reward/unread_frac)",
        {"reward/unread_frac": last[0]},
    )


def judge_falling(history: History) -> Symptom | None:
    """The reward rises while a judge that the policy does not learn from falls."""
    both = [one for one in history.evaluations if set(JUDGED) <= set(one)]
    if len(both) <= JUDGE_EVALUATIONS or history.limits.held_out < LEAST_GROUPS:
        return None
    before = [one["eval/judge_mean"] for one in both]
    judge, score = ([one[name] for one in both[-JUDGE_EVALUATIONS - 1 :]] for name in JUDGED)
    falls = all(later < earlier for earlier, later in pairwise(judge))
    if not falls or score[-1] <= score[0] or judge[0] - judge[-1] < JUDGE_SHARE * (max(before) - min(before)):
        return None
    return Symptom(
        f"eval/judge_mean fell from {judge[0]:.4g} to {judge[-1]:.4g} in {JUDGE_EVALUATIONS} evaluations, while "
        f"eval/score_mean rose from {score[0]:.4g} to {score[-1]:.4g}: the policy exploits its reward",
        {"eval/judge_mean": judge[-1], "eval/score_mean": score[-1]},
    )


# The updates -------------------------------------------------------------------------------------------------------------


def skipped_updates(history: History) -> Symptom | None:
    """Too many updates are left out for numbers that are not finite."""
    last = [step.get("optimizer/skipped_steps", 0.0) > 0 for step in history.recent[-SKIPPED_OF:]]
    if sum(last) < SKIPPED:
        return None
    return Symptom(
        f"{sum(last)} of the last {len(last)} steps left out an update whose numbers were not finite",
        {"optimizer/skipped_steps": history.recent[-1].get("optimizer/skipped_steps", 0.0)},
    )


def responses_masked(history: History) -> Symptom | None:
    """Nothing is left to learn from."""
    last = history.last("rollout/masked_frac", 1)
    if not last or last[0] < 1:
        return None
    return Symptom(
        "every response was cut at --max-new-tokens, so with --mask-truncated nothing is learned",
        {"rollout/masked_frac": last[0]},
    )


def weights_light(history: History) -> Symptom | None:
    """Importance weights make the gradient next to nothing."""
    name = "importance/weight_mean"
    last = history.last(name, LIGHT_STEPS)
    if not last or max(last) >= LIGHT:
        return None
    return Symptom(
        f"the mean importance weight is below {LIGHT:g} ({name} {last[-1]:.2g}), which shrinks the gradient as much",
        {name: last[-1]},
    )


def nothing_learned(history: History) -> Symptom | None:
    """The policy has hardly moved at the end of its run, or its scores fall."""
    kl = history.last("reference/kl", STILL_STEPS)
    if history.step == history.limits.steps and kl and abs(fmean(kl)) < STILL and reference_moves(history) is None:
        rate = history.limits.learning_rate
        return Symptom(
            f"reference/kl is still near 0 at the end ({fmean(kl):.1g} nats per response in the last "
            f"{history.steps('reference/kl', STILL_STEPS)} steps): the policy has hardly moved, so it has learned next to "
            f"nothing. Raise --learning-rate (it was {rate:g}; try {10 * rate:g}) or --steps",
            {"reference/kl": fmean(kl)},
        )
    start, last = (see("reward/score_mean", FALL_STEPS) for see in (history.start, history.last))
    spreads = [see("reward/score_std", FALL_STEPS) for see in (history.start, history.last)]
    steps = history.steps("reward/score_mean", FALL_STEPS)
    if history.step < 2 * steps or not start or not last or not all(spreads):
        return None
    fall, error = fmean(start) - fmean(last), math.sqrt((variance(start) + variance(last)) / FALL_STEPS)
    if fall <= max(FALL * max(map(fmean, spreads)), FALL_ERRORS * error):
        return None
    return Symptom(
        f"reward/score_mean fell from {fmean(start):.4g} in the first {steps} steps to {fmean(last):.4g} in the last: "
        "the policy learns the opposite of its reward",
        {"reward/score_mean": fmean(last), "reward/score_mean at first": fmean(start)},
    )


def chosen_falling(history: History) -> Symptom | None:
    """DPO makes the chosen responses much less likely too."""
    name, beta = "reward/chosen", history.limits.beta
    last = history.last(name, CHOSEN_STEPS)
    if beta is None or not last or max(last) > -CHOSEN_NATS * beta:
        return None
    return Symptom(
        f"the chosen responses have become less likely by {-last[-1] / beta:.3g} nats each, as the rejected ones have",
        {name: last[-1]},
    )
