"""How many threads a run computes with on a CPU."""

import os

import torch

SMALL = 2**21
"""Weights below which one thread is faster than two on a processor without AVX-512, as in most laptops. With 265,000 SFT read
9,900 tokens a second with one thread and 6,700 with two, and the demo took 216 s and 269 s. Its operations take
microseconds, less than waiting for another thread. On an AMD EPYC with AVX-512 the demo takes 187 s and 159 s."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose_threads(weights: int, device: torch.device) -> str:
    """Compute with one thread if a model on a CPU without AVX-512 is `SMALL`, unless the environment says how many.

    Returns a line that says so; "" if nothing changes. ``weights`` is the number of the model's.
    """
    count, is_wide = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    is_asked = any(name in os.environ for name in VARIABLES)
    if device.type != "cpu" or weights >= SMALL or count == 1 or is_wide or is_asked:
        return ""
    torch.set_num_threads(1)
    return (
        f"computes with 1 of {count} threads, which is faster for a model of {weights:,} weights "
        f"(OMP_NUM_THREADS={count} uses all)"
    )
