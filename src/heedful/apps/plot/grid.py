"""Advantages of one response for several gammas and lambdas, side by side."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from heedful import core
from heedful.apps.plot.style import Picture, as_text, current_theme, floats, format_number, picture, save
from heedful.display import counted
from heedful.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def advantages(
    rewards: "Tensor | Sequence[float]",
    values: "Tensor | Sequence[float]",
    *,
    gammas: Sequence[float] = (1.0,),
    lambdas: Sequence[float] = (0.0, 0.5, 0.9, 0.95, 1.0),
    path: str | Path | None = None,
) -> Picture:
    """Draw ``A_t`` over t of one response (`core.gae`): a row of panels per gamma, a column per lambda, one scale for all.

    Args:
        rewards: ``[time]``, ``r_t``.
        values: ``[time]``, ``V_t``, of the text before each token.
        gammas: discount factors.
        lambdas: values of ``gae_lambda``: 0 trusts the critic after one token, 1 uses only rewards.
        path: where to save the picture.

    A value that is not finite is written as nan or inf in place of its bar.

    Raises ConfigError if there are no rewards, gammas or lambdas, or if the numbers of values and rewards differ.
    """
    r, v = floats(rewards, "plot.advantages: rewards"), floats(values, "plot.advantages: values")
    if len(r) != len(v):
        raise ConfigError(
            f"plot.advantages: {counted(len(r), 'reward')} and {counted(len(v), 'value')}; give one value per reward"
        )
    for name, given in (("gammas", gammas), ("lambdas", lambdas)):
        if not len(given):
            raise ConfigError(f"plot.advantages: {name} is empty; give at least one number")
    rows, columns = len(gammas), len(lambdas)
    figure, theme = picture(max(4.0, 2.0 * columns), 0.6 + 1.9 * rows, layout="constrained"), current_theme()
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    mask = torch.ones(1, len(r), dtype=torch.bool)
    for row, gamma in enumerate(gammas):
        for column, gae_lambda in enumerate(lambdas):
            axes = grid[row, column]
            found, _ = core.gae(torch.tensor([r]), torch.tensor([v]), mask, gamma=gamma, gae_lambda=gae_lambda)
            bars = found[0].tolist()
            colours = [theme.positive if a > 0 else theme.negative for a in bars]
            axes.bar(range(len(bars)), [a if math.isfinite(a) else 0.0 for a in bars], color=colours)
            for t, a in enumerate(bars):
                if not math.isfinite(a):
                    axes.text(t, 0, format_number(a), size=8, ha="center", va="bottom")
            axes.axhline(0, color=theme.muted, linewidth=0.8)
            axes.set_title(f"γ = {gamma:g}, λ = {gae_lambda:g}", size=10)
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("token t", size=10)
    figure.supylabel("advantage A", size=10)
    as_text(text for axes in figure.axes for text in axes.texts)
    save(figure, path)
    return figure
