"""One vLLM server: what it is asked over HTTP, and what its answers may be."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from heedful.errors import SamplerError
from heedful.sampling.vllm.extension.heedful_vllm import added

SUPPORTED = ("0.32", "0.33")
"""Versions of vLLM whose answers are known (docs/vllm.md says what was tried on which)."""
SHORT = 30.0
"""Seconds for an answer that takes no work."""
MOST_WAIT = 30.0
"""The longest wait that a server may ask for (Retry-After)."""
START = "start it with `heedful serve-policy`, or as docs/vllm.md says"


class GoneError(Exception):
    """A server did not answer, or has other weights than it should: what it was asked is to be asked again, or elsewhere."""


class FailedError(GoneError):
    """A server answered that it failed (status 5xx)."""


class BusyError(GoneError):
    """A server answers later (status 429). The argument is after how many seconds."""


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
        answer = await self._ask("/v1/completions", asked, self.timeout)
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

    async def ask_version(self) -> str:
        """The version of vLLM. Raises GoneError, SamplerError."""
        answer = await self._ask("/version", None, SHORT)
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise self.error(f"is no vLLM server: /version answered {str(answer)[:200]}; {START}")
        version: str = answer["version"]
        if ".".join(version.split(".")[:2]) not in SUPPORTED:
            raise self.error(f"is vLLM {version}; heedful knows {' and '.join(SUPPORTED)}: install one of these there")
        return version

    async def ask_about(self) -> dict[str, Any]:
        """What the server has loaded (`heedful_about`). Raises GoneError, SamplerError."""
        self.about = (await self._ask_workers("heedful_about", {}, SHORT))[0]
        return self.about

    async def ask_state(self) -> Held:
        """The weights that it says it has now. Raises GoneError."""
        return _held((await self._ask_workers("heedful_state", {}, SHORT))[0])

    async def load(self, folder: str, version: str) -> str:
        """Have it load weights, and forget what it computed with others. Returns their checksum. Raises GoneError."""
        answers = await self._ask_workers("heedful_load", {"path": folder, "version": version}, self.timeout)
        return await self._loaded(answers)

    async def name_weights(self, version: str) -> str:
        """The checksum of the weights that it has, however it got them, which are from now on called ``version``."""
        return await self._loaded(await self._ask_workers("heedful_checksum", {"version": version}, self.timeout))

    async def order(self, path: str) -> Any:
        """Have it do something that has no arguments, such as ``/sleep?level=1``. Raises GoneError, SamplerError."""
        return await self._ask(path, {}, self.timeout)

    async def ask(self, path: str) -> Any:
        """Ask something that has no arguments, such as ``/get_world_size``. Raises GoneError, SamplerError."""
        return await self._ask(path, None, SHORT)

    async def _loaded(self, answers: Sequence[Mapping[str, Any]]) -> str:
        reset = await self._ask("/reset_prefix_cache", {}, self.timeout)
        if isinstance(reset, dict) and reset.get("success") is False:
            raise GoneError("the cache of prompts could not be emptied: other requests are using it")
        self.held = _held(answers[0])
        # a matrix may be split among workers; what is the same on all counts once
        return added(part for _, part in {(name, part) for one in answers for name, part in one["parts"].items()})

    async def _ask_workers(self, method: str, arguments: Mapping[str, str], timeout: float) -> list[dict[str, Any]]:
        answer = await self._ask("/collective_rpc", {"method": method, "kwargs": arguments}, timeout)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
            raise self.error(f"answered {method} with {str(answer)[:200]}; {START}")
        return results

    async def _ask(self, path: str, content: Mapping[str, Any] | None, timeout: float) -> Any:
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
            raise BusyError(_seconds(answer.headers.get("Retry-After")))
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


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(0.1, float(retry_after or 0.5)), MOST_WAIT)
    except ValueError:  # a date
        return 1.0
