"""What a judge is asked about responses, and what scores its verdicts make (``--judge-mode``)."""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from heedful.configs.judging import JudgeMode
from heedful.rewards.judge.verdicts import TIE, read_better, read_ranking, read_score
from heedful.rewards.judge.words import Case, messages
from heedful.rewards.returned import OneScore, Problem, Share


class Question(NamedTuple):
    """Something to ask a judge."""

    messages: list[dict[str, str]]
    read: Callable[[str], Any]
    """The verdict in an answer, or a `Problem`."""


class Judged(NamedTuple):
    """Scores of responses, and what else the verdicts show."""

    scores: list[OneScore | Problem]
    metrics: Mapping[str, float]


class Mode(ABC):
    """A way to ask about a group of responses to one prompt. Questions and verdicts have the same order."""

    @abstractmethod
    def questions(self, cases: Sequence[Case]) -> list[Question]:
        """What is asked about a group."""

    @abstractmethod
    def scores(self, cases: Sequence[Case], verdicts: Sequence[Any]) -> list[OneScore | Problem]:
        """The scores of a group, from a verdict or a `Problem` for each question."""

    def metrics(self, verdicts: Sequence[Any]) -> dict[str, float]:  # noqa: ARG002  the interface has it
        """What the verdicts of all groups show besides scores."""
        return {}


@dataclass(frozen=True)
class Score(Mode):
    """A number from ``low`` to ``high`` for each response by itself."""

    rubric: str
    low: float
    high: float

    def questions(self, cases: Sequence[Case]) -> list[Question]:
        task = (
            f"Then give the response a score from {self.low:g} (worst) to {self.high:g} (best); decimals are allowed. The "
            "last line of your answer must be this and nothing else:\nScore: NUMBER"
        )
        read = partial(read_score, low=self.low, high=self.high)
        return [Question(messages(self.rubric, task, [case]), read) for case in cases]

    def scores(self, cases: Sequence[Case], verdicts: Sequence[Any]) -> list[OneScore | Problem]:  # noqa: ARG002  as above
        return list(verdicts)


@dataclass(frozen=True)
class Pairwise(Mode):
    """Every two responses, in both orders: the share of the others that a response beats, ties counted one half.

        score_i = 1/(k - 1) sum over j of [i beats j in both orders] + 1/2 [neither beats the other in both orders]

    A judge that prefers what stands first, or last, so gives ties. Equal responses tie without being asked about.
    """

    rubric: str

    def questions(self, cases: Sequence[Case]) -> list[Question]:
        task = (
            "Then decide which of the two responses is better. The last line of your answer must be one of these and nothing "
            "else:\nBetter: 1\nBetter: 2\nBetter: tie"
        )
        return [
            Question(messages(self.rubric, task, order), read_better)
            for one, two in self._pairs(cases)
            for order in ((cases[one], cases[two]), (cases[two], cases[one]))
        ]

    def scores(self, cases: Sequence[Case], verdicts: Sequence[Any]) -> list[OneScore | Problem]:
        others = len(cases) - 1
        won = [others / 2] * len(cases)
        problems: dict[int, Problem] = {}
        for (one, two), outcome in zip(self._pairs(cases), map(_outcome, *_halves(verdicts)), strict=True):
            if isinstance(outcome, Problem):
                problems.setdefault(one, outcome)
                problems.setdefault(two, outcome)
            else:
                won[one] += outcome / 2
                won[two] -= outcome / 2
        return [problems.get(i, won[i] / others) for i in range(len(cases))]

    def metrics(self, verdicts: Sequence[Any]) -> dict[str, float]:
        pairs = [pair for pair in zip(*_halves(verdicts), strict=True) if not any(isinstance(v, Problem) for v in pair)]
        disagreed = sum(second != (first and 3 - first) for first, second in pairs)
        return {"judge/disagreed_frac": Share(disagreed, len(pairs))} if pairs else {}

    @staticmethod
    def _pairs(cases: Sequence[Case]) -> list[tuple[int, int]]:
        """The pairs that are asked about."""
        every = itertools.combinations(range(len(cases)), 2)
        return [(one, two) for one, two in every if cases[one].answer != cases[two].answer]


@dataclass(frozen=True)
class Ranking(Mode):
    """All responses in one request: 1 for the best, 0 for the worst, equal steps between, the mean of its places for a tie.

    They stand in an order of their hashes, so that no place in it means anything; equal responses are shown once.
    """

    rubric: str

    def questions(self, cases: Sequence[Case]) -> list[Question]:
        shown = self._shown(cases)
        if len(shown) < 2:
            return []
        task = (
            f"Then rank the {len(shown)} responses from best to worst. The last line of your answer must name each of their "
            "numbers once, with > for better than and = for as good as, and nothing else, in this form:\nRanking: 2 > 3 = 1"
        )
        return [
            Question(messages(self.rubric, task, list(shown.values())), partial(read_ranking, count=len(shown))),
        ]

    def scores(self, cases: Sequence[Case], verdicts: Sequence[Any]) -> list[OneScore | Problem]:
        if not verdicts:
            return [0.5] * len(cases)
        if isinstance(verdicts[0], Problem):
            return [verdicts[0]] * len(cases)
        answers = list(self._shown(cases))
        scores: list[OneScore | Problem] = [None] * len(cases)
        place = 0
        for level in verdicts[0]:
            rows = [row for row, case in enumerate(cases) if case.answer in {answers[number] for number in level}]
            middle = place + (len(rows) - 1) / 2
            for row in rows:
                scores[row] = (len(cases) - 1 - middle) / (len(cases) - 1)
            place += len(rows)
        return scores

    @staticmethod
    def _shown(cases: Sequence[Case]) -> dict[str, Case]:
        """The different answers, in the order in which the judge sees them."""
        different = {case.answer: case for case in cases}
        return dict(
            sorted(different.items(), key=lambda item: hashlib.sha256(item[0].encode(errors="replace")).digest())
        )


def make_mode(name: JudgeMode, rubric: str, scale: tuple[float, float]) -> Mode:
    """The mode of a name."""
    if name == "score":
        return Score(rubric, *scale)
    return Pairwise(rubric) if name == "pairwise" else Ranking(rubric)


def _halves(verdicts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The verdicts of pairs in the first and in the second order."""
    return verdicts[::2], verdicts[1::2]


def _outcome(first: int | Problem, second: int | Problem) -> int | Problem:
    """1 if the first of two is better in both orders, -1 if the second is, 0 otherwise; a problem if a verdict is one."""
    for verdict in (first, second):
        if isinstance(verdict, Problem):
            return verdict
    if TIE in (first, second) or first == second:
        return 0
    return 1 if first == 1 else -1
