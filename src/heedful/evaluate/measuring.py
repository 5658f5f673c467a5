"""Shared parts of the measures: held-out records, a policy's responses to them, and the treatment of failures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from heedful.configs.evaluate import EvaluationOptions, SampledOptions, ScoresConfig
from heedful.configs.options import MachineOptions
from heedful.data.chat import Renderer, plain_text
from heedful.data.fitting import Counts, added, check_dropped, prompt_room
from heedful.data.learned import ask
from heedful.data.loading import answerable, encode_prompts, read_usable
from heedful.data.schemas import read_prompts
from heedful.data.splits import HasPrompt, item_key, split_by_prompt
from heedful.display import say
from heedful.engines.episodes import Episodes
from heedful.engines.responses import Responses
from heedful.engines.sampler import make_sampler, with_graphs
from heedful.errors import DataError, RewardError
from heedful.kernels.device import frozen_place, resolve_device, resolve_dtype
from heedful.models.load import load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.shape import context_length
from heedful.models.source import Source, load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.rewards import Completion, Ensemble, Reward
from heedful.rewards.models import Machine, ask_reward_models, check_context
from heedful.rewards.own_answers import say_unmatched, unmatched_answers
from heedful.rewards.resolve import (
    AnyReward,
    AnyRewards,
    check_reward_options,
    check_wanted,
    listed,
    load_judges,
    load_rewards,
)
from heedful.rewards.scoring import Scores
from heedful.types import Prompt

Item = TypeVar("Item", bound=HasPrompt)


def held_out(read: Callable[..., list[Item]], options: EvaluationOptions) -> tuple[list[Item], Counts]:
    """Read the records to measure on with a function such as `read_rankings`, and the file's counts.

    These are all records, or, if ``options.eval_fraction`` is below 1, the held-out ones of trainers with that setting.

    Raises DataError, also if more records were dropped than ``options.max_dropped`` allows.
    """
    items, unusable = read_usable(read, options.data, options)
    counts = {"records": len(items) + unusable["dropped_unusable"], **unusable}
    if options.max_samples is not None:
        counts["max_samples"] = options.max_samples
    check_dropped(counts, max_dropped=options.max_dropped, path=options.data)
    if options.eval_fraction < 1:
        items = split_by_prompt(items, options.eval_fraction)[1]
    return items, counts


def left_out(counts: Counts) -> Counts:
    """Return the counts for a result: dropped and truncated records, and where reading stopped."""
    reported = ("dropped_", "unusable/", "truncated", "max_samples")
    return {name: count for name, count in counts.items() if name.startswith(reported) and count}


def by_prompt(values: Sequence[float], items: Iterable[HasPrompt]) -> list[list[float]]:
    """Group values by the prompt of each of ``items``, for `heedful.core.intervals`.

    Prompts are independent of each other; responses to one prompt, and people's opinions of them, are not. Prompts are
    identified as in the trainers' split (`heedful.data.splits.prompt_key`): the turns of one conversation are one group.
    """
    groups: dict[str, list[float]] = {}
    for value, item in zip(values, items, strict=True):
        groups.setdefault(item_key(item), []).append(value)
    return list(groups.values())


def load_functions(
    config: ScoresConfig, rewards: AnyRewards, judges: Sequence[AnyReward] = ()
) -> tuple[Ensemble, Ensemble]:
    """Load the rewards of ``--rewards`` and those given in Python, and judges.

    Raises ConfigError, CheckpointError and RewardError.
    """
    wanted = [*config.rewards, *listed(rewards)]
    check_wanted(wanted, config)
    check_reward_options([*wanted, *judges], config)
    machine = machine_of(config)
    return load_rewards(wanted, config, **machine), load_judges("--judge", judges, config, **machine)


def machine_of(config: EvaluationOptions) -> Machine:
    """Device, precision and micro-batches of reward models in a measurement."""
    device = resolve_device(config.device, graphs=getattr(config, "cuda_graphs", "off") == "on")
    return {
        "device": device,
        "compute_dtype": resolve_dtype(config.dtype, device),
        "micro_batch": config.micro_batch,
        "special_tokens": config.special_tokens,
    }


def prompts_of(
    config: SampledOptions, models: Sequence[str], rewards: Sequence[Reward] = ()
) -> tuple[list[Prompt], Counts]:
    """Read the prompts that leave every model room for a response, and count dropped and truncated ones.

    Raises ConfigError if a reward model among ``rewards`` cannot read them with a response, DataError if a reward can match
    too few of their answers.
    """
    prompts, counts = held_out(read_prompts, config)
    prompts = prompts[: config.max_prompts]
    sources = [resolve(name, config) for name in models]
    renderers = [Renderer(load_chat_tokenizer(source, config), config.special_tokens) for source in sources]
    limits = [prompt_room(config.max_new_tokens, context_length(load_config(source))) for source in sources]
    prompts, too_long = answerable(prompts, renderers, limits, config)
    counts = added(counts, too_long)
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if not prompts:
        raise DataError(f"{config.data}: every prompt was dropped: {left_out(counts)}")
    for renderer in renderers:
        check_context(rewards, prompts, renderer, max_new_tokens=config.max_new_tokens)
    if isinstance(config, ScoresConfig):
        _check_answers(rewards, prompts, config)
    if not config.raw_prompts:
        ask_reward_models(rewards, prompts, columns=config.columns)
    return prompts, counts


def _check_answers(rewards: Sequence[Reward], prompts: Sequence[Prompt], config: ScoresConfig) -> None:
    """Raise DataError if rewards can match fewer of the prompts' own answers than ``config.max_failed_rewards`` allows."""
    found = unmatched_answers(rewards, prompts)
    if not found:
        return
    what = f"{say_unmatched(found, prompts)}; {found[0].source}: {found[0].because}"
    if len({one.source for one in found}) > config.max_failed_rewards * len(prompts):
        raise DataError(f"{what}; correct these records, or raise --max-failed-rewards {config.max_failed_rewards:g}")
    say(f"WARNING: {what}")


@dataclass(frozen=True)
class Answered:
    """A policy and its responses to prompts. Responses to the same prompt are consecutive."""

    policy: Policy
    responses: Responses

    @property
    def completions(self) -> Sequence[Completion]:
        """Prompts and responses as text."""
        return self.responses.completions

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each response."""
        return [completion.prompt for completion in self.completions]

    def select(self, rows: list[int]) -> "Answered":
        """Return the responses at these indices, in this order."""
        return Answered(self.policy, self.responses.select(rows))

    def shape(self) -> dict[str, float]:
        """Mean length of the responses, and the shares of responses with an end token and of empty ones."""
        return {
            "response_length": float(self.responses.lengths.float().mean()),
            "eos_frac": 1 - float(self.responses.truncated.float().mean()),
            "empty_frac": sum(not c.response.strip() for c in self.completions) / len(self.completions),
        }


def load_frozen(model: str | Source, options: MachineOptions) -> Policy:
    """Load a frozen policy. Raises CheckpointError."""
    device = resolve_device(options.device, graphs=getattr(options, "cuda_graphs", "off") == "on")
    policy = load_policy(model, **frozen_place(device, options.dtype))
    freeze(policy)
    return policy


def answer(config: SampledOptions, name: str, prompts: Sequence[Prompt], *, best_of: int = 1) -> Answered:
    """Load a policy and sample responses to each prompt. With the same seed every policy gets the same random numbers."""
    source = resolve(name, config)
    renderer = Renderer(load_chat_tokenizer(source, config), config.special_tokens)
    policy = load_frozen(source, config)
    if not config.raw_prompts:
        ask(name, renderer, prompts, policy.lm.generation_config.eos_token_id, columns=config.columns)
    longest = prompt_room(config.max_new_tokens, context_length(policy.lm.config))
    encoded, _ = encode_prompts(prompts, renderer, max_length=longest, action="truncate", learns=False)
    encoded = [prompt for prompt in encoded for _ in range(config.samples_per_prompt * best_of)]
    sampler = make_sampler(with_graphs(config, policy), renderer, policy, micro_batch=config.micro_batch)
    if config.environment:
        sampler = replace(
            sampler,
            episodes=Episodes.load(config, renderer, max_new_tokens=config.max_new_tokens, max_prompt_tokens=longest),
        )
    try:
        return Answered(policy, sampler.generate_in_parts(policy, encoded, torch.Generator().manual_seed(config.seed)))
    finally:
        sampler.close()


def without_failed(given: Sequence[Scores], count: int, *, each: int = 1) -> tuple[list[int], dict[str, Any]]:
    """Return the items with all their scores, and a report of the others and of the rewards' own calls.

    Args:
        given: scores of the same items by different rewards, or of different policies.
        count: the number of items.
        each: number of consecutive responses per item.

    Raises RewardError if no item has all its scores.
    """
    failed = {row // each for scores in given for row in scores.failed}
    kept = [i for i in range(count) if i not in failed]
    notes = [scores.note for scores in given if scores.note]
    if not kept:
        raise RewardError(f"nothing is left to measure: {notes[0]}")
    found: dict[str, Any] = {"failed": len(failed), "first_failure": notes[0]} if failed else {}
    for scores in given:
        for metric, value in scores.measured.items():
            found[metric if metric not in found else f"{metric}#2"] = value
    return kept, found


def counted(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    counts: Counts,
    failed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Counts of prompts, of responses if a prompt has several, of failures (`without_failed`) and of dropped records."""
    several = {"responses": len(completions)} if len(completions) > len(prompts) else {}
    return {"prompts": len(prompts), **several, **(failed or {}), **left_out(counts)}


def shown_rows(prompts: Sequence[Prompt], config: SampledOptions) -> list[int]:
    """Return the indices of the responses to show: the first one to each of the first prompts."""
    return [i * config.samples_per_prompt for i in range(len(prompts))][: config.num_samples]


def sample(completion: Completion, **numbers: float) -> dict[str, Any]:
    """One row of the table of samples."""
    return {"prompt": plain_text(completion.prompt.prompt), "response": completion.response, **numbers}
