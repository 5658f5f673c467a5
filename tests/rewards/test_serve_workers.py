"""Several workers behind one server: who scores what, and what happens to requests and workers when one dies."""

import contextlib
import json
import resource
import socket
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
import torch

from heedful.configs.scoring import RewardOptions, ServeRewardConfig
from heedful.errors import CheckpointError, ConfigError, MachineError, RewardError
from heedful.rewards import Completion, score
from heedful.rewards.http import HTTPReward
from heedful.rewards.resolve import load_rewards
from heedful.rewards.serve import limits_of
from heedful.rewards.serve_worker import answer, answer_requests, device_of, threads_of
from heedful.serving import workers as of_workers
from heedful.serving.channel import WORKER
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


def three(url, first, second):
    """Requests of which two workers score one each, and the third waits."""
    clients = [Asking(url, "甲")]
    wait_until(lambda: first.asked)
    clients.append(Asking(url, "乙"))
    wait_until(lambda: second.asked)
    clients.append(Asking(url, "丙"))
    time.sleep(0.2)
    return clients


def test_a_request_goes_to_the_worker_that_is_free(serving):
    """Two are scored at a time; the queue begins after them; health is answered beside them."""
    first, second = Busy(), Busy()
    with serving(first, second, max_characters=1000, max_queue=2) as url:
        clients = three(url, first, second)
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
    """It does not get them all, though the client would ask again for ten minutes."""
    with serving(dies, dies, fives, max_characters=1000) as url:
        with pytest.raises(RewardError, match=r"status 422: .*2 workers died while they scored this request"):
            HTTPReward(f"{url}/score")(prompts=["问"], completions=["答"], truncated=[False])
        assert ask(url).json() == {"scores": [5.0]}


def test_a_request_whose_worker_dies_is_scored_next(serving):
    first, second = Busy(), Busy()

    def dies_later(*request):
        first(*request)
        raise SystemExit

    with serving(dies_later, second, max_characters=1000) as url:
        clients = three(url, first, second)
        first.go.release()
        time.sleep(0.2)
        second.go.release(3)
        assert [client.status() for client in clients] == [200] * 3
    assert second.asked == ["乙", "甲", "丙"]


def raises(error):
    def reward(prompts, completions, truncated):
        raise error

    return reward


LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_worker_whose_gpu_has_failed_leaves_its_request_to_others(serving):
    """It would fail at every further request, and be free for the next one before any other."""
    with serving(raises(LOST), fives, max_characters=1000) as url:
        assert [ask(url).json() for _ in range(3)] == [{"scores": [5.0]}] * 3


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (LOST, True),
        (type("AcceleratorError", (RuntimeError,), {})("设备"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("形状不对"), False),
    ],
)
def test_which_errors_end_a_worker(error, ends):
    body = json.dumps({"prompts": ["问"], "completions": ["答"]}).encode()
    said = []
    with pytest.raises(SystemExit, match=f"for good: .*{error}") if ends else contextlib.nullcontext():
        status, _ = answer(raises(error), body, max_characters=1000, log=said.append)
        assert (status, said) == (500, [f"scoring failed: RuntimeError: {error}"])


@contextlib.contextmanager
def front_at(**settings):
    """The process that receives requests, open, with its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with FrontProcess(bound) as front:
            front.open(limits_of(ServeRewardConfig(model="m", **settings)))
            yield front, f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def working(front):
    """A worker of it that gives fives."""
    ours, theirs = socket.socketpair()
    front.add(theirs)
    thread = threading.Thread(target=answer_requests, args=(ours, fives), kwargs={"max_characters": 1000})
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        thread.join()
        ours.close()


def test_a_worker_whose_socket_does_not_come_is_not_the_last():
    """The system leaves it out if too many files are open."""
    with front_at() as (front, url):
        front.control.send(WORKER)
        with working(front):
            assert ask(url).json() == {"scores": [5.0]}


def test_a_low_soft_limit_of_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        front_process = front_at(max_queue=4, max_connections=200)
        front, url = front_process.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        stack.push(front_process)
        port = int(url.rpartition(":")[2])
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with working(front):
            assert ask(url).json() == {"scores": [5.0]}


def test_all_workers_can_be_added_before_requests_are_received():
    with socket.socket() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        front = stack.enter_context(FrontProcess(bound))
        front.control.setblocking(False)  # it raises instead of waiting forever for room
        for _ in range(128):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            front.add(theirs)
    with pytest.raises(ConfigError, match="--workers must be at least 1 and at most 128"):
        ServeRewardConfig(model="m", workers=129)


def test_a_death_of_the_process_that_receives_requests_is_said():
    """It is no broken pipe."""

    def opened_after_its_death():
        with socket.socket() as bound, FrontProcess(bound) as front:
            front.process.kill()
            front.process.wait()
            bound.bind(("127.0.0.1", 0))
            front.open(limits_of(ServeRewardConfig(model="模型")))

    with pytest.raises(OSError, match=r"^the process that receives requests has ended by itself, with status -9$"):
        opened_after_its_death()


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
    workers, folders = planted(["0.5", "0.5 dies", "refuses"], ["0.5 dies", "refuses", "dies", *["refuses"] * 20])

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
    """The time is that since the failure."""
    found = [Worker(1, b"", since=100.0, failures=failures).due for failures in (0, 1, 2, 3, 8, 50)]
    assert found == [100.0, 102.0, 104.0, 108.0, 356.0, 400.0]


@pytest.mark.parametrize(("seconds", "failures"), [(59.0, 6), (61.0, 0)])
def test_failures_are_forgotten_after_a_minute_of_work(seconds, failures):
    worker = Worker(1, b"", failures=5, is_ready=True, since=time.monotonic() - seconds)
    worker.fail(MachineError("死了"))
    assert (worker.failures, worker.is_ready) == (failures, False)


@pytest.mark.parametrize("alone", [True, False])
def test_failures_that_may_pass_are_no_end(planted, monkeypatch, capfd, alone):
    """Of the only worker, or of all."""
    monkeypatch.setattr(of_workers, "MOST_FAILURES", 3)
    behaviour = ["0.5 dies", "dies", "0.5 dies", "0.5 dies"]
    workers, folders = planted(
        *([behaviour] if alone else [["0.5 dies", "dies", "dies"], ["0.5 dies", "dies", "dies"]])
    )
    with pytest.raises(MachineError, match=r"^worker . ended by itself, with status [78]"):
        kept(workers)
    assert [len(list(folder.glob("start-*"))) for folder in folders] == ([3] if alone else [3, 3])
    assert ("worker 1 scores again" in capfd.readouterr().err) == alone


def files():
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_worker_that_the_system_does_not_start_is_tried_again(planted, monkeypatch, capfd):
    """The sockets that were made for it are closed."""
    monkeypatch.setattr(of_workers, "MOST_FAILURES", 4)
    workers, _ = planted(["0.5"])
    open_before = []

    def kept_without_python(front):
        workers.start(front)
        monkeypatch.setattr(sys, "executable", "/没有")
        workers.all[0].process.kill()
        open_before.append(files())
        workers.keep(front)

    with socket.socket() as bound, workers, FrontProcess(bound) as front:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(MachineError, match=r"^worker 1 could not be started: .*没有"):
            kept_without_python(front)
        assert files() < open_before[0]
    assert capfd.readouterr().err.count("worker 1 is not back: worker 1 could not be started") == 2


def test_a_death_of_the_process_that_receives_requests_ends_the_start(planted):
    workers, folders = planted(["0.5"], ["0.5"])
    with socket.socket() as bound, workers, FrontProcess(bound) as front:
        front.process.kill()
        front.process.wait()
        with pytest.raises(OSError, match="the process that receives requests has ended by itself, with status -9"):
            workers.start(front)
    assert not list(folders[1].glob("start-*"))


def test_a_worker_that_would_score_otherwise_is_not_let_in(planted):
    """Its files are those of another model by now."""
    workers, _ = planted(["0.5 dies", "0.51"])
    with pytest.raises(CheckpointError, match="scores otherwise than when the server was started"):
        kept(workers)


def test_workers_with_different_models_do_not_start(planted):
    """On a CPU the same model gives the same number."""
    workers, _ = planted(["0.5"], ["0.500001"])
    with pytest.raises(CheckpointError, match="scores otherwise than when the server was started"):
        kept(workers)


@pytest.mark.parametrize(
    ("devices", "scores", "same"),
    [
        (("cpu", "cpu"), (0.5, 0.5), True),
        (("cuda:0", "cuda:1"), (0.5, 0.5004), True),
        (("cuda:0", "cuda:1"), (0.5, 0.51), False),
        (("cuda:0", "cpu"), (0.5, 0.5004), True),
        (("cpu", "cpu"), (None, None), True),
        (("cpu", "cpu"), (None, 0.0), False),
    ],
)
def test_scores_of_one_model(devices, scores, same):
    first, second = ({"device": device, "score": one} for device, one in zip(devices, scores, strict=True))
    assert of_workers._is_same(second, first) == same


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
