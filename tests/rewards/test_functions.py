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

from heedful import ConfigError, Prompt, Reward, RewardError
from heedful.configs.scoring import RewardOptions
from heedful.rewards import Completion, Ensemble, score, score_tokens
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.resolve import resolve_rewards

NUMBER = f"1234.{os.getpid()}"
"""Seconds that nobody else sleeps."""
SHORT = 2.0
"""Seconds for a function that hangs at some responses; at the others it needs milliseconds."""
FAULTS = """
import asyncio, ctypes, glob, os, random, subprocess, sys, time

BAD = "坏"

def when_bad(act):
    def reward(completions):
        if BAD in completions:
            act()
        return [float(len(c)) for c in completions]
    return reward

def burn():
    while True:
        pass

def hold_the_gil():
    import re
    re.search("(a+)+$", "a" * 60 + "b")

def fork_and_hang():
    subprocess.Popen(["sleep", "1234"])
    subprocess.Popen(["sleep", "1234"], start_new_session=True)  # leaves the process group
    if os.fork() == 0:
        os.setsid()
    time.sleep(1234)

def eat():
    kept = b"x" * 10**10

def eat_in_a_child():
    subprocess.run([sys.executable, "-c", "import time; kept = b'x' * 10**9; time.sleep(1234)"])

def fail():
    raise ValueError("坏了")

sleeps = when_bad(lambda: time.sleep(1234))
burns = when_bad(burn)
holds_the_gil = when_bad(hold_the_gil)
crashes = when_bad(lambda: ctypes.string_at(0))
aborts = when_bad(os.abort)
leaves = when_bad(lambda: os._exit(0))
interrupts = when_bad(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
eats = when_bad(eat)
eats_in_a_child = when_bad(eat_in_a_child)
forks_and_hangs = when_bad(fork_and_hang)
raises = when_bad(fail)
closes = when_bad(lambda: os.closerange(3, 256))

def comes_back_twice(completions):
    os.fork()
    return [float(len(c)) for c in completions]

def leaves_a_child(completions):
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    return [float(len(c)) for c in completions]

def draws(completions):
    return [random.random() for _ in completions]

def counts(completions, calls=[]):
    calls.append(0)
    return [float(len(calls))] * len(completions)

async def waits(completions):
    together = asyncio.Barrier(len(completions))
    await asyncio.gather(*(together.wait() for _ in completions))
    if BAD in completions:
        await asyncio.sleep(1234)
    return [float(len(c)) + random.random() for c in completions]

def meets(completions):
    open(f"{__file__}.{os.getpid()}", "w").close()
    while len(glob.glob(f"{__file__}.*")) < 4 or BAD in completions:
        time.sleep(0.01)
    return [1.0] * len(completions)

def prints(completions):
    print("x" * 100_000)
    input_is_empty = sys.stdin.read() == ""
    return [float(input_is_empty)] * len(completions)

def where(completions):
    return [float(os.getpid()), float("torch" in sys.modules)] + [0.0] * (len(completions) - 2)
"""


@pytest.fixture
def faults(tmp_path):
    path = tmp_path / "错误.py"
    path.write_text(FAULTS.replace("1234", NUMBER), encoding="utf-8")
    return path


@pytest.fixture
def function(faults):
    """``function(name)`` is the reward of that name, with a minute and a quarter of a gigabyte."""

    def load(name, timeout=60.0):
        return FunctionProcess(f"python:{faults}:{name}", RewardOptions(reward_timeout=timeout, reward_memory_gb=0.25))

    return load


def below(pid):
    """Processes that descend from one."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # or one of its threads
                children += map(int, (task / "children").read_text().split())
    return children + [deeper for child in children for deeper in below(child)]


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    """No test leaves a process: neither as a child nor, having lost its parent, anywhere."""

    def sleepers():
        commands = {path: path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdecimal()}
        found = []
        for path, command in commands.items():
            try:
                if NUMBER.encode() in command.read_bytes():
                    found.append(path.name)
            except OSError:  # it ended meanwhile
                continue
        return found

    before = below(os.getpid())  # servers of other tests
    assert sleepers() == []
    yield
    gc.collect()
    assert [pid for pid in below(os.getpid()) if pid not in before] == []
    assert sleepers() == []


def answers(texts):
    return [Completion(Prompt("问", f"数据.jsonl:{i}"), text) for i, text in enumerate(texts, 1)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("sleeps", "did not end within", marks=pytest.mark.exhaustive),
        pytest.param("burns", "did not end within", marks=pytest.mark.exhaustive),
        pytest.param("holds_the_gil", "did not end within", marks=pytest.mark.exhaustive),
        ("forks_and_hangs", "did not end within"),
        ("crashes", "crashed: its process was ended by SIGSEGV"),
        pytest.param("aborts", "crashed: its process was ended by SIGABRT", marks=pytest.mark.exhaustive),
        pytest.param("leaves", "ended its process (exit status 0)", marks=pytest.mark.exhaustive),
        pytest.param("interrupts", "raised KeyboardInterrupt", marks=pytest.mark.exhaustive),
        ("eats", "held more than --reward-memory-gb 0.25 and was stopped"),
        pytest.param(
            "eats_in_a_child", "held more than --reward-memory-gb 0.25 and was stopped", marks=pytest.mark.exhaustive
        ),
        ("raises", "raised ValueError: 坏了"),
        pytest.param("closes", "ended its process (exit status 1)", marks=pytest.mark.exhaustive),
    ],
)
def test_one_bad_response_costs_only_itself(function, name, said):
    """The others have their scores, the failure is told once with its sample, and the next call is as if nothing was."""
    timeout = SHORT if "did not end" in said else 60.0
    reward = Ensemble((Reward("r", function(name, timeout=timeout)),), max_failed=0.5)
    texts = ["二二", "坏"]
    found = score_tokens(reward, answers(texts))
    assert found.failed == (1,)
    assert found.without_failed().totals == [2.0]
    assert found.means == {"r": 2.0}
    for part in (f"1 of 2 responses have no score and are left out; reward r {said}", "数据.jsonl:2", "'坏'"):
        assert part in found.note
    assert score_tokens(reward, answers(["一", "二二"])).totals == [1.0, 2.0]
    if name == "raises":
        assert score_tokens(reward, answers(texts)).note is None  # told already


def test_more_than_may_fail_is_an_error(function):
    reward = Ensemble((Reward("r", function("raises")),), max_failed=0.3)
    with pytest.raises(
        RewardError, match=r"2 of 4 responses have no score, more than --max-failed-rewards 0\.3 allows"
    ):
        score_tokens(reward, answers(["坏", "二二", "三三三", "坏"]))
    with pytest.raises(
        RewardError, match=r"^reward r raised ValueError: 坏了 \(.*错误\.py, line \d+\); for the prompt"
    ):
        score([Reward("r", function("raises"))], answers(["一", "坏"]))


def test_it_is_one_process_that_knows_no_torch(function):
    """Started once, kept between calls, cheap to start."""
    reward = function("where")
    assert [reward(completions=["a", "b"]) for _ in range(2)] == [reward(completions=["a", "b"])] * 2
    pid, has_torch = reward(completions=["a", "b"])
    assert pid != os.getpid()
    assert not has_torch
    counting = function("counts")
    assert [counting(completions=["a"]) for _ in range(3)] == [[1.0], [2.0], [3.0]]
    reward.close()
    assert reward(completions=["a", "b"])[0] != pid


def test_a_process_that_was_killed_between_calls_is_replaced(function):
    reward = function("where")
    pid = int(reward(completions=["a", "b"])[0])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # all of its threads
    assert int(reward(completions=["a", "b"])[0]) != pid


def test_random_numbers_depend_on_the_responses_alone(function):
    """So a run that is resumed, whose process is another, sees the same scores."""
    one, other = function("draws"), function("draws")
    assert one(completions=["a", "b"]) == one(completions=["a", "b"]) == other(completions=["a", "b"])
    assert one(completions=["a", "b"]) != one(completions=["a", "c"])


def test_a_child_that_returns_answers_nothing(function):
    reward = function("comes_back_twice")
    assert [reward(completions=["一" * n]) for n in (1, 2, 3)] == [[1.0], [2.0], [3.0]]


def test_what_it_leaves_ends_with_it(function):
    before, reward = below(os.getpid()), function("leaves_a_child")
    assert reward(completions=["a"]) == [1.0]
    assert len([pid for pid in below(os.getpid()) if pid not in before]) == 2
    reward.close()
    assert [pid for pid in below(os.getpid()) if pid not in before] == []


def test_what_it_prints_is_no_answer(function, capfd):
    """And there is nothing to read: the terminal is the user's."""
    assert function("prints")(completions=["a"]) == [1.0]
    assert capfd.readouterr().out == "x" * 100_000 + "\n"


HOLDER = """
import sys, time
from heedful.configs.scoring import RewardOptions
from heedful.rewards.functions import FunctionProcess
reward = FunctionProcess(sys.argv[1], RewardOptions(reward_timeout=float(sys.argv[2])))
print("ready", flush=True)
reward(completions=["坏"])
"""


@pytest.mark.parametrize(
    ("ending", "name"),
    [
        pytest.param(
            ending, name, marks=() if (ending, name) == (signal.SIGKILL, "forks_and_hangs") else pytest.mark.exhaustive
        )
        for ending in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        for name in ("sleeps", "holds_the_gil", "forks_and_hangs")
    ],
)
def test_it_dies_with_the_program_that_called_it(faults, name, ending):
    """Even by kill -9; a call that holds the interpreter of the process then ends when its time is up."""
    timeout = "3" if name == "holds_the_gil" else "100"
    command = [sys.executable, "-c", HOLDER, f"python:{faults}:{name}", timeout]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert holder.stdout.readline() == b"ready\n"
        while len(theirs := below(holder.pid)) < (4 if name == "forks_and_hangs" else 1):
            time.sleep(0.01)
        time.sleep(0.5)
        holder.send_signal(ending)
        holder.wait(120)
    while any(Path(f"/proc/{pid}").exists() for pid in theirs):
        time.sleep(0.05)


def test_the_users_script_is_not_run_again(faults, tmp_path):
    """It may have no ``if __name__ == "__main__"``: a process of multiprocessing would begin by running it."""
    script = tmp_path / "训练.py"
    script.write_text(HOLDER.replace("坏", "好"), encoding="utf-8")
    command = [sys.executable, script, f"python:{faults}:sleeps", "20"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ready\n"


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("while True: pass", RewardError, "did not end within"),
        ("import os; os._exit(3)", RewardError, r"ended its process \(exit status 3\)"),
        ("x = 1", ConfigError, "has no function 'f'; it has none"),
    ],
    ids=["hangs", "leaves", "lacks it"],
)
def test_a_file_that_cannot_be_loaded(tmp_path, monkeypatch, text, error, said):
    timeout = 0.5 if said == "did not end within" else 60.0
    monkeypatch.setattr("heedful.rewards.functions.LONGEST_START", timeout)
    path = tmp_path / "奖励.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=said) as refused:
        FunctionProcess(f"python:{path}:f", RewardOptions(reward_timeout=timeout, reward_memory_gb=0.25))
    assert str(path) in str(refused.value)


def test_a_pattern_that_never_ends(cpu):
    """rule:regex runs what a user wrote on what a model wrote; the other rules are heedful's own."""
    (reward,) = resolve_rewards(["rule:regex:(a+)+$"], RewardOptions(reward_timeout=SHORT), **cpu)
    assert score_tokens(Ensemble((reward,)), answers(["aaa", "b"])).totals == [1.0, 0.0]
    found = score_tokens(Ensemble((reward,), max_failed=0.5), answers(["aaa", "a" * 60 + "b"]))
    assert found.failed == (1,)
    assert found.without_failed().totals == [1.0]


def test_what_is_asked_again_is_bounded(function):
    """A function that fails on everything is called 17 times at most, whatever the batch."""
    calls = []

    def fails(completions):
        calls.append(len(completions))
        raise ValueError("坏了")

    with pytest.raises(RewardError, match="200 of 200"):
        score_tokens(Ensemble((Reward("r", fails),), max_failed=0.5), answers(["一"] * 200))
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
        assert score_tokens(Ensemble((Reward("r", on_one),), max_failed=0.1), answers(texts)).failed == (place,)
        assert len(calls) <= 17
        assert sum(calls) <= 3 * 200 + 17


def test_sys_exit_in_a_function_given_in_python():
    """It must not end the program with status 0 and no model."""

    def leaves(completions):
        sys.exit(0)

    with pytest.raises(RewardError, match="reward r raised SystemExit: 0"):
        score([Reward("r", leaves)], answers(["一"]))


def test_a_failure_of_the_batch_alone_is_told():
    """What fails once and not again has scores, and is reported all the same."""
    calls = []

    def flaky(completions):
        calls.append(0)
        if len(calls) == 1:
            raise OSError("网络")
        return [1.0] * len(completions)

    found = score_tokens(Ensemble((Reward("r", flaky),), max_failed=0.1), answers(["一", "二"]))
    assert (found.failed, found.totals) == ((), [1.0, 1.0])
    line = flaky.__code__.co_firstlineno + 3
    assert found.note == (
        f"reward r raised OSError: 网络 ({Path(__file__)}, line {line}); called again with fewer responses at a time, it "
        "scored all of them"
    )


def test_what_one_reward_fails_on_is_in_no_mean():
    """Neither in its own nor in another's, nor in a total."""
    rewards = (Reward("a", lambda: [1.0, float("nan"), 3.0]), Reward("b", lambda: [10.0, 20.0, 60.0]))
    found = score_tokens(Ensemble(rewards, max_failed=0.5), answers(["一", "二", "三"]))
    assert found.means == {"a": 2.0, "b": 35.0}
    assert found.without_failed().totals == [11.0, 63.0]
    assert found.scored == [0, 2]


def completion(response):
    return Completion(Prompt("问", "d.jsonl:1"), response)


def test_an_async_function_runs_at_the_same_time_and_within_the_same_limits(function):
    """Its waits are together, its random numbers are those of its arguments, and one that hangs is stopped."""
    reward = function("waits")
    asked = [completion("一"), completion("两个")] * 10  # each waits for all others
    first = score([Reward("w", reward)], asked)[0]
    assert [int(value) for value in first] == [1, 2] * 10
    assert score([Reward("w", reward)], asked)[0] == first
    hangs = Reward("w", function("waits", timeout=SHORT))
    found = score_tokens(Ensemble((hangs,), max_failed=0.5), [completion("坏"), completion("好")])
    assert found.failed == (0,)
    assert "did not end within" in found.note


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


def test_rewards_in_processes_are_called_at_the_same_time(function, completions):
    """Each ends only once all four are called. And one that fails for good ends the others, which would hang for long."""
    rewards = [Reward(f"r{i}", function("meets", timeout=1000.0)) for i in range(4)]
    totals, means = score([*rewards, Reward("here", lambda completions: [0.5] * len(completions))], completions)
    assert totals == [4.5] * 3
    assert list(means) == ["r0", "r1", "r2", "r3", "here"]

    def refuses(completions):
        raise RewardError("不")

    with pytest.raises(RewardError, match="不"):
        score([*rewards, Reward("refuses", refuses)], [completion("坏")])
    assert score(rewards, completions)[0] == [4.0] * 3
