"""Online DPO (Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback"): DPO on the policy's own samples.

The policy samples several responses per prompt, the reward ranks them, and the best and worst form a preference pair
for the DPO loss. There is no critic and no KL penalty per token; beta is in the loss.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.experience import TokenNumbers
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.loop import run_online
from heedful.algorithms.online.metrics import SHOWN, pass_metrics, rollout_metrics, score_metrics, tied_frac
from heedful.algorithms.online.recorder import Learned, Recorder
from heedful.algorithms.online.rollout import ScoredBatch
from heedful.algorithms.online.update import Update, shuffled
from heedful.configs.online import OnlineDPOConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import own_micro_batches
from heedful.devices import on_host, upload
from heedful.distributed.sharding import lockstep_forwards
from heedful.models.policy import TokenOutputs
from heedful.rewards.resolve import AnyRewards
from heedful.training.from_python import Objects, spill_to_files
from heedful.training.result import TrainingResult
from heedful.types import MicroBatch


def train_online_dpo(config: OnlineDPOConfig, rewards: AnyRewards = (), **objects: Unpack[Objects]) -> TrainingResult:
    """Optimise a policy on pairs of its own responses and write a run folder.

    Args:
        config: the settings.
        rewards: added to the config's: functions, `Reward` objects or strings.
        objects: a model and data in memory, and functions to call (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    with spill_to_files(config, OnlineDPOConfig, **objects) as (settings, callbacks):
        shown = SHOWN | {"reward/accuracy": "accuracy"}
        return run_online(settings, rewards, callbacks, make_experience=make_experience, learn=learn, shown=shown)


def best_and_worst(scores: Tensor, group_size: int) -> list[tuple[int, int]]:
    """Rows of the best and the worst response of each group of ``group_size`` consecutive scores; the first among
    equals.

    A group whose scores all tie forms no pair.
    """
    groups = scores.view(-1, group_size)
    chosen = zip(groups.argmax(dim=1).tolist(), groups.argmin(dim=1).tolist(), strict=True)
    return [(i * group_size + best, i * group_size + worst) for i, (best, worst) in enumerate(chosen) if best != worst]


class DPOExperience(NamedTuple):
    """A rollout batch with log-probs of policy and reference."""

    scored: ScoredBatch
    old: TokenOutputs | None
    """Teacher-forced pass of the policy that sampled; None if the update's own pass computes it."""
    ref_logprobs: Tensor
    kl: Tensor
    """KL to the reference per response, ``[batch]``; zero before a pass."""
    seconds: float
    """Duration of sampling, scoring and teacher-forced passes."""

    def token_numbers(self) -> dict[str, TokenNumbers]:
        """What policy and reference read, by the names of the columns of ``rollouts/``."""
        rows = torch.arange(len(self.ref_logprobs))
        read = {"ref_logprobs": self.ref_logprobs}
        if self.old is not None:
            read |= {"old_logprobs": self.old.logprobs, "entropy": self.old.entropy}
        return {name: TokenNumbers(rows, numbers) for name, numbers in read.items()}


def make_experience(learner: Learner[OnlineDPOConfig], scored: ScoredBatch) -> DPOExperience:
    """Log-probs of the responses under the reference and, with several optimizer steps per batch, under the policy."""
    batch, old, started = scored.batch, None, time.perf_counter()
    if learner.config.needs_old_pass:
        old = learner.token_outputs(learner.policy, batch, with_entropy=True)
    ref_logprobs = learner.token_outputs(learner.reference, batch).logprobs
    kl = ref_logprobs.new_zeros(len(ref_logprobs))
    if old is not None:
        kl = core.response_kl(old.logprobs, ref_logprobs, batch.response_mask)
    return DPOExperience(scored, old, ref_logprobs, kl, scored.seconds + time.perf_counter() - started)


def learn(learner: Learner[OnlineDPOConfig], experience: DPOExperience) -> Learned:
    """``ppo_epochs`` passes over the pairs of a rollout batch in shuffled minibatches, one optimizer step each.

    If all groups tie there is no pair, and the policy does not change.
    """
    config, learning_rate = learner.config, learner.schedule.advance()
    recorder = Recorder(learner, experience.kl)
    update = Update(learner, recorder)
    scored = experience.scored
    pairs = best_and_worst(scored.shaped, config.samples_per_prompt)
    if experience.old is None:
        _read_the_rest(learner, experience, pairs, recorder)
    for minibatch in _minibatches(pairs, config, learner.generator):
        for attempt in update.retry_on_oom(len(minibatch)):
            with attempt as limit:
                backward_minibatch(learner, experience, minibatch, recorder, limit)
                update.mix_in(limit)
        update.step([scored.completions[best].prompt.source for best, _ in minibatch])
    learner.non_finite_guard.count(update.steps)
    metrics = rollout_metrics(scored, experience.old, experience.kl, shaped=scored.shaped) | score_metrics(
        scored, config
    )
    metrics |= update.metrics() | {"optimizer/learning_rate": learning_rate}
    metrics["reward/tied_frac"] = tied_frac(scored.shaped, config.samples_per_prompt)
    metrics["time/score"] = experience.seconds - scored.sampled.seconds
    return recorder.end(metrics, scored.responses.lengths.sum(), scored.sampled.sampled_tokens)


def backward_minibatch(
    learner: Learner[OnlineDPOConfig],
    experience: DPOExperience,
    pairs: Sequence[tuple[int, int]],
    recorder: Recorder,
    limit: MicroBatch,
) -> None:
    """Accumulate gradients of the DPO loss over a minibatch's pairs in micro-batches, divided by the number of
    pairs."""
    lengths = on_host(experience.scored.batch.attention_mask).sum(dim=1).tolist()
    longest = {pair: max(lengths[row] for row in pair) for pair in pairs}
    shortest_first = sorted(pairs, key=longest.__getitem__)
    step = lockstep_forwards((learner.policy, learner.policy.dummy_loss))
    for part in own_micro_batches(shortest_first, limit.of_pairs, lambda pair: (2, longest[pair]), step):
        dpo_loss(learner, experience, part, recorder, num_pairs=len(pairs)).backward()
    if experience.old is None:
        recorder.share_kl(torch.tensor(pairs, device=experience.scored.batch.ids.device).flatten())


def dpo_loss(
    learner: Learner[OnlineDPOConfig],
    experience: DPOExperience,
    pairs: Sequence[tuple[int, int]],
    recorder: Recorder,
    *,
    num_pairs: int,
) -> Tensor:
    """The DPO loss of a micro-batch's pairs, divided by the minibatch's number of pairs."""
    config, device = learner.config, experience.scored.batch.ids.device
    rows = upload(torch.tensor([best for best, _ in pairs] + [worst for _, worst in pairs]), device)
    here, is_first = experience.scored.batch.select(rows), experience.old is None
    mask, half = here.response_mask, len(pairs)
    outputs = learner.policy(here.ids, here.attention_mask, mask, temperature=config.temperature, with_entropy=is_first)
    if is_first:
        recorder.add(_first_pass(outputs, experience, rows, recorder))
    old_logprobs = outputs.logprobs.detach() if experience.old is None else experience.old.logprobs[rows]
    recorder.record_log_ratio(rows, outputs.logprobs, old_logprobs)
    ours, theirs = (
        torch.where(mask, logprobs, 0.0).sum(dim=1) for logprobs in (outputs.logprobs, experience.ref_logprobs[rows])
    )
    tokens = mask.sum(dim=1)
    loss, metrics = core.dpo_loss(
        ours[:half],
        ours[half:],
        theirs[:half],
        theirs[half:],
        beta=config.beta,
        kind="ipo" if config.loss == "ipo-sum" else config.loss,
        chosen_tokens=tokens[:half] if config.loss == "ipo" else None,
        rejected_tokens=tokens[half:] if config.loss == "ipo" else None,
        num_pairs=num_pairs,
    )
    recorder.add(metrics)
    return loss


def _read_the_rest(
    learner: Learner[OnlineDPOConfig],
    experience: DPOExperience,
    pairs: Sequence[tuple[int, int]],
    recorder: Recorder,
) -> None:
    """Add the metrics of responses that are in no pair, which the update's passes do not read."""
    paired = {row for pair in pairs for row in pair}
    rest = [row for row in range(len(experience.scored.completions)) if row not in paired]
    if rest:
        rows = torch.tensor(rest, device=experience.scored.batch.ids.device)
        outputs = learner.token_outputs(learner.policy, experience.scored.batch.select(rows), with_entropy=True)
        recorder.sums.add_whole(_first_pass(outputs, experience, rows, recorder))


def _first_pass(outputs: TokenOutputs, experience: DPOExperience, rows: Tensor, recorder: Recorder) -> Metrics:
    """Metrics of some rows, from a pass of the policy that sampled. Fills in their KL."""
    mask = experience.scored.batch.response_mask
    kl = core.response_kl(outputs.logprobs.detach(), experience.ref_logprobs[rows], mask[rows])
    recorder.set_kl(rows, kl)
    recorder.record_first_pass(rows, outputs)
    seen = experience.scored.responses.logprobs[rows]
    return pass_metrics(outputs, seen, kl, mask[rows], num_tokens=mask.sum(), num_responses=len(mask))


def _minibatches(
    pairs: Sequence[tuple[int, int]], config: OnlineDPOConfig, generator: torch.Generator
) -> Iterator[list[tuple[int, int]]]:
    """The pairs of every minibatch of every epoch; ties shrink all of them evenly."""
    size = config.minibatch_size // config.samples_per_prompt
    for _ in range(config.ppo_epochs):
        for rows in shuffled(len(pairs), size, generator):
            yield [pairs[i] for i in rows.tolist()]
