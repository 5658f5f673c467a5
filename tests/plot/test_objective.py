"""The clipped objective: the line is core's, every point is on it, and what is clipped or left out is counted."""

import math

import pytest

from heedful import ConfigError, plot

RATIOS = [0.7, 0.9, 1.0, 1.1, 1.5, 1.5, 0.5]
ADVANTAGES = [-1.0, -2.0, 0.5, 1.0, 2.0, -1.0, 1.0]


def points(axes):
    """Offsets of the points that count and of those that are clipped."""
    return [[tuple(map(float, xy)) for xy in found.get_offsets()] for found in axes.collections]


def test_points_are_on_the_line_and_clipped_ones_are_marked():
    """By hand: with A > 0 only 1.5 is beyond 1.2; with A < 0 only 0.7 is below 0.8, and 1.5 is not clipped."""
    positive, negative = plot.clip_region(RATIOS, ADVANTAGES).axes
    assert points(positive) == [[(1.0, 1.0), (pytest.approx(1.1), pytest.approx(1.1)), (0.5, 0.5)], [(1.5, 1.2)]]
    assert points(negative) == [[(0.9, -0.9), (1.5, -1.5)], [(0.7, -0.8)]]
    for axes, total in ((positive, 4), (negative, 3)):
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == [f"counts: {total - 1} of {total}", f"clipped: 1 of {total}"]
    assert [axes.get_title() for axes in (positive, negative)] == [
        "A > 0, clipped above 1.2",
        "A < 0, clipped below 0.8",
    ]


def test_the_line_is_flat_beyond_the_bound():
    for axes, flat, level in zip(
        plot.clip_region(RATIOS, ADVANTAGES, clip_range_high=0.3).axes, (1.3, 0.8), (1.3, -0.8), strict=True
    ):
        x, y = axes.lines[0].get_xdata(), axes.lines[0].get_ydata()
        beyond = [b for a, b in zip(x, y, strict=True) if (a > flat) == (flat > 1) and a != flat]
        assert beyond
        assert beyond == pytest.approx([level] * len(beyond))
        assert min(RATIOS) >= x[0]
        assert max(RATIOS) <= x[-1]


def test_what_has_no_place_on_the_line_is_counted():
    figure = plot.clip_region([math.nan, math.inf, 1.0, 1.1], [1.0, 1.0, 0.0, 1.0])
    assert figure.get_supxlabel() == "not drawn: 2 not finite, 1 with advantage 0"
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["counts: 1 of 1", "clipped: 0 of 1"]
    assert plot.clip_region([1.0], [1.0]).get_supxlabel() == ""


@pytest.mark.parametrize(
    ("ratios", "advantages", "options", "message"),
    [
        ([], [], {}, "plot.clip_region: ratios is empty; give at least one number"),
        ([1.0], [1.0, 2.0], {}, "plot.clip_region: 1 ratio and 2 advantages; give one advantage per ratio"),
        ([1.0], [1.0], {"clip_range": 0.0}, "plot.clip_region: clip_range must be between 0 and 1; got 0.0"),
        ([1.0], [1.0], {"clip_range_high": -1.0}, "plot.clip_region: clip_range_high must be above 0; got -1.0"),
    ],
)
def test_wrong_input_is_one_line(ratios, advantages, options, message):
    with pytest.raises(ConfigError) as error:
        plot.clip_region(ratios, advantages, **options)
    assert str(error.value) == message
