"""Over-optimisation of a reward model: the gold score against the distance that a proxy has moved the policy.

A proxy is the reward model that is optimised, gold the reward that is meant. The distance is d = sqrt(KL), the KL from the
optimised policy to the one that it began as, in nats per response; for best-of-n `math.sqrt(kl_bound(n))`. Gains are
gold scores minus the gold score at distance 0. Rows of runs are proxy seeds, columns prompts: both are samples.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from heedful.core.best_of_n import expected_best, n_of_kl
from heedful.core.intervals import crossed_interval, mean_interval

__all__ = [
    "Estimate",
    "GainFit",
    "best_of_n_gains",
    "fit_gain",
    "forecast",
    "forecast_error",
    "gain_at",
    "peak_distance",
    "peak_interval",
]

Form = Literal["best-of-n", "rl", "log-n", "linear", "flat"]
Runs = Sequence[Sequence[Sequence[float]]]
"""Gains by run, prompt and distance."""

FARTHEST = 26.0
"""Where a peak is no longer looked for; of best-of-n an n of 10^294."""


class GainFit(NamedTuple):
    """A form of `fit_gain` with its two parameters."""

    form: Form
    a: float
    b: float


class Estimate(NamedTuple):
    """A number and the ends of its 95 % interval; None for the ends if it comes of one run and one prompt."""

    value: float
    low: float | None
    high: float | None


def best_of_n_gains(scores: Sequence[float], values: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Gain in ``values`` of the best of n of one prompt's responses, for each n in ``sizes``.

        E_n - E_1        E_n of `expected_best`: unbiased, from all responses

    Args:
        scores: the proxy's, which select the response.
        values: gold's scores of the same responses, or the proxy's own.
        sizes: the n, at most the number of responses.

    Raises ValueError if ``scores`` and ``values`` differ in length, or an n is not from 1 to their number.
    """
    first, *others = expected_best(scores, values, sizes=[1, *sizes])
    return [one - first for one in others]


def fit_gain(distances: Sequence[float], gains: Sequence[float], form: Form) -> GainFit:
    """Least-squares fit of gold's gain as a function of the distance d (Gao et al. 2022, section 3.1, first two).

        best-of-n   a d - b d^2 = d (a - b d)
        rl          a d - b d log d = d (a - b log d)
        log-n       a + b log n, with kl_bound(n) = d^2
        linear      a + b d
        flat        a, the gain at the largest distance; b is 0

    The last three are rivals for a forecast beyond the largest distance. Every form is linear in a and b, so the fit is
    that of the normal equations, all points weighted equally, and the fit of a mean of curves is the mean of their fits.

    Args:
        distances: sqrt(KL) of each point, at least 0.
        gains: gold's gain there, in the units of the gold score. A point at distance 0 says nothing to Gao's forms, which
            are 0 there, and anchors ``log-n`` and ``linear``.
        form: which, as above.

    Raises ValueError if numbers of distances and gains differ, a distance is negative, the distances do not determine a
    and b, or there is no such ``form``.
    """
    if len(distances) != len(gains):
        raise ValueError(f"distances has {len(distances)} points, but gains has {len(gains)}; they must be equal")
    for_a, for_b = _estimator(distances, form)
    return GainFit(form, _dot(for_a, gains), _dot(for_b, gains))


def gain_at(fit: GainFit, distance: float) -> float:
    """Gold's gain at a distance, as a fit of `fit_gain` has it."""
    first, second = _terms(fit.form, distance)
    return fit.a * first + fit.b * second


def peak_distance(fit: GainFit) -> float:
    """Distance at which the fitted gain is largest: where gold turns.

        best-of-n   d = a / (2 b), gain a^2 / (4 b)        rl   d = exp(a / b - 1), gain b d

    `n_of_kl` of its square is the n of best-of-n. Infinity if the fitted gain has no largest value (b is not positive); 0 if
    it falls from the start.

    Raises ValueError for a form other than ``best-of-n`` and ``rl``, which has no peak.
    """
    _check_has_peak(fit.form)
    if fit.b <= 0:
        return math.inf if fit.b < 0 or fit.a > 0 else 0.0
    if fit.form == "best-of-n":
        return max(0.0, fit.a / (2 * fit.b))
    exponent = fit.a / fit.b - 1
    return math.exp(exponent) if exponent < 700 else math.inf


def peak_interval(distances: Sequence[Sequence[float]], runs: Runs, form: Form) -> Estimate:
    """`peak_distance` of several proxies on the same prompts, with its 95 % interval.

        {d: 0 is within the interval of the slope at d}    slope a - 2 b d (best-of-n), a - b - b log d (rl)

    The value is the peak of the mean fit. The slope at a fixed d is linear in a and b, so it has a fit of its own for each
    run and prompt, and the mean over both the interval of `crossed_interval`; of one run, that of `mean_interval` over
    prompts. Turning it round into an interval of d is Fieller's method (1954). The interval is unbounded above where b is not
    distinguishable from 0: the data then do not say that gold turns.

    Args:
        distances: of each run, sqrt(KL) of its points; the same for all runs of best-of-n.
        runs: gains ``[run][prompt][point]`` of gold.
        form: ``best-of-n`` or ``rl``.

    In 400 simulations of 4 runs and 30 prompts it held the truth in 96.0 %, a percentile bootstrap over both in 91.5 %.

    Infinity for what is beyond a distance of 26. Raises ValueError as `fit_gain` and `peak_distance`.
    """
    _check_has_peak(form)
    of_cells = _fits(distances, runs, form)
    peak = peak_distance(
        GainFit(form, _mean([[x.a for x in row] for row in of_cells]), _mean([[x.b for x in row] for row in of_cells]))
    )

    def slope_at(distance: float) -> tuple[float, float]:
        factor = 2 * distance if form == "best-of-n" else 1 + math.log(distance)
        ends = _interval([[fit.a - fit.b * factor for fit in row] for row in of_cells])
        return ends or (math.nan, math.nan)

    if math.isnan(slope_at(1.0)[0]):
        return Estimate(peak, None, None)
    return Estimate(peak, _first(lambda d: slope_at(d)[0] <= 0), _first(lambda d: slope_at(d)[1] < 0))


def forecast(distances: Sequence[Sequence[float]], runs: Runs, form: Form, *, at: float) -> Estimate:
    """Mean gain of gold that a form fitted to several proxies has at a larger distance, with its 95 % interval.

    The forecast is linear in the gains, so each run and prompt has its own, and their mean the interval of
    `crossed_interval`; of one run, that of `mean_interval` over prompts. It says how well the data determine this form's
    number, not whether the form is right: `forecast_error` does.

    Args:
        distances: of each run, sqrt(KL) of its points.
        runs: gains ``[run][prompt][point]`` of gold.
        form: as in `fit_gain`.
        at: the distance.

    Raises ValueError as `fit_gain`.
    """
    return _estimate([[gain_at(fit, at) for fit in row] for row in _fits(distances, runs, form)])


def forecast_error(distances: Sequence[Sequence[float]], runs: Runs, form: Form, *, known: float) -> list[Estimate]:
    """Forecast minus measured gain at each distance beyond the known ones: how forms compare on held-out points.

    Fits each run's points up to a distance ``known`` and forecasts the others. The error at a point is linear in the gains,
    known and held-out ones together, so that noise of a prompt which they share cancels; interval as in `forecast`.
    Numbers of one form are comparable with another's. A high R2 on fitted points would not tell forms apart: any curve
    of two parameters has it.

    Args:
        distances: of each run, sqrt(KL) of its points; runs have the same number of points beyond ``known``.
        runs: gains ``[run][prompt][point]`` of gold.
        form: as in `fit_gain`.
        known: the largest distance that the fit may see, such as ``math.sqrt(kl_bound(64))``.

    Raises ValueError as `fit_gain`, and if no point is beyond ``known``.
    """
    parts = [[i for i, d in enumerate(points) if d <= known] for points in distances]
    held_out = [[i for i, d in enumerate(points) if d > known] for points in distances]
    if not all(held_out):
        raise ValueError(f"forecast_error: every run needs a point beyond the known distance {known}")
    seen = [[row[i] for i in part] for row, part in zip(distances, parts, strict=True)]
    curves = [[[prompt[i] for i in part] for prompt in run] for run, part in zip(runs, parts, strict=True)]
    of_cells = _fits(seen, curves, form)
    return [
        _estimate(
            [
                [gain_at(fit, points[i]) - prompt[i] for fit, prompt in zip(row, run, strict=True)]
                for row, run, points, i in zip(of_cells, runs, distances, columns, strict=True)
            ]
        )
        for columns in zip(*held_out, strict=True)
    ]


def _terms(form: Form, distance: float) -> tuple[float, float]:
    """What a and b are multiplied with."""
    if form == "best-of-n":
        return distance, -(distance**2)
    if form == "rl":
        return distance, -distance * math.log(distance) if distance else 0.0
    if form == "log-n":
        return 1.0, math.log(n_of_kl(distance**2))
    if form == "linear":
        return 1.0, distance
    if form == "flat":
        return 1.0, 0.0
    raise ValueError(f"form is {form!r}; choose 'best-of-n', 'rl', 'log-n', 'linear' or 'flat'")


def _estimator(distances: Sequence[float], form: Form) -> tuple[list[float], list[float]]:
    """Weights of the gains in a and in b: rows of the pseudo-inverse of the terms."""
    if distances and min(distances) < 0:
        raise ValueError(f"distances has {min(distances)}; sqrt(KL) is at least 0")
    terms = [_terms(form, d) for d in distances]
    if form == "flat" and terms:
        last = distances.index(max(distances))
        return [float(i == last) for i in range(len(distances))], [0.0] * len(distances)
    aa, ab, bb = (math.fsum(t[i] * t[j] for t in terms) for i, j in ((0, 0), (0, 1), (1, 1)))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise ValueError(
            f"form {form!r}: distances {[round(d, 4) for d in distances]} do not determine a and b; it needs gains at "
            "two or more different distances above 0"
        )
    return [(bb * x - ab * y) / determinant for x, y in terms], [(aa * y - ab * x) / determinant for x, y in terms]


def _fits(distances: Sequence[Sequence[float]], runs: Runs, form: Form) -> list[list[GainFit]]:
    """A fit for each run and prompt; the mean over both is the mean of the runs' fits."""
    if len(distances) != len(runs):
        raise ValueError(f"distances has {len(distances)} runs, but runs has {len(runs)}; they must be equal")
    return [[fit_gain(points, gains, form) for gains in run] for points, run in zip(distances, runs, strict=True)]


def _estimate(cells: Sequence[Sequence[float]]) -> Estimate:
    """Mean of a table of runs and prompts, with its interval."""
    return Estimate(_mean(cells), *(_interval(cells) or (None, None)))


def _interval(cells: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    if len(cells) > 1 and len(cells[0]) > 1:
        return crossed_interval(cells)
    return mean_interval([[x] for row in cells for x in row])


def _first(holds: Callable[[float], bool]) -> float:
    """The distance from which on a condition holds; infinity beyond `FARTHEST`."""
    low, high = 0.0, FARTHEST
    if not holds(high):
        return math.inf
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high if low else 0.0


def _check_has_peak(form: Form) -> None:
    if form not in ("best-of-n", "rl"):
        raise ValueError(f"form {form!r} has no peak; choose 'best-of-n' or 'rl'")


def _dot(weights: Sequence[float], gains: Sequence[float]) -> float:
    return math.fsum(w * x for w, x in zip(weights, gains, strict=True))


def _mean(cells: Sequence[Sequence[float]]) -> float:
    return math.fsum(x for row in cells for x in row) / sum(map(len, cells))
