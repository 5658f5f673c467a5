"""A reward on another machine or in another process, called over HTTP in JSON (docs/rewards.md has the protocol)."""

import contextlib
import datetime
import email.utils
import json
import math
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2

from heedful.configs.scoring import redacted
from heedful.errors import ConfigError, RewardError
from heedful.rewards.calling import RESERVED
from heedful.rewards.returned import OneScore, Problem

LONGEST_WAIT = 5.0
"""The most seconds between two tries of a request, unless the server asks for more."""
LONGEST_FIRST = 10.0
"""The most seconds for which a server that never answered is asked again: its address may be wrong."""
MOST_BYTES = 1 << 22
"""The longest answer that is read. Scores take some twenty bytes each."""


def check_url(url: str) -> None:
    """Raise ConfigError if a string is not the address of a reward."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"--rewards: {redacted(url)!r} is not an address: {redacted(str(error))}; use http://HOST:PORT/PATH"
        ) from error
    if not host:
        raise ConfigError(f"--rewards: {redacted(url)!r} has no host; use http://HOST:PORT/PATH")
    if parts.username or parts.password:
        raise ConfigError(
            f"--rewards: the address of {host} holds a user or password, which would be written into the run's folder; leave "
            "it out, and use --reward-token-env, or a function of your own (python:FILE.py:FUNCTION)"
        )


class HTTPReward:
    """A reward function that asks a server for scores.

    After a connection error, a timeout, or a status of 429 or 5xx it tries again until ``retry_seconds`` have passed (at
    most 10 as long as there never was an answer: the address may be wrong). It waits 0.5, 1, 2, 4, 5, 5, ... seconds, each
    times a random number between 0.5 and 1, or as long as the server's Retry-After says. Proxies of the environment are
    used, except for this machine (localhost, 127.x, ::1).

    Args:
        url: the server's address, such as http://HOST:PORT/PATH. Its query is shown nowhere.
        timeout: the most seconds for one answer, from the request to its last byte.
        retry_seconds: how long a failed request is tried again; 0 tries once.
        token: sent as ``Authorization: Bearer TOKEN``, if there is one.
        micro_batch_size: responses per request.
        first_wait: seconds before the first new try.

    Calling it raises RewardError if there is still no answer after that, or if an answer does not contain the scores. No
    default ever takes the place of a score.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retry_seconds: float = 600.0,
        token: str | None = None,
        micro_batch_size: int = 64,
        first_wait: float = 0.5,
    ) -> None:
        check_url(url)
        self.url = url
        self.timeout = timeout
        self.retry_seconds = retry_seconds
        self.micro_batch_size = micro_batch_size
        self.first_wait = first_wait
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._has_answered = False
        self._jitter = random.Random()  # not the run's random numbers
        # Connections are not kept: the server would close them while the policy samples, maybe as the next request leaves.
        limits = httpx2.Limits(max_keepalive_connections=0)
        # A client with its own transport uses no proxy.
        transport = httpx2.HTTPTransport(limits=limits) if _is_this_machine(url) else None
        self._client = httpx2.Client(timeout=timeout, limits=limits, transport=transport)

    def __call__(
        self,
        /,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        truncated: Sequence[bool],
        **columns: Sequence[Any],
    ) -> list[OneScore | Problem]:
        # The policy's ids mean nothing to the server, and the parts of a completion are in it.
        columns = {name: values for name, values in columns.items() if name not in RESERVED}
        scores: list[OneScore | Problem] = []
        for start in range(0, len(completions), self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            request = {
                "prompts": prompts[rows],
                "completions": completions[rows],
                "truncated": truncated[rows],
                "columns": {name: values[rows] for name, values in columns.items()},
            }
            scores += self._scores(self._answer(self._encoded(request)), len(completions[rows]))
        return scores

    def _encoded(self, request: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(request, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise self._error(
                f": the request cannot be written as JSON: {error}; leave out the column of the prompts that contains it, or "
                "make it text"
            ) from error

    def _answer(self, body: bytes) -> bytes:
        """Return the body of the server's answer, trying again if needed. Raises RewardError."""
        patience = self.retry_seconds if self._has_answered else min(self.retry_seconds, LONGEST_FIRST)
        deadline, wait, tries = time.monotonic() + patience, self.first_wait, 0
        while True:
            tries, asked_to_wait = tries + 1, None
            try:
                status, answer, retry_after = self._ask(body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx2.HTTPError as error:
                raise self._error(f": {type(error).__name__}: {error}; the server must answer in plain JSON") from error
            else:
                if status == 200:
                    self._has_answered = True
                    return answer
                problem = f"status {status}: {_shown(answer)}"
                if status != 429 and status < 500:
                    raise self._error(
                        f" refused the request with {problem}; correct the address or what the message names"
                    )
                asked_to_wait = _seconds(retry_after)
            left = deadline - time.monotonic()
            if left <= 0 or (asked_to_wait or 0.0) > left:
                break
            time.sleep(min(left, wait * self._jitter.uniform(0.5, 1.0) if asked_to_wait is None else asked_to_wait))
            wait = min(2 * wait, LONGEST_WAIT)
        later = "" if not asked_to_wait else f" It asks to wait for {asked_to_wait:.0f} s (Retry-After)."
        later += "" if self._has_answered else f" It has never answered, so it was tried for {patience:g} s only."
        raise self._error(
            f" gave no scores: {problem}; tried {tries} time{'s' * (tries > 1)}.{later} Is the server running and reachable "
            f"from here? A slow one may need more than --reward-timeout {self.timeout:g} or fewer responses per request "
            "(--micro-batch-size), one that is busy or restarts more than --reward-retry-minutes "
            f"{self.retry_seconds / 60:g}"
        )

    def _ask(self, body: bytes) -> tuple[int, bytes, str | None]:
        """Return status, body and Retry-After of one answer. The timeout covers all of it, however slowly it trickles in."""
        answer, connection = bytearray(), _Connection()
        timer = threading.Timer(self.timeout, connection.shut)
        timer.daemon = True
        timer.start()
        try:
            with self._client.stream(
                "POST", self.url, content=body, headers=self._headers, extensions={"trace": connection.trace}
            ) as response:
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise self._error(
                        " answered with a compressed body, which was not asked for; it must be plain JSON"
                    )
                for piece in response.iter_raw():
                    answer += piece
                    if len(answer) > MOST_BYTES:
                        raise self._error(f" answered with more than {MOST_BYTES} bytes; {FORM}")
        except httpx2.TransportError:
            if not connection.is_shut:
                raise
        finally:
            timer.cancel()
        if connection.is_shut:
            raise httpx2.ReadTimeout("the answer was not complete in time")
        return response.status_code, bytes(answer), response.headers.get("Retry-After")

    def _scores(self, answer: bytes, count: int) -> list[OneScore | Problem]:
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._error(f" did not answer in JSON ({error}): {_shown(answer)}; {FORM}") from error
        scores = content.get("scores") if isinstance(content, dict) else None
        if not isinstance(scores, list):
            raise self._error(f" answered without a list of scores: {_shown(answer)}; {FORM}")
        if len(scores) != count:
            raise self._error(f" answered with {len(scores)} scores for {count} responses; {FORM}")
        return [
            score
            if score is None or _is_number(score)
            else Problem(
                f"answered with the score {score!r:.80}; a score is a finite number, or null if the reward does not apply"
            )
            for score in scores
        ]

    def _error(self, text: str) -> RewardError:
        return RewardError(redacted(f"reward {self.url}") + redacted(text))


FORM = 'the answer must be JSON of the form {"scores": [0.5, null, ...]}'


class _Connection:
    """The connection of a request, to be shut when its time is over, whatever is being read then."""

    def __init__(self) -> None:
        self.is_shut = False
        self._socket: socket.socket | None = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the connection; the client calls this as the request proceeds."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.is_shut:
                self.shut()

    def shut(self) -> None:
        self.is_shut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


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


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _shown(answer: bytes) -> str:
    return repr(answer[:300].decode(errors="replace"))
