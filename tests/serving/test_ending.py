"""Servers as processes of their own that get a signal while requests come in: each ends, with the signal's exit status."""

import contextlib
import re
import signal
import socket
import threading
import time

import pytest
import torch

from heedful.apps.label import Project
from heedful.configs.label import ProjectSettings
from heedful.models import load_reward_model, load_tokenizer, save_reward_model

REQUESTS = 4000
"""The most that a client sends."""


GET = b"GET /join HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BODY = '{"prompts": ["问"], "completions": ["答"]}'.encode()
SCORE = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def traffic(port, request, stop, answered):
    """One request after the other on one connection, until the server has gone."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        for _ in range(REQUESTS):
            client.sendall(request)
            if stop.is_set() or not client.recv(65536):
                return
            answered.set()


@pytest.fixture
def ended(forked_heedful):
    """``ended(number, request, *words)``: exit status and standard error of a server that gets a signal under traffic."""

    def run(number, request, *words):
        process, clients = forked_heedful(*words), []
        stop, answered = threading.Event(), threading.Event()
        try:
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", process.said()[0])) is None:
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            clients = [
                threading.Thread(target=traffic, args=(int(found[1]), request, stop, answered)) for _ in range(4)
            ]
            for client in clients:
                client.start()
            assert answered.wait(120), process.said()
            process.send_signal(number)
            _, err = process.communicate()
            return process.returncode, err
        finally:
            stop.set()
            process.kill()
            for client in clients:
                client.join()

    return run


SIGNALS = [
    (signal.SIGINT, 0, ""),
    (signal.SIGTERM, 143, "heedful: terminated\n"),
    (signal.SIGHUP, 129, "heedful: terminated\n"),
]


def signals(*kept):
    """The signals of a test; the others are exhaustive."""
    return [row if row[0] in kept else pytest.param(*row, marks=pytest.mark.exhaustive) for row in SIGNALS]


@pytest.mark.parametrize(("number", "status", "said"), signals(signal.SIGINT, signal.SIGHUP))
def test_label_serve(ended, tmp_path, number, status, said):
    Project.create(tmp_path / "项目", ProjectSettings(name="标注")).close()
    assert ended(number, GET, "label", "serve", tmp_path / "项目", "--port", "0") == (status, said)


@pytest.fixture(scope="module")
def scorer(tiny, tmp_path_factory):
    """The folder of a reward model."""
    tokenizer = load_tokenizer(tiny("qwen3"))
    cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    folder = tmp_path_factory.mktemp("评分")
    save_reward_model(load_reward_model(tiny("qwen3"), tokenizer, seed=3, **cpu), tokenizer, folder)
    return folder


@pytest.mark.parametrize(("number", "status", "said"), signals(signal.SIGTERM))
def test_serve_reward(ended, scorer, number, status, said):
    request = SCORE % (len(BODY), BODY)
    assert ended(number, request, "serve-reward", "--model", scorer, "--port", "0", "--device", "cpu") == (status, said)
