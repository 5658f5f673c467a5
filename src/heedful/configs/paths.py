"""Settings that name files and folders: ``~`` is expanded once, here, so that everything after sees the real path."""

import dataclasses
from pathlib import Path
from typing import Any

from heedful.configs.checks import flag
from heedful.errors import ConfigError

PATHS = (
    "output", "model", "reference", "value_model", "reward_model", "baseline", "adapter", "data", "eval_data",
    "offset_data", "ptx_data", "chat_template", "runs", "resume", "folder", "run", "results", "task_folder", "judge_rubric",
    "judge_cache", "sampler_folder", "python", "project", "backup", "models", "policy", "prompts", "reward_config",
    "ppo_config",
)  # fmt: skip
"""Settings that are paths, or names of models and data sets, which never begin with ~."""
REWARDS = ("rewards", "best_by", "judge")
"""Settings in the forms of rewards, of which two have a path: model:PATH and python:FILE.py:FUNCTION."""


def expand_paths(config: Any) -> None:
    """Expand ``~`` and ``~user`` in a configuration's paths, in place. Raises ConfigError if there is no such user."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in (*PATHS, *REWARDS) or value is None:
            continue
        expand = _expanded_reward if field.name in REWARDS else _expanded
        several = isinstance(value, tuple | list)
        done = tuple(expand(field.name, part) for part in value) if several else expand(field.name, value)
        object.__setattr__(config, field.name, done)


def _expanded(field: str, value: Any) -> Any:
    if "\0" in str(value):
        raise ConfigError(f"{flag(field)} {str(value)!r} holds a NUL byte, which no path can")
    if not str(value).startswith("~"):
        return value
    try:
        return type(value)(Path(value).expanduser())
    except RuntimeError as error:  # no such user
        name = Path(value).parts[0]
        raise ConfigError(
            f"{flag(field)} {value}: {name} is the home of a user who does not exist here; for a folder of that name write "
            f"./{name}"
        ) from error


def _expanded_reward(field: str, value: Any) -> Any:
    kind, colon, rest = str(value).partition(":")
    return f"{kind}{colon}{_expanded(field, rest)}" if kind in ("model", "python") else value
