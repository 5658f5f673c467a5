"""Advantages over gamma and lambda: each panel has core's numbers, and NaN is written where it is."""

import math

import pytest

from heedful import ConfigError, plot


def bars(axes):
    return [patch.get_height() for patch in axes.patches]


def test_each_panel_has_its_numbers():
    """By hand for r = 0, 1 and V = 0.5, 0.25: deltas are -0.25 and 0.75, so A_1 = -0.25 + gamma lambda 0.75 with gamma 1."""
    figure = plot.advantages([0.0, 1.0], [0.5, 0.25], gammas=(1.0, 0.5), lambdas=(0.0, 1.0))
    assert [axes.get_title() for axes in figure.axes] == [
        f"γ = {gamma}, λ = {gae_lambda}" for gamma in ("1", "0.5") for gae_lambda in ("0", "1")
    ]
    wanted = [(-0.25, 0.75), (0.5, 0.75), (0.5 * 0.25 - 0.5, 0.75), (0.5 * 0.25 - 0.5 + 0.5 * 0.75, 0.75)]
    assert [tuple(bars(axes)) for axes in figure.axes] == [pytest.approx(pair) for pair in wanted]
    first = figure.axes[0].patches
    assert first[0].get_facecolor() != first[1].get_facecolor()
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_nan_is_written_where_it_is():
    (axes,) = plot.advantages([0.0, 1.0], [math.nan, 0.5], lambdas=(0.0,)).axes
    assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == [(0, "nan")]
    assert bars(axes) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("rewards", "values", "options", "message"),
    [
        ([], [], {}, "plot.advantages: rewards is empty; give at least one number"),
        ([1.0], [1.0, 2.0], {}, "plot.advantages: 1 reward and 2 values; give one value per reward"),
        ([1.0], [1.0], {"lambdas": ()}, "plot.advantages: lambdas is empty; give at least one number"),
    ],
)
def test_wrong_input_is_one_line(rewards, values, options, message):
    with pytest.raises(ConfigError) as error:
        plot.advantages(rewards, values, **options)
    assert str(error.value) == message
