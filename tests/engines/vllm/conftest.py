"""Servers that speak vLLM's API in processes of their own, policies, and runs that use them."""

import asyncio
import gc
import runpy
import socket
import time
from pathlib import Path

import httpx2
import pytest
import torch

import worlds
from heedful import GRPOConfig, make_tiny_model
from heedful.data.chat import Renderer
from heedful.engines.vllm.servers import connect
from heedful.models import Policy, load_causal_lm, load_tokenizer
from jsonl import write_jsonl


class PolicyServer:
    """A server, as a test sees it."""

    def __init__(self, start, port):
        self.start, self.port = start, port
        self.url = f"http://127.0.0.1:{port}"
        self.name = f"vllm:{self.url}"

    def set_faults(self, **faults):
        httpx2.post(f"{self.url}/faults", json=faults, trust_env=False).raise_for_status()

    def seen(self):
        """What it has seen since this was last asked."""
        return httpx2.get(f"{self.url}/seen", trust_env=False).json()

    def come_back(self):
        """Start again where it was, as soon as nobody is there."""
        until = time.monotonic() + 120
        while True:
            try:
                return self.start(self.port)
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)


@pytest.fixture(scope="session")
def process(forked):
    """``process(port, model)`` starts a server in a copy of this process and returns its port."""
    server = runpy.run_path(Path(__file__).parents[2] / "policy_server.py")["Server"]
    started = []

    def start(port, model):
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(256)
            started.append(forked(lambda: asyncio.run(server(model, 256).serve(listening))))
            return listening.getsockname()[1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.fixture(scope="session")
def _kept():
    return {}


@pytest.fixture
def server(process, tiny, _kept):
    """``server(number)``: the first, second, ... server of the tiny model, awake and without faults."""

    def get(number=0):
        if number not in _kept:

            def start(port):
                return process(port, tiny("qwen3"))

            _kept[number] = PolicyServer(start, start(0))
        try:
            _kept[number].set_faults()
            httpx2.post(f"{_kept[number].url}/wake_up", trust_env=False)
        except httpx2.HTTPError:  # another test had it die
            _kept[number].come_back()
        _kept[number].seen()
        return _kept[number]

    return get


def pytest_collection_modifyitems(items):
    """anyio leaves a connection that is cancelled while it is made to the garbage collector, whose warning is no failure."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(autouse=True, scope="module")
def _cancelled_connections():
    """None of them is left to the tests of other folders."""
    yield
    gc.collect()


@pytest.fixture
def settings(tiny, written, tmp_path):
    """``settings(kind, *servers, **changes)``: three steps of GRPO that samples on servers."""
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "苹果", "梨"]
    stories = written("故事.jsonl", [{"prompt": f"say {word}"} for word in words])

    def make(kind, *servers, **changes):
        base = {
            "model": tiny("qwen3"), "data": stories, "output": tmp_path / "run", "rewards": ("rule:repetition",),
            "sampler": tuple(one.name for one in servers), "sampler_retry_minutes": 0.05, "eval_fraction": 0.3, "steps": 3,
            "rollout_batch_size": 16, "samples_per_prompt": 4, "minibatch_size": 16, "max_new_tokens": 8,
            "learning_rate": 1e-3, "sample_every": 0, "eval_every": 0, "dtype": "float32", "device": "cpu", "save_minutes": 0,
        }  # fmt: skip
        if not servers:
            base.pop("sampler_retry_minutes")
        return kind(**(base | changes))

    return make


@pytest.fixture
def playing(settings, tmp_path):
    """``playing(kind, class, *servers, **changes)``: settings of a run with an environment, and a policy that ends its turns
    soon."""
    make_tiny_model("qwen3", tmp_path / "talker", hidden_size=32, num_layers=2, max_length=128, initializer_range=0.5)
    worlds.end_turns_soon(tmp_path / "talker")
    columns = [{"goal": i % 3 + 1, "folder": str(tmp_path)} for i in range(16)]
    asked = [{"prompt": [{"role": "user", "content": f"你好 {i}"}], **of} for i, of in enumerate(columns)]
    write_jsonl(tmp_path / "对话.jsonl", asked)

    def make(kind, name, *servers, **changes):
        base = {
            "environment": (f"python:{worlds.__file__}:{name}",),
            "data": str(tmp_path / "对话.jsonl"),
            "rewards": (),
        }
        base |= {"model": str(tmp_path / "talker"), "max_new_tokens": 60, "max_prompt_tokens": 64, "max_turns": 3}
        return settings(kind, *servers, **base | changes)

    return make


@pytest.fixture
def connected(settings):
    """``connected(*servers, policy=..., **changes)``: servers that a trainer is connected to."""
    opened = []

    def open_to(*servers, policy, **changes):
        config = settings(GRPOConfig, *servers, **changes)
        renderer = Renderer(load_tokenizer(config.model))
        found = connect(config, policy, stop_ids=[renderer.tokenizer.eos_token_id], pad_id=renderer.pad_id, longest=40)
        opened.append(found)
        return found

    yield open_to
    for one in opened:
        one.close()


@pytest.fixture
def policy(tiny):
    """A policy that is not what the servers begin with: responses of theirs would be others."""
    made = Policy(load_causal_lm(tiny("qwen3")))
    with torch.no_grad():
        for parameter in made.lm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture
def prompts():
    """Token ids of 24 prompts, some of them as long as others."""
    return [[5 + i, 6, 7 + i % 3, *range(20, 20 + i % 5)] for i in range(24)]


@pytest.fixture
def draw(policy, prompts):
    """``draw(servers, ...)``: rollouts of the prompts, always with the same seeds."""

    def of(servers, model=None):
        generator = torch.Generator().manual_seed(3)
        return servers.finish(servers.begin(model or policy, prompts, generator), torch.device("cpu"))

    return of
