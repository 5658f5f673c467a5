"""A language model behind an OpenAI-compatible API as a reward: ``judge:http://HOST/v1#MODEL``."""

import contextlib
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from heedful.background import all_of
from heedful.configs.scoring import JudgeOptions, RewardOptions
from heedful.configs.settings import check_secret, refuse
from heedful.errors import ConfigError, MachineError, RewardError
from heedful.redact import redact
from heedful.retries import FIRST_WAIT
from heedful.rewards.http import Endpoint, NoAnswerError, Requests, ServerReward, check_url
from heedful.rewards.judge_questions import Case, Mode, Pairwise, Question, RankingMode, Score, case_of, read_rubric
from heedful.rewards.results import Measured, OneScore, Problem, Share

FORM = "judge:http://HOST:PORT/v1#MODEL"
KEY = "HEEDFUL_JUDGE_API_KEY"
"""The environment variable with the API key of judges; it may be unset for servers that need none."""
SCALE = (0.0, 10.0)
"""The lowest and the highest score of a judge."""
IN_FLIGHT = 64
"""Default number of requests in flight."""
TRIES = 3
"""Maximal tries to get a verdict from a judge."""
WHOLE = ("", "stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""Values of finish_reason for an answer that the model ended itself."""
OF_THE_REQUEST = (400, 413, 422)
"""Statuses that refuse a single request, because of its text or its settings. Others refuse all requests."""
PURPOSE = 0x6865656A
"""SQLite's application_id, which identifies the file."""
PATIENCE = 30.0
"""Seconds to wait for another process that writes to the file."""


# The API --------------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """A judge's answer."""

    text: str | Problem
    """A problem if there is no text."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_final: bool = False
    """True if the same request would get the same answer."""


@dataclass(frozen=True)
class ChatAPI:
    """The API of a model at an address."""

    endpoint: Endpoint
    model: str
    options: JudgeOptions

    def body(self, messages: Sequence[Mapping[str, str]]) -> bytes:
        """The body of a request with a conversation."""
        settings = {"temperature": self.options.judge_temperature, "max_tokens": self.options.judge_max_tokens}
        request = {"model": self.model, "messages": messages} | {k: v for k, v in settings.items() if v is not None}
        return json.dumps(request, ensure_ascii=False).encode(errors="replace")  # lone surrogates are no text

    def read(self, status: int, answer: bytes) -> Said:
        """Parse an answer. Raises NoAnswerError if it is no chat completion, RewardError if all requests are refused."""
        shown = self.endpoint.shown(answer)
        if status in OF_THE_REQUEST:
            return Said(
                Problem(
                    f"was refused the request with status {status}: {shown}; if the message names a setting, change "
                    "--judge-temperature or --judge-max-tokens (None leaves it out); if the text is too long, lower "
                    "--max-new-tokens"
                ),
                is_final=True,
            )
        if status != 200:
            raise self.endpoint.error(f" refused the request with status {status}: {shown}; {self._remedy(status)}")
        try:
            content = json.loads(answer)
            choice = content["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            text, refusal = message.get("content"), message.get("refusal")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise NoAnswerError(f"no chat completion, but {shown}") from error
        usage = content.get("usage")
        text = self._text(text, refusal, reason)
        return Said(text, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))

    def _text(self, text: Any, refusal: Any, reason: Any) -> str | Problem:
        ended = self.endpoint.hidden(repr(reason))[:40]
        if isinstance(refusal, str) and refusal:
            return Problem(f"refused to judge: {self.endpoint.hidden(refusal)!r:.200}")
        if reason == "length":
            limit = self.options.judge_max_tokens
            return Problem(
                f"was cut off before its verdict; raise --judge-max-tokens {limit}, or ask for less in the rubric"
            )
        if not isinstance(text, str) or not text.strip():
            return Problem(f"answered nothing (finish_reason {ended})")
        if reason is not None and str(reason).lower() not in WHOLE:
            return Problem(f"did not end its answer itself (finish_reason {ended})")
        return text

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            has = "is not accepted" if self.endpoint.token else "is not set"
            return f"it needs an API key, and the environment variable {KEY} {has}; set it to the judge's API key"
        if status == 404:
            return f"there is no such address, or no model {self.model!r} there; write judge:http://HOST:PORT/v1#MODEL"
        return "correct the address or what the message names"


def address(base: str) -> str:
    """The address of chat completions below a base such as http://HOST/v1; a query is kept."""
    parts = urlsplit(base)
    return parts._replace(path=f"{parts.path.rstrip('/')}/chat/completions", fragment="").geturl()


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


# Answers on disk, so that no question is paid for twice ---------------------------------------------------------------


class Cache:
    """Answers by their question. Open it with ``with``, in the thread that uses it.

    Raises MachineError if the file cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "Cache":
        with self._used():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute(f"PRAGMA application_id = {PURPOSE}")
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, question: bytes) -> str | None:
        """The answer to a question, if there was one."""
        with self._used():
            found = self._file.execute("SELECT answer FROM answers WHERE key = ?", (question,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, question: bytes, answer: str) -> None:
        """Store an answer."""
        with self._used():
            self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (question, answer))

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise MachineError(
                f"--judge-cache {self.path} cannot be used: {error}; name another file, or leave it out"
            ) from error


def question_key(url: str, body: bytes) -> bytes:
    """The key of a request: a hash of its address and its body, which has the model, rubric, texts and settings."""
    return hashlib.sha256(url.encode() + b"\0" + body).digest()


def check_cache(path: Path | None) -> None:
    """Raise ConfigError if a file is no cache or cannot be written. Creates no file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--judge-cache {path} is a folder; name a file, such as {path / 'judge.sqlite'}")
    if path.exists():
        try:
            file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
            try:
                purpose = file.execute("PRAGMA application_id").fetchone()[0]
                file.execute("SELECT 1 FROM answers LIMIT 1")
            finally:
                file.close()
        except sqlite3.Error as error:
            raise ConfigError(
                f"--judge-cache {path} is not a cache of judges' answers, or is damaged ({error}); name another file"
            ) from error
        if purpose != PURPOSE:
            raise ConfigError(f"--judge-cache {path} is a database of another program; name another file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
        raise ConfigError(f"--judge-cache {path} cannot be written: {there} forbids it; name another file")


# The reward -----------------------------------------------------------------------------------------------------------


class JudgeReward(Measured, ServerReward):
    """A reward function that asks a language model for its verdict on responses.

    All questions of a batch are sent concurrently, up to the endpoint's concurrency; equal questions are sent once. If an
    answer has no verdict, the question is asked up to three times; then the response gets a `Problem`. A server that does
    not answer raises RewardError (`Endpoint`).

    Args:
        api: the judge's API.
        mode: the questions and the scores of their verdicts.
        group_size: number of consecutive responses to the same prompt, to be compared. With 1 each is judged alone.
        columns: columns of the prompts' records to show to the judge.
        cache: file of its answers; None stores none.
    """

    def __init__(
        self, api: ChatAPI, mode: Mode, *, group_size: int, columns: Sequence[str] = (), cache: Path | None = None
    ) -> None:
        Measured.__init__(self)
        ServerReward.__init__(self, api.endpoint)
        self.api, self.mode, self.group_size = api, mode, group_size
        self.columns, self.cache = tuple(columns), cache

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], truncated: Sequence[bool], **columns: Sequence[Any]
    ) -> list[OneScore | Problem]:
        self.measured = {}
        for name in self.columns:
            if name not in columns:
                raise RewardError(
                    f"--judge-columns {name}: the prompts have no such column; add it to the data, map it with --columns, or "
                    "leave it out"
                )
        shown = [{name: columns[name][row] for name in self.columns} for row in range(len(completions))]
        cases = [case_of(*one) for one in zip(prompts, completions, truncated, shown, strict=True)]
        return self.background.run(self._judge(cases))

    async def _judge(self, cases: Sequence[Case]) -> list[OneScore | Problem]:
        groups = list(self._groups(cases))
        lacking = [next((name for name, value in group[0].columns.items() if value is None), None) for group in groups]
        asked = [[] if lacks else self.mode.questions(group) for group, lacks in zip(groups, lacking, strict=True)]
        with contextlib.ExitStack() as stack:
            cache = None if self.cache is None else stack.enter_context(Cache(self.cache))
            async with self.endpoint.open() as requests:
                batch = _Batch(self.api, requests, cache)
                questions = [question for of_group in asked for question in of_group]
                verdicts = await batch.verdicts(questions)
        self.measured = batch.metrics() | (self.mode.metrics(verdicts) if isinstance(self.mode, Pairwise) else {})
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
        """Groups of responses to judge together. A response without others to the same prompt is a group of its own."""
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
        verdicts = await all_of(self._verdict(body, question) for body, question in different.items())
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
                return verdict
            self.counts["unusable"] += 1
            if said.is_final:
                break
        return verdict

    def _read(self, question: Question, text: str) -> Any:
        """The verdict of an answer. A `Problem` quotes the answer, so the key is removed first."""
        verdict = question.read(text)
        return question.read(self.api.endpoint.hidden(text)) if isinstance(verdict, Problem) else verdict

    def metrics(self) -> dict[str, float]:
        """Metrics of the batch: costs and failures (docs/metrics.md)."""
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


# Strings and settings -------------------------------------------------------------------------------------------------


def is_judge(reward: object) -> bool:
    """Whether a reward is a string that names a judge."""
    return isinstance(reward, str) and reward.startswith("judge:")


def check_judge_string(reward: str) -> None:
    """Check the form of a judge's string. Raises ConfigError."""
    url, model = _split(reward)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--rewards: {redact(reward)!r} is no judge; write {FORM}, or https://")
    check_url(url)
    if not model:
        raise ConfigError(f"--rewards: {redact(reward)!r} names no model; write {FORM}")
    if urlsplit(url).path.rstrip("/").endswith("/chat/completions"):
        raise ConfigError(f"--rewards: {redact(reward)!r} ends in /chat/completions, which heedful adds; write {FORM}")


def check_judges(wanted: Sequence[object], options: RewardOptions) -> None:
    """Raise ConfigError for settings of judges without a judge, and for settings that judges do not support."""
    if not any(map(is_judge, wanted)):
        names = [name for name in JudgeOptions.__dataclass_fields__ if name.startswith("judge_")]
        refuse(options, *names, because=f"is about judges, and there is none; leave it out, or name one: {FORM}")
        return
    read_rubric(options.judge_rubric)
    check_cache(options.judge_cache)
    check_secret(KEY, "the judge's API key")
    if options.judge_compares and options.group_size < 2:
        raise ConfigError(
            f"--judge-mode {options.judge_mode} compares responses to the same prompt, and here each has one: set "
            "--samples-per-prompt in training, use heedful evaluate win-rate or best-of-n to measure, or use --judge-mode "
            "score"
        )


def check_comparing(
    wanted: Sequence[object],
    selection_rewards: Sequence[object],
    options: RewardOptions,
    *,
    holds_out: bool,
    score_norm_samples: int,
) -> None:
    """Raise ConfigError if a training run needs a comparing judge's scores of single responses.

    Score-norm samples without the judge would set the scale of another reward. Held-out responses without it do not show
    which model is best; nor would groups of them, because the scores within a group have the same mean for every model.
    """
    if not options.judge_compares:
        return
    has_judge = any(map(is_judge, wanted))
    because = f"--judge-mode {options.judge_mode} compares responses to the same prompt"
    if any(map(is_judge, selection_rewards)):
        raise ConfigError(
            f"{because}, but --selection-rewards scores held-out responses one by one; name another reward there"
        )
    if has_judge and score_norm_samples:
        raise ConfigError(
            f"{because}, but --score-norm-samples takes one response per prompt; leave it out: the judge's scores lie "
            "between 0 and 1"
        )
    if has_judge and holds_out and (not selection_rewards or all(map(is_judge, wanted))):
        named = "" if all(map(is_judge, wanted)) else ", or choose best/ by another reward (--selection-rewards)"
        raise ConfigError(
            f"{because}, but held-out prompts have one response each; hold none out "
            f"(--eval-fraction 0, no --eval-data){named}"
        )


def load_judge(reward: str, options: RewardOptions) -> JudgeReward:
    """Load the judge named by a string. Raises ConfigError."""
    check_judge_string(reward)
    url, model = _split(reward)
    endpoint = Endpoint(
        name=f"judge:{url}#{model}",
        url=address(url),
        gives="verdicts",
        remedy=f"fewer requests at a time (--reward-concurrency {options.reward_concurrency or IN_FLIGHT})",
        timeout=options.answer_timeout,
        retry_seconds=60 * options.reward_retry_minutes,
        concurrency=options.reward_concurrency or IN_FLIGHT,
        token=os.environ.get(KEY),
        first_wait=FIRST_WAIT,
    )
    rubric = read_rubric(options.judge_rubric)
    modes: dict[str, Mode] = {
        "score": Score(rubric, *SCALE),
        "pairwise": Pairwise(rubric),
        "ranking": RankingMode(rubric),
    }
    return JudgeReward(
        ChatAPI(endpoint, model, options),
        modes[options.judge_mode],
        group_size=options.group_size if options.judge_compares else 1,
        columns=options.judge_columns,
        cache=options.judge_cache,
    )


def _split(reward: str) -> tuple[str, str]:
    """The address and the model of a judge."""
    try:
        parts = urlsplit(reward.removeprefix("judge:"))
    except ValueError as error:
        raise ConfigError(f"--rewards: {redact(reward)!r} is no judge ({error}); write {FORM}") from error
    return urlunsplit(parts._replace(fragment="")), parts.fragment
