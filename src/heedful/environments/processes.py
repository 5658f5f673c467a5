"""Run a user's environments, each in a process of its own, which is killed if it hangs.

A class of the user's own has TRL's methods (``environment_factory``): ``reset(**columns)`` returns a text or None, public
methods are tools, ``get_reward()`` is called once, at the end. Two more, which TRL does not see: ``_reply(text)`` returns
what the other one says to a turn without a tool, or None to end, and ``_turn_reward()`` a number after each turn.

The first process imports the file once, and forks one for each environment that is alive at the same time; an environment is
made once and reset often. A call of all of them waits for the slowest, not for one after the other. What one of them does to
its process, the others do not see. The second half of this file is the code of the processes; it loads no torch.
"""

import asyncio
import contextlib
import inspect
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from numbers import Real
from typing import Any, NamedTuple

from heedful import user_code
from heedful.errors import ConfigError, HeedfulError, RewardError
from heedful.processes import (
    INTERVAL,
    LONGEST_START,
    be_the_first_to_end,
    end_with,
    ended_after,
    ending,
    imported_files,
    kill_group,
    start,
)
from heedful.types import ToolCall

FLAG = "--environment"


class Failure(str):
    """Why an environment has failed, as the end of a sentence that begins with its name."""


@dataclass(frozen=True)
class Abilities:
    """The methods of an environment's class."""

    tools: tuple[dict[str, Any], ...]
    """The JSON schemas of its tools, by name."""
    replies: bool
    """Whether it answers turns without tools."""
    rewards_turns: bool
    rewards_episodes: bool
    needs: tuple[str, ...]
    """The columns that ``reset`` cannot do without."""
    files: tuple[str, ...]
    """The files of code imported by its own file, without installed packages."""


class TurnResult(NamedTuple):
    """What an environment did with a turn."""

    results: list[str]
    """Of each called tool; an exception's text if it raised one."""
    reply: str | None
    """What the other one says to a turn without tools; None ends the episode."""
    reward: float | None
    """The turn's; None without ``_turn_reward``."""
    failed_calls: int


class Environments:
    """The environments of one class.

    Args:
        spec: ``python:FILE.py:CLASS``; a function that returns an environment does too.
        timeout: seconds for one call of an environment.

    Raises ConfigError if the file cannot be imported, has no such class, or the class does not keep to the contract.
    """

    def __init__(self, spec: str, *, timeout: float) -> None:
        self.spec, self.timeout = spec, timeout
        self.name = spec.rpartition(":")[2]
        self._first, self._channel = start(__name__)
        self._alive: dict[int, tuple[int, Connection]] = {}
        """Process and channel of each place."""
        self.close = weakref.finalize(self, _end, self._first, self._channel, self._alive)
        self.abilities = self._start()

    def begin(self, columns: Sequence[Mapping[str, Any]], *, seed: int) -> list[str | Failure | None]:
        """Reset an environment for each row of columns. Returns what each says at the beginning.

        Random generators of each process are seeded by ``seed`` and its place.
        """
        new = [place for place in range(len(columns)) if place not in self._alive]
        for place in new:
            self._fork(place)
        asked = {place: ("begin", dict(one), place, f"{seed}:{place}") for place, one in enumerate(columns)}
        found = self._ask(asked, timeout=max(self.timeout, LONGEST_START) if new else self.timeout)
        return [found[place] for place in range(len(columns))]

    def act(self, said: Mapping[int, tuple[Sequence[ToolCall], str]]) -> dict[int, TurnResult | Failure]:
        """Give each environment its policy's turn: the calls of tools in it, and its text."""
        asked = {
            place: ("turn", [(call.name, call.arguments) for call in calls], text)
            for place, (calls, text) in said.items()
        }
        found = self._ask(asked)
        return {place: one if isinstance(one, Failure) else TurnResult(*one) for place, one in found.items()}

    def end(self, places: Sequence[int]) -> dict[int, float | Failure | None]:
        """The reward of each episode; None without ``get_reward``."""
        return self._ask(dict.fromkeys(places, ("end",)))

    def _start(self) -> Abilities:
        """Load the class."""
        timeout = max(self.timeout, LONGEST_START)
        self._channel.send((self.spec, timeout))
        if not self._channel.poll(timeout):
            self.close()
            raise ConfigError(f"{FLAG} {self.spec}: its file was not imported within {timeout:g} s")
        try:
            answer = json.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionError):
            self._first.wait()
            self.close()
            raise ConfigError(f"{FLAG} {self.spec}: its file {ending(self._first.returncode)}") from None
        if "refused" in answer:
            self.close()
            raise ConfigError(answer["refused"])
        tools, needs, files = (tuple(answer.pop(name)) for name in ("tools", "needs", "files"))
        return Abilities(tools=tools, needs=needs, files=files, **answer)

    def _fork(self, place: int) -> None:
        """Have a process for a place. Raises RewardError if the machine has none."""
        try:
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                self._channel.send("fork")
                reduction.send_handle(self._channel, theirs.fileno(), self._first.pid)
                self._alive[place] = (json.loads(self._channel.recv_bytes()), ours)
        except (EOFError, OSError) as error:
            raise RewardError(
                f"{FLAG} {self.spec}: there is no process for environment {place + 1} ({type(error).__name__} {error}); "
                "lower --rollout-batch-size, or raise the limits of open files and processes (ulimit -n, ulimit -u)"
            ) from None

    def _ask(self, asked: Mapping[int, tuple[Any, ...]], *, timeout: float | None = None) -> dict[int, Any]:
        """The answer of each environment, or its failure; the process of one that hangs or ends is gone then."""
        timeout = timeout or self.timeout
        deadline, found = time.monotonic() + timeout, dict[int, Any]()
        waiting = {}
        for place, request in asked.items():
            _, channel = self._alive[place]
            try:
                channel.send((request, timeout))
                waiting[channel] = place
            except OSError:
                found[place] = self._lost(place)
        try:
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for answered in ready:
                    assert isinstance(answered, Connection)
                    place = waiting.pop(answered)
                    try:
                        answer = json.loads(answered.recv_bytes())
                        found[place] = Failure(answer["failed"]) if "failed" in answer else answer["found"]
                    except (EOFError, OSError):  # it may have ended in the middle of an answer
                        found[place] = self._lost(place)
        except BaseException:  # Ctrl-C, say: the answers that come now belong to no call
            self.close()
            raise
        for place in waiting.values():
            self._lost(place)
            found[place] = Failure(
                f"did not answer within {timeout:g} s and was stopped; if it needs longer, raise --environment-timeout"
            )
        return {place: found[place] for place in asked}

    def _lost(self, place: int) -> Failure:
        """End a place's process, and say how it ended."""
        pid, channel = self._alive.pop(place)
        channel.close()
        kill_group(pid)
        try:
            self._channel.send(("ended", pid))
            return Failure(ending(json.loads(self._channel.recv_bytes())))
        except (EOFError, OSError):
            return Failure("lost its process")


def _end(
    first: "subprocess.Popen[bytes]",
    requests: "Connection[Any, Any]",
    alive: dict[int, tuple[int, "Connection[Any, Any]"]],
) -> None:
    """End all processes. A thread that is in a call then gets an error."""
    for pid, channel in list(alive.values()):
        channel.close()
        kill_group(pid)
    alive.clear()
    requests.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        first.wait(timeout=2.0)
    kill_group(first.pid)
    first.wait()


# The code of the processes ----------------------------------------------------------------------------------------------


def serve(channel: int, heedful: int) -> None:
    """Load the class named by the first request, then fork a process for each further one, until heedful closes the channel.

    Args:
        channel: descriptor of the pipe for requests and answers.
        heedful: id of heedful's process; this process ends with it.
    """
    requests = Connection(channel)
    be_the_first_to_end()
    spec, timeout = requests.recv()
    try:
        with ended_after(timeout):
            factory = user_code.load(FLAG, spec)
            answer = _in_a_fork(lambda: abilities_of(spec, factory))
            answer["files"] = imported_files()
    except HeedfulError as error:
        answer = {"refused": str(error)}
    requests.send_bytes(json.dumps(answer).encode())
    while os.getppid() == heedful:
        try:
            if not requests.poll(INTERVAL):
                continue
            request = requests.recv()
        except (EOFError, OSError):
            break
        if isinstance(request, tuple):
            requests.send_bytes(json.dumps(os.waitstatus_to_exitcode(os.waitpid(request[1], 0)[1])).encode())
            continue
        handle = reduction.recv_handle(requests)
        first, pid = os.getpid(), os.fork()
        if pid == 0:
            requests.close()
            _live(Connection(handle), factory, first)
        os.close(handle)
        requests.send_bytes(json.dumps(pid).encode())
    kill_group(os.getpid())  # heedful is gone, maybe while environments act


def _in_a_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a process of its own: what it imports stays there. Raises ConfigError as it does."""
    ours, theirs = multiprocessing.Pipe()
    first, pid = os.getpid(), os.fork()
    if pid == 0:
        os.setsid()
        threading.Thread(target=end_with, args=(first,), daemon=True).start()
        try:
            answer: dict[str, Any] = {"found": function()}
        except HeedfulError as error:
            answer = {"refused": str(error)}
        except BaseException as error:
            answer = {"refused": f"{FLAG}: {user_code.describe(error)}"}
        theirs.send_bytes(json.dumps(answer).encode())
        os._exit(0)
    theirs.close()
    try:
        answer = json.loads(ours.recv_bytes())
    except EOFError:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        raise ConfigError(f"{FLAG}: making an environment {ending(status)}") from None
    kill_group(pid)  # with what it has started
    os.waitpid(pid, 0)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    found: dict[str, Any] = answer["found"]
    return found


NOT_TOOLS = ("reset", "get_reward")


def tools_of(environment: Any) -> list[str]:
    """The names of an environment's tools: its public methods, as in TRL, so no static ones. Properties are not read."""
    names = [name for name, one in inspect.getmembers(type(environment), callable) if not name.startswith("_")]
    return [name for name in names if name not in NOT_TOOLS and inspect.ismethod(getattr(environment, name))]


def abilities_of(spec: str, factory: Callable[[], Any]) -> dict[str, Any]:
    """`Abilities`, without the files. Raises ConfigError if the class does not keep to the contract."""
    try:
        environment = factory()
    except Exception as error:
        raise ConfigError(f"{FLAG} {spec}: making an environment raised {user_code.describe(error)}") from None
    if not callable(getattr(environment, "reset", None)):
        raise ConfigError(f"{FLAG} {spec}: {type(environment).__name__} has no method reset(**columns)")
    schemas = []
    for name in tools_of(environment):
        from transformers.utils import get_json_schema  # takes seconds

        try:
            schemas.append(get_json_schema(getattr(environment, name)))
        except Exception as error:
            raise ConfigError(
                f"{FLAG} {spec}: the tool {name} needs a docstring, and a type and a line under Args: for each argument, or "
                f"a name that begins with _ if it is none: {error}"
            ) from None
    abilities = {"replies": "_reply", "rewards_turns": "_turn_reward", "rewards_episodes": "get_reward"}
    parameters = inspect.signature(environment.reset).parameters.values()
    needs = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    has = {name: hasattr(environment, method) for name, method in abilities.items()}
    return {"tools": schemas, "needs": needs} | has


def _live(requests: Connection, factory: Callable[[], Any], first: int) -> None:
    """The life of an environment's process."""
    os.setsid()
    me = os.getpid()
    threading.Thread(target=end_with, args=(first,), daemon=True).start()
    actor = Actor(factory)
    try:
        while True:
            request, timeout = requests.recv()
            with ended_after(timeout):
                try:
                    answer = {"found": actor.call(*request)}
                except BaseException as error:  # SystemExit too: only the environment can raise it here
                    answer = {"failed": str(error) if isinstance(error, ContractError) else _raised(error)}
                if os.getpid() != me:  # the environment forked, and the child came back as well
                    os._exit(0)
            requests.send_bytes(json.dumps(answer).encode())
    except (EOFError, OSError):
        pass
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)


def _raised(error: BaseException) -> str:
    try:
        return f"raised {user_code.describe(error)}"
    except Exception:  # its own text raises
        return f"raised {type(error).__name__}"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own text raises
        return type(error).__name__


def _seed(seed: str) -> None:
    """Seed the global random generators of Python and numpy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))


class ContractError(Exception):
    """An environment returned what it must not return."""


class Actor:
    """An environment in its process, with its tools."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()

    def call(self, what: str, *given: Any) -> Any:
        """Begin, take a turn, or end."""
        actions: dict[str, Callable[..., Any]] = {"begin": self._begin, "turn": self._turn, "end": self._end}
        return actions[what](*given)

    def _begin(self, columns: dict[str, Any], place: int, seed: str) -> str | None:
        """What it draws when it is made depends on its place, and what it draws in an episode on the seed, so that a resumed
        run plays the same games."""
        if self._environment is None:
            _seed(str(place))
            self._environment = self._factory()
        _seed(seed)
        parameters = inspect.signature(self._environment.reset).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            columns = {name: value for name, value in columns.items() if name in {p.name for p in parameters}}
        return self._text("reset", self._result(self._environment.reset(**columns)))

    def _turn(self, calls: Sequence[tuple[str, str]], text: str) -> tuple[list[str], str | None, Any, int]:
        results, failed = self._results(calls)
        reply = None
        if not calls and hasattr(self._environment, "_reply"):
            reply = self._text("_reply", self._result(self._environment._reply(text)))
        reward = None
        if hasattr(self._environment, "_turn_reward"):
            reward = self._number("_turn_reward", self._result(self._environment._turn_reward()))
        return results, reply, reward, failed

    def _end(self) -> float | None:
        if not hasattr(self._environment, "get_reward"):
            return None
        return self._number("get_reward", self._result(self._environment.get_reward()))

    def _results(self, calls: Sequence[tuple[str, str]]) -> tuple[list[str], int]:
        """The results of tools in the order of the calls, of a name and arguments in JSON. Asynchronous ones run at the same
        time."""
        known, results = tools_of(self._environment), list[Any]()
        for name, arguments in calls:
            try:
                if name not in known:
                    raise ValueError(f"Tool {name} not found.")
                results.append(getattr(self._environment, name)(**json.loads(arguments)))
            except Exception as error:
                results.append(error)
        waited = [one for one in results if inspect.isawaitable(one)]

        async def together() -> list[Any]:
            return await asyncio.gather(*waited, return_exceptions=True)

        found = iter(self._loop.run_until_complete(together()) if waited else [])
        results = [next(found) if inspect.isawaitable(one) else one for one in results]
        failed = sum(isinstance(one, BaseException) for one in results)
        texts = [{"error": _said(one)} if isinstance(one, BaseException) else one for one in results]
        return [str(one) for one in texts], failed

    def _result(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def _text(self, method: str, value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        raise ContractError(f"returned {value!r:.80} from {method}; return a text, or None")

    def _number(self, method: str, value: Any) -> float:
        number = value.item() if hasattr(value, "item") else value  # of numpy or torch
        if isinstance(number, Real) and math.isfinite(number):
            return float(number)
        raise ContractError(f"returned {value!r:.80} from {method}; return a finite number")
