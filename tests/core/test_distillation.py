"""Divergences of a student from its teacher on a vocabulary of five, by hand; zero probabilities; the sampled reward."""

import math

import pytest
import torch

from heedful.core import policy_gradient, same_top_token, teacher_advantages, teacher_divergence
from tensors import close, f64, logs, mask

LOG2 = math.log(2)
P, Q = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16), (1 / 8, 1 / 2, 1 / 8, 1 / 8, 1 / 8)
"""Student and teacher."""


def kl(p, q):
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x)


def mixed(beta, p=P, q=Q):
    return [(1 - beta) * x + beta * y for x, y in zip(p, q, strict=True)]


def slope(beta, logits=None, teacher=None, **options):
    """The derivative of the divergence by the student's logits."""
    logits = (logs(*P) if logits is None else logits).clone().requires_grad_()
    teacher_divergence(logits, logs(*Q) if teacher is None else teacher, beta=beta, **options).sum().backward()
    return logits.grad


def test_golden_reverse_kl():
    """1/2 log 4 + 1/4 log 1/2 + 0 + 2/16 log 1/2 = 5/8 log 2."""
    close(teacher_divergence(logs(*P), logs(*Q)), 5 / 8 * LOG2)
    close(teacher_divergence(logs(*P), logs(*Q), beta=1.0), 5 / 8 * LOG2)


def test_golden_forward_kl():
    """1/8 log 1/4 + 1/2 log 2 + 0 + 2/8 log 2 = 1/2 log 2."""
    close(teacher_divergence(logs(*P), logs(*Q), beta=0.0), LOG2 / 2)


def test_golden_jsd():
    """At 1/2 the mixture is 10, 12, 4, 3, 3 of 32; at 1/4 it is 26, 20, 8, 5, 5 of 64, and the teacher weighs 1/4."""
    half, quarter = [10 / 32, 12 / 32, 4 / 32, 3 / 32, 3 / 32], [26 / 64, 20 / 64, 8 / 64, 5 / 64, 5 / 64]
    close(teacher_divergence(logs(*P), logs(*Q), beta=0.5), (kl(Q, half) + kl(P, half)) / 2)
    close(teacher_divergence(logs(*P), logs(*Q), beta=0.25), kl(Q, quarter) / 4 + 3 * kl(P, quarter) / 4)


def test_golden_gradients():
    """Reverse KL: p (log p/q - KL); forward: p - q; JSD: (1 - beta) p (log p/m - KL(p || m))."""
    close(slope(1.0), f64([0.6875, -0.40625, -0.078125, -0.1015625, -0.1015625]) * LOG2)
    close(slope(0.0), [3 / 8, -1 / 4, 0, -1 / 16, -1 / 16])
    m = mixed(0.25)
    close(slope(0.25), [0.75 * x * (math.log(x / y) - kl(P, m)) for x, y in zip(P, m, strict=True)])


def test_golden_a_temperature_of_a_half_squares_the_odds_of_both():
    def squared(p):
        return [x * x / sum(y * y for y in p) for x in p]

    close(teacher_divergence(logs(*P), logs(*Q), temperature=0.5), kl(squared(P), squared(Q)))


def test_the_teacher_learns_nothing():
    student, teacher = logs(*P).requires_grad_(), logs(*Q).requires_grad_()
    teacher_divergence(student, teacher, beta=0.3).backward()
    assert student.grad is not None
    assert teacher.grad is None


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_gradcheck(beta):
    logits, teacher = torch.randn(3, 5).double().requires_grad_(), torch.randn(3, 5).double()
    assert torch.autograd.gradcheck(lambda x: teacher_divergence(x, teacher, beta=beta, temperature=0.7), logits)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_invariances(beta):
    """A constant added to logits changes nothing, nor do log-probs in their place; of one distribution from itself it is 0,
    and it is positive otherwise."""
    logits, teacher = torch.randn(200, 5).double(), torch.randn(200, 5).double()
    found = teacher_divergence(logits, teacher, beta=beta)
    assert (found > 0).all()
    close(teacher_divergence(logits + 7, teacher - 3, beta=beta), found)
    close(teacher_divergence(logits.log_softmax(-1), teacher.log_softmax(-1), beta=beta), found)
    close(teacher_divergence(logits, logits, beta=beta), torch.zeros(200))
    order = torch.randperm(5)
    close(teacher_divergence(logits[:, order], teacher[:, order], beta=beta), found)
    close(teacher_divergence(teacher, logits, beta=1 - beta), found)


def test_the_jsd_goes_to_zero_where_the_special_cases_are_kls():
    for beta, of_special in ((1e-6, 0.0), (1 - 1e-6, 1.0)):
        jsd = teacher_divergence(logs(*P), logs(*Q), beta=beta)
        torch.testing.assert_close(
            jsd * 1e6, teacher_divergence(logs(*P), logs(*Q), beta=of_special), rtol=1e-5, atol=0
        )


MASKED, FULL = f64([0.0, -math.inf, 0.0, 1.0, -math.inf]), f64([0.0, 1.0, 2.0, 3.0, -math.inf])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_golden_what_both_exclude_is_as_if_it_were_not_there(beta):
    """In value and gradient, and no gradient is NaN."""
    close(teacher_divergence(FULL, 2 * FULL, beta=beta), teacher_divergence(FULL[:4], 2 * FULL[:4], beta=beta))
    close(slope(beta, FULL, 2 * FULL)[:4], slope(beta, FULL[:4], 2 * FULL[:4]))
    assert slope(beta, FULL, 2 * FULL)[4] == 0


@pytest.mark.parametrize(("beta", "student", "teacher"), [(1.0, FULL, MASKED), (0.0, MASKED, FULL)])
def test_golden_an_infinite_divergence_is_infinite_and_without_gradient(beta, student, teacher):
    """Beside a row with a finite one, which keeps its gradient."""
    logits = torch.stack([student, FULL])
    teachers = torch.stack([teacher, 2 * FULL])
    assert teacher_divergence(logits, teachers, beta=beta)[0] == math.inf
    found = slope(beta, logits, teachers)
    assert not found[0].any()
    close(found[1], slope(beta, FULL, 2 * FULL))


@pytest.mark.parametrize(("beta", "student", "teacher"), [(0.0, FULL, MASKED), (1.0, MASKED, FULL)])
def test_golden_a_kl_to_a_wider_distribution_is_finite(beta, student, teacher):
    p, q = (x.softmax(-1).tolist() for x in (student, teacher))
    expected = kl(p, [max(x, 1e-300) for x in q]) if beta else kl(q, [max(x, 1e-300) for x in p])
    close(teacher_divergence(student, teacher, beta=beta), expected)
    assert slope(beta, student, teacher).isfinite().all()


def test_golden_the_jsd_of_distributions_without_a_common_token_is_its_largest():
    """-beta log beta - (1 - beta) log(1 - beta), and the student has no way to go."""
    one, other = f64([0.0, -math.inf]), f64([-math.inf, 0.0])
    close(teacher_divergence(one, other, beta=0.25), -0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    close(slope(0.25, one, other), [0, 0])
    assert slope(0.25, MASKED, FULL).isfinite().all()


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_a_beta_that_selects_no_divergence_is_refused(beta):
    with pytest.raises(ValueError, match=r"beta is .*; it must be from 0 \(forward KL\) to 1 \(reverse KL\)"):
        teacher_divergence(logs(*P), logs(*Q), beta=beta)


def test_golden_teacher_advantages():
    """The teacher gives twice, half and a quarter of the probability; padding counts as 0, whatever is in it."""
    student, teacher = logs(1 / 4, 1 / 2, 1 / 2, 1).unsqueeze(0), logs(1 / 2, 1 / 4, 1 / 8, 1).unsqueeze(0)
    teacher[0, 3] = math.nan
    found = teacher_advantages(student.requires_grad_(), teacher, mask("xxx."))
    close(found, [[LOG2, -LOG2, -2 * LOG2, 0]])
    assert not found.requires_grad


def of_sampled(ids, logits):
    """Advantages of sampled tokens, and the gradient of the policy-gradient objective of each by the logits."""
    logp, logq = logits.log_softmax(-1), logs(*Q)
    advantages = teacher_advantages(logp.detach()[ids].unsqueeze(0), logq[ids].unsqueeze(0), mask("x" * len(ids)))
    objective = policy_gradient(logp[ids].unsqueeze(0), advantages, mask("x" * len(ids))).objective[0]
    return torch.stack([torch.autograd.grad(one, logits, retain_graph=True)[0] for one in objective])


def test_identity_the_expected_policy_gradient_is_minus_that_of_the_reverse_kl():
    """Over all five tokens by their probabilities; and over 2,000 sampled ones within four standard errors."""
    each = of_sampled(torch.arange(5), logs(*P).requires_grad_())
    close((f64(P).unsqueeze(1) * each).sum(0), -slope(1.0))
    counts = torch.bincount(torch.multinomial(f64(P), 2000, True, generator=torch.Generator().manual_seed(7)))
    sampled = each.repeat_interleave(counts, dim=0)
    error = (sampled.mean(0) + slope(1.0)).abs()
    assert (error < 4 * sampled.std(0) / 2000**0.5).all()
    assert (4 * sampled.std(0) / 2000**0.5 < 0.2 * slope(1.0).abs().max()).all(), "an interval that could not fail"


def test_golden_same_top_token():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert same_top_token(logits, torch.tensor([[-1.0, 5.0, 4.9], [0.0, 1.0, -1.0]])).tolist() == [True, False]
