"""How good a policy's responses are, how they compare with another's, and how far it is from a reference."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from heedful import core
from heedful.configs.evaluate import KLConfig, PerplexityConfig, SampledOptions, ScoresConfig, WinRateConfig
from heedful.data.chat import Renderer, plain_text
from heedful.data.collate import collate
from heedful.data.fitting import max_length, prompt_room
from heedful.data.loading import encode_demonstrations, encode_prompts
from heedful.data.schemas import read_demonstrations, read_prompts
from heedful.errors import ConfigError, DataError
from heedful.evaluate.report import mean_and_interval
from heedful.evaluate.reward_models import held_out
from heedful.models.checkpoints import context_length, load_tokenizer
from heedful.models.device import resolve_device, resolve_dtype
from heedful.models.policy import Policy, freeze, load_policy
from heedful.rewards import Completion, score
from heedful.rewards.resolve import resolve_rewards
from heedful.rollout.responses import make_sampler
from heedful.rollout.rollouts import Rollouts
from heedful.rollout.teacher_forced import token_outputs
from heedful.types import Prompt

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Answered:
    """A policy and its responses to prompts."""

    policy: Policy
    rollouts: Rollouts
    completions: list[Completion]


def evaluate_scores(config: ScoresConfig) -> tuple[dict[str, Any], Rows]:
    """Mean score of a policy's responses with its 95 % interval, their length and the share that ended.

    Raises DataError, CheckpointError, RewardError.
    """
    answered = _answer(config, config.model, _prompts(config))
    scores = _scores(config, answered.completions)
    interval = mean_and_interval(scores)
    result = {
        "score_mean": interval["mean"],
        "interval_95": interval["interval_95"],
        **_shape(answered),
        "prompts": len(scores),
    }
    rows = [
        {"prompt": plain_text(c.prompt.prompt), "response": c.response, "score": s}
        for c, s in list(zip(answered.completions, scores, strict=True))[: config.num_samples]
    ]
    return result, rows


def evaluate_win_rate(config: WinRateConfig) -> tuple[dict[str, Any], Rows]:
    """Share of prompts on which the policy scores higher than the baseline, ties one half, with its 95 % interval.

    Both answer the same prompts, each read through its own tokenizer and template.

    Raises DataError, CheckpointError, RewardError.
    """
    prompts = _prompts(config)
    ours, theirs = (_answer(config, name, prompts).completions for name in (config.model, config.baseline))
    our_scores, their_scores = _scores(config, ours), _scores(config, theirs)
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(our_scores, their_scores, strict=True)]
    interval = mean_and_interval(wins)
    result = {
        "win_rate": interval["mean"],
        "interval_95": interval["interval_95"],
        "ties": wins.count(0.5),
        "score_mean": sum(our_scores) / len(wins),
        "baseline_score_mean": sum(their_scores) / len(wins),
        "prompts": len(wins),
    }
    rows = [
        {
            "prompt": plain_text(ours[i].prompt.prompt),
            "response": ours[i].response,
            "score": our_scores[i],
            "baseline": theirs[i].response,
            "baseline score": their_scores[i],
        }
        for i in range(min(config.num_samples, len(wins)))
    ]
    return result, rows


def evaluate_kl(config: KLConfig) -> tuple[dict[str, Any], Rows]:
    """``KL(policy || reference)`` in nats a response, on responses sampled from the policy (k1 summed over tokens).

    Raises DataError and CheckpointError, also where the two models have different tokenizers.
    """
    if load_tokenizer(config.model).get_vocab() != load_tokenizer(config.reference).get_vocab():
        raise ConfigError(
            f"--reference {config.reference} has another vocabulary than {config.model}: no KL between them"
        )
    answered = _answer(config, config.model, _prompts(config))
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
    result = {
        "kl": interval["mean"],
        "interval_95": interval["interval_95"],
        "kl_per_token": sum(per_response) / int(answered.rollouts.lengths.sum()),
        **_shape(answered),
        "prompts": len(per_response),
    }
    rows = [
        {"prompt": plain_text(c.prompt.prompt), "response": c.response, "kl": kl}
        for c, kl in list(zip(answered.completions, per_response, strict=True))[: config.num_samples]
    ]
    return result, rows


def evaluate_perplexity(config: PerplexityConfig) -> dict[str, Any]:
    """``exp`` of the mean negative log-probability a token, over text (cut into pieces) or demonstrations.

    Raises DataError and CheckpointError.
    """
    device = resolve_device(config.device)
    renderer = Renderer(load_tokenizer(config.model, chat_template=config.chat_template))
    records = held_out(read_demonstrations, config)
    policy = load_policy(config.model, device=device, compute_dtype=resolve_dtype(config.dtype, device))
    freeze(policy)
    examples, _ = encode_demonstrations(
        records,
        renderer,
        max_length=max_length(config.max_length, context_length(policy.lm.config)),
        action="refuse",
        max_dropped=0.0,
        learn_prompt=config.loss_on == "all",
    )
    examples.sort(key=lambda example: len(example.prompt) + len(example.response))
    total, tokens = 0.0, 0
    for start in range(0, len(examples), config.micro_batch_size):
        part = examples[start : start + config.micro_batch_size]
        batch = collate([e.prompt for e in part], [e.response for e in part], pad_id=renderer.pad_id).to(device)
        outputs = token_outputs(policy, batch, temperature=1.0, micro_batch_size=config.micro_batch_size)
        total -= float(outputs.logprobs.double().sum())
        tokens += int(batch.response_mask.sum())
    if not tokens:
        raise DataError(
            f"{config.data}: no token has another before it, so there is nothing to predict; give longer texts"
        )
    return {"perplexity": math.exp(total / tokens), "loss": total / tokens, "tokens": tokens, "records": len(records)}


def _prompts(config: SampledOptions) -> list[Prompt]:
    return held_out(read_prompts, config)[: config.max_prompts]


def _answer(config: SampledOptions, name: str, prompts: list[Prompt]) -> Answered:
    """Load a policy and sample one response to each prompt; the same seed gives every policy the same random numbers."""
    device = resolve_device(config.device)
    renderer = Renderer(load_tokenizer(name, chat_template=config.chat_template))
    policy = load_policy(name, device=device, compute_dtype=resolve_dtype(config.dtype, device))
    freeze(policy)
    encoded, _ = encode_prompts(
        prompts,
        renderer,
        max_length=prompt_room(config.max_new_tokens, context_length(policy.lm.config)),
        action="refuse",
        max_dropped=0.0,
    )
    sampler = make_sampler(config, renderer, policy, micro_batch_size=config.micro_batch_size)
    rollouts, completions = sampler.respond(policy, encoded, torch.Generator().manual_seed(config.seed))
    return Answered(policy, rollouts, completions)


def _scores(config: ScoresConfig, completions: list[Completion]) -> list[float]:
    device = resolve_device(config.device)
    rewards = resolve_rewards(config.rewards, device=device, compute_dtype=resolve_dtype(config.dtype, device))
    return score(rewards, completions)[0]


def _shape(answered: Answered) -> dict[str, float]:
    return {
        "response_length": float(answered.rollouts.lengths.double().mean()),
        "eos_frac": 1 - float(answered.rollouts.truncated.double().mean()),
        "empty_frac": sum(not c.response.strip() for c in answered.completions) / len(answered.completions),
    }
