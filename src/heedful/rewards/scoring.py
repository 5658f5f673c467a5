"""Score responses with rewards: call each function, find the responses that it fails on, and combine the scores.

A reward is a function ``reward(prompts, completions, completion_ids=..., truncated=..., **columns)`` that returns one
score per response; this is the signature of TRL's reward functions. Prompts and completions are strings if the prompt is raw
text, and lists of ``{"role": ..., "content": ...}`` if it is a conversation. ``thinking_parts`` and ``answer_parts`` are the
texts inside ``<think>`` and after it. ``episodes`` are what was said in turns, if there is an environment
(`heedful.types.Episode`). ``columns`` are the other fields of the prompt's record. A function needs to name only
the arguments that it uses. The score None means "does not apply to this response". A list of numbers, one for each of a
response's ``completion_ids``, is a dense score.
"""

import inspect
import json
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from heedful.background import Background
from heedful.configs.scoring import Combination
from heedful.data.messages import as_dict
from heedful.data.readers import ANSWERS
from heedful.display import counted
from heedful.distributed import ranks
from heedful.errors import HeedfulError, RefusedError, RewardError
from heedful.faults import hit
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.results import (
    CallError,
    Distributed,
    Measured,
    OneScore,
    Problem,
    Remote,
    ResultError,
    RewardFunction,
    Truncated,
    raised,
    read_scores,
)
from heedful.types import Completion, Text

__all__ = ["Ensemble", "Reward", "RewardFunction", "Scores", "score", "score_tokens"]

RESERVED = ("prompts", "completions", "completion_ids", "truncated", "thinking_parts", "answer_parts")
"""Arguments available to every reward function; columns must not have these names."""
MOST_CALLS = 16
"""Maximal calls after a failed one, to find the responses that it fails on; enough to find one in 256."""


@dataclass(frozen=True)
class Reward:
    """A reward function, its name in metrics and messages, and the weight that multiplies its scores."""

    name: str
    function: RewardFunction
    weight: float = 1.0


@dataclass(frozen=True)
class Ensemble(Sequence[Reward]):
    """Rewards with the combination of their weighted scores (`combine_scores`). A plain list of rewards is summed."""

    rewards: tuple[Reward, ...]
    combine: Combination = "sum"
    max_failed: float = 0.0
    """Maximal share of responses on which a reward may fail. 0 makes every failure an error."""
    already_reported: set[str] = field(default_factory=set, compare=False, repr=False)
    """Reasons of failures so far, so that each is reported once."""

    def __getitem__(self, index: Any) -> Any:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class Scores:
    """The scores that rewards gave to responses."""

    totals: list[float]
    """The combined score of each response; a dense one is summed over its tokens. NaN if a reward failed on it."""
    tokens: list[list[float]] | None
    """The dense part of each total: one number for each of a response's ids. None if no reward is dense."""
    means: dict[str, float]
    """Mean score of each reward by its name, before weighting, over the responses to which it applies."""
    failed: tuple[int, ...] = ()
    """The responses without a score, because a reward failed on them. They are not in ``means``."""
    unread: tuple[int, ...] = ()
    """The responses too long for a reward model, which read only their beginning."""
    note: str | None = None
    """A note on failures, if they were not reported before."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Scores of each response by the reward's name, before weighting; None if it does not apply, or failed."""
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics of the rewards' own calls, such as the tokens read by a judge."""

    @property
    def scored(self) -> list[int]:
        """The responses that have a score."""
        failed = set(self.failed)
        return [row for row in range(len(self.totals)) if row not in failed]

    def without_failed(self) -> "Scores":
        """The scores of the responses that have one."""
        return self.select(self.scored)

    def select(self, rows: Sequence[int]) -> "Scores":
        """The scores of these responses, which must all have one; ``means`` and ``measured`` stay those of all responses."""
        tokens = None if self.tokens is None else [self.tokens[row] for row in rows]
        totals = [self.totals[row] for row in rows]
        parts = {name: [column[row] for row in rows] for name, column in self.parts.items()}
        unread = tuple(at for at, row in enumerate(rows) if row in self.unread)
        return replace(self, totals=totals, tokens=tokens, parts=parts, failed=(), unread=unread)


# Scores of several rewards --------------------------------------------------------------------------------------------


def score(rewards: Sequence[Reward], completions: Sequence[Completion]) -> tuple[list[float], dict[str, float]]:
    """Score completions as `score_tokens` does, with every failure an error.

    `heedful.score` does the same for a batch of an engine: it also loads rewards by name, and returns a tensor.

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
        rewards: rewards whose scores are summed, or an `Ensemble` with a combination and a limit of failures.
        completions: the responses to score.

    Raises RewardError, naming the reward and a sample, if more fail than ``max_failed`` allows, or a reward needs a column
    that is missing, or does not return one entry per response.
    """
    ensemble = _ensemble(rewards)
    broken = {row: one.episode.failure for row, one in enumerate(completions) if one.episode and one.episode.failure}
    played = [one for row, one in enumerate(completions) if row not in broken]
    named = [(reward.name, reward.function) for reward in rewards]
    asked: list[Called] = call_rewards(named, played) if played else [([], None)] * len(named)
    called = [(_with_broken(column, broken, len(completions)), first) for column, first in asked]
    failures = _failures(rewards, [column for column, _ in called], completions)
    recovered = [
        _failure(reward, first, completions[0])
        for reward, (_, first) in zip(rewards, called, strict=True)
        if first is not None
    ]
    note = _note(ensemble, failures, recovered, len(completions))
    columns = [[None if isinstance(one, Problem) else one for one in column] for column, _ in called]
    parts = {r.name: [None if one is None else _total(one) for one in c] for r, c in zip(rewards, columns, strict=True)}
    means = {}
    for name, part in parts.items():
        applied = [one for row, one in enumerate(part) if one is not None and row not in failures]
        if applied:
            means[name] = sum(applied) / len(applied)
    is_dense = any(isinstance(one, list) for column in columns for one in column)
    totals, tokens = [], []
    for row, completion in enumerate(completions):
        if row in failures:
            totals.append(math.nan)
            tokens.append([math.nan] * len(completion.ids))
            continue
        applied_here = [(r.weight, c[row]) for r, c in zip(rewards, columns, strict=True) if c[row] is not None]
        weighted = [weight * _total(one) for weight, one in applied_here]
        totals.append(combine_scores(weighted, ensemble.combine))
        if is_dense:
            placed = [0.0] * (len(completion.ids) + 1)
            for share, (weight, one) in zip(shares(weighted, ensemble.combine), applied_here, strict=True):
                if isinstance(one, list):
                    for place, x in enumerate(one):
                        placed[place] += share * weight * x
            tokens.append(placed if placed[-1] else placed[:-1])
    return Scores(
        totals,
        tokens if is_dense else None,
        means,
        tuple(failures),
        tuple(row for row in range(len(completions)) if any(isinstance(c[row], Truncated) for c in columns)),
        note,
        parts=parts,
        measured=ranks.broadcast(_measured(rewards)),
    )


def _with_broken(
    column: Sequence[OneScore | Problem], broken: Mapping[int, str], count: int
) -> list[OneScore | Problem]:
    """The scores of all responses, with a problem for those whose environment failed, which no reward was asked about."""
    given = iter(column)
    return [Problem(broken[row]) if row in broken else next(given) for row in range(count)]


def combine_scores(scores: Sequence[float], how: Combination) -> float:
    """Combine the weighted scores of the rewards that apply to a response into one score.

        sum       s_1 + ... + s_n
        mean      (s_1 + ... + s_n) / n
        min       the smallest
        mean-std  mean - sqrt(mean of (s_i - mean)^2)      population standard deviation

    The last two are conservative: a response must please every member of an ensemble (Coste et al. 2024, section 3, where min
    is worst-case optimisation). They subtract the variance from the mean; heedful subtracts the standard deviation, which has
    the unit of the scores.

    Args:
        scores: one weighted score per reward that applies.
        how: sum, mean, min or mean-std.
    """
    if how == "sum":
        return sum(scores)
    if how == "min":
        return min(scores)
    mean = sum(scores) / len(scores)
    if how == "mean":
        return mean
    return mean - math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))


def shares(scores: Sequence[float], how: Combination) -> list[float]:
    """Return the factor by which each reward's scores per token enter the combined ones.

    ``min`` takes only those of the reward with the smallest score; the means give each reward the same part.
    """
    if how == "sum":
        return [1.0] * len(scores)
    if how == "min":
        smallest = scores.index(min(scores))
        return [float(i == smallest) for i in range(len(scores))]
    return [1.0 / len(scores)] * len(scores)


def _ensemble(rewards: Sequence[Reward]) -> Ensemble:
    return rewards if isinstance(rewards, Ensemble) else Ensemble(tuple(rewards))


def _total(one: OneScore) -> float:
    assert one is not None
    return float(sum(one)) if isinstance(one, list) else float(one)


def _measured(rewards: Sequence[Reward]) -> dict[str, float]:
    """Metrics of the rewards' last calls; with several rewards, the metric's name ends with the reward's."""
    functions: dict[str, Any] = {reward.name: reward.function for reward in rewards}
    measured = {name: function.measured for name, function in functions.items() if isinstance(function, Measured)}
    return {
        f"{metric}/{name}" if len(measured) > 1 else metric: value
        for name, metrics in measured.items()
        for metric, value in metrics.items()
    }


# Failures -------------------------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """The reason why a response has no score, or why a call with several responses failed."""

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
        if completion.episode is not None and completion.episode.failure:
            failures[row] = _Failure(f"environment {completion.episode.failure}", f"; for {sample(completion)}", None)
            continue
        ones = [column[row] for column in columns]
        at = next((i for i, one in enumerate(ones) if isinstance(one, Problem)), None)
        if at is not None:
            failures[row] = _failure(rewards[at], ones[at], completion)
        elif all(one is None for one in ones):
            names = ", ".join(reward.name for reward in rewards)
            reason = f"no reward applies (all of {names} returned None)"
            failures[row] = _Failure(reason, f" to {sample(completion)}", None)
    return failures


def _failure(reward: Reward, problem: Any, completion: Completion) -> _Failure:
    return _Failure(f"reward {reward.name} {problem}", f"; for {sample(completion)}", problem.cause)


def _note(
    ensemble: Ensemble, failures: Mapping[int, _Failure], recovered: Sequence[_Failure], count: int
) -> str | None:
    """A note on responses without a score, or on a failed call that succeeded with fewer responses; None if not new.

    Raises RewardError if more failed than allowed.
    """
    failed = list(failures.values()) or recovered[:1]
    if failed and not ensemble.max_failed:
        raise RewardError(failed[0].reason + failed[0].where) from failed[0].cause
    if len(failures) / count > ensemble.max_failed:
        raise RewardError(
            f"{len(failures)} of {count} responses have no score, more than --max-failed-rewards {ensemble.max_failed:g} "
            f"allows; correct the reward, or raise it. The first: {failed[0].reason}{failed[0].where}"
        ) from failed[0].cause
    new = [failure for failure in failed if failure.reason not in ensemble.already_reported]
    ensemble.already_reported.update(failure.reason for failure in failed)
    if not new:
        return None
    if failures:
        return f"{len(failures)} of {count} responses have no score and are left out; {new[0].reason}{new[0].where}"
    return f"{new[0].reason}; called again with fewer responses at a time, it scored all of them"


def sample(completion: Completion) -> str:
    """A prompt and its response, for messages."""
    prompt = completion.prompt.prompt
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return f"the prompt {text!r:.80} ({completion.prompt.source}), response {completion.response!r:.120}"


# Calls ----------------------------------------------------------------------------------------------------------------

Called = tuple[list[OneScore | Problem], Problem | None]
"""A score or a problem for each response, and the reason if the call with all of them failed."""


def call_rewards(named: Sequence[tuple[str, RewardFunction]], completions: Sequence[Completion]) -> list[Called]:
    """Call several rewards as `call_reward` does. `Remote` ones run at the same time.

    Rank 0 calls them, except those with shared calls (`Distributed`). All ranks get the results.
    """
    if ranks.size() == 1:
        return _call_here(named, completions)
    shared = {i for i, (_, function) in enumerate(named) if isinstance(function, Distributed)}
    rest = [i for i in range(len(named)) if i not in shared]
    found = {i: call_reward(*named[i], completions) for i in sorted(shared)}
    if rest:
        found |= zip(rest, ranks.on_rank_zero(lambda: _call_here([named[i] for i in rest], completions)), strict=True)
    return [found[i] for i in range(len(named))]


def _call_here(named: Sequence[tuple[str, RewardFunction]], completions: Sequence[Completion]) -> list[Called]:
    """The same, in this process. An interrupt of the wait, such as Ctrl-C, cancels all calls."""
    functions: list[Any] = [function for _, function in named] if len(named) > 1 else []
    remote = {i: function for i, function in enumerate(functions) if isinstance(function, Remote)}
    is_over = threading.Event()
    with ThreadPoolExecutor(max(1, len(remote))) as threads:
        calls = {i: threads.submit(call_reward, *named[i], completions, is_over) for i in remote}
        try:
            here = {i: call_reward(*one, completions) for i, one in enumerate(named) if i not in remote}
            return [calls[i].result() if i in remote else here[i] for i in range(len(named))]
        except BaseException:
            is_over.set()
            while wait(calls.values(), timeout=0).not_done:
                for function in remote.values():
                    function.stop()
                wait(calls.values(), timeout=0.1)
            raise


def call_reward(
    name: str, function: RewardFunction, completions: Sequence[Completion], is_over: threading.Event | None = None
) -> Called:
    """Score responses with one function.

    If the call fails (an exception, a timeout, a crash), the function is called again with halves of the responses, with
    halves of the failed halves, and so on, at most `MOST_CALLS` times: one bad response must not cost the scores of the
    others. Responses that then still fail together get the same problem. A judge is not called again.

    Args:
        name: of the reward, for messages.
        function: a reward function.
        completions: the responses.
        is_over: set by another thread when the scores are no longer needed; then no further parts are called.

    Raises RewardError if its arguments do not fit, or it does not return one entry per response; and heedful's own errors,
    such as MachineError for a judge's cache that cannot be written.
    """
    arguments = _arguments(name, function, completions)
    scores: list[OneScore | Problem] = [None] * len(completions)

    def attempt(rows: range) -> Problem | None:
        """Fill in the scores of some responses. Returns the reason if their call failed."""
        hit("reward.call")
        if is_over is not None and is_over.is_set():
            raise RewardError(f"reward {name}: its call was given up")
        share = len(rows) / len(completions)
        timed = function.for_share(share) if share < 1 and isinstance(function, FunctionProcess) else function
        try:
            found = _result(timed, {key: [of[row] for row in rows] for key, of in arguments.items()})
        except CallError as failed:
            return Problem(str(failed), failed.__cause__)
        except ResultError as wrong:
            raise RewardError(f"reward {name} {wrong}; first sample: {sample(completions[rows[0]])}") from None
        if len(found) != len(rows):
            raise RewardError(
                f"reward {name} returned {counted(len(found), 'score')} for {counted(len(rows), 'response')}; it must "
                f"return one number per response; first sample: {sample(completions[rows[0]])}"
            )
        for row, one in zip(rows, found, strict=True):
            scores[row] = _of_its_length(one, completions[row])
        return None

    everything = range(len(completions))
    first = attempt(everything)
    failed = deque([(everything, first)] if first else [])
    calls = MOST_CALLS if isinstance(function, Measured) else 0
    while failed:
        rows, problem = failed.popleft()  # the largest
        if len(rows) > 1 and calls + 2 <= MOST_CALLS:
            calls += 2
            middle = len(rows) // 2
            halves = [(half, attempt(half)) for half in (rows[:middle], rows[middle:])]
            failed += [(half, why) for half, why in halves if why]
        else:
            for row in rows:
                scores[row] = problem
    return scores, first


def _result(function: RewardFunction, arguments: dict[str, list[Any]]) -> list[OneScore | Problem]:
    """Call the function and convert its result. Raises CallError, ResultError, RewardError, CancelledError if stopped."""
    try:
        found = function(**arguments)
        return read_scores(Background().run(found) if inspect.iscoroutine(found) else found)
    except RefusedError as error:  # a reward model's chat template
        raise CallError(f"cannot read it: {error}") from error
    except (HeedfulError, CallError, ResultError):  # a HeedfulError has its own advice; calling again does not help
        raise
    except (Exception, SystemExit) as error:
        if isinstance(function, Remote) and isinstance(error, CancelledError):
            raise
        if isinstance(function, Distributed) and ranks.size() > 1:  # others may wait for this rank's part
            raise
        raise CallError(raised(error, arguments)) from error


def _of_its_length(score: OneScore | Problem, completion: Completion) -> OneScore | Problem:
    """The score; a `Problem` if it is dense and not as long as the response. An environment's also has the end token."""
    ends = completion.episode.ends if completion.episode is not None else ()
    if not isinstance(score, list) or len(score) in (len(completion.ids), *ends[-1:]):
        return score
    return Problem(
        f"returned {counted(len(score), 'score')} for a response of {counted(len(completion.ids), 'token')}; a score is one "
        "finite number, None, "
        "or a list with one number for each of completion_ids (the token that ended the response is not among them)"
    )


def _arguments(name: str, function: RewardFunction, completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """The arguments named by the function, or all if it takes ``**kwargs``; each has one entry per response."""
    chats = [not isinstance(c.prompt.prompt, str) for c in completions]
    names = {name for c in completions for name in c.prompt.columns}
    has_episodes = any(c.episode is not None for c in completions)
    reserved = sorted(names & {*RESERVED, *(["episodes"] if has_episodes else [])})
    if reserved:
        raise RewardError(
            f"the prompts have a column {reserved[0]!r}, which is an argument of every reward; rename it in the data "
            f"(reserved: {', '.join(RESERVED)})"
        )
    arguments: dict[str, list[Any]] = {
        name: [c.prompt.columns.get(name) for c in completions] for name in sorted(names)
    }
    arguments |= {
        "prompts": [_as_messages(c.prompt.prompt) for c in completions],
        "completions": [
            [as_dict(m) for m in c.episode.turns]
            if c.episode is not None
            else [{"role": "assistant", "content": c.response}]
            if chat
            else c.response
            for c, chat in zip(completions, chats, strict=True)
        ],
        "completion_ids": [list(c.ids) for c in completions],
        "truncated": [c.truncated for c in completions],
        "thinking_parts": [c.thinking for c in completions],
        "answer_parts": [c.answer for c in completions],
    }
    if has_episodes:
        arguments["episodes"] = [c.episode for c in completions]
    parameters = inspect.signature(function).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        readable = f", or name its column: --columns {missing[0]}=COLUMN" if missing[0] in ANSWERS else ""
        raise RewardError(
            f"reward {name} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}; the prompts have "
            f"{', '.join(sorted(names)) or 'no columns besides the prompt'}: add it to the data{readable} "
            f"(besides columns a reward may name {', '.join(RESERVED)}); "
            f"first sample: {sample(completions[0])}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def _as_messages(prompt: Text) -> Any:
    """A prompt for reward functions: a string, or a list of dictionaries with role and content.

    The conversation's tools are in the first one.
    """
    if isinstance(prompt, str):
        return prompt
    return [as_dict(m) | ({"tools": json.loads(m.tools)} if m.tools else {}) for m in prompt]
