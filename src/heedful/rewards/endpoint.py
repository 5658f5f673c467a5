"""An address that is asked over HTTP: several requests at a time, each again until it is answered."""

import asyncio
import contextlib
import datetime
import email.utils
import functools
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2

from heedful.errors import ConfigError, RewardError
from heedful.redact import redact

T = TypeVar("T")

LONGEST_WAIT = 5.0
"""The most seconds between two tries of a request, unless the server asks for more."""
LONGEST_FIRST = 10.0
"""The most seconds for which a server that never answered is asked again: its address may be wrong."""
PRESENT = (408, 429, 503)
"""Statuses of a server that is there, at its address, and has no time now."""
LONGEST_IDLE = 2.0
"""Seconds that a connection is kept for the next request of a batch; none is kept between batches, as servers close them."""
MOST_BYTES = 1 << 22
"""The longest answer that is read."""


class NoAnswerError(Exception):
    """What a server sent is no answer, but that of a gateway before it, say; it is asked again. The text says what came."""


def check_url(url: str) -> None:
    """Raise ConfigError if a string is not the address of a reward."""
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
            "it out, and use --reward-token-env (--judge-key-env for a judge) or a function of your own "
            "(python:FILE.py:FUNCTION)"
        )


class Endpoint:
    """A server's address, and how it is asked.

    After a connection error, a timeout, or a status of 408, 429 or 5xx a request is sent again until ``retry_seconds`` have
    passed (at most 10 as long as there never was an answer, nor a status of 408, 429 or 503: the address may be wrong). The
    waits are 0.5, 1, 2, 4, 5, 5, ... seconds, each times a random number between 0.5 and 1. If the server's Retry-After asks
    for more than half of such a wait, they are what it asks for and up to the other half. Proxies of the environment are
    used, except for this machine (localhost, 127.x, ::1).

    Args:
        name: how messages call it.
        url: the address. Its query is shown nowhere.
        gives: what it answers with, for messages, such as "scores".
        remedy: what to change if it is slow, besides --reward-timeout.
        timeout: the most seconds for one answer, from the request to its last byte.
        retry_seconds: how long a failed request is tried again; 0 tries once.
        concurrency: the most requests in flight at a time.
        token: sent as ``Authorization: Bearer TOKEN``, if there is one.
        first_wait: seconds before the first new try.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        gives: str,
        remedy: str,
        timeout: float,
        retry_seconds: float,
        concurrency: int,
        token: str | None,
        first_wait: float,
    ) -> None:
        self.name, self.url, self.gives, self.remedy = name, url, gives, remedy
        self.timeout, self.retry_seconds, self.concurrency = timeout, retry_seconds, concurrency
        self.first_wait = first_wait
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self.token = token
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
        self.has_answered = False
        self.is_present = False
        """Whether it has said that it is there, if only that it has no time."""
        self.jitter = random.Random()  # not the run's random numbers

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Requests"]:
        """Connections for the requests of one batch."""
        limits = httpx2.Limits(
            max_connections=self.concurrency,
            max_keepalive_connections=self.concurrency,
            keepalive_expiry=LONGEST_IDLE,
        )
        trust = _trust()
        # A client with its own transport uses no proxy.
        transport = httpx2.AsyncHTTPTransport(verify=trust, limits=limits) if _is_this_machine(self.url) else None
        async with httpx2.AsyncClient(timeout=None, limits=limits, transport=transport, verify=trust) as client:
            yield Requests(self, client, asyncio.Semaphore(self.concurrency))

    def error(self, text: str) -> RewardError:
        """An error that names the address."""
        return RewardError(redact(f"reward {self.name}") + redact(self.hidden(text)))

    def hidden(self, text: str) -> str:
        """A text without the token, which a server may repeat. Hide it before you shorten a text."""
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
    """Tries that were not answered."""
    slowest: float = field(default=0.0, init=False)
    """Seconds of the request that took longest, with all its tries and the waits between them."""

    async def ask(self, body: bytes, read: Callable[[int, bytes], T]) -> T:
        """What is read from the answer to a request, which is tried again if needed.

        Args:
            body: of the request, which is JSON.
            read: is given the status (200, or one for which it is no use to ask again) and the body of an answer. It may
                raise NoAnswerError to have the server asked again.

        Raises RewardError if there is no answer, and what ``read`` raises. Its status is 4 if there were answers before.
        """
        async with self.slots:
            started = time.monotonic()
            try:
                return await self._ask_until_answered(body, read)
            finally:
                self.slowest = max(self.slowest, time.monotonic() - started)

    async def _ask_until_answered(self, body: bytes, read: Callable[[int, bytes], T]) -> T:
        to = self.endpoint
        started, wait, tries = time.monotonic(), to.first_wait, 0
        while True:
            tries, asked_to_wait = tries + 1, None
            try:
                status, answer, retry_after = await self._ask_once(body)
                if status in (408, 429) or status >= 500:
                    to.is_present |= status in PRESENT
                    asked_to_wait = _seconds(retry_after)
                    raise NoAnswerError(f"status {status}: {to.shown(answer)}")
                found = read(status, answer)
                to.has_answered = True
                return found
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx2.HTTPError as error:
                raise to.error(f": {type(error).__name__}: {error}; the server must answer in plain JSON") from error
            except NoAnswerError as error:
                problem = str(error)
            self.retries += 1
            is_known = to.has_answered or to.is_present
            patience = to.retry_seconds if is_known else min(to.retry_seconds, LONGEST_FIRST)
            left = started + patience - time.monotonic()
            if left <= 0 or (asked_to_wait or 0.0) > left:
                break
            await asyncio.sleep(min(left, max(asked_to_wait or 0.0, wait / 2) + wait * to.jitter.uniform(0.0, 0.5)))
            wait = min(2 * wait, LONGEST_WAIT)
        later = "" if not asked_to_wait else f" It asks to wait for {asked_to_wait:.0f} s (Retry-After)."
        later += "" if is_known else f" It has never answered, so it was tried for {patience:g} s only."
        failed = to.error(
            f" gave no {to.gives}: {problem}; tried {tries} time{'s' * (tries > 1)}.{later} Is the server running and "
            f"reachable from here? A slow one may need more than --reward-timeout {to.timeout:g} or {to.remedy}, one that is "
            f"busy or restarts more than --reward-retry-minutes {to.retry_seconds / 60:g}"
        )
        if to.has_answered:
            failed.status = 4
        raise failed

    async def _ask_once(self, body: bytes) -> tuple[int, bytes, str | None]:
        """Status, body and Retry-After of one answer. The timeout covers all of it, however slowly it trickles in."""
        to, answer = self.endpoint, bytearray()
        try:
            async with (
                asyncio.timeout(to.timeout),
                self.client.stream("POST", to.url, content=body, headers=to.headers) as response,
            ):
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise to.error(" answered with a compressed body, which was not asked for; it must be plain JSON")
                async for piece in response.aiter_raw():
                    answer += piece
                    if len(answer) > MOST_BYTES:
                        raise to.error(f" answered with more than {MOST_BYTES} bytes, which no {to.gives} take")
        except TimeoutError:
            raise httpx2.ReadTimeout("the answer was not complete in time") from None
        return response.status_code, bytes(answer), response.headers.get("Retry-After")


@functools.cache
def _trust() -> ssl.SSLContext:
    """The certificates that are trusted, which takes a while to read."""
    return httpx2.create_ssl_context()


def _seconds(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait: a number, or up to a date. None if it says nothing readable."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        date = email.utils.parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
