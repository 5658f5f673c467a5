"""What a step cost: tokens per second, and memory."""

import sys

import torch


def performance(num_tokens: float, seconds: float, device: torch.device) -> dict[str, float]:
    """Tokens per second of a step, and the most memory so far.

    Args:
        num_tokens: of all ranks, that were learned from.
        seconds: of the update.
        device: of the model.
    """
    return {"perf/tokens_per_second": num_tokens / max(seconds, 1e-9), "perf/memory_gb": most_memory_gb(device)}


def most_memory_gb(device: torch.device) -> float:
    """The most memory so far, in GB: on a CUDA device what torch held there, elsewhere that of the process (0 if unknown)."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
    if sys.platform == "win32":
        return 0.0
    from resource import RUSAGE_SELF, getrusage

    unit = 1 if sys.platform == "darwin" else 1024
    return round(getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)
