"""The interface that all rewards share, and the checks on what they return.

A reward is a function ``reward(prompts, completions, completion_ids=..., truncated=..., **columns)`` that returns one
score per response; this is the signature of TRL's reward functions. Prompts and completions are strings if the prompt is raw
text, and lists of ``{"role": ..., "content": ...}`` if it is a conversation. ``thinking_parts`` and ``answer_parts`` are what
stands in ``<think>`` and after it. ``columns`` are the other fields of the prompt's record. A function needs to name only the
arguments that it uses. The score None means "does not apply to this response". A list of
numbers, one for each of a response's ``completion_ids``, is a dense score.
"""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, overload

from heedful.configs.scoring import Combination
from heedful.data.messages import as_dict
from heedful.errors import MemoryFullError, RewardError
from heedful.rewards.combine import combine_scores, shares
from heedful.types import Completion, Text

OneScore = float | list[float] | None
"""A reward's score of a response: a number, one number per token, or None if the reward does not apply."""
RewardFunction = Callable[..., Sequence[OneScore]]
RESERVED = ("prompts", "completions", "completion_ids", "truncated", "thinking_parts", "answer_parts")
"""Arguments that every reward function may have; no column may have one of these names."""


@dataclass(frozen=True)
class Reward:
    """A reward function, its name in metrics and messages, and the weight that multiplies its scores."""

    name: str
    function: RewardFunction
    weight: float = 1.0


@dataclass(frozen=True)
class Ensemble(Sequence[Reward]):
    """Rewards and how their weighted scores are combined (`heedful.rewards.combine`). A plain list of rewards is summed."""

    rewards: tuple[Reward, ...]
    combine: Combination = "sum"
    std_coef: float = 1.0
    """How many standard deviations ``mean-std`` subtracts."""

    @overload
    def __getitem__(self, index: int) -> Reward: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Reward]: ...

    def __getitem__(self, index: int | slice) -> Reward | Sequence[Reward]:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class Scores:
    """The scores that rewards gave to responses."""

    totals: list[float]
    """The combined score of each response; a dense one is summed over its tokens."""
    tokens: list[list[float]] | None
    """The part of each total that belongs to tokens: one number for each of a response's ids. None if no reward is dense."""
    means: dict[str, float]
    """Mean score of each reward by its name, before weighting, over the responses to which it applies."""


def score(rewards: Sequence[Reward], completions: Sequence[Completion]) -> tuple[list[float], dict[str, float]]:
    """Score completions as `score_tokens` does. Returns the total of each completion and the mean of each reward by name."""
    scores = score_tokens(rewards, completions)
    return scores.totals, scores.means


def score_tokens(rewards: Sequence[Reward], completions: Sequence[Completion]) -> Scores:
    """Score each completion with all rewards and combine the scores.

    A reward that returns None for a response is left out of that response's combination.

    Args:
        rewards: rewards whose scores are summed, or an `Ensemble`, which says how to combine them.
        completions: the responses to score.

    Raises RewardError, naming the reward and a sample, if a reward raises an exception, needs a column that is missing,
    returns the wrong number of scores or something that is not a finite number, or if no reward applies to a response.
    """
    ensemble = rewards if isinstance(rewards, Ensemble) else Ensemble(tuple(rewards))
    columns = [_checked_scores(reward, completions) for reward in rewards]
    means = {}
    for reward, column in zip(rewards, columns, strict=True):
        applied = [_total(one) for one in column if one is not None]
        if applied:
            means[reward.name] = sum(applied) / len(applied)
    is_dense = any(isinstance(one, list) for column in columns for one in column)
    totals, tokens = [], []
    for row, completion in enumerate(completions):
        applied_here = [(r.weight, c[row]) for r, c in zip(rewards, columns, strict=True) if c[row] is not None]
        if not applied_here:
            names = ", ".join(reward.name for reward in rewards)
            raise RewardError(f"no reward applies (all of {names} returned None) to {_sample(completion)}")
        weighted = [weight * _total(one) for weight, one in applied_here]
        totals.append(combine_scores(weighted, ensemble.combine, std_coef=ensemble.std_coef))
        if is_dense:
            placed = [0.0] * len(completion.ids)
            for share, (weight, one) in zip(shares(weighted, ensemble.combine), applied_here, strict=True):
                if isinstance(one, list):
                    placed = [sum_so_far + share * weight * x for sum_so_far, x in zip(placed, one, strict=True)]
            tokens.append(placed)
    return Scores(totals, tokens if is_dense else None, means)


def _total(one: OneScore) -> float:
    assert one is not None
    return float(sum(one)) if isinstance(one, list) else one


def as_messages(prompt: Text) -> Any:
    """Return a prompt as reward functions see it: a string, or a list of dictionaries with role and content.

    Tools that the conversation offers are in the first one.
    """
    if isinstance(prompt, str):
        return prompt
    return [as_dict(m) | ({"tools": json.loads(m.tools)} if m.tools else {}) for m in prompt]


def _checked_scores(reward: Reward, completions: Sequence[Completion]) -> list[OneScore]:
    try:
        result = _call(reward, completions)
    except (RewardError, MemoryFullError):
        raise
    except Exception as error:
        culprit, own_error = _first_to_fail(reward, completions) or (completions[0], error)
        raise RewardError(
            f"reward {reward.name} raised {type(own_error).__name__}: {own_error}; for {_sample(culprit)}"
        ) from own_error
    # Arrays and tensors become lists of their rows. A set or a dictionary is refused: it has no order.
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
    return [_checked_score(reward, value, c) for value, c in zip(scores, completions, strict=True)]


def _checked_score(reward: Reward, value: Any, completion: Completion) -> OneScore:
    if value is None:
        return None
    if not isinstance(value, list | tuple) and (_holds_one(value) or len(value.shape) != 1):
        return _checked_number(reward, value, completion)
    if len(value) != len(completion.ids):
        raise RewardError(
            f"reward {reward.name} returned {len(value)} scores for a response of {len(completion.ids)} tokens; a score is "
            "one finite number, None, or a list with one number for each of completion_ids (the token that ended the "
            f"response is not among them); for {_sample(completion)}"
        )
    return [_checked_number(reward, one, completion) for one in value]


def _checked_number(reward: Reward, value: Any, completion: Completion) -> float:
    number = value.item() if hasattr(value, "item") and _holds_one(value) else value
    if not isinstance(number, Real) or not _is_finite(number):
        raise RewardError(
            f"reward {reward.name} returned {value!r:.80} ({type(value).__name__}); a score is one finite number, or None "
            f"if the reward does not apply; for {_sample(completion)}"
        )
    return float(number)


def _holds_one(value: Any) -> bool:
    """True for a number, also of numpy or torch, and for an array or tensor with one element."""
    return all(length == 1 for length in getattr(value, "shape", ()))


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a float
        return False


def _call(reward: Reward, completions: Sequence[Completion]) -> Any:
    """Call the function with the arguments that it names, or with all of them if it takes ``**kwargs``."""
    chats = [not isinstance(c.prompt.prompt, str) for c in completions]
    names = {name for c in completions for name in c.prompt.columns}
    reserved = sorted(names & set(RESERVED))
    if reserved:
        raise RewardError(
            f"the prompts have a column {reserved[0]!r}, which is an argument of every reward; rename it in the data "
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
        "thinking_parts": [c.thinking for c in completions],
        "answer_parts": [c.answer for c in completions],
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
        except RewardError:  # it needs a column that only other records have
            continue
        except Exception as error:
            return completion, error
    return None


def _sample(completion: Completion) -> str:
    prompt = completion.prompt.prompt
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return f"the prompt {text!r:.80} ({completion.prompt.source}), response {completion.response!r:.120}"
