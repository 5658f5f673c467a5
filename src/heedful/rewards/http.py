"""A reward on another machine or in another process, called over HTTP in JSON (docs/rewards.md has the protocol)."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from heedful.rewards.background import Background, together
from heedful.rewards.calling import RESERVED
from heedful.rewards.endpoint import Endpoint, check_url
from heedful.rewards.returned import Elsewhere, OneScore, Problem

IN_FLIGHT = 4
"""Requests in flight at a time, if nothing else is said: a server that answers one after the other is still in time."""
FORM = 'the answer must be JSON of the form {"scores": [0.5, null, ...]}'


class HTTPReward(Elsewhere):
    """A reward function that asks a server for scores, several requests at a time; `Endpoint` says how.

    Args:
        url: the server's address, such as http://HOST:PORT/PATH. Its query is shown nowhere.
        timeout: the most seconds for one answer, from the request to its last byte.
        retry_seconds: how long a failed request is tried again; 0 tries once.
        concurrency: the most requests in flight at a time.
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
        concurrency: int = IN_FLIGHT,
        token: str | None = None,
        micro_batch_size: int = 64,
        first_wait: float = 0.5,
    ) -> None:
        check_url(url)
        self.micro_batch_size = micro_batch_size
        self._background = Background()
        self._endpoint = Endpoint(
            url,
            url,
            gives="scores",
            remedy="fewer responses per request (--micro-batch-size)",
            timeout=timeout,
            retry_seconds=retry_seconds,
            concurrency=concurrency,
            token=token,
            first_wait=first_wait,
        )

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
        requests = []
        for start in range(0, len(completions), self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            request = {
                "prompts": prompts[rows],
                "completions": completions[rows],
                "truncated": truncated[rows],
                "columns": {name: values[rows] for name, values in columns.items()},
            }
            requests.append((self._encoded(request), len(completions[rows])))
        return [score for scores in self._background.finish(self._ask(requests)) for score in scores]

    def stop(self) -> None:
        self._background.stop()

    def has_answered_before(self) -> None:
        self._endpoint.has_answered = True

    async def _ask(self, requests: Sequence[tuple[bytes, int]]) -> list[list[OneScore | Problem]]:
        """The scores of every request, in their order."""

        async def ask(body: bytes, count: int) -> list[OneScore | Problem]:
            return await open_to.ask(body, lambda status, answer: self._scores(status, answer, count))

        async with self._endpoint.open() as open_to:
            return await together(ask(body, count) for body, count in requests)

    def _encoded(self, request: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(request, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise self._endpoint.error(
                f": the request cannot be written as JSON: {error}; leave out the column of the prompts that contains it, or "
                "make it text"
            ) from error

    def _scores(self, status: int, answer: bytes, count: int) -> list[OneScore | Problem]:
        said = self._endpoint.shown(answer)
        if status != 200:
            raise self._endpoint.error(
                f" refused the request with status {status}: {said}; correct the address or what the message names"
            )
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._endpoint.error(f" did not answer in JSON ({error}): {said}; {FORM}") from error
        scores = content.get("scores") if isinstance(content, dict) else None
        if not isinstance(scores, list):
            raise self._endpoint.error(f" answered without a list of scores: {said}; {FORM}")
        if len(scores) != count:
            raise self._endpoint.error(f" answered with {len(scores)} scores for {count} responses; {FORM}")
        return [
            score
            if score is None or _is_number(score)
            else Problem(
                f"answered with the score {self._endpoint.hidden(repr(score))[:80]}; a score is a finite number, or null if "
                "the reward does not apply"
            )
            for score in scores
        ]


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
