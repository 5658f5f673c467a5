"""The end of a round: how the new policy compares with the one before and with the first."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from heedful.configs.evaluate import KLConfig, WinRateConfig
from heedful.configs.rounds import RoundConfig
from heedful.evaluate.policies import evaluate_kl, evaluate_win_rate
from heedful.rounds.asking import SHARED
from heedful.rounds.notes import Note

COMPARED = ("win_rate", "interval_95", "ties", "score_mean", "baseline_score_mean", "prompts")
EQUAL = 0.5
Verdict = Literal["better", "worse", "not distinguishable"]
SHOWN = 10
"""Prompts whose answers are kept."""


def evaluate(config: RoundConfig, before: str, policy: str, models: Sequence[str]) -> Note:
    """Compare a round's policy with others on held-out prompts. Returns what notes.py says.

    Args:
        config: the round's settings.
        before: the policy of the round before.
        policy: the round's.
        models: its reward models.
    """
    learned = [f"model:{model}" for model in models]
    over_previous, samples = _win_rate(config, policy, before, learned)
    judged: dict[str, Note | None] = {"judge_over_previous": None, "judge_over_first": None}
    if config.judge:
        judged["judge_over_previous"], by_judge = _win_rate(config, policy, before, config.judge)
        samples = [_with_judge(*pair) for pair in zip(samples, by_judge, strict=True)]
        judged["judge_over_first"] = (
            judged["judge_over_previous"]
            if before == config.policy
            else _win_rate(config, policy, config.policy, config.judge)[0]
        )
    kl = evaluate_kl(KLConfig(model=policy, reference=config.policy, **_settings(config)))
    return {"over_previous": over_previous, **judged, "kl": kl["kl"], "samples": samples}


def _win_rate(
    config: RoundConfig, policy: str, baseline: str, rewards: Sequence[str]
) -> tuple[Note, list[dict[str, Any]]]:
    """A policy against another under rewards: the numbers, and the first answers of both."""
    result = evaluate_win_rate(win_rate_config(config, policy, baseline, rewards))
    samples = [
        {
            "prompt": row["prompt"],
            "response": row["response"],
            "score": row["score"],
            "previous": row["baseline"],
            "previous_score": row["baseline score"],
        }
        for row in result["samples"]
    ]
    numbers = {name: result[name] for name in COMPARED}
    return numbers | {"verdict": verdict(numbers["interval_95"])}, samples


def win_rate_config(config: RoundConfig, policy: str, baseline: str, rewards: Sequence[str]) -> WinRateConfig:
    """The settings with which a round compares two policies."""
    return WinRateConfig(
        model=policy,
        baseline=baseline,
        rewards=tuple(rewards),
        reward_combine="mean" if len(rewards) > 1 else "sum",
        **_settings(config),
    )


def verdict(interval: Sequence[float] | None) -> Verdict:
    """What the 95 % interval of a win rate says; one half is what two equal policies have.

    None (too few prompts for an interval) says nothing, as does one with one half in it or at its end.
    """
    if interval is None or not all(map(math.isfinite, interval)) or interval[0] <= EQUAL <= interval[1]:
        return "not distinguishable"
    return "better" if interval[0] > EQUAL else "worse"


def _with_judge(row: dict[str, Any], judged: dict[str, Any]) -> dict[str, Any]:
    """The same answers with the judge's scores: one seed gives the same answers each time."""
    assert (row["prompt"], row["response"]) == (judged["prompt"], judged["response"])
    return row | {"judge": judged["score"], "previous_judge": judged["previous_score"]}


def _settings(config: RoundConfig) -> dict[str, Any]:
    shared = {name: getattr(config, name) for name in SHARED}
    return {
        **shared,
        "data": config.prompts,
        "eval_fraction": config.eval_fraction,
        "num_samples": SHOWN,
        "seed": config.seed,
    }
