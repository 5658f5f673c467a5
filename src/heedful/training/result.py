"""What a trainer returns: the run's folder, its summary, its metrics as a table, and the model that it trained."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.configs.options import TrainingOptions
from heedful.errors import CheckpointError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.load import load_reward_model
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.save import VALUE_HEAD
from heedful.models.tokenizer import load_tokenizer
from heedful.training.output_folder import logged

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class TrainingResult:
    """A run that is finished. ``result["steps"]`` is ``result.summary["steps"]``."""

    folder: Path
    """The run's folder, with all that a command writes."""
    summary: dict[str, Any] = field(repr=False)
    """What summary.json holds."""
    config: TrainingOptions = field(repr=False)
    """The settings, with the paths of what was given in memory."""

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    @property
    def metrics(self) -> "pandas.DataFrame":
        """What metrics.jsonl holds, one row per step: the columns are metrics (docs/metrics.md), those of evaluations among
        them; NaN where a step has none."""
        import pandas

        rows: dict[int, dict[str, Any]] = {}
        for record in logged(self.folder):
            rows.setdefault(record["step"], {}).update(record)
        return pandas.DataFrame(list(rows.values())).set_index("step")

    @functools.cached_property
    def policy(self) -> Policy:
        """The trained policy and its tokenizer, loaded from ``final/`` at the first use, with its value head if it has one.

        Raises CheckpointError if the run trained a reward model.
        """
        final, config = self.folder / "final", self.config
        if self["algorithm"] == "reward":
            raise CheckpointError(f"{final} holds a reward model, and no policy; result.reward_model loads it")
        has_head = (final / VALUE_HEAD).is_file()
        return Policy.from_pretrained(str(final), value_head=has_head, device=config.device, dtype=config.dtype)

    @functools.cached_property
    def reward_model(self) -> RewardModel:
        """The trained reward model, loaded from ``final/`` at the first use. ``rewards=["model:FOLDER/final"]`` scores by it.

        Raises CheckpointError if the run trained a policy.
        """
        final, device = str(self.folder / "final"), resolve_device(self.config.device)
        dtype = resolve_dtype(self.config.dtype, device)
        return load_reward_model(final, load_tokenizer(final), device=device, compute_dtype=dtype)
