"""Rewards named by a string: ``model:PATH``, ``python:FILE.py:FUNCTION``, ``rule:NAME``."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from heedful.data.chat import RewardInputs
from heedful.errors import ConfigError, RewardError
from heedful.models.checkpoints import load_tokenizer
from heedful.models.policy import freeze
from heedful.models.reward_model import load_reward_model
from heedful.rewards.interface import Reward, RewardFunction
from heedful.rewards.model import ModelReward
from heedful.rewards.rules import RULES

FORMS = "model:PATH (a reward model), python:FILE.py:FUNCTION, or rule:NAME"


def resolve_rewards(
    rewards: Sequence[str | Reward | RewardFunction],
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    micro_batch_size: int = 32,
) -> list[Reward]:
    """Rewards from strings, functions and `Reward` objects; equal names are told apart as NAME#2.

    Raises ConfigError, CheckpointError or RewardError.
    """
    for reward in rewards:
        if isinstance(reward, str):
            check_reward_string(reward)
    resolved: list[Reward] = []
    for reward in rewards:
        if isinstance(reward, Reward):
            named = reward
        elif isinstance(reward, str):
            named = Reward(reward, _from_string(reward, device, compute_dtype, micro_batch_size))
        else:
            named = Reward(getattr(reward, "__name__", type(reward).__name__), reward)
        same = sum(other.name.partition("#")[0] == named.name for other in resolved)
        resolved.append(Reward(f"{named.name}#{same + 1}", named.function) if same else named)
    return resolved


def check_reward_string(reward: str) -> None:
    """Refuse a reward string of unknown form without loading anything. Raises ConfigError."""
    kind, separator, rest = reward.partition(":")
    if kind not in ("model", "python", "rule") or not separator or not rest:
        raise ConfigError(f"--rewards: {reward!r} is no reward; use {FORMS}")
    if kind == "rule" and rest not in RULES:
        near = difflib.get_close_matches(rest, RULES, n=1)
        hint = f"; did you mean rule:{near[0]}?" if near else ""
        raise ConfigError(f"--rewards: there is no rule {rest!r}{hint}; rules are {', '.join(sorted(RULES))}")


def _from_string(
    reward: str, device: torch.device, compute_dtype: torch.dtype, micro_batch_size: int
) -> RewardFunction:
    kind, _, rest = reward.partition(":")
    if kind == "rule":
        return RULES[rest]
    if kind == "python":
        return _load_function(rest)
    tokenizer = load_tokenizer(rest)
    if not tokenizer.chat_template:  # conversations are then read as plain text with role names
        tokenizer = load_tokenizer(rest, chat_template="plain")
    model = load_reward_model(rest, tokenizer, device=device, compute_dtype=compute_dtype)
    freeze(model)
    return ModelReward(model, RewardInputs(tokenizer), micro_batch_size=micro_batch_size)


def _load_function(spec: str) -> RewardFunction:
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise ConfigError(f"--rewards: python:{spec} names no function; use python:FILE.py:FUNCTION")
    if not path.is_file():
        raise ConfigError(f"--rewards: the file {file} of python:{spec} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"heedful_reward:{path.resolve()}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"--rewards: {file} is no Python file; use python:FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"--rewards: {file} cannot be imported: {type(error).__name__}: {error}") from error
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"--rewards: {file} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    function: RewardFunction = getattr(module, name)
    return function
