"""The value head of a policy: its formula, what it does not depend on, and heads that were saved when they were linear."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from heedful import CheckpointError
from heedful.models import load_policy, load_tokenizer, load_value_model, save_policy
from heedful.models.save import VALUE_HEAD
from heedful.models.value_model import ValueHead

CPU = torch.device("cpu")
MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])


def noisy(hidden_size=4):
    """A head whose every part has something to say."""
    head = ValueHead(hidden_size).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return head


def states(hidden_size=4):
    """Of the tokens, row after row."""
    return torch.randn(int(MASK.sum()), hidden_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_it_is_zero_at_the_start_and_learns():
    head = ValueHead(4)
    values = head(states().float(), MASK)
    assert not values.any()
    values.sum().backward()
    assert head.weight.grad.any()
    assert head.out.weight.grad.any()


def test_values_are_those_of_the_formula():
    """Row by row, with loops: the state, the row's first state, and the mean of the row's states so far."""
    head, before = noisy(), states()
    expected, start = [], 0
    for length in MASK.sum(dim=1).tolist():
        row = before[start : start + length]
        for t in range(length):
            read = torch.cat([row[t], row[0], row[: t + 1].mean(dim=0)])
            read = (read - read.mean()) / (read.var(correction=0) + 1e-5).sqrt()
            hidden = torch.nn.functional.silu(head.hidden.weight @ read + head.hidden.bias)
            expected.append(head.weight[0] @ row[t] + head.bias[0] + head.out.weight[0] @ hidden)
        start += length
    torch.testing.assert_close(head(before, MASK), torch.stack(expected), rtol=1e-10, atol=1e-10)


@pytest.fixture
def saved(tiny, tmp_path):
    """A policy with a value head that is not zero, in a folder."""
    policy = load_policy(tiny(), device=CPU, compute_dtype=torch.float32, with_value_head=True)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.normal_(std=0.1)
    save_policy(policy, load_tokenizer(tiny()), tmp_path / "模型", stop_ids=[0])
    return policy, tmp_path / "模型"


def test_a_head_that_was_saved_when_heads_were_linear_gives_its_values(saved):
    policy, folder = saved
    tensors = load_file(folder / VALUE_HEAD)
    save_file({name: tensors[name] for name in ("weight", "bias")}, folder / VALUE_HEAD)
    again = load_policy(str(folder), device=CPU, compute_dtype=torch.float32, with_value_head=True)
    before = torch.randn(6, policy.value_head.in_features)
    expected = before @ tensors["weight"][0] + tensors["bias"]
    torch.testing.assert_close(again.value_head(before, MASK), expected)


def test_a_critic_of_its_own_refuses_the_head_of_a_shared_one(saved):
    _, folder = saved
    with pytest.raises(CheckpointError, match="the head of a shared critic, which a separate critic cannot use"):
        load_value_model(str(folder), device=CPU, compute_dtype=torch.float32)
