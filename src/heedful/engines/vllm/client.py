"""One vLLM server: what it is asked over HTTP, and what its answers may be."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from heedful.engines.vllm import SUPPORTED
from heedful.engines.vllm.extension.heedful_vllm import added
from heedful.engines.vllm.weights import Weights
from heedful.errors import SamplerError
from heedful.retries import read_retry_after

SHORT = 30.0
"""Seconds for an answer that takes no work."""
MOST_WAIT = 30.0
"""The longest wait that a server may ask for (Retry-After)."""
START = "start it with `heedful serve-policy`, or as docs/vllm.md says"


class GoneError(Exception):
    """A server did not answer, or has other weights than it should: what it was asked is to be asked again, or elsewhere."""

    retry_after = 0.0
    """Seconds that the server has asked to wait."""


class FailedError(GoneError):
    """A server answered that it failed (status 5xx)."""


class BusyError(GoneError):
    """A server answers later (status 429)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"is busy (asks to wait {seconds:g} s)")
        self.retry_after = seconds


@dataclass(frozen=True)
class Request:
    """One response to draw."""

    prompt: Sequence[int]
    """Token ids."""
    most: int
    """The most tokens of the response."""
    seed: int


@dataclass(frozen=True)
class Drawn:
    """A response."""

    ids: list[int]
    """With the token that ended it."""
    logprobs: list[float]
    """Of each, under what it was drawn from."""


@dataclass(frozen=True)
class Held:
    """The weights that a server has: where and what. Another process, or another load, has another value."""

    instance: str
    version: str | None
    loads: int


class VLLMServer:
    """A vLLM server at an address.

    Args:
        address: http://HOST:PORT.
        client: makes the requests.
        sampling: what all requests have in common, as ``POST /v1/completions`` takes it.
        timeout: seconds for one response, or for loading weights.
    """

    def __init__(
        self, address: str, client: httpx2.AsyncClient, *, sampling: Mapping[str, Any], timeout: float
    ) -> None:
        self.address, self.client, self.sampling, self.timeout = address, client, sampling, timeout
        self.held: Held | None = None
        """The weights that it was proven to have; None if that is not known."""
        self.about: dict[str, Any] = {}

    def error(self, text: str) -> SamplerError:
        """An error that names the server."""
        return SamplerError(f"--sampler vllm:{self.address} {text}")

    async def draw(self, request: Request) -> Drawn:
        """One response. Raises GoneError, and SamplerError if the server refuses the request."""
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
        if reason not in ("stop", "length"):  # abort: the server is ending, or was told to drop its requests
            raise GoneError(f"a response ended because of {reason!r}")
        known = self.about["vocab_size"]
        is_good = all(type(i) is int and 0 <= i < known for i in ids) and all(map(_is_logprob, logprobs))
        if not is_whole or not is_good or not 0 < len(ids) <= request.most:
            raise self.error(
                f"answered with another prompt, or token ids or log-probs that cannot be: {str(choice)[:300]}; {START}"
            )
        return Drawn(ids, [min(0.0, float(x)) for x in logprobs])

    async def check_version(self) -> None:
        """Raise SamplerError unless it is a vLLM whose answers are known, and GoneError if it does not answer."""
        answer = await self.ask("/version")
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise self.error(f"is no vLLM server: /version answered {str(answer)[:200]}; {START}")
        version: str = answer["version"]
        if ".".join(version.split(".")[:2]) not in SUPPORTED:
            raise self.error(f"is vLLM {version}; heedful knows {' and '.join(SUPPORTED)}: install one of these there")

    async def ask_about(self) -> dict[str, Any]:
        """What the server has loaded (`heedful_about`). Raises GoneError, SamplerError."""
        self.about = (await self._ask_workers("heedful_about", {}, SHORT))[0]
        return self.about

    async def ask_state(self) -> Held:
        """The weights that it says it has now. Raises GoneError."""
        return _held((await self._ask_workers("heedful_state", {}, SHORT))[0])

    async def confirm(self, weights: Weights) -> None:
        """Raise GoneError unless it has these weights, as it was given them."""
        held = await self.ask_state()
        if held != self.held or held.version != weights.version:
            raise GoneError(
                f"it has other weights than it was given ({held.version}): it restarted, or is used by others"
            )

    async def prepare(self, weights: Weights) -> None:
        """Give it weights that it has not got, and prove that it has them. Raises GoneError, SamplerError."""
        if self.held is not None and self.held.version == weights.version:
            if await self.ask_state() == self.held:
                return
            self.held = None
        if weights.folder is None:
            raise GoneError("it has lost the weights that were sent to it; it gets new ones after the next step")
        try:
            await self._prove(weights, "heedful_load", {"path": str(weights.folder), "version": weights.version})
        except FailedError as problem:
            await self.ask_state()  # it may be gone: then that is the problem
            raise self.error(
                f"could not load the weights in {weights.folder}: {problem}. Does it see that folder under this path? If it "
                "is on another machine or in a container, name one that both see (--sampler-folder)"
            ) from problem

    async def prove_sent(self, weights: Weights) -> None:
        """Prove that it has weights that were sent to it. Raises GoneError, SamplerError."""
        await self._prove(weights, "heedful_checksum", {"version": weights.version})

    async def _prove(self, weights: Weights, method: str, arguments: Mapping[str, str]) -> None:
        """Have it load or name weights, forget what it computed with others, and compare their checksum."""
        answers = await self._ask_workers(method, arguments, self.timeout)
        reset = await self.ask("/reset_prefix_cache", {}, self.timeout)
        if isinstance(reset, dict) and reset.get("success") is False:
            raise GoneError("the cache of prompts could not be emptied: other requests are using it")
        # a matrix may be split among workers; what is the same on all counts once
        found = added(part for _, part in {(name, part) for one in answers for name, part in one["parts"].items()})
        if found != weights.checksum:
            raise self.error(
                f"has other weights than the trainer after it loaded them (checksum {found}, the trainer's "
                f"{weights.checksum}); is it a model of the same architecture, not quantised, with --dtype as it is?"
            )
        self.held = _held(answers[0])

    async def order(self, path: str) -> None:
        """Have it do something that has no arguments, such as ``/sleep?level=1``. Raises GoneError, SamplerError."""
        await self.ask(path, {}, self.timeout)

    async def _ask_workers(self, method: str, arguments: Mapping[str, str], timeout: float) -> list[dict[str, Any]]:
        answer = await self.ask("/collective_rpc", {"method": method, "kwargs": arguments}, timeout)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
            raise self.error(f"answered {method} with {str(answer)[:200]}; {START}")
        return results

    async def ask(self, path: str, content: Mapping[str, Any] | None = None, timeout: float = SHORT) -> Any:
        """The answer to one request, as JSON. Raises GoneError if there is none, SamplerError if it is refused."""
        method = "GET" if content is None else "POST"
        try:
            async with asyncio.timeout(timeout):
                answer = await self.client.request(method, self.address + path, json=content)
        except (httpx2.HTTPError, TimeoutError) as error:
            said = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise GoneError(f"{path}: {said}") from error
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


def _held(answer: Mapping[str, Any]) -> Held:
    return Held(str(answer["instance"]), answer["version"], int(answer["loads"]))


def _is_logprob(number: object) -> bool:
    """A finite number that is at most 0, up to rounding."""
    return isinstance(number, int | float) and math.isfinite(number) and number <= 1e-3
