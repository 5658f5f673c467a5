"""Divergence from a teacher from hidden states, in one chunk or many, beside the formula of dense logits through autograd."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from heedful.core import entropy, same_top_token, teacher_divergence
from heedful.kernels.head_divergence import Head, head_divergence
from tensors import close, f64, logs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS, VOCAB, SIZE, TEACHER_SIZE = 23, 13, 5, 7
BETAS = (0.0, 0.1, 0.5, 1.0)
CHUNKS = {"one kept": (64, True), "one recomputed": (64, False), "five kept": (5, True), "five recomputed": (5, False)}
LOG2 = math.log(2)


def chunked(patch, tokens, is_kept, vocab=VOCAB):
    """As many tokens a chunk, in blocks of two, gradients of four words at a time, and outputs kept or recomputed."""
    products = importlib.import_module("heedful.kernels.head_logprobs")
    for name, value in (
        ("SMALLEST_CHUNK", 1),
        ("CHUNK", tokens * vocab),
        ("CPU_BLOCK", 2 * vocab),
        ("BLOCK", 2 * vocab),
        ("PART", 4),
    ):
        patch.setattr(products, name, value)
    patch.setattr(importlib.import_module("heedful.kernels.head_divergence"), "KEPT", 2**24 if is_kept else 0)


@pytest.fixture(params=CHUNKS)
def chunks(request, monkeypatch):
    chunked(monkeypatch, *CHUNKS[request.param])


def two_models(dtype=torch.float64, *, with_bias=True, scale=(1.0, 1.0), cap=(None, None)):
    """States and heads of a student, and of a wider teacher."""
    found = []
    for size, its_scale, its_cap in zip((SIZE, TEACHER_SIZE), scale, cap, strict=True):
        bias = torch.randn(VOCAB, dtype=dtype) if with_bias else None
        head = Head(torch.randn(VOCAB, size, dtype=dtype), bias, its_scale, its_cap)
        found += [torch.randn(TOKENS, size, dtype=dtype), head]
    return found


def logits_of(hidden, head):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias)
    return head.scale * (logits if head.cap is None else head.cap * torch.tanh(logits / head.cap))


def dense(hidden, head, teacher_hidden, teacher_head, *, beta, temperature):
    """The same numbers from all logits, by the formulas in core."""
    logits, teacher = logits_of(hidden, head), logits_of(teacher_hidden, teacher_head)
    return (
        teacher_divergence(logits, teacher, beta=beta, temperature=temperature),
        entropy(logits, temperature=temperature),
        entropy(teacher, temperature=temperature),
        same_top_token(logits, teacher),
    )


def numbers_and_gradients(function, hidden, head, *teacher, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, head.weight, head.bias)]
    found = function(leaves[0], Head(*leaves[1:], *head[2:]), *teacher, **options)
    (found[0] @ torch.linspace(-1, 2, len(hidden), dtype=found[0].dtype)).backward()
    return [*(x.detach() for x in found), *(leaf.grad for leaf in leaves if leaf is not None)]


P, Q = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16), (1 / 8, 1 / 2, 1 / 8, 1 / 8, 1 / 8)


def test_golden_reverse_kl_and_what_comes_with_it():
    """Of five words, by a state of 1 and heads that are their log-probs: 5/8 log 2; entropies 15/8 and 2 log 2."""
    weight = logs(*P).unsqueeze(1).requires_grad_()
    found = head_divergence(f64([[1.0]]), Head(weight), f64([[1.0]]), Head(logs(*Q).unsqueeze(1)))
    close(found.divergence.detach(), [5 / 8 * LOG2])
    close(found.entropy, [15 / 8 * LOG2])
    close(found.teacher_entropy, [2 * LOG2])
    assert found.same_top_token.tolist() == [False]
    found.divergence.sum().backward()
    close(weight.grad[:, 0], f64([0.6875, -0.40625, -0.078125, -0.1015625, -0.1015625]) * LOG2)


def test_golden_forward_kl():
    weight = logs(*P).unsqueeze(1).requires_grad_()
    found = head_divergence(f64([[1.0]]), Head(weight), f64([[1.0]]), Head(logs(*Q).unsqueeze(1)), beta=0.0)
    close(found.divergence.detach(), [LOG2 / 2])
    found.divergence.sum().backward()
    close(weight.grad[:, 0], [3 / 8, -1 / 4, 0, -1 / 16, -1 / 16])


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "model",
    [{}, {"with_bias": False}, {"scale": (0.5, 2.0), "cap": (1.5, 2.5)}, {"scale": (0.5, 2.0)}],
    ids=["plain", "no bias", "scale and cap", "scale"],
)
def test_identity_it_is_the_dense_formula(chunks, beta, model):
    """Values and gradients in float64 to 1e-12."""
    inputs = two_models(**model)
    ours = numbers_and_gradients(head_divergence, *inputs, beta=beta, temperature=0.7)
    theirs = numbers_and_gradients(dense, *inputs, beta=beta, temperature=0.7)
    assert len(ours) == 6 + model.get("with_bias", True)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_invariance_chunks_change_rounding_only(monkeypatch, beta):
    inputs, results = two_models(torch.float32), []
    for tokens, is_kept in CHUNKS.values():
        chunked(monkeypatch, tokens, is_kept)
        results.append(numbers_and_gradients(head_divergence, *inputs, beta=beta, temperature=0.7))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, pytest.param(0.3, marks=pytest.mark.exhaustive), 1.0])
def test_gradcheck(chunks, beta):
    hidden, head, *teacher = two_models(scale=(0.5, 2.0), cap=(1.5, None))
    leaves = [x.requires_grad_() for x in (hidden[:7], head.weight, head.bias)]

    def divergence(hidden, weight, bias):
        found = head_divergence(hidden, Head(weight, bias, *head[2:]), teacher[0][:7], teacher[1], beta=beta)
        return found.divergence

    assert torch.autograd.gradcheck(divergence, leaves)


def test_only_the_student_and_only_the_divergence_have_a_gradient(chunks):
    """Of what is frozen there is none, and the others' are as they were."""
    hidden, head, teacher_hidden, teacher_head = two_models()
    every = numbers_and_gradients(head_divergence, hidden, head, teacher_hidden, teacher_head, beta=0.3)[4:]
    for learns in range(3):
        leaves = [x.detach().requires_grad_(i == learns) for i, x in enumerate((hidden, head.weight, head.bias))]
        of_teacher = [x.clone().requires_grad_() for x in (teacher_hidden, *teacher_head[:2])]
        found = head_divergence(leaves[0], Head(*leaves[1:]), of_teacher[0], Head(*of_teacher[1:]), beta=0.3)
        assert not any(x.requires_grad for x in found[1:])
        (found.divergence @ torch.linspace(-1, 2, TOKENS, dtype=torch.float64)).backward()
        assert all(x.grad is None for x in of_teacher)
        for i, (leaf, gradient) in enumerate(zip(leaves, every, strict=True)):
            assert torch.equal(leaf.grad, gradient) if i == learns else leaf.grad is None


def test_invariance_a_second_backward_pass_gives_the_same(chunks):
    hidden, head, *teacher = two_models()
    head.weight.requires_grad_()
    divergence = head_divergence(hidden, head, *teacher, beta=0.3).divergence.sum()
    first, second = (torch.autograd.grad(divergence, head.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused():
    hidden, head, *teacher = two_models()
    divergence = head_divergence(hidden.requires_grad_(), head, *teacher).divergence
    (gradient,) = torch.autograd.grad(divergence.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_golden_no_tokens():
    hidden, head, *teacher = two_models()
    head.weight.requires_grad_()
    found = head_divergence(hidden[:0], head, teacher[0][:0], teacher[1])
    assert [x.shape for x in found] == [(0,)] * 4
    found.divergence.sum().backward()
    assert not head.weight.grad.any()


@pytest.mark.parametrize("beta", BETAS)
def test_golden_masked_vocabulary(chunks, beta):
    """A word that neither has changes nothing; one that the teacher alone lacks makes the reverse KL infinite, with no
    gradient, and one that the student alone lacks the forward KL. No gradient is NaN."""
    hidden, head, teacher_hidden, teacher_head = two_models()
    without = [Head(x.weight[:-1], x.bias[:-1]) for x in (head, teacher_head)]
    expected = numbers_and_gradients(head_divergence, hidden, without[0], teacher_hidden, without[1], beta=beta)
    masked = [Head(x.weight, x.bias.index_fill(0, torch.tensor([VOCAB - 1]), -math.inf)) for x in (head, teacher_head)]
    found = numbers_and_gradients(head_divergence, hidden, masked[0], teacher_hidden, masked[1], beta=beta)
    for x, y in zip(found[:5], expected[:5], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert not found[5][-1].any()
    for student, teacher, infinite in ((head, masked[1], 1.0), (masked[0], teacher_head, 0.0)):
        found = numbers_and_gradients(head_divergence, hidden, student, teacher_hidden, teacher, beta=beta)
        assert found[0].isinf().all() if beta == infinite else found[0].isfinite().all()
        assert all(x.isfinite().all() for x in found[4:])
        assert not (beta == infinite and found[4].any())


def test_half_precision_products_and_float32_beyond():
    """The numbers are those of bfloat16 outputs of both heads, read in float32; gradients have the dtype of what learns."""
    hidden, head, teacher_hidden, teacher_head = two_models(torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, head.weight, head.bias)]
    found = head_divergence(hidden, head, teacher_hidden, teacher_head, beta=0.3, compute_dtype=torch.bfloat16)
    half = [
        torch.nn.functional.linear(x.bfloat16(), one.weight.bfloat16(), one.bias.bfloat16())
        for x, one in ((hidden, head), (teacher_hidden, teacher_head))
    ]
    torch.testing.assert_close(found.divergence, teacher_divergence(*half, beta=0.3), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.teacher_entropy, entropy(half[1]), rtol=1e-5, atol=1e-6)
    rounded = torch.autograd.grad(found.divergence.sum(), leaves)
    exact = torch.autograd.grad(
        head_divergence(hidden, head, teacher_hidden, teacher_head, beta=0.3).divergence.sum(), leaves
    )
    for x, y in zip(rounded, exact, strict=True):
        assert x.dtype == torch.float32
        # An output of size 8 is rounded by up to 2^-6, a probability by as much of itself.
        assert 0 < (x - y).abs().max() < 2**-4 * y.abs().max()


def test_golden_gradients_of_many_chunks_add_up_in_float32(monkeypatch):
    """A half from each of 600 chunks. A bfloat16 sum would stand still at 128, where a half is lost in rounding."""
    chunked(monkeypatch, 1, is_kept=False, vocab=2)
    hidden, teacher = torch.ones(600, 1), Head(torch.tensor([[60.0], [-60.0]]))
    weight, bias = torch.zeros(2, 1, requires_grad=True), torch.zeros(2, requires_grad=True)
    found = head_divergence(hidden, Head(weight, bias), hidden, teacher, beta=0.0, compute_dtype=torch.bfloat16)
    found.divergence.sum().backward()
    assert weight.grad.tolist() == [[-300.0], [300.0]]
    assert bias.grad.tolist() == [-300.0, 300.0]


def test_models_that_do_not_fit_are_refused():
    hidden, head, teacher_hidden, teacher_head = two_models()
    with pytest.raises(ValueError, match="hidden has 23 tokens, but teacher_hidden has 22; they must be equal"):
        head_divergence(hidden, head, teacher_hidden[1:], teacher_head)
    with pytest.raises(ValueError, match="head has 13 words of the vocabulary, but teacher_head has 12"):
        head_divergence(hidden, head, teacher_hidden, Head(teacher_head.weight[1:], teacher_head.bias[1:]))
    with pytest.raises(ValueError, match=r"beta is 2\.0; it must be from 0"):
        head_divergence(hidden, head, teacher_hidden, teacher_head, beta=2.0)


# ------------------------------------------------------------------------------------------------------------- memory


def peak(fake_memory, function, beta, *, learns=True):
    """Live bytes of 4,096 tokens of 131,072 words in float32, forward and backward, on a CUDA device of shapes only."""
    with fake_memory.LiveBytes() as device:
        hidden = torch.zeros(4096, 2, device="cuda", requires_grad=True)
        weight = torch.zeros(131_072, 2, device="cuda", requires_grad=learns)
        teacher = torch.zeros(4096, 3, device="cuda"), Head(torch.zeros(131_072, 3, device="cuda"))
        function(hidden, Head(weight), *teacher, beta=beta, temperature=0.7)[0].sum().backward()
    return device.peaks[""]


@pytest.fixture
def fake_memory(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fake_memory")


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_its_peak_is_a_part_of_the_dense_one(fake_memory, beta):
    """The logits of all tokens are 2 GiB per model. A chunk of both, where the head learns, is half of that."""
    logits = 4 * 4096 * 131_072
    assert peak(fake_memory, dense, beta) > 11 * logits
    assert peak(fake_memory, head_divergence, beta) < 0.95 * logits
    assert peak(fake_memory, head_divergence, beta, learns=False) < 0.6 * logits


def test_outputs_are_kept_up_to_the_limit_alone(monkeypatch):
    """Of 40 tokens all outputs of both models, of 41 none."""
    monkeypatch.setattr(importlib.import_module("heedful.kernels.head_divergence"), "KEPT", 2 * 40 * VOCAB)
    for tokens, largest in ((40, 40 * VOCAB), (41, 41 * TEACHER_SIZE)):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            head = Head(torch.randn(VOCAB, SIZE, requires_grad=True))
            teacher = torch.randn(tokens, TEACHER_SIZE), Head(torch.randn(VOCAB, TEACHER_SIZE))
            head_divergence(torch.randn(tokens, SIZE), head, *teacher)
        assert max(sizes) == largest
