"""Proximal policy optimisation on human feedback (Ouyang et al. 2022; Schulman et al. 2017), and A2C by settings.

Nothing is bootstrapped after the last token, also where a response was cut by length.
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful import core
from heedful.checkpoints.save import save_policy, save_value_model
from heedful.checkpoints.tokenizer import check_companion, load_tokenizer
from heedful.configs.a2c import A2CConfig
from heedful.configs.ppo import PPOConfig
from heedful.data.chat import Renderer
from heedful.models.heads import disable_dropout
from heedful.rewards import Reward, RewardFunction
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.sampling.teacher_forced import micro_batches
from heedful.train.loop import Numbers, Trainer, run
from heedful.train.online.average import WeightAverage, averaged
from heedful.train.online.critic import check_critic, load_critic, start_from_scores
from heedful.train.online.experience import Experience, KLControl, Models, action_mask, collect, make_score_norm
from heedful.train.online.losses import critic_loss, policy_loss
from heedful.train.online.ptx import PretrainingMix, load_mix
from heedful.train.online.shared import (
    OFF_POLICY,
    SHOWN,
    evaluate_policy,
    load_prompts,
    parents,
    reward_functions,
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


def train_ppo(config: PPOConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Optimise a policy against rewards and write a run folder. Returns what summary.json holds. An `A2CConfig` is one too.

    ``rewards`` are added to the config's: functions, `Reward` objects or strings.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError while it trains.
    """
    config, wanted = wanted_rewards(config, rewards)
    check_output(config)
    generator = seed_everything(config.seed)
    renderer = Renderer(load_tokenizer(config.model, chat_template=config.chat_template))
    train, held_out, counts = load_prompts(config, renderer)
    prompt_sampler = sampler_of(train, config)
    longest = max(len(prompt.ids) for prompt in train + held_out) + config.max_new_tokens
    check_companion("--reference", config.reference, renderer.tokenizer, longest)
    check_critic(config, renderer.tokenizer, longest)
    mix = load_mix(config, renderer)
    models = _load_models(config)
    sampler = make_sampler(config, renderer, models.policy, micro_batch_size=config.rollout_micro_batch_size)
    functions = reward_functions(wanted, models.policy, config)
    control = kl_control(config)
    optimizer = _make_optimizer(models, config)
    ema = WeightAverage(models.policy, config.ema_decay) if config.ema_decay else None
    score_norm = make_score_norm(models, train, rewards=functions, sampler=sampler, config=config, generator=generator)
    start_from_scores(models.value_model, functions, score_norm, config)
    try_rewards(functions, models.policy, train[:2] + held_out[:2], sampler, config.seed)
    sample_batch = partial(
        collect, models, rewards=functions, sampler=sampler, score_norm=score_norm, config=config, generator=generator
    )
    latest: list[Experience] = []

    def step(i: int) -> Numbers:
        learning_rate = set_learning_rate(optimizer, lr_factor(i, total_steps=config.steps, options=config))
        prompts = [train[row] for row in next(prompt_sampler) for _ in range(config.samples_per_prompt)]
        experience, metrics = sample_batch(prompts, kl_coef=control.coef)
        latest[:] = [experience]
        warming = i < config.critic_warmup_steps
        metrics |= learn(models, experience, optimizer, config, generator, critic_only=warming, mix=mix, ema=ema)
        metrics |= {"reference/kl_coef": control.coef, "optimizer/learning_rate": learning_rate}
        if not warming:  # a policy that stands still says nothing about the coefficient
            control.update(metrics["reference/kl"], config.rollout_batch_size)
        return {**metrics, **throughput(experience.batch.response_mask, metrics)}

    @averaged(ema)
    def save(folder: Path) -> None:
        _save_models(models, sampler, folder)

    @averaged(ema)
    def evaluate() -> Numbers:
        return evaluate_policy(
            models.policy, models.reference, held_out, rewards=functions, sampler=sampler, config=config
        )

    facts = {"rewards": [reward.name for reward in functions], "data": counts, "score_norm": vars(score_norm)}
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
        algorithm="a2c" if isinstance(config, A2CConfig) else "ppo",
        total_steps=config.steps,
        shown=SHOWN,
        parents=parents(config, functions, config.value_model),
        facts=facts | ({} if mix is None else {"ptx": mix.counts}),
        more_data=[config.ptx_data] if config.ptx_data else [],
        notes=[OFF_POLICY] if config.top_k or config.top_p < 1 else [],
    )


def learn(
    models: Models,
    experience: Experience,
    optimizer: torch.optim.Optimizer,
    config: PPOConfig,
    generator: torch.Generator,
    *,
    critic_only: bool = False,
    mix: PretrainingMix | None = None,
    ema: WeightAverage | None = None,
) -> dict[str, float]:
    """``ppo_epochs`` passes over a rollout batch in shuffled minibatches, one optimizer step each. Returns mean metrics.

    They end at a minibatch whose approx_kl before its step is above ``approx_kl_limit``: neither it nor any after it is
    learned from. The first, on which the policy has not moved yet, always is.
    """
    started = time.perf_counter()
    sums = MetricSums()
    norms: list[float] = []
    visited = 0
    for rows in _minibatches(experience, config, generator):
        visited += 1
        minibatch = experience.select(rows)
        if critic_only:
            accumulate_critic(models, minibatch, config, sums)
        else:
            approx_kl = accumulate(models, minibatch, config, sums)
            if mix is not None:
                mix.accumulate(models.policy, sums)
            if norms and config.approx_kl_limit is not None and approx_kl > config.approx_kl_limit:
                optimizer.zero_grad(set_to_none=True)
                break
        norms.append(optimizer_step(optimizer, models.trained, config.max_grad_norm))
        if ema is not None and math.isfinite(norms[-1]):  # else the step was left out
            ema.update()
    metrics = sums.means(visited)
    if config.approx_kl_limit is not None:
        planned = config.ppo_epochs * (len(experience.kl) // config.minibatch_size)
        metrics["policy/update_frac"] = len(norms) / planned
    return {**metrics, **step_metrics(norms), "time/update": time.perf_counter() - started}


def _minibatches(experience: Experience, config: PPOConfig, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of every minibatch of every epoch."""
    for _ in range(config.ppo_epochs):
        order = torch.randperm(len(experience.kl), generator=generator).to(experience.kl.device)
        yield from order.split(config.minibatch_size)


def accumulate(models: Models, minibatch: Experience, config: PPOConfig, sums: MetricSums) -> Tensor:
    """Gradients of one minibatch's loss, a micro-batch at a time. Returns the minibatch's approx_kl.

        L = L_policy + value_coef * L_value          without the factor where the critic has parameters of its own

    Every term is divided by the minibatch's count of tokens (or of responses, where these are the actions): the micro-batch
    size does not change the gradient.
    """
    num_tokens = minibatch.batch.response_mask.sum()
    num_actions = action_mask(minibatch.batch.response_mask, config).sum()
    approx_kl = torch.zeros((), device=minibatch.kl.device)
    for rows, batch in micro_batches(minibatch.batch, config.micro_batch):
        part = minibatch.select(rows)
        outputs = models.policy(
            batch.ids,
            batch.attention_mask,
            batch.response_mask,
            temperature=config.temperature,
            with_entropy=config.entropy_coef > 0,
        )
        loss, metrics = policy_loss(outputs, part, config, num_tokens=num_tokens, num_actions=num_actions)
        sums.add(metrics)
        approx_kl = approx_kl + metrics.get("policy/approx_kl", 0.0)
        values = outputs.values
        if models.value_model is not None:
            loss.backward()  # now, so that what it needed is free before the critic's pass
            loss = torch.zeros_like(loss)
            values = models.value_model(batch.ids, batch.attention_mask, batch.response_mask)
        value_loss, metrics = critic_loss(values, part, config, num_actions=num_actions)
        sums.add(metrics)
        (loss + value_loss).backward()
    return approx_kl


def accumulate_critic(models: Models, minibatch: Experience, config: PPOConfig, sums: MetricSums) -> None:
    """Gradients of one minibatch's value loss for a critic of its own or the value head, none for the language model."""
    num_actions = action_mask(minibatch.batch.response_mask, config).sum()
    for rows, batch in micro_batches(minibatch.batch, config.micro_batch):
        if models.value_model is not None:
            values = models.value_model(batch.ids, batch.attention_mask, batch.response_mask)
        else:
            values = models.policy(batch.ids, batch.attention_mask, batch.response_mask).values
        loss, metrics = critic_loss(values, minibatch.select(rows), config, num_actions=num_actions)
        sums.add(metrics)
        loss.backward()
    if models.value_model is None:
        for parameter in models.policy.lm.parameters():
            parameter.grad = None


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
    value_model = load_critic(config, policy, device=device, compute_dtype=dtype)
    if value_model is not None:
        disable_dropout(value_model)
    prepare(policy, config, base=config.model)
    disable_dropout(policy)
    if value_model is not None:
        value_model.grad_scaler = policy.grad_scaler  # one optimizer, one scaler
    return Models(policy, reference, value_model)


def _save_models(models: Models, sampler: Sampler, folder: Path) -> None:
    tokenizer = sampler.renderer.tokenizer
    save_policy(models.policy, tokenizer, folder, stop_ids=sampler.stop_ids)
    if models.value_model is not None:
        save_value_model(models.value_model, tokenizer, folder / "value_model")
