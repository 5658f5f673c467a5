"""Provenance of an online run besides its data, and notes on settings with unexpected effects."""

from collections.abc import Sequence
from typing import Any, TypedDict

from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.rewards import Reward, RewardFunction
from heedful.rewards.functions import FunctionProcess
from heedful.rewards.judge import is_judge
from heedful.training.provenance import IN_PYTHON, Artifact
from heedful.user_code import name_of, source_hash

OFF_POLICY = (
    "--top-k and --top-p change the sampling distribution, not the policy's log-probs, so training is off-policy; "
    "--importance corrects for it (heedful ppo, a2c, grpo)"
)
CORRECTED = (
    "--top-k and --top-p exclude tokens: --importance corrects sampled tokens, but excluded ones are never seen, so a bias "
    "remains (rollout/kept_mass)"
)
FREE_VALUES = "values are not clipped (--value-clip-range): what Monte Carlo targets or more passes gain lies beyond it"
ONLY_MEASURED = "--reference: there is no KL penalty, so the reference is used only at evaluations, for eval/kl"
WITHOUT_JUDGE = (
    "eval/score_mean and eval/objective exclude the comparing judge, since evaluation samples one response per prompt; "
    "best/ is chosen by --selection-rewards"
)


class About(TypedDict):
    """Notes and provenance of a run."""

    facts: dict[str, Any]
    parents: list[str]
    more_data: list[str | Artifact]
    notes: list[str]


def notes_of(config: RolloutConfig) -> list[str]:
    """Notes on settings with unexpected effects."""
    is_only_measured = config.reference is not None and not config.needs_reference
    is_corrected = config.corrects
    filtered = [CORRECTED if is_corrected else OFF_POLICY] if config.leaves_out else []
    without_judge = any(map(is_judge, config.rewards)) and config.judge_compares and bool(config.selection_rewards)
    is_free = isinstance(config, OnlineConfig) and config.trains_policy and config.value_clip != config.value_clip_range
    free = [FREE_VALUES] if is_free else []
    return filtered + free + ([ONLY_MEASURED] if is_only_measured else []) + ([WITHOUT_JUDGE] if without_judge else [])


def parents_of(config: RolloutConfig, rewards: Sequence[Reward]) -> list[str]:
    """Paths of the models that a run starts from; their hashes are recorded."""
    value_model = config.value_model if isinstance(config, OnlineConfig) else None
    named = [path for path in (config.model, config.reference, value_model) if path]
    return named + [reward.name.removeprefix("model:") for reward in rewards if reward.name.startswith("model:")]


def given_in_python(rewards: Sequence[str | Reward | RewardFunction]) -> Artifact:
    """Rewards that are Python functions: name, weight and hash (`source_hash`) of each."""
    return Artifact(
        IN_PYTHON, ", ".join(_described(reward) for reward in rewards if not isinstance(reward, str)) or "none"
    )


def files_of(rewards: Sequence[Reward]) -> list[str]:
    """Files imported by ``python:`` rewards, besides the named ones."""
    found = [reward.function.files for reward in rewards if isinstance(reward.function, FunctionProcess)]
    return sorted({file for files in found for file in files})


def _described(reward: Reward | RewardFunction) -> str:
    function = reward.function if isinstance(reward, Reward) else reward
    name = reward.name if isinstance(reward, Reward) else name_of(reward)
    weight = f" x {reward.weight:g}" if isinstance(reward, Reward) and reward.weight != 1.0 else ""
    return f"{name}{weight} {source_hash(function)[:12]}"
