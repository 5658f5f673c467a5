"""What the runs of both methods say: numbers with intervals, and a recommendation or why there is none."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heedful import core
from heedful.apps.choose.runs import NAMES, Found, Method, mean, spent
from heedful.configs.choose import ChooseConfig
from heedful.training.output_folder import logged

EXPLAINED = ("value/explained_variance", "value/explained_variance_first", "value/explained_variance_prompt")
TIED = "reward/tied_frac"
MANY_TIED = 0.25
"""Share of tied groups from which on they are a reason against GRPO."""
FEW_EXPLAINED = 0.1
"""Explained variance below which the critic is a reason against PPO."""
MUCH_FURTHER = 1.5
"""Times the other method's KL from which on a part of the lead may be that."""
MOST = 100
"""Times the runs or prompts so far: more is not worth naming."""
Table = Sequence[Sequence[float]]
"""A row for each seed, a column for each held-out prompt."""


class Change(NamedTuple):
    """A mean over seeds and held-out prompts, and its 95 % interval (`core.crossed_interval`)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, rows: Table) -> "Change":
        return cls(math.fsum(map(math.fsum, rows)) / sum(map(len, rows)), *core.crossed_interval(rows))

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ({self.low:+.3g} to {self.high:+.3g})"


def compare(
    config: ChooseConfig,
    start: Found,
    folders: Mapping[Method, Sequence[Path]],
    found: Mapping[Method, Sequence[Found]],
) -> Found:
    """The numbers of both methods, their difference, and the recommendation.

    Args:
        config: the settings.
        start: what was measured of the model that all runs started from.
        folders: the runs of each method, in the order of the seeds.
        found: what was measured of each.
    """
    everything = [start, *(one for method in NAMES for one in found[method])]
    first, *others = _by_prompt(everything)
    half = len(others) // 2
    tables = {"ppo": others[:half], "grpo": others[half:]}
    gains = {method: [[b - a for a, b in zip(first, row, strict=True)] for row in tables[method]] for method in NAMES}
    changes = {method: Change.of(gains[method]) for method in NAMES}
    apart = [[p - g for p, g in zip(*rows, strict=True)] for rows in zip(gains["ppo"], gains["grpo"], strict=True)]
    methods = {}
    for method in NAMES:
        runs = [_of_run(folder) for folder in folders[method]]
        methods[method] = {
            "score": mean([mean(list(row)) or 0.0 for row in tables[method]]),
            "change": changes[method]._asdict(),
            "kl": _mean(one["kl"] for one in found[method]),
            "gradient_noise": _mean(one["noise"] for one in found[method]),
            **{name.rpartition("/")[2]: _mean(run[name] for run in runs) for name in (*EXPLAINED, TIED)},
            "tokens": sum(run["tokens"] for run in runs),
            "seconds": sum(run["seconds"] for run in runs),
        }
        methods[method]["tokens_per_second"] = methods[method]["tokens"] / max(methods[method]["seconds"], 1e-9)
    difference = Change.of(apart)
    numbers = {
        "model": config.model,
        "seeds": config.seeds,
        "held_out_prompts": len(first),
        "start_score": mean(first),
        "methods": methods,
        "difference": difference._asdict(),
    }
    return numbers | recommend(config, gains, apart, methods)


def recommend(
    config: ChooseConfig, gains: Mapping[Method, Table], apart: Table, methods: Mapping[Method, Found]
) -> Found:
    """The method whose held-out score is higher beyond chance, if any is better than the start, and why in a sentence."""
    changes, difference = {method: Change.of(gains[method]) for method in NAMES}, Change.of(apart)
    better: Method = "ppo" if difference.mean > 0 else "grpo"
    other: Method = "grpo" if better == "ppo" else "ppo"
    tokens = methods[better]["tokens"] // config.seeds
    both = f"{NAMES[better]} changed the held-out score by {changes[better]}, {NAMES[other]} by {changes[other]}"
    at = f"after {tokens:,} tokens per run"
    if not any(one.sign > 0 for one in changes.values()):
        remedy = f"raise --learning-rate or --tokens{_longer(changes[better], tokens)}"
        if any(one.sign < 0 for one in changes.values()):
            remedy = "lower --learning-rate, or raise --kl-coef"
        sentence = f"Cannot tell yet: {at} neither is better than the start ({both}); {remedy}, in another --output."
        return {"recommendation": None, "sentence": sentence}
    if difference.sign:
        why = _reason(better, methods) + _dearer(better, methods)
        sentence = f"{NAMES[better]}: {at} {both}; difference {_size(difference)}{why}."
        return {"recommendation": better, "sentence": sentence}
    doubt = f"the difference, {_size(difference)}, may be chance"
    sentence = f"Cannot tell yet: {at} {both}; {doubt}. {_more(apart, config, tokens)}."
    return {"recommendation": None, "sentence": sentence}


def _size(difference: Change) -> str:
    """The difference of the better from the other method."""
    return str(difference if difference.mean > 0 else Change(-difference.mean, -difference.high, -difference.low))


def _reason(better: Method, methods: Mapping[Method, Found]) -> str:
    """What else of the runs speaks for the better method."""
    tied, explained = methods["grpo"]["tied_frac"], methods["ppo"]["explained_variance"]
    here, there = methods[better]["gradient_noise"], methods["grpo" if better == "ppo" else "ppo"]["gradient_noise"]
    if better == "ppo" and tied is not None and tied >= MANY_TIED:
        return f", and {tied:.0%} of GRPO's groups tied, which taught nothing"
    if better == "grpo" and explained is not None and explained < FEW_EXPLAINED:
        return f", and the critic of PPO explained only {max(explained, 0.0):.0%} of the variance of returns"
    if here is not None and there is not None and here < there:
        return f", and its gradient is less noisy ({here:.2f} against {there:.2f})"
    return ""


def _dearer(better: Method, methods: Mapping[Method, Found]) -> str:
    """How much further from the reference the better method went, if it did."""
    here, there = methods[better]["kl"], methods["grpo" if better == "ppo" else "ppo"]["kl"]
    if here is None or there is None or here < MUCH_FURTHER * there:
        return ""
    return f"; part of its lead may be its KL to the reference, {here:.2g} against {there:.2g}"


def _more(rows: Table, config: ChooseConfig, tokens: int) -> str:
    """What would narrow the interval of a table's mean until it excluded 0, if the mean stayed as it is.

    The half-width falls with the root of the number of runs, or of prompts, whichever adds more of it.
    """
    times, prompts = _widths(Change.of(rows)) ** 2, len(rows[0])
    if times > MOST:
        return f"With {MOST} times as many runs or prompts it would still be, so take the one that is easier for you"
    by_seed, by_prompt = core.mean_interval(rows), core.mean_interval(list(zip(*rows, strict=True)))
    assert by_seed is not None
    assert by_prompt is not None
    if by_seed[1] - by_seed[0] < by_prompt[1] - by_prompt[0]:
        return (
            f"If it stays as large, about {math.ceil(times * prompts)} held-out prompts would tell ({prompts} so far)"
        )
    seeds = max(config.seeds + 1, math.ceil(times * config.seeds))
    more = 2 * (seeds - config.seeds) * tokens
    return f"If it stays as large, --seeds {seeds} would tell: about {more:,} more tokens"


def _longer(change: Change, tokens: int) -> str:
    """How many tokens would make a change as large as its interval, if it grew with them."""
    times = _widths(change)
    return (
        f" (about {math.ceil(times) * tokens} if it goes on as it began)" if change.mean > 0 and times <= MOST else ""
    )


def _widths(change: Change) -> float:
    """Half the width of the interval, in units of the mean."""
    return (change.high - change.low) / 2 / abs(change.mean) if change.mean else math.inf


def _by_prompt(everything: Sequence[Found]) -> list[list[float]]:
    """Each model's mean score of each held-out prompt, over the responses that have a score of every model."""
    numbers = everything[0]["held_out"]
    kept = [i for i in range(len(numbers)) if all(one["scores"][i] is not None for one in everything)]
    prompts = list(dict.fromkeys(numbers[i] for i in kept))
    places = [[i for i in kept if numbers[i] == prompt] for prompt in prompts]
    return [[math.fsum(one["scores"][i] for i in place) / len(place) for place in places] for one in everything]


def _of_run(folder: Path) -> dict[str, Any]:
    """Tokens, seconds, and means of metrics: explained variance over a run's second half, when the critic has learned."""
    steps = [line for line in logged(folder) if "time/update" in line]
    tokens, seconds = spent(folder)
    late = steps[len(steps) // 2 :]
    means: dict[str, Any] = {name: mean([line[name] for line in late if name in line]) for name in EXPLAINED}
    return means | {TIED: mean([line[TIED] for line in steps if TIED in line]), "tokens": tokens, "seconds": seconds}


def _mean(values: Any) -> float | None:
    return mean([value for value in values if value is not None])
