"""Log-probs and entropy from hidden states, in one chunk or many: numbers and gradients of the logits written out."""

import importlib
import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.core import entropy, token_logprobs
from heedful.kernels.head_logprobs import head_logprobs
from tensors import close, f64

MODULE = importlib.import_module("heedful.kernels.head_logprobs")
"""The module; the package's attribute of this name is the function."""
LOG3 = math.log(3)


# One state of size 1, and a head that makes the logits 0 and log 3 of it: probabilities 1/4 and 3/4.
ONE = f64([[1.0]])
HEAD = f64([[0.0], [LOG3]])
SURPRISE = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))


def test_golden_logprobs():
    hidden = ONE.expand(3, 1)
    logprobs, zeros = head_logprobs(hidden, HEAD, torch.tensor([0, 1, 0]))
    close(logprobs, [math.log(1 / 4), math.log(3 / 4), math.log(1 / 4)])
    assert zeros.tolist() == [0, 0, 0]


def test_golden_temperature_one_half_squares_the_odds():
    logprobs, h = head_logprobs(ONE, HEAD, torch.tensor([1]), temperature=0.5, with_entropy=True)
    close(logprobs, [math.log(9 / 10)])
    close(h, [-(0.1 * math.log(0.1) + 0.9 * math.log(0.9))])


def test_golden_the_bias_is_part_of_the_logits():
    """Of a head of zeros alone the bias speaks, and the temperature divides it too."""
    zeros, bias = torch.zeros_like(HEAD), HEAD[:, 0]
    close(head_logprobs(ONE, zeros, torch.tensor([1]), bias=bias)[0], [math.log(3 / 4)])
    close(head_logprobs(ONE, zeros, torch.tensor([1]), bias=bias, temperature=0.5)[0], [math.log(9 / 10)])


def test_golden_a_cap_bends_the_logits_and_their_slopes():
    """A cap of log 3 makes log 3 tanh 1 of log 3, at a slope of 1 - tanh(1)^2; the temperature comes after it."""
    bent = LOG3 * math.tanh(1.0)
    logprobs, h = head_logprobs(ONE, HEAD, torch.tensor([1]), temperature=0.5, cap=LOG3, with_entropy=True)
    p = 1 / (1 + math.exp(-2 * bent))
    close(logprobs, [math.log(p)])
    close(h, [-(p * math.log(p) + (1 - p) * math.log(1 - p))])
    slope = 2 * (1 - p) * (1 - math.tanh(1.0) ** 2)
    for_hidden, for_weight, for_bias = gradients(0.5, cap=LOG3)
    close(for_hidden, [[slope * LOG3]])
    close(for_bias, [-2 * (1 - p), slope])
    close(for_weight, [[-2 * (1 - p)], [slope]])


def test_golden_entropy():
    close(head_logprobs(ONE, HEAD, torch.tensor([0]), with_entropy=True)[1], [SURPRISE])
    uniform = head_logprobs(f64([[2.0, 1.0]]), torch.ones(7, 2).double(), torch.tensor([3]), with_entropy=True)
    close(uniform[1], [math.log(7)])


def gradients(temperature=1.0, of=0, **options):
    hidden, weight, bias = (x.clone().requires_grad_() for x in (ONE, HEAD, torch.zeros(2).double()))
    outputs = head_logprobs(hidden, weight, torch.tensor([1]), bias=bias, temperature=temperature, **options)
    outputs[of].sum().backward()
    return hidden.grad, weight.grad, bias.grad


@pytest.mark.parametrize(("temperature", "slope"), [(1.0, 1 / 4), (0.5, (1 / 10) / 0.5)])
def test_golden_gradient_of_a_logprob(temperature, slope):
    """One-hot minus softmax, over the temperature: the likelier token's logit gains what the other's loses."""
    for_hidden, for_weight, for_bias = gradients(temperature)
    close(for_hidden, [[slope * LOG3]])
    close(for_weight, [[-slope], [slope]])
    close(for_bias, [-slope, slope])


def test_golden_gradient_of_the_entropy():
    slope = -0.75 * (math.log(0.75) + SURPRISE)
    assert slope < 0, "the likelier token's logit must fall for the entropy to rise"
    for_hidden, for_weight, for_bias = gradients(of=1, with_entropy=True)
    close(for_hidden, [[slope * LOG3]])
    close(for_weight, [[-slope], [slope]])
    close(for_bias, [-slope, slope])


@pytest.mark.parametrize("kept", [2**24, 0])
def test_golden_masked_vocabulary(monkeypatch, kept):
    """A bias of -inf leaves two equal tokens: log 2. No gradient is NaN, and what is masked has none."""
    monkeypatch.setattr(MODULE, "KEPT", kept)
    bias = f64([0.0, -math.inf, 0.0]).requires_grad_()
    weight = torch.zeros(3, 1).double().requires_grad_()
    logprobs, h = head_logprobs(ONE, weight, torch.tensor([0]), bias=bias, with_entropy=True)
    (logprobs + h).sum().backward()
    close(logprobs.detach(), [-math.log(2)])
    close(h.detach(), [math.log(2)])
    close(weight.grad, [[0.5], [0], [-0.5]])
    close(bias.grad, [0.5, 0, -0.5])
    uneven = f64([0.0, -math.inf, LOG3]).requires_grad_()
    head_logprobs(ONE, weight, torch.tensor([0]), bias=uneven, with_entropy=True)[1].sum().backward()
    close(uneven.grad, [-0.25 * (math.log(0.25) + SURPRISE), 0, -0.75 * (math.log(0.75) + SURPRISE)])


def test_golden_no_tokens():
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    logprobs, h = head_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), with_entropy=True)
    assert logprobs.shape == h.shape == (0,)
    (logprobs.sum() + h.sum()).backward()
    assert hidden.grad.shape == (0, 3)
    assert not weight.grad.any()


# ------------------------------------------------------------------------------------------------------------- chunks

TOKENS, VOCAB, SIZE = 23, 13, 5
CHUNKS = {"one kept": (64, True), "one recomputed": (64, False), "five kept": (5, True), "five recomputed": (5, False)}


def chunked(monkeypatch, tokens, is_kept, vocab=VOCAB):
    """As many tokens a chunk, in blocks of two, gradients of four words at a time, and logits kept for the backward pass or
    not."""
    monkeypatch.setattr(MODULE, "SMALLEST_CHUNK", 1)
    monkeypatch.setattr(MODULE, "CHUNK", tokens * vocab)
    monkeypatch.setattr(MODULE, "CPU_BLOCK", 2 * vocab)
    monkeypatch.setattr(MODULE, "PART", 4)
    monkeypatch.setattr(MODULE, "KEPT", 2**24 if is_kept else 0)


@pytest.fixture(params=CHUNKS)
def chunks(request, monkeypatch):
    chunked(monkeypatch, *CHUNKS[request.param])
    return request.param


def head_and_states(dtype=torch.float64):
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((TOKENS, SIZE), (VOCAB, SIZE), (VOCAB,)))
    return hidden, weight, bias, torch.randint(VOCAB, (TOKENS,))


def written_out(hidden, weight, ids, *, bias, temperature, with_entropy=True):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return token_logprobs(logits, ids, temperature=temperature), entropy(logits, temperature=temperature)


def numbers_and_gradients(function, hidden, weight, bias, ids, *, temperature):
    """Both outputs, and the gradients of both together, each number of them with a weight of its own."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    logprobs, h = function(leaves[0], leaves[1], ids, bias=leaves[2], temperature=temperature, with_entropy=True)
    upstream = torch.linspace(-1, 2, len(ids), dtype=logprobs.dtype)
    (logprobs @ upstream + h @ upstream.cos()).backward()
    return [logprobs.detach(), h.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize(
    ("dtype", "rtol", "temperature", "with_bias"),
    [(torch.float64, 1e-10, 0.7, True), (torch.float64, 1e-10, 1.0, False), (torch.float32, 2e-5, 0.7, True)],
)
def test_identity_it_is_token_logprobs_and_entropy_of_the_logits(chunks, dtype, rtol, temperature, with_bias):
    hidden, weight, bias, ids = head_and_states(dtype)
    inputs = (hidden, weight, bias if with_bias else None, ids)
    ours = numbers_and_gradients(head_logprobs, *inputs, temperature=temperature)
    theirs = numbers_and_gradients(written_out, *inputs, temperature=temperature)
    assert len(ours) == 4 + with_bias
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


def test_identity_without_entropy_the_logprobs_are_the_same(chunks):
    hidden, weight, bias, ids = head_and_states()
    results = []
    for with_entropy in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        logprobs, h = head_logprobs(
            leaves[0], leaves[1], ids, bias=leaves[2], temperature=0.7, with_entropy=with_entropy
        )
        (logprobs.square().sum() + h.sum() * with_entropy * 0).backward()
        results.append([logprobs.detach(), *(leaf.grad for leaf in leaves)])
    assert h.tolist() == [0.0] * TOKENS
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [pytest.param(None, marks=pytest.mark.exhaustive), 1.5])
def test_gradcheck(chunks, cap):
    hidden, weight, bias, ids = head_and_states()
    leaves = [x.requires_grad_() for x in (hidden[:7], weight, bias)]

    def both(hidden, weight, bias):
        return head_logprobs(hidden, weight, ids[:7], bias=bias, temperature=0.7, cap=cap, with_entropy=True)

    assert torch.autograd.gradcheck(both, leaves)


def test_invariance_a_second_backward_pass_gives_the_same(chunks):
    """What is kept is not overwritten on the way back."""
    hidden, weight, bias, ids = head_and_states()
    weight.requires_grad_()
    logprobs, h = head_logprobs(hidden, weight, ids, bias=bias, temperature=0.7, with_entropy=True)
    first, second = (torch.autograd.grad((logprobs + h).sum(), weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused():
    """It would be that of constants."""
    hidden, weight, _, ids = head_and_states()
    logprobs, _ = head_logprobs(hidden.requires_grad_(), weight, ids)
    (gradient,) = torch.autograd.grad(logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_is_frozen_has_no_gradient_and_changes_no_other(chunks):
    *inputs, ids = head_and_states()
    every = numbers_and_gradients(head_logprobs, *inputs, ids, temperature=0.7)[2:]
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    for learns in range(3):
        leaves = [x.detach().requires_grad_(i == learns) for i, x in enumerate(inputs)]
        logprobs, h = head_logprobs(*leaves[:2], ids, bias=leaves[2], temperature=0.7, with_entropy=True)
        (logprobs @ upstream + h @ upstream.cos()).backward()
        for i, (leaf, gradient) in enumerate(zip(leaves, every, strict=True)):
            assert torch.equal(leaf.grad, gradient) if i == learns else leaf.grad is None


# ------------------------------------------------------------------------------------------------- half precision


def test_half_precision_products_and_float32_beyond(monkeypatch):
    """The numbers are exactly those of bfloat16 logits read in float32; gradients have the dtype of what learns."""
    chunked(monkeypatch, 5, is_kept=True)
    hidden, weight, bias, ids = head_and_states(torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    options = {"bias": bias, "temperature": 0.7, "with_entropy": True}
    logprobs, h = head_logprobs(hidden, weight, ids, **options, compute_dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert logits.dtype == torch.bfloat16
    assert logprobs.dtype == h.dtype == torch.float32
    torch.testing.assert_close(logprobs, token_logprobs(logits, ids, temperature=0.7), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(h, entropy(logits, temperature=0.7), rtol=1e-6, atol=1e-6)
    rounded = torch.autograd.grad((logprobs + h).sum(), leaves)
    exact = torch.autograd.grad(sum(head_logprobs(hidden, weight, ids, **options)).sum(), leaves)
    for x, y in zip(rounded, exact, strict=True):
        assert x.dtype == torch.float32
        # A logit of size 8 is rounded by up to 2^-6, a probability by as much of itself.
        assert 0 < (x - y).abs().max() < 2**-4 * y.abs().max()


def test_half_precision_states_are_computed_as_they_are():
    """The default is the dtype of the states, whose gradient has it too; the numbers are float32."""
    hidden, weight, _, ids = head_and_states(torch.float32)
    states = hidden.bfloat16().requires_grad_()
    logprobs, _ = head_logprobs(states, weight, ids)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert torch.equal(logprobs, head_logprobs(hidden, weight, ids, compute_dtype=torch.bfloat16)[0])
    assert states.grad.dtype == torch.bfloat16


def test_golden_gradients_of_many_chunks_add_up_in_float32(monkeypatch):
    """A half from each of 600 chunks. A bfloat16 sum would stand still at 128, where a half is lost in rounding."""
    chunked(monkeypatch, 1, is_kept=False, vocab=2)
    hidden = torch.ones(600, 1)
    weight, bias = torch.zeros(2, 1, requires_grad=True), torch.zeros(2, requires_grad=True)
    logprobs, _ = head_logprobs(hidden, weight, torch.zeros(600).long(), bias=bias, compute_dtype=torch.bfloat16)
    logprobs.sum().backward()
    assert weight.grad.tolist() == [[300.0], [-300.0]]
    assert bias.grad.tolist() == [300.0, -300.0]


# ------------------------------------------------------------------------------------------------------------- memory


class Sizes(TorchDispatchMode):
    """The size of every tensor that an operation gives, in the forward and the backward pass."""

    def __init__(self):
        super().__init__()
        self.sizes, self.float32, self.logits, self.gradients = [], [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.append(result.numel())
            if result.dtype == torch.float32 and not func.is_view:
                self.float32.append(result.numel())
            if func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm} and result.shape[1] == VOCAB:
                self.logits.append(len(result))
            if func.overloadpacket is torch.ops.aten.mm and result.shape[1] == 2 and len(result) <= VOCAB:
                self.gradients.append(len(result))
        return result


def passes(tokens=200, *, learns=True, device="cpu", **options):
    hidden = torch.randn(tokens, 2, requires_grad=True, device=device)
    weight = torch.randn(VOCAB, 2, requires_grad=learns, device=device)
    with Sizes() as seen:
        logprobs, h = head_logprobs(hidden, weight, torch.randint(VOCAB, (tokens,), device=device), **options)
        (logprobs.sum() + h.sum()).backward()
    return seen


@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_operation_makes_the_logits_of_all_tokens(monkeypatch, with_entropy):
    """200 tokens over 13 words are 2,600 logits; with chunks of 30 tokens nothing is larger than 30 x 13 or 200 x 2."""
    chunked(monkeypatch, 30, is_kept=False)
    seen = passes(with_entropy=with_entropy, temperature=0.7)
    assert max(seen.sizes) == max(30 * VOCAB, 200 * 2)
    assert seen.logits == [30] * 6 + [20] + [30] * 6 + [20], "once forward and once again for the backward pass"


def test_no_operation_makes_more_float32_than_a_block(monkeypatch):
    """In bfloat16 a chunk's logits are made at once, and leave it for float32 two tokens at a time."""
    chunked(monkeypatch, 30, is_kept=True)
    seen = passes(90, with_entropy=True, compute_dtype=torch.bfloat16)
    assert max(seen.float32) == 90 * 2 < 30 * VOCAB


def test_a_product_makes_the_gradients_of_a_part_of_the_weights(monkeypatch):
    """All at once they would be a second gradient of the matrix."""
    monkeypatch.setattr(MODULE, "PART", 7)
    assert passes().gradients == [7, 6]


def test_kept_logits_are_not_computed_again(monkeypatch):
    chunked(monkeypatch, 30, is_kept=True)
    assert passes().logits == [30] * 6 + [20]


def test_a_chunk_has_some_tokens_however_large_the_vocabulary(monkeypatch):
    chunked(monkeypatch, 1, is_kept=True)
    monkeypatch.setattr(MODULE, "SMALLEST_CHUNK", 80)
    assert passes().logits == [80, 80, 40]


@pytest.mark.parametrize(
    ("device", "learns", "chunks"),
    [("meta", True, [100, 100]), ("meta", False, [40] * 5), ("cpu", True, [40] * 5), ("cpu", False, [40] * 5)],
)
def test_a_chunk_is_larger_on_an_accelerator_if_it_adds_to_the_gradient_of_the_matrix(
    monkeypatch, device, learns, chunks
):
    chunked(monkeypatch, 1, is_kept=False)
    monkeypatch.setattr(MODULE, "SMALLEST_CHUNK", 40)
    monkeypatch.setattr(MODULE, "LEARNED_CHUNK", 100)
    assert passes(learns=learns, device=device).logits == chunks * 2, "forward and backward"


def largest_saved(tokens, *, learns=True):
    hidden, weight = torch.randn(tokens, 2), torch.randn(VOCAB, 2, requires_grad=learns)
    sizes = [0]

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        head_logprobs(hidden, weight, torch.randint(VOCAB, (tokens,)), with_entropy=True)
    return max(sizes)


def test_logits_are_kept_up_to_the_limit_alone(monkeypatch):
    """Of 40 tokens all 520 logits, of 41 none: the states, 2 numbers a token, are then the largest."""
    monkeypatch.setattr(MODULE, "KEPT", 40 * VOCAB)
    assert largest_saved(40) == 40 * VOCAB
    assert largest_saved(41) == 41 * 2
    assert largest_saved(40, learns=False) == 0
