"""What an online run is made from that its settings do not name: functions given in Python, and what files of code import."""

import inspect
from collections.abc import Sequence
from typing import Any

from heedful.rewards import Reward, RewardFunction
from heedful.rewards.functions import FunctionProcess
from heedful.train.environment import IN_PYTHON, Given, digest

PLAIN = (bool, int, float, str, type(None))


def given_in_python(rewards: Sequence[str | Reward | RewardFunction]) -> Given:
    """The rewards that are functions: name and weight of each, and a sum of its source.

    The source is that of the function, or of the class of an object; with it go defaults, arguments bound by partial, and the
    variables of an outer function, if they are numbers or text. What else a function reads or calls is not seen. One whose
    source cannot be had counts by its name.
    """
    return Given(
        IN_PYTHON, ", ".join(_described(reward) for reward in rewards if not isinstance(reward, str)) or "none"
    )


def files_of(rewards: Sequence[Reward]) -> list[str]:
    """The files that ``python:`` rewards have imported, beside those that they name."""
    found = [reward.function.files for reward in rewards if isinstance(reward.function, FunctionProcess)]
    return sorted({file for files in found for file in files})


def _described(reward: Reward | RewardFunction) -> str:
    function = reward.function if isinstance(reward, Reward) else reward
    name = reward.name if isinstance(reward, Reward) else getattr(reward, "__name__", type(reward).__name__)
    weight = f" x {reward.weight:g}" if isinstance(reward, Reward) and reward.weight != 1.0 else ""
    return f"{name}{weight} {digest(_content(function))[:12]}"


def _content(function: Any) -> list[Any]:
    """What can be seen of a callable and does not depend on the process."""
    if all(hasattr(function, name) for name in ("func", "args", "keywords")):  # a partial
        return [_content(function.func), _plain(function.args), _plain(function.keywords)]
    function = inspect.unwrap(function)
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # typed in, made by exec, or not written in Python
        source = getattr(code, "__qualname__", type(function).__qualname__)
    cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    defaults = [getattr(function, "__defaults__", None) or (), getattr(function, "__kwdefaults__", None) or {}]
    return [source, *map(_plain, defaults), _plain(cells)]


def _plain(values: Any) -> Any:
    """Those of some values that are numbers or text, with their names or places."""
    pairs = values.items() if hasattr(values, "items") else enumerate(values)
    return [[str(name), value] for name, value in pairs if isinstance(value, PLAIN)]
