"""The user's environments in their processes: what they answer, what is left of one that fails, and who waits for whom."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

import worlds
from heedful import ConfigError, RewardError
from heedful.environments.processes import Environments, Failure, TurnResult
from heedful.types import ToolCall

WORLDS = Path(worlds.__file__)


@pytest.fixture
def start():
    """``start(class)``: its environments, which end with the test."""
    begun = []

    def one(name, timeout=20.0):
        begun.append(Environments(f"python:{WORLDS}:{name}", timeout=timeout))
        return begun[-1]

    yield one
    for one in begun:
        one.close()


def calls(*asked):
    return [ToolCall(name, json.dumps(arguments), "c") for name, arguments in asked]


def test_an_episode_of_tools(start):
    """Results are in the order of the calls, exceptions are the tool's text, as TRL writes them."""
    guess = start("Guess")
    assert [tool["function"]["name"] for tool in guess.abilities.tools] == ["guess", "wait"]
    assert guess.abilities.tools[0]["function"]["parameters"]["required"] == ["word"]
    assert (guess.abilities.replies, guess.abilities.rewards_turns, guess.abilities.rewards_episodes) == (
        False,
        False,
        True,
    )
    assert guess.begin([{"word": "梨", "source": "x"}, {}], seed=0) == [" It has 1 letters.", " It has 2 letters."]
    asked = calls(
        ("wait", {"seconds": 0.2, "name": "later"}),
        ("guess", {"word": "苹果"}),
        ("wait", {"seconds": 0.0, "name": "sooner"}),
        ("wait", {"seconds": "久", "name": "no number"}),
        ("guess", {"word": "raise"}),
        ("guess", {"wort": "梨"}),
        ("reset", {}),
        ("get_reward", {}),
        ("_reply", {}),
        ("fly", {}),
    )
    answer = guess.act({0: (asked, ""), 1: (calls(("guess", {"word": "苹果"})), "")})
    assert answer[0].results[:3] == ["later", "{'no': 1}", "sooner"]
    assert "{'error':" in answer[0].results[3]
    assert answer[0].results[4] == "{'error': '不行'}"
    assert "unexpected keyword argument 'wort'" in answer[0].results[5]
    hidden = [f"{{'error': 'Tool {name} not found.'}}" for name in ("reset", "get_reward", "_reply", "fly")]
    assert answer[0].results[6:] == hidden
    assert answer[0].failed_calls == 7
    assert answer[1] == TurnResult(["yes"], None, None, 0)
    assert guess.end([0, 1]) == {0: 1 / 3, 1: 1 / 2}


def test_tools_are_those_of_trl(start):
    household = start("Household")
    assert [tool["function"]["name"] for tool in household.abilities.tools] == ["count"]
    household.begin([{}], seed=0)
    answer = household.act({0: (calls(("count", {"word": "苹果"}), ("helper", {"path": "x"}), ("broken", {})), "")})
    assert (answer[0].results[0], answer[0].failed_calls) == ("2", 2)


def test_an_episode_of_talk(start):
    talk = start("Talk")
    assert not talk.abilities.tools
    assert talk.begin([{}], seed=0) == [None]
    assert talk.act({0: ([], "你好")}) == {0: TurnResult([], "问 1", 0.5, 0)}
    assert talk.act({0: ([], "再见")}) == {0: TurnResult([], None, 1.0, 0)}
    assert talk.end([0]) == {0: 10.0}


FAULTS = {
    "hang": "did not answer within 3 s .* --environment-timeout",
    "exit": r"ended its process \(exit status 3\)",
    "crash": "crashed: its process was ended by SIGSEGV",
    "raise": "raised RuntimeError: 坏了",
    "leave": "raised SystemExit",
    "number": "returned 3 from _reply; return a text, or None",
}


def test_one_that_fails_takes_nobody_with_it(start):
    """Each fault in one call, beside an environment that answers; then all of them are there again."""
    faulty = start("Faulty", timeout=3.0)
    names = [*FAULTS, "fine"]
    faulty.begin([{"at": "nan"} for _ in names], seed=0)
    found = faulty.act({place: ([], name) for place, name in enumerate(names)})
    assert found[len(FAULTS)].reply.startswith("made 1")
    for place, (name, message) in enumerate(FAULTS.items()):
        assert isinstance(found[place], Failure), name
        assert re.search(message, found[place]), (name, found[place])
    assert faulty.end([len(FAULTS)]) == {len(FAULTS): "returned nan from get_reward; return a finite number"}

    again = faulty.begin([{"at": "reset"}, *[{} for _ in names[1:]]], seed=0)
    assert again[0].startswith("raised RuntimeError: 坏了")
    assert again[1:] == [None] * (len(names) - 1)
    made = [answer.reply.split(",")[0] for answer in faulty.act({1: ([], ""), 6: ([], "")}).values()]
    assert made == ["made 1", "made 2"], "only those that failed are made anew"


def test_what_they_draw_depends_on_the_seed_and_the_place(start):
    faulty, said = start("Faulty"), []
    for seed in (1, 1, 2):
        faulty.begin([{}, {}], seed=seed)
        answers = faulty.act({0: ([], ""), 1: ([], "")})
        said.append([answer.reply.partition("drew ")[2] for answer in answers.values()])
    assert said[0] == said[1]
    assert len({*said[0], *said[2]}) == 4


def test_a_new_process_plays_the_games_of_an_old_one(start):
    """Also if the environment draws while it is made, and is the one to import numpy."""
    old, new = start("Drawn"), start("Drawn")
    old.begin([{}], seed=1)
    assert old.begin([{}], seed=2) == new.begin([{}], seed=2)


def test_an_error_without_a_text_has_its_name(start):
    one = start("Unspeakable")
    one.begin([{}], seed=0)
    assert one.act({0: ([], "")})[0].startswith("raised Error")


def test_one_that_forks_answers_once(start):
    one = start("Forking")
    assert one.begin([{}], seed=0) == ["mine"]
    assert one.begin([{}], seed=0) == ["mine"]


def test_arguments_that_are_too_deep_are_the_tools_error(start):
    guess = start("Guess")
    guess.begin([{}], seed=0)
    deep = ToolCall("guess", '{"word": ' + "[" * 100_000 + "]" * 100_000 + "}", "c")
    assert "error" in guess.act({0: ([deep], "")})[0].results[0]


def test_a_first_process_that_is_gone_is_an_error_with_a_remedy(start):
    talk = start("Talk")
    os.kill(talk._first.pid, signal.SIGKILL)
    talk._first.wait()
    with pytest.raises(RewardError, match=r"there is no process for environment 1 .*ulimit -n"):
        talk.begin([{}], seed=0)


def test_they_act_at_the_same_time(start):
    """32 that take 50 ms each: 1.6 s one after the other."""
    slow = start("Slow")
    slow.begin([{}] * 32, seed=0)
    started = time.perf_counter()
    assert len(slow.act({place: ([], "") for place in range(32)})) == 32
    assert time.perf_counter() - started < 1.0


def test_nothing_is_left_of_them():
    talk = Environments(f"python:{WORLDS}:Talk", timeout=20.0)
    talk.begin([{}, {}], seed=0)
    pids = [talk._first.pid, *[pid for pid, _ in talk._alive.values()]]
    talk.close()
    assert worlds.are_gone(pids)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", r"NoReset has no method reset\(\*\*columns\)"),
        (
            "Untyped",
            "the tool act needs .* a line under Args: for each argument, or a name that begins with _ if it is none",
        ),
        ("Unmade", "making an environment raised KeyError"),
        ("Missing", "has no function or class 'Missing'; it has Guess, Household, .*"),
    ],
)
def test_a_class_that_does_not_keep_to_the_contract_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        Environments(f"python:{WORLDS}:{name}", timeout=20.0)
