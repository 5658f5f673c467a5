"""How many operations some work asks torch for: its cost where tensors are small, and the same on every machine."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts operations in its context, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operations_of(work):
    """The number of operations of a function's call."""
    with Operations() as operations:
        work()
    return operations.counts.total()
