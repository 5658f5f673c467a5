"""Two models that read the same responses: log-probs of both, and values if both have a value head (``--compare``)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from heedful.apps.plot.run_metrics import short_names
from heedful.apps.report.inspector import Inspected
from heedful.configs.report import ReportConfig
from heedful.data.batches import Batch, collate
from heedful.engines.teacher_forced import token_outputs
from heedful.errors import ConfigError
from heedful.kernels.device import frozen_place, resolve_device
from heedful.models.load import load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.save import VALUE_HEAD
from heedful.models.shape import context_length
from heedful.models.source import resolve
from heedful.types import MicroBatch

ROWS, TOKENS = 32, 16_384
"""The most of a pass."""


def compared(found: Inspected, config: ReportConfig) -> Inspected:
    """The same responses with what two models say of their tokens, at the temperature of each response's run.

    Raises CheckpointError if a model cannot be loaded, ConfigError if it has no row for a token or cannot read a response.
    """
    names = short_names([Path(model) for model in config.compare])
    has_values = all((Path(resolve(model).folder) / VALUE_HEAD).is_file() for model in config.compare)
    numbers: dict[str, list[list[float]]] = {}
    for name, model in zip(names, config.compare, strict=True):
        logprobs, values = _read(model, found, config, with_values=has_values)
        numbers[f"{name}: log-prob"] = logprobs
        if has_values:
            numbers[f"{name}: value"] = values
    first, second = (numbers[f"{name}: log-prob"] for name in names)
    numbers[f"{names[1]} minus {names[0]}"] = [
        [b - a for a, b in zip(one, other, strict=True)] for one, other in zip(first, second, strict=True)
    ]
    return replace(found, compared=numbers)


def _read(
    model: str, found: Inspected, config: ReportConfig, *, with_values: bool
) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probs and values of a model for each token of each response."""
    policy = load_policy(
        resolve(model), with_value_head=with_values, **frozen_place(resolve_device(config.device), config.dtype)
    )
    freeze(policy)
    rows = [(one.prompt_ids, *one.with_others) for _, one, _ in found.responses]
    _check(policy, model, [(prompt, said) for prompt, said, _ in rows])
    temperatures = [float(run.settings.get("temperature") or 1.0) for run, _, _ in found.responses]
    logprobs: list[list[float]] = [[] for _ in rows]
    values: list[list[float]] = [[] for _ in rows]
    for temperature in dict.fromkeys(temperatures):
        places = [place for place, one in enumerate(temperatures) if one == temperature and rows[place][1]]
        places.sort(key=lambda place: sum(map(len, rows[place][:2])))
        for start in range(0, len(places), ROWS):
            part = places[start : start + ROWS]
            prompts, said, own = zip(*(rows[place] for place in part), strict=True)
            batch = collate(prompts, said, own=own, pad_id=0)
            read = token_outputs(
                policy, batch.to(policy.device), temperature=temperature, micro_batch=MicroBatch(ROWS, TOKENS)
            )
            _fill(logprobs, part, read.logprobs, batch)
            if read.values is not None:
                _fill(values, part, read.values, batch)
    return logprobs, values


def _fill(lists: list[list[float]], places: Sequence[int], numbers: torch.Tensor, batch: Batch) -> None:
    for place, row, mask in zip(places, numbers.float().cpu(), batch.response_mask, strict=True):
        lists[place] = row[mask].tolist()


def _check(policy: Policy, model: str, rows: Sequence[tuple[list[int], list[int]]]) -> None:
    """The model has a row of embeddings for each token, and room for each response."""
    known = policy.lm.get_input_embeddings().weight.shape[0]
    largest = max((token for row in rows for part in row for token in part), default=0)
    if largest >= known:
        raise ConfigError(
            f"--compare {model}: it knows {known} tokens, and the responses have the token {largest}: it is of another "
            "vocabulary; compare models of one tokenizer"
        )
    context, longest = context_length(policy.lm.config), max((sum(map(len, row)) for row in rows), default=0)
    if context is not None and longest > context:
        raise ConfigError(f"--compare {model}: it reads {context} tokens, and a prompt with its response has {longest}")
