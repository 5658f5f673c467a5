"""From prompts to scored responses: sample, score, and read what was sampled once more."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from heedful import core
from heedful.configs.online import RolloutConfig
from heedful.data.loading import EncodedPrompt
from heedful.errors import RewardError
from heedful.faults import hit
from heedful.models.policy import TokenOutputs
from heedful.rewards.scoring import Scores
from heedful.sampling.rollouts import Rollouts
from heedful.sampling.teacher_forced import token_outputs
from heedful.train.online.dynamic_sampling import SampledBatch, draw_untied
from heedful.train.online.learner import Learner
from heedful.train.online.shaping import shape
from heedful.types import Completion


@dataclass(frozen=True)
class Scored:
    """A rollout batch with its scores, before advantages are estimated.

    Responses without a score are not in it; if responses to a prompt are compared, nor are the others to the same prompt.
    """

    rollouts: Rollouts
    completions: list[Completion]
    given: Scores
    norm: core.ScoreNorm
    """What the scores are normalised by."""
    shaped: Float[Tensor, " batch"]
    """Normalised and clipped scores with the penalty of responses that have no end."""
    old: TokenOutputs | None
    """The teacher-forced pass of the policy that sampled; None if the update's own pass is the first."""
    ref_logprobs: Float[Tensor, "batch time"] | None
    """None if the reference is not needed."""
    kl: Float[Tensor, " batch"]
    """KL to the reference of each response (`response_kl`), 0 if it is not needed. Without ``old`` the update fills it in."""
    seconds: dict[str, float]
    drawn: SampledBatch
    """All that was sampled, those without a score included, to be written down."""
    refilled: dict[str, float] = field(default_factory=dict)
    """Metrics of dynamic sampling, and of servers that sampled."""

    @property
    def scores(self) -> list[float]:
        """As the rewards gave them."""
        return self.given.totals


def respond(learner: Learner[RolloutConfig], prompts: Sequence[EncodedPrompt]) -> Scored:
    """Sample, score and read what was sampled: prompts -> responses -> scores -> log-probs of policy and reference.

    If the reference has no part in what is learned, its pass is left out. So is the policy's, if nothing needs it before the
    update (``needs_old_pass``). Responses on which a reward failed are left out of all that follows (`_kept`). Raises
    RewardError.
    """
    config, started = learner.config, time.perf_counter()
    drawn = draw_untied(learner, prompts)
    rollouts, completions, given = drawn.rollouts, drawn.completions, drawn.given
    if given.failed:
        rows = _kept(drawn, config)
        rollouts = rollouts.select(torch.tensor(rows, device=rollouts.lengths.device))
        completions, given = [completions[row] for row in rows], given.select(rows)
    norm = learner.score_norm.including(given.totals)
    batch, mask = rollouts.batch, rollouts.batch.response_mask
    old = ref_logprobs = None
    if config.needs_old_pass:
        old = token_outputs(
            learner.policy,
            batch,
            temperature=config.temperature,
            micro_batch=config.scoring_micro_batch,
            room=learner.sampler.room,
            with_entropy=True,
            with_states=learner.policy.value_head is not None,
        )
    if config.needs_reference:
        assert learner.reference is not None
        ref_logprobs = token_outputs(
            learner.reference,
            batch,
            temperature=config.temperature,
            micro_batch=config.scoring_micro_batch,
            room=learner.sampler.room,
        ).logprobs
    shaped = shape(torch.tensor(given.totals, device=mask.device), rollouts, norm, config)
    kl = (shaped if ref_logprobs is None else ref_logprobs).new_zeros(len(mask))
    if old is not None and ref_logprobs is not None:
        kl = response_kl(old.logprobs, ref_logprobs, mask)
    hit("pass")
    seconds = {"time/rollout": drawn.seconds, "time/score": time.perf_counter() - started - drawn.seconds}
    return Scored(rollouts, completions, given, norm, shaped, old, ref_logprobs, kl, seconds, drawn, drawn.metrics)


def _kept(drawn: SampledBatch, config: RolloutConfig) -> list[int]:
    """The rows to learn from: those with a score, and if responses to a prompt are compared, those of whole groups.

    Raises RewardError if there is nothing left.
    """
    rows, size = drawn.given.scored, config.samples_per_prompt
    if config.compares == "prompt":
        broken = {row // size for row in drawn.given.failed}
        rows = [row for row in rows if row // size not in broken]
    if len(rows) < (2 if config.compares else 1):
        raise RewardError(
            f"{len(drawn.given.failed)} of {len(drawn.completions)} responses have no score, and what is left is too little "
            "to learn from: a prompt's responses are compared only if all of them have a score; correct the reward"
        )
    return rows


def response_kl(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """KL to the reference of each response ``[batch]``: k1 summed over its tokens."""
    return torch.where(response_mask, core.kl_estimate(logprobs, ref_logprobs, kind="k1"), 0.0).sum(dim=1)
