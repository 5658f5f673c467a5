"""What a critic knows, as charts and in numbers: drawn as SVG on the page of a report, and by `heedful.plot.critic`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful import core
from heedful.apps.plot.charts import Chart, Line

LAMBDAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""At which the variance of the advantage is drawn."""
WORST = -1.0
"""A variance explained below is drawn there: it is a share of what may be next to nothing in a bin."""
CRITIC, PROMPT, GROUP = "critic", "value of the prompt alone", "mean of the prompt's other responses"
KINDS = {CRITIC: "held-out", PROMPT: "yardstick", GROUP: "group"}
"""Of their lines."""


@dataclass(frozen=True)
class Judged:
    """A critic's values beside the rewards that came, ``[batch, time]``."""

    values: Float[Tensor, "batch time"]
    rewards: Float[Tensor, "batch time"]
    actions: Bool[Tensor, "batch time"]
    """True where an action begins: at response tokens, or only at the first of each response."""
    lengths: Int[Tensor, " batch"]
    """Tokens of each response."""
    gamma: float = 1.0
    gae_lambda: float | Float[Tensor, " batch"] = 0.95
    """Of the policy's advantages."""
    group_size: int = 1
    """Consecutive rows to one prompt."""

    @cached_property
    def returns(self) -> Float[Tensor, "batch time"]:
        """Monte Carlo returns."""
        return core.rewards_to_go(self.rewards, self.actions, gamma=self.gamma)

    @cached_property
    def predicted(self) -> dict[str, Float[Tensor, "batch time"]]:
        """What predicts the returns: the critic; its value of the prompt at every action; what a group baseline says."""
        found = {CRITIC: self.values, PROMPT: core.first_values(self.values, self.actions)}
        if self.group_size > 1:
            whole = torch.where(core.first_in_mask(self.actions), self.returns, 0.0).sum(dim=1)
            others = core.others_mean(whole, group_size=self.group_size)
            found[GROUP] = others.unsqueeze(1).expand_as(self.returns)
        return found

    @property
    def places(self) -> Int[Tensor, "batch time"]:
        """The number of each action in its response, from 1."""
        return self.actions.cumsum(dim=1)

    def left(self, gae_lambda: float | Tensor) -> float:
        """The variance of the advantage at a lambda, as a share of that without a critic."""
        advantages, _ = core.gae(self.rewards, self.values, self.actions, gamma=self.gamma, gae_lambda=gae_lambda)
        return 1 - float(core.explained_variance(self.returns - advantages, self.returns, self.actions))


class Prediction(NamedTuple):
    """How well something predicts the returns; None where a number means nothing."""

    name: str
    explained: float | None
    """Share of the returns' variance."""
    first: float | None
    """The same at the first action of each response."""
    bias: float | None
    """Mean of return minus prediction."""
    left: float
    """Variance of the advantage, as a share of that without a critic."""


def numbers(judged: Judged) -> Iterator[Prediction]:
    """All actions in a few numbers: of the critic, at lambda 1 and at the run's, and of what it is to be compared with."""
    returns, actions = judged.returns, judged.actions
    first = core.first_in_mask(actions)
    for name, values in judged.predicted.items():
        explained = float(core.explained_variance(values, returns, actions))
        at_first = float(core.explained_variance(values, returns, first))
        bias = float(core.masked_mean(returns - values, actions))
        label = f"{name}, lambda 1" if name == CRITIC else name
        yield Prediction(label, explained, at_first, bias, 1 - explained)
        if name == CRITIC:
            own = f"{name}, {lambda_named(judged.gae_lambda)}"
            yield Prediction(own, None, None, None, judged.left(judged.gae_lambda))


def critic_charts(judged: Judged, run: int = 0) -> list[Chart]:
    """Calibration; variance explained and bias, by place and by length; variance of the advantage over lambda.

    A chart that would be one bin or one action is left out. ``run`` is the number of the critic's colour.
    """
    by_place = _in_bins(judged, run, judged.places, "place", "token of the response")
    by_length = _in_bins(
        judged, run, judged.lengths.unsqueeze(1).expand_as(judged.values), "length", "tokens of the response"
    )
    return [_calibration(judged, run), *by_place, *_over_lambda(judged, run), *by_length]


def _calibration(judged: Judged, run: int) -> Chart:
    found = core.calibration(judged.values, judged.returns, judged.actions)
    value, upper, lower = (x.tolist() for x in (found.value, found.returned + found.std, found.returned - found.std))
    edge = [*zip(value, upper, strict=True), *reversed([*zip(value, lower, strict=True)])]
    lines = [
        Line(edge, run, "spread"),
        Line([(value[0], value[0]), (value[-1], value[-1])], kind="guide"),
        Line(_points(found.value, found.returned), run, "held-out", name="mean return"),
    ]
    return Chart("calibration", "value", "return that came", lines)


def _in_bins(judged: Judged, run: int, by: Tensor, word: str, horizontal: str) -> list[Chart]:
    found = {
        name: core.explained_in_bins(values, judged.returns, judged.actions, by)
        for name, values in judged.predicted.items()
    }
    low, high = (float(found[CRITIC].by[place]) for place in (0, -1))
    if low == high:
        return []
    charts = []
    for title, vertical, number, least in (
        ("variance explained", "share of variance", "explained", WORST),
        ("bias", "mean of return minus value", "bias", -math.inf),
    ):
        lines = [
            Line(_points(one.by, getattr(one, number).clamp(min=least)), run, KINDS[name], name=name)
            for name, one in found.items()
        ]
        zero = Line([(low, 0.0), (high, 0.0)], kind="guide")
        charts.append(Chart(f"{title}, by {word}", horizontal, vertical, [zero, *lines]))
    return charts


def _over_lambda(judged: Judged, run: int) -> list[Chart]:
    shares = torch.tensor([judged.left(one) for one in LAMBDAS])
    if int(judged.actions.sum(dim=1).max()) == 1 or shares.isnan().any():
        return []
    lines = [
        Line([(0.0, 1.0), (1.0, 1.0)], kind="guide", labels=["without a critic", ""]),
        Line(_points(torch.tensor(LAMBDAS), shares), run, "held-out", name=CRITIC),
    ]
    if judged.group_size > 1:
        of_group = 1 - float(core.explained_variance(judged.predicted[GROUP], judged.returns, judged.actions))
        lines.append(Line([(0.0, of_group), (1.0, of_group)], run, "group", name=GROUP))
    used = judged.gae_lambda
    marks = {float(used.mean() if isinstance(used, Tensor) else used): lambda_named(used)}
    vertical = "share of that without a critic"
    return [Chart("variance of the advantage", "lambda", vertical, lines, None, marks)]


def _points(xs: Tensor, ys: Tensor) -> list[tuple[float, float]]:
    """Without those that are not a number: of returns that do not vary, nothing is explained."""
    return [(x, y) for x, y in zip(xs.tolist(), ys.tolist(), strict=True) if not math.isnan(y)]


def lambda_named(gae_lambda: float | Tensor) -> str:
    """The lambda of a run in words."""
    if isinstance(gae_lambda, Tensor):
        return f"lambda {float(gae_lambda.mean()):.2f} on average"
    return f"lambda {gae_lambda:g}"
