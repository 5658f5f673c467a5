"""Coroutines beside other code: an event loop in a thread of its own, and several coroutines at the same time."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
LAST_SECONDS = 10.0
"""Longest wait for running coroutines when a `Background` is closed, in seconds."""


class Background:
    """An event loop in a thread of its own. It also works beside a running event loop, as in a notebook.

    Args:
        at_end: makes a last coroutine, which runs on closing: by `close`, on garbage collection, or at the end of the
            program.
    """

    def __init__(self, at_end: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(self._loop,), name="heedful background", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._loop, thread, at_end)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result or raise its error."""
        return result(self.start(coroutine))

    def stop(self) -> None:
        """Cancel all running coroutines. A thread waiting for one gets a `concurrent.futures.CancelledError`."""
        self._loop.call_soon_threadsafe(_cancel, self._loop)


def result(future: "Future[T]") -> T:
    """Wait for a future's result. An interrupt of the wait, such as Ctrl-C, cancels the future and is raised at once."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel(loop: asyncio.AbstractEventLoop) -> list["asyncio.Task[Any]"]:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in tasks:
        task.cancel()
    return tasks


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    at_end: Callable[[], Coroutine[Any, Any, None]] | None,
) -> None:
    async def end() -> None:
        try:
            await asyncio.gather(*_cancel(loop), return_exceptions=True)
            if at_end is not None:
                await at_end()
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:  # in which this may be garbage
        thread.join(LAST_SECONDS)
