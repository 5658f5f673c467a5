"""Samples many responses on several servers: each row exactly once, with verified weights, even if servers fail."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence

from heedful.background import all_of
from heedful.engines.vllm.client import BusyError, Drawn, GoneError, Request, VLLMServer
from heedful.engines.vllm.weights import Weights
from heedful.errors import SamplerError
from heedful.retries import pause


class Dispatch:
    """The rows of one batch, in flight.

    Each server takes as many rows at a time as it samples together, until none are left. A row is ``confirmed`` once
    the server is verified to have had the same weights before and after it. Rows of a failed server since its last
    confirmation are sampled again by any server, with the same seed. So no row is lost, duplicated, or from other
    weights.

    Args:
        servers: the servers.
        weights: the weights to sample with; loaded by servers that do not have them.
        requests: the rows.
        patience: seconds without progress after which it raises.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        weights: Weights,
        requests: Sequence[Request],
        *,
        patience: float,
    ) -> None:
        self.servers, self.weights, self.requests = servers, weights, requests
        self.share, self.patience = math.ceil(len(requests) / len(servers)), patience
        self.left = deque(range(len(requests)))
        self.confirmed: dict[int, Drawn] = {}
        self.retries = 0
        """Number of retries of rows and servers."""
        self.problems: dict[str, str] = {}
        self.progressed = time.monotonic()
        self.changed = asyncio.Event()

    async def run(self) -> list[Drawn]:
        """The responses, in the order of the requests. Raises SamplerError."""
        await first_of(self._serve(server) for server in self.servers)
        return [self.confirmed[row] for row in range(len(self.requests))]

    @property
    def is_done(self) -> bool:
        return len(self.confirmed) == len(self.requests)

    async def _serve(self, server: VLLMServer) -> None:
        """Run one server, with retries after failures, until every row is confirmed."""
        failures = 0
        while not self.is_done:
            mine: dict[int, Drawn] = {}
            try:
                await server.prepare(self.weights)
                most = min(self.share, server.about["max_num_seqs"], len(self.left))
                await all_of(self._pull(server, mine) for _ in range(most))
                if mine:
                    await server.confirm(self.weights)
                    self.confirmed |= mine
                    self.progressed = time.monotonic()
                    self.changed.set()
                failures = 0
                if not self.left and not self.is_done:
                    self.changed.clear()
                    await self.changed.wait()  # other servers may return rows
            except GoneError as problem:
                self._give_back(mine)
                server.held = None
                failures += 1
                await self._wait(server, problem, failures)
            except BaseException:
                self._give_back(mine)
                raise

    async def _pull(self, server: VLLMServer, mine: dict[int, Drawn]) -> None:
        """Sample rows, one after the other, until none are left. Raises GoneError if the server has lost its
        weights."""
        failures = 0
        while self.left:
            row = self.left.popleft()
            try:
                mine[row] = await server.draw(self.requests[row])
                self.progressed, failures = time.monotonic(), 0
            except GoneError as problem:
                self._give_back([row])
                if not isinstance(problem, BusyError):
                    await server.confirm(self.weights)
                failures += 1
                await self._wait(server, problem, failures)
            except BaseException:
                self._give_back([row])
                raise

    def _give_back(self, rows: Iterable[int]) -> None:
        self.left.extendleft(sorted(rows, reverse=True))
        self.changed.set()

    async def _wait(self, server: VLLMServer, problem: GoneError, failures: int) -> None:
        """Wait before the next try. Raises SamplerError if no server has answered for too long."""
        self.retries += 1
        self.problems[server.address] = str(problem)
        seconds = pause(failures, problem.retry_after)
        if time.monotonic() + seconds > self.progressed + self.patience:
            raise SamplerError(
                f"--sampler: no server answers. {'; '.join(f'vllm:{who}: {what}' for who, what in self.problems.items())}. "
                f"No response for {self.patience:g} s (--sampler-retry-minutes); are the servers running and reachable "
                "from here? The same command resumes once they are back"
            )
        await asyncio.sleep(seconds)


async def first_of(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines concurrently until the first ends or raises; then cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
