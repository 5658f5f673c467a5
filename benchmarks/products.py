"""Float32 products of matrices by both libraries that torch brings, MKL and oneDNN, over sizes and orders in memory.

python benchmarks/products.py [--threads 1] [--seconds 60] [--seed 0]

Draws the sides of products at random, odd and small ones too, and times what a linear layer does with them: the product
itself, the gradient of its input, and the gradient of its matrix. Prints, for each kind, oneDNN's median gain, the share
of products that it loses, and the worst cases: whether `heedful.kernels.cpu.products` should use it on this processor. That
it compiles code for every size is left out. Nothing else should run at the same time.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from heedful.kernels.cpu import products

SIDES = (1, 3, 8, 16, 31, 48, 64, 100, 128, 255, 256, 384, 512, 576, 768, 1000, 1024, 1536, 2048, 3000, 4864)


def seconds(multiply: Callable[[], Tensor]) -> float:
    """The shortest of four calls after one that compiles."""
    multiply()
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        multiply()
        taken.append(time.perf_counter() - started)
    return min(taken)


def pairs(x: Tensor, weight: Tensor, upstream: Tensor) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Each product of a linear layer by MKL, and as heedful's layers compute it by oneDNN."""
    return {
        "forward": (lambda: nn.functional.linear(x, weight), lambda: products.linear(x, weight)),
        "gradient of the input": (lambda: upstream @ weight, lambda: products.product(upstream, weight)),
        "gradient of the matrix": (
            lambda: upstream.t() @ x,
            lambda: products.product(upstream.t(), x).contiguous(),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draw = random.Random(options.seed)
    print(torch.cpu.get_capabilities()["cpu_name"], "- heedful uses oneDNN here:", products.USES_ONEDNN)
    smallest, least_side = products.SMALLEST_STEP, products.SMALLEST_SIDE
    products.USES_ONEDNN, products.SMALLEST_PRODUCT, products.SMALLEST_SIDE = True, 0, 0
    ratios: dict[str, list[tuple[float, tuple[int, int, int]]]] = {}
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        rows, terms, columns = sides = draw.choice(SIDES), draw.choice(SIDES), draw.choice(SIDES)
        if not smallest <= rows * terms * columns <= 2**30:
            continue
        x, weight, upstream = torch.randn(rows, terms), torch.randn(columns, terms), torch.randn(rows, columns)
        for name, (plain, other) in pairs(x, weight, upstream).items():
            kind = f"{name}, every side at least {least_side}"
            kind = kind if min(sides) >= least_side else f"{name}, a smaller side"
            ratios.setdefault(kind, []).append((seconds(plain) / seconds(other), sides))
    print("| product | count | oneDNN is faster, median | share that it loses | the worst (rows, terms, columns) |")
    print("|---|---|---|---|---|")
    for kind, found in sorted(ratios.items()):
        median = statistics.median(ratio for ratio, _ in found)
        lost = sum(ratio < 1 for ratio, _ in found) / len(found)
        worst = ", ".join(f"{ratio:.2f}x {sides}" for ratio, sides in sorted(found)[:2])
        print(f"| {kind} | {len(found)} | {median:.2f}x | {lost:.1%} | {worst} |")


if __name__ == "__main__":
    main()
