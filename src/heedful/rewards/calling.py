"""Call a reward function on responses, and find out which of them it fails on."""

import inspect
import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from heedful.data.messages import as_dict
from heedful.errors import HeedfulError, RewardError
from heedful.faults import hit
from heedful.parallel import ranks
from heedful.rewards.background import Background
from heedful.rewards.process import LONGEST_END, CallError, FunctionProcess
from heedful.rewards.returned import (
    Elsewhere,
    Measured,
    OfGroups,
    OfRanks,
    OneScore,
    Problem,
    ResultError,
    RewardFunction,
    read_scores,
    together_measured,
)
from heedful.types import Completion, Text

RESERVED = ("prompts", "completions", "completion_ids", "truncated", "thinking_parts", "answer_parts")
"""Arguments that every reward function may have; no column may have one of these names."""
MOST_CALLS = 16
"""The most further calls of a function that failed, to find the responses that it fails on. That suffices for one in 256."""


Called = tuple[list[OneScore | Problem], Problem | None]
"""A score or a problem for each response, and why the call of all failed, if it did."""


def call_rewards(named: Sequence[tuple[str, RewardFunction]], completions: Sequence[Completion]) -> list[Called]:
    """Call several rewards as `call_reward` does. Those that are computed elsewhere are at the same time.

    Of several ranks, the first calls them, but for those whose calls are shared (`OfRanks`). All have the results.
    """
    if ranks.size() == 1:
        return _call_here(named, completions)
    shared = {i for i, (_, function) in enumerate(named) if isinstance(function, OfRanks)}
    rest = [i for i in range(len(named)) if i not in shared]
    found = {i: call_reward(*named[i], completions) for i in sorted(shared)}
    if rest:
        found |= zip(rest, ranks.by_first(lambda: _call_here([named[i] for i in rest], completions)), strict=True)
    return [found[i] for i in range(len(named))]


def _call_here(named: Sequence[tuple[str, RewardFunction]], completions: Sequence[Completion]) -> list[Called]:
    """The same, in this process."""
    others = [i for i, (_, function) in enumerate(named) if isinstance(function, Elsewhere)] if len(named) > 1 else []
    outcomes: dict[int, Future[Called]] = {i: Future() for i in others}

    is_over = threading.Event()

    def call(row: int) -> None:
        try:
            outcomes[row].set_result(call_reward(*named[row], completions, is_over))
        except BaseException as error:
            outcomes[row].set_exception(error)

    threads = [threading.Thread(target=call, args=(row,), daemon=True) for row in others]
    for thread in threads:
        thread.start()
    try:
        here = {i: call_reward(*one, completions) for i, one in enumerate(named) if i not in outcomes}
        return [outcomes[i].result() if i in outcomes else here[i] for i in range(len(named))]
    except BaseException:  # Ctrl-C, say
        is_over.set()
        for row in others:
            if not outcomes[row].done() and isinstance(function := named[row][1], Elsewhere):
                function.stop()
        for thread in threads:
            thread.join(LONGEST_END)
        raise


def call_reward(
    name: str, function: RewardFunction, completions: Sequence[Completion], is_over: threading.Event | None = None
) -> Called:
    """Score responses with one function.

    If the call fails (an exception, a timeout, a crash), the function is called again on halves of the responses, on halves
    of the halves that fail, and so on, at most `MOST_CALLS` times. What then still fails together has the same problem. Of a
    function that compares responses (`OfGroups`), a group stays whole. What a function measures of its calls (`Measured`) is
    that of all of them then.

    Args:
        name: of the reward, for messages.
        function: a reward function.
        completions: the responses.
        is_over: set by another thread when nobody wants the scores any more, so that parts are not called.

    Raises RewardError if it is called wrongly, or returns something that is not one entry per response; and what heedful
    itself raises in it, such as MachineError for a judge's cache that cannot be written.
    """
    size = function.group_size if isinstance(function, OfGroups) else 1
    arguments = _arguments(name, function, completions)
    parts: deque[tuple[range, Problem]] = deque()
    scores: list[OneScore | Problem] = [None] * len(completions)
    measured: list[dict[str, float]] = []

    def attempt(rows: range) -> None:
        hit("reward.call")
        if is_over is not None and is_over.is_set():
            raise RewardError(f"reward {name}: its call was given up")
        share = len(rows) / len(completions)
        timed = function.for_share(share) if share < 1 and isinstance(function, FunctionProcess) else function
        if isinstance(function, Measured):
            function.measured = {}  # a call that fails may set none
        try:
            found = _result(timed, {key: [of[row] for row in rows] for key, of in arguments.items()})
        except CallError as failed:
            parts.append((rows, Problem(str(failed), failed.__cause__)))
            return
        except ResultError as wrong:
            raise RewardError(f"reward {name} {wrong}; first sample: {sample(completions[rows[0]])}") from None
        finally:
            if isinstance(function, Measured):
                measured.append(function.measured)
        _check_lengths(name, found, [completions[row] for row in rows])
        for row, one in zip(rows, found, strict=True):
            scores[row] = one

    attempt(range(len(completions)))
    first = parts[0][1] if parts else None
    calls = 0
    while parts:
        rows, problem = parts.popleft()  # the largest
        if len(rows) > size and calls + 2 <= MOST_CALLS:
            calls += 2
            middle = max(1, len(rows) // size // 2) * size
            attempt(rows[:middle])
            attempt(rows[middle:])
        else:
            for row in rows:
                scores[row] = problem
    if isinstance(function, Measured):
        function.measured = together_measured(measured)
    return [_of_its_length(one, c) for one, c in zip(scores, completions, strict=True)], first


def as_messages(prompt: Text) -> Any:
    """Return a prompt as reward functions see it: a string, or a list of dictionaries with role and content.

    Tools that the conversation offers are in the first one.
    """
    if isinstance(prompt, str):
        return prompt
    return [as_dict(m) | ({"tools": json.loads(m.tools)} if m.tools else {}) for m in prompt]


def sample(completion: Completion) -> str:
    """A prompt and its response, as messages name them."""
    prompt = completion.prompt.prompt
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return f"the prompt {text!r:.80} ({completion.prompt.source}), response {completion.response!r:.120}"


def _result(function: RewardFunction, arguments: dict[str, list[Any]]) -> list[OneScore | Problem]:
    """What the function returns, read. Raises CallError, ResultError and RewardError."""
    try:
        found = function(**arguments)
        return read_scores(Background().finish(found) if inspect.iscoroutine(found) else found)
    except (HeedfulError, CallError, ResultError):  # the first says what to do, and it is not to call again
        raise
    except (Exception, SystemExit) as error:
        if isinstance(function, OfRanks) and ranks.size() > 1:  # others may wait for this rank's part
            raise
        raise CallError(f"raised {type(error).__name__}: {error}") from error


def _check_lengths(name: str, scores: Sequence[OneScore | Problem], completions: Sequence[Completion]) -> None:
    if len(scores) != len(completions):
        raise RewardError(
            f"reward {name} returned {len(scores)} scores for {len(completions)} responses; it must return one "
            f"number per response; first sample: {sample(completions[0])}"
        )


def _of_its_length(score: OneScore | Problem, completion: Completion) -> OneScore | Problem:
    """A score; a problem if it is one per token, but not for each token of its response."""
    if not isinstance(score, list) or len(score) == len(completion.ids):
        return score
    return Problem(
        f"returned {len(score)} scores for a response of {len(completion.ids)} tokens; a score is one finite number, None, "
        "or a list with one number for each of completion_ids (the token that ended the response is not among them)"
    )


def _arguments(name: str, function: RewardFunction, completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """The arguments that the function names, or all of them if it takes ``**kwargs``; one entry per response each."""
    chats = [not isinstance(c.prompt.prompt, str) for c in completions]
    names = {name for c in completions for name in c.prompt.columns}
    reserved = sorted(names & set(RESERVED))
    if reserved:
        raise RewardError(
            f"the prompts have a column {reserved[0]!r}, which is an argument of every reward; rename it in the data "
            f"(reserved: {', '.join(RESERVED)})"
        )
    arguments: dict[str, list[Any]] = {
        name: [c.prompt.columns.get(name) for c in completions] for name in sorted(names)
    }
    arguments |= {
        "prompts": [as_messages(c.prompt.prompt) for c in completions],
        "completions": [
            [{"role": "assistant", "content": c.response}] if chat else c.response
            for c, chat in zip(completions, chats, strict=True)
        ],
        "completion_ids": [list(c.ids) for c in completions],
        "truncated": [c.truncated for c in completions],
        "thinking_parts": [c.thinking for c in completions],
        "answer_parts": [c.answer for c in completions],
    }
    parameters = inspect.signature(function).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise RewardError(
            f"reward {name} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}; the prompts have "
            f"{', '.join(sorted(names)) or 'no columns besides the prompt'}: add it to the data or map it with --columns; "
            f"first sample: {sample(completions[0])}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}
