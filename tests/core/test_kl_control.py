"""The coefficient of the KL penalty, fixed or steered."""

import math

import pytest

from heedful.core import AdaptiveKL, FixedKL


@pytest.mark.parametrize(("kl", "error"), [(6.6, 0.1), (5.4, -0.1), (600.0, 0.2), (-3.0, -0.2)])
def test_golden_adaptive_kl_moves_against_the_clipped_error(kl, error):
    """Error 6.6 / 6 - 1 = 0.1, below the clip at 0.2; 512 episodes of a horizon of 10000."""
    controller = AdaptiveKL(0.15, target=6.0, horizon=10_000)
    controller.update(kl, 512)
    assert math.isclose(controller.coef, 0.15 * (1 + error * 512 / 10_000), rel_tol=1e-12)


def test_golden_adaptive_kl_compounds():
    controller = AdaptiveKL(0.2, target=6.0, horizon=1000)
    controller.update(6.6, 100)
    controller.update(9.0, 50)
    assert math.isclose(controller.coef, 0.2 * (1 + 0.1 * 0.1) * (1 + 0.2 * 0.05), rel_tol=1e-12)


def test_golden_fixed_kl_stays():
    controller = FixedKL(0.05)
    controller.update(100.0, 512)
    controller.update(-100.0, 512)
    assert controller.coef == 0.05


@pytest.mark.parametrize(
    "make", [lambda coef: AdaptiveKL(coef, target=6.0, horizon=1000), FixedKL], ids=["adaptive", "fixed"]
)
def test_identity_state_dict_round_trip_continues_where_it_was(make):
    one = make(0.2)
    one.update(9.0, 100)
    other = make(7.0)
    other.load_state_dict(one.state_dict())
    assert other.coef == one.coef
    for controller in (one, other):
        controller.update(4.0, 100)
    assert other.coef == one.coef
    assert one.state_dict() == {"coef": one.coef}


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 100), (-1.0, 100), (6.0, 0), (6.0, -5)])
def test_targets_and_horizons_that_are_not_positive_are_refused(target, horizon):
    with pytest.raises(
        ValueError, match=f"AdaptiveKL: target and horizon must be positive, got {target} and {horizon}"
    ):
        AdaptiveKL(0.1, target=target, horizon=horizon)


def test_a_negative_initial_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"AdaptiveKL: init_coef must not be negative, got -0\.1"):
        AdaptiveKL(-0.1, target=6.0, horizon=100)
