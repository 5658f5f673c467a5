"""How fast this machine multiplies matrices and reads memory, measured; of GPUs that are known, the maker's figures too."""

import time
from collections.abc import Callable
from itertools import cycle

import torch
from flops import Product, Work, near

SECONDS = 0.03
"""How long one shape is measured at least."""
LARGE = tuple(Product(1, rows, inner, columns) for rows, inner, columns in ((1024, 1024, 4096), (4096, 4096, 4096)))
MAKERS = {"NVIDIA H200": (989e12, 4.8e12), "NVIDIA H100 80GB HBM3": (989e12, 3.35e12)}
"""FLOP/s of dense products in half precision, and bytes a second, by the name that the driver gives."""


class Machine:
    """Rates of a device in a dtype; each is measured when it is first asked for."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.rates: dict[Product, float] = {}
        self.bandwidths: dict[int, float] = {}
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.maker = MAKERS.get(name, (0.0, 0.0)) if dtype.itemsize == 2 else (0.0, 0.0)

    def rate(self, product: Product) -> float:
        """FLOP/s of products of this shape."""
        if product not in self.rates:
            flops = 2 * product.batch * product.rows * product.inner * product.columns
            self.rates[product] = flops / self._seconds_of(product)
        return self.rates[product]

    def bandwidth(self, held: float) -> float:
        """Bytes a second of reading ``held`` bytes again and again."""
        size = 2**20 * near(held / 2**20)
        if size not in self.bandwidths:
            buffer = torch.zeros(size // 4, device=self.device)
            self.bandwidths[size] = size / seconds_of([buffer.sum], self.device)
        return self.bandwidths[size]

    def hard(self, work: Work) -> float:
        """Seconds at the best rate of any product, or at which its bytes can be read, whichever are more."""
        bandwidth = max(self.bandwidth(work.held), self.maker[1])
        return max(work.total_flops / self.peak(), work.bytes / bandwidth)

    def attainable(self, work: Work) -> float:
        """Seconds with every product at the rate of its shape, or those of its bytes, if more."""
        seconds = sum(flops / self.rate(product) for product, flops in work.flops.items())
        return max(seconds, work.bytes / self.bandwidth(work.held))

    def peak(self) -> float:
        """FLOP/s of the best product so far, large ones among them; at least what the maker says."""
        return max([*map(self.rate, LARGE), *self.rates.values(), self.maker[0]])

    def _seconds_of(self, product: Product) -> float:
        """Right sides are in the memory layout of weights, and there are as many as a model goes through."""
        batch, rows, inner, columns, weights = product
        left = torch.randn(batch, rows, inner, device=self.device).to(self.dtype)
        rights = torch.randn(weights, batch, columns, inner, device=self.device).to(self.dtype).mT
        if batch == 1:
            left, rights = left[0], rights[:, 0]
        return seconds_of([lambda right=right: left @ right for right in rights], self.device)


def seconds_of(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Least seconds of a call, the calls being made in turn, over and over; on a GPU without what launching costs."""
    for call in calls[:3]:
        call()
    if device.type == "cuda":
        return _cuda_seconds(calls, device)
    taken: list[float] = []
    for call in cycle(calls):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
        if sum(taken) > SECONDS and len(taken) >= 3:
            return min(taken)
    raise AssertionError("no calls")


def _cuda_seconds(calls: list[Callable[[], object]], device: torch.device) -> float:
    """From a graph of 20 rounds or more, so that the launches of small products do not count."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph, launches = torch.cuda.CUDAGraph(), [call for _ in range(20) for call in calls]
        with torch.cuda.graph(graph):
            for call in launches:
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / len(launches)
