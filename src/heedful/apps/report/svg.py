"""Line charts as SVG, drawn by hand: they need no library, no network and no JavaScript, and follow the page's colours."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from heedful.apps.plot.charts import Chart, Line
from heedful.apps.plot.healthy import Band
from heedful.display import harmless
from heedful.redact import redact_printed

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 38
"""Around the plot, in units of the picture."""
MOST_POINTS = 400
"""Per line; of a longer one the lowest and the highest value of each part are drawn."""
LARGEST = 1e300
"""The largest magnitude that has a place in a picture, so that differences are finite."""
COLOURS = 6
"""Of runs; after these they repeat."""


def draw(chart: Chart) -> str:
    """Return the SVG of a chart, with its numbers in words for those who do not see it."""
    lines = [line for line in chart.lines if line.points]
    finite = [(x, y) for line in lines for x, y in line.points if _fits(y, chart)]
    xs = [x for line in lines for x, _ in line.points] or [0.0, 1.0]
    x_low, x_high = _widened(min(xs), max(xs))
    y_low, y_high = _limits([y for _, y in finite], chart)
    frame = _Frame(x_low, x_high, y_low, y_high, chart.logarithmic)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(_in_words(chart))}">']
    if chart.band is not None:
        parts.append(_band(chart.band, frame))
    for value in ticks(y_low, y_high, logarithmic=chart.logarithmic):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(value)}</text>')
    for value in ticks(x_low, x_high):
        x = frame.x(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{format_number(value)}</text>')
    for where, meaning in chart.marks.items():
        mark = f'<path class="mark" d="M{frame.x(where):.1f} {TOP}V{HEIGHT - BOTTOM}">'
        parts.append(f"{mark}<title>{text(meaning)}</title></path>")
    for line in lines:
        parts += _line(line, frame, chart)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    for place, name in (
        (f'x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}"', chart.horizontal),
        (f'transform="translate(13 {middle:.0f}) rotate(-90)"', chart.vertical),
    ):
        parts.append(f'<text class="label" {place} text-anchor="middle">{text(name)}</text>')
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    logarithmic: bool

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)


def is_drawable(value: float) -> bool:
    """Whether a value has a place in a picture: it is finite, and not near the end of float64."""
    return abs(value) <= LARGEST


def _fits(value: float, chart: Chart) -> bool:
    return is_drawable(value) and (value > 0 or not chart.logarithmic)


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _limits(values: Sequence[float], chart: Chart) -> tuple[float, float]:
    if not values:
        return (0.1, 1.0) if chart.logarithmic else (0.0, 1.0)
    low, high = min(values), max(values)
    if chart.logarithmic:
        return low / 1.1, high * 1.1
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (0.5 * abs(low) or 0.5), high + (0.5 * abs(high) or 0.5)
    room = 0.06 * (high - low)
    low, high = low - room, high + room
    return (low, high) if chart.band is None else chart.band.widened(low, high, room)


def _band(band: Band, frame: _Frame) -> str:
    """The part of the healthy values that is seen."""
    bottom, top = max(band.limits[0], frame.y_low), min(band.limits[1], frame.y_high)
    if top <= bottom:
        return ""
    y = frame.y(top)
    box = f'x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{frame.y(bottom) - y:.1f}"'
    return f'<rect class="band" {box}><title>healthy: {text(band)}</title></rect>'


def _line(line: Line, frame: _Frame, chart: Chart) -> list[str]:
    colour = "muted" if line.kind in ("yardstick", "group", "guide") else f"c{line.run % COLOURS}"
    kept = [(x, y) for x, y in line.points if _fits(y, chart)]
    thin = thinned(kept)
    if line.kind == "spread":
        corners = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in kept)
        return [f'<polygon class="spread {colour}" points="{corners}"/>']
    if line.kind in ("outside", "points"):
        name, size = ("ring", 4.5) if line.kind == "outside" else ("point", 1.7)
        places = [f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"' for x, y in thin]
        return [f'<circle class="{name} {colour}" r="{size}" {place}/>' for place in places]
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thin)
    parts = [f'<polyline class="line {line.kind} {colour}" points="{path}"/>'] if thin else []
    if line.kind != "training" or len(kept) == 1:
        labels = line.labels or [""] * len(kept)
        for (x, y), label in zip(kept[:MOST_POINTS], labels, strict=False):
            place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
            shown = f"{label} {format_number(x)}: {format_number(y)}".strip()
            if line.kind != "guide":
                parts.append(f'<circle class="dot {colour}" r="3" {place}><title>{text(shown)}</title></circle>')
            if label:
                side, anchor = (-5, "end") if frame.x(x) > WIDTH - LEFT else (5, "start")  # inside the picture
                under = -4 if line.kind == "guide" else 13
                place = f'x="{frame.x(x) + side:.1f}" y="{frame.y(y) + under:.1f}" text-anchor="{anchor}"'
                parts.append(f"<text {place}>{text(label)}</text>")
    for x, y in line.points:
        if not _fits(y, chart) and line.kind != "outside":
            cross = f"M{frame.x(x) - 3:.1f} {HEIGHT - BOTTOM - 9}l6 6m0 -6l-6 6"
            parts.append(
                f'<path class="lost {colour}" d="{cross}"><title>step {format_number(x)}: not finite</title></path>'
            )
    return parts


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` of a line's points: of each part the lowest and the highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    parts = MOST_POINTS // 2
    kept: list[tuple[float, float]] = []
    for part in range(parts):
        here = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        ends = {min(here, key=lambda point: point[1]), max(here, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, *, logarithmic: bool = False) -> list[float]:
    """Round numbers between two limits, about five: 1, 2 or 5 times a power of ten."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        return [value for value in found if low <= value <= high]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def format_number(value: float) -> str:
    """A number in a few characters."""
    return f"{value:.4g}".replace("-", "−").replace("e+0", "e").replace("e−0", "e−")


def text(value: object) -> str:
    """A text of unknown origin as HTML: nothing is markup; control and bidi characters are codes; secrets are hidden."""
    return html.escape(plain(value))


def plain(value: object) -> str:
    """A text without secrets and without characters that are obeyed in place of being shown."""
    return harmless(redact_printed(str(value)))


def _in_words(chart: Chart) -> str:
    said = []
    for line in chart.lines:
        if line.kind == "outside":
            said.append(f"{len(line.points)} outside")
            continue
        ys = [y for _, y in line.points if math.isfinite(y)]
        if ys and line.kind not in ("guide", "spread"):
            ends = f"from {format_number(ys[0])} to {format_number(ys[-1])}"
            said.append(
                f"{line.name or line.kind} {ends}, lowest {format_number(min(ys))}, highest {format_number(max(ys))}"
            )
    band = "" if chart.band is None else f"; healthy: {chart.band}"
    return f"{chart.title}: {'; '.join(said) or 'no values'}{band}"
