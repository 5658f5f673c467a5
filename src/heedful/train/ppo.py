"""Proximal policy optimisation on human feedback, one token one action (Ouyang et al. 2022; Schulman et al. 2017).

Left out of the papers: nothing is bootstrapped after the last token, and there is no pretraining mix.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from heedful import core
from heedful.configs.ppo import PPOConfig
from heedful.data.chat import Renderer
from heedful.data.sampler import BatchSampler
from heedful.models.checkpoints import check_companion, load_tokenizer
from heedful.models.heads import disable_dropout
from heedful.models.lora import same_weights
from heedful.models.policy import save_policy
from heedful.models.quantize import four_bit
from heedful.models.value_model import load_value_model, save_value_model
from heedful.rewards import Reward, RewardFunction
from heedful.rollout.responses import make_sampler
from heedful.rollout.teacher_forced import micro_batches
from heedful.train.experience import (
    Experience,
    KLControl,
    Models,
    collect,
    reference_score_norm,
)
from heedful.train.loop import Numbers, Trainer, run
from heedful.train.memory import load_reference, load_trained, prepare, resolve_machine
from heedful.train.online import (
    OFF_POLICY,
    SHOWN,
    evaluate_policy,
    load_prompts,
    parents,
    reward_functions,
    sample_rows,
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


def train_ppo(config: PPOConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Optimise a policy against rewards and write a run folder. Returns what summary.json holds.

    ``rewards`` are added to the config's: functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError while it trains.
    """
    config, wanted = wanted_rewards(config, rewards)
    check_output(config)
    generator = seed_everything(config.seed)
    renderer = Renderer(load_tokenizer(config.model, chat_template=config.chat_template))
    train, held_out, counts = load_prompts(config, renderer)
    num_prompts = config.rollout_batch_size // config.samples_per_prompt
    prompt_sampler = BatchSampler(len(train), num_prompts, config.seed, batch_flag="--rollout-batch-size")
    longest = max(len(prompt.ids) for prompt in train + held_out) + config.max_new_tokens
    check_companion("--reference", config.reference, renderer.tokenizer, longest)
    check_companion("--value-model", config.value_model, renderer.tokenizer, longest)
    models = _load_models(config)
    sampler = make_sampler(config, renderer, models.policy, micro_batch_size=config.rollout_micro_batch_size)
    functions = reward_functions(wanted, models.policy, config)
    control = kl_control(config)
    optimizer = _make_optimizer(models, config)
    score_norm = reference_score_norm(
        models,
        [train[i % len(train)] for i in range(config.score_norm_samples)],
        rewards=functions,
        sampler=sampler,
        generator=generator,
    )
    try_rewards(functions, models.policy, train[:2] + held_out[:2], sampler, config.seed)
    latest: list[Experience] = []

    def step(i: int) -> Numbers:
        learning_rate = set_learning_rate(optimizer, lr_factor(i, total_steps=config.steps, options=config))
        prompts = [train[row] for row in next(prompt_sampler) for _ in range(config.samples_per_prompt)]
        experience, metrics = collect(
            models,
            prompts,
            rewards=functions,
            sampler=sampler,
            score_norm=score_norm,
            kl_coef=control.coef,
            config=config,
            generator=generator,
        )
        latest[:] = [experience]
        metrics |= learn(models, experience, optimizer, config, generator)
        metrics |= {"reference/kl_coef": control.coef, "optimizer/learning_rate": learning_rate}
        control.update(metrics["reference/kl"], config.rollout_batch_size)
        seconds = sum(metrics[name] for name in ("time/rollout", "time/score", "time/update"))
        return {**metrics, "perf/tokens_per_second": float(experience.batch.response_mask.sum()) / seconds}

    def save(folder: Path) -> None:
        save_policy(models.policy, renderer.tokenizer, folder, stop_ids=sampler.stop_ids)
        if models.value_model is not None:
            save_value_model(models.value_model, renderer.tokenizer, folder / "value_model")

    def evaluate() -> Numbers:
        return evaluate_policy(
            models.policy, models.reference, held_out, rewards=functions, sampler=sampler, config=config
        )

    trainer = Trainer(
        step=step,
        save=save,
        evaluate=evaluate if held_out else None,
        samples=lambda: sample_rows(latest[0], config),
        objective="eval/score_mean",
        higher_is_better=True,
    )
    return run(
        trainer,
        config,
        algorithm="ppo",
        total_steps=config.steps,
        shown=SHOWN,
        parents=parents(config, functions, config.value_model),
        facts={"rewards": [reward.name for reward in functions], "data": counts, "score_norm": vars(score_norm)},
        notes=[OFF_POLICY] if config.top_k or config.top_p < 1 else [],
    )


def learn(
    models: Models,
    experience: Experience,
    optimizer: torch.optim.Optimizer,
    config: PPOConfig,
    generator: torch.Generator,
) -> dict[str, float]:
    """``ppo_epochs`` passes over a rollout batch in shuffled minibatches, one optimizer step each. Returns mean metrics."""
    started = time.perf_counter()
    sums = MetricSums()
    norms = []
    for _ in range(config.ppo_epochs):
        order = torch.randperm(len(experience.kl), generator=generator).to(experience.kl.device)
        for rows in order.split(config.minibatch_size):
            accumulate(models, experience.select(rows), config, sums)
            norms.append(optimizer_step(optimizer, models.trained, config.max_grad_norm))
    means = sums.means(len(norms))
    return {**means, **step_metrics(norms), "time/update": time.perf_counter() - started}


def accumulate(models: Models, minibatch: Experience, config: PPOConfig, sums: MetricSums) -> None:
    """Gradients of one minibatch's loss, ``micro_batch_size`` rows at a time.

        L = L_policy + value_coef * L_value - entropy_coef * H

    A separate critic has parameters and learning rate of its own, so its loss is not weighted. Every term is divided by
    the minibatch's token count: the micro-batch size does not change the gradient.
    """
    num_tokens = minibatch.batch.response_mask.sum()
    for rows, batch in micro_batches(minibatch.batch, config.micro_batch_size):
        mask = batch.response_mask
        outputs = models.policy(
            batch.ids,
            batch.attention_mask,
            mask,
            temperature=config.temperature,
            with_entropy=config.entropy_coef > 0,
        )
        loss, metrics = core.ppo_policy_loss(
            outputs.logprobs,
            minibatch.old_logprobs[rows],
            minibatch.advantages[rows],
            mask,
            clip_range=config.clip_range,
            num_tokens=num_tokens,
        )
        sums.add(metrics)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * core.masked_mean(outputs.entropy, mask, count=num_tokens)
        values, weight = outputs.values, config.value_coef
        if models.value_model is not None:
            values, weight = models.value_model(batch.ids, batch.attention_mask, mask), 1.0
        value_loss, metrics = core.value_loss(
            values,
            minibatch.old_values[rows],
            minibatch.returns[rows],
            mask,
            clip_range=config.value_clip_range,
            num_tokens=num_tokens,
        )
        sums.add(metrics)
        (loss + weight * value_loss).backward()


def kl_control(config: PPOConfig) -> KLControl:
    """A fixed coefficient, or one steered to ``kl_target``."""
    if config.kl_target is None:
        return core.FixedKL(config.kl_coef)
    return core.AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)


def _make_optimizer(models: Models, config: PPOConfig) -> torch.optim.Optimizer:
    value_rate = config.value_learning_rate or config.learning_rate
    modules = [(models.policy.lm, config.learning_rate), (models.policy.value_head, value_rate)]
    return make_optimizer([*modules, (models.value_model, value_rate)], config)


def _load_models(config: PPOConfig) -> Models:
    device, dtype = resolve_machine(config)
    policy = load_trained(config, device, dtype, with_value_head=config.critic == "shared")
    reference = load_reference(config, policy)
    value_model = None
    if config.critic == "separate":
        start = config.value_model or config.model
        trunk = same_weights(policy.lm.base_model) if config.lora_rank and start == config.model else None
        smaller = four_bit(config, device, dtype)
        value_model = load_value_model(start, device=device, compute_dtype=dtype, trunk=trunk, four_bit=smaller)
        prepare(value_model, config, base=start)
        disable_dropout(value_model)
    prepare(policy, config, base=config.model)
    disable_dropout(policy)
    if value_model is not None:
        value_model.grad_scaler = policy.grad_scaler  # one optimizer, one scaler
    return Models(policy, reference, value_model)
