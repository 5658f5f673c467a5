"""Sampled responses with their scores, and new prompts in place of those whose responses all score the same.

Dynamic sampling (Yu et al. 2025, DAPO, eq. 11): a group of equal scores has advantages of 0, so its place in the rollout
batch is given to a prompt that teaches something. So is that of a group with a response that has no score.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from heedful import core
from heedful.configs.online import RolloutConfig
from heedful.data.loading import EncodedPrompt
from heedful.faults import hit
from heedful.rewards import Reward
from heedful.rewards.results import merge_measured
from heedful.rewards.scoring import Ensemble, Scores, score_tokens
from heedful.sampling.rollouts import Rollouts, joined
from heedful.train.online.learner import Learner
from heedful.train.online.shaping import shape
from heedful.types import Completion


@dataclass(frozen=True)
class SampledBatch:
    """Responses with their scores; those without one are among them. Rows that share a prompt are consecutive."""

    rollouts: Rollouts
    completions: list[Completion]
    given: Scores
    seconds: float
    """That sampling took."""
    sampled_tokens: int
    """Of all rounds, those of dropped prompts included."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What became of groups that tied (`draw_untied`), and of servers that sampled (`of_servers`)."""


def draw(
    learner: Learner[RolloutConfig], prompts: Sequence[EncodedPrompt], rewards: Sequence[Reward] | None = None
) -> SampledBatch:
    """Sample a response to each prompt and score it, by other rewards than the learner's if given. Raises RewardError."""
    started = time.perf_counter()
    if learner.ahead is None:
        version = learner.schedule.done
        rollouts, completions = learner.sampler.respond(learner.policy, prompts, learner.generator)
    else:
        rollouts, completions, version = learner.ahead.respond(learner, prompts)
    rollouts = replace(rollouts, versions=torch.full_like(rollouts.lengths, version))
    hit("rollout")
    seconds = time.perf_counter() - started
    given = score_tokens(learner.rewards if rewards is None else rewards, completions)
    hit("reward")
    tokens, metrics = int(rollouts.lengths.sum()), of_servers(learner, rollouts)
    return SampledBatch(rollouts, completions, given, seconds, tokens, metrics)


def of_servers(learner: Learner[RolloutConfig], rollouts: Rollouts) -> dict[str, float]:
    """How old the weights were that drew each response, in steps, and how often servers were asked again."""
    servers = learner.sampler.servers
    if servers is None or rollouts.versions is None:
        return {}
    staleness = (learner.schedule.done - rollouts.versions).float()
    return {
        "rollout/staleness_mean": float(staleness.mean()),
        "rollout/staleness_max": float(staleness.max()),
        "rollout/sampler_retries": float(servers.take_retries()),
    }


def draw_untied(learner: Learner[RolloutConfig], prompts: Sequence[EncodedPrompt]) -> SampledBatch:
    """The same, with up to ``dynamic_sampling_rounds`` rounds of new prompts in place of those whose responses tie.

    A round samples one new prompt for each place that is still open; what ties of these is dropped. A place that stays open
    keeps the prompt that it had. Each round takes its prompts and random numbers from the run's own, in order, so the run
    goes on from a checkpoint bit for bit. A reward that fails on new responses ends nothing: it costs their prompt its place.

    Raises RewardError if too many of the first responses have no score.
    """
    config, first = learner.config, draw(learner, prompts)
    if not config.dynamic_sampling_rounds:
        return first
    rewards = _lenient(learner.rewards)
    drawn, tied = [first], _tied(learner, first)
    place = [(0, group) for group in range(len(tied))]
    places = open_places = [group for group, is_tied in enumerate(tied) if is_tied]
    for _ in range(config.dynamic_sampling_rounds):
        if not open_places:
            break
        drawn.append(draw(learner, learner.prompts.take(len(open_places)), rewards))
        found = [(len(drawn) - 1, group) for group, is_tied in enumerate(_tied(learner, drawn[-1])) if not is_tied]
        for at, new in zip(open_places, found, strict=False):
            place[at] = new
        open_places = open_places[len(found) :]
    metrics = first.metrics | {
        "rollout/refilled_frac": (len(places) - len(open_places)) / len(place),
        "rollout/unfilled_frac": len(open_places) / len(place),
        "rollout/sampled_responses": float(sum(len(part.completions) for part in drawn)),
    }
    whole = _chosen(drawn, place, learner) if any(part for part, _ in place) else first
    return replace(
        whole,
        given=replace(
            whole.given,
            means=_means(drawn),
            measured=merge_measured([part.given.measured for part in drawn]),
            note=_notes(drawn),
        ),
        seconds=sum(part.seconds for part in drawn),
        sampled_tokens=sum(part.sampled_tokens for part in drawn),
        metrics=metrics,
    )


def _tied(learner: Learner[RolloutConfig], drawn: SampledBatch) -> list[bool]:
    """Which groups teach nothing: their shaped scores are all equal, or a response has none.

    A running norm is taken as it was before this step.
    """
    config, rollouts = learner.config, drawn.rollouts
    scores = torch.tensor(drawn.given.totals, device=rollouts.lengths.device)
    shaped = shape(scores, rollouts, learner.score_norm.current, config)
    tied: list[bool] = core.tied_groups(shaped, group_size=config.samples_per_prompt).tolist()
    for row in drawn.given.failed:
        tied[row // config.samples_per_prompt] = True
    return tied


def _chosen(
    drawn: Sequence[SampledBatch], place: Sequence[tuple[int, int]], learner: Learner[RolloutConfig]
) -> SampledBatch:
    """One batch of groups, each from the round and group that ``place`` names."""
    firsts, size = [0], learner.config.samples_per_prompt
    for part in drawn:
        firsts.append(firsts[-1] + len(part.completions))
    rows = [firsts[part] + group * size + i for part, group in place for i in range(size)]
    rollouts = joined([part.rollouts for part in drawn], rows, pad_id=learner.sampler.renderer.pad_id)
    completions = list(chain.from_iterable(part.completions for part in drawn))
    totals = list(chain.from_iterable(part.given.totals for part in drawn))
    tokens = None
    if any(part.given.tokens is not None for part in drawn):
        each = chain.from_iterable(
            part.given.tokens or [[0.0] * len(c.ids) for c in part.completions] for part in drawn
        )
        everything = [list(numbers) for numbers in each]
        tokens = [everything[row] for row in rows]
    names = dict.fromkeys(name for part in drawn for name in part.given.parts)
    parts = {
        name: list(chain.from_iterable(p.given.parts.get(name, [None] * len(p.completions)) for p in drawn))
        for name in names
    }
    failed = {first + row for first, part in zip(firsts, drawn, strict=False) for row in part.given.failed}
    unread = {first + row for first, part in zip(firsts, drawn, strict=False) for row in part.given.unread}
    given = Scores(
        totals=[totals[row] for row in rows],
        tokens=tokens,
        means={},
        failed=tuple(at for at, row in enumerate(rows) if row in failed),
        unread=tuple(at for at, row in enumerate(rows) if row in unread),
        parts={name: [column[row] for row in rows] for name, column in parts.items()},
    )
    return SampledBatch(rollouts, [completions[row] for row in rows], given, seconds=0.0, sampled_tokens=0)


def _means(drawn: Sequence[SampledBatch]) -> dict[str, float]:
    """Mean of each reward over the responses of all rounds to which it applies."""
    found: dict[str, list[float]] = {}
    for part in drawn:
        scored = part.given.scored
        for name, column in part.given.parts.items():
            found.setdefault(name, []).extend(score for row in scored if (score := column[row]) is not None)
    return {name: sum(scores) / len(scores) for name, scores in found.items() if scores}


def _notes(drawn: Sequence[SampledBatch]) -> str | None:
    """What went wrong in any round, if it was not reported before."""
    said = [(number, part.given.note) for number, part in enumerate(drawn) if part.given.note]
    return "; ".join(f"in place of ties: {note}" if number else note for number, note in said) or None


def _lenient(rewards: Sequence[Reward]) -> Sequence[Reward]:
    """The rewards, any number of whose failures in a small round may pass, if any may at all."""
    if isinstance(rewards, Ensemble) and rewards.max_failed:
        return replace(rewards, max_failed=1.0)
    return rewards
