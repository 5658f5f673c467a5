"""Scores of the answers of items, by the same rewards as everywhere: reward models, functions, servers."""

from collections.abc import Mapping, Sequence
from typing import Any

from heedful.configs.options import MachineOptions
from heedful.configs.scoring import RewardOptions
from heedful.data.messages import read_conversation, read_message
from heedful.errors import RewardError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.label.records import Candidate, Item
from heedful.rewards import Completion, Ensemble, score_tokens
from heedful.rewards.resolve import load_rewards
from heedful.types import MicroBatch, Prompt, plain_response

Asked = tuple[Any, Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""A prompt as JSON, its answers (``response``, ``source``), and its columns."""


def load_judge(rewards: Sequence[str], options: RewardOptions, machine: MachineOptions) -> Ensemble:
    """Load rewards to score items with. Raises ConfigError, CheckpointError and RewardError."""
    device = resolve_device(machine.device)
    dtype = resolve_dtype(machine.dtype, device)
    return load_rewards(list(rewards), options, device=device, compute_dtype=dtype, micro_batch=MicroBatch(32))


def scores_of(judge: Ensemble, asked: Sequence[Asked]) -> list[list[float]]:
    """The score of each answer to each prompt, in order. Raises RewardError, also if a reward fails on any answer."""
    completions = [
        _completion(prompt, answer, columns, at)
        for at, (prompt, answers, columns) in enumerate(asked)
        for answer in answers
    ]
    if not completions:
        return [[] for _ in asked]
    given = score_tokens(judge, completions)
    if given.failed:
        raise RewardError(f"a reward failed on {len(given.failed)} of {len(completions)} answers: {given.note}")
    totals = iter(given.totals)
    return [[next(totals) for _ in answers] for _, answers, _ in asked]


def scores_of_items(judge: Ensemble, items: Sequence[Item]) -> dict[str, list[float]]:
    """The score of each candidate, by item; items without candidates are left out. Raises RewardError."""
    with_answers = [item for item in items if item.candidates]
    asked = [(item.prompt, [_as_answer(one) for one in item.candidates], item.columns) for item in with_answers]
    return {item.item_id: scores for item, scores in zip(with_answers, scores_of(judge, asked), strict=True)}


def _as_answer(candidate: Candidate) -> dict[str, Any]:
    return {"response": candidate.response, "source": candidate.source}


def _completion(prompt: Any, answer: Mapping[str, Any], columns: Mapping[str, Any], at: int) -> Completion:
    place = f"item {at + 1}"
    text = prompt if isinstance(prompt, str) else read_conversation(place, "prompt", prompt)
    response = answer["response"]
    if not isinstance(response, str):
        response = plain_response(read_message(place, "response", response))
    kept = {name: value for name, value in columns.items() if name not in ("prompt", "responses")}
    return Completion(
        Prompt(text, place, kept), response, truncated=bool((answer.get("source") or {}).get("truncated"))
    )
