"""A reward on another machine or in another process, called over HTTP in JSON (docs/rewards.md has the protocol)."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2

from heedful.errors import ConfigError, RewardError
from heedful.rewards.interface import RESERVED

LONGEST_WAIT = 30.0
"""The most seconds between two tries of a request."""


def check_url(url: str) -> None:
    """Raise ConfigError if a string is not the address of a reward."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL) as error:
        raise ConfigError(f"--rewards: {url!r} is not an address: {error}; use http://HOST:PORT/PATH") from error
    if not host:
        raise ConfigError(f"--rewards: {url!r} has no host; use http://HOST:PORT/PATH")
    if parts.username or parts.password:
        raise ConfigError(
            f"--rewards: the address of {host} holds a user or password, which would be written into the run's folder; leave "
            "it out, or call the server from a function of your own (python:FILE.py:FUNCTION)"
        )


class HTTPReward:
    """A reward function that asks a server for scores.

    After a connection error, a timeout, or a status of 429 or 5xx it tries again, with twice the wait each time. Proxies of
    the environment are used, except for this machine (localhost, 127.x, ::1).

    Args:
        url: the server's address, such as http://HOST:PORT/PATH.
        timeout: the most seconds for one answer, from the request to its last byte.
        retries: how often a failed request is tried again.
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
        retries: int = 3,
        micro_batch_size: int = 64,
        first_wait: float = 0.5,
    ) -> None:
        check_url(url)
        self.url = url
        self.timeout = timeout
        self.retries = retries
        self.micro_batch_size = micro_batch_size
        self.first_wait = first_wait
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
    ) -> list[float | None]:
        # The policy's ids mean nothing to the server, and the parts of a completion are in it.
        columns = {name: values for name, values in columns.items() if name not in RESERVED}
        scores: list[float | None] = []
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
            raise RewardError(
                f"reward {self.url}: the request cannot be written as JSON: {error}; leave out the column of the prompts "
                "that contains it, or make it text"
            ) from error

    def _answer(self, body: bytes) -> bytes:
        """Return the body of the server's answer, trying again if needed. Raises RewardError."""
        wait = self.first_wait
        for tries in range(1, self.retries + 2):
            try:
                status, answer = self._ask(body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx2.HTTPError as error:
                raise RewardError(
                    f"reward {self.url}: {type(error).__name__}: {error}; the server must answer in plain JSON"
                ) from error
            else:
                if status == 200:
                    return answer
                problem = f"status {status}: {_shown(answer)}"
                if status != 429 and status < 500:
                    raise RewardError(
                        f"reward {self.url} refused the request with {problem}; correct the address or what the message names"
                    )
            if tries <= self.retries:
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
        raise RewardError(
            f"reward {self.url} gave no scores: {problem}; tried {tries} time{'s' * (tries > 1)}. Is the server running and "
            f"reachable from here? A slow one may need more than --reward-timeout {self.timeout:g} or fewer responses per "
            "request (--rollout-micro-batch-size; --micro-batch-size of evaluate), a busy one more than "
            f"--reward-retries {self.retries}"
        )

    def _ask(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of one answer. The timeout covers all of it, however slowly it trickles in."""
        deadline = time.monotonic() + self.timeout
        answer = bytearray()
        with self._client.stream(
            "POST", self.url, content=body, headers={"Content-Type": "application/json"}
        ) as response:
            for piece in response.iter_bytes():
                answer += piece
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout("the answer was not complete in time")
        return response.status_code, bytes(answer)

    def _scores(self, answer: bytes, count: int) -> list[float | None]:
        form = 'the answer must be JSON of the form {"scores": [0.5, null, ...]}'
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"reward {self.url} did not answer in JSON ({error}): {_shown(answer)}; {form}"
            ) from error
        scores = content.get("scores") if isinstance(content, dict) else None
        if not isinstance(scores, list):
            raise RewardError(f"reward {self.url} answered without a list of scores: {_shown(answer)}; {form}")
        if len(scores) != count:
            raise RewardError(f"reward {self.url} answered with {len(scores)} scores for {count} responses; {form}")
        for score in scores:
            if score is not None and not _is_number(score):
                raise RewardError(
                    f"reward {self.url} answered with the score {score!r:.80}; a score is a finite number, or null if the "
                    "reward does not apply"
                )
        return scores


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
