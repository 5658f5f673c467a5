"""Rewards over HTTP: concurrent requests to an address, with retries; and a reward on a server, called in JSON
(docs/rewards.md has the protocol).
"""

import asyncio
import contextlib
import functools
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import tenacity

from heedful.background import Background, all_of
from heedful.display import counted
from heedful.errors import ConfigError, RewardError
from heedful.hosts import is_loopback
from heedful.redact import redact
from heedful.retries import FIRST_WAIT, Backoff, read_retry_after
from heedful.rewards.results import OneScore, Problem, Remote, is_finite
from heedful.rewards.scoring import RESERVED
from heedful.types import Episode

T = TypeVar("T")

LONGEST_FIRST = 10.0
"""Maximal seconds of retries for a server that never answered: its address may be wrong."""
PRESENT = (408, 429, 503)
"""Statuses of a server that is reachable but busy."""
LONGEST_IDLE = 2.0
"""Seconds to keep a connection for the next request of a batch; none is kept between batches, because servers close them."""
MOST_BYTES = 1 << 22
"""Maximal size of an answer in bytes."""
IN_FLIGHT = 4
"""Default number of requests in flight: few enough that a server without concurrency still answers in time."""
FORM = 'the answer must be JSON of the form {"scores": [0.5, null, ...]}'


# Any address ----------------------------------------------------------------------------------------------------------


class NoAnswerError(Exception):
    """The reply is not the server's answer, for example that of a gateway; the request is retried. The text describes it."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


def check_url(url: str) -> None:
    """Raise ConfigError if a string is not a valid address of a reward."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"--rewards: {redact(url)!r} is not an address: {redact(str(error))}; use http://HOST:PORT/PATH"
        ) from error
    if not host:
        raise ConfigError(f"--rewards: {redact(url)!r} has no host; use http://HOST:PORT/PATH")
    if parts.username or parts.password:
        raise ConfigError(
            f"--rewards: the address of {host} holds a user or password, which would be written into the run's folder; leave "
            "it out, and use HEEDFUL_REWARD_TOKEN (HEEDFUL_JUDGE_API_KEY for a judge) or a function of your own "
            "(python:FILE.py:FUNCTION)"
        )


@dataclass(kw_only=True)
class Endpoint:
    """A server's address, and the settings of its requests.

    After a connection error, a timeout, or a status of 408, 429 or 5xx a request is retried until ``retry_seconds`` have
    passed (at most 10 as long as there was no answer and no status of 408, 429 or 503: the address may be wrong). The
    waits are those of `heedful.retries.Backoff`. Proxies of the environment are used, except for this machine (localhost,
    127.x, ::1).
    """

    name: str
    """Its name in messages."""
    url: str
    """The address. Its query is never shown."""
    gives: str
    """The content of its answers for messages, such as "scores"."""
    remedy: str
    """Advice for a slow server, besides --reward-timeout."""
    timeout: float
    """Timeout of one answer in seconds, from the request to its last byte."""
    retry_seconds: float
    """Seconds of retries for a failed request; 0 tries once."""
    concurrency: int
    """Maximal requests in flight."""
    token: str | None = field(repr=False)
    """Sent as ``Authorization: Bearer TOKEN``, if there is one."""
    first_wait: float = FIRST_WAIT
    """Seconds before the first retry."""
    has_answered: bool = False
    """Whether the server was reachable before, so that failures are retried."""
    is_present: bool = False
    """Whether the server has responded at least once, even if only as busy."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Requests"]:
        """Connections for the requests of one batch."""
        limits = httpx2.Limits(
            max_connections=self.concurrency, max_keepalive_connections=self.concurrency, keepalive_expiry=LONGEST_IDLE
        )
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        async with httpx2.AsyncClient(
            timeout=None,
            limits=limits,
            verify=_trust(),
            headers=headers,
            trust_env=not is_loopback(urlsplit(self.url).hostname or ""),
        ) as client:
            yield Requests(self, client, asyncio.Semaphore(self.concurrency))

    def patience(self) -> float:
        """Seconds of retries for a request."""
        is_known = self.has_answered or self.is_present
        return self.retry_seconds if is_known else min(self.retry_seconds, LONGEST_FIRST)

    def gave_up(self, last: tenacity.Future) -> RewardError:
        """The error of a request after its last retry. Its status is 4 if there were answers before."""
        problem, tries = last.exception(), last.attempt_number
        said = str(problem) if isinstance(problem, NoAnswerError) else f"{type(problem).__name__}: {problem}"
        asked = getattr(problem, "retry_after", None)
        later = f" It asks to wait for {asked:.0f} s (Retry-After)." if asked else ""
        if not self.has_answered and not self.is_present:
            later += f" It has never answered, so it was tried for {self.patience():g} s only."
        failed = self.error(
            f" gave no {self.gives}: {said}; tried {counted(tries, 'time')}.{later} Is the server running and "
            f"reachable from here? A slow one may need more than --reward-timeout {self.timeout:g} or {self.remedy}, one "
            f"that is busy or restarts more than --reward-retry-minutes {self.retry_seconds / 60:g}"
        )
        if self.has_answered:
            failed.status = 4
        return failed

    def error(self, text: str) -> RewardError:
        """An error that names the address."""
        return RewardError(redact(f"reward {self.name}") + redact(self.hidden(text)))

    def hidden(self, text: str) -> str:
        """Remove the token, which a server may repeat, from a text. Call it before shortening the text."""
        return text.replace(self.token, "[hidden]") if self.token else text

    def shown(self, answer: bytes) -> str:
        """The beginning of an answer, for messages."""
        return repr(self.hidden(answer.decode(errors="replace"))[:300])


@dataclass
class Requests:
    """Requests to one address that share its connections."""

    endpoint: Endpoint
    client: httpx2.AsyncClient
    slots: asyncio.Semaphore
    retries: int = field(default=0, init=False)
    """Number of failed tries."""
    slowest: float = field(default=0.0, init=False)
    """Seconds of the slowest request, including retries and waits."""

    async def ask(self, body: bytes, read: Callable[[int, bytes], T]) -> T:
        """Send a request, with retries, and return ``read`` of the answer.

        Args:
            body: the request's body, JSON.
            read: gets the status (200, or one without use in a retry) and the body of an answer. It may raise NoAnswerError
                to retry.

        Raises RewardError if there is no answer, with status 4 if there were answers before, and the errors of ``read``.
        """
        to = self.endpoint
        backoff = Backoff(to.patience, first=to.first_wait)
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((httpx2.TransportError, NoAnswerError)),
            wait=backoff.wait,
            stop=backoff.stop,
            after=self._count,
        )
        async with self.slots:
            started = time.monotonic()
            try:
                return await tries(self._try, body, read)
            except httpx2.HTTPError as error:
                raise to.error(f": {type(error).__name__}: {error}; the server must answer in plain JSON") from error
            except tenacity.RetryError as failed:
                raise to.gave_up(failed.last_attempt) from None
            finally:
                self.slowest = max(self.slowest, time.monotonic() - started)

    def _count(self, _: tenacity.RetryCallState) -> None:
        self.retries += 1

    async def _try(self, body: bytes, read: Callable[[int, bytes], T]) -> T:
        """Return ``read`` of the answer to one try. Raises NoAnswerError to retry."""
        to = self.endpoint
        status, answer, retry_after = await self._ask_once(body)
        if status in (408, 429) or status >= 500:
            to.is_present |= status in PRESENT
            raise NoAnswerError(f"status {status}: {to.shown(answer)}", read_retry_after(retry_after))
        found = read(status, answer)
        to.has_answered = True
        return found

    async def _ask_once(self, body: bytes) -> tuple[int, bytes, str | None]:
        """Status, body and Retry-After of one answer. The timeout covers the whole answer, even if it arrives slowly."""
        to, answer = self.endpoint, bytearray()
        try:
            async with asyncio.timeout(to.timeout), self.client.stream("POST", to.url, content=body) as response:
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise to.error(" answered with a compressed body, which was not requested; it must be plain JSON")
                async for piece in response.aiter_raw():
                    answer += piece
                    if len(answer) > MOST_BYTES:
                        raise to.error(f" answered with more than {MOST_BYTES} bytes, too many for {to.gives}")
        except TimeoutError:
            raise httpx2.ReadTimeout("the answer was not complete in time") from None
        return response.status_code, bytes(answer), response.headers.get("Retry-After")


@functools.cache
def _trust() -> ssl.SSLContext:
    """The trusted certificates; reading them is slow."""
    return httpx2.create_ssl_context()


# A reward -------------------------------------------------------------------------------------------------------------


class ServerReward(Remote):
    """A reward that a server computes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.background = Background()

    def stop(self) -> None:
        self.background.stop()

    def has_answered_before(self) -> None:
        self.endpoint.has_answered = True


class HTTPReward(ServerReward):
    """A reward function that requests scores from a server, several requests at a time (`Endpoint`).

    Args:
        url: the server's address, such as http://HOST:PORT/PATH.
        micro_batch_size: responses per request.

    The other arguments are those of `Endpoint`. A call raises RewardError if there is no answer after all retries, or if an
    answer does not contain the scores. A missing score is never replaced by a default.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retry_seconds: float = 600.0,
        concurrency: int = IN_FLIGHT,
        token: str | None = None,
        micro_batch_size: int = 64,
        first_wait: float = FIRST_WAIT,
    ) -> None:
        check_url(url)
        self.micro_batch_size = micro_batch_size
        super().__init__(
            Endpoint(
                name=url,
                url=url,
                gives="scores",
                remedy="fewer responses per request (--micro-batch-size)",
                timeout=timeout,
                retry_seconds=retry_seconds,
                concurrency=concurrency,
                token=token,
                first_wait=first_wait,
            )
        )

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], truncated: Sequence[bool], **columns: Sequence[Any]
    ) -> list[OneScore | Problem]:
        # The policy's ids are useless to the server, and the parts and episodes are contained in the completions.
        columns = {
            name: values
            for name, values in columns.items()
            if name not in RESERVED and not any(isinstance(one, Episode) for one in values)
        }
        requests: list[tuple[bytes, int]] = []
        for at in range(0, len(completions), self.micro_batch_size):
            rows = slice(at, at + self.micro_batch_size)
            content: dict[str, Any] = {
                "prompts": prompts[rows],
                "completions": completions[rows],
                "truncated": truncated[rows],
            }
            content |= {"columns": {name: values[rows] for name, values in columns.items()}}
            try:
                body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                raise self.endpoint.error(
                    f": the request cannot be written as JSON: {error}; leave out the column of the prompts that contains "
                    "it, or make it text"
                ) from error
            requests.append((body, len(completions[rows])))

        async def ask() -> list[list[OneScore | Problem]]:
            async with self.endpoint.open() as server:
                return await all_of(
                    server.ask(body, functools.partial(self._scores, count=count)) for body, count in requests
                )

        return [score for scores in self.background.run(ask()) for score in scores]

    def _scores(self, status: int, answer: bytes, count: int) -> list[OneScore | Problem]:
        said = self.endpoint.shown(answer)
        if status != 200:
            raise self.endpoint.error(
                f" refused the request with status {status}: {said}; correct the address or what the message names"
            )
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self.endpoint.error(f" did not answer in JSON ({error}): {said}; {FORM}") from error
        scores = content.get("scores") if isinstance(content, dict) else None
        if not isinstance(scores, list):
            raise self.endpoint.error(f" answered without a list of scores: {said}; {FORM}")
        if len(scores) != count:
            raise self.endpoint.error(
                f" answered with {counted(len(scores), 'score')} for {counted(count, 'response')}; {FORM}"
            )
        return [self._score(one) for one in scores]

    def _score(self, one: Any) -> OneScore | Problem:
        if one is None or (isinstance(one, int | float) and not isinstance(one, bool) and is_finite(one)):
            return one
        return Problem(
            f"answered with the score {self.endpoint.hidden(repr(one))[:80]}; a score is a finite number, or null if the "
            "reward does not apply"
        )
