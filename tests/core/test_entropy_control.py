"""The coefficient of the entropy bonus, fixed or steered."""

import pytest

from heedful.core import EntropyControl


def test_golden_it_rises_below_the_target_and_is_off_above_it():
    """c: 0.01, 0.015, 0.02, 0.015, 0.01, 0.01 (at the target it stays), 0.015."""
    control, found = EntropyControl(0.01, target=0.5, step=0.005), []
    for entropy in (0.4, 0.3, 0.6, 0.7, 0.5, 0.49):
        control.update(entropy)
        found.append(control.coef)
    assert found == pytest.approx([0.015, 0.02, 0.0, 0.0, 0.01, 0.015], abs=1e-15)


def test_golden_it_never_becomes_negative():
    """From 0.003 down: 0, not -0.002; then up from 0."""
    control = EntropyControl(0.003, target=0.5, step=0.005)
    control.update(0.9)
    control.update(0.9)
    control.update(0.4)
    assert control.coef == pytest.approx(0.005, abs=1e-15)


def test_golden_without_a_target_it_is_fixed():
    control = EntropyControl(0.02)
    control.update(0.0)
    control.update(9.0)
    assert control.coef == 0.02


def test_identity_state_dict_round_trip_continues_where_it_was():
    """Also while the bonus is off: what c was is not forgotten."""
    one, other = EntropyControl(0.02, target=0.5), EntropyControl(0.9, target=0.5)
    one.update(0.8)
    assert one.coef == 0.0
    other.load_state_dict(one.state_dict())
    for control in (one, other):
        control.update(0.1)
    assert other.coef == one.coef == pytest.approx(0.02)


@pytest.mark.parametrize("wrong", [{"coef": -0.1}, {"target": 0.0}, {"target": -1.0}, {"step": 0.0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="EntropyControl: coef must not be negative, target and step must be positive"):
        EntropyControl(**{"coef": 0.1, "target": 0.5, "step": 0.1} | wrong)
