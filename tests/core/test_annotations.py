"""The annotations of the mathematics are enforced while the tests run: wrong shapes and dtypes are refused."""

import pytest
import torch

from heedful.core import clip_scores, gae, masked_mean, pairwise_reward_loss, ppo_policy_loss, token_logprobs
from heedful.kernels.head_logprobs import head_logprobs


def refused():
    return pytest.raises(TypeError, match="Type-check error")


def test_shapes_that_disagree_are_refused():
    """Broadcasting [2, 3] against [1, 3] is legal in torch and would silently repeat a row."""
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with refused():
        masked_mean(x[:1], mask)
    with refused():
        gae(x, x[:, :2], mask)
    with refused():
        pairwise_reward_loss(torch.zeros(3), torch.zeros(1))
    with refused():
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
    with refused():
        clip_scores(torch.zeros(2, 3), 1.0)


def test_the_kernel_outside_core_is_checked_too():
    """It is mathematics, and has the same annotations; its states and ids are one a token."""
    hidden, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    head_logprobs(hidden, weight, torch.zeros(3, dtype=torch.long))
    with refused():
        head_logprobs(hidden, weight, torch.zeros(2, dtype=torch.long))


def test_masks_that_are_not_boolean_are_refused():
    """An integer mask would be read as an index by `where`'s neighbours, and as weights by a product."""
    x = torch.zeros(2, 3)
    with refused():
        masked_mean(x, torch.ones(2, 3, dtype=torch.long))
    with refused():
        ppo_policy_loss(x, x, x, torch.ones(2, 3), clip_range=0.2)


def test_integer_logits_are_refused():
    with refused():
        token_logprobs(torch.zeros(2, 3, 5, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long))


def test_the_right_shapes_are_accepted():
    """Negative control: the refusals above are about the arguments."""
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert masked_mean(x, mask) == 0
    assert ppo_policy_loss(x, x, x, mask, clip_range=0.2)[0] == 0
