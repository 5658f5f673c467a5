"""Losses over preferences: reward models from pairs, rankings and choices; direct preference optimisation."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import dpo_loss, pairwise_reward_loss, ranking_reward_loss
from tensors import close, f64, minus_log_sigmoid

# ------------------------------------------------------------------------------------------------------------- pairs

CHOSEN, REJECTED = f64([1.0, -0.5, 2.0]), f64([0.5, 0.5, 2.0])
PAIRWISE = (minus_log_sigmoid(0.5) + minus_log_sigmoid(-1.0) + math.log(2)) / 3


def test_golden_pairwise_reward_loss():
    """Differences 0.5, -1, 0; the tie is not right."""
    loss, metrics = pairwise_reward_loss(CHOSEN, REJECTED)
    close(loss, PAIRWISE)
    close(metrics["loss/reward"], PAIRWISE)
    close(metrics["reward/accuracy"], 1 / 3)
    close(metrics["reward/margin"], (0.5 - 1.0 + 0.0) / 3)


def test_golden_pairwise_reward_loss_divides_by_the_count_handed_in():
    loss, metrics = pairwise_reward_loss(CHOSEN, REJECTED, num_pairs=12)
    close(loss, PAIRWISE * 3 / 12)
    close(metrics["reward/accuracy"], 1 / 12)
    close(metrics["reward/margin"], -0.5 / 12)


def test_golden_pairwise_reward_loss_with_margins():
    """The margin is subtracted: the chosen score has to win by that much. Metrics are about the scores alone."""
    loss, metrics = pairwise_reward_loss(CHOSEN, REJECTED, margin=f64([0.25, 0.0, 1.0]))
    close(loss, (minus_log_sigmoid(0.5 - 0.25) + minus_log_sigmoid(-1.0) + minus_log_sigmoid(0.0 - 1.0)) / 3)
    close(metrics["reward/accuracy"], 1 / 3)
    close(metrics["reward/margin"], -0.5 / 3)


def test_golden_pairwise_reward_loss_with_centring():
    loss, _ = pairwise_reward_loss(CHOSEN, REJECTED, center_coef=0.01)
    close(loss, PAIRWISE + 0.01 * (1.5**2 + 0.0**2 + 4.0**2) / 3)


def test_golden_pairwise_reward_loss_with_label_smoothing():
    smoothed = [0.9 * minus_log_sigmoid(d) + 0.1 * minus_log_sigmoid(-d) for d in (0.5, -1.0, 0.0)]
    close(pairwise_reward_loss(CHOSEN, REJECTED, label_smoothing=0.1)[0], sum(smoothed) / 3)


def test_golden_pairwise_reward_loss_of_a_hopeless_pair_is_finite():
    """log(1 + exp(2000)) overflows when written out."""
    close(pairwise_reward_loss(f64([-1000.0]), f64([1000.0]))[0], 2000)


def test_golden_pairwise_half_precision_is_computed_in_float32():
    loss, _ = pairwise_reward_loss(torch.tensor([256.0]).bfloat16(), torch.tensor([-1.0]).bfloat16(), center_coef=1.0)
    assert loss.dtype == torch.float32
    assert loss == 255**2


# ---------------------------------------------------------------------------------------------------------- rankings


def test_golden_ranking_reward_loss():
    """Three responses make three pairs, two make one: mean over the pairs of a prompt, then over the prompts."""
    scores = f64([2.0, 1.0, -1.0, 0.5, 1.5])
    loss, metrics = ranking_reward_loss(scores, torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 1, 1]))
    first = (minus_log_sigmoid(1.0) + minus_log_sigmoid(3.0) + minus_log_sigmoid(2.0)) / 3
    close(loss, (first + minus_log_sigmoid(-1.0)) / 2)
    close(metrics["loss/reward"], (first + minus_log_sigmoid(-1.0)) / 2)
    close(metrics["reward/accuracy"], (1 + 0) / 2)


def test_golden_ranking_reward_loss_lower_rank_is_better_whatever_the_order():
    scores = f64([-1.0, 2.0, 1.0])
    loss, _ = ranking_reward_loss(scores, torch.tensor([9, 1, 4]), torch.tensor([5, 5, 5]))
    close(loss, (minus_log_sigmoid(1.0) + minus_log_sigmoid(3.0) + minus_log_sigmoid(2.0)) / 3)


def test_golden_ranking_reward_loss_makes_no_pair_of_a_tie():
    loss, metrics = ranking_reward_loss(f64([2.0, 0.5, 1.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0]))
    close(loss, (minus_log_sigmoid(1.0) + minus_log_sigmoid(-0.5)) / 2)
    close(metrics["reward/accuracy"], 1 / 2)


def test_golden_ranking_reward_loss_leaves_prompts_without_pairs_out_of_the_count():
    """Prompt 7 is all ties, prompt 3 has one response: prompt 1 alone counts."""
    scores = f64([0.3, 0.9, 5.0, 2.0, 1.0])
    loss, metrics = ranking_reward_loss(scores, torch.tensor([1, 1, 0, 0, 1]), torch.tensor([7, 7, 3, 1, 1]))
    close(loss, minus_log_sigmoid(1.0))
    close(metrics["reward/accuracy"], 1)


def test_golden_ranking_reward_loss_divides_by_the_count_handed_in():
    loss, metrics = ranking_reward_loss(f64([2.0, 1.0]), torch.tensor([0, 1]), torch.tensor([0, 0]), num_prompts=8)
    close(loss, minus_log_sigmoid(1.0) / 8)
    close(metrics["reward/accuracy"], 1 / 8)


def test_golden_ranking_micro_batch_without_pairs_adds_zero():
    """Its step has pairs elsewhere; loss and gradient are 0, not NaN."""
    scores = f64([1.0, 2.0]).requires_grad_()
    loss, metrics = ranking_reward_loss(scores, torch.tensor([0, 0]), torch.tensor([0, 0]), num_prompts=4)
    loss.backward()
    close(loss.detach(), 0)
    close(scores.grad, [0, 0])
    assert metrics["reward/accuracy"] == 0


def test_golden_ranking_equal_scores_are_not_accurate():
    scores, ranks = f64([1.0, 1.0]), torch.tensor([0, 1])
    assert ranking_reward_loss(scores, ranks, torch.tensor([0, 0]))[1]["reward/accuracy"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_ranking_of_two_is_pairwise_to_the_bit_with_every_option(dtype):
    """Loss, metrics and gradient: so one path can train pairs and rankings."""
    chosen, rejected, margin = torch.randn(3, 7).to(dtype)
    options = {"center_coef": 0.3, "label_smoothing": 0.2}
    outcomes = []
    for call in (
        lambda s: pairwise_reward_loss(s[:7], s[7:], num_pairs=9, margin=margin, **options),
        lambda s: ranking_reward_loss(
            s, torch.arange(14) // 7, torch.arange(14) % 7, num_prompts=9, margin=margin.repeat(2), **options
        ),
    ):
        scores = torch.cat([chosen, rejected]).requires_grad_()
        loss, metrics = call(scores)
        loss.backward()
        outcomes.append((metrics, scores.grad))
    (metrics, gradient), (expected, expected_gradient) = outcomes
    assert metrics.keys() == expected.keys()
    assert all(torch.equal(metrics[name], expected[name]) for name in expected)
    assert torch.equal(gradient, expected_gradient)


def test_golden_ranking_options_are_those_of_each_pair():
    """Prompt 0 has the pairs (2, 1), (2, -1) with margin 0.5 and (1, -1) with 0.25; prompt 1 the pair (0.5, 1.5)."""
    scores, ranks, groups = (
        f64([2.0, 1.0, -1.0, 0.5, 1.5]),
        torch.tensor([0, 1, 2, 0, 1]),
        torch.tensor([0, 0, 0, 1, 1]),
    )
    margin = f64([0.5, 0.25, 9.0, 0.0, 9.0])

    def loss(**options):
        return ranking_reward_loss(scores, ranks, groups, **options)[0]

    first = (minus_log_sigmoid(0.5) + minus_log_sigmoid(2.5) + minus_log_sigmoid(1.75)) / 3
    close(loss(margin=margin), (first + minus_log_sigmoid(-1.0)) / 2)
    smoothed = [0.9 * minus_log_sigmoid(d) + 0.1 * minus_log_sigmoid(-d) for d in (1.0, 3.0, 2.0, -1.0)]
    close(loss(label_smoothing=0.1), (sum(smoothed[:3]) / 3 + smoothed[3]) / 2)
    close(loss(center_coef=0.01) - loss(), 0.01 * ((3.0**2 + 1.0**2 + 0.0**2) / 3 + 2.0**2) / 2)
    metrics = ranking_reward_loss(scores, ranks, groups, margin=margin)[1]
    close(metrics["reward/margin"], ((1 + 3 + 2) / 3 - 1) / 2)


# Log-ratios to the reference: 0.5 and 1.5 where chosen; -0.25 and 2 where rejected. h = 0.75 and -0.5.
DPO = (f64([-10.0, -20.0]), f64([-12.25, -18.0]), f64([-10.5, -21.5]), f64([-12.0, -20.0]))
H = (0.75, -0.5)


def test_golden_dpo_loss():
    loss, metrics = dpo_loss(*DPO, beta=0.4)
    close(loss, (minus_log_sigmoid(0.4 * 0.75) + minus_log_sigmoid(0.4 * -0.5)) / 2)
    close(metrics["loss/dpo"], (minus_log_sigmoid(0.4 * 0.75) + minus_log_sigmoid(0.4 * -0.5)) / 2)
    close(metrics["reward/chosen"], 0.4 * (0.5 + 1.5) / 2)
    close(metrics["reward/rejected"], 0.4 * (-0.25 + 2.0) / 2)
    close(metrics["reward/margin"], 0.4 * (0.75 - 0.5) / 2)
    close(metrics["reward/accuracy"], 1 / 2)


def test_golden_dpo_loss_divides_by_the_count_handed_in():
    loss, metrics = dpo_loss(*DPO, beta=0.4, num_pairs=10)
    close(loss, (minus_log_sigmoid(0.4 * 0.75) + minus_log_sigmoid(0.4 * -0.5)) / 10)
    close(metrics["reward/chosen"], 0.4 * (0.5 + 1.5) / 10)
    close(metrics["reward/rejected"], 0.4 * (-0.25 + 2.0) / 10)
    close(metrics["reward/margin"], 0.4 * 0.25 / 10)
    close(metrics["reward/accuracy"], 1 / 10)


def test_golden_conservative_dpo_loss():
    smoothed = [0.9 * minus_log_sigmoid(0.4 * h) + 0.1 * minus_log_sigmoid(-0.4 * h) for h in H]
    close(dpo_loss(*DPO, beta=0.4, label_smoothing=0.1)[0], sum(smoothed) / 2)


def test_golden_ipo_loss():
    close(dpo_loss(*DPO, beta=0.4, kind="ipo")[0], ((0.75 - 1 / 0.8) ** 2 + (-0.5 - 1 / 0.8) ** 2) / 2)


def test_golden_hinge_loss():
    """The first pair has its margin (2 * 0.75 > 1) and costs nothing."""
    close(dpo_loss(*DPO, beta=2.0, kind="hinge")[0], (0 + (1 - 2.0 * -0.5)) / 2)
    close(dpo_loss(*DPO, beta=0.4, kind="hinge")[0], ((1 - 0.4 * 0.75) + (1 + 0.4 * 0.5)) / 2)


def test_golden_dpo_equal_ratios_are_half_right():
    assert dpo_loss(f64([-1.0]), f64([-2.0]), f64([-1.0]), f64([-2.0]), beta=0.1)[1]["reward/accuracy"] == 0.5


def test_golden_robust_dpo_loss():
    """Wrong labels with probability 0.1: (0.9 l(h) - 0.1 l(-h)) / 0.8, and not less than 0 alone in the mean."""
    unbiased = [(0.9 * minus_log_sigmoid(0.4 * h) - 0.1 * minus_log_sigmoid(-0.4 * h)) / 0.8 for h in H]
    close(dpo_loss(*DPO, beta=0.4, kind="robust", label_smoothing=0.1)[0], sum(unbiased) / 2)


TOKENS = {"chosen_tokens": torch.tensor([2, 3]), "rejected_tokens": torch.tensor([5, 4])}
PER_TOKEN = (0.5 / 2 + 0.25 / 5, 1.5 / 3 - 2.0 / 4)


def test_golden_length_normalised_dpo_loss():
    """Log-ratios over 2, 3, 5 and 4 tokens: h is 0.25 + 0.05, and 0.5 - 0.5, a tie."""
    loss, metrics = dpo_loss(*DPO, beta=5.0, **TOKENS)
    assert PER_TOKEN == (0.3, 0.0)
    close(loss, (minus_log_sigmoid(1.5) + math.log(2)) / 2)
    close(metrics["reward/chosen"], 5 * (0.25 + 0.5) / 2)
    close(metrics["reward/rejected"], 5 * (-0.05 + 0.5) / 2)
    close(metrics["reward/margin"], 5 * 0.3 / 2)
    close(metrics["reward/accuracy"], (1 + 0.5) / 2)


@pytest.mark.parametrize("kind", ["ipo", "hinge"])
def test_golden_every_kind_takes_lengths(kind):
    each = {"ipo": [(h - 1 / 10) ** 2 for h in PER_TOKEN], "hinge": [max(0, 1 - 5 * h) for h in PER_TOKEN]}[kind]
    close(dpo_loss(*DPO, beta=5.0, kind=kind, **TOKENS)[0], sum(each) / 2)


@pytest.mark.parametrize("given", TOKENS)
def test_dpo_refuses_lengths_of_one_side(given):
    with pytest.raises(ValueError, match="chosen_tokens and rejected_tokens go together"):
        dpo_loss(*DPO, beta=0.1, **{given: TOKENS[given]})


def test_robust_dpo_refuses_labels_that_say_nothing():
    with pytest.raises(ValueError, match=r"kind 'robust' needs label_smoothing below 0\.5, got 0\.5"):
        dpo_loss(*DPO, beta=0.1, kind="robust", label_smoothing=0.5)


def test_dpo_refuses_label_smoothing_that_it_would_ignore():
    for kind in ("ipo", "hinge"):
        with pytest.raises(ValueError, match=rf"dpo_loss: label_smoothing belongs to .* 'robust', got kind '{kind}'"):
            dpo_loss(*DPO, beta=0.1, kind=kind, label_smoothing=0.1)


def test_dpo_refuses_another_kind():
    """Past the run-time type check, which refuses it first in these tests."""
    with pytest.raises(ValueError, match="dpo_loss: kind is 'kto'; choose 'sigmoid', 'robust', 'ipo' or 'hinge'"):
        inspect.unwrap(dpo_loss)(*DPO, beta=0.1, kind="kto")


# -------------------------------------------------------------------------------------------------------- properties


@st.composite
def rankings(draw):
    n = draw(st.integers(2, 9))
    scores = draw(st.lists(st.floats(-5, 5), min_size=n, max_size=n))
    ranks = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    groups = draw(st.lists(st.sampled_from([0, 2, 5]), min_size=n, max_size=n))
    return scores, [0, 1, *ranks[2:]], [0, 0, *groups[2:]]


@given(rankings())
def test_property_ranking_reward_loss_equals_a_loop(drawn):
    scores, ranks, groups = drawn
    losses, accuracies = [], []
    for group in sorted(set(groups)):
        members = [i for i, g in enumerate(groups) if g == group]
        margins = [scores[i] - scores[j] for i in members for j in members if ranks[i] < ranks[j]]
        if margins:
            losses.append(sum(minus_log_sigmoid(d) for d in margins) / len(margins))
            accuracies.append(sum(d > 0 for d in margins) / len(margins))
    loss, metrics = ranking_reward_loss(f64(scores), torch.tensor(ranks), torch.tensor(groups))
    torch.testing.assert_close(loss, f64(sum(losses) / len(losses)), rtol=1e-9, atol=1e-9)
    expected = f64(sum(accuracies) / len(accuracies))
    torch.testing.assert_close(metrics["reward/accuracy"], expected, rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(*[st.floats(-5, 5)] * 4), min_size=1, max_size=5), st.floats(0.01, 2), st.floats(0, 0.49))
def test_property_pair_losses_equal_a_loop(rows, beta, smoothing):
    def smoothed(d):
        return (1 - smoothing) * minus_log_sigmoid(d) + smoothing * minus_log_sigmoid(-d)

    columns = [f64(list(column)) for column in zip(*rows, strict=True)]
    expected = sum(smoothed(c - r - 0.3) + 0.1 * (c + r) ** 2 for c, r, _, _ in rows) / len(rows)
    margin = torch.full_like(columns[0], 0.3)
    loss, _ = pairwise_reward_loss(*columns[:2], margin=margin, center_coef=0.1, label_smoothing=smoothing)
    torch.testing.assert_close(loss, f64(expected), rtol=1e-9, atol=1e-9)
    expected = sum(smoothed(beta * ((c - rc) - (r - rr))) for c, r, rc, rr in rows) / len(rows)
    loss, _ = dpo_loss(*columns, beta=beta, label_smoothing=smoothing)
    torch.testing.assert_close(loss, f64(expected), rtol=1e-9, atol=1e-9)
