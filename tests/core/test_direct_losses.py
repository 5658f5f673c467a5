"""SimPO, ORPO and KTO: values worked out by hand, identities, and what they refuse to be confused by."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import kto_loss, orpo_loss, simpo_loss
from tensors import close, f64, minus_log_sigmoid


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Sums over 2 and 5 tokens where chosen, 4 and 2 where rejected. Means: -0.5 and -0.8; -0.75 and -0.6.
PAIRS = (f64([-1.0, -4.0]), f64([-3.0, -1.2]), torch.tensor([2, 5]), torch.tensor([4, 2]))

# ------------------------------------------------------------------------------------------------------------- simpo


def test_golden_simpo_loss():
    """Differences of means 0.25 and -0.2; with beta 2 and margin 0.5: 2 (0.25 - 0.5) = -0.5 and 2 (-0.2 - 0.5) = -1.4."""
    loss, metrics = simpo_loss(*PAIRS, beta=2.0, target_margin=0.5)
    close(loss, (minus_log_sigmoid(-0.5) + minus_log_sigmoid(-1.4)) / 2)
    close(loss, (0.974076984180107 + 1.620415300990803) / 2, rtol=1e-6)
    close(metrics["reward/chosen"], 2 * (-0.5 - 0.8) / 2)
    close(metrics["reward/rejected"], 2 * (-0.75 - 0.6) / 2)
    close(metrics["reward/margin"], 2 * (0.25 - 0.2) / 2)
    close(metrics["reward/accuracy"], 1 / 2)


def test_golden_simpo_loss_divides_by_the_count_handed_in():
    loss, metrics = simpo_loss(*PAIRS, beta=2.0, target_margin=0.5, num_pairs=10)
    close(loss, (minus_log_sigmoid(-0.5) + minus_log_sigmoid(-1.4)) / 10)
    close(metrics["reward/accuracy"], 1 / 10)


def test_golden_simpo_accuracy_asks_for_no_margin_and_a_tie_is_half_right():
    one, two = torch.tensor([1]), torch.tensor([2])
    close(simpo_loss(f64([-1.0]), f64([-2.2]), one, two, beta=1.0, target_margin=5.0)[1]["reward/accuracy"], 1)
    close(simpo_loss(f64([-1.0]), f64([-2.0]), one, two, beta=1.0, target_margin=0.0)[1]["reward/accuracy"], 0.5)


# -------------------------------------------------------------------------------------------------------------- orpo


def log_odds(mean):
    p = math.exp(mean)
    return math.log(p / (1 - p))


def test_golden_orpo_loss():
    """One token of probability 3/4 against two of 1/4 on average: odds 3 and 1/3, so the ratio is 9."""
    loss, metrics = orpo_loss(
        f64([math.log(0.75)]), f64([2 * math.log(0.25)]), torch.tensor([1]), torch.tensor([2]), beta=0.2
    )
    close(loss, 0.2 * math.log(1 + 1 / 9))
    close(metrics["loss/orpo"], 0.2 * math.log(1 + 1 / 9))
    close(metrics["reward/chosen"], math.log(3))
    close(metrics["reward/rejected"], -math.log(3))
    close(metrics["reward/margin"], math.log(9))
    close(metrics["reward/accuracy"], 1)


def test_golden_orpo_loss_of_two_pairs_divides_by_the_count_handed_in():
    ratios = [log_odds(-0.5) - log_odds(-0.75), log_odds(-0.8) - log_odds(-0.6)]
    loss, metrics = orpo_loss(*PAIRS, beta=0.3, num_pairs=10)
    close(loss, 0.3 * sum(map(minus_log_sigmoid, ratios)) / 10)
    close(metrics["reward/margin"], sum(ratios) / 10)
    close(metrics["reward/accuracy"], 1 / 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("chosen", "rejected"), [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e-9, -200.0), (-500.0, -1e-30)]
)
def test_orpo_of_a_response_that_is_certain_is_finite(dtype, chosen, rejected):
    """Its odds are infinite, and infinity minus infinity, or times 0, is not a number."""
    chosen, rejected = (torch.tensor([x], dtype=dtype, requires_grad=True) for x in (chosen, rejected))
    one = torch.tensor([1])
    loss, metrics = orpo_loss(chosen, rejected, one, one, beta=1.0)
    loss.backward()
    assert all(x.isfinite().all() for x in (loss, chosen.grad, rejected.grad, *metrics.values()))


def test_orpo_keeps_small_probabilities_of_failure():
    """1 - exp(x) of a log-prob near 0 loses all its digits in float32 if it is written so."""
    mean = torch.tensor([-1e-5])
    _, metrics = orpo_loss(mean, torch.tensor([-1.0]), torch.tensor([1]), torch.tensor([1]), beta=1.0)
    assert float(metrics["reward/chosen"]) == pytest.approx(-1e-5 - math.log(1e-5 - 0.5e-10), rel=1e-6)


# --------------------------------------------------------------------------------------------------------------- kto

# Log-ratios 2 and -1 of good responses, 0.5 of a bad one.
KTO = (f64([-8.0, -6.0, -9.5]), f64([-10.0, -5.0, -10.0]), torch.tensor([True, True, False]))


def test_golden_kto_loss():
    """z0 = 0.5: gains 1.5, -1.5 and 0, times beta 0.4; a response at the point of reference is half right."""
    loss, metrics = kto_loss(*KTO, beta=0.4, kl=0.5)
    close(loss, ((1 - sigmoid(0.6)) + (1 - sigmoid(-0.6)) + (1 - sigmoid(0))) / 3)
    close(loss, (1 + 0.5) / 3)
    close(metrics["loss/kto"], 0.5)
    close(metrics["reward/chosen"], 0.4 * (2 - 1) / 2)
    close(metrics["reward/rejected"], 0.4 * 0.5)
    close(metrics["reward/margin"], 0.4 * 0.5 - 0.4 * 0.5)
    close(metrics["reward/accuracy"], (1 + 0 + 0.5) / 3)


def test_golden_kto_loss_weighs_good_and_bad_responses():
    """4/3 and 0.5 times 1 - sigmoid(0.8), 1 - sigmoid(-0.4) and 1 - sigmoid(-0.2), without z0."""
    loss, _ = kto_loss(*KTO, beta=0.4, kl=0.0, desirable_weight=4 / 3, undesirable_weight=0.5)
    close(loss, (4 / 3 * ((1 - sigmoid(0.8)) + (1 - sigmoid(-0.4))) + 0.5 * (1 - sigmoid(-0.2))) / 3)


def test_golden_kto_loss_divides_by_the_counts_handed_in():
    """Of ten responses, four are good: means of rewards are over those of the step."""
    loss, metrics = kto_loss(*KTO, beta=0.4, kl=0.5, num_responses=10, num_desirable=4)
    close(loss, 1.5 / 10)
    close(metrics["reward/chosen"], 0.4 * (2 - 1) / 4)
    close(metrics["reward/rejected"], 0.4 * 0.5 / 6)
    close(metrics["reward/margin"], 0.4 * (1 / 4 - 0.5 / 6))
    close(metrics["reward/accuracy"], (1 + 0.5) / 10)


def test_golden_a_negative_kl_counts_as_zero():
    close(kto_loss(*KTO, beta=0.4, kl=-3.0)[0], kto_loss(*KTO, beta=0.4, kl=0.0)[0])
    assert kto_loss(*KTO, beta=0.4, kl=3.0)[0] != kto_loss(*KTO, beta=0.4, kl=0.0)[0]


@pytest.mark.parametrize(("label", "there", "absent"), [(True, "chosen", "rejected"), (False, "rejected", "chosen")])
def test_golden_kto_of_one_label_has_no_mean_of_the_other(label, there, absent):
    logprobs, ref_logprobs, _ = KTO
    _, metrics = kto_loss(logprobs, ref_logprobs, torch.full((3,), label), beta=0.4, kl=0.0)
    close(metrics[f"reward/{there}"], 0.4 * (2 - 1 + 0.5) / 3)
    assert not {f"reward/{absent}", "reward/margin"} & metrics.keys()


def test_no_gradient_flows_into_the_kl():
    kl = f64(0.5).requires_grad_()
    logprobs = KTO[0].clone().requires_grad_()
    kto_loss(logprobs, *KTO[1:], beta=0.4, kl=kl)[0].backward()
    assert kl.grad is None


def test_kto_far_from_the_point_of_reference_is_finite():
    loss, _ = kto_loss(f64([-1e4, 0.0]), f64([0.0, -1e4]), torch.tensor([True, False]), beta=1.0, kl=0.0)
    close(loss, 1.0)


# ---------------------------------------------------------------------------------------------------- other libraries


def test_numbers_of_trl():
    """What the methods of trl 1.16.0 return for these log-probs in float32.

    CPOTrainer.cpo_loss with simpo_gamma 1 and beta 2, ORPOTrainer.odds_ratio_loss, KTOTrainer._compute_loss.
    """
    close(simpo_loss(*PAIRS, beta=2.0, target_margin=0.5)[0], 1.2972471714, rtol=1e-6)
    close(orpo_loss(*PAIRS, beta=0.3)[0], 0.2055720985, rtol=1e-6)
    close(kto_loss(*KTO, beta=0.4, kl=0.3, desirable_weight=1.2, undesirable_weight=0.7)[0], 0.5066944957, rtol=1e-6)


# -------------------------------------------------------------------------------------------------------- properties

SIDES = st.tuples(st.floats(-40, -0.01), st.integers(1, 30))


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=5), st.floats(0.01, 3), st.floats(0, 2))
def test_property_pair_losses_equal_a_loop(rows, beta, margin):
    pairs = (
        f64([chosen for (chosen, _), _ in rows]),
        f64([rejected for _, (rejected, _) in rows]),
        torch.tensor([tokens for (_, tokens), _ in rows]),
        torch.tensor([tokens for _, (_, tokens) in rows]),
    )
    means = [(chosen / n, rejected / m) for (chosen, n), (rejected, m) in rows]
    expected = sum(minus_log_sigmoid(beta * (c - r - margin)) for c, r in means) / len(rows)
    close(simpo_loss(*pairs, beta=beta, target_margin=margin)[0], expected, rtol=1e-7)
    expected = beta * sum(minus_log_sigmoid(log_odds(c) - log_odds(r)) for c, r in means) / len(rows)
    close(orpo_loss(*pairs, beta=beta)[0], expected, rtol=1e-7)


@given(
    st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.booleans()), min_size=1, max_size=6),
    st.floats(0.01, 1),
    st.floats(-2, 5),
    st.floats(0.1, 3),
)
def test_property_kto_equals_a_loop(rows, beta, kl, weight):
    logprobs, ref_logprobs, labels = (list(column) for column in zip(*rows, strict=True))
    z0 = max(0.0, kl)
    values = [sigmoid(beta * (p - r - z0) * (1 if good else -1)) for p, r, good in rows]
    expected = sum((1 if good else weight) * (1 - v) for v, (_, _, good) in zip(values, rows, strict=True)) / len(rows)
    loss, _ = kto_loss(
        f64(logprobs), f64(ref_logprobs), torch.tensor(labels), beta=beta, kl=kl, undesirable_weight=weight
    )
    close(loss, expected, rtol=1e-7)
