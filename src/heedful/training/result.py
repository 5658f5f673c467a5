"""A trainer's result: the run's folder, its summary, metrics as a table, and the trained model."""

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
from heedful.training.verdict import Verdict

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class TrainingResult:
    """A finished run. ``result["steps"]`` is ``result.summary["steps"]``."""

    folder: Path
    """The run's folder, as the command would write it."""
    summary: dict[str, Any] = field(repr=False)
    """The content of summary.json."""
    config: TrainingOptions = field(repr=False)
    """The settings, with paths of inputs from memory."""

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The content of metrics.jsonl, a row per step. Columns are metrics (docs/metrics.md), including evaluations;
        NaN if missing."""
        import pandas

        rows: dict[int, dict[str, Any]] = {}
        for record in logged(self.folder):
            rows.setdefault(record["step"], {}).update(record)
        return pandas.DataFrame(list(rows.values())).set_index("step")

    @property
    def verdict(self) -> Verdict | None:
        """Whether the run made its model better on held-out prompts, with a 95 % interval of the change; None if nothing was
        held out. ``print(result.verdict)`` says it in a line."""
        return Verdict.read(self.summary)

    @functools.cached_property
    def policy(self) -> Policy:
        """The trained policy with tokenizer and value head, if any, loaded from ``final/`` at first use.

        Raises CheckpointError if the run trained a reward model or a critic.
        """
        final, config = self.folder / "final", self.config
        if self["algorithm"] == "reward":
            raise CheckpointError(f"{final} is a reward model, not a policy; load it with result.reward_model")
        if self["algorithm"] == "critic":
            raise CheckpointError(
                f"{final} is a critic, not a policy; name it with critic='separate', value_model='{final}'"
            )
        has_head = (final / VALUE_HEAD).is_file()
        return Policy.from_pretrained(str(final), value_head=has_head, device=config.device, dtype=config.dtype)

    @functools.cached_property
    def reward_model(self) -> RewardModel:
        """The trained reward model, loaded from ``final/`` at first use. To train on it:
        ``rewards=["model:FOLDER/final"]``.

        Raises CheckpointError if the run trained a policy.
        """
        final, device = str(self.folder / "final"), resolve_device(self.config.device)
        dtype = resolve_dtype(self.config.dtype, device)
        return load_reward_model(final, load_tokenizer(final), device=device, compute_dtype=dtype)
