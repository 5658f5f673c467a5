"""The healthy bands are those of docs/metrics.md, and curves show where a run leaves them."""

from pathlib import Path

import pytest

from heedful import plot
from heedful.apps.plot.style import current_theme

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows_of(heading):
    """The rows of the table below a heading of docs/metrics.md, as lists of cells."""
    section = PAGE.read_text(encoding="utf-8").split(f"### {heading}\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_the_same_bands():
    """``metric | from | to | source``; an empty cell is no limit."""
    rows = {name.strip("`"): (low, high, source) for name, low, high, source in rows_of("Healthy bands")}
    assert rows == {name: (cell(band.low), cell(band.high), band.source) for name, band in plot.HEALTHY.items()}


def cell(limit):
    return "" if limit is None else f"{limit:g}"


def drawn(values, metric="reference/kl"):
    (axes,) = plot.curves([{metric: value} for value in values], metrics=[metric]).axes
    (band,) = axes.patches
    assert band.get_facecolor()[:3] == current_theme().healthy
    bottom, top = band.get_y(), band.get_y() + band.get_height()
    return (bottom, top), axes.get_ylim()


def test_a_limit_is_seen_where_a_run_is_beyond_it():
    """KL to the reference is healthy up to 20. A run inside its band keeps its scale."""
    (bottom, top), (low, high) = drawn([0.0, 1.0])
    assert (bottom, top) == pytest.approx((low, high))
    assert high < 2
    for values in ([10.0, 30.0], [30.0, 40.0]):
        (bottom, top), (low, high) = drawn(values)
        assert (bottom, top) == pytest.approx((low, 20))
        assert low < 20
        assert high > values[1]
    (bottom, top), (low, high) = drawn([0.1, 0.2], "rollout/eos_frac")
    assert (bottom, top) == pytest.approx((0.9, high))
    assert high > 0.9


def test_a_metric_without_a_band_is_not_shaded():
    figure = plot.curves([{"policy/entropy": 1.0}, {"policy/entropy": 0.5}])
    assert [list(axes.patches) for axes in figure.axes] == [[]]
    assert "healthy" not in [text.get_text() for text in figure.legends[0].get_texts()]
