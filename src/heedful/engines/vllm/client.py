"""Client of one vLLM server: HTTP requests, and validation of responses."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from heedful.engines.vllm.extension.heedful_vllm import added
from heedful.engines.vllm.weights import Weights
from heedful.errors import SamplerError
from heedful.retries import read_retry_after

SHORT = 30.0
"""Timeout in seconds of requests that need no computation."""
MOST_WAIT = 30.0
"""Maximum seconds of Retry-After."""
START = "start it with `heedful serve-policy`, or as in docs/vllm.md"
ROUTES = ("/v1/completions", "/collective_rpc", "/reset_prefix_cache")
"""What every run asks of a server."""


class GoneError(Exception):
    """A server did not answer, or has the wrong weights: retry the request, or use another server."""

    retry_after = 0.0
    """Seconds to wait, as requested by the server."""


class FailedError(GoneError):
    """A server failed (status 5xx)."""


class BusyError(GoneError):
    """A server is busy (status 429)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"is busy (asks to wait {seconds:g} s)")
        self.retry_after = seconds


@dataclass(frozen=True)
class Request:
    """A request for one response."""

    prompt: Sequence[int]
    """Token ids."""
    most: int
    """Maximum tokens of the response."""
    seed: int


@dataclass(frozen=True)
class Drawn:
    """A response."""

    ids: list[int]
    """Includes the stop token."""
    logprobs: list[float]
    """Log-prob of each token, under the distribution that sampled it."""


@dataclass(frozen=True)
class Held:
    """Identifies the weights on a server. Another process or another load has another value."""

    instance: str
    version: str | None
    loads: int


class VLLMServer:
    """A vLLM server at an address.

    Args:
        address: http://HOST:PORT.
        client: HTTP client.
        sampling: common parameters of all requests, as in ``POST /v1/completions``.
        timeout: seconds for one response, or for loading weights.
        sleeps: whether it sleeps between batches.
    """

    def __init__(
        self,
        address: str,
        client: httpx2.AsyncClient,
        *,
        sampling: Mapping[str, Any],
        timeout: float,
        sleeps: bool = False,
    ) -> None:
        self.address, self.client, self.sampling, self.timeout = address, client, sampling, timeout
        self.sleeps, self.version = sleeps, ""
        self.held: Held | None = None
        """The weights it is verified to have; None if unknown."""
        self.about: dict[str, Any] = {}

    def error(self, text: str) -> SamplerError:
        """An error with the server's address."""
        return SamplerError(f"--sampler vllm:{self.address} {text}")

    async def draw(self, request: Request) -> Drawn:
        """Sample one response. Raises GoneError, or SamplerError if the server refuses the request."""
        asked = {"prompt": request.prompt, "max_tokens": request.most, "seed": request.seed, **self.sampling}
        answer = await self.ask("/v1/completions", asked, self.timeout)
        try:
            (choice,) = answer["choices"]
            reason, ids, logprobs = choice["finish_reason"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
            is_whole = choice["prompt_token_ids"] == list(request.prompt) and len(ids) == len(logprobs)
        except (KeyError, TypeError, ValueError) as error:
            raise self.error(
                f"answered without token ids and log-probs ({type(error).__name__}: {error}): {str(answer)[:300]}; {START}"
            ) from error
        if reason not in ("stop", "length"):  # abort: the server is shutting down, or dropped its requests
            raise GoneError(f"a response ended with reason {reason!r}")
        known = self.about["vocab_size"]
        is_good = all(type(i) is int and 0 <= i < known for i in ids) and all(map(_is_logprob, logprobs))
        if not is_whole or not is_good or not 0 < len(ids) <= request.most:
            raise self.error(
                f"answered with another prompt, or invalid token ids or log-probs: {str(choice)[:300]}; {START}"
            )
        return Drawn(ids, [min(0.0, float(x)) for x in logprobs])

    async def check_routes(self) -> None:
        """Raises SamplerError unless it is a vLLM with the routes that are used, and GoneError if it does not answer."""
        answer = await self.ask("/version")
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise self.error(f"is not a vLLM server: /version returned {str(answer)[:200]}; {START}")
        self.version = answer["version"]
        for path in (*ROUTES, *(("/sleep", "/wake_up") if self.sleeps else ())):
            if (await self._send("GET", path)).status_code == 404:  # it does nothing: the route is for POST
                raise self.error(
                    f"is vLLM {self.version} without {path}: was it started with VLLM_SERVER_DEV_MODE=1? {START}, or with "
                    "another version of vLLM"
                )

    async def ask_about(self) -> dict[str, Any]:
        """The server's model and settings (`heedful_about`). Raises GoneError, SamplerError."""
        try:
            self.about = (await self._ask_workers("heedful_about", {}, SHORT))[0]
        except FailedError as problem:
            raise self.error(
                f"is vLLM {self.version} and cannot say what it serves ({problem}): was it started with heedful's extension? "
                f"{START}, or with another version of vLLM"
            ) from problem
        return self.about

    async def ask_state(self) -> Held:
        """The weights that it reports now. Raises GoneError."""
        return _held((await self._ask_workers("heedful_state", {}, SHORT))[0])

    async def confirm(self, weights: Weights) -> None:
        """Raises GoneError unless it still has these weights from the same load."""
        held = await self.ask_state()
        if held != self.held or held.version != weights.version:
            raise GoneError(f"it has other weights ({held.version}) than it was given: it restarted, or others use it")

    async def prepare(self, weights: Weights) -> None:
        """Wake it if it sleeps, load weights unless it has them, and verify them. Raises GoneError, SamplerError.

        Its cache takes memory only when loading is over.
        """
        if self.sleeps:
            await self.order("/wake_up?tags=weights")
        await self._load(weights)
        if self.sleeps:
            await self.order("/wake_up?tags=kv_cache")

    async def _load(self, weights: Weights) -> None:
        if self.held is not None and self.held.version == weights.version:
            if await self.ask_state() == self.held:
                return
            self.held = None
        if weights.folder is None:
            raise GoneError("it has lost the weights that were sent to it; it gets new ones after the next step")
        try:
            await self._prove(weights, "heedful_load", {"path": str(weights.folder), "version": weights.version})
        except FailedError as problem:
            await self.ask_state()  # raises if it is gone
            raise self.error(
                f"could not load the weights in {weights.folder}: {problem}. Does it see that folder under this path? If it "
                "is on another machine or in a container, set a folder that both see (--sampler-folder)"
            ) from problem

    async def prove_sent(self, weights: Weights) -> None:
        """Verify weights that were sent to it. Raises GoneError, SamplerError."""
        await self._prove(weights, "heedful_checksum", {"version": weights.version})

    async def _prove(self, weights: Weights, method: str, arguments: Mapping[str, str]) -> None:
        """Load or name weights, reset the prefix cache, and verify the checksum."""
        answers = await self._ask_workers(method, arguments, self.timeout)
        reset = await self.ask("/reset_prefix_cache", {}, self.timeout)
        if isinstance(reset, dict) and reset.get("success") is False:
            raise GoneError("the cache of prompts could not be emptied: other requests are using it")
        # a matrix may be split over workers; replicated weights count once
        found = added(part for _, part in {(name, part) for one in answers for name, part in one["parts"].items()})
        if found != weights.checksum:
            raise self.error(
                f"has other weights than the trainer after loading them (checksum {found}, the trainer's "
                f"{weights.checksum}); does it have the same architecture and --dtype, without quantisation?"
            )
        self.held = _held(answers[0])

    async def order(self, path: str) -> None:
        """Send a command without arguments, such as ``/resume``. Raises GoneError, SamplerError."""
        await self.ask(path, {}, self.timeout)

    async def sleep(self) -> None:
        """Leave its GPU's memory to others: weights move to main memory, the cache is dropped. Raises GoneError,
        SamplerError."""
        await self.order("/sleep?level=1")

    async def _ask_workers(self, method: str, arguments: Mapping[str, str], timeout: float) -> list[dict[str, Any]]:
        answer = await self.ask("/collective_rpc", {"method": method, "kwargs": arguments}, timeout)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
            raise self.error(f"returned {str(answer)[:200]} for {method}; {START}")
        return results

    async def ask(self, path: str, content: Mapping[str, Any] | None = None, timeout: float = SHORT) -> Any:
        """The JSON response to one request. Raises GoneError without a response, SamplerError if it is refused."""
        answer = await self._send("GET" if content is None else "POST", path, content, timeout)
        said = answer.text[:500]
        if answer.status_code == 429:
            asked = read_retry_after(answer.headers.get("Retry-After"))
            raise BusyError(min(0.5 if asked is None else asked, MOST_WAIT))
        if answer.status_code == 408 or answer.status_code >= 500:
            raise FailedError(f"{path}: status {answer.status_code}: {said}")
        if answer.status_code == 404 and path != "/v1/completions":
            raise self.error(f"does not know {path}: was it started with VLLM_SERVER_DEV_MODE=1? {START}")
        if answer.status_code != 200:
            raise self.error(f"refused {path} with status {answer.status_code}: {said}")
        try:
            return json.loads(answer.content) if answer.content else {}
        except ValueError as error:
            raise GoneError(f"{path}: not JSON ({error}): {said}") from error

    async def _send(
        self, method: str, path: str, content: Mapping[str, Any] | None = None, timeout: float = SHORT
    ) -> httpx2.Response:
        try:
            async with asyncio.timeout(timeout):
                return await self.client.request(method, self.address + path, json=content)
        except (httpx2.HTTPError, TimeoutError) as error:
            said = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise GoneError(f"{path}: {said}") from error


def _held(answer: Mapping[str, Any]) -> Held:
    return Held(str(answer["instance"]), answer["version"], int(answer["loads"]))


def _is_logprob(number: object) -> bool:
    """A finite number that is at most 0, up to rounding."""
    return isinstance(number, int | float) and math.isfinite(number) and number <= 1e-3
