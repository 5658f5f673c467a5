"""The process that writes answers while people label (`heedful.rounds.sample`), and how it is kept alive.

JSON lines go to its standard input and come from its standard output. One that dies is started again, after a while that
doubles each time; what it says besides is in PROJECT/policy.log. The server itself never loads a model.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from heedful.display import say
from heedful.errors import MachineError
from heedful.files import private_opener

FIRST_WAIT = 1.0
"""Seconds until a process that died is started again for the first time."""
LONGEST_WAIT = 60.0
LASTED = 60.0
"""Seconds after which a process counts as having worked, so that the next wait is the first one again."""
ANSWER_SECONDS = 120.0
"""The most that somebody waits for an answer."""
END_SECONDS = 5.0
"""How long the process has to end by itself."""
MODULE = "heedful.rounds.sample"

Answers = list[list[dict[str, Any]]]


class AwayError(MachineError):
    """There are no answers now. The message is for people who label, so it names no model; `PolicyWorker.problem` may.

    ``code`` lets their page say it in its own language.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class PolicyWorker:
    """A process that answers prompts, used as a context.

    Args:
        settings: the YAML file with its settings.
        log: the file for what it says.
        command: what to run before the settings' name.
    """

    def __init__(self, settings: Path, log: Path, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self.command = (*command, str(settings))
        self.log = log
        self.problem: str | None = None
        """Why there is no process that answers; None while there is one, or the first is starting."""
        self.is_ready = False
        self.starts = 0
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Answers]] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep, name="policy worker", daemon=True)

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
                self._process.stdin.write(
                    json.dumps({"id": identity, "prompts": list(prompts), "answers": count}) + "\n"
                )
                self._process.stdin.flush()
            except OSError:
                del self._pending[identity]
                raise AwayError("the model has just ended; it is started again", "model_ended") from None
        try:
            return future.result(seconds)
        except TimeoutError:
            raise AwayError(f"the model did not answer within {seconds:g} seconds; try again", "model_slow") from None
        finally:
            with self._lock:
                self._pending.pop(identity, None)

    def _keep(self) -> None:
        """Start the process whenever there is none, until the end."""
        wait = FIRST_WAIT
        while not self._ends.is_set():
            began = time.monotonic()
            try:
                problem = self._run()
            except OSError as error:  # no more processes or files
                problem = f"the process of the policy cannot be started: {error}"
            wait = FIRST_WAIT if time.monotonic() - began > LASTED else wait
            self._lost(
                f"{problem}; it is started again in {wait:g} s ({self.log.name} in the project's folder says more)"
            )
            self._ends.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _run(self) -> str:
        """Run the process to its end, hand out what it answers, and say how it ended."""
        with open(self.log, "ab", opener=private_opener) as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                process_group=0 if os.name == "posix" else None,  # Ctrl-C in a terminal is for the server only
            )
        with self._lock:
            self._process = process
            self.starts += 1
            if self._ends.is_set():
                process.kill()
        assert process.stdout is not None
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
        process.stdout.close()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        return f"the process of the policy has ended: {said or f'status {status}'}"

    def _take(self, line: str) -> str | None:
        """Act on a line; return what it says if it is why the process cannot go on."""
        try:
            content = json.loads(line)
        except ValueError:
            return None
        if "ready" in content:
            with self._lock:
                self.is_ready, self.problem = True, None
            return None
        if "id" not in content:
            return str(content.get("error", "it said nothing that is known"))
        with self._lock:
            future = self._pending.pop(content["id"], None)
        if future is not None:
            if "error" in content:
                say(f"the policy could not answer: {content['error']}")
                future.set_exception(
                    AwayError("the model could not answer this; the server's owner sees why", "model_failed")
                )
            else:
                future.set_result(content["answers"])
        return None

    def _lost(self, problem: str) -> None:
        if not self._ends.is_set():
            say(problem)
        with self._lock:
            self.problem = problem
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(
                AwayError("the model ended while it answered, and is started again; try again", "model_ended")
            )
