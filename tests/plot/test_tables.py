"""What `plot.curves` takes besides folders: results, tables, lists of metrics, by name."""

import math

import pandas
import pytest

from heedful import ConfigError, plot

PPO = [{"reward/score_mean": i / 2, "reference/kl": 0.1 * i, "rollout/response_length": 8.0} for i in range(4)]


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def points(axes):
    return [tuple(map(float, xy)) for xy in axes.lines[0].get_xydata()]


def test_metrics_of_steps_are_counted_from_one():
    figure = plot.curves(PPO)
    assert titles(figure) == ["score", "KL to the reference", "length"]
    assert points(figure.axes[0]) == [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.5)]
    assert legend(figure) == ["run 1", "training", "healthy"]


def test_a_table_has_its_own_steps_and_gaps():
    """As ``result.metrics``: steps are the index, and a step without a value is no point."""
    table = pandas.DataFrame({"loss/sft": [math.nan, 2.0, 1.0], "eval/loss": [3.0, math.nan, 1.5]}, index=[0, 10, 20])
    (axes,) = plot.curves(table).axes
    assert axes.get_title() == "SFT: loss"
    assert points(axes) == [(10, 2.0), (20, 1.0)]
    assert [tuple(map(float, xy)) for xy in axes.lines[1].get_xydata()] == [(0, 3.0), (20, 1.5)]


def test_several_by_name_share_panels():
    figure = plot.curves({"clipped": PPO, "不裁剪": PPO[:2]})
    assert titles(figure) == ["score", "KL to the reference", "length"]
    assert legend(figure)[:2] == ["clipped", "不裁剪"]
    assert [line.get_color() for line in figure.axes[0].lines if len(line.get_xdata())] == ["C0", "C1"]
    assert legend(plot.curves([PPO, PPO[:2]], ["a", "b"]))[:2] == ["a", "b"]


def test_chosen_metrics_have_a_panel_each():
    figure = plot.curves(PPO, metrics=["reference/kl", "reward/score_mean"])
    assert titles(figure) == ["reference/kl", "reward/score_mean"]


def test_what_is_not_finite_is_a_cross_at_the_bottom():
    figure = plot.curves([{"reference/kl": value} for value in (0.1, math.nan, 0.3, math.inf)])
    (axes,) = figure.axes
    assert [float(x) for found in axes.collections for x, _ in found.get_offsets()] == [2.0, 4.0]
    assert legend(figure)[-1] == "not finite"
    assert [math.isfinite(y) for _, y in points(axes)] == [True, False, True, False], "and a gap of the line"


def test_the_online_loss_of_pairs_is_not_dpo():
    figure = plot.curves([{"loss/dpo": 0.7, "rollout/response_length": 5.0, "reward/score_mean": 1.0}])
    assert titles(figure) == ["score", "length"]


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "plot.curves: runs is empty; give at least one run, such as 'runs/ppo'"),
        ({}, {}, "plot.curves: runs is empty; give at least one run, such as 'runs/ppo'"),
        ([{}], {}, "plot.curves: the table of metrics is empty; give at least one step with one metric"),
        ([PPO, PPO], {"names": ["a"]}, "plot.curves: names has length 1 for 2 runs; give one name per run"),
        (PPO, {"metrics": []}, "plot.curves: metrics is empty; name at least one, such as 'reference/kl'"),
        (
            [{"loss/sft": 1.0}],
            {"metrics": ["loss/stf"]},
            "plot.curves: no run has logged 'loss/stf'; they have loss/sft",
        ),
    ],
)
def test_wrong_input_is_one_line(runs, options, message):
    with pytest.raises(ConfigError) as error:
        plot.curves(runs, **options)
    assert str(error.value) == message
