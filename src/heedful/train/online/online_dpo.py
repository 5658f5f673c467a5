"""Online DPO (Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback"): DPO on the policy's own samples.

The policy answers each prompt several times, the reward ranks the answers, and the best and the worst make a preference pair
for the loss of DPO. There is no critic and no price per token of KL: beta is in the loss.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from heedful import core
from heedful.configs.online import OnlineDPOConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import own_micro_batches
from heedful.models.policy import TokenOutputs
from heedful.parallel import ranks
from heedful.parallel.sharding import passes
from heedful.rewards import Reward, RewardFunction
from heedful.sampling.teacher_forced import token_outputs
from heedful.train.metric_sums import MetricSums
from heedful.train.non_finite import StepResult
from heedful.train.online.evaluation import evaluate, sample_rows
from heedful.train.online.learner import Learner
from heedful.train.online.metrics import SHOWN, note_of, pass_metrics, rollout_metrics, score_metrics, tied_frac
from heedful.train.online.minibatch import gradients, shuffled, take_step
from heedful.train.online.respond import Scored, respond, response_kl
from heedful.train.online.rollout_files import forget_rollouts, write_rollouts
from heedful.train.online.start import start
from heedful.train.optimization import step_metrics
from heedful.train.performance import online_performance
from heedful.train.run import Run


def train_online_dpo(config: OnlineDPOConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Optimise a policy on pairs of its own responses and write a run folder. Returns what summary.json holds.

    Args:
        config: the settings.
        rewards: added to the config's: functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    config, learner, held_out, about = start(config, rewards)
    with Run(
        config,
        learner,
        config.algorithm,
        config.steps,
        objective=config.best_metric,
        higher_is_better=True,
        shown=SHOWN | {"reward/accuracy": "accuracy"},
        can_evaluate=bool(held_out),
        **about,
    ) as run:
        forget_rollouts(config, after=run.done)
        for step in run.steps():
            if run.needs_update(step):
                scored = respond(learner, next(learner.prompts))
                with run.update():
                    metrics = learn(learner, scored)
                    write_rollouts(config, step, scored)
                    run.log(step, metrics, note=note_of(metrics, config.samples_per_prompt, scored.given.note))
                    if run.samples_due(step):
                        run.show_samples(step, sample_rows(scored, config))
                    learner.check(metrics)
            if run.evaluation_due(step):
                run.evaluate(step, evaluate(learner, held_out))
        run.summary["score_norm"] = learner.score_norm.state_dict()
    return run.summary


def best_and_worst(scores: Tensor, group_size: int) -> list[tuple[int, int]]:
    """Rows of the best and the worst response of each group of ``group_size`` consecutive scores; of equal ones the first.

    A group whose scores all tie prefers nothing and makes no pair.
    """
    groups = scores.view(-1, group_size)
    chosen = zip(groups.argmax(dim=1).tolist(), groups.argmin(dim=1).tolist(), strict=True)
    return [(i * group_size + best, i * group_size + worst) for i, (best, worst) in enumerate(chosen) if best != worst]


def learn(learner: Learner[OnlineDPOConfig], scored: Scored) -> dict[str, float]:
    """``ppo_epochs`` passes over the pairs of a rollout batch in shuffled minibatches, one optimizer step each.

    Returns mean metrics. If all responses to every prompt tie there is no pair, and the policy stays as it is.
    """
    config, started = learner.config, time.perf_counter()
    learning_rate = learner.schedule.advance()
    pairs = best_and_worst(scored.shaped, config.samples_per_prompt)
    sums, taken = MetricSums(), list[StepResult]()
    if scored.old is None:
        _read_the_rest(learner, scored, pairs, sums)
    for minibatch in _minibatches(pairs, config, learner.generator):
        before = dict(sums.totals)
        mixed = _gradients(learner, scored, minibatch, sums)
        sources = [scored.completions[best].prompt.source for best, _ in minibatch] + mixed
        step = take_step(learner, learner.trained, sums, before=before, update=len(taken) + 1, sources=sources)
        taken.append(step)
        if learner.average is not None and math.isfinite(step.norm):  # else the step was skipped
            learner.average.update()
    learner.skips.count(taken)
    metrics = rollout_metrics(scored, shaped=scored.shaped) | score_metrics(scored, config)
    metrics |= sums.means(max(1, sum(not step.is_left_out for step in taken)))
    metrics |= step_metrics([step.norm for step in taken])
    metrics["reward/tied_frac"] = tied_frac(scored.shaped, config.samples_per_prompt)
    metrics |= {"optimizer/learning_rate": learning_rate, "time/update": time.perf_counter() - started}
    learned, sampled = float(scored.rollouts.lengths.sum()), scored.drawn.sampled_tokens
    return metrics | online_performance(metrics, learned, learner.policy.device, sampled_tokens=sampled)


def _gradients(
    learner: Learner[OnlineDPOConfig], scored: Scored, pairs: Sequence[tuple[int, int]], sums: MetricSums
) -> list[str]:
    """Gradients of all that a minibatch's step learns from, as `gradients` gives them."""

    def of_minibatch() -> bool:
        accumulate(learner, scored, pairs, sums)
        return True

    mixed = gradients(learner, sums, of_minibatch, rows=len(pairs))
    assert mixed is not None
    return mixed


def accumulate(
    learner: Learner[OnlineDPOConfig], scored: Scored, pairs: Sequence[tuple[int, int]], sums: MetricSums
) -> None:
    """Gradients of the DPO loss over a minibatch's pairs, a micro-batch at a time; each is divided by their number."""
    config, batch, ref_logprobs = learner.config, scored.rollouts.batch, scored.ref_logprobs
    assert ref_logprobs is not None
    lengths = batch.attention_mask.sum(dim=1).tolist()
    longest = {pair: max(lengths[row] for row in pair) for pair in pairs}
    ordered, read = sorted(pairs, key=longest.__getitem__), list[Tensor]()
    limit, step = learner.micro_batch.of_pairs, passes((learner.policy, learner.policy.zero))
    for part in own_micro_batches(ordered, limit, lambda pair: (2, longest[pair]), step):
        rows = torch.tensor([best for best, _ in part] + [worst for _, worst in part], device=batch.ids.device)
        here, is_first = batch.select(rows), scored.old is None
        mask = here.response_mask
        outputs = learner.policy(
            here.ids, here.attention_mask, mask, temperature=config.temperature, with_entropy=is_first
        )
        if is_first:
            sums.add(_measured(outputs, scored, rows))
            read.append(rows)
        ours, theirs = (
            torch.where(mask, logprobs, 0.0).sum(dim=1) for logprobs in (outputs.logprobs, ref_logprobs[rows])
        )
        tokens = mask.sum(dim=1)
        loss, metrics = core.dpo_loss(
            ours[: len(part)],
            ours[len(part) :],
            theirs[: len(part)],
            theirs[len(part) :],
            beta=config.beta,
            kind="ipo" if config.loss == "ipo-sum" else config.loss,
            chosen_tokens=tokens[: len(part)] if config.loss == "ipo" else None,
            rejected_tokens=tokens[len(part) :] if config.loss == "ipo" else None,
            num_pairs=len(pairs),
        )
        loss.backward()
        sums.add(metrics)
    if scored.old is None:
        ranks.all_well()
        ranks.put_together(scored.kl, read, torch.tensor(pairs, device=batch.ids.device).flatten())


def _read_the_rest(
    learner: Learner[OnlineDPOConfig], scored: Scored, pairs: Sequence[tuple[int, int]], sums: MetricSums
) -> None:
    """Add the metrics of responses that are in no pair: the update, whose pass gives those of the others, reads them not."""
    config, batch, read = learner.config, scored.rollouts.batch, {row for pair in pairs for row in pair}
    rest = torch.tensor([row for row in range(len(batch.ids)) if row not in read], device=batch.ids.device)
    if len(rest):
        outputs = token_outputs(
            learner.policy,
            batch.select(rest),
            temperature=config.temperature,
            micro_batch=config.scoring_micro_batch,
            room=learner.sampler.room,
            with_entropy=True,
        )
        sums.add_whole(_measured(outputs, scored, rest))


def _measured(outputs: TokenOutputs, scored: Scored, rows: Tensor) -> Metrics:
    """Metrics of some rows of the rollout batch, from a pass of the policy that sampled. Their KL is filled in."""
    rollouts, ref_logprobs = scored.rollouts, scored.ref_logprobs
    assert ref_logprobs is not None
    mask = rollouts.batch.response_mask
    scored.kl[rows] = response_kl(outputs.logprobs.detach(), ref_logprobs[rows], mask[rows])
    return pass_metrics(
        outputs,
        rollouts.sampler_logprobs[rows],
        scored.kl[rows],
        mask[rows],
        num_tokens=mask.sum(),
        num_responses=len(mask),
    )


def _minibatches(
    pairs: Sequence[tuple[int, int]], config: OnlineDPOConfig, generator: torch.Generator
) -> Iterator[list[tuple[int, int]]]:
    """The pairs of every minibatch of every epoch; ties leave all of them smaller."""
    size = config.minibatch_size // config.samples_per_prompt
    for _ in range(config.ppo_epochs):
        for rows in shuffled(len(pairs), size, generator):
            yield [pairs[i] for i in rows.tolist()]
