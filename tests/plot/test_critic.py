"""The pictures of a critic have core's numbers, by hand."""

import pytest
import torch

from heedful import ConfigError, plot

VALUES, REWARDS = torch.tensor([[0.5, 0.5], [0.5, 1.5]]), torch.tensor([[0.0, 0.0], [0.0, 2.0]])
MASK = torch.ones(2, 2, dtype=torch.bool)


def panels(figure):
    """The points of each panel's lines that are no guide, by its title."""
    return {
        axes.get_title(): [
            [tuple(round(float(number), 4) for number in point) for point in line.get_xydata()]
            for line in axes.lines
            if line.get_marker() == "o"
        ]
        for axes in figure.axes
    }


def test_the_lines_by_hand(tmp_path):
    """The returns are 0 and 2. Of both 1/2 is said at first, then 1/2 and 3/2; the other response is wrong by 2."""
    figure = plot.critic(VALUES, REWARDS, MASK, gae_lambda=0.5, group_size=2, path=tmp_path / "值.png")
    found = panels(figure)
    assert found["variance explained, by place"] == [[(1, 0), (2, 0.75)], [(1, 0), (2, 0)], [(1, -1), (2, -1)]]
    assert found["bias, by place"] == [[(1, 0.5), (2, 0)], [(1, 0.5), (2, 0.5)], [(1, 0), (2, 0)]]
    critic, group = found["variance of the advantage"]
    assert (critic[0], critic[-1]) == ((0, 0.3125), (1, 0.6875))
    assert group == [(0, 4), (1, 4)]
    (calibration,) = found["calibration"]
    assert [value for value, _ in calibration] == [0.5, 0.5, 0.5, 1.5]
    assert len(found) == 4
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["critic", "value of the prompt alone", "mean of the prompt's other responses"]
    assert (tmp_path / "值.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_have_panels_if_they_differ():
    mask = torch.tensor([[True, False], [True, True]])
    found = panels(plot.critic(VALUES, REWARDS, mask))
    assert found["bias, by length"][0] == [(1, -0.5), (2, 1.0)]
    assert len(found) == 6


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (MASK & False, {}, "plot.critic: mask has no token; give at least one response with a token"),
        (MASK, {"group_size": 3}, "plot.critic: 2 responses in groups of 3; groups must be whole"),
    ],
)
def test_wrong_input_is_one_line(mask, options, message):
    with pytest.raises(ConfigError) as error:
        plot.critic(VALUES, REWARDS, mask, **options)
    assert str(error.value) == message
