"""Work that never ends is ended, and nothing else is touched."""

import threading
import time

import pytest

from heedful.data import template
from heedful.data.chat import Renderer
from heedful.data.deadline import TICK, TimeLimit, TimeUpError
from heedful.errors import CheckpointError
from heedful.models.tiny import byte_tokenizer
from heedful.types import Message

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_endless_work_is_ended_where_it_runs():
    limit, said = TimeLimit(2 * TICK), []

    def work():
        with pytest.raises(TimeUpError), limit():
            spin(60)
        said.append("ended")

    for _ in range(2):  # also after the watching thread has ended
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        time.sleep(2 * TICK)
    assert said == ["ended", "ended"]


def test_work_that_ends_in_time_is_left_alone():
    limit = TimeLimit(3 * TICK)
    for _ in range(3):  # more than one limit in all, each piece less than one
        with limit():
            spin(2 * TICK)
    spin(4 * TICK)


def test_an_error_of_the_work_is_its_own():
    with pytest.raises(ZeroDivisionError), TimeLimit(1)():
        _ = 1 / 0


def test_it_costs_microseconds():
    limit = TimeLimit(1)
    started = time.thread_time()  # of this thread, so that a busy machine does not count
    for _ in range(1000):
        with limit():
            pass
    assert (time.thread_time() - started) / 1000 < 2e-4  # 3e-6 on a quiet machine; a thread for each would be 1e-4


def test_a_template_that_loops(monkeypatch):
    """It is refused with the tokenizer's name; what is rendered next is not."""
    monkeypatch.setattr(template, "TIME_LIMIT", TimeLimit(2 * TICK))
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer)
    own = tokenizer.chat_template
    tokenizer.name_or_path = "模型"
    renderer = Renderer(tokenizer)
    tokenizer.chat_template = own + LOOP
    with pytest.raises(CheckpointError, match=r"模型 did not render a conversation of 1 message within 0.5 seconds"):
        renderer.prompt_ids((Message("user", "a"),))
    tokenizer.chat_template = own
    assert renderer.prompt_ids((Message("user", "a"),))
