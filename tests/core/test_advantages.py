"""Per-token rewards, generalised advantage estimation, and advantages relative to a group."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import (
    adaptive_lambda,
    gae,
    group_advantages,
    kl_shaped_rewards,
    others_mean,
    response_rewards,
    rewards_to_go,
    rloo_advantages,
    tied_groups,
)
from tensors import close, f64, mask

# ---------------------------------------------------------------------------------------------------- shaped rewards

LOGPROBS = f64([[-1.0, -2.0, -0.5, -3.0], [-0.2, -0.4, -0.6, -0.8]])
REF_LOGPROBS = f64([[-1.5, -1.0, -0.75, -1.0], [-0.1, -0.5, -0.3, -1.8]])
SHORT_AND_LONG = mask("xxx.", "xxxx")


def test_golden_score_lands_on_the_last_real_token():
    """Differences of the first row: 0.5, -1, 0.25; of the second: -0.1, 0.1, -0.3, 1."""
    rewards = kl_shaped_rewards(f64([2.0, -1.0]), LOGPROBS, REF_LOGPROBS, SHORT_AND_LONG, kl_coef=0.1)
    expected = [
        [-0.1 * 0.5, -0.1 * -1.0, 2.0 - 0.1 * 0.25, 0],
        [-0.1 * -0.1, -0.1 * 0.1, -0.1 * -0.3, -1.0 - 0.1 * 1.0],
    ]
    close(rewards, expected)


def test_golden_score_lands_on_the_last_token_behind_a_hole():
    """A tool's tokens are not the response's: no reward on them, and the last response token keeps its score."""
    rewards = kl_shaped_rewards(f64([2.0, -1.0]), LOGPROBS, REF_LOGPROBS, mask("x.x.", ".x.x"), kl_coef=0.1)
    close(rewards, [[-0.1 * 0.5, 0, 2.0 - 0.1 * 0.25, 0], [0, -0.1 * 0.1, 0, -1.0 - 0.1 * 1.0]])


def test_golden_shaped_rewards_with_k2():
    rewards = kl_shaped_rewards(f64([2.0, -1.0]), LOGPROBS, REF_LOGPROBS, SHORT_AND_LONG, kl_coef=0.1, kind="k2")
    close(rewards[0], [-0.1 * 0.5 * 0.5**2, -0.1 * 0.5 * 1.0**2, 2.0 - 0.1 * 0.5 * 0.25**2, 0])


def test_golden_shaped_rewards_with_k3():
    rewards = kl_shaped_rewards(f64([2.0, -1.0]), LOGPROBS, REF_LOGPROBS, SHORT_AND_LONG, kl_coef=0.1, kind="k3")
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, math.exp(-0.25) - 1 + 0.25]
    close(rewards[0], [-0.1 * k3[0], -0.1 * k3[1], 2.0 - 0.1 * k3[2], 0])


def test_golden_dense_scores_are_added_token_by_token():
    dense = f64([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    rewards = kl_shaped_rewards(dense, LOGPROBS, REF_LOGPROBS, SHORT_AND_LONG, kl_coef=0.1)
    close(rewards[0], [1 - 0.1 * 0.5, 2 + 0.1 * 1.0, 3 - 0.1 * 0.25, 0])
    close(rewards[1], [5 + 0.1 * 0.1, 6 - 0.1 * 0.1, 7 + 0.1 * 0.3, 8 - 0.1 * 1.0])


def test_golden_no_penalty_leaves_the_score_alone():
    rewards = kl_shaped_rewards(f64([2.0, -1.0]), LOGPROBS, REF_LOGPROBS, SHORT_AND_LONG, kl_coef=0.0)
    close(rewards, [[0, 0, 2, 0], [0, 0, 0, -1]])


def test_golden_a_row_without_a_response_may_have_dense_scores():
    dense = f64([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    close(kl_shaped_rewards(dense, LOGPROBS, REF_LOGPROBS, mask("....", "x..."), kl_coef=0.0), [[0] * 4, [5, 0, 0, 0]])


def test_a_score_without_a_response_token_is_refused():
    with pytest.raises(ValueError, match="kl_shaped_rewards: a row has no response token"):
        kl_shaped_rewards(f64([2.0, -1.0]), LOGPROBS, REF_LOGPROBS, mask("xxx.", "...."), kl_coef=0.1)


# ----------------------------------------------------------------------------------------- the response as one action


def test_golden_response_rewards_stand_at_the_first_token():
    """A tool's tokens (the hole) and padding give nothing, and the first response token is where the mask begins."""
    rewards = f64([[1.0, 2.0, 3.0, 50.0], [70.0, 0.5, 90.0, -2.0]])
    close(response_rewards(rewards, mask("xxx.", ".x.x")), [[1 + 2 + 3, 0, 0, 0], [0, 0.5 - 2, 0, 0]])


def test_golden_response_rewards_are_computed_in_float32():
    """256 + 1 + 1 in bfloat16 would stay 256."""
    total = response_rewards(torch.tensor([[256.0, 1.0, 1.0]], dtype=torch.bfloat16), mask("xxx"))
    assert total.dtype == torch.float32
    assert total[0, 0] == 258


def test_invariance_response_rewards_under_poison_outside_the_mask():
    rewards = f64([[1.0, 2.0, math.nan, math.inf]])
    close(response_rewards(rewards, mask("xx..")), [[3, 0, 0, 0]])


# --------------------------------------------------------------------------------------------------------------- gae

REWARDS = f64([[1.0, 2.0, 3.0]])
VALUES = f64([[0.5, -0.25, 0.75]])


def test_golden_gae():
    d2 = 3.0 - 0.75
    d1 = 2.0 + 0.9 * 0.75 - -0.25
    d0 = 1.0 + 0.9 * -0.25 - 0.5
    a1 = d1 + 0.9 * 0.8 * d2
    a0 = d0 + 0.9 * 0.8 * a1
    advantages, returns = gae(REWARDS, VALUES, mask("xxx"), gamma=0.9, gae_lambda=0.8)
    close(advantages, [[a0, a1, d2]])
    close(returns, [[a0 + 0.5, a1 - 0.25, d2 + 0.75]])


def test_golden_gae_defaults_are_gamma_one_lambda_095():
    d2 = 3.0 - 0.75
    a1 = (2.0 + 0.75 + 0.25) + 0.95 * d2
    a0 = (1.0 - 0.25 - 0.5) + 0.95 * a1
    close(gae(REWARDS, VALUES, mask("xxx"))[0], [[a0, a1, d2]])


def test_golden_gae_bootstraps_nothing_from_right_padding():
    """V after the last response token is 0, whatever the padded position holds."""
    a1 = 2.0 - -0.25
    a0 = (1.0 + 0.9 * -0.25 - 0.5) + 0.9 * 0.8 * a1
    advantages, returns = gae(REWARDS, VALUES, mask("xx."), gamma=0.9, gae_lambda=0.8)
    close(advantages, [[a0, a1, 0]])
    close(returns, [[a0 + 0.5, 2.0, 0]])


def test_golden_gae_ignores_left_padding():
    a2 = 3.0 - 0.75
    a1 = (2.0 + 0.9 * 0.75 + 0.25) + 0.9 * 0.8 * a2
    advantages, returns = gae(REWARDS, VALUES, mask(".xx"), gamma=0.9, gae_lambda=0.8)
    close(advantages, [[0, a1, a2]])
    close(returns, [[0, a1 - 0.25, 3.0]])


def test_golden_gae_carries_value_and_advantage_across_a_hole():
    """Token 0 is followed by token 2: its next value is V_2, and one factor of gamma lambda lies between them."""
    a2 = 3.0 - 0.75
    a0 = (1.0 + 0.9 * 0.75 - 0.5) + 0.9 * 0.8 * a2
    advantages, returns = gae(REWARDS, VALUES, mask("x.x"), gamma=0.9, gae_lambda=0.8)
    close(advantages, [[a0, 0, a2]])
    close(returns, [[a0 + 0.5, 0, 3.0]])


def test_golden_gae_of_an_empty_row_is_zero():
    advantages, returns = gae(REWARDS, VALUES, mask("..."))
    close(advantages, [[0, 0, 0]])
    close(returns, [[0, 0, 0]])


def test_golden_gae_half_precision_is_computed_in_float32():
    advantages, returns = gae(
        torch.tensor([[256.0, 1.0]]).bfloat16(), torch.zeros(1, 2).bfloat16(), mask("xx"), gae_lambda=1.0
    )
    assert advantages.dtype == returns.dtype == torch.float32
    close(advantages, [[257, 1]])


def random_episode(rows=5, time=8, ragged=True):
    rewards, values = torch.randn(2, rows, time, dtype=torch.float64)
    inside = torch.rand(rows, time) < 0.7 if ragged else torch.ones(rows, time, dtype=torch.bool)
    inside[0] = True
    return rewards, values, inside


def test_identity_gae_equals_the_double_sum_of_its_docstring():
    """``A_t = sum_{k >= t} (gamma gae_lambda)^(k - t) delta_k``, evaluated as written."""
    rewards, values, inside = random_episode(ragged=False)
    padded = torch.nn.functional.pad(values, (0, 1))
    delta = rewards + 0.9 * padded[:, 1:] - values
    unrolled = [sum((0.9 * 0.8) ** (k - t) * delta[:, k] for k in range(t, 8)) for t in range(8)]
    close(gae(rewards, values, inside, gamma=0.9, gae_lambda=0.8)[0], torch.stack(unrolled, 1))


def test_identity_gae_of_any_length_is_its_recursion():
    """Lengths at powers of two and beside them, where a sum by doubling would lose its ends."""
    for time in (1, 2, 3, 4, 5, 8, 9, 16, 17, 63, 64, 65):
        rewards, values, inside = random_episode(rows=2, time=time, ragged=False)
        advantages, _ = gae(rewards, values, inside, gamma=0.99, gae_lambda=0.9)
        following = advantage = torch.zeros(2, dtype=torch.float64)
        expected = torch.zeros_like(rewards)
        for t in reversed(range(time)):
            advantage = rewards[:, t] + 0.99 * following - values[:, t] + 0.99 * 0.9 * advantage
            following = values[:, t]
            expected[:, t] = advantage
        close(advantages, expected)


def test_golden_gae_of_two_dtypes():
    """Scores in float32 and a critic in float64, or the reverse: the wider one counts."""
    a1 = 2.0 - -0.25
    for rewards, values in ((REWARDS.float(), VALUES), (REWARDS, VALUES.float())):
        advantages, returns = gae(rewards, values, mask("xx."), gamma=0.5, gae_lambda=0.5)
        assert advantages.dtype == returns.dtype == torch.float64
        close(advantages, [[1.0 + 0.5 * -0.25 - 0.5 + 0.5 * 0.5 * a1, a1, 0]])


def test_golden_gae_with_a_lambda_for_each_row():
    """The response of `test_golden_gae` three times, each with its own lambda."""
    d2, d1, d0 = 3.0 - 0.75, 2.0 + 0.9 * 0.75 - -0.25, 1.0 + 0.9 * -0.25 - 0.5
    expected = []
    for gae_lambda in (0.8, 0.5, 0.0):
        a1 = d1 + 0.9 * gae_lambda * d2
        expected.append([d0 + 0.9 * gae_lambda * a1, a1, d2])
    advantages, returns = gae(
        REWARDS.expand(3, 3), VALUES.expand(3, 3), mask("xxx", "xxx", "xxx"), gamma=0.9, gae_lambda=f64([0.8, 0.5, 0.0])
    )
    close(advantages, expected)
    close(returns, f64(expected) + VALUES)


def test_golden_gae_of_lambdas_in_half_precision():
    """13/16 and its powers are exact in float32. In bfloat16 the fourth, 28561/65536, is not."""
    rewards, gae_lambda = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]), torch.tensor([13 / 16], dtype=torch.bfloat16)
    advantages, _ = gae(rewards, torch.zeros(1, 5), mask("xxxxx"), gae_lambda=gae_lambda)
    assert advantages.tolist() == [[(13 / 16) ** k for k in (4, 3, 2, 1, 0)]]


def test_invariance_gae_of_each_row_alone():
    """Bit for bit: a response's advantages do not depend on what else is in the batch. With one lambda for all rows too."""
    rewards, values, inside = (x if x.dtype == torch.bool else x.float() for x in random_episode(rows=50, time=33))
    lambdas = torch.rand(50)
    lambdas[:2] = torch.tensor([0.0, 1.0])
    whole = gae(rewards, values, inside, gamma=0.99, gae_lambda=lambdas)
    for row in range(50):
        one = slice(row, row + 1)
        given = rewards[one], values[one], inside[one]
        alone = gae(*given, gamma=0.99, gae_lambda=lambdas[one])
        same = gae(*given, gamma=0.99, gae_lambda=float(lambdas[row]))
        for a, b, w in zip(alone, same, whole, strict=True):
            assert torch.equal(a, w[one])
            torch.testing.assert_close(b, w[one], rtol=1e-5, atol=1e-5)  # its powers are of float64


# ---------------------------------------------------------------------------------------------------- lambda by length


def test_golden_adaptive_lambda():
    """1 - 1 / (0.05 l): 1 - 1/5, 1 - 1/20, 1 - 1/50. At 20 actions it is exactly 0, and below 20 not negative."""
    lambdas = adaptive_lambda(torch.tensor([1, 5, 20, 100, 400, 1000]), alpha=0.05)
    close(lambdas[3:], [0.8, 0.95, 0.98], rtol=1e-6)  # float32
    assert lambdas[:3].tolist() == [0.0, 0.0, 0.0]
    assert lambdas.dtype == torch.float32


def test_golden_adaptive_lambda_for_short_responses():
    """1 - 1/30. A response without an action counts as one of one: 1 - 1/1.5."""
    close(adaptive_lambda(torch.tensor([20, 1, 0]), alpha=1.5), [0.9 + 1 / 15, 1 / 3, 1 / 3], rtol=1e-6)  # float32


@pytest.mark.parametrize(("alpha", "length"), [(0.05, 100), (0.5, 20), (1.5, 20)])
def test_identity_the_weights_of_adaptive_lambda_add_up_to_a_share_of_the_length(alpha, length):
    """sum_k lambda^k = alpha l."""
    (gae_lambda,) = adaptive_lambda(torch.tensor([length]), alpha=alpha).tolist()
    assert sum(gae_lambda**k for k in range(2000)) == pytest.approx(alpha * length, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, -0.5, math.nan])
def test_an_alpha_that_gives_no_lambda_is_refused(alpha):
    with pytest.raises(ValueError, match=f"^adaptive_lambda: alpha must be above 0, got {alpha}$"):
        adaptive_lambda(torch.tensor([20]), alpha=alpha)


# ------------------------------------------------------------------------------------------------------- rewards to go


def test_golden_rewards_to_go():
    """2 + 3/2 and 1 + 3.5/2; in the second row the hole is no step: 0.5 - 2/2."""
    rewards, inside = f64([[1.0, 2.0, 3.0, 50.0], [70.0, 0.5, 90.0, -2.0]]), mask("xxx.", ".x.x")
    close(rewards_to_go(rewards, inside, gamma=0.5), [[2.75, 3.5, 3, 0], [0, -0.5, 0, -2]])
    close(rewards_to_go(rewards, inside), [[6, 5, 3, 0], [0, -1.5, 0, -2]])


def test_golden_rewards_to_go_are_computed_in_float32():
    """256 + 1 + 1 in bfloat16 would stay 256."""
    to_go = rewards_to_go(torch.tensor([[256.0, 1.0, 1.0]], dtype=torch.bfloat16), mask("xxx"))
    assert to_go.dtype == torch.float32
    assert to_go.tolist() == [[258, 2, 1]]


def test_identity_rewards_to_go_are_the_returns_of_gae_at_lambda_1():
    """Whatever the values."""
    rewards, values, inside = random_episode(rows=20)
    for said in (values, 100 * values, torch.zeros_like(values)):
        close(rewards_to_go(rewards, inside, gamma=0.9), gae(rewards, said, inside, gamma=0.9, gae_lambda=1.0)[1])


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_invariance_gae_and_rewards_under_poison_outside_the_mask(poison):
    rewards, values, inside = random_episode()
    clean = gae(rewards, values, inside)
    dirty = gae(rewards.masked_fill(~inside, poison), values.masked_fill(~inside, poison), inside)
    for d, c in zip(dirty, clean, strict=True):
        assert torch.equal(d, c)
    inside[:, 3] = True
    shaped = kl_shaped_rewards(f64([1.0, 2, 3, 4, 5]), rewards, values, inside, kl_coef=0.2)
    rewards, values = rewards.masked_fill(~inside, poison), values.masked_fill(~inside, poison)
    assert torch.equal(kl_shaped_rewards(f64([1.0, 2, 3, 4, 5]), rewards, values, inside, kl_coef=0.2), shaped)


def test_identity_no_gradient_flows_through_rewards_or_advantages():
    rewards, values, inside = random_episode()
    rewards.requires_grad_()
    values.requires_grad_()
    inside[:, 0] = True
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True)
    outputs = [*gae(rewards, values, inside), kl_shaped_rewards(scores[:5], rewards, values, inside, kl_coef=0.1)]
    outputs += [f(scores, group_size=3) for f in (group_advantages, rloo_advantages, others_mean)]
    outputs.append(rewards_to_go(rewards, inside))
    assert not any(output.requires_grad for output in outputs)


# ------------------------------------------------------------------------------------------------------------ groups

SCORES = f64([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])


def test_golden_group_advantages_divide_by_the_sample_standard_deviation():
    """Mean 3, deviations -2, -1, 3: variance (4 + 1 + 9) / 2. The group of equal scores is exactly 0."""
    std = math.sqrt((4 + 1 + 9) / 2)
    advantages = group_advantages(SCORES, group_size=3)
    close(advantages, [-2 / (std + 1e-4), -1 / (std + 1e-4), 3 / (std + 1e-4), 0, 0, 0])
    assert (advantages[3:] == 0).all()


def test_golden_group_advantages_eps():
    std = math.sqrt((4 + 1 + 9) / 2)
    close(group_advantages(SCORES, group_size=3, eps=0.5)[:3], [-2 / (std + 0.5), -1 / (std + 0.5), 3 / (std + 0.5)])


def test_golden_group_advantages_unscaled():
    close(group_advantages(SCORES, group_size=3, scale="none"), [-2, -1, 3, 0, 0, 0])


def test_golden_group_of_equal_scores_is_exactly_zero():
    """The mean of seven times 0.1 is not 0.1 in binary; divided by eps, the dust would be a gradient."""
    assert (group_advantages(f64([0.1] * 7), group_size=7, eps=1e-30) == 0).all()
    assert (group_advantages(torch.full((7,), 0.1), group_size=7, scale="none") == 0).all()
    assert (rloo_advantages(f64([0.1] * 3), group_size=3) == 0).all()


def test_golden_groups_are_consecutive_rows():
    close(group_advantages(f64([0.0, 2.0, 10.0, 14.0]), group_size=2, scale="none"), [-1, 1, -2, 2])
    close(rloo_advantages(f64([0.0, 2.0, 10.0, 14.0]), group_size=2), [-2, 2, -4, 4])


def test_golden_rloo_advantages():
    close(rloo_advantages(SCORES, group_size=3), [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2, 0, 0, 0])


def test_golden_others_mean():
    """What RLOO subtracts, of equal scores too."""
    others = others_mean(SCORES, group_size=3)
    close(others, [(2 + 6) / 2, (1 + 6) / 2, (1 + 2) / 2, 4, 4, 4])
    close(SCORES - others, rloo_advantages(SCORES, group_size=3))
    assert others_mean(torch.tensor([256.0, 1, 1]).bfloat16(), group_size=3).tolist() == [1.0, 128.5, 128.5]


def test_golden_tied_groups():
    assert tied_groups(f64([1, 2, 3, 3, 0.1, 0.1]), group_size=2).tolist() == [False, True, True]
    assert tied_groups(f64([1, 1, 2, 3, 3, 3]), group_size=3).tolist() == [False, True]


def test_golden_group_functions_compute_half_precision_in_float32():
    scores = torch.tensor([256.0, 1.0]).bfloat16()
    close(rloo_advantages(scores, group_size=2), [255, -255])
    close(group_advantages(scores, group_size=2, scale="none"), [127.5, -127.5])
    assert rloo_advantages(scores, group_size=2).dtype == torch.float32


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages, others_mean], ids=lambda f: f.__name__)
def test_groups_that_cannot_be_compared_are_refused(function):
    with pytest.raises(ValueError, match=f"{function.__name__}: group_size is 1; a group needs at least 2"):
        function(SCORES, group_size=1)
    with pytest.raises(ValueError, match=f"{function.__name__}: 6 scores cannot be split into groups of 4"):
        function(SCORES, group_size=4)


def test_another_scale_is_refused():
    """Past the run-time type check, which refuses it first in these tests."""
    with pytest.raises(ValueError, match="group_advantages: scale is 'batch'; choose 'std' or 'none'"):
        inspect.unwrap(group_advantages)(SCORES, group_size=3, scale="batch")


# -------------------------------------------------------------------------------------------------------- properties


@st.composite
def episodes(draw):
    rows, time = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    size = rows * time
    numbers = st.lists(st.floats(-10, 10), min_size=size, max_size=size)
    inside = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    tensors = [f64(draw(numbers)).view(rows, time) for _ in range(2)]
    return *tensors, torch.tensor(inside).view(rows, time)


@given(episodes(), st.floats(0, 1), st.floats(0, 1))
def test_property_gae_equals_a_double_sum_over_response_tokens(drawn, gamma, gae_lambda):
    rewards, values, inside = drawn
    expected = torch.zeros_like(rewards)
    for b in range(rewards.shape[0]):
        steps = [t for t in range(rewards.shape[1]) if inside[b, t]]
        v = [values[b, t].item() for t in steps] + [0.0]
        delta = [rewards[b, t].item() + gamma * v[i + 1] - v[i] for i, t in enumerate(steps)]
        for i, t in enumerate(steps):
            expected[b, t] = sum((gamma * gae_lambda) ** (k - i) * delta[k] for k in range(i, len(steps)))
    advantages, returns = gae(rewards, values, inside, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, torch.where(inside, expected + values, 0.0), rtol=1e-9, atol=1e-9)


@given(episodes(), st.floats(0, 1), st.sampled_from(["k1", "k2", "k3"]))
def test_property_shaped_rewards_equal_a_loop(drawn, kl_coef, kind):
    logprobs, ref_logprobs, inside = drawn
    inside[:, 0] |= ~inside.any(dim=1)
    estimate = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[kind]
    scores = [0.5 - b for b in range(len(inside))]
    expected = torch.zeros_like(logprobs)
    for b, score in enumerate(scores):
        for t in range(inside.shape[1]):
            if inside[b, t]:
                expected[b, t] = -kl_coef * estimate((logprobs[b, t] - ref_logprobs[b, t]).item())
                if not inside[b, t + 1 :].any():
                    expected[b, t] += score
    rewards = kl_shaped_rewards(f64(scores), logprobs, ref_logprobs, inside, kl_coef=kl_coef, kind=kind)
    torch.testing.assert_close(rewards, expected, rtol=1e-9, atol=1e-9)


@given(st.integers(1, 3), st.integers(2, 5), st.data())
def test_property_group_advantages_equal_a_loop(num_groups, k, data):
    scores = data.draw(
        st.lists(st.integers(-8, 8).map(lambda i: i / 4), min_size=num_groups * k, max_size=num_groups * k)
    )
    expected, leave_one_out = [], []
    for g in range(num_groups):
        group = scores[g * k : (g + 1) * k]
        mean = sum(group) / k
        std = math.sqrt(sum((s - mean) ** 2 for s in group) / (k - 1))
        expected += [(s - mean) / (std + 1e-4) if max(group) > min(group) else 0.0 for s in group]
        leave_one_out += [s - (sum(group) - s) / (k - 1) for s in group]
    close(group_advantages(f64(scores), group_size=k), expected)
    close(rloo_advantages(f64(scores), group_size=k), leave_one_out)
