"""What a step cost: tokens per second, and memory."""

import sys
from collections.abc import Mapping

import torch


def performance(num_tokens: float, seconds: float, device: torch.device) -> dict[str, float]:
    """Tokens of all ranks that a step learned from, per second of its update, and the most memory so far."""
    return {"perf/tokens_per_second": num_tokens / max(seconds, 1e-9), "perf/memory_gb": most_memory_gb(device)}


def online_performance(
    metrics: Mapping[str, float], num_tokens: float, device: torch.device, *, sampled_tokens: float
) -> dict[str, float]:
    """Response tokens per second of sampling, scoring, the update and all three of an online step, and the most memory.

    ``metrics`` has the seconds of each phase; all but sampling is measured by the ``num_tokens`` that were learned from.
    """
    seconds = {phase: metrics[f"time/{phase}"] for phase in ("rollout", "score", "update")}
    tokens = {"rollout": sampled_tokens, "score": num_tokens, "update": num_tokens}
    speeds = {f"perf/{phase}_tokens_per_second": tokens[phase] / max(seconds[phase], 1e-9) for phase in seconds}
    return {
        "perf/tokens_per_second": num_tokens / sum(seconds.values()),
        **speeds,
        "perf/memory_gb": most_memory_gb(device),
    }


def most_memory_gb(device: torch.device) -> float:
    """The most memory so far, in GB: on a CUDA device what torch held there, elsewhere that of the process (0 if unknown)."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
    if sys.platform == "win32":
        return 0.0
    from resource import RUSAGE_SELF, getrusage

    unit = 1 if sys.platform == "darwin" else 1024
    return round(getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)
