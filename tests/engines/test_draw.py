"""Drawing tokens: exact frequencies over a grid of uniform numbers, and filters equal to those of transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TopKLogitsWarper, TopPLogitsWarper

from heedful.engines import draw as draw_module
from heedful.engines.draw import draw, draw_from, filter_logits

LARGEST = 1 - 2**-53
"""The largest uniform number that torch.rand gives in float64."""


def midpoints(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def draw_all(logits, uniforms):
    return draw(logits.expand(len(uniforms), -1), uniforms)


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=30), st.integers(0, 2**32))
def test_frequencies_of_any_logits(values, seed):
    """At most one grid number a border may fall on its other side."""
    logits = torch.tensor([values], dtype=torch.float32)
    n = 2000
    counts = torch.bincount(draw_all(logits, midpoints(n)), minlength=len(values))
    expected = logits[0].double().softmax(-1) * n
    assert (counts - expected).abs().max() <= 1 + 1e-9
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled = torch.bincount(draw_all(logits, midpoints(n)[order]), minlength=len(values))
    assert torch.equal(shuffled, counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_zero_is_never_drawn(dtype):
    """Not even at the ends of [0, 1), before the first possible token, after the last, or where a border is hit."""
    logits = torch.tensor([[-torch.inf, 0, -torch.inf, 0, -torch.inf, -torch.inf]], dtype=dtype)
    uniforms = torch.tensor([0.0, 5e-324, 2**-53, 0.5 - 2**-54, 0.5, 0.5 + 2**-53, LARGEST], dtype=torch.float64)
    assert draw_all(logits, uniforms).tolist() == [1, 1, 1, 1, 3, 3, 3]


def test_rows_are_drawn_by_themselves():
    logits, uniforms = torch.randn(20, 300), torch.rand(20, dtype=torch.float64)
    together = draw(logits, uniforms)
    alone = torch.cat([draw(logits[i : i + 1], uniforms[i : i + 1]) for i in range(20)])
    assert torch.equal(together, alone)
    assert together.unique().numel() > 10


def test_a_large_vocabulary():
    """150,000 equally likely tokens: each is hit in its middle, and the last possible one at the far end."""
    vocabulary = 150_000
    logits = torch.zeros(1, vocabulary)
    wanted = torch.tensor([0, 1, 74_999, 149_000, 149_998, 149_999])
    assert torch.equal(draw_all(logits, (wanted.double() + 0.5) / vocabulary), wanted)
    for possible in (vocabulary, 70_000):
        logits[0, possible:] = -torch.inf
        assert draw(logits, torch.tensor([LARGEST], dtype=torch.float64)).tolist() == [possible - 1]


def test_a_tail_of_rare_tokens_is_drawn_in_proportion():
    """A thousand tokens of 1e-10 each behind one that is nearly certain: float32 sums could not tell them apart."""
    logits = torch.cat([torch.zeros(1), torch.full((1000,), -23.0)]).unsqueeze(0)
    rare = torch.tensor(-23.0, dtype=torch.float64).exp()
    wanted = torch.arange(1000)
    assert torch.equal(draw_all(logits, (1 + (wanted.double() + 0.5) * rare) / (1 + 1000 * rare)), wanted + 1)


@pytest.mark.parametrize("at_once", [1, 600, 2**19])
def test_rows_added_up_in_parts_are_drawn_as_all_together(monkeypatch, at_once):
    """One, two and all seven rows at a time."""
    probabilities, uniforms = (torch.randn(7, 300) * 3).softmax(-1), torch.rand(7, dtype=torch.float64)
    together = draw_from(probabilities, uniforms)
    monkeypatch.setattr(draw_module, "AT_ONCE", at_once)
    assert torch.equal(draw_from(probabilities, uniforms), together)
    assert together.unique().numel() > 4


class Sizes(TorchDispatchMode):
    """How many numbers each sum reads, and how many each padding or copy makes."""

    def __init__(self):
        super().__init__()
        self.summed, self.copied = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.sum.dim_IntList:
            self.summed.append(args[0].numel())
        if function in (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.clone.default):
            self.copied.append(result.numel())
        return result


def test_no_copy_is_made_of_all_the_probabilities():
    """Of a large vocabulary a part is summed in float64 at a time, and one of whole blocks is not padded."""
    probabilities = torch.full((40, 64 * 500), 1 / (64 * 500))
    with Sizes() as sizes:
        draw_from(probabilities, torch.rand(40, dtype=torch.float64))
    assert len(sizes.summed) == 3
    assert max(sizes.summed) <= draw_module.AT_ONCE < probabilities.numel()
    assert all(size < probabilities.numel() for size in sizes.copied)


@pytest.mark.parametrize("vocabulary", [1, 2, 8, 9, 10, 1000])
def test_every_token_of_any_vocabulary_is_drawn_in_its_place(vocabulary):
    """Tokens are searched in blocks of the root of their number; squares, their neighbours, and a last block half full."""
    logits = torch.linspace(-2, 2, vocabulary).unsqueeze(0)
    borders = torch.cat([torch.zeros(1).double(), logits[0].double().softmax(-1).cumsum(-1)])
    middles = (borders[1:] + borders[:-1]) / 2
    assert draw_all(logits, middles).tolist() == list(range(vocabulary))
    inside = 1e-6 * borders.diff()
    assert draw_all(logits.double(), borders[:-1] + inside).tolist() == list(range(vocabulary))
    assert draw_all(logits.double(), borders[1:] - inside).tolist() == list(range(vocabulary))


@pytest.mark.parametrize("possible", [[0], [4], [15], [3, 4], [0, 15], [4, 5, 6, 7]])
def test_tokens_of_probability_zero_beside_the_borders_of_blocks(possible):
    """Sixteen tokens in blocks of four, whole blocks of zeros among them; sixteen more numbers lie on the borders."""
    logits = torch.full((1, 16), -torch.inf)
    logits[0, possible] = 0.0
    edges = [edge for i in range(len(possible)) for edge in (i / len(possible), (i + 1) / len(possible) - 2**-50)]
    wanted = [token for token in possible for _ in range(2)]
    assert draw_all(logits, torch.tensor(edges, dtype=torch.float64)).tolist() == wanted
    ends = torch.tensor([0.0, LARGEST, 1.0], dtype=torch.float64)
    assert draw_all(logits, ends).tolist() == [possible[0], possible[-1], possible[-1]]


@given(
    st.lists(st.sampled_from([-torch.inf, -12.0, -3.0, 0.0, 0.5, 4.0]), min_size=1, max_size=70),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_the_search_in_blocks_is_that_of_the_plain_sum(values, numbers):
    """Equal, or the possible token next to it where the number lies within 1e-6 of the border between them."""
    values = values if max(values) > -torch.inf else [*values, 0.0]
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    drawn = draw_all(torch.tensor([values]), uniforms)
    borders = torch.tensor(values, dtype=torch.float64).softmax(-1).cumsum(-1)
    possible = [i for i, value in enumerate(values) if value > -torch.inf]
    for number, token in zip(numbers, drawn.tolist(), strict=True):
        plain = next((i for i in possible if borders[i] > number), possible[-1])
        assert token in possible
        between = possible[min(possible.index(token), possible.index(plain))]
        assert token == plain or (
            abs(possible.index(token) - possible.index(plain)) == 1 and abs(float(borders[between]) - number) < 1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_drawn_from_as_float32(dtype):
    """Probabilities rounded to 8 bits would be off by more than a token of a large vocabulary has."""
    logits = (torch.randn(1, 5000) * 2).to(dtype)
    uniforms = midpoints(3000)
    assert torch.equal(draw_all(logits, uniforms), draw_all(logits.float(), uniforms))


@pytest.mark.parametrize("uniform", [LARGEST, 1.0])
def test_the_far_end_never_leaves_the_vocabulary(uniform):
    """Not where the sum rounds to more or less than 1 either, nor where a device rounds a uniform number up to 1."""
    logits = torch.randn(2000, 50)
    logits[:, -1] = -torch.inf
    assert (draw(logits, torch.full((2000,), uniform, dtype=torch.float64)) == 48).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (999, 1.0), (0, 1e-6), (0, 0.9), (20, 0.8), (0, 1.0)])
def test_filters_are_those_of_transformers(top_k, top_p):
    """In its order: top-p is of what top-k left, and the other order keeps fewer."""
    logits = torch.randn(8, 300) * 3
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    assert torch.equal(filter_logits(logits, top_k=top_k, top_p=top_p), expected)


def test_the_token_that_crosses_top_p_is_kept():
    """Of 0.5, 0.3 and 0.2, a share of 0.6 needs the first two; ties with the k-th token stay."""
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert filter_logits(logits, top_k=0, top_p=0.6).isfinite().tolist() == [[False, True, True]]
    assert filter_logits(logits, top_k=0, top_p=0.49).isfinite().tolist() == [[False, True, False]]
    tied = torch.tensor([[1.0, 2.0, 2.0, 3.0]])
    assert filter_logits(tied, top_k=2, top_p=1.0).isfinite().tolist() == [[False, True, True, True]]
