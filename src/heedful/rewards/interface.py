"""The one interface of every reward, and the checks on what comes back.

A reward is a function ``reward(prompts, completions, completion_ids=..., truncated=..., **columns)`` that returns one
number per response, the signature of TRL's reward functions: prompts and completions are strings where the prompt is raw
text, and lists of ``{"role": ..., "content": ...}`` where it is a conversation. ``columns`` are the other fields of the
prompt's record. A function may name only the arguments that it wants. None means "does not apply to this response".
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from heedful.errors import RewardError
from heedful.types import Prompt, Text

RewardFunction = Callable[..., Sequence[float | None]]
RESERVED = ("prompts", "completions", "completion_ids", "truncated")
"""What every reward function may ask for; no column may have such a name."""


@dataclass(frozen=True)
class Reward:
    """A reward function and the name it goes by in metrics and messages."""

    name: str
    function: RewardFunction


@dataclass(frozen=True)
class Completion:
    """A response to a prompt, to be scored."""

    prompt: Prompt
    response: str
    ids: Sequence[int] = ()
    truncated: bool = False
    """The response was cut by length before the model ended it."""


def score(rewards: Sequence[Reward], completions: Sequence[Completion]) -> tuple[list[float], dict[str, float]]:
    """The sum of all rewards for each completion, and the mean of each reward by its name.

    A reward that returns None for a response is left out of that response's sum.

    Raises RewardError, naming the reward and the sample, where a reward raises, lacks a column, returns the wrong number
    of scores or something that is not a finite number, or where no reward applies to a response.
    """
    totals: list[list[float]] = [[] for _ in completions]
    means: dict[str, float] = {}
    for reward in rewards:
        scores = _checked_scores(reward, completions)
        applied = [s for s in scores if s is not None]
        if applied:
            means[reward.name] = sum(applied) / len(applied)
        for total, one in zip(totals, scores, strict=True):
            if one is not None:
                total.append(one)
    for total, completion in zip(totals, completions, strict=True):
        if not total:
            names = ", ".join(reward.name for reward in rewards)
            raise RewardError(f"no reward applies (all of {names} returned None) to {_sample(completion)}")
    return [sum(total) for total in totals], means


def as_messages(prompt: Text) -> Any:
    """A prompt as reward functions see it: a string, or a list of role and content dictionaries."""
    return prompt if isinstance(prompt, str) else [{"role": m.role, "content": m.content} for m in prompt]


def _checked_scores(reward: Reward, completions: Sequence[Completion]) -> list[float | None]:
    try:
        result = _call(reward, completions)
    except RewardError:
        raise
    except Exception as error:
        culprit, own_error = _first_to_fail(reward, completions) or (completions[0], error)
        raise RewardError(
            f"reward {reward.name} raised {type(own_error).__name__}: {own_error}; for {_sample(culprit)}"
        ) from own_error
    # Arrays and tensors become lists of their rows. A set or a dictionary is no list: it has no order.
    scores = list(result) if getattr(result, "shape", ()) else result
    if isinstance(scores, str | bytes) or not isinstance(scores, Sequence):
        raise RewardError(
            f"reward {reward.name} returned {type(result).__name__} {result!r:.80}; it must return a list with one number "
            f"per response; first sample: {_sample(completions[0])}"
        )
    if len(scores) != len(completions):
        raise RewardError(
            f"reward {reward.name} returned {len(scores)} scores for {len(completions)} responses; it must return one "
            f"number per response; first sample: {_sample(completions[0])}"
        )
    return [_checked_number(reward, value, c) for value, c in zip(scores, completions, strict=True)]


def _checked_number(reward: Reward, value: Any, completion: Completion) -> float | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") and _holds_one(value) else value
    if not isinstance(number, Real) or not _is_finite(number):
        raise RewardError(
            f"reward {reward.name} returned {value!r:.80} ({type(value).__name__}); a score is one finite number, or None "
            f"where the reward does not apply; for {_sample(completion)}"
        )
    return float(number)


def _holds_one(value: Any) -> bool:
    """A number of numpy or torch, or an array or tensor of one."""
    return all(length == 1 for length in getattr(value, "shape", ()))


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a float
        return False


def _call(reward: Reward, completions: Sequence[Completion]) -> Any:
    """Call the function with the arguments that it names (all of them where it takes ``**kwargs``)."""
    chats = [not isinstance(c.prompt.prompt, str) for c in completions]
    names = {name for c in completions for name in c.prompt.columns}
    reserved = sorted(names & set(RESERVED))
    if reserved:
        raise RewardError(
            f"the prompts have a column {reserved[0]!r}, a name that rewards use themselves; rename it in the data "
            f"(reserved: {', '.join(RESERVED)})"
        )
    arguments: dict[str, Any] = {name: [c.prompt.columns.get(name) for c in completions] for name in sorted(names)}
    arguments |= {
        "prompts": [as_messages(c.prompt.prompt) for c in completions],
        "completions": [
            [{"role": "assistant", "content": c.response}] if chat else c.response
            for c, chat in zip(completions, chats, strict=True)
        ],
        "completion_ids": [list(c.ids) for c in completions],
        "truncated": [c.truncated for c in completions],
    }
    parameters = inspect.signature(reward.function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = arguments
    else:
        accepted = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise RewardError(
            f"reward {reward.name} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}; the prompts have "
            f"{', '.join(sorted(names)) or 'no columns besides the prompt'}: add it to the data or map it with --columns; "
            f"first sample: {_sample(completions[0])}"
        )
    return reward.function(**accepted)


def _first_to_fail(reward: Reward, completions: Sequence[Completion]) -> tuple[Completion, Exception] | None:
    for completion in completions:
        try:
            _call(reward, [completion])
        except RewardError:  # a column that only other records have
            continue
        except Exception as error:
            return completion, error
    return None


def _sample(completion: Completion) -> str:
    prompt = completion.prompt.prompt
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return f"the prompt {text!r:.80} ({completion.prompt.source}), response {completion.response!r:.120}"
