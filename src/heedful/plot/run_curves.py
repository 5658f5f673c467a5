"""Learning curves of runs in one picture: one panel per quantity, one colour per run; runs of one algorithm share panels."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from heedful.configs.trainers import Panel
from heedful.errors import ConfigError
from heedful.plot.healthy import HEALTHY, Band
from heedful.plot.panels import OFFLINE, panels_of_metrics
from heedful.plot.run_metrics import Run, RunCurves, runs_of
from heedful.plot.style import Picture, Theme, as_text, check_path, current_theme, drawable, picture, save

MAX_COLUMNS = 4
WIDTH, HEIGHT = 4.2, 3.4
"""Size of a panel in inches."""


def curves(
    runs: Run | Sequence[Run] | Mapping[str, Run],
    names: Sequence[str] | None = None,
    *,
    metrics: Sequence[str] | None = None,
    path: str | Path | None = None,
) -> Picture:
    """Draw the learning curves of one run or several; runs of one algorithm share panels.

    >>> plot.curves(result)
    >>> plot.curves({"clipped": "runs/ppo", "not clipped": history}, metrics=["policy/approx_kl", "policy/ratio_max"])

    A thin line is training, a line with dots is held-out data, a cross at the bottom is a value that was not finite. A green
    band shows a metric's healthy values (`HEALTHY`).

    Args:
        runs: one run, a list of runs, or a dict with their names. A run is its folder, a trainer's result, a table such as
            ``result.metrics`` (in which NaN is a step without the metric), or a list with a dict of metrics per step, such as
            `heedful.ppo_steps` yields.
        names: names in the legend, one per run; None is the folder's name.
        metrics: names of metrics (docs/metrics.md), a panel each; None chooses them by the algorithm.
        path: where to save the picture.

    Raises ConfigError if there are no runs or nothing to draw, CheckpointError if a folder is not a run, does not name its
    algorithm, or has not logged a step yet, and DataError if a line of metrics.jsonl is damaged.
    """
    check_path(path)
    found = runs_of(runs, names)
    if metrics is not None:
        if not metrics:
            raise ConfigError("plot.curves: metrics is empty; name at least one, such as 'reference/kl'")
        logged = {metric for run in found for line in run.metrics for metric in line}
        for metric in metrics:
            if metric not in logged:
                known = ", ".join(sorted(logged - {"step"}))
                raise ConfigError(f"plot.curves: no run has logged {metric!r}; they have {known}")
        found = [RunCurves(run.name, panels_of_metrics(metrics), run.metrics) for run in found]
    figure = figure_of(found)
    save(figure, path)
    return figure


def figure_of(runs: Sequence[RunCurves]) -> Picture:
    """Return the picture: a grid of the panels with values of any run, and a legend below it."""
    theme = current_theme()
    panels = _panels(runs)
    rows = math.ceil(len(panels) / MAX_COLUMNS)
    columns = math.ceil(len(panels) / rows)
    colours = [f"C{i % 10}" for i in range(len(runs))]
    keys: list[Line2D | Patch] = [
        Line2D([], [], color=colour, linewidth=2.5, label=drawable(run.name))
        for run, colour in zip(runs, colours, strict=True)
    ]
    keys.append(Line2D([], [], color=theme.muted, linewidth=1, alpha=0.7, label="training"))
    if any(run.points(panel.held_out)[1] for panel in panels for run in runs):
        keys.append(Line2D([], [], color=theme.muted, linewidth=2, marker="o", markersize=4, label="held out"))
    if any(panel.training in HEALTHY for panel in panels):
        keys.append(Patch(color=theme.healthy, label="healthy"))
    if any(not math.isfinite(value) for panel in panels for run in runs for value in run.points(panel.training)[1]):
        keys.append(Line2D([], [], color=theme.muted, linestyle="", marker="x", label="not finite"))
    width = WIDTH * columns
    keys_per_line = max(1, int(width / (0.8 + 0.1 * max(len(str(key.get_label())) for key in keys))))
    height = HEIGHT * rows + 0.25 * math.ceil(len(keys) / keys_per_line)
    figure = picture(width, height, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for index, panel in enumerate(panels, 1):
        drawn = [(colour, run) for colour, run in zip(colours, runs, strict=True) if panel in run.panels]
        _draw_panel(figure.add_subplot(rows, columns, index), panel, drawn, theme)
    legend = figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), keys_per_line), frameon=False)
    as_text(legend.get_texts())
    return figure


def _panels(runs: Sequence[RunCurves]) -> list[Panel]:
    """The panels with values of any run: algorithms in their usual order, then by name."""
    known = [panels for panels in OFFLINE.values() if any(run.panels == panels for run in runs)]
    others = {run.panels for run in runs} - set(known)
    ordered = [*known, *sorted(others, key=lambda panels: [panel.title for panel in panels])]
    return [
        panel
        for panels in ordered
        for panel in panels
        if any(run.points(m)[1] for run in runs if run.panels == panels for m in (panel.training, panel.held_out))
    ]


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[tuple[str, RunCurves]], theme: Theme) -> None:
    """Draw runs of the panel's algorithm, each with its colour."""
    window = max(1, *(len(run.points(panel.training)[1]) // 20 for _, run in runs)) if panel.smoothed else 1
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel("step" + (f" (training: mean of {window} steps)" if window > 1 else ""))
    axes.set_ylabel(panel.quantity)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    second = None
    if any(len(set(run.points(panel.second)[1])) > 1 for _, run in runs):
        second = axes.twinx()
        second.set_ylabel(panel.second_quantity)
        second.spines["top"].set_visible(False)
    for colour, run in runs:
        steps, values = run.points(panel.training)
        recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
        means = [sum(part) / len(part) for part in recent]
        dot = "o" if len(values) == 1 else ""
        axes.plot(steps, means, color=colour, linewidth=1, alpha=0.7, marker=dot, markersize=2)
        axes.plot(*run.points(panel.held_out), color=colour, linewidth=2, marker="o", markersize=4)
        if second is not None:
            second.plot(*run.points(panel.second), color=colour, linewidth=1.5, linestyle=":")
    if panel.training in HEALTHY:
        _shade(axes, HEALTHY[panel.training], theme)
    for colour, run in runs:
        lost = [step for step, value in zip(*run.points(panel.training), strict=True) if not math.isfinite(value)]
        at_bottom = axes.get_xaxis_transform()
        axes.scatter(lost, [0.03] * len(lost), marker="x", color=colour, transform=at_bottom, label="not finite")


def _shade(axes: Axes, band: Band, theme: Theme) -> None:
    """Shade the visible part of the healthy values; if there is none, show the exceeded limit."""
    low, high = axes.get_ylim()
    room = 0.1 * (high - low)
    if band.high is not None and low > band.high:
        low = band.high - room
    if band.low is not None and high < band.low:
        high = band.low + room
    bottom, top = (
        max(low, -math.inf if band.low is None else band.low),
        min(high, math.inf if band.high is None else band.high),
    )
    axes.axhspan(bottom, top, color=theme.healthy, linewidth=0, zorder=0)
    axes.set_ylim(low, high)
