"""Checks of what a policy writes and reads before its first step, and of what the run needs of the machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heedful.checks.findings import Finding, finding
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.configs.options import TrainingOptions
from heedful.core.masking import masked_mean
from heedful.devices import total_memory
from heedful.engines.responses import Responses
from heedful.errors import CheckpointError
from heedful.kernels.device import HALF
from heedful.models.shape import load_shape
from heedful.planning.memory import GB, Lengths, plan_of
from heedful.training.memory_preflight import main_memory, planned_as
from heedful.training.non_finite import NonFiniteGuard
from heedful.training.thresholds import (
    CUT_AT_START,
    EXPLORES,
    FAR_REFERENCE,
    FORGOTTEN,
    FULL,
    HALF_ROUNDING,
    LARGE_MISMATCH,
    MISMATCH,
    ROUNDING,
    STEP_SHARE,
    UNLIKELY,
)
from heedful.types import Completion

WEIGHTS = 512
"""Values of each weight that are compared before and after a step."""


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


def far_reference(
    policy: Sequence[float], reference: Sequence[float], tokens: Sequence[int], name: str
) -> Finding | None:
    """Is the reference that was named absurdly far from the policy on responses of the data?

    Args:
        policy, reference: log-probs of responses, summed over their tokens, in nats.
        tokens: their numbers of tokens.
        name: of the reference.
    """
    number = max(1, sum(tokens))
    mean = sum(abs(p - r) for p, r in zip(policy, reference, strict=True)) / number
    if not mean > FAR_REFERENCE:
        return None
    return finding(
        "kl-not-zero",
        "warn",
        f"before the first step the log-probs of policy and --reference {name} differ by {mean:.2g} nats per token",
        f"mean log-prob of the tokens of {len(tokens)} responses: policy {sum(policy) / number:.3f}, reference "
        f"{sum(reference) / number:.3f}",
    )


def sampler_mismatch(passes: FirstPasses, config: RolloutConfig) -> Finding | None:
    """Were tokens drawn with the probabilities that the policy has?"""
    mean = passes.mean((passes.sampler - passes.old).abs())
    if mean <= MISMATCH or config.filters_on_servers:  # then they differ by the log of the kept mass, as they should
        return None
    return finding(
        "sampler-mismatch",
        "fail" if mean > LARGE_MISMATCH and not config.corrects else "warn",
        f"log-probs of the sampler and of the policy differ by {mean:.2g} nats per token"
        + (", which --importance corrects for" if config.corrects else ""),
        f"mean log-prob: sampler {passes.mean(passes.sampler):.3f}, policy {passes.mean(passes.old):.3f}",
    )


def responses_cut(responses: Responses, config: RolloutConfig) -> Finding | None:
    """How many responses reach the limit without an end?"""
    cut, number = int(responses.truncated.sum()), len(responses)
    if config.response_length != "stop" or cut <= CUT_AT_START * number:
        return None
    what = "episodes" if config.environment else "sampled responses"
    return finding(
        "responses-cut",
        "warn",
        f"{cut} of {number} {what} have no end within --max-new-tokens {config.max_new_tokens}"
        + (", which counts all turns and what the environment says" if config.environment else ""),
        f"mean length {float(responses.lengths.float().mean()):.0f} tokens",
    )


def memory(
    config: TrainingOptions, lengths: Lengths, device: torch.device, compute_dtype: torch.dtype
) -> Finding | None:
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


def not_finite(skips: NonFiniteGuard) -> Finding | None:
    """Was an update of the first step left out because its loss or gradient is not a number?

    In float16 a gradient that overflows is not one: it lowers the loss scale.
    """
    if not skips.latest:
        return None
    whole = "the first step makes no update" if skips.in_a_row else "an update of the first step is left out"
    return finding("step-not-finite", "fail", f"{whole}: numbers are not finite", skips.latest)


def weights_before(model: nn.Module) -> list[Tensor]:
    """Some values of each trained weight, spread evenly."""
    return [_some(weight) for weight in model.parameters() if weight.requires_grad]


def _some(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // WEIGHTS)].clone()


def moved(model: nn.Module, before: Sequence[Tensor], learning_rate: float) -> Finding | None:
    """Has the first step moved the weights by about the learning rate, as Adam's first step does?"""
    largest = max(
        (float((_some(w) - b).abs().max()) for w, b in zip(_trained(model), before, strict=True)), default=0.0
    )
    if not before or largest > STEP_SHARE * learning_rate:
        return None
    return finding(
        "step-moves-nothing",
        "fail",
        f"the first step moves no weight by more than {largest:.1g}, and its learning rate is {learning_rate:.1g}",
        "Adam's first step moves every weight that has a gradient by about the learning rate",
    )


def _trained(model: nn.Module) -> list[Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def unlikely(logprobs: Tensor, mask: Tensor, vocabulary: int) -> Finding | None:
    """Is text of the data less likely than a uniform guess? Then the model reads other token ids than in its training."""
    mean, uniform = -float(masked_mean(logprobs.float(), mask)), math.log(vocabulary)
    if not mean > uniform + UNLIKELY:  # NaN is another finding
        return None
    return finding(
        "text-unlikely",
        "fail",
        f"the data's tokens have {mean:.1f} nats each under the model, and a uniform guess has {uniform:.1f}",
        f"{int(mask.sum()):,} tokens; the tokenizer's ids are not those that the model was trained with",
    )


def explores(passes: FirstPasses, completions: Sequence[Completion]) -> Finding | None:
    """Do responses to the same prompt differ, or might they?"""
    groups: dict[str, list[Sequence[int]]] = {}
    for one in completions:
        groups.setdefault(one.prompt.source, []).append(one.ids)
    several = [group for group in groups.values() if len(group) > 1]
    if several and all(ids == group[0] for group in several for ids in group):
        what = f"all responses to each of {len(several)} prompts are the same"
        evidence = f"{len(several[0])} responses to a prompt"
    elif -passes.mean(passes.sampler) < EXPLORES:
        what = f"sampled tokens have a probability of {math.exp(passes.mean(passes.sampler)):.4f} on average"
        evidence = f"{-passes.mean(passes.sampler):.1g} nats per token"
    else:
        return None
    return finding("no-exploration", "fail" if several else "warn", what, evidence)


def discount(config: RolloutConfig, mean_length: float) -> Finding | None:
    """Does the discount leave something of a score for the first token?"""
    if not isinstance(config, OnlineConfig) or config.gamma == 1 or not config.estimator.per_token:
        return None
    left = config.gamma**mean_length
    if left >= FORGOTTEN:
        return None
    return finding(
        "discount",
        "warn",
        f"--gamma {config.gamma:g} leaves {left:.1g} of a score for the first of {mean_length:.0f} tokens",
        "a response has one score, at its end",
    )


def step_time(seconds: float, steps: int) -> str:
    """What a measured step foretells, in words."""
    whole = seconds * steps
    unit, size = next((u, s) for u, s in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if whole >= 2 * s or s == 1)
    number = max(1, round(whole / size))
    unit = unit if number > 1 else unit.removesuffix("s")
    return f"one step took {seconds:.2f} s, so the run of {steps:,} will take about {number} {unit}"
