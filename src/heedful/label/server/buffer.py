"""Keep items ready: while fewer than so many wait for somebody who labels, the policy answers the next prompts.

Prompts are taken in the order of their file; one that a policy has answered for this project before is not answered again.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

from heedful.display import say
from heedful.errors import HeedfulError
from heedful.label.identity import item_id
from heedful.label.project import Project
from heedful.label.records import Candidate, Item, Task
from heedful.label.server.worker import AwayError, PolicyWorker

AT_A_TIME = 4
"""Prompts per request, few so that somebody who talks to the policy does not wait for many."""
LOOK_SECONDS = 0.5
"""How often to look whether items are missing."""
AWAY_SECONDS = 10.0
"""How long to wait for a disk that takes nothing."""
TRIES = 3
"""How often the policy may fail or die over a prompt; the prompts beside it are then asked for one by one."""


class Buffer:
    """Fills a project with answers of the policy, in a thread of its own, used as a context.

    Args:
        project: where items are added.
        worker: what writes the answers.
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
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="buffer", daemon=True)

    @property
    def is_filling(self) -> bool:
        """There are prompts that have no answers yet."""
        return bool(self.left)

    def __enter__(self) -> "Buffer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _fill(self) -> None:
        failures = 0
        while self.left and not self._ends.is_set():
            if not self.worker.is_ready or self.project.waiting() >= self.size:
                self._ends.wait(LOOK_SECONDS)
                continue
            prompts = self.left[: 1 if failures else AT_A_TIME]
            try:
                self._add(prompts)
            except AwayError:
                failures += 1
                if len(prompts) == 1 and failures >= TRIES:
                    say(
                        f"a prompt is left out, because the policy failed {failures} times to answer it: {prompts[0]!r:.100}"
                    )
                else:
                    self._ends.wait(LOOK_SECONDS)
                    continue
            except (HeedfulError, OSError) as error:  # of the project's disk
                say(f"no new items could be added: {error}")
                self._ends.wait(AWAY_SECONDS)
                continue
            failures = 0
            del self.left[: len(prompts)]

    def _add(self, prompts: Sequence[Any]) -> None:
        written = self.worker.answers(prompts, self.answers)
        items = [self._item(prompt, answers) for prompt, answers in zip(prompts, written, strict=True)]
        self.project.add_items([item for item in items if item is not None])

    def _item(self, prompt: Any, answers: Sequence[dict[str, Any]]) -> Item | None:
        """An item of the answers that differ; None if all are the same, so that there is nothing to choose."""
        distinct = {_key(one["response"]): Candidate(one["response"], one["source"]) for one in reversed(answers)}
        candidates = tuple(reversed(distinct.values()))
        if len(candidates) < 2:
            say("a prompt has the same answer twice, so it is left out")
            return None
        task: Task = "pair" if len(candidates) == 2 else "ranking"
        return Item(item_id(task, prompt, candidates), task, prompt, candidates, chosen_by="random")


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True)
