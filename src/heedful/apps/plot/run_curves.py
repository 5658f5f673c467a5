"""Learning curves of runs in one picture: one panel per quantity, one colour per run; runs of one algorithm share panels."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from heedful.apps.plot.charts import Chart, charts_of
from heedful.apps.plot.panels import panels_of_metrics
from heedful.apps.plot.run_metrics import Run, RunCurves, runs_of
from heedful.apps.plot.style import Picture, Theme, as_text, check_path, current_theme, drawable, picture, save
from heedful.errors import ConfigError

MAX_COLUMNS = 4
WIDTH, HEIGHT = 4.2, 3.4
"""Size of a panel in inches."""
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "yardstick": {"linestyle": "--", "linewidth": 1.5, "marker": "o", "markersize": 3},
    "group": {"linestyle": ":", "linewidth": 2, "marker": "o", "markersize": 3},
    "guide": {"linewidth": 0.8},
}
"""How lines that are compared with are drawn."""


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
    """Return the picture: a grid of the runs' charts, and a legend below it."""
    theme, charts = current_theme(), charts_of(runs)
    lines = [line for chart in charts for line in chart.lines]
    rows = math.ceil(len(charts) / MAX_COLUMNS)
    columns = math.ceil(len(charts) / rows)
    keys: list[Line2D | Patch] = [
        Line2D([], [], color=f"C{place % 10}", linewidth=2.5, label=drawable(run.name))
        for place, run in enumerate(runs)
    ]
    keys.append(Line2D([], [], color=theme.muted, linewidth=1, alpha=0.7, label="training"))
    if any(line.kind == "held-out" for line in lines):
        keys.append(Line2D([], [], color=theme.muted, linewidth=2, marker="o", markersize=4, label="held out"))
    if any(chart.band for chart in charts):
        keys.append(Patch(color=theme.healthy, label="healthy"))
    if any(not math.isfinite(y) for line in lines for _, y in line.points):
        keys.append(Line2D([], [], color=theme.muted, linestyle="", marker="x", label="not finite"))
    width = WIDTH * columns
    keys_per_line = max(1, int(width / (0.8 + 0.1 * max(len(str(key.get_label())) for key in keys))))
    height = HEIGHT * rows + 0.25 * math.ceil(len(keys) / keys_per_line)
    figure = picture(width, height, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for place, chart in enumerate(charts, 1):
        draw(figure.add_subplot(rows, columns, place), chart, theme)
    legend = figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), keys_per_line), frameon=False)
    as_text(legend.get_texts())
    return figure


def draw(axes: Axes, chart: Chart, theme: Theme) -> None:
    """Draw a chart with its lines, band, marks and labels."""
    axes.set_title(chart.title, fontsize=11)
    axes.set_xlabel(chart.horizontal)
    axes.set_ylabel(chart.vertical)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    drawn = [
        (line, f"C{line.run % 10}", [x for x, _ in line.points], [y for _, y in line.points])
        for line in chart.lines
        if line.kind != "outside"
    ]
    for where in chart.marks:
        axes.axvline(where, color=theme.muted, linewidth=1, linestyle=(0, (1, 2)))
    for line, colour, xs, ys in drawn:
        for x, y, label in zip(xs, ys, line.labels, strict=False):
            axes.annotate(label, (x, y), (5, -11), textcoords="offset points", fontsize=8, color=theme.muted)
        if line.kind == "held-out":
            axes.plot(xs, ys, color=colour, linewidth=2, marker="o", markersize=4)
        elif line.kind == "spread":
            axes.fill(xs, ys, color=colour, alpha=0.18, linewidth=0)
        elif line.kind in BASELINES:
            axes.plot(xs, ys, color=theme.muted, **BASELINES[line.kind])
        else:
            axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.7, marker="o" if len(xs) == 1 else "", markersize=2)
    if chart.band is not None:
        low, high = axes.get_ylim()
        low, high = chart.band.widened(low, high, room=0.1 * (high - low))
        least, most = chart.band.limits
        axes.axhspan(max(low, least), min(high, most), color=theme.healthy, linewidth=0, zorder=0)
        axes.set_ylim(low, high)
    for _, colour, xs, ys in drawn:
        lost = [x for x, y in zip(xs, ys, strict=True) if not math.isfinite(y)]
        axes.scatter(lost, [0.03] * len(lost), marker="x", color=colour, transform=axes.get_xaxis_transform())
