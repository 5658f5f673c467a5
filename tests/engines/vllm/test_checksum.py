"""The checksum of weights: the same however they are stored, another for any other weights."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.engines.vllm.extension.heedful_vllm import checksum

MASK = (1 << 64) - 1


def splitmix(x):
    """splitmix64's finaliser in Python's whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_the_sum_of_hashes_of_the_bits(dtype, monkeypatch):
    weights = torch.randn(5, 7).to(dtype)
    bits = weights.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.element_size()]).flatten().tolist()
    expected = f"{sum(splitmix(b & MASK) for b in bits) & MASK:016x}"
    assert checksum([weights]) == expected
    monkeypatch.setattr("heedful.engines.vllm.extension.heedful_vllm.CPU_PART", 7)
    assert checksum([weights]) == expected, "large tensors are read in parts"


def test_the_hash_is_splitmix64():
    """Its first numbers from seed 0 (Vigna's splitmix64.c): the state is a multiple of the golden gamma."""
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix(gamma * k & MASK) for k in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    one = torch.tensor([gamma - (1 << 64)], dtype=torch.int64).view(torch.float64)
    assert checksum([one]) == "e220a8397b1dcdaf"


def test_how_weights_are_stored_does_not_matter():
    """Stacked, transposed, padded with zeros, in parts, with -0.0."""
    q, k, zeros = torch.randn(4, 8), torch.randn(2, 8), torch.zeros(3, 8)
    expected = checksum([q, k])
    assert checksum([torch.cat([q, k, zeros]).T.contiguous()]) == expected
    assert checksum([k, q, -zeros]) == expected
    assert checksum([q.bfloat16().float()], torch.bfloat16) == checksum([q], torch.bfloat16) == checksum([q.bfloat16()])


def test_every_change_shows():
    weights = torch.randn(64, 64)
    expected = checksum([weights])
    flipped = weights.clone()
    flipped.view(torch.int32)[13, 7] ^= 1
    up_and_down = weights.clone()  # a sum of bits would not see these two
    up_and_down.view(torch.int32)[0, 0] += 1
    up_and_down.view(torch.int32)[0, 1] -= 1
    changed = [flipped, up_and_down, weights[:-1], torch.cat([weights, weights[:1]]), weights * (1 + 1e-6)]
    assert len({checksum([one]) for one in changed} | {expected}) == len(changed) + 1


class Costs(TorchDispatchMode):
    """Counts bytes of new memory, and numbers that Python waits for."""

    def __init__(self):
        super().__init__()
        self.allocated = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.waits += function is torch.ops.aten._local_scalar_dense.default
        if isinstance(made, torch.Tensor) and not any(made is one for one in args) and not function.is_view:
            self.allocated += made.nbytes if not kwargs or "out" not in kwargs else 0
        return made


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 20), (torch.bfloat16, 18)])
def test_an_element_costs_little_memory_and_a_tensor_one_wait(dtype, most, monkeypatch):
    """Its value without -0.0, its bits as a whole number, and one number to mix them with."""
    monkeypatch.setattr("heedful.engines.vllm.extension.heedful_vllm.CPU_PART", 500)
    weights = torch.randn(10_000).to(dtype)
    with Costs() as costs:
        checksum([weights])
    assert costs.waits == 1
    assert costs.allocated <= (most + 0.1) * weights.numel()
