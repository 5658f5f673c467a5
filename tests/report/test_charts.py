"""Charts as SVG: round ticks, no peak lost, bands and marks in their places; which responses a page takes."""

import math
import re

import numpy as np
import pytest

from heedful.apps.plot.charts import Chart, Line
from heedful.apps.plot.healthy import Band
from heedful.apps.plot.run_metrics import RunCurves
from heedful.apps.report.inspector import _half
from heedful.apps.report.rollouts import EXTREMES, Survey, _divergence, sample
from heedful.apps.report.runs import RunRecord, departures
from heedful.apps.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    draw,
    thinned,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-4.4, -1.9, [-4.0, -3.5, -3.0, -2.5, -2.0]),
        (0, 2600, [0, 1000, 2000]),
        (0.02, 0.028, [0.02, 0.022, 0.024, 0.026, 0.028]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_long_line_keeps_its_peaks():
    points = [(float(x), math.sin(x)) for x in range(10_000)]
    points[5555] = (5555.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert (5555.0, 99.0) in kept
    assert kept == sorted(kept)
    assert thinned(points[:10]) == points[:10]


def test_points_are_in_their_place():
    drawn = draw(Chart("t", "step", "y", [Line([(0.0, 0.0), (10.0, 1.0)])]))
    x0, y0, x1, y1 = map(float, re.search(r'points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', drawn).groups())
    room = (HEIGHT - TOP - BOTTOM) * 0.06 / 1.12
    assert (x0, x1) == (LEFT, WIDTH - RIGHT)
    assert (y0, y1) == pytest.approx((HEIGHT - BOTTOM - room, TOP + room), abs=0.06)


def test_the_band_that_was_left_is_seen():
    lines = [Line([(1.0, 5.0), (2.0, 6.0)]), Line([(1.0, 5.0), (2.0, 6.0)], kind="outside")]
    drawn = draw(Chart("t", "step", "y", lines, Band(None, 4.0, "s"), {2.0: "kl-budget, step 2"}))
    top, height = map(float, re.search(r'class="band" .*?y="([\d.]+)" width="\d+" height="([\d.]+)"', drawn).groups())
    assert top + height == pytest.approx(HEIGHT - BOTTOM, abs=0.1)
    assert height > 3
    assert drawn.count('class="ring') == 2
    assert f'class="mark" d="M{WIDTH - RIGHT:.1f} {TOP}V' in drawn
    assert "healthy: at most 4" in drawn


def test_what_is_not_finite_is_a_cross():
    drawn = draw(Chart("t", "step", "y", [Line([(1.0, math.nan), (2.0, math.inf), (3.0, 1.0)])]))
    assert drawn.count('class="lost') == 2
    assert "nan" not in drawn
    assert 'aria-label="t: training from 1 to 1' in drawn


def test_an_area_and_a_guide_have_no_dots_and_no_words():
    lines = [Line([(0.0, 1.0), (1.0, 2.0), (1.0, 0.0)], kind="spread"), Line([(0.0, 0.0), (1.0, 1.0)], kind="guide")]
    drawn = draw(Chart("t", "value", "y", [*lines, Line([(0.0, 0.5), (1.0, 1.5)], kind="group", name="其他")]))
    assert len(re.search('<polygon class="spread c0" points="([^"]*)"', drawn)[1].split()) == 3
    assert re.findall('<polyline class="line ([^"]*)"', drawn) == ["guide muted", "group muted"]
    assert drawn.count("<circle") == 2
    assert 'aria-label="t: 其他 from 0.5 to 1.5, lowest 0.5, highest 1.5"' in drawn


def test_rounding_leaves_no_band_but_nan_does():
    metrics = [{"step": s, "policy/effective_frac": v} for s, v in enumerate((1.0 + 1e-9, 0.95, 0.5, math.nan), 1)]
    run = RunRecord(None, "ppo", "finished", RunCurves("r", (), metrics), [], [], {}, {}, ())
    (one,) = departures(run)
    assert (one.first, one.count, one.steps, one.worst_step) == (3, 2, 4, 4)


def surveyed(count, seed=0):
    generator = np.random.default_rng(seed)
    numbers = {name: generator.normal(size=count) for name in ("score", "kl", "ratio", "advantage", "divergence")}
    index = np.arange(count)
    return Survey(index // 10, index % 10, generator.integers(1, 50, count), **numbers, paths=[], steps=[])


def test_a_sample_has_the_extremes_and_is_random_else():
    found = surveyed(5000)
    chosen = sample(found, most=1000, most_tokens=10**9, longest=1000, seed=0)
    assert len(chosen) == len(set(chosen)) == 1000
    assert chosen == sorted(chosen)
    for numbers in (found.kl, found.ratio, found.advantage, found.divergence, found.score, -found.score):
        assert set(np.argsort(numbers)[-EXTREMES:].tolist()) <= set(chosen)
    others = np.setdiff1d(chosen, np.argsort(found.kl)[-EXTREMES:])
    assert abs(np.mean(others) / 5000 - 0.5) < 0.03, "from everywhere in the run"
    assert sample(found, most=1000, most_tokens=10**9, longest=1000, seed=1) != chosen
    assert sample(found, most=5000, most_tokens=10**9, longest=1000, seed=1) == list(range(5000))


def test_a_sample_stays_within_its_tokens():
    found = surveyed(5000)
    found.kl[:100] = np.nan
    chosen = sample(found, most=1000, most_tokens=10_000, longest=20, seed=0)
    assert 8000 < np.minimum(found.tokens[chosen], 20).sum() <= 10_000


def test_score_up_and_another_reward_down():
    """Since the prompt's first response, in standard deviations of the run; the smaller of the two."""
    prompt = np.array([7, 8, 7, 7, 8])
    score = np.array([0.0, 1.0, 2.0, 2.0, 0.0])
    judge = np.array([4.0, 0.0, 0.0, 4.0, -4.0])
    found = _divergence(prompt, score, [score, judge])
    assert np.isnan(found[[0, 1, 3, 4]]).all()
    assert found[2] == pytest.approx(min(2 / score.std(), 4 / judge.std()))


def test_numbers_of_any_size_keep_three_digits():
    for scale in (1e-30, 1e-3, 1.0, 1e6, 1e30):
        exact = np.array([1.0, -0.3337, 1e-4, 0.0]) * scale
        packed, factor = _half(exact.tolist())
        high, low = np.frombuffer(packed, "u1").reshape(2, -1).astype("<u2")
        np.testing.assert_allclose((high << 8 | low).view("<f2").astype(np.float64) * factor, exact, rtol=5e-4)
    packed, factor = _half([math.nan, math.inf, -math.inf, 2.0])
    high, low = np.frombuffer(packed, "u1").reshape(2, -1).astype("<u2")
    np.testing.assert_array_equal(
        (high << 8 | low).view("<f2").astype(np.float64) * factor, [math.nan, math.inf, -math.inf, 2.0]
    )
