"""Checks of a reward on responses that the policy, as it starts, has just written."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from heedful.checks.findings import Finding, ending, finding
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.agreement import correlation
from heedful.data.chat import Renderer
from heedful.rewards import Ensemble, Reward
from heedful.rewards.environment import environment_reward
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.models import ModelReward
from heedful.rewards.results import OneScore, Problem, Remote
from heedful.rewards.scoring import call_rewards, combine_scores, sample
from heedful.training.thresholds import (
    FEWEST,
    LENGTH_ALONE,
    RANDOM,
    SCALE,
    SLOW_SECONDS,
    SLOW_SHARE,
    SPACE_SIZE,
    STILL,
    TIED,
)
from heedful.types import Completion, Episode, Message


@dataclass(frozen=True)
class RewardScores:
    """What one reward gave to the sampled responses."""

    reward: Reward
    scores: list[OneScore | Problem]
    seconds: float

    @property
    def totals(self) -> list[tuple[float, int]]:
        """The scores that are numbers, dense ones summed, each with its row."""
        return [
            (float(sum(one)) if isinstance(one, list) else float(one), row)
            for row, one in enumerate(self.scores)
            if one is not None and not isinstance(one, Problem)
        ]


def score_each(rewards: Sequence[Reward], completions: Sequence[Completion]) -> list[RewardScores]:
    """Call each reward by itself and take its time. Raises RewardError if one cannot be called at all."""
    found = []
    for reward in rewards:
        started = time.perf_counter()
        ((scores, _),) = call_rewards([(reward.name, reward.function)], completions)
        found.append(RewardScores(reward, scores, time.perf_counter() - started))
    return found


def fails(scored: RewardScores, completions: Sequence[Completion], max_failed: float) -> Finding | None:
    """On how many responses does a reward fail?"""
    failed = [row for row, one in enumerate(scored.scores) if isinstance(one, Problem)]
    if not failed:
        return None
    share = len(failed) / len(scored.scores)
    return finding(
        "reward-fails",
        "fail" if share > max_failed else "warn",
        f"{scored.reward.name} fails on {len(failed)} of {len(scored.scores)} responses; {max_failed:.0%} may fail",
        f"it {scored.scores[failed[0]]}; for {sample(completions[failed[0]])}",
    )


def constant(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Do all responses have the same score? An untrained reward head gives equal scores."""
    totals = [total for total, _ in scored.totals]
    different = {(completions[row].prompt.source, completions[row].response) for _, row in scored.totals}
    if len(different) < FEWEST or len(set(totals)) > 1:
        return None
    return finding(
        "reward-constant",
        "fail" if isinstance(scored.reward.function, ModelReward) else "warn",
        f"{scored.reward.name} gives all {len(totals)} sampled responses the score {totals[0]:g}",
        "a task that this policy never solves looks the same"
        if not isinstance(scored.reward.function, ModelReward)
        else "a reward model reads each response, so its scores differ at least by rounding",
    )


def totals_of(rewards: Sequence[Reward], scored: Sequence[RewardScores]) -> list[float | None]:
    """The combined score of each response, as training sees it; None where a reward fails or none applies."""
    combination = rewards.combine if isinstance(rewards, Ensemble) else "sum"
    by_reward = [{row: total for total, row in one.totals} for one in scored]
    totals: list[float | None] = []
    for row in range(len(scored[0].scores)):
        is_failed = any(isinstance(one.scores[row], Problem) for one in scored)
        weighted = [one.reward.weight * of[row] for one, of in zip(scored, by_reward, strict=True) if row in of]
        totals.append(None if is_failed or not weighted else combine_scores(weighted, combination))
    return totals


def cancelled(scored: Sequence[RewardScores], totals: Sequence[float | None]) -> Finding | None:
    """Do the weights make the same score of all responses, though a reward tells them apart?"""
    differing = [one for one in scored if len({total for total, _ in one.totals}) > 1]
    numbers = [total for total in totals if total is not None]
    size = max((abs(one.reward.weight * total) for one in differing for total, _ in one.totals), default=0.0)
    if len(numbers) < FEWEST or not differing or max(numbers) - min(numbers) > 1e-9 * size:
        return None
    weights = ", ".join(f"{one.reward.name} x {one.reward.weight:g}" for one in scored)
    return finding(
        "reward-constant",
        "fail",
        f"with these weights all {len(numbers)} sampled responses score {numbers[0]:g}, though {differing[0].reward.name} "
        "tells them apart",
        weights,
        fix="correct --reward-weights",
    )


def ties(totals: Sequence[float | None], completions: Sequence[Completion]) -> Finding | None:
    """Do the responses to each prompt score equally, though prompts differ?"""
    groups: dict[str, list[tuple[float, str]]] = {}
    for total, one in zip(totals, completions, strict=True):
        if total is not None:
            groups.setdefault(one.prompt.source, []).append((total, one.response))
    several = [group for group in groups.values() if len({text for _, text in group}) > 1]
    tied = [group for group in several if len({total for total, _ in group}) == 1]
    if len(several) < 2 or len(tied) <= TIED * len(several) or len({group[0][0] for group in several}) == 1:
        return None
    return finding(
        "reward-ties",
        "warn",
        f"all responses to {len(tied)} of {len(several)} prompts score equally",
        "scores of the first prompts: " + ", ".join(f"{group[0][0]:.3g}" for group in several[:4]),
    )


def _asked_again(reward: Reward) -> bool:
    """Whether a reward may be called once more. A server or judge is not: that may cost money; nor what an environment gave
    while the policy acted."""
    if reward.function is environment_reward:
        return False
    return not isinstance(reward.function, Remote) or isinstance(reward.function, FunctionProcess)


def _score_again(scored: RewardScores, completions: Sequence[Completion]) -> dict[int, float]:
    """The scores by row of the same reward for other completions, one for each."""
    return {row: total for total, row in score_each([scored.reward], completions)[0].totals}


def random_scores(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Do the same responses score the same when they are scored again?

    In another order: what a function draws begins with the same seed at each call. Then those to half of the prompts alone: a
    score must not depend on the others of its batch. That of a reward model does not, but for rounding.
    """
    if not _asked_again(scored.reward) or len(scored.totals) < FEWEST:
        return None
    before = {row: total for total, row in scored.totals}
    spread = statistics.pstdev(before.values())
    sources = list(dict.fromkeys(one.prompt.source for one in completions))
    half = [] if isinstance(scored.reward.function, ModelReward) else sources[: len(sources) // 2]
    for some, how in ((sources, "in another order"), (half, "without the others of their batch")):
        rows = [row for row, one in enumerate(completions) if one.prompt.source in some][::-1]
        again = _score_again(scored, [completions[row] for row in rows]) if rows else {}
        moves = {i: abs(total - before[rows[i]]) for i, total in again.items() if rows[i] in before}
        mean = statistics.fmean(moves.values()) if moves else 0.0
        if mean > 1e-3 * spread:
            most = max(moves, key=moves.__getitem__)
            return finding(
                "reward-random",
                "fail" if some is sources and mean > RANDOM * spread else "warn",
                f"{scored.reward.name} moves by {mean:.2g} when the same responses are scored again {how}, and scores of "
                f"different responses spread by {spread:.2g}",
                f"{before[rows[most]]:.3g}, then {again[most]:.3g} for {completions[rows[most]].response[:60]!r}",
            )
    return None


def ignores_responses(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Does a score stay the same when the response is that to another prompt?"""
    if not _asked_again(scored.reward) or len(scored.totals) < FEWEST:
        return None
    before = {row: total for total, row in scored.totals}
    shift = next(
        (at for at in range(1, len(completions)) if completions[at].prompt.source != completions[0].prompt.source), 0
    )
    others = [*completions[shift:], *completions[:shift]]
    exchanged = [
        replace(one, response=other.response, ids=other.ids, truncated=other.truncated, episode=other.episode)
        for one, other in zip(completions, others, strict=True)
    ]
    differing = [row for row in before if exchanged[row].response != completions[row].response]
    if not shift or len(set(before.values())) == 1 or len(differing) < FEWEST:
        return None
    after = _score_again(scored, exchanged)
    if any(after.get(row) != before[row] for row in differing):
        return None
    row = differing[0]
    return finding(
        "reward-ignores-responses",
        "fail",
        f"{scored.reward.name} scores each of {len(differing)} responses as it scores another prompt's response in its place",
        f"{before[row]:.3g} for {completions[row].prompt.source}, whatever the response",
    )


def empty_response(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Does a reward fail on empty responses, which a policy may write, or score them as high as the best of others?"""
    if not _asked_again(scored.reward):
        return None
    empty = [
        replace(one, response="", ids=(), truncated=False, episode=_with_turns(one, Message("assistant", "")))
        for one in completions[:FEWEST]
    ]
    again = score_each([scored.reward], empty)[0]
    failed = next((row for row, one in enumerate(again.scores) if isinstance(one, Problem)), None)
    if failed is not None:
        return finding(
            "reward-fails",
            "warn",
            f"{scored.reward.name} fails on an empty response",
            f"it {again.scores[failed]}; for {sample(empty[failed])}",
        )
    written = [(total, row) for total, row in scored.totals if completions[row].response.strip()]
    if len(written) < FEWEST or not again.totals:
        return None
    (best, row), (worst, _), (of_empty, _) = max(written), min(written), min(again.totals)
    if of_empty < best or of_empty == worst:  # all scores are the same
        return None
    return finding(
        "reward-empty",
        "warn",
        f"{scored.reward.name} scores an empty response at least as high as the best of {len(written)} sampled ones",
        f"{of_empty:.3g} for '', {best:.3g} for {completions[row].response[:60]!r}",
    )


def outweighed(totals: Sequence[float | None], config: RolloutConfig, norm_std: float) -> Finding | None:
    """Is the KL penalty worth more than any score?

    With scores that are normal with standard deviation s, the best policy at the price beta is s^2 / (2 beta^2) nats per
    response from the reference.
    """
    numbers = [total for total in totals if total is not None]
    if (
        not isinstance(config, OnlineConfig)
        or not config.kl_coef
        or config.kl_target is not None
        or len(numbers) < FEWEST
    ):
        return None
    is_scaled = config.kl_in == "loss" and (config.advantage == "grpo" or config.whiten_advantages)
    spread = 1.0 if is_scaled else statistics.pstdev(numbers) / norm_std
    best = spread**2 / (2 * config.kl_coef**2)
    if best >= STILL or spread == 0:
        return None
    return finding(
        "price-too-high",
        "warn",
        f"--kl-coef {config.kl_coef:g} is so high, for scores that spread by {spread:.2g}, that the best policy is "
        f"{best:.1g} nats per response from the reference",
        f"below {STILL:g} nats a policy has hardly moved",
        fix="lower --kl-coef",
    )


def scale(totals: Sequence[float | None], config: RolloutConfig, norm_std: float) -> Finding | None:
    """Are scores so large that a new value head, which starts at 0, does not get there?"""
    numbers = [total for total in totals if total is not None]
    has_new_head = (
        isinstance(config, OnlineConfig)
        and config.estimator.critic
        and config.critic != "reward"
        and config.value_model is None
    )
    if not has_new_head or config.score_norm_samples or len(numbers) < FEWEST:
        return None
    mean, spread = statistics.fmean(numbers) / norm_std, statistics.pstdev(numbers) / norm_std
    if max(abs(mean), spread) <= SCALE:
        return None
    return finding(
        "reward-scale",
        "warn",
        f"scores are {mean:.3g} on average and spread by {spread:.2g}, and the critic starts at 0",
        f"above {SCALE:g} a value head does not get there at its learning rate",
    )


def length_alone(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Does the score depend on length alone, in tokens or in characters? That of an environment may: it often costs a little
    per turn."""
    totals = [total for total, _ in scored.totals]
    if len(totals) < FEWEST or scored.reward.function is environment_reward:
        return None
    lengths = {
        "tokens": [len(completions[row].ids) for _, row in scored.totals],
        "characters": [len(completions[row].response) for _, row in scored.totals],
    }
    by_unit = {unit: rank_correlation(totals, of_unit) or 0.0 for unit, of_unit in lengths.items()}
    unit, value = max(by_unit.items(), key=lambda item: abs(item[1]))
    if abs(value) < LENGTH_ALONE:
        return None
    best, worst = totals.index(max(totals)), totals.index(min(totals))
    return finding(
        "reward-length",
        "warn",
        f"{scored.reward.name} orders responses by their length: rank correlation {value:+.2f} with their {unit}",
        f"best of {len(totals)} ({totals[best]:.3g}) has {lengths[unit][best]} {unit}, worst ({totals[worst]:.3g}) "
        f"{lengths[unit][worst]}",
    )


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rho: Pearson's correlation of ranks, equal values sharing their mean rank; None if all are equal."""
    return correlation(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def white_space(scored: RewardScores, completions: Sequence[Completion], renderer: Renderer) -> Finding | None:
    """How far do scores move with a space before a response and a line break behind it?"""
    if not _asked_again(scored.reward) or len(scored.totals) < FEWEST:
        return None
    before = {row: total for total, row in scored.totals}
    after = _score_again(scored, [_spaced(completion, renderer) for completion in completions])
    moves = {row: abs(after[row] - before[row]) for row in before.keys() & after.keys()}
    spread = statistics.pstdev(before.values())
    if not moves or spread == 0 or statistics.fmean(moves.values()) <= SPACE_SIZE * spread:
        return None
    row = max(moves, key=moves.__getitem__)
    return finding(
        "reward-white-space",
        "warn",
        f"{scored.reward.name} moves by {statistics.fmean(moves.values()):.2g} when only white space changes, and scores of "
        f"different responses spread by {spread:.2g}",
        f"{before[row]:.3g} for {completions[row].response[:60]!r}, {after[row]:.3g} with a space before and a line break "
        "behind it",
    )


def _spaced(completion: Completion, renderer: Renderer) -> Completion:
    ids = [*renderer.encoder.within(" "), *completion.ids, *renderer.encoder.within("\n")]
    turns = () if completion.episode is None else completion.episode.turns
    *before, last = turns or [Message("assistant", "")]
    episode = _with_turns(completion, *before, replace(last, content=f" {last.content}\n"))
    return replace(completion, response=f" {completion.response}\n", ids=ids, episode=episode)


def _with_turns(completion: Completion, *turns: Message) -> Episode | None:
    """A completion's episode with these turns in the place of its own, if it has one."""
    return None if completion.episode is None else replace(completion.episode, turns=turns)


@torch.no_grad()
def reads_early(scored: RewardScores, completions: Sequence[Completion]) -> Finding | None:
    """Does the last token of a finished response change nothing in a reward model's score? Encoders read no end, and a score
    that is always the same is another fault."""
    reward = scored.reward.function
    finished = [completion for completion in completions if not completion.truncated][:FEWEST]
    if not isinstance(reward, ModelReward) or reward.model.reads is None or not finished:
        return None
    rows = [
        reward.inputs.encode(
            completion.prompt.prompt,
            completion.response if completion.episode is None else completion.episode.turns,
            max_length=reward.model.max_length,
        )
        for completion in finished
    ]
    shorter = [{"input_ids": row["input_ids"][:-1]} for row in rows]
    scores, without = reward.model(rows), reward.model(shorter)
    if not torch.allclose(scores, without, rtol=1e-5, atol=1e-6) or len(set(scores.tolist())) == 1:
        return None
    ids = rows[0]["input_ids"]
    return finding(
        "score-position",
        "warn",
        f"{scored.reward.name} gives the same score without the last token of each of {len(rows)} responses",
        f"the texts end with {ending(reward.inputs.tokenizer, ids)}; {float(scores[0]):.4g} and {float(without[0]):.4g}",
    )


def slow(scored: RewardScores, *, responses: int, step_seconds: float) -> Finding | None:
    """Does a reward take most of a step of so many responses?"""
    seconds = scored.seconds * responses / max(1, len(scored.scores))
    if seconds < SLOW_SECONDS or seconds < SLOW_SHARE * step_seconds or not math.isfinite(seconds):
        return None
    return finding(
        "reward-slow",
        "warn",
        f"{scored.reward.name} takes {seconds:.1f} s of a step of {step_seconds:.1f} s",
        f"{scored.seconds:.2f} s for {len(scored.scores)} responses, and a step has {responses}",
    )
