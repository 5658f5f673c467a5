"""Load rewards by name: ``model:PATH``, ``python:FILE.py:FUNCTION``, ``rule:NAME``, ``http://...``, ``judge:http://...``."""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Unpack

from transformers import PreTrainedModel

from heedful import user_code
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import check_secret, refuse
from heedful.display import counted
from heedful.errors import ConfigError, RewardError
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.source import resolve
from heedful.redact import redact
from heedful.rewards.environment import environment_reward
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.http import IN_FLIGHT, HTTPReward, check_url
from heedful.rewards.judge import check_judge_string, check_judges, is_judge, load_judge
from heedful.rewards.mathematics import make_verifier
from heedful.rewards.models import MICRO_BATCH, Machine, load_model_reward
from heedful.rewards.rules import make_rule
from heedful.rewards.scoring import Ensemble, Reward, RewardFunction

FORMS = (
    "model:PATH (a reward model), python:FILE.py:FUNCTION, rule:NAME, verify:math, http://HOST:PORT/PATH, or "
    "judge:http://HOST:PORT/v1#MODEL (a language model)"
)
AnyReward = str | Reward | RewardFunction
AnyRewards = AnyReward | Sequence[AnyReward]
"""One reward or several."""
TOKEN = "HEEDFUL_REWARD_TOKEN"
"""The environment variable with the token of http rewards."""
IN_PROCESS = ("python:", "rule:regex:", "verify:")
"""Prefixes of rewards that run in a process of their own, because a user's code or a model's text may block them forever."""


def listed(rewards: AnyRewards) -> list[AnyReward]:
    """Rewards as a list, also a single one."""
    if isinstance(rewards, str | Reward) or callable(rewards):
        return [rewards]
    return list(rewards) if isinstance(rewards, Iterable) else [rewards]


def is_address(reward: str) -> bool:
    """Whether a reward is the address of a server."""
    return reward.startswith(("http://", "https://"))


def check_wanted(wanted: Sequence[AnyReward], options: RewardOptions) -> None:
    """Check that rewards, weights and their combination fit together, before anything is loaded. Raises ConfigError.

    With an environment, which may give rewards, none is needed.
    """
    plays = bool(getattr(options, "environment", ()))
    if not wanted and not plays:
        raise ConfigError(f"--rewards is missing: {FORMS}; in Python, rewards= takes functions too")
    for reward in wanted:
        check_reward(reward)
    weights = options.reward_weights
    flag = "--reward-" if all(isinstance(reward, str) for reward in wanted) else "reward_"  # a setting of Python
    if weights and len(weights) != len(wanted):
        raise ConfigError(
            f"{flag}weights has {counted(len(weights), 'number')} for {counted(len(wanted), 'reward')}; "
            "give one for each, in order (those of the settings come before those given in Python)"
        )
    own = [reward.name for reward in wanted if isinstance(reward, Reward) and reward.weight != 1.0]
    if weights and own:
        raise ConfigError(
            f"{flag}weights gives a weight to {own[0]}, which has one of its own; leave out one of the two"
        )
    if len(wanted) == 1 and options.reward_combine != "sum" and not plays:
        raise ConfigError(
            f"{flag}combine {options.reward_combine} combines several rewards, but there is only one; add more, or leave "
            "it out"
        )


def check_reward_options(wanted: Sequence[AnyReward], options: RewardOptions) -> None:
    """Raise ConfigError for settings of requests or processes without such a reward, and for a missing token."""
    check_judges(wanted, options)
    has_judge = any(map(is_judge, wanted))
    has_http = any(isinstance(reward, str) and is_address(reward) for reward in wanted)
    has_process = any(isinstance(reward, str) and reward.startswith(IN_PROCESS) for reward in wanted)
    none = "and there is none; leave it out, or name one:"
    asked = f"rewards over http and judges, {none} http://HOST:PORT/PATH"
    process = f"python: functions, rule:regex and verify:math, {none} python:FILE.py:FUNCTION"
    if has_http:
        check_secret(TOKEN, "the server's token")
    if not has_http and not has_judge:
        refuse(options, "reward_retry_minutes", "reward_concurrency", because=f"is about {asked}")
    if not has_process:
        refuse(options, "reward_memory_gb", because=f"is about {process}")
    if not has_http and not has_judge and not has_process:
        refuse(
            options,
            "reward_timeout",
            because=f"is about rewards over http, judges, {process}, or http://HOST:PORT/PATH",
        )


def load_rewards(wanted: Sequence[AnyReward], options: RewardOptions, **machine: Unpack[Machine]) -> Ensemble:
    """Load rewards and give them the weights and the combination of ``options``. With an environment, add its own.

    Raises ConfigError, CheckpointError or RewardError.
    """
    check_wanted(wanted, options)
    rewards = resolve_rewards(wanted, options, **machine)
    if options.reward_weights:
        pairs = zip(rewards, options.reward_weights, strict=True)
        rewards = [replace(reward, weight=weight) for reward, weight in pairs]
    if getattr(options, "environment", ()):
        taken = any(reward.name == "environment" for reward in rewards)
        rewards.append(Reward("environment#2" if taken else "environment", environment_reward))
    return Ensemble(tuple(rewards), options.reward_combine, max_failed=options.max_failed_rewards)


@contextlib.contextmanager
def named_by(name: str) -> Iterator[None]:
    """Errors of rewards begin with this name of what gave them, in the place of --rewards."""
    try:
        yield
    except (ConfigError, RewardError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('--rewards: ')}") from error


def load_judges(flag: str, wanted: Sequence[AnyReward], options: RewardOptions, **machine: Unpack[Machine]) -> Ensemble:
    """Load rewards for judging (``flag``). Raises ConfigError and RewardError that name ``flag``, and CheckpointError."""
    with named_by(flag):
        judges = resolve_rewards(wanted, options, **machine)
    return Ensemble(tuple(judges), max_failed=options.max_failed_rewards)


def resolve_rewards(
    rewards: Sequence[AnyReward],
    limits: RewardOptions = RewardOptions(),  # noqa: B008 - it is frozen
    **machine: Unpack[Machine],
) -> list[Reward]:
    """Turn strings, functions and `Reward` objects into rewards. Equal names become NAME, NAME#2, NAME#3.

    Args:
        rewards: strings as in ``--rewards``, functions or `Reward` objects.
        limits: time and memory limits of functions, and retry limits of servers.

    Raises ConfigError, CheckpointError or RewardError.
    """
    for reward in rewards:
        check_reward(reward)
    resolved: list[Reward] = []
    names: list[str] = []
    for reward in rewards:
        if isinstance(reward, Reward):
            named = reward
        elif isinstance(reward, str):
            named = Reward(redact(reward), _function_of(reward, limits, machine))
        else:
            named = Reward(user_code.name_of(reward), reward)
        same = names.count(named.name)
        names.append(named.name)
        resolved.append(replace(named, name=f"{named.name}#{same + 1}") if same else named)
    return resolved


def _function_of(reward: str, limits: RewardOptions, machine: Machine) -> RewardFunction:
    if is_address(reward):
        return HTTPReward(
            reward,
            timeout=limits.answer_timeout,
            retry_seconds=60 * limits.reward_retry_minutes,
            concurrency=limits.reward_concurrency or IN_FLIGHT,
            token=os.environ.get(TOKEN),
            micro_batch_size=machine.get("micro_batch", MICRO_BATCH).rows,
        )
    if is_judge(reward):
        return load_judge(reward, limits)
    if reward.startswith(IN_PROCESS):
        return FunctionProcess(reward, limits)
    kind, _, rest = reward.partition(":")
    return make_rule(rest) if kind == "rule" else load_model_reward(resolve(rest, limits), **machine)


def check_reward(reward: object) -> None:
    """Check the kind of a reward, the weight of a `Reward`, and the form of a string. Raises ConfigError."""
    function = reward.function if isinstance(reward, Reward) else reward
    if isinstance(function, PreTrainedModel | Policy | RewardModel):
        kind = type(function).__name__
        raise ConfigError(
            f'a {kind} is no reward function; save it with its tokenizer, and give its folder: "model:FOLDER"'
        )
    if isinstance(reward, str):
        check_reward_string(reward)
    elif not callable(function):
        raise ConfigError(
            f"{function!r:.60} ({type(function).__name__}) is no reward function; give a function, or {FORMS}"
        )
    if isinstance(reward, Reward) and not (isinstance(reward.weight, Real) and math.isfinite(reward.weight)):
        raise ConfigError(f"the weight of reward {reward.name} must be a finite number, got {reward.weight!r}")


def check_reward_string(reward: str) -> None:
    """Check the form of a reward string without loading anything. Raises ConfigError."""
    kind, separator, rest = reward.partition(":")
    if reward.startswith(user_code.IN_PYTHON):
        user_code.load("--rewards", reward)  # refused: it was an object
    if is_judge(reward):
        check_judge_string(reward)
        return
    if kind not in ("model", "python", "rule", "verify", "http", "https") or not separator or not rest:
        raise ConfigError(f"--rewards: {redact(reward)!r} is not a reward; use {FORMS}")
    if kind == "rule":
        make_rule(rest)
    if kind == "verify":
        make_verifier(rest)
    if kind in ("http", "https"):
        check_url(reward)
