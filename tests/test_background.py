"""Coroutines in a thread of their own: what they return, what ends them, and what is done at the end."""

import asyncio
import gc
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from heedful.background import Background, all_of


async def number(value, error=None):
    await asyncio.sleep(0)
    if error is not None:
        raise error
    return value


async def for_ever(ended):
    try:
        await asyncio.sleep(3600)
    finally:
        ended.append(True)


def test_it_runs_beside_a_loop_that_runs_already():
    background = Background()

    async def as_in_a_notebook():
        return background.run(all_of(number(i) for i in range(3)))

    with ThreadPoolExecutor(1) as thread:  # a browser's tests leave a loop in this one
        assert thread.submit(lambda: asyncio.run(as_in_a_notebook())).result(60) == [0, 1, 2]


def test_the_first_error_ends_the_others():
    ended = []
    with pytest.raises(ValueError, match="坏了"):
        Background().run(all_of([for_ever(ended), number(1, ValueError("坏了"))]))
    assert ended == [True]


def test_another_thread_can_stop_it():
    background, ended = Background(), []
    threading.Timer(0.1, background.stop).start()
    with pytest.raises(CancelledError):
        background.run(for_ever(ended))
    assert ended == [True]
    assert background.run(number(2)) == 2, "only what ran was cancelled"


@pytest.mark.parametrize("closes", [True, False], ids=["close", "garbage"])
def test_its_end_cancels_what_runs_and_then_does_the_last(closes):
    ended, threads = [], threading.active_count()

    async def last():
        ended.append("last")

    background = Background(at_end=last)
    future = background.start(for_ever(ended))
    background.run(number(1))  # so that the other has begun
    if closes:
        background.close()
    del background
    gc.collect()
    with pytest.raises(CancelledError):
        future.result(10)
    assert ended == [True, "last"]
    assert threading.active_count() <= threads
