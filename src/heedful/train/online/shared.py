"""What PPO, A2C and GRPO share: prompts and rewards before the first step, a policy's evaluation, its table of samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from heedful import core
from heedful.checkpoints.source import load_config
from heedful.configs.online import OnlineOptions
from heedful.core.score_norm import ScoreNorm
from heedful.data.batch_order import BatchOrder
from heedful.data.chat import Renderer, plain_text
from heedful.data.fitting import Counts, prompt_room
from heedful.data.loading import EncodedPrompt, encode_prompts, encode_split, load_split
from heedful.data.schemas import read_prompts
from heedful.models.context import context_length
from heedful.models.policy import Policy
from heedful.rewards import Completion, Ensemble, Reward, RewardFunction, score
from heedful.rewards.resolve import check_wanted, load_rewards
from heedful.sampling.rollouts import Rollouts
from heedful.sampling.sampler import Sampler
from heedful.sampling.teacher_forced import token_outputs
from heedful.train.loop import Numbers

OFF_POLICY = "--top-k and --top-p shape what is sampled, not the policy's log-probs: training becomes off-policy"
SHOWN = {
    "reward/score_mean": "score",
    "reference/kl": "kl",
    "policy/entropy": "entropy",
    "rollout/response_length": "length",
    "rollout/eos_frac": "eos",
}
C = TypeVar("C", bound=OnlineOptions)


def wanted_rewards(
    config: C, rewards: Sequence[str | Reward | RewardFunction]
) -> tuple[C, list[str | Reward | RewardFunction]]:
    """All rewards, and the config with those that are strings, so that its YAML repeats the run. Raises ConfigError."""
    wanted = [*config.rewards, *rewards]
    check_wanted(wanted, config)
    return replace(config, rewards=tuple(reward for reward in wanted if isinstance(reward, str))), wanted


def reward_functions(
    wanted: Sequence[str | Reward | RewardFunction], policy: Policy, config: OnlineOptions
) -> Ensemble:
    """The rewards, with reward models on the policy's device in its precision. Raises RewardError, CheckpointError."""
    return load_rewards(
        wanted,
        config,
        device=policy.device,
        compute_dtype=policy.compute_dtype,
        micro_batch=config.micro_batch,
    )


def load_prompts(config: OnlineOptions, renderer: Renderer) -> tuple[list[EncodedPrompt], list[EncodedPrompt], Counts]:
    """Training and held-out prompts that leave room for a response in the model's context, and what was left out."""
    room = prompt_room(config.max_new_tokens, context_length(load_config(config.model)))
    return encode_split(
        lambda prompts: encode_prompts(prompts, renderer, max_length=room, action=config.too_long),
        load_split(read_prompts, config),
        config,
    )


def sampler_of(prompts: Sequence[EncodedPrompt], config: OnlineOptions) -> BatchOrder:
    """Which prompts a step samples responses to. Raises ConfigError where there are fewer than it takes."""
    num_prompts = config.rollout_batch_size // config.samples_per_prompt
    return BatchOrder(len(prompts), num_prompts, config.seed, batch_flag="--rollout-batch-size")


def try_rewards(
    rewards: Sequence[Reward], policy: Policy, prompts: Sequence[EncodedPrompt], sampler: Sampler, seed: int
) -> None:
    """Score a few responses before anything is written, with random numbers of their own. Raises RewardError."""
    score(rewards, sampler.respond(policy, prompts, torch.Generator().manual_seed(seed))[1])


def parents(config: OnlineOptions, rewards: Sequence[Reward], *others: str | None) -> list[str]:
    """The models a run starts from; their hashes are written down."""
    named = [path for path in (config.model, config.reference, *others) if path]
    return named + [reward.name.removeprefix("model:") for reward in rewards if reward.name.startswith("model:")]


def penalise_missing_eos(scores: Tensor, truncated: Tensor, config: OnlineOptions) -> Tensor:
    """Scores ``[batch]`` with the penalty of responses that were cut by length, as ``missing_eos`` says.

    "subtract" takes it off the score (as TRL does), "replace" puts minus the penalty in the score's place (Ziegler et al.
    2019, Huang et al. 2023, with a penalty of 1).
    """
    if config.missing_eos == "replace":
        return torch.where(truncated, -config.missing_eos_penalty, scores)
    return scores - config.missing_eos_penalty * truncated


def evaluate_policy(
    policy: Policy,
    reference: Policy,
    prompts: Sequence[EncodedPrompt],
    *,
    rewards: Sequence[Reward],
    sampler: Sampler,
    config: OnlineOptions,
) -> Numbers:
    """Mean score, KL, length and share of ended responses on held-out prompts, with the same random numbers each time."""
    chosen = prompts[: config.eval_prompts]
    generator = torch.Generator().manual_seed(config.seed + 1)
    rollouts, completions = sampler.respond(policy, chosen, generator)
    scores, _ = score(rewards, completions)
    logprobs, ref_logprobs = (
        token_outputs(model, rollouts.batch, temperature=config.temperature, micro_batch=config.micro_batch).logprobs
        for model in (policy, reference)
    )
    kl = core.kl_estimate(logprobs, ref_logprobs, kind="k1").sum(dim=1)
    return {
        "eval/score_mean": sum(scores) / len(scores),
        "eval/kl": float(kl.mean()),
        "eval/response_length": float(rollouts.lengths.float().mean()),
        "eval/eos_frac": 1 - float(rollouts.truncated.float().mean()),
    }


class Scored(Protocol):
    """A rollout batch with its scores."""

    @property
    def completions(self) -> list[Completion]: ...

    @property
    def scores(self) -> list[float]: ...

    @property
    def kl(self) -> Tensor: ...


def sample_rows(scored: Scored, config: OnlineOptions, *, with_kl: bool = True) -> list[dict[str, Any]]:
    """Rows for the table of samples, from the latest rollout batch: one of the responses to each prompt."""
    return [
        {
            "prompt": plain_text(scored.completions[row].prompt.prompt),
            "response": scored.completions[row].response,
            "score": scored.scores[row],
            **({"kl": float(scored.kl[row])} if with_kl else {}),
        }
        for row in range(0, len(scored.completions), config.samples_per_prompt)[: config.num_samples]
    ]


def rollout_metrics(
    rollouts: Rollouts, *, scores: Sequence[float], shaped: Tensor, old_logprobs: Tensor, entropy: Tensor, kl: Tensor
) -> dict[str, float]:
    """Metrics of a rollout batch before the update."""
    mask = rollouts.batch.response_mask
    raw = torch.tensor(scores, dtype=torch.float64)
    metrics = {
        "reward/score_mean": raw.mean(),
        "reward/score_std": raw.std(correction=0),
        "reward/shaped_mean": shaped.mean(),
        "reference/kl": kl.mean(),
        "policy/entropy": core.masked_mean(entropy, mask),
        "rollout/response_length": rollouts.lengths.float().mean(),
        "rollout/eos_frac": 1 - rollouts.truncated.float().mean(),
        "rollout/sampler_mismatch": core.masked_mean((rollouts.sampler_logprobs - old_logprobs).abs(), mask),
    }
    return {name: float(value) for name, value in metrics.items()}


def throughput(response_mask: Tensor, metrics: Numbers) -> dict[str, float]:
    """Response tokens of a step over its seconds."""
    seconds = sum(metrics[name] for name in ("time/rollout", "time/score", "time/update"))
    return {"perf/tokens_per_second": float(response_mask.sum()) / seconds}


def norm_metrics(scores: Sequence[float], norm: ScoreNorm, *, clip: float | None, is_running: bool) -> dict[str, float]:
    """What normalisation and clipping did to a batch of scores, where they are asked for."""
    metrics: dict[str, float] = {}
    if is_running:
        metrics |= {"reward/norm_mean": norm.mean, "reward/norm_std": norm.std}
    if clip is not None:
        clipped = sum(abs(score - norm.mean) / norm.std > clip for score in scores)
        metrics["reward/clip_frac"] = clipped / len(scores)
    return metrics
