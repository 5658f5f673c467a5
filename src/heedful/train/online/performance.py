"""What a step of an online algorithm cost: tokens per second of each phase, and memory."""

from collections.abc import Mapping

import torch

from heedful.train.performance import most_memory_gb


def performance(
    metrics: Mapping[str, float], num_tokens: float, device: torch.device, *, sampled_tokens: float
) -> dict[str, float]:
    """Response tokens per second of sampling, scoring, the update and all three, and the most memory so far.

    Args:
        metrics: of the step, with the seconds of each phase.
        num_tokens: response tokens that were learned from, by which all but sampling is measured.
        device: of the policy.
        sampled_tokens: response tokens that were sampled.
    """
    seconds = {phase: metrics[f"time/{phase}"] for phase in ("rollout", "score", "update")}
    tokens = {"rollout": sampled_tokens, "score": num_tokens, "update": num_tokens}
    speeds = {f"perf/{phase}_tokens_per_second": tokens[phase] / max(seconds[phase], 1e-9) for phase in seconds}
    return {
        "perf/tokens_per_second": num_tokens / sum(seconds.values()),
        **speeds,
        "perf/memory_gb": most_memory_gb(device),
    }
