"""What an online run says of itself: the models it is made from, and what its settings do that a user may not expect."""

from collections.abc import Sequence
from typing import Any, TypedDict

from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.rewards import Reward
from heedful.rewards.judge import is_judge
from heedful.train.environment import Given

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
    "chosen by --best-by"
)


class About(TypedDict):
    """What a run says of itself."""

    facts: dict[str, Any]
    parents: list[str]
    more_data: list[str | Given]
    notes: list[str]


def notes_of(config: RolloutConfig) -> list[str]:
    """What the settings do that a user may not expect."""
    is_only_measured = config.reference is not None and not config.needs_reference
    is_corrected = isinstance(config, OnlineConfig) and config.importance != "none"
    filtered = [CORRECTED if is_corrected else OFF_POLICY] if config.leaves_out else []
    without_judge = any(map(is_judge, config.rewards)) and config.judge_compares and bool(config.best_by)
    return filtered + ([ONLY_MEASURED] if is_only_measured else []) + ([WITHOUT_JUDGE] if without_judge else [])


def parents_of(config: RolloutConfig, rewards: Sequence[Reward]) -> list[str]:
    """The models that a run starts from; their hashes are written down."""
    value_model = config.value_model if isinstance(config, OnlineConfig) else None
    named = [path for path in (config.model, config.reference, value_model) if path]
    return named + [reward.name.removeprefix("model:") for reward in rewards if reward.name.startswith("model:")]
