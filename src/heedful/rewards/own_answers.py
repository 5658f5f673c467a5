"""Does each record's own answer, given as the response, score as right?"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heedful.display import counted
from heedful.rewards.answers import AnswerError, after_marker, listed
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.mathematics import VERIFIERS, formula_of, same_mathematics
from heedful.rewards.results import Problem, RewardFunction
from heedful.rewards.rules import contains_expected, exact_number, only_number, pattern_of
from heedful.rewards.scoring import Reward, call_rewards
from heedful.types import Completion, Prompt

MOST = 2000
"""Different answers that are scored, spread evenly: mathematics takes milliseconds for each. All of them are read."""
AT_A_TIME = 32
"""Answers in a call. Each is compared within seconds, so that a call stays below the default of --reward-timeout."""
PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")
"""Answers that need no scoring: what can be said of one of them holds for all."""


@dataclass(frozen=True)
class Comparison:
    """How a reward compares responses with a column of the records."""

    function: RewardFunction
    column: str
    read: Callable[[str], Any]
    """Reads an answer. Raises AnswerError if it can never be matched."""
    perfect: Callable[[str], str]
    """The response that gives an answer as the reward asks for it."""


COMPARISONS = (
    Comparison(contains_expected, "expected", pattern_of, str),
    Comparison(exact_number, "answer", only_number, lambda answer: f"{only_number(answer):f}"),
    Comparison(
        same_mathematics,
        "answer",
        formula_of,
        lambda text: text if r"\boxed" in text else rf"\boxed{{{after_marker(text)}}}",
    ),
)


@dataclass(frozen=True)
class Unmatched:
    """An answer that no response to its record can match."""

    reward: str
    source: str
    """Where its record was read, as ``file:line``."""
    because: str
    """The column, the answer, and why."""


def unmatched_answers(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> list[Unmatched]:
    """The records' answers that rewards of `COMPARISONS` cannot read, or score no higher than an empty response.

    Every record is read. Of different answers at most `MOST` are scored, each as the response that gives just this answer.
    """
    found: list[Unmatched] = []
    for reward in rewards:
        comparison = _comparison_of(reward.function)
        if comparison is not None:
            found += _unmatched(reward, comparison, prompts)
    return found


def say_unmatched(found: Sequence[Unmatched], prompts: Sequence[Prompt]) -> str:
    """How many answers of these prompts are unmatched, in words."""
    answers = f"{counted(len(found), 'answer')} in {counted(len(prompts), 'record')}"
    return f"{found[0].reward} scores no response as right for {answers}"


def _comparison_of(function: Any) -> Comparison | None:
    if isinstance(function, FunctionProcess):
        function = VERIFIERS.get(function.spec.removeprefix("verify:"))
    return next((one for one in COMPARISONS if one.function is function), None)


def _unmatched(reward: Reward, comparison: Comparison, prompts: Sequence[Prompt]) -> Iterator[Unmatched]:
    seen: set[str] = set()
    to_score: list[tuple[Prompt, str]] = []
    for prompt in prompts:
        value = prompt.columns.get(comparison.column)
        try:
            for answer in [] if value is None else listed(value):
                if answer not in seen:
                    comparison.read(answer)
                    seen.add(answer)
                    if not PLAIN_NUMBER.fullmatch(after_marker(answer)):
                        to_score.append((prompt, answer))
        except AnswerError as error:
            yield Unmatched(reward.name, prompt.source, f"{comparison.column} {value!r:.60} {error}")
    some = to_score if len(to_score) <= MOST else [to_score[i * len(to_score) // MOST] for i in range(MOST)]
    for first in range(0, len(some), AT_A_TIME):
        part = some[first : first + AT_A_TIME]
        perfect = [_completion(prompt, comparison, answer, comparison.perfect(answer)) for prompt, answer in part]
        empty = [_completion(prompt, comparison, answer, "") for prompt, answer in part]
        ((scores, _),) = call_rewards([(reward.name, reward.function)], [*perfect, *empty])
        for (prompt, answer), score, least, given in zip(part, scores, scores[len(part) :], perfect, strict=False):
            if isinstance(score, Problem):
                yield Unmatched(reward.name, prompt.source, f"{comparison.column} {answer!r:.60}: the reward {score}")
            elif not _number(score) > _number(least):
                because = (
                    f"{comparison.column} {answer!r:.60}: the response {given.response!r:.60} scores {_number(score):g}"
                )
                yield Unmatched(reward.name, prompt.source, because)


def _completion(prompt: Prompt, comparison: Comparison, answer: str, response: str) -> Completion:
    return Completion(replace(prompt, columns={**prompt.columns, comparison.column: answer}), response)


def _number(score: Any) -> float:
    """The score of a reward in `COMPARISONS`, which is one number; NaN if there is none."""
    return score if isinstance(score, float) else math.nan
