"""Answers from a policy while people label: its process, a buffer of ready items, and the turns of chats.

The process (`apps.rounds.sample`) holds the model, so the server never loads one: it exchanges JSON lines over standard
input and output. If it dies it is restarted, after a wait that doubles each time; its standard error is in
PROJECT/policy.log.
"""

import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.apps.label.project import Project
from heedful.apps.label.records import Candidate, Item, Task, item_id
from heedful.display import say
from heedful.errors import HeedfulError, MachineError
from heedful.files import private_opener, read_record

FIRST_WAIT = 1.0
"""Seconds until the first restart of a process that died."""
LONGEST_WAIT = 60.0
LASTED = 60.0
"""Seconds of running after which the wait before a restart is reset."""
ANSWER_SECONDS = 120.0
"""Longest wait for an answer, in seconds."""
END_SECONDS = 5.0
"""Seconds for the process to end by itself."""
MODULE = "heedful.apps.rounds.sample"
AT_A_TIME = 4
"""Prompts per request of the buffer; few, so that a chat does not wait long."""
LOOK_SECONDS = 0.5
"""Seconds between checks of the buffer."""
AWAY_SECONDS = 10.0
"""Seconds to wait after a disk error."""
TRIES = 3
"""Attempts per prompt; after a failure, the prompts of a request are sent one by one."""
KEPT_TURNS = 4
"""Chat turns kept per person: the open one, and those of other tabs and resent requests."""

Answers = list[list[dict[str, Any]]]


class AwayError(MachineError):
    """No answers are available now. Labellers see the message, so it names no model; `PolicyWorker.problem` may.

    ``code`` lets the page translate it.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class PolicyWorker:
    """A process that answers prompts, used as a context.

    Args:
        settings: its YAML file of settings.
        log: the file for its standard error.
        command: the command, without the settings file.
    """

    def __init__(self, settings: Path, log: Path, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self.command = (*command, str(settings))
        self.log = log
        self.problem: str | None = None
        """Why no process answers; None while one runs or the first is starting."""
        self.is_ready = False
        self.starts = 0
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Answers]] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="policy worker", daemon=True)

    def __enter__(self) -> "PolicyWorker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        with self._lock:
            process = self._process
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join()

    def answers(self, prompts: Sequence[Any], count: int, seconds: float = ANSWER_SECONDS) -> Answers:
        """Have prompts answered: for each, ``count`` objects with ``response`` and ``source``. Raises AwayError."""
        future: Future[Answers] = Future()
        with self._lock:
            if not self.is_ready or self._process is None:
                raise AwayError("the model is not ready yet; try again in a moment", "model_not_ready")
            identity = next(self._ids)
            self._pending[identity] = future
            assert self._process.stdin is not None
            try:
                request = {"id": identity, "prompts": list(prompts), "answers": count}
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except OSError:
                del self._pending[identity]
                raise AwayError("the model has just ended and is restarted", "model_ended") from None
        try:
            return future.result(seconds)
        except TimeoutError:
            raise AwayError(f"the model did not answer within {seconds:g} seconds; try again", "model_slow") from None
        finally:
            with self._lock:
                self._pending.pop(identity, None)

    def _keep_running(self) -> None:
        wait = FIRST_WAIT
        while not self._ends.is_set():
            began = time.monotonic()
            try:
                problem = f"the policy process has ended: {self._run()}"
            except OSError as error:  # the limit on processes or files
                problem = f"the policy process cannot be started: {error}"
            wait = FIRST_WAIT if time.monotonic() - began > LASTED else wait
            problem += f"; restart in {wait:g} s (see {self.log.name} in the project's folder)"
            if not self._ends.is_set():
                say(problem)
            with self._lock:
                self.problem = problem
                pending, self._pending = self._pending, {}
            for future in pending.values():
                future.set_exception(
                    AwayError("the model ended while it answered and is restarted; try again", "model_ended")
                )
            self._ends.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _run(self) -> str:
        """Run the process to its end, pass on its answers, and return how it ended."""
        with open(self.log, "ab", opener=private_opener) as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                errors="replace",
                process_group=0 if os.name == "posix" else None,  # Ctrl-C in a terminal stops only the server
            )
        with process:
            with self._lock:
                self._process = process
                self.starts += 1
                if self._ends.is_set():
                    process.kill()
            assert process.stdout is not None
            assert process.stdin is not None
            said: str | None = None
            for line in process.stdout:
                said = self._take(line) or said
                if self._ends.is_set():
                    break
            with self._lock:
                self.is_ready, self._process = False, None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            status = process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()
        return said or f"status {status}"

    def _take(self, line: str) -> str | None:
        """Handle a line; return its message if it is a fatal error. Prints of libraries are ignored."""
        content = read_record(line)
        if content is None:
            return None
        if "ready" in content:
            with self._lock:
                self.is_ready, self.problem = True, None
            return None
        if "id" not in content:
            return str(content.get("error", "its answer was not recognised"))
        with self._lock:
            future = self._pending.pop(content["id"], None) if isinstance(content["id"], int) else None
        if future is not None and "error" in content:
            say(f"the policy could not answer: {content['error']}")
            future.set_exception(
                AwayError("the model could not answer this; the server's owner can see the reason", "model_failed")
            )
        elif future is not None:
            future.set_result(content["answers"])
        return None


class Buffer:
    """Keeps items ready, in its own thread, used as a context: while fewer than ``size`` wait for a labeller, the policy
    answers the next prompts, in file order.

    A prompt already answered by a policy in this project is not answered again.

    Args:
        project: where items are added.
        worker: writes the answers.
        prompts: text or lists of messages.
        answers: how many per prompt.
        size: how many items to keep ready.
    """

    def __init__(self, project: Project, worker: PolicyWorker, prompts: Sequence[Any], answers: int, size: int) -> None:
        self.project = project
        self.worker = worker
        self.answers = answers
        self.size = size
        answered = {_key(item.prompt) for item in project.items(also_withdrawn=True) if item.chosen_by != "import"}
        self.left = [prompt for prompt in prompts if _key(prompt) not in answered]
        """Prompts without answers."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="buffer", daemon=True)

    def __enter__(self) -> "Buffer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _fill(self) -> None:
        failures = 0
        while self.left and not self._ends.is_set():
            prompts = self.left[: 1 if failures else AT_A_TIME]
            try:
                if not self.worker.is_ready or self.project.waiting() >= self.size:
                    self._ends.wait(LOOK_SECONDS)
                    continue
                written = self.worker.answers(prompts, self.answers)
                made = map(_item_of, prompts, written)
                self.project.add_items([item for item in made if item is not None])
            except AwayError:
                failures += 1
                if len(prompts) > 1 or failures < TRIES:
                    self._ends.wait(LOOK_SECONDS)
                    continue
                times = f"the policy failed {failures} times on it"
                say(f"a prompt is skipped, because {times}: {prompts[0]!r:.100}")
            except (HeedfulError, OSError) as error:  # from the project's disk
                say(f"no new items could be added: {error}")
                self._ends.wait(AWAY_SECONDS)
                continue
            failures = 0
            del self.left[: len(prompts)]


def _item_of(prompt: Any, answers: Sequence[dict[str, Any]]) -> Item | None:
    """An item of the different answers; None if all are equal, so there is nothing to compare."""
    distinct = {_key(one["response"]): Candidate(one["response"], one["source"]) for one in reversed(answers)}
    candidates = tuple(reversed(distinct.values()))
    if len(candidates) < 2:
        say("a prompt got only equal answers, so it is skipped")
        return None
    task: Task = "pair" if len(candidates) == 2 else "ranking"
    return Item(item_id(task, prompt, candidates), task, prompt, candidates, chosen_by="random")


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Turn:
    """Two answers that wait for a choice. Their sources stay on the server until they are saved with the label."""

    person: str
    item: str
    nonce: str
    messages: Sequence[Mapping[str, Any]]
    """The conversation, up to and including the person's message."""
    responses: Sequence[Mapping[str, Any]]
    """Two objects with ``response`` and ``source``."""
    order: tuple[int, ...]
    """The response at each place on the screen."""
    turn_id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    """Its id on the page; random."""

    @property
    def shown(self) -> list[Any]:
        """The texts, in screen order."""
        return [self.responses[index]["response"] for index in self.order]


class Turns:
    """Waiting turns, by person. They are lost when the server stops: the page then asks again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_person: dict[str, dict[str, Turn]] = {}

    def same(self, person: str, nonce: str) -> Turn | None:
        """The turn made for this nonce, if the request was received before."""
        with self._lock:
            turns = self._by_person.get(person, {}).values()
            return next((one for one in turns if one.nonce == nonce), None)

    def add(self, turn: Turn) -> Turn:
        """Keep a turn, and forget the person's oldest ones."""
        with self._lock:
            turns = self._by_person.setdefault(turn.person, {})
            turns[turn.turn_id] = turn
            while len(turns) > KEPT_TURNS:
                del turns[next(iter(turns))]
        return turn

    def get(self, person: str, turn_id: str) -> Turn | None:
        """A turn of this person, never of another."""
        with self._lock:
            return self._by_person.get(person, {}).get(turn_id)
