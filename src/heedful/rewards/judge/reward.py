"""A judge as a reward function."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.errors import RewardError
from heedful.rewards.background import Background, together
from heedful.rewards.endpoint import Requests
from heedful.rewards.judge.api import ChatAPI
from heedful.rewards.judge.cache import Cache, question_key
from heedful.rewards.judge.modes import Mode, Question
from heedful.rewards.judge.words import Case, case_of
from heedful.rewards.returned import Elsewhere, Measured, OfGroups, OneScore, Problem, Share

TRIES = 3
"""How often a judge is asked for a verdict that it does not give."""


class JudgeReward(Measured, Elsewhere, OfGroups):
    """A reward function that asks a language model for its verdict on responses.

    Every question that the mode asks about a batch is in flight at a time, up to the endpoint's concurrency; equal questions
    are asked once. An answer without a verdict is asked for again, three times in all; a response on whose verdict this fails
    has a `Problem`. A server that does not answer raises RewardError (`Endpoint`).

    Args:
        api: where the judge is and how it is asked.
        mode: what it is asked.
        group_size: how many responses in a row are to the same prompt, to be compared. With 1 each is judged by itself.
        columns: columns of the prompts' records that it is shown.
        cache: file of its answers; None keeps none.
    """

    def __init__(
        self, api: ChatAPI, mode: Mode, *, group_size: int, columns: Sequence[str] = (), cache: Path | None = None
    ) -> None:
        super().__init__()
        self._background = Background()
        self.api, self.mode, self.group_size = api, mode, group_size
        self.columns, self.cache = tuple(columns), cache

    def __call__(
        self,
        /,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        truncated: Sequence[bool],
        **columns: Sequence[Any],
    ) -> list[OneScore | Problem]:
        for name in self.columns:
            if name not in columns:
                raise RewardError(
                    f"--judge-columns {name}: the prompts have no such column; add it to the data, map it with --columns, or "
                    "leave it out"
                )
        shown = [{name: columns[name][row] for name in self.columns} for row in range(len(completions))]
        cases = [case_of(*one) for one in zip(prompts, completions, truncated, shown, strict=True)]
        return self._background.finish(self._judge(cases))

    def stop(self) -> None:
        self._background.stop()

    def has_answered_before(self) -> None:
        self.api.endpoint.has_answered = True

    async def _judge(self, cases: Sequence[Case]) -> list[OneScore | Problem]:
        groups = list(self._groups(cases))
        lacking = [next((name for name, value in group[0].columns.items() if value is None), None) for group in groups]
        asked = [[] if lacks else self.mode.questions(group) for group, lacks in zip(groups, lacking, strict=True)]
        with contextlib.ExitStack() as stack:
            cache = None if self.cache is None else stack.enter_context(Cache(self.cache))
            async with self.api.endpoint.open() as requests:
                batch = _Batch(self.api, requests, cache)
                questions = [question for of_group in asked for question in of_group]
                verdicts = await batch.verdicts(questions)
        self.measured = batch.metrics() | self.mode.metrics(verdicts)
        given = iter(verdicts)
        scores: list[OneScore | Problem] = []
        for group, of_group, lacks in zip(groups, asked, lacking, strict=True):
            own = [next(given) for _ in of_group]
            if lacks:
                scores += [Problem(f"was not asked: the prompt's record has no {lacks!r} (--judge-columns)")] * len(
                    group
                )
                continue
            scores += self.mode.scores(group, own) if len(group) == self.group_size else [None] * len(group)
        return scores

    def _groups(self, cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
        """Responses that are judged together. Those without others to the same prompt are alone, and are not compared."""
        for start in range(0, len(cases), self.group_size):
            group = cases[start : start + self.group_size]
            first = group[0]
            is_one = len(group) == self.group_size and all(
                (case.prompt, case.columns) == (first.prompt, first.columns) for case in group
            )
            yield from [group] if is_one else ([case] for case in group)


@dataclass
class _Batch:
    """The questions about one batch of responses."""

    api: ChatAPI
    requests: Requests
    cache: Cache | None
    counts: Counter[str] = field(default_factory=Counter)

    async def verdicts(self, questions: Sequence[Question]) -> list[Any]:
        """A verdict, or a `Problem`, for each question."""
        bodies = [self.api.body(question.messages) for question in questions]
        different = dict(zip(bodies, questions, strict=True))
        verdicts = await together(self._verdict(body, question) for body, question in different.items())
        by_body = dict(zip(different, verdicts, strict=True))
        return [by_body[body] for body in bodies]

    async def _verdict(self, body: bytes, question: Question) -> Any:
        self.counts["questions"] += 1
        key = question_key(self.api.endpoint.url, body)
        kept = None if self.cache is None else self.cache.get(key)
        if kept is not None:
            self.counts["cached"] += 1
            return question.read(kept)
        verdict: Any = None
        for _ in range(TRIES):
            said = await self.requests.ask(body, self.api.read)
            self.counts["answers"] += 1
            self.counts["prompt_tokens"] += said.prompt_tokens
            self.counts["completion_tokens"] += said.completion_tokens
            verdict = said.text if isinstance(said.text, Problem) else self._read(question, said.text)
            if not isinstance(verdict, Problem):
                if self.cache is not None:
                    self.cache.put(key, said.text)
                break
            self.counts["unusable"] += 1
            if said.is_final:
                break
        return verdict

    def _read(self, question: Question, text: str) -> Any:
        """The verdict of an answer. What is said of an answer without one quotes it, so the key is not in it."""
        verdict = question.read(text)
        return question.read(self.api.endpoint.hidden(text)) if isinstance(verdict, Problem) else verdict

    def metrics(self) -> dict[str, float]:
        """What the batch cost, and how well it was answered (docs/metrics.md)."""
        counts = self.counts
        found = {
            "judge/requests": float(counts["answers"]),
            "judge/prompt_tokens": float(counts["prompt_tokens"]),
            "judge/completion_tokens": float(counts["completion_tokens"]),
            "judge/retries": float(self.requests.retries),
            "time/judge_slowest": self.requests.slowest,
        }
        if counts["answers"]:
            found["judge/unusable_frac"] = Share(counts["unusable"], counts["answers"])
        if self.cache is not None and counts["questions"]:
            found["judge/cached_frac"] = Share(counts["cached"], counts["questions"])
        return found
