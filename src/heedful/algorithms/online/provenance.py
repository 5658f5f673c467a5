"""What an online run is made from besides its data, and what its settings do that a user may not expect."""

import inspect
import tokenize
from collections.abc import Sequence
from typing import Any, TypedDict

from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.rewards import Reward, RewardFunction
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.judge import is_judge
from heedful.training.provenance import IN_PYTHON, Artifact, digest

PLAIN = (bool, int, float, str, type(None))
OFF_POLICY = (
    "--top-k and --top-p shape what is sampled, not the policy's log-probs: training becomes off-policy; --importance "
    "corrects for it (heedful ppo, a2c, grpo)"
)
CORRECTED = (
    "--top-k and --top-p leave tokens out: --importance weighs what is sampled, but what is left out is never seen, so a "
    "bias stays (rollout/kept_mass)"
)
ONLY_MEASURED = "--reference: KL has no price here, so the reference is read only at evaluations, for eval/kl"
WITHOUT_JUDGE = (
    "a judge that compares has no part in eval/score_mean and eval/objective, whose prompts have one response each; best/ is "
    "chosen by --selection-rewards"
)


class About(TypedDict):
    """What a run says of itself."""

    facts: dict[str, Any]
    parents: list[str]
    more_data: list[str | Artifact]
    notes: list[str]


def notes_of(config: RolloutConfig) -> list[str]:
    """What the settings do that a user may not expect."""
    is_only_measured = config.reference is not None and not config.needs_reference
    is_corrected = isinstance(config, OnlineConfig) and config.importance != "none"
    filtered = [CORRECTED if is_corrected else OFF_POLICY] if config.leaves_out else []
    without_judge = any(map(is_judge, config.rewards)) and config.judge_compares and bool(config.selection_rewards)
    return filtered + ([ONLY_MEASURED] if is_only_measured else []) + ([WITHOUT_JUDGE] if without_judge else [])


def parents_of(config: RolloutConfig, rewards: Sequence[Reward]) -> list[str]:
    """The models that a run starts from; their hashes are written down."""
    value_model = config.value_model if isinstance(config, OnlineConfig) else None
    named = [path for path in (config.model, config.reference, value_model) if path]
    return named + [reward.name.removeprefix("model:") for reward in rewards if reward.name.startswith("model:")]


def given_in_python(rewards: Sequence[str | Reward | RewardFunction]) -> Artifact:
    """The rewards that are functions: name and weight of each, and a sum of its source.

    The source is that of the function, or of the class of an object; with it go defaults, arguments bound by partial, and the
    variables of an outer function, if they are numbers or text. What else a function reads or calls is not seen. One whose
    source cannot be had counts by its name.
    """
    return Artifact(
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
    # typed in, made by exec, or not written in Python; or its file was edited since
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        source = getattr(code, "__qualname__", type(function).__qualname__)
    cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    defaults = [getattr(function, "__defaults__", None) or (), getattr(function, "__kwdefaults__", None) or {}]
    return [source, *map(_plain, defaults), _plain(cells)]


def _plain(values: Any) -> Any:
    """Those of some values that are numbers or text, with their names or places."""
    pairs = values.items() if hasattr(values, "items") else enumerate(values)
    return [[str(name), value] for name, value in pairs if isinstance(value, PLAIN)]
