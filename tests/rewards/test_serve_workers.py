"""Several workers behind one server: who scores what, and what happens to requests and workers when one dies."""

import json
import socket
import threading
import time

import httpx2
import pytest
import torch

from heedful.configs.scoring import RewardOptions, ServeRewardConfig
from heedful.errors import CheckpointError, MachineError
from heedful.rewards import Completion, score
from heedful.rewards.resolve import load_rewards
from heedful.rewards.serve_worker import device_of, threads_of
from heedful.serving import workers as of_workers
from heedful.serving.process import FrontProcess
from heedful.serving.workers import Worker, Workers
from heedful.types import MicroBatch, Prompt


def ask(url, name="问"):
    body = json.dumps({"prompts": [name], "completions": ["答"]}).encode()
    return httpx2.post(f"{url}/score", content=body, headers={"Content-Type": "application/json"}, timeout=30)


class Asking(threading.Thread):
    """A client that waits for its answer."""

    def __init__(self, url, name):
        super().__init__()
        self.url, self.name = url, name
        self.start()

    def run(self):
        self.answer = ask(self.url, self.name)

    def status(self):
        self.join(30)
        return self.answer.status_code


class Busy:
    """A worker's model that takes its time, and remembers whom it was asked about."""

    def __init__(self):
        self.asked = []
        self.go = threading.Semaphore(0)

    def __call__(self, prompts, completions, truncated):
        self.asked.append(prompts[0])
        self.go.acquire(timeout=30)
        return [1.0] * len(completions)


def wait_until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def dies(prompts, completions, truncated):
    """A worker that ends in the middle of its work."""
    raise SystemExit


def fives(prompts, completions, truncated):
    return [5.0] * len(completions)


def test_a_request_goes_to_the_worker_that_is_free(serving):
    """Two are scored at a time; the queue begins after them; health is answered beside them."""
    first, second = Busy(), Busy()
    with serving(first, second, max_characters=1000, max_queue=2) as url:
        clients = [Asking(url, "甲")]
        wait_until(lambda: first.asked)
        clients.append(Asking(url, "乙"))
        wait_until(lambda: second.asked)
        clients.append(Asking(url, "丙"))
        time.sleep(0.2)
        clients.append(Asking(url, "丁"))
        time.sleep(0.2)
        assert ask(url).status_code == 429
        assert httpx2.get(f"{url}/health").status_code == 200
        second.go.release(2)
        assert clients[2].status() == 200
        wait_until(lambda: len(second.asked) == 3)
        second.go.release()
        first.go.release()
        assert [client.status() for client in clients] == [200] * 4
    assert (first.asked, second.asked) == (["甲"], ["乙", "丙", "丁"])


def test_one_batch_of_a_trainer_is_scored_by_several_workers(serving):
    """They wait for each other: if one did not score while the other does, nobody would be answered."""
    both = threading.Barrier(2, timeout=10)

    def waits(prompts, completions, truncated):
        both.wait()
        return [float(len(prompt)) for prompt in prompts]

    completions = [Completion(Prompt("问" * n, f"d:{n}"), "答") for n in range(1, 9)]
    options = RewardOptions(reward_retry_minutes=0)
    with serving(waits, waits, max_characters=1000) as url:
        limits = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "micro_batch": MicroBatch(2)}
        found = score(load_rewards([f"{url}/score"], options, **limits).rewards, completions)[0]
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_request_whose_worker_dies_is_given_to_another(serving):
    with serving(dies, fives, max_characters=1000) as url:
        for _ in range(2):
            assert ask(url).json() == {"scores": [5.0]}


def test_a_request_that_kills_workers_is_told_so(serving):
    """It does not get them all."""
    with serving(dies, dies, fives, max_characters=1000) as url:
        answer = ask(url)
        assert (answer.status_code, answer.json()["error"][:40]) == (500, "2 workers died while they scored this re")
        assert ask(url).json() == {"scores": [5.0]}


PLANTED = """
import json, os, pathlib, socket, sys
from heedful.serving.channel import FAILED, READY, receive, send

def main(life, channel):
    starter, requests = socket.socket(fileno=life), socket.socket(fileno=channel)
    folder = pathlib.Path(receive(starter)[1].decode())
    number = len(list(folder.glob("start-*")))
    (folder / f"start-{number}").touch()
    says, *then = (folder / "行为").read_text(encoding="utf-8").split("\\n")[number].split()
    if says == "refuses":
        send(starter, FAILED, json.dumps({"kind": "CheckpointError", "text": "坏了"}).encode())
        sys.exit()
    if says == "dies":
        os._exit(7)
    send(starter, READY, json.dumps({"device": "cpu", "threads": 1, "score": float(says)}).encode())
    if then:
        sys.exit(8)
    while receive(requests) is not None:
        send(requests, 200, b'{"scores": [5.0]}')
"""
"""A worker that behaves as the line of its start says."""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """``planted(behaviour, ...)`` is workers that behave so, one line for each start, and the folders of their starts."""
    (tmp_path / "planted_worker.py").write_text(PLANTED, encoding="utf-8")
    monkeypatch.setattr(of_workers, "PAUSE_SECONDS", 0.05)

    def make(*behaviours):
        folders = []
        for i, behaviour in enumerate(behaviours):
            folders.append(tmp_path / f"worker-{i}")
            folders[-1].mkdir()
            (folders[-1] / "行为").write_text("\n".join(behaviour), encoding="utf-8")
        program = f"sys.path.insert(0, {str(tmp_path)!r}); from planted_worker import main; main"
        return Workers(program, [str(folder).encode() for folder in folders]), folders

    return make


def kept(workers):
    """Start workers and keep them until that is not possible any more."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with workers, FrontProcess(bound) as front:
            workers.start(front)
            workers.keep(front)


def test_workers_that_die_are_started_again_until_none_can_be(planted, capfd):
    """The second is gone for good while the first serves; when the first cannot come back either, the server ends."""
    workers, folders = planted(["0.5", "0.5 dies", "refuses"], ["1.0 dies", "refuses", "dies", *["refuses"] * 20])

    def kill_the_first():
        wait_until(lambda: len(list(folders[1].glob("start-*"))) >= 4)
        workers.all[0].process.kill()

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    with pytest.raises(CheckpointError, match=r"^坏了$"):
        kept(workers)
    killer.join()
    said = capfd.readouterr().err.splitlines()
    assert said[:3] == [
        "heedful: worker 2 ended by itself, with status 8; another takes its place",
        "heedful: worker 2 is not back: 坏了",
        "heedful: worker 2 is not back: worker 2 ended by itself, with status 7 while it loaded the model",
    ]
    assert [line for line in said if "worker 1" in line] == [
        "heedful: worker 1 was ended by SIGKILL; another takes its place",
        "heedful: worker 1 scores again",
        "heedful: worker 1 ended by itself, with status 8; another takes its place",
    ]
    assert len(list(folders[0].glob("start-*"))) == 3
    assert all(worker.process is None for worker in workers.all)


def test_starts_that_fail_become_rare():
    worker = Worker(1, b"", started=100.0)
    assert worker.due == 102.0
    worker.failures = 3
    assert worker.due == 116.0
    worker.failures = 50
    assert worker.due == 400.0


def test_a_worker_that_would_score_otherwise_is_not_let_in(planted):
    """Its files are those of another model by now."""
    workers, _ = planted(["0.5 dies", "0.51"])
    with pytest.raises(CheckpointError, match="scores otherwise than when the server was started"):
        kept(workers)


def test_a_first_worker_that_cannot_load_is_the_only_one_that_tries(planted):
    workers, folders = planted(["refuses"], ["1.0"])
    with pytest.raises(CheckpointError, match=r"^坏了$"):
        kept(workers)
    assert not list(folders[1].glob("start-*"))


def test_a_worker_that_dies_at_the_start_ends_the_server_with_advice(planted):
    workers, _ = planted(["1.0"], ["dies"])
    with pytest.raises(
        MachineError, match=r"^worker 2 ended by itself, with status 7 while it loaded .* --workers 2 holds"
    ):
        kept(workers)


@pytest.mark.parametrize(
    ("device", "places"),
    [
        ("cuda", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:1", ["cuda:1"] * 4),
        ("cpu", ["cpu"] * 4),
        ("mps", ["mps"] * 4),
    ],
)
def test_workers_take_turns_at_gpus(device, places):
    assert [str(device_of(torch.device(device), i, 2)) for i in range(4)] == places


def test_workers_share_the_threads_of_a_cpu(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    shares = [threads_of(ServeRewardConfig(model="m", workers=n), torch.device("cpu")) for n in (1, 3, 20)]
    assert shares == [8, 2, 1]
    assert threads_of(ServeRewardConfig(model="m", workers=3), torch.device("cuda")) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads_of(ServeRewardConfig(model="m", workers=3), torch.device("cpu")) == 8
