"""Run coroutines from code that is not asynchronous, also where an event loop runs already, as in a notebook."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs a coroutine at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and return or raise what it does.

        What interrupts the wait, such as Ctrl-C, cancels the coroutine and goes on at once.
        """
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                with runner:
                    found = runner.run(coroutine)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(found)

        threading.Thread(target=work, daemon=True).start()
        try:
            return outcome.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel what is running, if anything is; a call of `finish` that waits for it raises CancelledError."""
        loop = self._loop
        if loop is None:
            return

        def cancel() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()

        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(cancel)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What coroutines return that run at the same time, in their order. The first error ends the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
