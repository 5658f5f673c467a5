"""PPO's clipped objective as a function of the probability ratio, with a batch's tokens on it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.axes import Axes

from heedful import core
from heedful.apps.plot.style import Picture, as_text, current_theme, floats, picture, save
from heedful.display import counted
from heedful.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def clip_region(
    ratios: "Tensor | Sequence[float]",
    advantages: "Tensor | Sequence[float]",
    *,
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    path: str | Path | None = None,
) -> Picture:
    """Draw ``L(r) = min(r A, clip(r, 1 - low, 1 + high) A)`` for A > 0 and for A < 0, with a point for each token.

    ``L`` is in units of ``|A|``, so that all tokens are on one line (Schulman et al. 2017, figure 1). Larger points have a
    larger ``|A|``. Crosses are clipped: their gradient is zero (`core.clipped_ratio`).

    Args:
        ratios: ``r = pi(token) / pi_old(token)`` of any shape, without padding: ``ratios[mask]``.
        advantages: one per ratio, in the same order.
        clip_range: ``low``; a token with a negative advantage has no gradient if its ratio is below ``1 - low``.
        clip_range_high: ``high``; one with a positive advantage has none above ``1 + high``. None is ``clip_range``.
        path: where to save the picture.

    Values that are not finite and advantages of 0 are not drawn; their numbers are written below the picture.

    Raises ConfigError if there are no ratios, if the numbers of ratios and advantages differ, or a range is not above 0.
    """
    r = torch.tensor(floats(ratios, "plot.clip_region: ratios"), dtype=torch.float64)
    a = torch.tensor(floats(advantages, "plot.clip_region: advantages"), dtype=torch.float64)
    if len(r) != len(a):
        raise ConfigError(
            f"plot.clip_region: {counted(len(r), 'ratio')} and {counted(len(a), 'advantage')}; give one advantage per ratio"
        )
    high = clip_range if clip_range_high is None else clip_range_high
    if not 0 < clip_range < 1:
        raise ConfigError(f"plot.clip_region: clip_range must be between 0 and 1; got {clip_range}")
    if high <= 0:
        raise ConfigError(f"plot.clip_region: clip_range_high must be above 0; got {high}")
    bounds = core.Bounds(clip_range, high)
    finite = r.isfinite() & a.isfinite()
    widest = max(1 - clip_range, high, *(r[finite] - 1).abs().tolist()) * 1.1
    notes = [
        f"{int(n)} {what}"
        for n, what in ((sum(~finite), "not finite"), (sum(finite & (a == 0)), "with advantage 0"))
        if n
    ]

    figure, theme = picture(9.0, 3.6, layout="constrained"), current_theme()
    for place, sign in enumerate((1.0, -1.0)):
        axes = figure.add_subplot(1, 2, place + 1)
        own = finite & (a.sign() == sign)
        limits = (max(0.0, 1 - widest), 1 + widest)
        _draw(axes, r[own], a[own], bounds=bounds, limits=limits, sign=sign)
    if notes:
        figure.supxlabel(f"not drawn: {', '.join(notes)}", size=9, color=theme.muted)
    as_text(text for axes in figure.axes for text in (axes.title, *axes.texts))
    save(figure, path)
    return figure


def _objective(r: Any, a: Any, bounds: core.Bounds) -> tuple[Any, Any]:
    """L(r) and the mask of clipped points, ``[points]`` each, computed as in the loss."""
    found = core.clipped_ratio(r.log(), torch.zeros_like(r), a, torch.ones_like(r, dtype=torch.bool), bounds)
    return found.objective, found.clipped


def _draw(axes: Axes, r: Any, a: Any, *, bounds: core.Bounds, limits: tuple[float, float], sign: float) -> None:
    """Draw one sign of the advantage: the line, its flat part, the points on it."""
    theme = current_theme()
    colour = theme.positive if sign > 0 else theme.negative
    line = torch.linspace(limits[0], limits[1], 801, dtype=torch.float64)
    axes.plot(
        line, _objective(line, torch.full_like(line, sign), bounds)[0], color=theme.muted, linewidth=1.5, zorder=1
    )
    edge = 1 + bounds.high if sign > 0 else 1 - bounds.low
    axes.axvspan(*((edge, limits[1]) if sign > 0 else (limits[0], edge)), color=colour, alpha=0.12, linewidth=0)
    axes.axvline(1, color=theme.muted, linewidth=0.8, linestyle=":")
    level, clipped = _objective(r, torch.full_like(r, sign), bounds)
    sizes = 12 + 50 * a.abs() / a.abs().max() if len(a) else a
    for where, marker, label in ((~clipped, "o", "counts"), (clipped, "x", "clipped")):
        share = f"{label}: {int(where.sum())} of {len(r)}"
        axes.scatter(
            r[where],
            level[where],
            sizes[where],
            marker=marker,
            color=colour,
            alpha=0.5,
            linewidths=0 if marker == "o" else 1.5,
            label=share,
            zorder=2,
        )
    axes.set(xlim=limits, xlabel="ratio r", ylabel="L(r) / |A|")
    axes.set_title(f"A {'>' if sign > 0 else '<'} 0, clipped {'above' if sign > 0 else 'below'} {edge:g}", size=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right" if sign > 0 else "upper right", fontsize=9)
