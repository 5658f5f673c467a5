"""Losses of the policy and the value function: numbers by hand, identities, gradients in closed form."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import (
    Reduction,
    a2c_policy_loss,
    cispo_policy_loss,
    positive_example_loss,
    ppo_policy_loss,
    sao_policy_loss,
    sft_loss,
    value_loss,
)
from losses import grpo_loss, sequence_policy_loss
from tensors import close, f64, logs, mask

# --------------------------------------------------------------------------------------------------------------- sft


def test_golden_sft_loss():
    loss, metrics = sft_loss(f64([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]]), mask("xx.", "x.."))
    close(loss, (1.0 + 2.0 + 0.5) / 3)
    close(metrics["loss/sft"], (1.0 + 2.0 + 0.5) / 3)


def test_golden_sft_loss_divides_by_the_count_handed_in():
    close(sft_loss(f64([-1.0, -2.0]), torch.tensor([True, True]), num_tokens=8)[0], (1.0 + 2.0) / 8)


# --------------------------------------------------------------------------------------------------------------- ppo


def test_golden_ppo_policy_loss_where_the_clip_binds():
    """Ratios 1.5, 0.5, 1.1: the first two are cut to 1.2 and 0.8, the third is inside."""
    new, a = logs(1.5, 0.5, 1.1), f64([2.0, -1.0, 3.0])
    loss, metrics = ppo_policy_loss(new, torch.zeros_like(new), a, torch.tensor([True] * 3), clip_range=0.2)
    close(loss, -(1.2 * 2.0 + 0.8 * -1.0 + 1.1 * 3.0) / 3)
    close(metrics["loss/policy"], -(1.2 * 2.0 + 0.8 * -1.0 + 1.1 * 3.0) / 3)
    close(metrics["policy/clip_frac"], 2 / 3)
    kl = (1.5 - 1 - math.log(1.5)) + (0.5 - 1 - math.log(0.5)) + (1.1 - 1 - math.log(1.1))
    close(metrics["policy/approx_kl"], kl / 3)


def test_golden_ppo_policy_loss_keeps_the_gradient_that_mends_a_mistake():
    """Ratios far out on the wrong side are not cut: the minimum takes the unclipped branch, and clip_frac is 0."""
    new, a = logs(1.5, 0.5), f64([-1.0, 2.0])
    loss, metrics = ppo_policy_loss(new, torch.zeros_like(new), a, torch.tensor([True] * 2), clip_range=0.2)
    close(loss, -(1.5 * -1.0 + 0.5 * 2.0) / 2)
    assert metrics["policy/clip_frac"] == 0


def test_golden_ppo_policy_loss_masks_and_counts():
    new, a = logs(1.5, 0.5, 3.0).view(1, 3), f64([[2.0, -1.0, 3.0]])
    loss, metrics = ppo_policy_loss(
        new, torch.zeros_like(new), a, mask("xx."), clip_range=0.2, reduction=Reduction(num_tokens=10)
    )
    close(loss, -(1.2 * 2.0 + 0.8 * -1.0) / 10)
    close(metrics["policy/clip_frac"], 2 / 10)
    close(metrics["policy/approx_kl"], ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 10)


def test_golden_ppo_policy_loss_with_a_higher_upper_bound():
    new, a = logs(1.5, 0.5, 1.25), f64([2.0, -1.0, 1.0])
    loss, metrics = ppo_policy_loss(
        new, torch.zeros_like(new), a, torch.tensor([True] * 3), clip_range=0.2, clip_range_high=0.3
    )
    close(loss, -(1.3 * 2.0 + 0.8 * -1.0 + 1.25 * 1.0) / 3)
    close(metrics["policy/clip_frac"], 2 / 3)


def test_golden_ppo_policy_loss_dual_clip():
    """Only where the advantage is negative, and only past c: -4 becomes -3; -2 and the positive ones stay."""
    new, a = logs(4.0, 2.0, 4.0, 0.5), f64([-1.0, -1.0, 1.0, 1.0])
    inside = torch.tensor([True] * 4)
    close(ppo_policy_loss(new, torch.zeros_like(new), a, inside, clip_range=0.2)[0], -(-4 - 2 + 1.2 + 0.5) / 4)
    loss, _ = ppo_policy_loss(new, torch.zeros_like(new), a, inside, clip_range=0.2, dual_clip=3.0)
    close(loss, -(-3 - 2 + 1.2 + 0.5) / 4)


def test_golden_ppo_clip_frac_does_not_count_ties():
    """An advantage of 0 makes both branches equal, wherever the ratio is."""
    new = logs(1.5, 0.5)
    metrics = ppo_policy_loss(new, torch.zeros_like(new), f64([0.0, 0.0]), torch.tensor([True] * 2), clip_range=0.2)[1]
    assert metrics["policy/clip_frac"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_ppo_gradient_is_zero_also_where_the_ratio_overflows(dtype):
    """exp(1000) is infinite; the clip binds, so the token counts 1.2 A and moves nothing (0 times infinity is NaN)."""
    new = torch.tensor([1000.0, 0.0], dtype=dtype, requires_grad=True)
    old, a = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    loss, _ = ppo_policy_loss(new, old, a, torch.tensor([True, True]), clip_range=0.2)
    loss.backward()
    close(loss.detach(), -(1.2 + 1) / 2, rtol=1e-6)
    close(new.grad, [0, -1 / 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_no_advantage_no_gradient_also_where_the_ratio_overflows(dtype):
    """Groups of equal scores have advantages of exactly 0: infinity times 0 would be NaN."""
    new = torch.tensor([[1000.0, 0.0]], dtype=dtype, requires_grad=True)
    old, inside = torch.zeros(1, 2, dtype=dtype), torch.tensor([[True, True]])
    for loss, _ in (
        ppo_policy_loss(new, old, torch.tensor([[0.0, 1.0]], dtype=dtype), inside, clip_range=0.2),
        sequence_policy_loss(new, old, torch.zeros(1, dtype=dtype), inside, clip_range=0.2),
    ):
        (gradient,) = torch.autograd.grad(loss, new)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert gradient[0, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_dual_clip_has_no_gradient_also_where_the_ratio_overflows(dtype):
    """The case that dual clip exists for: a bad token that became infinitely likely counts c A and moves nothing."""
    new = torch.tensor([1000.0, 0.0], dtype=dtype, requires_grad=True)
    old, a = torch.zeros(2, dtype=dtype), torch.tensor([-1.0, -1.0], dtype=dtype)
    loss, _ = ppo_policy_loss(new, old, a, torch.tensor([True, True]), clip_range=0.2, dual_clip=3.0)
    loss.backward()
    close(loss.detach(), (3.0 + 1.0) / 2)
    close(new.grad, [0, 1 / 2])


# --------------------------------------------------------------------------------------------------------------- a2c


def test_golden_a2c_policy_loss():
    loss, metrics = a2c_policy_loss(f64([[-1.0, -2.0, -9.0]]), f64([[0.5, -3.0, 9.0]]), mask("xx."))
    close(loss, -(0.5 * -1.0 + -3.0 * -2.0) / 2)
    close(metrics["loss/policy"], -(0.5 * -1.0 + -3.0 * -2.0) / 2)


def test_golden_a2c_policy_loss_divides_by_the_count_handed_in():
    close(
        a2c_policy_loss(f64([[-1.0, -2.0]]), f64([[0.5, -3.0]]), mask("xx"), reduction=Reduction(num_tokens=8))[0],
        -(-0.5 + 6.0) / 8,
    )


def test_golden_a2c_policy_loss_of_whole_responses():
    """The log-probs of responses are -3 and -1, their advantages 2 and -1 (those of their first tokens)."""
    new, a = f64([[-1.0, -2.0, 50.0], [-1.0, 60.0, 70.0]]), f64([[2.0, 5.0, 9.0], [-1.0, 9.0, 9.0]])
    loss, metrics = a2c_policy_loss(new, a, mask("xx.", "x.."), importance_level="sequence")
    close(loss, -(2.0 * -3.0 + -1.0 * -1.0) / 2)
    assert metrics.keys() == {"loss/policy"}


def test_golden_cispo_policy_loss():
    """Ratios 2 and 0.5 with bounds 0.2 and 0.28: weights 1.28 and 0.8; the second response token is padding."""
    new, old = f64([[-1.0, -2.0, 9.0]]), f64([[-1.0 - math.log(2), -2.0 + math.log(2), 0.0]])
    loss, metrics = cispo_policy_loss(
        new, old, f64([[1.0, -3.0, 9.0]]), mask("xx."), clip_range=0.2, clip_range_high=0.28
    )
    close(loss, -(1.28 * 1.0 * -1.0 + 0.8 * -3.0 * -2.0) / 2)
    close(metrics["policy/clip_frac"], 1.0)


def test_golden_sao_policy_loss():
    """Ratios 1.25, 0.5, 5.5 and 7 to the sampler, bounds 0.7 and 6 (reasoning): the second and the fourth count nothing, and
    the third is weighed by 5.5, though its advantage is negative."""
    new, a = (
        torch.cat([logs(1.25, 0.5, 5.5, 7.0), f64([9.0])]).unsqueeze(0).requires_grad_(),
        f64([[2.0, -1.0, -1.0, 3, 9]]),
    )
    loss, metrics = sao_policy_loss(new, torch.zeros_like(new), a, mask("xxxx."), clip_range=0.3, clip_range_high=5.0)
    close(loss.detach(), -(1.25 * 2.0 * math.log(1.25) + 5.5 * -1.0 * math.log(5.5)) / 4)
    close(metrics["loss/policy"], loss.detach())
    close(metrics["policy/clip_frac"], 2 / 4)
    close(metrics["policy/clip_frac_low"], 1 / 4)
    close(metrics["policy/clip_frac_high"], 1 / 4)
    close(torch.autograd.grad(loss, new)[0], [[-1.25 * 2.0 / 4, 0, 5.5 / 4, 0, 0]])


def test_golden_sao_policy_loss_has_one_bound_for_both_sides_unless_told():
    new, a = logs(1.25, 1.35), f64([2.0, 1.0])
    loss, _ = sao_policy_loss(new, torch.zeros_like(new), a, torch.tensor([True] * 2), clip_range=0.3)
    close(loss, -1.25 * 2.0 * math.log(1.25) / 2)


# -------------------------------------------------------------------------------------------------- positive examples

WRITTEN = f64([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0], [-4.0, -5.0, -6.0]])
"""The log-probs of responses of 2, 1 and 3 tokens."""
LENGTHS = mask("xx.", "x..", "xxx")


def test_golden_positive_example_loss():
    """Over the tokens of the correct responses alone, and divided by their number."""
    loss, metrics = positive_example_loss(WRITTEN, LENGTHS, torch.tensor([True, True, False]))
    close(loss, (1.0 + 2.0 + 0.5) / 3)
    close(metrics["loss/positive"], (1.0 + 2.0 + 0.5) / 3)
    close(positive_example_loss(WRITTEN, LENGTHS, torch.tensor([False, False, True]), num_tokens=8)[0], 15 / 8)


@pytest.mark.parametrize("num_tokens", [None, 0, torch.tensor(0)])
def test_golden_without_a_correct_response_the_loss_is_zero_and_so_is_its_gradient(num_tokens):
    new = WRITTEN.clone().requires_grad_()
    loss, metrics = positive_example_loss(new, LENGTHS, torch.tensor([False] * 3), num_tokens=num_tokens)
    loss.backward()
    assert loss == metrics["loss/positive"] == 0
    assert new.grad.tolist() == [[0.0] * 3] * 3


def test_identity_positive_example_loss_is_sft_on_the_correct_responses():
    correct = torch.tensor([True, False, True])
    expected, _ = sft_loss(WRITTEN[correct], LENGTHS[correct])
    assert torch.equal(positive_example_loss(WRITTEN, LENGTHS, correct)[0], expected)


def test_golden_ratio_metrics():
    """Ratios 0.5 (advantage -1), 2, 3 and 1 (advantage 1); a fifth token, whose ratio overflows, is padding."""

    def metrics_of(*rows, advantages):
        new = torch.cat(rows).unsqueeze(0)
        inside = torch.ones_like(new, dtype=torch.bool)
        inside[0, -1] = False
        return ppo_policy_loss(new, torch.zeros_like(new), f64([advantages]), inside, clip_range=0.2)[1]

    metrics = metrics_of(logs(0.5, 2.0, 3.0, 1.0), f64([1000.0]), advantages=[-1.0, 1.0, 1.0, 1.0, 1.0])
    close(metrics["policy/clip_frac"], 3 / 4)
    close(metrics["policy/clip_frac_low"], 1 / 4)
    close(metrics["policy/clip_frac_high"], 2 / 4)
    close(metrics["policy/ratio_max"], 3.0)
    close(metrics["policy/ratio_mean"], 6.5 / 4)
    close(metrics["policy/ratio_square"], (0.25 + 4.0 + 9.0 + 1.0) / 4)
    close(metrics_of(logs(0.5, 0.7), f64([0.0]), advantages=[1.0, 1.0, 1.0])["policy/ratio_max"], 0.7)
    close(metrics_of(f64([500.0, 0.0]), advantages=[1.0, 1.0])["policy/ratio_square"], math.exp(80.0))


# ------------------------------------------------------------------------------------------------------------- value


def test_golden_value_loss_takes_the_larger_square():
    """V 1.0 moved 0.5 from 0.5: cut to 0.7, further from 2.0. V 2.0 is within 0.2 of 2.1: plain."""
    values, old_values, returns = f64([[1.0, 2.0]]), f64([[0.5, 2.1]]), f64([[2.0, 0.0]])
    loss, metrics = value_loss(values, old_values, returns, mask("xx"), clip_range=0.2)
    close(loss, 0.5 * ((0.7 - 2.0) ** 2 + (2.0 - 0.0) ** 2) / 2)
    close(metrics["loss/value"], 0.5 * ((0.7 - 2.0) ** 2 + (2.0 - 0.0) ** 2) / 2)
    close(metrics["value/clip_frac"], 1 / 2)


def test_golden_value_loss_keeps_the_plain_square_where_it_is_larger():
    """V 3.0 overshot the return 1.0; cut to 0.2 it would look better than it is."""
    loss, metrics = value_loss(f64([[3.0]]), f64([[0.0]]), f64([[1.0]]), mask("x"), clip_range=0.2)
    close(loss, 0.5 * (3.0 - 1.0) ** 2)
    assert metrics["value/clip_frac"] == 0


def test_golden_value_loss_cuts_downward_moves_too():
    loss, metrics = value_loss(f64([[-1.0]]), f64([[0.0]]), f64([[-2.0]]), mask("x"), clip_range=0.2)
    close(loss, 0.5 * (-0.2 - -2.0) ** 2)
    assert metrics["value/clip_frac"] == 1


def test_golden_value_loss_without_clip():
    values, returns = f64([[1.0, 2.0, 9.0]]), f64([[2.0, -1.0, 0.0]])
    loss, metrics = value_loss(values, torch.zeros_like(values), returns, mask("xx."), clip_range=None)
    close(loss, 0.5 * (1.0 + 9.0) / 2)
    assert metrics["value/clip_frac"] == 0


def test_golden_value_loss_masks_and_counts():
    values, old_values, returns = f64([[1.0, 2.0]]), f64([[0.5, 2.1]]), f64([[2.0, 0.0]])
    loss, metrics = value_loss(values, old_values, returns, mask("x."), clip_range=0.2, num_tokens=10)
    close(loss, 0.5 * (0.7 - 2.0) ** 2 / 10)
    close(metrics["value/clip_frac"], 1 / 10)


# ---------------------------------------------------------------------------------------------------------- sequence


def test_golden_sequence_policy_loss():
    """Ratios of whole responses: 1.1 * 1.2 = 1.32, cut to 1.2; 0.9 * 0.9 = 0.81, inside."""
    new, inside = torch.stack([logs(1.1, 1.2, 5.0), logs(0.9, 0.9, 5.0)]), mask("xx.", "xx.")
    loss, metrics = sequence_policy_loss(new, torch.zeros_like(new), f64([2.0, -1.0]), inside, clip_range=0.2)
    close(loss, -(1.2 * 2.0 + 0.81 * -1.0) / 2)
    close(metrics["policy/clip_frac"], 1 / 2)
    close(metrics["policy/approx_kl"], ((1.32 - 1 - math.log(1.32)) + (0.81 - 1 - math.log(0.81))) / 2)


def test_golden_sequence_policy_loss_normalised_by_length():
    """The geometric mean of a response's ratios: sqrt(1.32) and the cube root of 0.7, both inside the bounds."""
    new = torch.stack([logs(1.1, 1.2, 5.0), logs(0.7, 1.0, 1.0)])
    loss, metrics = sequence_policy_loss(
        new, torch.zeros_like(new), f64([2.0, -1.0]), mask("xx.", "xxx"), clip_range=0.2, length_normalise=True
    )
    close(loss, -(math.sqrt(1.32) * 2.0 + 0.7 ** (1 / 3) * -1.0) / 2)
    assert metrics["policy/clip_frac"] == 0


def test_golden_sequence_policy_loss_bounds_and_count():
    new = torch.stack([logs(1.5), logs(0.5)])
    loss, metrics = sequence_policy_loss(
        new,
        torch.zeros_like(new),
        f64([2.0, -1.0]),
        mask("x", "x"),
        clip_range=0.2,
        clip_range_high=0.3,
        num_sequences=8,
    )
    close(loss, -(1.3 * 2.0 + 0.8 * -1.0) / 8)
    close(metrics["policy/clip_frac"], 2 / 8)


def test_golden_sequence_policy_loss_dual_clip():
    """Responses with ratios 2 * 2 = 4 and 2 and advantages -1: the first counts c A = -3, the second 2 A."""
    new = torch.stack([logs(2.0, 2.0), logs(2.0, 1.0)]).requires_grad_()
    options = {"clip_range": 0.2, "dual_clip": 3.0}
    loss, _ = sequence_policy_loss(new, torch.zeros(2, 2).double(), f64([-1.0, -1.0]), mask("xx", "xx"), **options)
    close(loss.detach(), (3.0 + 2.0) / 2)
    loss.backward()
    close(new.grad, [[0, 0], [2.0 / 2, 2.0 / 2]])


def test_golden_sequence_policy_loss_leaves_empty_rows_out():
    new = torch.stack([logs(1.1, 1.2), logs(5.0, 5.0)])
    loss, _ = sequence_policy_loss(new, torch.zeros_like(new), f64([2.0, -1.0]), mask("xx", ".."), clip_range=0.5)
    close(loss, -1.32 * 2.0)


def test_identity_sequence_gradient_is_zero_also_where_the_ratio_overflows():
    """Log-ratios sum over a response, so long responses get here."""
    new = torch.full((1, 200), 0.5, requires_grad=True)
    inside = torch.ones(1, 200, dtype=torch.bool)
    loss, _ = sequence_policy_loss(new, torch.zeros(1, 200), torch.ones(1), inside, clip_range=0.2)
    loss.backward()
    close(loss.detach(), -1.2, rtol=1e-6)
    close(new.grad, torch.zeros(1, 200))


# -------------------------------------------------------------------------------------------------------------- grpo

# Two responses of 2 and 1 tokens (lengths whose reciprocals are exact in every precision).
NEW = torch.stack([logs(1.5, 1.1), logs(0.5, 9.0)])
OLD = torch.zeros(2, 2, dtype=torch.float64)
REF = torch.stack([logs(3.0, 1.1), logs(1.0, 1.0)])
INSIDE = mask("xx", "x.")
A = f64([2.0, -1.0])
L = [1.2 * 2.0, 1.1 * 2.0, 0.8 * -1.0]  # the surrogate of each token at clip_range 0.2
D = [math.log(1.5 / 3.0), 0.0, math.log(0.5)]
K3 = [math.exp(-d) - 1 + d for d in D]
R_KL = [1.5 - 1 - math.log(1.5), 1.1 - 1 - math.log(1.1), 0.5 - 1 - math.log(0.5)]


def grpo(**options):
    return grpo_loss(NEW, OLD, REF, A, INSIDE, **options)


def test_golden_grpo_loss_averages_within_then_over_responses():
    loss, metrics = grpo()
    close(loss, -((L[0] + L[1]) / 2 + L[2]) / 2)
    close(metrics["loss/policy"], -((L[0] + L[1]) / 2 + L[2]) / 2)
    close(metrics["policy/clip_frac"], (1 / 2 + 1) / 2)
    close(metrics["policy/approx_kl"], ((R_KL[0] + R_KL[1]) / 2 + R_KL[2]) / 2)
    close(metrics["reference/kl"], ((K3[0] + K3[1]) / 2 + K3[2]) / 2)


def test_golden_grpo_loss_penalises_k3():
    close(grpo(kl_coef=0.04)[0], -((L[0] + L[1]) / 2 + L[2]) / 2 + 0.04 * ((K3[0] + K3[1]) / 2 + K3[2]) / 2)


def test_golden_grpo_loss_divides_by_the_sequences_handed_in():
    close(grpo(num_sequences=8)[0], -((L[0] + L[1]) / 2 + L[2]) / 8)


def test_golden_grpo_loss_over_tokens():
    """A count of 4: the responses of the step have four tokens, of which three are here."""
    loss, metrics = grpo(how="token", num_tokens=4, kl_coef=0.04)
    close(loss, -(sum(L) - 0.04 * sum(K3)) / 4)
    close(metrics["policy/clip_frac"], 2 / 4)
    close(metrics["policy/approx_kl"], sum(R_KL) / 4)
    close(metrics["reference/kl"], sum(K3) / 4)


def test_golden_grpo_loss_over_a_fixed_length():
    close(grpo(how="fixed", max_new_tokens=16)[0], -sum(L) / (2 * 16))
    close(grpo(how="fixed", max_new_tokens=16, num_sequences=4)[0], -sum(L) / (4 * 16))


def test_golden_grpo_loss_with_a_higher_upper_bound():
    close(grpo(high=0.25)[0], -((1.25 * 2.0 + 1.1 * 2.0) / 2 + 0.8 * -1.0) / 2)


@pytest.mark.parametrize(
    ("options", "divisor"),
    [({"how": "sequence"}, 2 * 3), ({"how": "token"}, 6), ({"how": "fixed", "max_new_tokens": 7}, 2 * 7)],
    ids=["sequence", "token", "fixed"],
)
def test_golden_grpo_loss_is_computed_in_float64_where_its_inputs_are(options, divisor):
    """Weights such as 1/3 have to be float64 too: in float32 they are wrong at the eighth digit."""
    new = torch.stack([logs(1.5, 1.1, 1.0), logs(0.5, 0.9, 1.0)])
    zeros = torch.zeros_like(new)
    loss, _ = grpo_loss(new, zeros, zeros, A, mask("xxx", "xxx"), clip_range=0.2, **options)
    close(loss, -(1.2 * 2 + 1.1 * 2 + 1.0 * 2 - 0.8 - 0.9 - 1.0) / divisor)


def test_golden_grpo_loss_leaves_empty_rows_out():
    loss, _ = grpo_loss(NEW, OLD, REF, A, mask("xx", ".."), clip_range=0.2)
    close(loss, -(L[0] + L[1]) / 2)


def test_grpo_refuses_a_fixed_length_that_is_missing():
    with pytest.raises(ValueError, match="Reduction: how='fixed' divides by max_new_tokens; pass it"):
        grpo(how="fixed")


def test_another_average_is_refused():
    with pytest.raises(ValueError, match="Reduction: how is 'batch'; choose 'sequence', 'token' or 'fixed'"):
        Reduction("batch").tokens(NEW, INSIDE)


# -------------------------------------------------------------------------------------------------------- properties


@st.composite
def batches(draw, tensors):
    rows, time = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    size = rows * time
    numbers = st.lists(st.floats(-3, 3), min_size=size, max_size=size)
    inside = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    inside[draw(st.integers(0, size - 1))] = True
    return *(f64(draw(numbers)).view(rows, time) for _ in range(tensors)), torch.tensor(inside).view(rows, time)


def clip(x, low, high):
    return min(max(x, low), high)


@given(batches(3), st.floats(0.01, 0.9), st.floats(0.01, 2), st.one_of(st.none(), st.floats(1.1, 5)))
def test_property_ppo_policy_loss_equals_a_loop(batch, low, high, dual_clip):
    new, old, advantages, inside = batch
    total = clipped = kl = 0.0
    for n, o, a in zip(new[inside].tolist(), old[inside].tolist(), advantages[inside].tolist(), strict=True):
        r = math.exp(n - o)
        plain, cut = r * a, clip(r, 1 - low, 1 + high) * a
        objective = min(plain, cut)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        total += objective
        clipped += cut < plain
        kl += r - 1 - (n - o)
    count = int(inside.sum())
    loss, metrics = ppo_policy_loss(
        new, old, advantages, inside, clip_range=low, clip_range_high=high, dual_clip=dual_clip
    )
    torch.testing.assert_close(loss, f64(-total / count), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(metrics["policy/approx_kl"], f64(kl / count), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(metrics["policy/clip_frac"], f64(clipped / count), rtol=1e-9, atol=1e-9)


@given(batches(3), st.one_of(st.none(), st.floats(0.01, 2)))
def test_property_value_loss_equals_a_loop(batch, clip_range):
    values, old_values, returns, inside = batch
    total = clipped = 0.0
    for v, o, r in zip(values[inside].tolist(), old_values[inside].tolist(), returns[inside].tolist(), strict=True):
        plain = cut = (v - r) ** 2
        if clip_range is not None:
            cut = (clip(v, o - clip_range, o + clip_range) - r) ** 2
        total += 0.5 * max(plain, cut)
        clipped += cut > plain
    count = int(inside.sum())
    loss, metrics = value_loss(values, old_values, returns, inside, clip_range=clip_range)
    torch.testing.assert_close(loss, f64(total / count), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(metrics["value/clip_frac"], f64(clipped / count), rtol=1e-9, atol=1e-9)


@given(batches(3), st.booleans())
def test_property_sequence_policy_loss_equals_a_loop(batch, length_normalise):
    new, old, advantages, inside = batch
    objectives = []
    for b in range(new.shape[0]):
        steps = inside[b].nonzero().flatten().tolist()
        if steps:
            d = sum((new[b, t] - old[b, t]).item() for t in steps) / (len(steps) if length_normalise else 1)
            a = advantages[b, 0].item()
            objectives.append(min(math.exp(d) * a, clip(math.exp(d), 0.8, 1.2) * a))
    loss, _ = sequence_policy_loss(
        new, old, advantages[:, 0], inside, clip_range=0.2, length_normalise=length_normalise
    )
    torch.testing.assert_close(loss, f64(-sum(objectives) / len(objectives)), rtol=1e-9, atol=1e-9)
