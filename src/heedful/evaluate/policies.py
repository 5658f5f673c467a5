"""How good a policy's responses are, how they compare with another's, and how far it is from a reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heedful import core
from heedful.configs.evaluate import KLConfig, PerplexityConfig, SampledOptions, ScoresConfig, WinRateConfig
from heedful.data.chat import Renderer, plain_text
from heedful.data.collate import collate
from heedful.data.fitting import Counts, check_dropped, max_length, prompt_room, too_long
from heedful.data.loading import encode_demonstrations, encode_prompts
from heedful.data.schemas import read_demonstrations, read_prompts
from heedful.errors import ConfigError, DataError
from heedful.evaluate.report import mean_and_interval
from heedful.evaluate.reward_models import held_out, left_out
from heedful.models.checkpoints import check_companion, context_length, load_config, load_tokenizer
from heedful.models.device import resolve_device, resolve_dtype
from heedful.models.policy import Policy, freeze, load_policy
from heedful.rewards import Completion, Ensemble, Reward, RewardFunction, score
from heedful.rewards.resolve import check_wanted, load_rewards
from heedful.rollout.responses import make_sampler
from heedful.rollout.rollouts import Rollouts
from heedful.rollout.teacher_forced import token_outputs
from heedful.types import Prompt


@dataclass(frozen=True)
class Answered:
    """A policy and its responses to prompts."""

    policy: Policy
    rollouts: Rollouts
    completions: list[Completion]


def evaluate_scores(config: ScoresConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Mean score of a policy's responses with its 95 % interval, their length and the share that ended.

    ``rewards`` are added to the config's: functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError, RewardError.
    """
    functions = _functions(config, rewards)
    prompts, counts = _prompts(config, [config.model])
    answered = _answer(config, config.model, prompts)
    scores, _ = score(functions, answered.completions)
    interval = mean_and_interval(scores)
    return {
        "score_mean": interval["mean"],
        "interval_95": interval["interval_95"],
        **_shape(answered),
        "prompts": len(scores),
        **left_out(counts),
        "samples": [
            {"prompt": plain_text(c.prompt.prompt), "response": c.response, "score": s}
            for c, s in list(zip(answered.completions, scores, strict=True))[: config.num_samples]
        ],
    }


def evaluate_win_rate(config: WinRateConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Share of prompts on which the policy scores higher than the baseline, ties one half, with its 95 % interval.

    Both answer the same prompts, each read through its own tokenizer and template. ``rewards`` are added to the config's:
    functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError, RewardError.
    """
    functions = _functions(config, rewards)
    prompts, counts = _prompts(config, [config.model, config.baseline])
    ours, theirs = (_answer(config, name, prompts).completions for name in (config.model, config.baseline))
    our_scores, their_scores = (score(functions, completions)[0] for completions in (ours, theirs))
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(our_scores, their_scores, strict=True)]
    interval = mean_and_interval(wins)
    return {
        "win_rate": interval["mean"],
        "interval_95": interval["interval_95"],
        "ties": wins.count(0.5),
        "score_mean": sum(our_scores) / len(wins),
        "baseline_score_mean": sum(their_scores) / len(wins),
        "prompts": len(wins),
        **left_out(counts),
        "samples": [
            {
                "prompt": plain_text(ours[i].prompt.prompt),
                "response": ours[i].response,
                "score": our_scores[i],
                "baseline": theirs[i].response,
                "baseline score": their_scores[i],
            }
            for i in range(min(config.num_samples, len(wins)))
        ],
    }


def evaluate_kl(config: KLConfig) -> dict[str, Any]:
    """``KL(policy || reference)`` in nats a response, on responses sampled from the policy (k1 summed over tokens).

    Raises DataError and CheckpointError, also where the two models have different tokenizers.
    """
    if config.top_k or config.top_p < 1:
        raise ConfigError("--top-k and --top-p must be left out here: filtered responses do not estimate the KL")
    check_companion("--reference", config.reference, load_tokenizer(config.model), longest=0)
    prompts, counts = _prompts(config, [config.model, config.reference])
    answered = _answer(config, config.model, prompts)
    device = resolve_device(config.device)
    reference = load_policy(config.reference, device=device, compute_dtype=resolve_dtype(config.dtype, device))
    freeze(reference)
    logprobs, ref_logprobs = (
        token_outputs(
            model, answered.rollouts.batch, temperature=config.temperature, micro_batch_size=config.micro_batch_size
        ).logprobs
        for model in (answered.policy, reference)
    )
    per_response = core.kl_estimate(logprobs, ref_logprobs, kind="k1").sum(dim=1).tolist()
    interval = mean_and_interval(per_response)
    return {
        "kl": interval["mean"],
        "interval_95": interval["interval_95"],
        "kl_per_token": sum(per_response) / int(answered.rollouts.lengths.sum()),
        **_shape(answered),
        "prompts": len(per_response),
        **left_out(counts),
        "samples": [
            {"prompt": plain_text(c.prompt.prompt), "response": c.response, "kl": kl}
            for c, kl in list(zip(answered.completions, per_response, strict=True))[: config.num_samples]
        ],
    }


def evaluate_perplexity(config: PerplexityConfig) -> dict[str, Any]:
    """``exp`` of the mean negative log-probability a token, over text (cut into pieces) or demonstrations.

    Raises DataError and CheckpointError.
    """
    device = resolve_device(config.device)
    renderer = Renderer(load_tokenizer(config.model, chat_template=config.chat_template))
    records, counts = held_out(read_demonstrations, config)
    policy = load_policy(config.model, device=device, compute_dtype=resolve_dtype(config.dtype, device))
    freeze(policy)
    examples, done = encode_demonstrations(
        records,
        renderer,
        max_length=max_length(config.max_length, context_length(policy.lm.config)),
        action=config.too_long,
        learn_prompt=config.loss_on == "all",
    )
    counts |= done
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if not examples:
        raise DataError(
            f"{config.data}: no token has another before it, so there is nothing to predict; give longer texts"
        )
    examples.sort(key=lambda example: len(example.prompt) + len(example.response))
    total, tokens = 0.0, 0
    for start in range(0, len(examples), config.micro_batch_size):
        part = examples[start : start + config.micro_batch_size]
        batch = collate([e.prompt for e in part], [e.response for e in part], pad_id=renderer.pad_id).to(device)
        outputs = token_outputs(policy, batch, temperature=1.0, micro_batch_size=config.micro_batch_size)
        total -= float(outputs.logprobs.cpu().double().sum())
        tokens += int(batch.response_mask.sum())
    return {
        "perplexity": math.exp(total / tokens) if total / tokens < 700 else math.inf,
        "loss": total / tokens,
        "tokens": tokens,
        "records": len(records),
        **left_out(counts),
    }


def _prompts(config: SampledOptions, models: Sequence[str]) -> tuple[list[Prompt], Counts]:
    """The prompts that every model can read with room for a response, and what was left out or cut."""
    prompts, counts = held_out(read_prompts, config)
    prompts = prompts[: config.max_prompts]
    too_long_for: set[int] = set()
    for name in models:
        renderer = Renderer(load_tokenizer(name, chat_template=config.chat_template))
        too_long_for |= set(
            too_long(
                [len(renderer.prompt_ids(prompt.prompt)) for prompt in prompts],
                [prompt.source for prompt in prompts],
                limit=prompt_room(config.max_new_tokens, context_length(load_config(name))),
                action=config.too_long,
                what="prompts",
            )
        )
    counts["dropped_too_long" if config.too_long == "drop" else "truncated"] = len(too_long_for)
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if config.too_long == "drop":
        prompts = [prompt for i, prompt in enumerate(prompts) if i not in too_long_for]
    if not prompts:
        raise DataError(f"{config.data}: every prompt was dropped: {left_out(counts)}")
    return prompts, counts


def _answer(config: SampledOptions, name: str, prompts: Sequence[Prompt]) -> Answered:
    """Load a policy and sample one response to each prompt; the same seed gives every policy the same random numbers."""
    device = resolve_device(config.device)
    renderer = Renderer(load_tokenizer(name, chat_template=config.chat_template))
    policy = load_policy(name, device=device, compute_dtype=resolve_dtype(config.dtype, device))
    freeze(policy)
    room = prompt_room(config.max_new_tokens, context_length(policy.lm.config))
    encoded, _ = encode_prompts(prompts, renderer, max_length=room, action="truncate")
    sampler = make_sampler(config, renderer, policy, micro_batch_size=config.micro_batch_size)
    rollouts, completions = sampler.respond(policy, encoded, torch.Generator().manual_seed(config.seed))
    return Answered(policy, rollouts, completions)


def _functions(config: ScoresConfig, rewards: Sequence[str | Reward | RewardFunction]) -> Ensemble:
    """The config's rewards and those that were handed in. Raises ConfigError where there are none."""
    wanted = [*config.rewards, *rewards]
    check_wanted(wanted, config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    return load_rewards(wanted, config, device=device, compute_dtype=dtype, micro_batch_size=config.micro_batch_size)


def _shape(answered: Answered) -> dict[str, float]:
    return {
        "response_length": float(answered.rollouts.lengths.float().mean()),
        "eos_frac": 1 - float(answered.rollouts.truncated.float().mean()),
        "empty_frac": sum(not c.response.strip() for c in answered.completions) / len(answered.completions),
    }
