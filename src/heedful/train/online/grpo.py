"""Group-relative policy optimisation: each response is judged against others to its prompt, so there is no critic.

GRPO (Shao et al. 2024); by settings RLOO (Ahmadian et al. 2024), Dr. GRPO (Liu et al. 2025), DAPO's token average and
asymmetric clip (Yu et al. 2025), GSPO (Zheng et al. 2025), REINFORCE with the batch's mean as baseline (Williams 1992).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful import core
from heedful.checkpoints.save import save_policy
from heedful.checkpoints.tokenizer import check_companion, load_tokenizer
from heedful.configs.grpo import GRPOConfig
from heedful.core.score_norm import ScoreNorm, clip_scores
from heedful.data.chat import Renderer
from heedful.data.collate import Batch
from heedful.data.loading import EncodedPrompt
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.rewards import Completion, Reward, RewardFunction, score
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.sampling.teacher_forced import micro_batches, token_outputs
from heedful.train.loop import Numbers, Trainer, run
from heedful.train.online.shared import (
    OFF_POLICY,
    SHOWN,
    evaluate_policy,
    load_prompts,
    norm_metrics,
    parents,
    penalise_missing_eos,
    reward_functions,
    rollout_metrics,
    sample_rows,
    sampler_of,
    throughput,
    try_rewards,
    wanted_rewards,
)
from heedful.train.optimization import (
    MetricSums,
    lr_factor,
    make_optimizer,
    optimizer_step,
    seed_everything,
    set_learning_rate,
    step_metrics,
)
from heedful.train.run_folder import check_output
from heedful.train.setup import load_reference, load_trained, prepare, resolve_machine

TIED = (
    "every prompt's responses have one score, so all advantages are 0 and rewards teach nothing in this step; if that goes "
    "on, raise --samples-per-prompt or --temperature, or use a reward that tells responses apart"
)


@dataclass(frozen=True)
class Groups:
    """A rollout batch with all that the loss holds constant; consecutive rows share a prompt."""

    batch: Batch
    old_logprobs: Float[Tensor, "batch time"]
    ref_logprobs: Float[Tensor, "batch time"]
    advantages: Float[Tensor, " batch"]
    kl: Float[Tensor, " batch"]
    """KL to the reference of each response: k1 summed over its tokens."""
    completions: list[Completion]
    scores: list[float]

    def select(self, rows: Tensor) -> "Groups":
        """The given rows, in the given order, without their texts."""
        batch = Batch(self.batch.ids[rows], self.batch.attention_mask[rows], self.batch.response_mask[rows])
        per_row = (self.old_logprobs[rows], self.ref_logprobs[rows], self.advantages[rows], self.kl[rows])
        return Groups(batch, *per_row, completions=[], scores=[])


def train_grpo(config: GRPOConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Optimise a policy against rewards and write a run folder. Returns what summary.json holds.

    ``rewards`` are added to the config's: functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError while it trains.
    """
    config, wanted = wanted_rewards(config, rewards)
    check_output(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    renderer = Renderer(load_tokenizer(config.model, chat_template=config.chat_template))
    train, held_out, counts = load_prompts(config, renderer)
    prompt_sampler = sampler_of(train, config)
    longest = max(len(prompt.ids) for prompt in train + held_out) + config.max_new_tokens
    check_companion("--reference", config.reference, renderer.tokenizer, longest)
    policy = load_trained(config, device, dtype)
    reference = load_reference(config, policy)
    prepare(policy, config, base=config.model)
    disable_dropout(policy)
    sampler = make_sampler(config, renderer, policy, micro_batch_size=config.rollout_micro_batch_size)
    functions = reward_functions(wanted, policy, config)
    optimizer = make_optimizer([(policy, config.learning_rate)], config)
    try_rewards(functions, policy, train[:2] + held_out[:2], sampler, config.seed)
    latest: list[Groups] = []

    def step(i: int) -> Numbers:
        learning_rate = set_learning_rate(optimizer, lr_factor(i, total_steps=config.steps, options=config))
        prompts = [train[row] for row in next(prompt_sampler) for _ in range(config.samples_per_prompt)]
        groups, metrics = collect(
            policy, reference, prompts, rewards=functions, sampler=sampler, config=config, generator=generator
        )
        latest[:] = [groups]
        metrics |= learn(policy, groups, optimizer, config, generator)
        metrics["optimizer/learning_rate"] = learning_rate
        return {**metrics, **throughput(groups.batch.response_mask, metrics)}

    def evaluate() -> Numbers:
        return evaluate_policy(policy, reference, held_out, rewards=functions, sampler=sampler, config=config)

    def save(folder: Path) -> None:
        save_policy(policy, renderer.tokenizer, folder, stop_ids=sampler.stop_ids)

    trainer = Trainer(
        step=step,
        save=save,
        evaluate=evaluate if held_out else None,
        samples=lambda: sample_rows(latest[0], config, with_kl=config.kl_coef > 0),
        objective="eval/score_mean",
        higher_is_better=True,
        note=lambda metrics: TIED if config.samples_per_prompt > 1 and metrics["reward/tied_frac"] == 1 else None,
    )
    return run(
        trainer,
        config,
        algorithm="grpo",
        total_steps=config.steps,
        shown=SHOWN,
        parents=parents(config, functions),
        facts={"rewards": [reward.name for reward in functions], "data": counts},
        notes=[OFF_POLICY] if config.top_k or config.top_p < 1 else [],
    )


def collect(
    policy: Policy,
    reference: Policy,
    prompts: Sequence[EncodedPrompt],
    *,
    rewards: Sequence[Reward],
    sampler: Sampler,
    config: GRPOConfig,
    generator: torch.Generator,
) -> tuple[Groups, dict[str, float]]:
    """Groups of responses on one batch of prompts with their advantages, and metrics.

        shaped score = score [within score_clip] - missing_eos_penalty [cut] - kl_coef KL (with kl_in "reward")

    With ``missing_eos`` replace, the first two are -missing_eos_penalty where a response was cut. With ``kl_coef`` 0 the
    reference has no part in anything, so its pass is left out and the KL is not among the metrics.

    Raises RewardError.
    """
    started = time.perf_counter()
    rollouts, completions = sampler.respond(policy, prompts, generator)
    sampled = time.perf_counter()
    scores, means = score(rewards, completions)
    batch = rollouts.batch
    old = token_outputs(
        policy, batch, temperature=config.temperature, micro_batch=config.micro_batch, with_entropy=True
    )
    ref_logprobs = old.logprobs
    if config.kl_coef > 0:
        ref_logprobs = token_outputs(
            reference, batch, temperature=config.temperature, micro_batch=config.micro_batch
        ).logprobs
    kl = torch.where(batch.response_mask, core.kl_estimate(old.logprobs, ref_logprobs, kind="k1"), 0.0).sum(dim=1)
    clipped = clip_scores(torch.tensor(scores, device=kl.device), config.score_clip)
    shaped = penalise_missing_eos(clipped, rollouts.truncated, config)
    if config.kl_in == "reward":
        shaped = shaped - config.kl_coef * kl
    groups = Groups(batch, old.logprobs, ref_logprobs, advantages_of(shaped, config), kl, completions, scores)
    by_group = shaped.view(-1, _group_size(shaped, config))
    metrics = {
        **rollout_metrics(
            rollouts, scores=scores, shaped=shaped, old_logprobs=old.logprobs, entropy=old.entropy, kl=kl
        ),
        **norm_metrics(scores, ScoreNorm(), clip=config.score_clip, is_running=False),
        **{f"reward/{name}": mean for name, mean in means.items() if len(means) > 1},
        "reward/tied_frac": float((by_group.amax(dim=1) == by_group.amin(dim=1)).float().mean()),
        "time/rollout": sampled - started,
        "time/score": time.perf_counter() - sampled,
    }
    if config.kl_coef == 0:
        del metrics["reference/kl"]  # not measured
    return groups, metrics


def advantages_of(scores: Float[Tensor, " batch"], config: GRPOConfig) -> Float[Tensor, " batch"]:
    """Scores against those of the same group; with ``advantage`` batch-mean, the whole rollout batch is one group."""
    group_size = _group_size(scores, config)
    if config.advantage == "leave-one-out":
        return core.rloo_advantages(scores, group_size=group_size)
    return core.group_advantages(scores, group_size=group_size, scale="std" if config.advantage == "group" else "none")


def _group_size(scores: Tensor, config: GRPOConfig) -> int:
    return len(scores) if config.advantage == "batch-mean" else config.samples_per_prompt


def learn(
    policy: Policy,
    groups: Groups,
    optimizer: torch.optim.Optimizer,
    config: GRPOConfig,
    generator: torch.Generator,
) -> dict[str, float]:
    """``ppo_epochs`` passes over a rollout batch in shuffled minibatches, one optimizer step each. Returns mean metrics."""
    started = time.perf_counter()
    sums = MetricSums()
    norms = []
    for _ in range(config.ppo_epochs):
        order = torch.randperm(len(groups.kl), generator=generator).to(groups.kl.device)
        for rows in order.split(config.minibatch_size):
            accumulate(policy, groups.select(rows), config, sums)
            norms.append(optimizer_step(optimizer, [policy], config.max_grad_norm))
    means = sums.means(len(norms))
    return {**means, **step_metrics(norms), "time/update": time.perf_counter() - started}


def accumulate(policy: Policy, minibatch: Groups, config: GRPOConfig, sums: MetricSums) -> None:
    """Gradients of one minibatch's loss, a micro-batch at a time.

    Every term is divided by the minibatch's counts of responses and tokens: the micro-batch size does not change the
    gradient.
    """
    num_sequences, num_tokens = len(minibatch.kl), minibatch.batch.response_mask.sum()
    for rows, batch in micro_batches(minibatch.batch, config.micro_batch):
        mask = batch.response_mask
        logprobs = policy(batch.ids, batch.attention_mask, mask, temperature=config.temperature).logprobs
        old_logprobs, advantages = minibatch.old_logprobs[rows], minibatch.advantages[rows]
        if config.ratio == "token":
            loss, metrics = core.grpo_loss(
                logprobs,
                old_logprobs,
                minibatch.ref_logprobs[rows],
                advantages,
                mask,
                clip_range=config.clip_range,
                clip_range_high=config.clip_range_high,
                kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
                aggregate=config.aggregate,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                max_new_tokens=config.max_new_tokens,
            )
            metrics = {name: value for name, value in metrics.items() if name != "reference/kl"}  # collect's is of all
        else:
            loss, metrics = core.sequence_policy_loss(
                logprobs,
                old_logprobs,
                advantages,
                mask,
                clip_range=config.clip_range,
                clip_range_high=config.clip_range_high,
                num_sequences=num_sequences,
                length_normalise=config.ratio == "sequence-mean",
            )
        sums.add(metrics)
        loss.backward()
