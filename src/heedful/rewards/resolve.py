"""Load rewards by name: ``model:PATH``, ``python:FILE.py:FUNCTION``, ``rule:NAME`` or ``http://HOST:PORT/PATH``."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from heedful.checkpoints.load_reward_model import load_reward_model
from heedful.checkpoints.source import NO_CODE, Source, resolve
from heedful.checkpoints.tokenizer import load_tokenizer
from heedful.configs.checks import refuse
from heedful.configs.scoring import RewardOptions
from heedful.configs.trust import TrustOptions
from heedful.data.chat import RewardInputs
from heedful.errors import ConfigError, RewardError
from heedful.kernels.device import frozen_dtype
from heedful.kernels.sampling_copy import halve_frozen
from heedful.models.policy import freeze
from heedful.models.reward_model import score_head
from heedful.rewards.http import HTTPReward, check_url
from heedful.rewards.interface import Ensemble, Reward, RewardFunction
from heedful.rewards.model import MICRO_BATCH, ModelReward
from heedful.rewards.rules import make_rule
from heedful.types import MicroBatch

FORMS = "model:PATH (a reward model), python:FILE.py:FUNCTION, rule:NAME, or http://HOST:PORT/PATH"
AnyReward = str | Reward | RewardFunction


def check_wanted(wanted: Sequence[AnyReward], options: RewardOptions) -> None:
    """Check that rewards, weights and their combination fit together, before anything is loaded. Raises ConfigError.

    Args:
        wanted: the rewards of ``--rewards`` and those given in Python.
        options: the settings for weights and combination.
    """
    if not wanted:
        raise ConfigError(f"--rewards is missing: {FORMS}")
    for reward in wanted:
        if isinstance(reward, str):
            check_reward_string(reward)
    weights = options.reward_weights
    if weights and len(weights) != len(wanted):
        raise ConfigError(
            f"--reward-weights has {len(weights)} number{'s' * (len(weights) != 1)} for {len(wanted)} "
            f"reward{'s' * (len(wanted) != 1)}; give one for each, in order (those of --rewards come before "
            "those given in Python)"
        )
    for reward in wanted:
        if isinstance(reward, Reward) and not math.isfinite(reward.weight):
            raise ConfigError(f"the weight of reward {reward.name} must be a finite number, got {reward.weight}")
    own = [reward.name for reward in wanted if isinstance(reward, Reward) and reward.weight != 1.0]
    if weights and own:
        raise ConfigError(
            f"--reward-weights gives a weight to {own[0]}, which has one of its own; leave out one of the two"
        )
    if len(wanted) == 1 and options.reward_combine != "sum":
        raise ConfigError(
            f"--reward-combine {options.reward_combine} combines several rewards, but there is only one; add more to "
            "--rewards, or leave it out"
        )


def check_http_options(wanted: Sequence[AnyReward], options: RewardOptions) -> None:
    """Refuse settings of requests if nothing is requested. Raises ConfigError.

    Args:
        wanted: every reward and judge.
        options: the settings.
    """
    if not any(isinstance(reward, str) and reward.startswith(("http://", "https://")) for reward in wanted):
        refuse(
            options,
            *("reward_timeout", "reward_retries"),
            because="is about rewards over http, and there is none; leave it out, or name one: http://HOST:PORT/PATH",
        )


def load_rewards(
    wanted: Sequence[AnyReward],
    options: RewardOptions,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    micro_batch: MicroBatch,
) -> Ensemble:
    """Load rewards and give them the weights and the combination of ``options``.

    The other arguments are those of `resolve_rewards`. Raises ConfigError, CheckpointError or RewardError.
    """
    check_wanted(wanted, options)
    rewards = resolve_rewards(
        wanted,
        device=device,
        compute_dtype=compute_dtype,
        micro_batch=micro_batch,
        timeout=options.reward_timeout,
        retries=options.reward_retries,
        trust=options,
    )
    if options.reward_weights:
        pairs = zip(rewards, options.reward_weights, strict=True)
        rewards = [replace(reward, weight=weight) for reward, weight in pairs]
    return Ensemble(tuple(rewards), options.reward_combine, options.reward_std_coef)


def load_judges(
    flag: str,
    wanted: Sequence[AnyReward],
    options: RewardOptions,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    micro_batch: MicroBatch,
) -> list[Reward]:
    """Load rewards that judge what others choose. Raises ConfigError and RewardError that name ``flag``, CheckpointError."""
    try:
        return resolve_rewards(
            wanted,
            device=device,
            compute_dtype=compute_dtype,
            micro_batch=micro_batch,
            timeout=options.reward_timeout,
            retries=options.reward_retries,
            trust=options,
        )
    except (ConfigError, RewardError) as error:
        raise type(error)(f"{flag}: {str(error).removeprefix('--rewards: ')}") from error


def resolve_rewards(
    rewards: Sequence[AnyReward],
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    micro_batch: MicroBatch = MICRO_BATCH,
    timeout: float = 60.0,
    retries: int = 3,
    trust: TrustOptions = NO_CODE,
) -> list[Reward]:
    """Turn strings, functions and `Reward` objects into rewards. Equal names become NAME, NAME#2, NAME#3.

    Args:
        rewards: strings as in ``--rewards``, functions or `Reward` objects.
        device: where reward models run.
        compute_dtype: the precision of reward models.
        micro_batch: the most rows and tokens that a reward model reads at a time; rows also limit an HTTP request.
        timeout: the most seconds for one answer over HTTP.
        retries: how often a failed HTTP request is tried again.
        trust: says whether code in the folders of reward models may run.

    Raises ConfigError, CheckpointError or RewardError.
    """
    for reward in rewards:
        if isinstance(reward, str):
            check_reward_string(reward)
    resolved: list[Reward] = []
    names: list[str] = []
    for reward in rewards:
        if isinstance(reward, Reward):
            named = reward
        elif isinstance(reward, str) and reward.startswith(("http://", "https://")):
            http = HTTPReward(reward, timeout=timeout, retries=retries, micro_batch_size=micro_batch.rows)
            named = Reward(reward, http)
        elif isinstance(reward, str):
            named = Reward(reward, _from_string(reward, device, compute_dtype, micro_batch, trust))
        else:
            named = Reward(getattr(reward, "__name__", type(reward).__name__), reward)
        same = names.count(named.name)
        names.append(named.name)
        resolved.append(replace(named, name=f"{named.name}#{same + 1}") if same else named)
    return resolved


def check_reward_string(reward: str) -> None:
    """Check the form of a reward string without loading anything. Raises ConfigError."""
    kind, separator, rest = reward.partition(":")
    if kind not in ("model", "python", "rule", "http", "https") or not separator or not rest:
        raise ConfigError(f"--rewards: {reward!r} is not a reward; use {FORMS}")
    if kind == "rule":
        make_rule(rest)
    if kind in ("http", "https"):
        check_url(reward)


def load_model_reward(
    model: str | Source, *, device: torch.device, compute_dtype: torch.dtype, micro_batch: MicroBatch
) -> ModelReward:
    """Load a reward model, frozen, with its own tokenizer.

    Args:
        model: a folder, a name on the Hub or ModelScope, or a `Source`.
        device: where the model runs.
        compute_dtype: the precision of its matrix products.
        micro_batch: the most rows and tokens that it reads at a time.

    Raises CheckpointError.
    """
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:  # conversations are then read as plain text with role names
        tokenizer = load_tokenizer(model, chat_template="plain")
    stored = frozen_dtype(device, compute_dtype)
    scorer = load_reward_model(model, tokenizer, device=device, compute_dtype=compute_dtype, stored=stored)
    freeze(scorer)
    if device.type == "cpu":
        halve_frozen(scorer.classifier, compute_dtype, but=[score_head(scorer.classifier)])
    return ModelReward(scorer, RewardInputs(tokenizer, scorer.reads), micro_batch=micro_batch)


def _from_string(
    reward: str, device: torch.device, compute_dtype: torch.dtype, micro_batch: MicroBatch, trust: TrustOptions
) -> RewardFunction:
    kind, _, rest = reward.partition(":")
    if kind == "rule":
        return make_rule(rest)
    if kind == "python":
        return _load_function(rest)
    source = resolve(rest, trust)
    return load_model_reward(source, device=device, compute_dtype=compute_dtype, micro_batch=micro_batch)


def _load_function(spec: str) -> RewardFunction:
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise ConfigError(f"--rewards: python:{spec} does not name a function; use python:FILE.py:FUNCTION")
    if not path.is_file():
        raise ConfigError(f"--rewards: the file {file} of python:{spec} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"heedful_reward:{path.resolve()}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"--rewards: {file} is not a Python file; use python:FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses and pickle look up the module of a class
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"--rewards: {file} cannot be imported: {type(error).__name__}: {error}") from error
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"--rewards: {file} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    function: RewardFunction = getattr(module, name)
    return function
