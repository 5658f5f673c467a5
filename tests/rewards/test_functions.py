"""Functions of a file in processes of their own: whatever they do, heedful goes on, and nothing of them stays behind."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cases import pairs_often
from heedful import Prompt, Reward, RewardError
from heedful.configs.scoring import RewardOptions
from heedful.rewards import Completion, Ensemble, score, score_tokens
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.resolve import resolve_rewards

NUMBER = f"1234.{os.getpid()}"
"""Seconds that nobody else sleeps."""
SHORT = 1.5
"""Seconds for a function that hangs at some responses; at the others it needs milliseconds."""
FAULTS = """
import asyncio, ctypes, glob, os, random, re, subprocess, sys, time

def burn():
    while True:
        pass

def fork_and_hang():
    subprocess.Popen(["sleep", "1234"])
    subprocess.Popen(["sleep", "1234"], start_new_session=True)  # leaves the process group
    if os.fork() == 0:
        os.setsid()
    time.sleep(1234)

def eat():
    kept = b"x" * (4 * 10**8)
    time.sleep(1234)

def fail():
    raise ValueError("坏了")

def interrupt():
    raise KeyboardInterrupt

def print_much():
    print("x" * 100_000)
    assert sys.stdin.read() == ""

ACTS = {
    "sleeps": lambda: time.sleep(1234),
    "burns": burn,
    "holds_the_gil": lambda: re.search("(a+)+$", "a" * 60 + "b"),
    "forks_and_hangs": fork_and_hang,
    "crashes": lambda: ctypes.string_at(0),
    "aborts": os.abort,
    "leaves": lambda: os._exit(0),
    "interrupts": interrupt,
    "eats": eat,
    "eats_in_a_child": lambda: subprocess.run(
        [sys.executable, "-c", "import time; kept = b'x' * 10**9; time.sleep(1234)"]
    ),
    "raises": fail,
    "closes": lambda: os.closerange(3, 256),
    "comes back twice": os.fork,
    "leaves a child": lambda: subprocess.Popen(["sleep", "1234"], start_new_session=True),
    "prints": print_much,
}

def acts(completions):
    for text in completions:
        ACTS.get(text, bool)()
    return [float(len(text)) for text in completions]

def state(completions, calls=[]):
    calls.append(0)
    return [float(os.getpid()), float("torch" in sys.modules), float(len(calls)), random.random()]

async def waits(completions):
    together = asyncio.Barrier(len(completions))
    await asyncio.gather(*(together.wait() for _ in completions))
    if "坏" in completions:
        await asyncio.sleep(1234)
    return [float(len(c)) + random.random() for c in completions]

def meets(completions):
    open(f"{__file__}.{os.getpid()}", "w").close()
    while len(glob.glob(f"{__file__}.*")) < 2 or "坏" in completions:
        time.sleep(0.01)
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    path = tmp_path_factory.mktemp("奖励") / "错误.py"
    path.write_text(FAULTS.replace("1234", NUMBER), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def function(faults):
    """``function(name)`` is the reward of that name, with a minute and a quarter of a gigabyte."""

    def load(name, timeout=60.0):
        return FunctionProcess(f"python:{faults}:{name}", RewardOptions(reward_timeout=timeout, reward_memory_gb=0.25))

    return load


@pytest.fixture(scope="module")
def acts(function):
    """The function that does what responses say."""
    return function("acts")


def below(pid):
    """Processes that descend from one."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # or one of its threads
                children += map(int, (task / "children").read_text().split())
    return children + [deeper for child in children for deeper in below(child)]


@pytest.fixture(autouse=True)
def nothing_stays_behind(acts):
    """No test leaves a process but that of the shared function: neither as a child nor, having lost its parent, anywhere."""

    def sleepers():
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if path.name.isdecimal() and NUMBER.encode() in (path / "cmdline").read_bytes():
                    found.append(path.name)
        return found

    before = below(os.getpid())  # servers of other tests
    assert sleepers() == []
    yield
    gc.collect()
    assert [pid for pid in below(os.getpid()) if pid not in (*before, acts._process.pid)] == []
    assert sleepers() == []


def answers(*texts):
    return [Completion(Prompt("问", f"数据.jsonl:{i}"), text) for i, text in enumerate(texts, 1)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("forks_and_hangs", "did not end within"),
        ("crashes", "crashed: its process was ended by SIGSEGV"),
        ("eats", "held more than --reward-memory-gb 0.25 and was stopped"),
        ("raises", "raised ValueError: 坏了"),
        *(
            pytest.param(name, said, marks=pytest.mark.exhaustive)
            for name, said in (
                ("sleeps", "did not end within"),
                ("burns", "did not end within"),
                ("holds_the_gil", "did not end within"),
                ("aborts", "crashed: its process was ended by SIGABRT"),
                ("leaves", "ended its process (exit status 0)"),
                ("interrupts", "raised KeyboardInterrupt"),
                ("eats_in_a_child", "held more than --reward-memory-gb 0.25 and was stopped"),
                ("closes", "ended its process (exit status 1)"),
            )
        ),
    ],
)
def test_one_bad_response_costs_only_itself(acts, function, name, said):
    """The others have their scores, the failure is told once with its sample, and the next call is as if nothing was."""
    hangs = "did not end" in said
    reward = Ensemble((Reward("r", function("acts", timeout=SHORT) if hangs else acts),), max_failed=0.5)
    found = score_tokens(reward, answers("二二", name))
    assert found.failed == (1,)
    assert found.without_failed().totals == [2.0]
    assert found.means == {"r": 2.0}
    for part in (f"1 of 2 responses have no score and are left out; reward r {said}", "数据.jsonl:2", f"'{name}'"):
        assert part in found.note
    assert score_tokens(reward, answers("一", "二二")).totals == [1.0, 2.0]
    if name == "raises":
        assert score_tokens(reward, answers("二二", name)).note is None  # told already


def test_more_than_may_fail_is_an_error(acts):
    reward = Ensemble((Reward("r", acts),), max_failed=0.3)
    said = r"2 of 4 responses have no score, more than --max-failed-rewards 0\.3 allows"
    with pytest.raises(RewardError, match=said):
        score_tokens(reward, answers("raises", "二二", "三三三", "raises"))
    with pytest.raises(
        RewardError, match=r"^reward r raised ValueError: 坏了 \(.*错误\.py, line \d+\); for the prompt"
    ):
        score([Reward("r", acts)], answers("一", "raises"))


def test_it_is_one_process_that_knows_no_torch(function):
    """Kept between calls, another if it was killed or closed. Random numbers are those of the responses, in any process."""
    reward, asked = function("state"), {"completions": ["a", "b", "c", "d"]}
    pid, has_torch, calls, draw = reward(**asked)
    assert (pid == os.getpid(), has_torch, calls) == (False, 0, 1)
    assert reward(**asked) == [pid, 0, 2, draw]
    assert reward(completions=["a", "b", "c", "e"])[3] != draw
    os.kill(int(pid), signal.SIGKILL)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)  # all of its threads
    second, *anew = reward(**asked)
    assert (second == pid, anew) == (False, [0, 1, draw])
    reward.close()
    assert reward(**asked)[0] not in (pid, second)


def test_what_it_does_besides_is_no_answer(acts, capfd):
    """A child that returns as well, what is printed (and there is nothing to read: the terminal is the user's), a process
    that is left, which ends with the function's."""
    acts.close()  # the next process writes where this test reads
    assert [acts(completions=[text]) for text in ("comes back twice", "一", "prints", "二二")] == [[16], [1], [6], [2]]
    assert capfd.readouterr().out == "x" * 100_000 + "\n"
    acts.close()
    before = below(os.getpid())
    assert acts(completions=["leaves a child"]) == [14.0]
    assert len([pid for pid in below(os.getpid()) if pid not in before]) == 2
    acts.close()
    assert [pid for pid in below(os.getpid()) if pid not in before] == []


HOLDER = """
import sys
from heedful.configs.scoring import RewardOptions
from heedful.rewards.functions import FunctionProcess
reward = FunctionProcess(sys.argv[1], RewardOptions(reward_timeout=float(sys.argv[3])))
print("ready", flush=True)
reward(completions=[sys.argv[2]])
"""


@pytest.mark.parametrize(
    ("ending", "name"),
    pairs_often(
        [signal.SIGKILL, signal.SIGTERM, signal.SIGINT],
        ["sleeps", "holds_the_gil", "forks_and_hangs"],
        [(signal.SIGKILL, "forks_and_hangs")],
    ),
)
def test_it_dies_with_the_program_that_called_it(faults, tmp_path, name, ending):
    """Even by kill -9; a call that holds the interpreter of the process then ends when its time is up. The program is a
    script without ``if __name__ == "__main__"``, which a process of multiprocessing would run again."""
    script, timeout = tmp_path / "训练.py", "3" if name == "holds_the_gil" else "100"
    script.write_text(HOLDER, encoding="utf-8")
    command = [sys.executable, script, f"python:{faults}:acts", name, timeout]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert holder.stdout.readline() == b"ready\n"
        while len(theirs := below(holder.pid)) < (4 if name == "forks_and_hangs" else 1):
            time.sleep(0.01)
        time.sleep(0.3)
        holder.send_signal(ending)
        holder.wait(120)
    while any(Path(f"/proc/{pid}").exists() for pid in theirs):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [("import time; time.sleep(99)", "did not end within"), ("import os; os._exit(3)", r"process \(exit status 3\)")],
)
def test_a_file_that_cannot_be_loaded(tmp_path, monkeypatch, text, said):
    timeout = 0.5 if said == "did not end within" else 60.0
    monkeypatch.setattr("heedful.rewards.functions.LONGEST_START", timeout)
    path = tmp_path / "奖励.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RewardError, match=said) as refused:
        FunctionProcess(f"python:{path}:f", RewardOptions(reward_timeout=timeout))
    assert str(path) in str(refused.value)


def test_a_pattern_that_never_ends(cpu):
    """rule:regex runs what a user wrote on what a model wrote; the other rules are heedful's own."""
    (reward,) = resolve_rewards(["rule:regex:(a+)+$"], RewardOptions(reward_timeout=0.5), **cpu)
    assert score_tokens(Ensemble((reward,)), answers("aaa", "b")).totals == [1.0, 0.0]
    found = score_tokens(Ensemble((reward,), max_failed=0.5), answers("aaa", "a" * 60 + "b"))
    assert found.failed == (1,)
    assert found.without_failed().totals == [1.0]


def test_an_async_function_runs_at_the_same_time_and_within_the_same_limits(function):
    """Its waits are together, its random numbers are those of its arguments, and one that hangs is stopped."""
    reward = Reward("w", function("waits", timeout=SHORT))
    asked = answers(*["一", "两个"] * 10)  # each waits for all others
    first = score([reward], asked)[0]
    assert [int(value) for value in first] == [1, 2] * 10
    assert score([reward], asked)[0] == first
    found = score_tokens(Ensemble((reward,), max_failed=0.5), answers("坏", "好"))
    assert found.failed == (0,)
    assert "did not end within" in found.note


def test_rewards_in_processes_are_called_at_the_same_time(function, completions):
    """Each ends only once both are called. And one that fails for good ends the others, which would hang for long."""
    rewards = [Reward(f"r{i}", function("meets", timeout=1000.0)) for i in range(2)]
    totals, means = score([*rewards, Reward("here", lambda completions: [0.5] * len(completions))], completions)
    assert totals == [2.5] * 3
    assert list(means) == ["r0", "r1", "here"]

    def refuses(completions):
        raise RewardError("不")

    with pytest.raises(RewardError, match="不"):
        score([*rewards, Reward("refuses", refuses)], answers("坏"))
    assert score(rewards, completions)[0] == [2.0] * 3


def test_what_is_asked_again_is_bounded():
    """A function that fails on everything is called 17 times at most, whatever the batch."""
    calls = []

    def fails(completions):
        calls.append(len(completions))
        raise ValueError("坏了")

    with pytest.raises(RewardError, match="200 of 200"):
        score_tokens(Ensemble((Reward("r", fails),), max_failed=0.5), answers(*["一"] * 200))
    assert len(calls) == 17

    def on_one(completions):
        calls.append(len(completions))
        if "坏" in completions:
            raise ValueError("坏了")
        return [1.0] * len(completions)

    for place in (0, 100, 199):
        calls.clear()
        texts = ["一"] * 200
        texts[place] = "坏"
        assert score_tokens(Ensemble((Reward("r", on_one),), max_failed=0.1), answers(*texts)).failed == (place,)
        assert len(calls) <= 17
        assert sum(calls) <= 3 * 200 + 17


def test_sys_exit_in_a_function_given_in_python():
    """It must not end the program with status 0 and no model."""

    def leaves(completions):
        sys.exit(0)

    with pytest.raises(RewardError, match="reward r raised SystemExit: 0"):
        score([Reward("r", leaves)], answers("一"))


def test_a_failure_of_the_batch_alone_is_told():
    """What fails once and not again has scores, and is reported all the same."""
    calls = []

    def flaky(completions):
        calls.append(0)
        if len(calls) == 1:
            raise OSError("网络")
        return [1.0] * len(completions)

    found = score_tokens(Ensemble((Reward("r", flaky),), max_failed=0.1), answers("一", "二"))
    assert (found.failed, found.totals) == ((), [1.0, 1.0])
    line = flaky.__code__.co_firstlineno + 3
    assert found.note == (
        f"reward r raised OSError: 网络 ({Path(__file__)}, line {line}); called again with fewer responses at a time, it "
        "scored all of them"
    )


def test_what_one_reward_fails_on_is_in_no_mean():
    """Neither in its own nor in another's, nor in a total."""
    rewards = (Reward("a", lambda: [1.0, float("nan"), 3.0]), Reward("b", lambda: [10.0, 20.0, 60.0]))
    found = score_tokens(Ensemble(rewards, max_failed=0.5), answers("一", "二", "三"))
    assert found.means == {"a": 2.0, "b": 35.0}
    assert found.without_failed().totals == [11.0, 63.0]
    assert found.scored == [0, 2]


def test_an_async_function_in_python(completions):
    async def reward(completions):
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    async def fails(completions):
        raise ValueError("坏了")

    assert score([Reward("r", reward)], completions)[0] == [4.0, 2.0, 2.0]
    with pytest.raises(RewardError, match="reward f raised ValueError: 坏了"):
        score([Reward("f", fails)], completions)

    async def in_a_loop():  # as in a notebook
        return score([Reward("r", reward)], completions)[0]

    with ThreadPoolExecutor(1) as thread:  # in this one a browser's event loop may run
        assert thread.submit(lambda: asyncio.run(in_a_loop())).result() == [4.0, 2.0, 2.0]
