"""Checks of what a policy writes and reads before its first step, and of what the run needs of the machine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.masking import masked_mean
from heedful.devices import total_memory
from heedful.doctor.findings import Finding, finding
from heedful.engines.responses import Responses
from heedful.errors import CheckpointError
from heedful.kernels.device import HALF
from heedful.models.shape import load_shape
from heedful.planning.memory import GB, Lengths, Trainer, plan_of
from heedful.training.memory_preflight import main_memory, planned_as
from heedful.training.non_finite import NonFiniteGuard

ROUNDING, HALF_ROUNDING = 1e-3, 0.05
"""Nats per token that two passes over the same tokens may differ by on average: docs/metrics.md has 1e-5 in float32 and
0.02 in bfloat16 as healthy. Beyond, noise is what is clipped."""
FAR_REFERENCE = 1.0
"""Nats per token. A reference that was named on purpose is another model, but one at this distance does not write such texts
at all."""
MISMATCH, LARGE_MISMATCH = 0.05, 0.5
"""Mean difference, in nats, of a token's log-prob under sampler and policy: docs/metrics.md has 0.02 as healthy in bfloat16.
From 0.5 on the ratios of tokens are off by a factor of 1.6 on average, so other weights have sampled."""
MANY_CUT = 0.5
"""Share of responses without an end above which more than half of what is scored are beginnings."""
FULL = 0.9
"""A plan may be a tenth off."""


@dataclass(frozen=True)
class FirstPasses:
    """Log-probs of sampled tokens ``[B, T]`` before the first step."""

    mask: Tensor
    """The tokens of responses."""
    sampler: Tensor
    """As they were drawn."""
    old: Tensor
    """The policy's pass before the update."""
    new: Tensor
    """The update's own pass."""
    reference: Tensor | None
    """None if nothing reads it."""
    dtype: torch.dtype
    """Of the products."""

    @property
    def rounding(self) -> float:
        return HALF_ROUNDING if self.dtype in HALF else ROUNDING

    def mean(self, values: Tensor) -> float:
        """Mean over the tokens of responses."""
        return float(masked_mean(values.detach().float(), self.mask))


def ratio(passes: FirstPasses) -> Finding | None:
    """Is the ratio of the policy to itself 1?"""
    off = (passes.new - passes.old).abs()
    mean = passes.mean(off)
    if mean <= passes.rounding:
        return None
    return finding(
        "ratio-not-one",
        "fail",
        f"two passes of the policy over the same tokens differ by {mean:.2g} nats per token, and at most "
        f"{passes.rounding:g} is rounding",
        f"the largest ratio is {float(off[passes.mask].max().exp()):.3g}, products are in "
        f"{str(passes.dtype).removeprefix('torch.')}",
    )


def kl(passes: FirstPasses, reference: str | None) -> Finding | None:
    """Is the KL to the reference 0, if that is the policy as it starts (None), and not absurd otherwise?"""
    if passes.reference is None:
        return None
    mean = abs(passes.mean(passes.old - passes.reference))
    if mean <= (passes.rounding if reference is None else FAR_REFERENCE):
        return None
    whose = "which is the policy as it starts" if reference is None else f"--reference {reference}"
    return finding(
        "kl-not-zero",
        "fail" if reference is None else "warn",
        f"before the first step the KL to the reference, {whose}, is {mean:.2g} nats per token",
        f"mean log-prob of the sampled tokens: policy {passes.mean(passes.old):.3f}, reference "
        f"{passes.mean(passes.reference):.3f}",
    )


def sampler_mismatch(passes: FirstPasses, config: RolloutConfig) -> Finding | None:
    """Were tokens drawn with the probabilities that the policy has?"""
    mean = passes.mean((passes.sampler - passes.old).abs())
    if mean <= MISMATCH or config.filters_on_servers:  # then they differ by the log of the kept mass, as they should
        return None
    is_corrected = isinstance(config, OnlineConfig) and config.corrects
    return finding(
        "sampler-mismatch",
        "fail" if mean > LARGE_MISMATCH and not is_corrected else "warn",
        f"log-probs of the sampler and of the policy differ by {mean:.2g} nats per token"
        + (", which --importance corrects for" if is_corrected else ""),
        f"mean log-prob: sampler {passes.mean(passes.sampler):.3f}, policy {passes.mean(passes.old):.3f}",
    )


def responses_cut(responses: Responses, config: RolloutConfig) -> Finding | None:
    """How many responses reach the limit without an end?"""
    cut, number = int(responses.truncated.sum()), len(responses.truncated)
    if config.response_length != "stop" or cut <= MANY_CUT * number:
        return None
    return finding(
        "responses-cut",
        "warn",
        f"{cut} of {number} sampled responses have no end within --max-new-tokens {config.max_new_tokens}",
        f"mean length {float(responses.lengths.float().mean()):.0f} tokens",
    )


def memory(config: Trainer, lengths: Lengths, device: torch.device, compute_dtype: torch.dtype) -> Finding | None:
    """Does the plan fit into the memory with some room?"""
    kind, half = planned_as(device), compute_dtype in HALF
    try:
        plan = plan_of(config, load_shape, lengths, ranks=1, device=kind, half=half)
    except CheckpointError:  # a model that cannot be planned
        return None
    own = total_memory(device)
    there = main_memory() if own is None else own
    if plan.peak <= FULL * there:
        return None
    return finding(
        "memory",
        "warn",
        f"the plan needs {plan.peak / GB:.1f} GB, and {'this machine' if own is None else 'the GPU'} has {there / GB:.1f} GB",
        f"most in the phase {plan.peak_phase!r}, with texts of up to {lengths.longest} tokens",
    )


def not_finite(skips: NonFiniteGuard, grad_scaler: object) -> Finding | None:
    """Was the first step left out because its loss or gradient is not a number? In float16 the first ones may be."""
    if not skips.in_a_row or grad_scaler is not None:
        return None
    return finding("step-not-finite", "fail", "the first step makes no update: numbers are not finite", skips.latest)


def step_time(seconds: float, steps: int) -> str:
    """What a measured step foretells, in words."""
    whole = seconds * steps
    unit, size = next((u, s) for u, s in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if whole >= 2 * s or s == 1)
    number = max(1, round(whole / size))
    unit = unit if number > 1 else unit.removesuffix("s")
    return f"one step took {seconds:.2f} s, so the run of {steps:,} will take about {number} {unit}"
