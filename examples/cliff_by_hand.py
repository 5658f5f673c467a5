"""Over-optimisation by hand: best-of-n by a proxy, gold against sqrt(KL), where gold turns, and which form foretells it.

python examples/cliff_by_hand.py
"""

import math
import random

from heedful import core

seeds, prompts, responses, known = 4, 20, 512, 64
sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def scored(draw, taste):
    """A response as proxy and gold see it: the proxy likes its trick, which gold minds the more the larger it is."""
    quality, trick = draw.gauss(0, 1), draw.gauss(0, 1)
    return quality + taste * trick, quality - 0.3 * trick**2


def main():
    distances = [math.sqrt(core.kl_bound(n)) for n in sizes]
    runs = []
    for seed in range(seeds):
        draw, gains = random.Random(seed), []
        taste = draw.uniform(0.9, 1.1)  # no two proxies are alike
        for _ in range(prompts):
            proxy, gold = zip(*(scored(draw, taste) for _ in range(responses)), strict=True)
            gains.append(core.best_of_n_gains(proxy, gold, sizes))
        runs.append(gains)
    for i, n in enumerate(sizes):
        gold = sum(gains[i] for run in runs for gains in run) / (seeds * prompts)
        print(f"n={n} d={distances[i]:.2f} gold={gold:.2f}")

    seen = [[[*gains[: sizes.index(known) + 1]] for gains in run] for run in runs]
    near = distances[: sizes.index(known) + 1]
    peak = core.peak_interval([near] * seeds, seen, "best-of-n")
    turns = [core.n_of_kl(d**2) for d in peak]
    print(f"seen up to n={known}, gold turns at n={turns[0]:.0f}, 95 % interval {turns[1]:.0f} to {turns[2]:.0f}")

    errors = {}
    for form in ("best-of-n", "rl", "log-n", "linear", "flat"):
        gain = core.forecast([near] * seeds, seen, form, at=distances[-1])
        errors[form] = core.forecast_error([distances] * seeds, runs, form, known=near[-1])[-1]
        print(
            f"{form}: at n={sizes[-1]} {gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f}), too high by "
            f"{errors[form].value:.2f} ({errors[form].low:.2f} to {errors[form].high:.2f})"
        )
    return turns, errors


if __name__ == "__main__":
    main()
