"""The settings of `PPOTrainer`: the fields of TRL 0.11.4 with its defaults. They hold every name of 0.4 to 0.10 as well."""

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from heedful.errors import ConfigError


@dataclass
class PPOConfig:
    """Settings of `PPOTrainer`, under TRL's names. `HfArgumentParser` makes flags of them.

    Fields without a line of their own are notes of the script, which the trainer does not read.

    Raises ConfigError for values that no step can be run with, and for settings that are not supported.
    """

    exp_name: str = Path(sys.argv[0]).stem
    seed: int = 0
    """The trainer sets the seeds of Python, numpy and torch to it."""
    log_with: Literal["wandb", "tensorboard"] | None = None
    """Where `log_stats` writes. tensorboard needs ``project_kwargs={"logging_dir": FOLDER}``."""
    task_name: str | None = None
    model_name: str = "gpt2"
    query_dataset: str = "stanfordnlp/imdb"
    reward_model: str = "sentiment-analysis:lvwerra/distilbert-imdb"
    remove_unused_columns: bool = True
    """Drop the dataset's columns that neither the model's ``forward`` takes nor are named label, query or response."""
    tracker_kwargs: dict = field(default_factory=dict)
    """Arguments of the tracker, such as ``{"wandb": {"name": "run 1"}}``."""
    accelerator_kwargs: dict = field(default_factory=dict)
    """Arguments of ``accelerate.Accelerator``, such as ``{"mixed_precision": "bf16"}``."""
    project_kwargs: dict = field(default_factory=dict)
    """Arguments of ``accelerate.utils.ProjectConfiguration``, such as ``{"logging_dir": "logs"}``."""
    tracker_project_name: str = "trl"
    push_to_hub_if_best_kwargs: dict = field(default_factory=dict)
    """Not supported."""
    steps: int = 20000
    """Number of samples of the whole run; gives ``total_ppo_epochs``, at which scripts stop. The trainer does not read it."""
    learning_rate: float = 1.41e-5
    """Of the Adam that the trainer makes if it is given no optimizer."""
    adap_kl_ctrl: bool = True
    """Adapt the KL coefficient to ``target``; otherwise it stays ``init_kl_coef``."""
    init_kl_coef: float = 0.2
    """KL penalty coefficient, in score units per nat."""
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    """Penalty per token: see `heedful.compat.trl.formulas.kl_penalty`."""
    target: float = 6.0
    """KL per response that the coefficient is adapted to, in nats."""
    horizon: float = 10000.0
    """Time constant of the adaptation, in responses."""
    gamma: float = 1.0
    """Discount factor per token."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    cliprange: float = 0.2
    """The probability ratio is clipped to ``1 - cliprange`` and ``1 + cliprange``."""
    cliprange_value: float = 0.2
    """Values are clipped to this distance from the old ones, in score units."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    batch_size: int = 128
    """Responses per `step`, in each process."""
    forward_batch_size: int | None = None
    """Older name of ``mini_batch_size``; if set, it takes its place."""
    mini_batch_size: int = 128
    """Responses per forward and backward pass."""
    gradient_accumulation_steps: int = 1
    """Minibatches per optimizer step."""
    world_size: int | None = None
    """Set by the trainer: the number of processes."""
    ppo_epochs: int = 4
    """Passes over the batch per `step`."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm before every optimizer step."""
    optimize_cuda_cache: bool | None = None
    """Older name of ``optimize_device_cache``; if set, it takes its place."""
    optimize_device_cache: bool = False
    """Free cached device memory after each `step`."""
    early_stopping: bool = False
    """Make no further epoch once the last minibatch's mean of old minus new log-probs is above 1.5 times ``target_kl``."""
    target_kl: float = 1.0
    compare_steps: int = 1
    """Belongs to ``push_to_hub_if_best_kwargs``."""
    ratio_threshold: float = 10.0
    """A minibatch whose mean ratio is above it gets a loss of 0; the optimizer steps all the same."""
    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""
    use_score_norm: bool = False
    """With ``use_score_scaling``: subtract their running mean before."""
    score_clip: float | None = None
    """Clip scores to ``[-score_clip, score_clip]``, after scaling."""
    whiten_rewards: bool = False
    """Scale rewards to variance 1 before advantages are computed."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass."""
    is_encoder_decoder: bool | None = None
    """Set by the trainer: False."""
    is_peft_model: bool | None = None
    """Set by the trainer."""
    backward_batch_size: int | None = None
    """Computed: responses per optimizer step."""
    global_backward_batch_size: int | None = None
    """Set by the trainer: the same over all processes."""
    global_batch_size: int | None = None
    """Set by the trainer: responses per `step` over all processes."""
    dataset_num_proc: int | None = None

    def __post_init__(self) -> None:
        if self.forward_batch_size is not None:
            self.mini_batch_size = self.forward_batch_size
        if self.optimize_cuda_cache is not None:
            self.optimize_device_cache = self.optimize_cuda_cache
        for name in ("batch_size", "mini_batch_size", "gradient_accumulation_steps", "ppo_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"PPOConfig: {name} is {getattr(self, name)}; it must be at least 1")
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % self.backward_batch_size:
            raise ConfigError(
                f"PPOConfig: batch_size is {self.batch_size}; it must be a multiple of mini_batch_size * "
                f"gradient_accumulation_steps, which is {self.mini_batch_size} * {self.gradient_accumulation_steps} = "
                f"{self.backward_batch_size}. (mini_batch_size is 128 unless it is set; before TRL 0.7 it was 1.)"
            )
        self.total_ppo_epochs = -(-self.steps // self.batch_size)
        if self.kl_penalty not in ("kl", "abs", "mse", "full"):
            raise ConfigError(f"PPOConfig: kl_penalty is {self.kl_penalty!r}; choose 'kl', 'abs', 'mse' or 'full'")
        if self.adap_kl_ctrl and not (self.target > 0 and self.horizon > 0 and self.init_kl_coef >= 0):
            raise ConfigError(
                f"PPOConfig: target is {self.target}, horizon {self.horizon} and init_kl_coef {self.init_kl_coef}; with "
                "adap_kl_ctrl the first two must be above 0 and the last not below; or set adap_kl_ctrl=False"
            )
        self._check_tracker()
        self._refuse_unsupported()

    def _check_tracker(self) -> None:
        if self.log_with not in (None, "tensorboard", "wandb"):
            raise ConfigError(f"PPOConfig: log_with is {self.log_with!r}; choose 'tensorboard', 'wandb' or None")
        if self.log_with == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "PPOConfig: log_with is 'wandb', which is not installed; pip install \"heedful[wandb]\", or use "
                "log_with='tensorboard'"
            )
        if self.log_with == "tensorboard" and "logging_dir" not in self.project_kwargs:
            raise ConfigError(
                "PPOConfig: log_with is 'tensorboard', but there is no folder to write to; add "
                "project_kwargs={'logging_dir': 'logs'}"
            )

    def _refuse_unsupported(self) -> None:
        if self.push_to_hub_if_best_kwargs:
            raise ConfigError(
                "PPOConfig: push_to_hub_if_best_kwargs is not supported; in the script's loop, call "
                "ppo_trainer.push_to_hub(NAME) when the mean of the rewards is the best so far"
            )
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        for name, function in (("accelerator_kwargs", Accelerator), ("project_kwargs", ProjectConfiguration)):
            known = inspect.signature(function).parameters
            for key in getattr(self, name):
                if key not in known:
                    raise ConfigError(
                        f"PPOConfig: {name} has {key!r}, which {function.__name__} of the installed accelerate does not "
                        f"take; it takes {', '.join(known)}"
                    )
        for key in ("gradient_accumulation_steps", "gradient_accumulation_plugin", "log_with", "project_config"):
            if key in self.accelerator_kwargs:
                raise ConfigError(
                    f"PPOConfig: accelerator_kwargs has {key!r}; use PPOConfig's own gradient_accumulation_steps, log_with "
                    "and project_kwargs"
                )

    def to_dict(self) -> dict[str, Any]:
        """All settings, those inside dictionaries as ``name/key``."""
        return dict(_flat("", asdict(self) | {"total_ppo_epochs": self.total_ppo_epochs}))


def _flat(prefix: str, content: Mapping[str, Any]) -> Any:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}/", value)
        else:
            yield prefix + name, value
