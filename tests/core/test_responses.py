"""What responses look like: the soft penalty of long ones, and how much they repeat."""

import pytest
import torch

from heedful import core


def test_golden_overlong_penalty():
    """20 tokens at most, 8 of them a buffer: nothing up to 12, -1/8 at 13, -1/2 at 16, -1 at 20."""
    lengths = torch.tensor([1, 12, 13, 16, 20])
    found = core.overlong_penalty(lengths, max_new_tokens=20, buffer=8)
    assert found.tolist() == [0.0, 0.0, -0.125, -0.5, -1.0]


def test_golden_a_buffer_of_one_token_penalises_only_the_limit():
    assert core.overlong_penalty(torch.tensor([18, 19, 20, 21]), max_new_tokens=20, buffer=1).tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer must be 1 to max_new_tokens 20, got {buffer}"):
        core.overlong_penalty(torch.tensor([3]), max_new_tokens=20, buffer=buffer)


def by_hand(row, n):
    grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def test_golden_repeated_ngrams():
    """1 2 1 2 1: bigrams 12 21 12 21, half of which were there before. 7 7 7: one of two. Two tokens: one bigram."""
    ids = torch.tensor([[1, 2, 1, 2, 1], [7, 7, 7, 0, 0], [3, 3, 9, 9, 9], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    assert core.repeated_ngrams(ids, mask, n=2).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert core.repeated_ngrams(ids, mask, n=6).tolist() == [0.0] * 4


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_it_is_that_of_sets(n):
    """Against Python's own sets, with ids so large that a product of four of them would not fit into 64 bits."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(2, (20, 30), generator=generator) + 2**20 - 2
    lengths = torch.randint(1, 31, (20,), generator=generator)
    mask = torch.arange(30) < lengths.unsqueeze(1)
    found = core.repeated_ngrams(ids, mask, n=n).tolist()
    expected = [by_hand(row[:length], n) for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    assert found == pytest.approx(expected)
    assert len(set(expected)) > 5, "the rows differ"


def test_what_lies_outside_the_mask_does_not_count():
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]] * 2)
    ids[1, 4:] = ids[1, :4]
    mask = torch.tensor([[True] * 6 + [False] * 2] * 2)
    other = ids.clone()
    other[:, 6:] = 99
    assert torch.equal(core.repeated_ngrams(ids, mask), core.repeated_ngrams(other, mask))
    assert core.repeated_ngrams(ids, torch.ones_like(mask))[1] == pytest.approx(1 / 5)
