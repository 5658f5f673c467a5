"""Many responses from several servers: each row is drawn once, by weights that were proven, whatever becomes of a server."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence

from heedful.errors import SamplerError
from heedful.sampling.vllm.server import BusyError, Drawn, FailedError, GoneError, Request, VLLMServer
from heedful.sampling.vllm.weights import Weights

FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
"""Seconds before a server that failed is asked again: the first, doubled each time up to the last."""


class Dispatch:
    """The rows of one batch, on their way.

    A server takes rows while there are any, so many at a time. A row counts once the server is known to have had the same
    weights before it and after it, without a break: then it is ``confirmed``. What a server that fails has drawn since the
    last confirmation goes back, and is drawn by whichever server is there, with the same seed. So no row is lost, none is
    there twice, and none is by other weights.

    Args:
        servers: who draws.
        weights: what they draw with; each is given them, if it has not got them.
        requests: the rows.
        concurrency: the most rows in flight to one server.
        patience: seconds without any progress after which it ends.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        weights: Weights,
        requests: Sequence[Request],
        *,
        concurrency: int,
        patience: float,
    ) -> None:
        self.servers, self.weights, self.requests = servers, weights, requests
        self.share, self.patience = min(concurrency, math.ceil(len(requests) / len(servers))), patience
        self.left = deque(range(len(requests)))
        self.confirmed: dict[int, Drawn] = {}
        self.retries = 0
        """Times that a row, or a server, was asked again."""
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
        """Have one server draw, through all its failures, until every row is confirmed."""
        wait = FIRST_WAIT
        while not self.is_done:
            mine: dict[int, Drawn] = {}
            try:
                await prepare(server, self.weights)
                await together(self._pull(server, mine) for _ in range(min(self.share, len(self.left))))
                if mine:
                    await self._confirm(server)
                    self._keep(mine)
                wait = FIRST_WAIT
                if not self.left and not self.is_done:
                    self.changed.clear()
                    await self.changed.wait()  # others may give rows back
            except GoneError as problem:
                self._give_back(mine)
                server.held = None
                await self._wait(server, problem, wait)
                wait = min(2 * wait, LONGEST_WAIT)
            except BaseException:
                self._give_back(mine)
                raise

    async def _pull(self, server: VLLMServer, mine: dict[int, Drawn]) -> None:
        """Draw rows, one after the other, while there are any. Raises GoneError if the server has lost its weights."""
        wait = FIRST_WAIT
        while self.left:
            row = self.left.popleft()
            try:
                mine[row] = await server.draw(self.requests[row])
                self.progressed, wait = time.monotonic(), FIRST_WAIT
            except GoneError as problem:
                self._give_back([row])
                if isinstance(problem, BusyError):
                    wait = problem.args[0]
                else:
                    await self._confirm(server)
                await self._wait(server, problem, wait)
                wait = min(2 * wait, LONGEST_WAIT)
            except BaseException:
                self._give_back([row])
                raise

    async def _confirm(self, server: VLLMServer) -> None:
        """Raise GoneError unless a server has the weights that it was given, as it was given them."""
        held = await server.ask_state()
        if held != server.held or held.version != self.weights.version:
            raise GoneError(
                f"it has other weights than it was given ({held.version}): it restarted, or is used by others"
            )

    def _keep(self, rows: dict[int, Drawn]) -> None:
        self.confirmed |= rows
        self.progressed = time.monotonic()
        self.changed.set()

    def _give_back(self, rows: Iterable[int]) -> None:
        self.left.extendleft(sorted(rows, reverse=True))
        self.changed.set()

    async def _wait(self, server: VLLMServer, problem: GoneError, seconds: float) -> None:
        """Wait before the next try. Raises SamplerError if nothing has come from any server for too long."""
        self.retries += 1
        said = f"is busy (asks to wait {problem.args[0]:g} s)" if isinstance(problem, BusyError) else str(problem)
        self.problems[server.address] = said
        if time.monotonic() + seconds > self.progressed + self.patience:
            raise SamplerError(
                f"--sampler: no server answers. {'; '.join(f'vllm:{who}: {what}' for who, what in self.problems.items())}. "
                f"Nothing came for {self.patience:g} s (--sampler-retry-minutes); are the servers running and reachable "
                "from here? The same command goes on once they are back"
            )
        await asyncio.sleep(seconds)


async def prepare(server: VLLMServer, weights: Weights) -> None:
    """Give a server weights that it has not got, and prove that it has them. Raises GoneError, SamplerError."""
    if server.held is not None and server.held.version == weights.version:
        if await server.ask_state() == server.held:
            return
        server.held = None
    if weights.folder is None:
        raise GoneError("it has lost the weights that were sent to it; it gets new ones after the next step")
    try:
        found = await server.load(str(weights.folder), weights.version)
    except FailedError as problem:
        await server.ask_state()  # it may be gone: then that is the problem
        raise server.error(
            f"could not load the weights in {weights.folder}: {problem}. Does it see that folder under this path? If it is "
            "on another machine or in a container, name one that both see (--sampler-folder)"
        ) from problem
    check(server, found, weights)


def check(server: VLLMServer, found: str, weights: Weights) -> None:
    """Raise SamplerError unless a server's weights are the trainer's."""
    if found != weights.checksum:
        server.held = None
        raise server.error(
            f"has other weights than the trainer after it loaded them (checksum {found}, the trainer's {weights.checksum}); "
            "is it a model of the same architecture, not quantised, with --dtype as it is?"
        )


async def together(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines at the same time to their ends. The first error ends the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def first_of(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines at the same time until the first has ended, or has raised, and end the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
