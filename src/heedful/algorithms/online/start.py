"""Set-up of an online run: loads everything and checks all inputs before the first step."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from heedful import core, user_code
from heedful.algorithms.online.async_servers import AsyncServers
from heedful.algorithms.online.average import WeightAverage
from heedful.algorithms.online.critic import (
    check_critic,
    check_same_text,
    critic_options_of,
    has_head,
    load_critic,
    start_from_scores,
)
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.prompts import Prompts, check_sizes
from heedful.algorithms.online.provenance import About, files_of, given_in_python, notes_of, parents_of
from heedful.algorithms.online.ptx import PretrainingMix, encode_mix, mix_of
from heedful.checks.findings import LoadedRun, TokenRow
from heedful.checks.preflight import Examine, refuse_unfit
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.data.batches import AdaptiveMicroBatch
from heedful.data.chat import Renderer
from heedful.data.fitting import prompt_limit
from heedful.data.learned import remember
from heedful.data.loading import Counts, EncodedPrompt, encode_prompts, encode_split, load_split
from heedful.data.schemas import read_prompts
from heedful.data.splits import BatchOrder
from heedful.display import say
from heedful.engines.engine import OwnEngine, SyncServers
from heedful.engines.episodes import Episodes, reset_columns
from heedful.engines.remote import connect, put_to_sleep
from heedful.engines.sampler import Sampler, make_sampler, with_graphs
from heedful.errors import ConfigError, DataError, RewardError, SamplerError, TrainingError
from heedful.kernels.device import frozen_dtype
from heedful.kernels.waiting import on_device
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.models.shape import check_rows, context_length
from heedful.models.source import Source, load_config, resolve
from heedful.models.tokenizer import check_companion, load_chat_tokenizer
from heedful.models.value_model import ValueModel
from heedful.planning.memory import Lengths
from heedful.rewards import Reward, RewardFunction, score, score_tokens
from heedful.rewards.judge import check_comparing
from heedful.rewards.models import Machine, check_context, model_rewards
from heedful.rewards.resolve import AnyRewards, check_reward_options, check_wanted, listed, load_judges, load_rewards
from heedful.rewards.results import Remote
from heedful.rewards.scoring import Ensemble, sample
from heedful.training.fsdp import divide, loading_device
from heedful.training.memory_preflight import check_memory, sampling_plan
from heedful.training.non_finite import NonFiniteGuard
from heedful.training.optimization import Schedule, make_optimizer, seed_everything
from heedful.training.output_folder import FolderPlan
from heedful.training.setup import check_start, copy_reference, load_reference, load_trained, prepare, resolve_machine

C = TypeVar("C", bound=RolloutConfig)

NAMES_SERVERS = {"rewards", "selection_rewards", "sampler"}
"""Settings with server addresses. A changed one may be wrong even in a resumed run."""


class Started(NamedTuple, Generic[C]):
    """A run ready for its first step."""

    config: C
    """With all rewards given as strings, so that its YAML reproduces the run."""
    learner: Learner[C]
    held_out: list[EncodedPrompt]
    about: About


def start(
    config: C,
    rewards: AnyRewards,
    in_memory: Policy | None = None,
    examine: Examine = refuse_unfit,
) -> Started[C]:
    """Load and check everything, have it examined, and score a few responses. Nothing is written.

    Args:
        config: the settings.
        rewards: added to the config's.
        in_memory: a policy to train in place, described without weights by ``config.model``; None loads
            ``config.model``.
        examine: called with everything loaded, before anything is sampled.

    Raises ConfigError, DataError, CheckpointError, RewardError.
    """
    config, wanted = _wanted_rewards(config, rewards)
    plan = check_start(config)
    resumes = _resumes_with_same_servers(plan)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    source = resolve(config.model, config)
    renderer = Renderer(load_chat_tokenizer(source, config), config.special_tokens)
    train, held_out, counts = _load_prompts(config, source, renderer)
    mix = encode_mix(config, source, renderer)
    split_off = len(held_out) if config.eval_data is None else 0
    check_sizes(config, len(train), split_off, None if mix is None else len(mix[0]))
    prompts = _prompts(train, config)
    longest = _longest_prompt(config, train + held_out, counts) + config.max_new_tokens
    check_companion("--reference", config.reference, source, renderer.tokenizer, longest, options=config)
    critic_options = critic_options_of(config)
    if critic_options is not None:
        check_critic(critic_options, source, renderer.tokenizer, longest)
    ptx = None if mix is None else mix_of(mix, config, renderer)

    policy = in_memory
    _check_memory(config, longest, (device, dtype), resumes=resumes, is_in_memory=policy is not None)
    if policy is None:
        policy = load_trained(config, source, device, dtype, with_value_head=has_head(config))
    policy.tokenizer = renderer.tokenizer  # the user's engines and estimators read it there
    check_rows(policy.lm, renderer.tokenizer, [*_texts(train + held_out), *([] if ptx is None else _records(ptx))])
    reference, critic = _make_ready(policy, config, source, (device, dtype), is_in_memory=in_memory is not None)
    with _resumable(resumes):
        sampler = _sampler(config, renderer, policy, longest, device, is_known=resumes)
    divide(config, device, policy, reference, critic)
    functions, judges = _load_rewards(wanted, policy, config, device)
    _check_episodes(sampler.episodes, wanted, train + held_out)
    if resumes:
        _expect_answers([*functions, *judges])
    _check_lengths([*functions, *judges], train + held_out, renderer, config)
    if critic_options is not None:
        check_same_text(critic_options, functions, train[:100], renderer)
    examine(
        LoadedRun(
            config=config,
            tokenizer=renderer.tokenizer,
            model=policy.lm,
            rows=[TokenRow(one.prompt.source, one.ids, ()) for one in train],
            records=([one.prompt for one in train], [one.prompt for one in held_out]),
            counts=counts,
            renderer=renderer,
            stop_ids=sampler.stop_ids,
            rewards=[*functions, *judges],
            resumes=plan.resumes,
        )
    )
    for tokenizer in (renderer.tokenizer, *([] if in_memory is None else [in_memory.tokenizer])):
        remember(tokenizer, (one.prompt.prompt for one in train))
    value_rate = config.learning_rate if critic_options is None else critic_options.critic_learning_rate
    optimizer = make_optimizer(
        [(policy.lm, config.learning_rate), (policy.value_head, value_rate), (critic, value_rate)], config
    )
    average = WeightAverage(policy, config.ema_decay) if config.ema_decay else None
    with _resumable(resumes):
        score_norm = reference_score_norm(
            reference or policy,
            [train[i % len(train)] for i in range(config.score_norm_samples)],
            rewards=functions,
            sampler=sampler,
            generator=generator,
        )
    if critic is not None and critic_options is not None:
        start_from_scores(critic, functions, score_norm, critic_options)
    with _resumable(resumes):
        _try_rewards([functions, judges], policy, train[:2] + held_out[:2], sampler, config)
    learner = Learner(
        config=config,
        policy=policy,
        reference=reference,
        critic=critic,
        optimizer=optimizer,
        schedule=Schedule(optimizer, config.steps, config),
        kl=kl_control(config) if isinstance(config, OnlineConfig) else core.FixedKL(0.0),
        score_norm=score_norm,
        average=average,
        ptx=ptx,
        prompts=prompts,
        generator=generator,
        rewards=functions,
        sampler=sampler,
        judges=judges,
        entropy=entropy_control(config) if isinstance(config, OnlineConfig) else core.EntropyControl(0.0),
        non_finite_guard=NonFiniteGuard(config.folder if in_memory is None else None),
        async_sampler=_async_sampler(config, sampler, prompts),
    )
    return Started(config, learner, held_out, _about(learner, counts, wanted))


def _prompts(train: Sequence[EncodedPrompt], config: RolloutConfig) -> Prompts:
    """The prompts of each rollout batch."""
    num_prompts = config.rollout_batch_size // config.samples_per_prompt
    order = BatchOrder(len(train), num_prompts, config.seed, shuffle=config.shuffle, items="prompts")
    return Prompts(train, order, config.samples_per_prompt)


def _longest_prompt(config: RolloutConfig, prompts: Sequence[EncodedPrompt], counts: Counts) -> int:
    """Most tokens of a prompt; environments add to those of the data."""
    return counts["max_prompt_tokens"] if config.environment else max(len(prompt.ids) for prompt in prompts)


def _check_memory(
    config: RolloutConfig, longest: int, machine: tuple[torch.device, torch.dtype], *, resumes: bool, is_in_memory: bool
) -> None:
    """Have servers on the same GPU sleep, and check that what they leave is enough. Raises ConfigError, SamplerError."""
    with _resumable(resumes):
        put_to_sleep(config, is_known=resumes)
    if not is_in_memory:
        check_memory(config, Lengths(longest, longest - config.max_new_tokens), *machine)


def _make_ready(
    policy: Policy,
    config: RolloutConfig,
    source: Source,
    machine: tuple[torch.device, torch.dtype],
    *,
    is_in_memory: bool,
) -> tuple[Policy | None, ValueModel | None]:
    """Load reference and critic, initialised from the current policy, and prepare all for training."""
    options, (device, dtype), reference, critic = critic_options_of(config), machine, None, None
    if config.loads_reference and is_in_memory and config.reference is None and not config.lora_rank:
        reference = copy_reference(config, policy)
    elif config.loads_reference:
        reference = load_reference(config, source, policy, device)
    if options is not None:
        critic = load_critic(options, policy, device=device, compute_dtype=dtype, is_in_memory=is_in_memory)
    if has_head(config):
        policy.add_value_head()
    if config.trains_policy:
        prepare(policy, config, base=policy.lm.name_or_path if is_in_memory else config.model)
    else:
        policy.requires_grad_(False)
    disable_dropout(policy)
    if critic is not None:
        disable_dropout(critic)
        policy.grad_scaler = critic.grad_scaler = policy.grad_scaler or critic.grad_scaler  # one optimizer, one scaler
    return reference, critic


def _async_sampler(config: RolloutConfig, sampler: Sampler, prompts: Prompts) -> Sampler | None:
    """Asynchronous sampling, if the settings turn it on."""
    if not isinstance(config, OnlineConfig) or not config.async_steps:
        return None
    assert isinstance(sampler.source, SyncServers)
    episodes = None
    if sampler.episodes is not None:
        episodes = Episodes.load(
            config,
            sampler.renderer,
            max_new_tokens=config.max_new_tokens,
            max_prompt_tokens=sampler.episodes.max_prompt_tokens,
            together=False,
        )
    ahead = AsyncServers(
        sampler.source.remote,
        prompts,
        async_steps=config.async_steps,
        steps=config.steps,
        seed=config.seed,
        episodes=episodes,
    )
    return replace(sampler, source=ahead, episodes=None)


def _texts(prompts: Sequence[EncodedPrompt]) -> list[tuple[str, Sequence[int]]]:
    """Sources of prompts, and their tokens."""
    return [(one.prompt.source, one.ids) for one in prompts]


def _records(mix: PretrainingMix) -> list[tuple[str, Sequence[int]]]:
    """Sources of the mix's records, and their tokens."""
    return [(one.source, ids) for one in mix.examples for ids in (one.prompt, one.response)]


def _about(learner: Learner[RolloutConfig], counts: Counts, wanted: Sequence[str | Reward | RewardFunction]) -> About:
    """Notes and provenance of the run; ``counts`` are of its records, ``wanted`` are the rewards as given."""
    config = learner.config
    facts: dict[str, Any] = {"rewards": [reward.name for reward in learner.rewards], "data": counts}
    facts |= {"score_norm": learner.score_norm.state_dict()}
    facts |= {} if learner.ptx is None else {"ptx": learner.ptx.counts}
    named = [str(path) for path in (config.ptx_data, config.judge_rubric) if path is not None]
    named += [user_code.file_of(value) for value in config.user_code.values() if isinstance(value, str)]
    if learner.sampler.episodes is not None:
        named += learner.sampler.episodes.files
    scorers = [*learner.rewards, *learner.judges]
    return About(
        facts=facts,
        parents=parents_of(config, scorers),
        more_data=[*named, *files_of(scorers), given_in_python(wanted)],
        notes=notes_of(config),
    )


def kl_control(config: OnlineConfig) -> core.FixedKL | core.AdaptiveKL:
    """A fixed coefficient, or one adapted to ``kl_target``."""
    if config.kl_target is None:
        return core.FixedKL(config.kl_coef)
    return core.AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)


def entropy_control(config: OnlineConfig) -> core.EntropyControl:
    """A fixed coefficient of the entropy bonus, or one adapted to ``target_entropy``."""
    return core.EntropyControl(config.entropy_coef, config.target_entropy)


def reference_score_norm(
    reference: Policy,
    prompts: Sequence[EncodedPrompt],
    *,
    rewards: Sequence[Reward],
    sampler: Sampler,
    generator: torch.Generator,
) -> core.ScoreNorm:
    """Mean and population standard deviation of the scores of fresh reference samples (Ziegler et al. 2019, section 2.2).

    Without prompts nothing is sampled, and scores are not normalised.

    Raises RewardError, also if all scores are equal.
    """
    if not prompts:
        return core.ScoreNorm()
    with on_device(reference):
        completions = sampler.generate(reference, prompts, generator).completions
    scores = torch.tensor(score_tokens(rewards, completions).without_failed().totals, dtype=torch.float64)
    try:
        return core.ScoreNorm.of(scores)
    except ValueError:
        raise RewardError(
            f"all {len(scores)} reference samples got the score {float(scores[0])}, so scores cannot be normalised; "
            "use --score-norm-samples 0 or a reward that distinguishes responses"
        ) from None


def _wanted_rewards(config: C, rewards: AnyRewards) -> tuple[C, list[str | Reward | RewardFunction]]:
    """All rewards, and the config with those given as strings. Loads the user's code. Raises ConfigError."""
    for name, value in config.user_code.items():
        user_code.load(name, value)
    wanted = [*config.rewards, *listed(rewards)]
    check_wanted(wanted, config)
    check_reward_options([*wanted, *config.selection_rewards], config)
    holds_out = config.eval_data is not None or config.eval_fraction > 0
    check_comparing(
        wanted, config.selection_rewards, config, holds_out=holds_out, score_norm_samples=config.score_norm_samples
    )
    return replace(config, rewards=tuple(reward for reward in wanted if isinstance(reward, str))), wanted


def _load_rewards(
    wanted: Sequence[str | Reward | RewardFunction], policy: Policy, config: RolloutConfig, device: torch.device
) -> tuple[Ensemble, Ensemble]:
    """The rewards to train on, and those that select a model. Reward models read as many rows at a time as the policy does
    without gradients; an http reward is asked about ``micro_batch_size`` at a time."""
    functions = load_rewards(wanted, config, **_where(policy, config))
    judges = load_judges("--selection-rewards", config.selection_rewards, config, **_where(policy, config))
    models = [reward for _, reward in model_rewards([*functions, *judges])]
    for reward in models:
        reward.micro_batch = config.scoring_micro_batch
    divide(config, device, *(reward.model for reward in models))
    return functions, judges


def _where(policy: Policy, config: RolloutConfig) -> Machine:
    """Device, precision and micro-batches of reward models.

    Models to be sharded are loaded into main memory, in the storage dtype of the policy's device.
    """
    return {
        "device": loading_device(config, policy.device),
        "compute_dtype": policy.compute_dtype,
        "micro_batch": config.micro_batch,
        "stored": frozen_dtype(policy.device, policy.compute_dtype),
        "special_tokens": config.special_tokens,
    }


def _sampler(
    config: RolloutConfig,
    renderer: Renderer,
    policy: Policy,
    longest: int,
    device: torch.device,
    *,
    is_known: bool,
) -> Sampler:
    """The sampler, with servers if the settings name some.

    Args:
        config: the settings.
        renderer: renders prompts and responses.
        policy: the policy to sample from.
        longest: length of the longest text, in tokens.
        device: the run's.
        is_known: whether the servers answered this run before; then unanswered requests are retried.
    """
    lengths = Lengths(longest, longest - config.max_new_tokens)
    planned = sampling_plan(config, lengths, device, policy.compute_dtype)
    options = with_graphs(config, policy) if planned.graphs else config
    sampler = replace(
        make_sampler(options, renderer, policy, micro_batch=planned.micro_batch),
        adaptive=AdaptiveMicroBatch("--rollout-micro-batch-size"),
        longest=longest,
        merge_adapters=planned.merges_adapters,
    )
    if config.environment:
        longest_prompt = longest - config.max_new_tokens
        episodes = Episodes.load(
            config, renderer, max_new_tokens=config.max_new_tokens, max_prompt_tokens=longest_prompt
        )
        sampler = replace(sampler, episodes=episodes)
    if not config.sampler:
        return sampler
    if config.user_engine is not None:
        engine = user_code.call("--sampler", config.user_engine, policy, config)
        return replace(sampler, source=OwnEngine(engine, config.max_new_tokens))
    remote = connect(
        config, policy, stop_ids=sampler.stop_ids, pad_id=renderer.pad_id, longest=longest, is_known=is_known
    )
    return replace(sampler, source=SyncServers(remote))


def _check_episodes(
    episodes: Episodes | None, wanted: Sequence[str | Reward | RewardFunction], prompts: Sequence[EncodedPrompt]
) -> None:
    """Check that something pays for episodes, and that each prompt suits its environment. Raises ConfigError, DataError."""
    if episodes is None:
        return
    unpaid = [name for name, one in episodes.abilities.items() if not (one.rewards_turns or one.rewards_episodes)]
    if unpaid and not wanted:
        raise ConfigError(
            f"--environment: {unpaid[0]} has neither get_reward nor _turn_reward, and there are no --rewards, so nothing "
            "says how good an episode was; add one of them"
        )
    for prompt in (one.prompt for one in prompts):
        kind = episodes.kind_of(prompt)
        missing = [name for name in episodes.abilities[kind].needs if name not in reset_columns(prompt)]
        if missing:
            raise DataError(
                f"{prompt.source}: reset of {kind} needs the column {missing[0]}, and beside the prompt the record has "
                f"{', '.join(sorted(prompt.columns)) or 'none'}; add it to the data, or give this argument of reset a default"
            )


def _load_prompts(
    config: RolloutConfig, source: Source, renderer: Renderer
) -> tuple[list[EncodedPrompt], list[EncodedPrompt], Counts]:
    """Training and held-out prompts of at most ``max_prompt_tokens`` tokens, and counts of dropped or cut ones."""
    context = context_length(load_config(source))
    limit = prompt_limit(config.max_prompt_tokens, config.max_new_tokens, context)
    room = context - config.max_new_tokens
    remedy = f"--max-prompt-tokens above {limit}" if limit < room else "a model with a longer context"
    train, held_out, counts = encode_split(
        lambda prompts, refused: encode_prompts(
            prompts, renderer, max_length=limit, action=config.too_long, remedy=remedy, refused=refused
        ),
        load_split(read_prompts, config),
        config,
        renderer,
    )
    if config.selection_rewards and not held_out:
        raise ConfigError(
            "--selection-rewards judges held-out responses, but nothing is held out: set --eval-fraction or --eval-data"
        )
    return train, held_out, counts | {"max_prompt_tokens": limit}


def _check_lengths(
    rewards: Sequence[Reward], prompts: Sequence[EncodedPrompt], renderer: Renderer, config: RolloutConfig
) -> None:
    """Raises ConfigError for reward models whose context is too short for the policy's texts.

    If a text is longer nevertheless, they read its beginning, and a metric counts it.
    """
    asked = [prompt.prompt for prompt in prompts]
    check_context(rewards, asked, renderer, max_new_tokens=config.max_new_tokens, can_leave_out=True)
    for _, reward in model_rewards(rewards):
        reward.reads_beginnings = True


def _try_rewards(
    rewards: Sequence[Sequence[Reward]],
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    sampler: Sampler,
    config: RolloutConfig,
) -> None:
    """Score a few responses before anything is written, with a separate random generator. Raises RewardError.

    A comparing judge gets as many responses per prompt as in training. Some episodes may fail, as in training.
    """
    each = config.samples_per_prompt if config.judge_compares else 1
    asked = [prompt for prompt in prompts for _ in range(each)]
    completions = sampler.generate(policy, asked, torch.Generator().manual_seed(config.seed)).completions
    failed = [one for one in completions if one.episode is not None and one.episode.failure]
    broken = {one.prompt.source for one in failed}
    played = [one for one in completions if one.prompt.source not in broken]
    for first in failed[:1]:
        assert first.episode is not None
        what = (
            f"{len(failed)} of {len(completions)} trial episodes failed; correct the environment (in training a share of "
            f"--max-failed-rewards {config.max_failed_rewards:g} may fail). The first: environment {first.episode.failure}; "
            f"for {sample(first)}"
        )
        if not played or not config.max_failed_rewards:
            raise RewardError(what)
        say(f"WARNING: {what}")
    for together in filter(None, rewards):
        score(together, played)


# Servers of an unfinished run ------------------------------------------------------------------------------------------


def _resumes_with_same_servers(plan: FolderPlan) -> bool:
    """Whether a run resumes with the same servers; they have answered it before, as no run starts without."""
    return plan.resumes and not NAMES_SERVERS & set(plan.changes)


def _expect_answers(rewards: Sequence[Reward]) -> None:
    """Retry rewards on servers as long as in the middle of a run."""
    for reward in rewards:
        if isinstance(reward.function, Remote):
            reward.function.has_answered_before()


@contextlib.contextmanager
def _resumable(resumes: bool) -> Iterator[None]:
    """Gives a resumed run that fails on servers before its first step the exit status of a resumable run."""
    try:
        yield
    except (RewardError, SamplerError) as error:
        if resumes:
            error.status = TrainingError.status
        raise
