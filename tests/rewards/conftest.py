"""Completions to score, and servers that score them."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from heedful import Prompt, ServeRewardConfig
from heedful.apps.serving.connections import Server, bound
from heedful.apps.serving.rewards import END_SECONDS, Front, RequestQueue, longest_text, running, score_requests
from heedful.data.chat import RewardInputs
from heedful.models import load_reward_model, load_tokenizer, save_reward_model
from heedful.rewards import Completion
from heedful.rewards.models import ModelReward


@pytest.fixture(scope="session")
def folder(tiny, tmp_path_factory):
    """The folder of a reward model."""
    tokenizer = load_tokenizer(tiny("qwen3"))
    model = load_reward_model(tiny("qwen3"), tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3)
    folder = tmp_path_factory.mktemp("评分") / "run" / "final"
    save_reward_model(model, tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="session")
def reward(folder):
    """That model as a reward function."""
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(folder, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32)
    return ModelReward(model.eval(), RewardInputs(tokenizer))


@pytest.fixture
def completions():
    """Three answers to raw-text prompts, with two columns."""
    answers = [("一加一等于几？", "等于2。"), ("苹果是什么颜色？", "红色"), ("say hi", "你好")]
    return [
        Completion(
            Prompt(q, f"数据.jsonl:{i}", {"expected": a[-2:], "难度": i, "weights": i}),
            a,
            ids=(i, i + 1),
            truncated=i == 3,
        )
        for i, (q, a) in enumerate(answers, 1)
    ]


@pytest.fixture
def cpu():
    return {"device": torch.device("cpu"), "compute_dtype": torch.float32}


class Answering:
    """A real server on this machine that behaves as it is told.

    ``answer(count)`` is called for request number ``count`` (from 1) and returns status, body and maybe headers, or None to
    hang up.
    """

    def __init__(self, answer, port=0):
        self.requests = []
        """Path, headers and body of each request."""
        self.done = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append((self.path, dict(self.headers), body))
                answered = answer(len(outer.requests))
                if answered is None:
                    self.close_connection = True
                    return
                status, content, *headers = answered
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client may have given up
                    for piece in content if isinstance(content, list) else [content]:
                        self.wfile.write(piece)
                        if isinstance(content, list):
                            outer.done.wait(0.05)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}/score"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def bodies(self):
        return [json.loads(body) for _, _, body in self.requests]

    def close(self):
        self.done.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def answering():
    """``answering(answer)`` starts a server, at a port if one is given; those of a test are stopped after it."""
    started = []

    def start(answer, port=0):
        started.append(Answering(answer, port))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def serving():
    """``with serving(reward, **settings) as address`` serves a reward in threads of this process."""

    @contextlib.contextmanager
    def serve(reward, *, max_characters=None, token=None, **settings):
        config, requests = ServeRewardConfig(**({"model": "m"} | settings)), RequestQueue()
        server = Server(
            Front(config, requests, token=token).application,
            most_connections=config.max_connections,
            receive_seconds=config.receive_timeout,
            end_seconds=END_SECONDS,
            at_end=requests.close,
        )
        limit = max_characters or longest_text(reward)
        scores = threading.Thread(target=score_requests, args=(requests, reward), kwargs={"max_characters": limit})
        with bound("127.0.0.1", 0) as listening:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with running(server, requests, listening):
                scores.start()
                yield address
        scores.join()

    return serve
