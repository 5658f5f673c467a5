"""From prompts to scored responses: sample, score, drop responses without a score, replace groups that tie.

Dynamic sampling (Yu et al. 2025, DAPO, eq. 11): a group of equal scores has advantages of 0, so another prompt replaces
it in the rollout batch. Groups with a response without a score are replaced too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from heedful import core
from heedful.algorithms.online.learner import Learner
from heedful.configs.online import RolloutConfig
from heedful.data.batches import Batch
from heedful.data.loading import EncodedPrompt
from heedful.engines.responses import Responses, joined
from heedful.errors import RewardError
from heedful.faults import hit
from heedful.rewards import Reward
from heedful.rewards.results import merge_measured
from heedful.rewards.scoring import Ensemble, Scores, score_tokens
from heedful.types import Completion


@dataclass(frozen=True)
class SampledBatch:
    """Responses with their scores, including responses without one. Rows of one prompt are consecutive."""

    responses: Responses
    reward_scores: Scores
    seconds: float
    """Duration of sampling."""
    sampled_tokens: int
    """Over all rounds, including dropped prompts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of replaced groups (`refill_ties`) and of sampling servers (`server_metrics`)."""

    @property
    def completions(self) -> Sequence[Completion]:
        """Prompts and responses as text."""
        return self.responses.completions


@dataclass(frozen=True)
class ScoredBatch:
    """A rollout batch with its scores, before advantages are estimated.

    Without responses that have no score and, if responses are compared, without the others to the same prompt.
    """

    responses: Responses
    reward_scores: Scores
    norm: core.ScoreNorm
    """Normalisation of the scores."""
    shaped: Float[Tensor, " batch"]
    """Normalised and clipped scores with the length penalties (`shape_scores`)."""
    sampled: SampledBatch
    """All sampled responses, also those without a score; for ``rollouts/``."""
    seconds: float
    """Duration of sampling and scoring."""

    @property
    def batch(self) -> Batch:
        """Prompts and responses as tensors."""
        return self.responses.batch

    @property
    def completions(self) -> Sequence[Completion]:
        """Prompts and responses as text."""
        return self.responses.completions

    @property
    def scores(self) -> list[float]:
        """Raw scores."""
        return self.reward_scores.totals


def rollout(learner: Learner[RolloutConfig], prompts: Sequence[EncodedPrompt]) -> ScoredBatch:
    """Sample a response to each prompt and score it. Drops responses on which a reward failed. Raises RewardError."""
    config, started = learner.config, time.perf_counter()
    sampled = refill_ties(learner, sample_and_score(learner, prompts))
    responses, given = sampled.responses, sampled.reward_scores
    if given.failed:
        rows = _kept(sampled, config)
        responses, given = responses.select(rows), given.select(rows)
    norm = learner.score_norm
    shaped = shape_scores(torch.tensor(given.totals, device=responses.truncated.device), responses, norm, config)
    seconds = time.perf_counter() - started
    return ScoredBatch(responses, given, norm, shaped, sampled, seconds)


def shape_scores(scores: Tensor, responses: Responses, norm: core.ScoreNorm, config: RolloutConfig) -> Tensor:
    """Shaped scores ``[batch]``: normalised, clipped, with penalties for responses that are cut or near the length
    limit.

    ``--missing-eos-penalty`` is subtracted from the score of a response cut at the limit. ``--overlong-buffer`` adds
    `core.overlong_penalty` times ``--overlong-penalty``.
    """
    clipped = core.clip_scores(norm(scores), config.score_clip)
    shaped = clipped - config.missing_eos_penalty * responses.truncated
    if config.overlong_buffer:
        late = core.overlong_penalty(
            responses.lengths, max_new_tokens=config.max_new_tokens, buffer=config.overlong_buffer
        )
        shaped = shaped + config.overlong_penalty * late
    return shaped


def sample_and_score(
    learner: Learner[RolloutConfig], prompts: Sequence[EncodedPrompt], rewards: Sequence[Reward] | None = None
) -> SampledBatch:
    """Sample a response to each prompt and score it, with the learner's rewards by default. Raises RewardError."""
    started = time.perf_counter()
    sampler = learner.async_sampler or learner.sampler
    responses = sampler.generate(learner.policy, prompts, learner.generator, version=learner.schedule.done)
    hit("rollout")
    seconds = time.perf_counter() - started
    given = score_tokens(learner.rewards if rewards is None else rewards, responses.completions)
    hit("reward")
    tokens, metrics = int(responses.lengths.sum()), server_metrics(learner, responses)
    return SampledBatch(responses, given, seconds, tokens, metrics)


def server_metrics(learner: Learner[RolloutConfig], responses: Responses) -> dict[str, float]:
    """Staleness of the sampling weights, in steps, and the number of retried requests."""
    source = learner.sampler.source
    retries = None if source is None else source.take_retries()
    if retries is None or responses.versions is None:
        return {}
    staleness = (learner.schedule.done - responses.versions).float()
    return {
        "rollout/staleness_mean": float(staleness.mean()),
        "rollout/staleness_max": float(staleness.max()),
        "rollout/sampler_retries": float(retries),
    }


def _kept(sampled: SampledBatch, config: RolloutConfig) -> list[int]:
    """Rows for training: those with a score and, if responses are compared, in a complete group.

    Raises RewardError if none is left.
    """
    rows, size = sampled.reward_scores.scored, config.samples_per_prompt
    if config.compares == "prompt":
        broken = {row // size for row in sampled.reward_scores.failed}
        rows = [row for row in rows if row // size not in broken]
    if len(rows) < (2 if config.compares else 1):
        raise RewardError(
            f"{len(sampled.reward_scores.failed)} of {len(sampled.responses)} responses have no score, and no complete group "
            "is left: a prompt's responses are compared only if all of them have a score; fix the reward"
        )
    return rows


# Dynamic sampling ------------------------------------------------------------------------------------------------------


def refill_ties(learner: Learner[RolloutConfig], first: SampledBatch) -> SampledBatch:
    """Replace groups that tie by new prompts, in up to ``dynamic_sampling_rounds`` rounds.

    A round samples one new prompt per group still to be replaced; new groups that tie are dropped. Groups that find no
    replacement stay. Rounds draw prompts and random numbers from the run's own streams, in order, so the run resumes
    from a checkpoint bit for bit. A reward that fails on new responses does not end the run: their prompt is dropped.

    Raises RewardError.
    """
    config = learner.config
    if not config.dynamic_sampling_rounds:
        return first
    rewards = _lenient(learner.rewards)
    rounds, tied = [first], _tied(learner, first)
    place = [(0, group) for group in range(len(tied))]
    places = open_places = [group for group, is_tied in enumerate(tied) if is_tied]
    for _ in range(config.dynamic_sampling_rounds):
        if not open_places:
            break
        rounds.append(sample_and_score(learner, learner.prompts.take(len(open_places)), rewards))
        found = [(len(rounds) - 1, group) for group, is_tied in enumerate(_tied(learner, rounds[-1])) if not is_tied]
        for at, new in zip(open_places, found, strict=False):
            place[at] = new
        open_places = open_places[len(found) :]
    metrics = first.metrics | {
        "rollout/refilled_frac": (len(places) - len(open_places)) / len(place),
        "rollout/unfilled_frac": len(open_places) / len(place),
        "rollout/sampled_responses": float(sum(len(part.responses) for part in rounds)),
    }
    whole = _chosen(rounds, place, learner) if any(part for part, _ in place) else first
    return replace(
        whole,
        reward_scores=replace(
            whole.reward_scores,
            means=_means(rounds),
            measured=merge_measured([part.reward_scores.measured for part in rounds]),
            note=_notes(rounds),
        ),
        seconds=sum(part.seconds for part in rounds),
        sampled_tokens=sum(part.sampled_tokens for part in rounds),
        metrics=metrics,
    )


def _tied(learner: Learner[RolloutConfig], sampled: SampledBatch) -> list[bool]:
    """True for groups to replace: all shaped scores are equal, or a response has none."""
    config, responses = learner.config, sampled.responses
    scores = torch.tensor(sampled.reward_scores.totals, device=responses.truncated.device)
    shaped = shape_scores(scores, responses, learner.score_norm, config)
    tied: list[bool] = core.tied_groups(shaped, group_size=config.samples_per_prompt).tolist()
    for row in sampled.reward_scores.failed:
        tied[row // config.samples_per_prompt] = True
    return tied


def _chosen(
    rounds: Sequence[SampledBatch], place: Sequence[tuple[int, int]], learner: Learner[RolloutConfig]
) -> SampledBatch:
    """One batch of groups, each given by its round and index."""
    firsts, size = [0], learner.config.samples_per_prompt
    for part in rounds:
        firsts.append(firsts[-1] + len(part.responses))
    rows = [firsts[part] + group * size + i for part, group in place for i in range(size)]
    responses = joined([part.responses for part in rounds], rows, pad_id=learner.sampler.renderer.pad_id)
    totals = list(chain.from_iterable(part.reward_scores.totals for part in rounds))
    tokens = None
    if any(part.reward_scores.tokens is not None for part in rounds):
        each = chain.from_iterable(
            part.reward_scores.tokens or [[0.0] * len(c.ids) for c in part.responses.completions] for part in rounds
        )
        everything = [list(numbers) for numbers in each]
        tokens = [everything[row] for row in rows]
    names = dict.fromkeys(name for part in rounds for name in part.reward_scores.parts)
    parts = {
        name: list(chain.from_iterable(p.reward_scores.parts.get(name, [None] * len(p.responses)) for p in rounds))
        for name in names
    }
    failed = {first + row for first, part in zip(firsts, rounds, strict=False) for row in part.reward_scores.failed}
    unread = {first + row for first, part in zip(firsts, rounds, strict=False) for row in part.reward_scores.unread}
    given = Scores(
        totals=[totals[row] for row in rows],
        tokens=tokens,
        means={},
        failed=tuple(at for at, row in enumerate(rows) if row in failed),
        unread=tuple(at for at, row in enumerate(rows) if row in unread),
        parts={name: [column[row] for row in rows] for name, column in parts.items()},
    )
    return SampledBatch(responses, given, seconds=0.0, sampled_tokens=0)


def _means(rounds: Sequence[SampledBatch]) -> dict[str, float]:
    """Mean of each reward over all rounds' responses to which it applies."""
    found: dict[str, list[float]] = {}
    for part in rounds:
        scored = part.reward_scores.scored
        for name, column in part.reward_scores.parts.items():
            found.setdefault(name, []).extend(score for row in scored if (score := column[row]) is not None)
    return {name: sum(scores) / len(scores) for name, scores in found.items() if scores}


def _notes(rounds: Sequence[SampledBatch]) -> str | None:
    """Notes on the rewards of all rounds."""
    notes = [(number, part.reward_scores.note) for number, part in enumerate(rounds) if part.reward_scores.note]
    return "; ".join(f"in place of ties: {note}" if number else note for number, note in notes) or None


def _lenient(rewards: Sequence[Reward]) -> Sequence[Reward]:
    """The rewards with any share of failures allowed, if they allow any: a round may be small."""
    if isinstance(rewards, Ensemble) and rewards.max_failed:
        return replace(rewards, max_failed=1.0)
    return rewards
