"""Where products are compiled for their shape, they have few shapes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from architectures import one_decoder
from heedful.data.batches import collate
from heedful.kernels.cpu.products import MULTIPLE, filling
from heedful.models import load_policy

CPU = torch.device("cpu")


def test_golden_rows_that_fill_up():
    assert MULTIPLE == 64
    assert filling(1, CPU, weights=[1]) == 0, "float32 is not compiled"
    with torch.autocast("cpu", torch.bfloat16):
        found = [filling(count, CPU, weights=[1]) for count in (0, 1, 63, 64, 65, 1000)]
        assert found == [0, 63, 1, 0, 63, 24]
        assert filling(1, torch.device("cuda"), weights=[1]) == 0
        with torch.autocast("cpu", enabled=False):
            assert filling(1, CPU, weights=[1]) == 0


def test_golden_many_weights_are_not_multiplied_by_filling():
    """63 rows of 2**24 weights are computed sooner than a shape is compiled, those of twice as many are not."""
    with torch.autocast("cpu", torch.bfloat16):
        assert filling(1, CPU, weights=[2**24]) == 63
        assert filling(1, CPU, weights=[2**25]) == 0
        assert [filling(count, CPU, weights=[2**29]) for count in (61, 62, 63)] == [0, 2, 1]


class Products(TorchDispatchMode):
    """The shapes of matrix products, forwards and backwards."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm}:
            self.shapes.add(tuple(tuple(x.shape) for x in args if isinstance(x, torch.Tensor) and x.dim() > 1))
        return func(*args, **(kwargs or {}))


def products(folder, compute_dtype, sizes):
    """Of a pass for learning from responses of each list of sizes, unequal, so that they are packed."""
    policy = load_policy(folder, device=CPU, compute_dtype=compute_dtype)
    policy(**arguments([1, 9]))  # once before: it is tried whether it can be packed
    for lengths in sizes:
        with Products() as seen:
            policy(**arguments(lengths)).logprobs.sum().backward()
        yield seen.shapes


def arguments(lengths):
    batch = collate([[5, 6, 7]] * len(lengths), [[9] * length for length in lengths], pad_id=0)
    return {"ids": batch.ids, "attention_mask": batch.attention_mask, "response_mask": batch.response_mask}


@one_decoder
def test_other_lengths_have_the_same_products(decoder):
    """60, 52 and 64 tokens in bfloat16, attention aside; in float32 every number of tokens has products of its own."""
    sizes = [[3, 29, 11, 5], [7, 15, 3, 15], [4, 6, 28, 14]]
    first, *others = products(decoder, torch.bfloat16, sizes)
    assert others == [first, first]
    first, *others = products(decoder, torch.float32, sizes)
    assert first not in others
