"""Log-probabilities of tokens, entropy, and estimates of the KL divergence."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import entropy, kl_estimate, response_kl, token_logprobs
from tensors import close, f64

LOG3 = math.log(3)
KINDS = ["k1", "k2", "k3"]


def test_golden_token_logprobs():
    """Logits 0 and log 3 are probabilities 1/4 and 3/4."""
    logits = f64([[0.0, LOG3], [0.0, LOG3], [LOG3, 0.0]])
    close(token_logprobs(logits, torch.tensor([0, 1, 1])), [math.log(1 / 4), math.log(3 / 4), math.log(1 / 4)])


def test_golden_token_logprobs_at_temperature_one_half():
    """Dividing by 1/2 squares the odds: 1 to 9."""
    logits = f64([[0.0, LOG3], [0.0, LOG3]])
    close(token_logprobs(logits, torch.tensor([0, 1]), temperature=0.5), [math.log(1 / 10), math.log(9 / 10)])


def test_golden_token_logprobs_of_uniform_logits():
    close(token_logprobs(f64([[7.0] * 5]), torch.tensor([3])), [-math.log(5)])


def test_golden_token_logprobs_beside_a_masked_vocabulary():
    logits = f64([[0.0, -math.inf, LOG3]])
    close(token_logprobs(logits, torch.tensor([2])), [math.log(3 / 4)])
    assert token_logprobs(logits, torch.tensor([1])) == -math.inf


def test_golden_token_logprobs_of_huge_logits():
    """exp(1000) overflows; the difference does not."""
    close(token_logprobs(f64([[1000.0, 1000.0 + LOG3]]), torch.tensor([0])), [-math.log(4)])


def test_golden_entropy():
    close(entropy(f64([0.0, LOG3])), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


def test_golden_entropy_at_temperature_one_half():
    close(entropy(f64([[0.0, LOG3]]), temperature=0.5), [-(0.1 * math.log(0.1) + 0.9 * math.log(0.9))])


def test_golden_entropy_of_a_uniform_distribution():
    close(entropy(torch.full((2, 3, 7), 1.5, dtype=torch.float64)), [[math.log(7)] * 3] * 2)


def test_golden_entropy_of_a_certain_token_is_zero():
    close(entropy(f64([0.0, -1e4, -math.inf])), 0)


def test_golden_entropy_with_masked_vocabulary():
    """Two equal tokens left: log 2. The gradient is finite, and 0 on what is masked."""
    logits = f64([0.4, -math.inf, 0.4, -math.inf]).requires_grad_()
    h = entropy(logits)
    h.backward()
    close(h.detach(), math.log(2))
    close(logits.grad, [0, 0, 0, 0])
    uneven = f64([0.0, -math.inf, LOG3]).requires_grad_()
    entropy(uneven).backward()
    h = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    close(uneven.grad, [-0.25 * (math.log(0.25) + h), 0, -0.75 * (math.log(0.75) + h)])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("k2", [0.5 * 0.5**2, 0.5 * 1.0**2, 0.0]),
        ("k3", [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0]),
    ],
)
def test_golden_kl_estimate(kind, expected):
    close(kl_estimate(f64([-1.0, -2.0, -0.3]), f64([-1.5, -1.0, -0.3]), kind=kind), expected)


@pytest.mark.parametrize(("kind", "expected"), [("k1", [-0.5, 0.25]), ("k2", [0.625, 0.03125])])
def test_golden_response_kl(kind, expected):
    """d = 0.5, -1 | 0.25, and what is outside the mask (a log-prob of 9) counts nowhere."""
    logprobs, mask = f64([[-1.0, -2.0], [-0.75, 9.0]]), torch.tensor([[True, True], [True, False]])
    close(response_kl(logprobs, f64([[-1.5, -1.0], [-1.0, 0.0]]), mask, kind=kind), expected)


def test_golden_k3_times_the_ratio():
    """Ratios of 3/2, 1/2 and 1; the reference is 2, 1/2 and 1 times as likely: k3 is 2 - 1 - log 2, 1/2 - 1 + log 2, 0."""
    new, old, ref = (f64(p).log() for p in ([0.3, 0.2, 0.5], [0.2, 0.4, 0.5], [0.6, 0.1, 0.5]))
    expected = [1.5 * (1 - math.log(2)), 0.5 * (math.log(2) - 0.5), 0.0]
    close(kl_estimate(new, ref, kind="k3", old_logprobs=old), expected)


def test_golden_k3_of_a_tiny_difference_keeps_its_digits():
    """exp(-d) - 1 cancels in float32 at d = 1e-4: the value d^2 / 2 would have one digit left."""
    d = torch.tensor([1e-4])
    close(kl_estimate(d, torch.zeros(1), kind="k3"), [0.5e-8], rtol=1e-2)


def test_golden_half_precision_is_computed_in_float32():
    logits = torch.randn(4, 33).bfloat16()
    ids = torch.randint(33, (4,))
    for temperature in (1.0, 0.7):
        exact = token_logprobs(logits.float(), ids, temperature=temperature)
        assert torch.equal(token_logprobs(logits, ids, temperature=temperature), exact)
        assert torch.equal(entropy(logits, temperature=temperature), entropy(logits.float(), temperature=temperature))
    assert exact.dtype == torch.float32
    a, b = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0078125]).bfloat16()
    for kind in KINDS:
        assert torch.equal(kl_estimate(a, b, kind=kind), kl_estimate(a.float(), b.float(), kind=kind))
        assert kl_estimate(a, b, kind=kind).dtype == torch.float32


def test_golden_float64_stays_float64():
    logits = torch.randn(2, 5, dtype=torch.float64)
    assert token_logprobs(logits, torch.tensor([1, 2])).dtype == torch.float64
    assert entropy(logits).dtype == torch.float64
    assert all(kl_estimate(logits, logits, kind=kind).dtype == torch.float64 for kind in KINDS)


def test_identity_k3_times_the_ratio_has_the_gradient_ratio_times_d():
    """d(r k3) = r k3 + r (1 - exp(-d)) = r d: at ratio 1 that of k2. The old log-probs are constants."""
    new, ref, old = (torch.randn(50, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kl_estimate(new, ref, kind="k3", old_logprobs=old).sum().backward()
    close(new.grad, (new - old).exp().detach() * (new - ref).detach())
    assert old.grad is None
    (on_policy,) = torch.autograd.grad(kl_estimate(new, ref, kind="k3", old_logprobs=new.detach()).sum(), new)
    (of_k2,) = torch.autograd.grad(kl_estimate(new, ref, kind="k2").sum(), new)
    close(on_policy, of_k2)


@pytest.mark.parametrize(
    ("kind", "kl"),
    [
        ("k1", lambda logp, _: 0 * logp),
        ("k2", lambda logp, logq: logp.exp() * (logp - logq)),
        ("k3", lambda logp, logq: logq.exp() * (logq - logp)),
    ],
)
def test_identity_the_expected_gradient_on_policy(kind, kl):
    """Of k1 zero, of k2 that of KL(policy, reference), of k3 that of KL(reference, policy): over the whole vocabulary."""
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    logp, logq = torch.log_softmax(logits, dim=0), torch.log_softmax(torch.randn(7, dtype=torch.float64), dim=0)
    estimate = (logp.exp().detach() * kl_estimate(logp, logq, kind=kind)).sum()
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(kl(logp, logq).sum(), logits)
    close(found, expected)


def test_identity_the_ratio_makes_value_and_gradient_those_of_the_kl_off_policy():
    """Over the whole vocabulary, weighted by another policy's probabilities. Without the ratio both are wrong."""
    logits, others, ref = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(3))
    logp, logq, old = (torch.log_softmax(x, dim=0) for x in (logits, ref.detach(), others.detach()))
    kl = (logp.exp() * (logp - logq)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for old_logprobs, is_right in ((old, True), (None, False)):
        estimate = (old.exp() * kl_estimate(logp, logq, kind="k3", old_logprobs=old_logprobs)).sum()
        (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12) is is_right
        assert torch.allclose(estimate, kl, rtol=1e-9) is is_right


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck_token_logprobs(temperature):
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(5, (2, 3))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, temperature=temperature), (logits,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck_entropy(temperature):
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: entropy(x, temperature=temperature), (logits,))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_kl_estimate(kind):
    a, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: kl_estimate(a, b, kind=kind), (a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_kl_estimate_times_the_ratio(kind):
    a, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    old = torch.randn(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: kl_estimate(a, b, kind=kind, old_logprobs=old), (a, b))


@st.composite
def logits_and_ids(draw):
    rows, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    logits = draw(st.lists(st.floats(-30, 30), min_size=rows * vocab, max_size=rows * vocab))
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))
    return f64(logits).view(rows, vocab), torch.tensor(ids), draw(st.sampled_from([0.5, 0.7, 1.0, 2.0]))


@given(logits_and_ids())
def test_property_logprobs_and_entropy_equal_a_loop(drawn):
    logits, ids, temperature = drawn
    logprobs, entropies = [], []
    for row, token in zip(logits.tolist(), ids.tolist(), strict=True):
        top = max(row)
        weights = [math.exp((x - top) / temperature) for x in row]
        probabilities = [w / sum(weights) for w in weights]
        logprobs.append((row[token] - top) / temperature - math.log(sum(weights)))
        entropies.append(-sum(p * math.log(p) for p in probabilities if p > 0))
    torch.testing.assert_close(
        token_logprobs(logits, ids, temperature=temperature), f64(logprobs), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(entropy(logits, temperature=temperature), f64(entropies), rtol=1e-9, atol=1e-9)


def test_another_kind_is_refused():
    """Past the run-time type check, which refuses it first in these tests."""
    plain = inspect.unwrap(kl_estimate)
    with pytest.raises(ValueError, match=r"kl_estimate: kind is 'k4'; choose 'k1', 'k2' or 'k3'"):
        plain(f64([0.0]), f64([0.0]), kind="k4")
