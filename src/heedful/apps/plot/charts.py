"""The charts of runs, drawn twice: as SVG on the page (`apps.report.svg`) and by matplotlib (`heedful.plot.curves`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heedful.apps.plot.healthy import HEALTHY, Band
from heedful.apps.plot.panels import OFFLINE
from heedful.apps.plot.run_metrics import RunCurves
from heedful.configs.trainers import Panel

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """The points of a line; a value that is not finite is a cross at the bottom."""

    points: Points
    run: int = 0
    """The number of its run, which has a colour."""
    kind: str = "training"
    """training (thin), held-out (with dots), outside (those outside the band), points (no line), yardstick (dashed), group
    (dotted), guide (grey, without dots), or spread (the corners of an area)."""
    labels: Sequence[str] = ()
    """Of the points, beside them."""
    name: str = ""
    """In words, if its kind does not say what it is."""


@dataclass(frozen=True)
class Chart:
    """One quantity over the steps of runs, or over another."""

    title: str
    horizontal: str
    vertical: str
    lines: Sequence[Line]
    band: Band | None = None
    marks: Mapping[float, str] = field(default_factory=dict)
    """Vertical lines: where, and what they mean."""
    logarithmic: bool = False


def charts_of(runs: Sequence[RunCurves], more: Sequence[Panel] = ()) -> list[Chart]:
    """A chart for each quantity of which a run has values; runs of one algorithm share charts.

    Args:
        runs: in the order of their colours.
        more: panels of runs that learn from their own responses, besides those of their algorithm.
    """
    charts = []
    for panels in dict.fromkeys(run.panels for run in runs):
        own = {place: run for place, run in enumerate(runs) if run.panels == panels}
        for panel in (*panels, *(() if panels in OFFLINE.values() else more)):
            longest = max(len(run.points(panel.training)) for run in own.values())
            window = max(1, longest // 20) if panel.smoothed else 1
            lines = [line for place, run in own.items() for line in _lines(place, run, panel, window)]
            varies = any(len({y for _, y in line.points}) > 1 for line in lines)
            if varies or (lines and not panel.if_varies):
                step = f"step (training: mean of {window} steps)" if window > 1 else "step"
                band = HEALTHY.get(panel.training)
                charts.append(Chart(panel.title, step, panel.quantity, lines, band, logarithmic=panel.logarithmic))
    return charts


def _lines(place: int, run: RunCurves, panel: Panel, window: int) -> list[Line]:
    training = [] if panel.training == panel.held_out else run.points(panel.training)
    band = HEALTHY.get(panel.training)
    outside = [] if band is None else [(x, y) for x, y in training if band.excess(y)]
    of_kind = {"training": _means(training, window), "held-out": run.points(panel.held_out), "outside": outside}
    return [Line(points, place, kind) for kind, points in of_kind.items() if points]


def _means(points: Points, window: int) -> Points:
    """Each value's mean with those before it, as far as they are finite."""
    means = []
    for end, (x, y) in enumerate(points, 1):
        recent = [value for _, value in points[max(0, end - window) : end] if math.isfinite(value)]
        means.append((x, sum(recent) / len(recent) if math.isfinite(y) else y))
    return means
