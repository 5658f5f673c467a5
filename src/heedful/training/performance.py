"""Performance metrics of a step: tokens per second, and peak memory."""

import sys
from collections.abc import Mapping

import torch

from heedful.devices import peak_memory


def performance(num_tokens: float, seconds: float, device: torch.device) -> dict[str, float]:
    """Trained tokens of all ranks per second of the update, and peak memory so far."""
    return {"perf/tokens_per_second": num_tokens / max(seconds, 1e-9), "perf/memory_gb": most_memory_gb(device)}


def online_performance(
    metrics: Mapping[str, float], num_tokens: float, device: torch.device, *, sampled_tokens: float
) -> dict[str, float]:
    """Response tokens per second of an online step's sampling, scoring, update and whole, and peak memory.

    ``metrics`` has the seconds of each phase. All rates but sampling's use the ``num_tokens`` that were trained on.
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
    """Peak memory so far in GB: of tensors on a device with memory of its own, else the process's (0 if unknown)."""
    on_device = peak_memory(device)
    if on_device is not None:
        return round(on_device / 1e9, 3)
    if sys.platform == "win32":
        return 0.0
    from resource import RUSAGE_SELF, getrusage

    unit = 1 if sys.platform == "darwin" else 1024
    return round(getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)
