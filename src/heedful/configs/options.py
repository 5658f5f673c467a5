"""Groups of settings that several commands share."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from heedful.configs.checks import CheckOptions
from heedful.configs.settings import (
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    REQUIRED,
    SEED,
    Range,
    Settings,
    flag,
    refuse,
)
from heedful.configs.tracking import TrackingOptions
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class TrustOptions(Settings):
    """Whether Python code that comes with a model may run."""

    SECTION = "model and data"

    trust_remote_code: bool = False
    """Run the Python code of model folders (auto_map in config.json), for architectures that transformers does not
    know. Read the code first. Models by name never run code."""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(Settings):
    """Rendering of conversations. Trainers save these settings as defaults of the model's chat template."""

    SECTION = "model and data"

    chat_template: str = ""
    """Chat template in place of the model's own: plain, or a Jinja file. Trainers save it with the model."""
    thinking: Literal["default", "on", "off"] = "default"
    """Switch the thinking of a chat template on or off, if it has a switch (enable_thinking or thinking). default leaves it
    to the template: Qwen3's then thinks. Trainers save it with the model."""
    chat_template_kwargs: str = ""
    """Other variables of the chat template, as a JSON object such as '{"reasoning_effort": "low"}'. Trainers save them with
    the model."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables in ``chat_template_kwargs``. Raises ConfigError if it is not a JSON object."""
        if not self.chat_template_kwargs.strip():
            return {}
        try:
            variables = json.loads(self.chat_template_kwargs, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--chat-template-kwargs is not JSON: {error}: {self.chat_template_kwargs!r:.80}; write an object such as "
                + """'{"reasoning_effort": "low"}'"""
            ) from error
        if not isinstance(variables, dict):
            raise ConfigError(
                f"--chat-template-kwargs must be a JSON object of names and values, got {self.chat_template_kwargs!r:.80}"
            )
        return variables

    def check(self) -> None:
        super().check()
        _ = self.template_variables


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(Settings):
    """Low-rank adapters (Hu et al. 2021): the model is frozen, and the product of two thin matrices is trained."""

    SECTION = "optimisation"

    lora_rank: Annotated[int, NOT_NEGATIVE] = 0
    """Rank of LoRA adapters; 0 trains every weight instead. Raising it lets more be learned, for more memory. Adapters have a
    default learning rate of their own, ten times that of all weights."""
    lora_alpha: Annotated[float | None, POSITIVE] = None
    """Scale of the adapters: their product is multiplied by lora-alpha / lora-rank. None is twice the rank."""
    lora_targets: str = "all-linear"
    """What gets adapters: all-linear (every linear layer below the output head, experts too), or ends of names, such as
    q_proj,v_proj."""

    def check(self) -> None:
        super().check()
        if not all(part.strip() for part in self.lora_targets.split(",")):
            raise ConfigError(
                f"--lora-targets must be all-linear or names with commas between, got {self.lora_targets!r}"
            )
        self.check_belongs_to_lora("lora_alpha", "lora_targets")

    def check_belongs_to_lora(self, *fields: str) -> None:
        """Raise ConfigError for settings of adapters without adapters."""
        for field in fields if not self.lora_rank else ():
            if getattr(self, field) != getattr(type(self), field):
                raise ConfigError(f"{flag(field)} belongs to adapters: add --lora-rank, such as --lora-rank 16")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(LoRAOptions):
    """Other settings that save memory."""

    SECTION = "optimisation"

    gradient_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, about a third slower."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw-8bit keeps Adam's two moments in 8 bits: needs a GPU and pip install "heedful[gpu]"."""
    optimizer_device: Literal["same", "cpu"] = "same"
    """cpu keeps the optimizer's moments in main memory and makes its steps there: slower, for 8 bytes less on the GPU per
    trained weight. For a run on a GPU."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 stores trained matrices, and their gradients, in half the memory. Steps are rounded at random, so that small
    ones count on average; results are a little noisier. Needs products in bfloat16 (--dtype)."""
    quantize: Literal["none", "4bit"] = "none"
    """4bit keeps the frozen weights under the adapters in 4 bits (QLoRA): needs a GPU and pip install "heedful[gpu]"."""

    def check(self) -> None:
        super().check()
        if self.quantize != "none" and not self.lora_rank:
            raise ConfigError(
                f"--quantize {self.quantize} freezes the model's weights: add --lora-rank, such as --lora-rank 16"
            )
        if self.optimizer != "adamw" and self.optimizer_device != "same":
            raise ConfigError(
                f"--optimizer-device {self.optimizer_device} does not go with --optimizer {self.optimizer}, which steps on "
                "the GPU; leave out one of the two"
            )
        if self.weights_dtype != "float32" and self.lora_rank:
            raise ConfigError(
                f"--weights-dtype {self.weights_dtype} is for trained matrices, but with --lora-rank only small adapters are "
                "trained, in float32; leave out one of the two (on a GPU the frozen weights are in half precision anyway)"
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Settings):
    """The frozen reference model of a policy, and its device."""

    SECTION = "model and data"

    reference: str | None = None
    """Frozen model that the policy is compared with. None is the policy as it starts."""
    reference_device: Literal["same", "cpu"] = "same"
    """Where the reference is: same, with the policy; or cpu, in main memory, from where it is copied to the GPU for each of
    its passes."""

    def check(self) -> None:
        super().check()
        if self.reference_device == "cpu" and getattr(self, "lora_rank", None) and self.reference is None:
            raise ConfigError(
                "--reference-device cpu has no effect here: with --lora-rank the reference is the policy's own weights "
                "without the adapters; leave it out, or name another model with --reference"
            )


UNSHARDED = {
    "compile": ("on", "compiled layers are untested on sharded weights"),
    "quantize": ("4bit", "4-bit weights cannot be sharded"),
    "optimizer": (
        "adamw-8bit",
        "its 8-bit moments cannot be sharded; with --shard full each rank has only its part of AdamW's",
    ),
    "reference_device": ("cpu", "the reference is sharded over the ranks too"),
    "cuda_graphs": (
        "on",
        "a recording needs weights at fixed addresses, and unsharded weights exist only during sampling",
    ),
    "sampler_weights": ("nccl", "rank 0 gathers whole weights in main memory, but NCCL can send only from a GPU"),
    "dtype": ("float16", "float16 needs scaled gradients, which are untested on sharded weights; use --dtype bfloat16"),
}
"""Settings restricted by --shard full: the refused value, and the reason."""


@dataclass(frozen=True, kw_only=True)
class ShardOptions(Settings):
    """Sharding of models over the ranks of a run (torchrun --nproc-per-node N -m heedful ...)."""

    SECTION = "devices"

    shard: Literal["none", "full"] = "none"
    """none: every rank holds whole models, the fastest if they fit. full: weights, gradients and moments are sharded
    over the ranks (PyTorch's FSDP2): less memory, more traffic, the same numbers. In one process it changes nothing."""
    replicas: Annotated[int, POSITIVE] = 1
    """With --shard full: how many times the ranks together hold the models. Set it to the number of machines, so that each
    holds them whole and only sums of gradients travel between machines."""
    sync_every: Literal["step", "micro-batch"] = "step"
    """With --shard full: when gradients are summed over the ranks and divided. step: once per optimizer step, in its last
    micro-batch; until then each rank holds the gradients of whole weights. micro-batch: each time, for the least memory and
    the most traffic."""

    def check(self) -> None:
        super().check()
        if self.shard == "none":
            refuse(self, "replicas", "sync_every", because="belongs to --shard full; add it, or leave this out")
            return
        for name, (refused, reason) in UNSHARDED.items():
            value: Any = getattr(self, name, None)
            if value == refused:
                given = flag(name) if value is True else f"{flag(name)} {value}"
                raise ConfigError(f"{given} does not go with --shard full: {reason}; leave out one of the two")


def check_ranks(config: Any, ranks: int) -> None:
    """Raise ConfigError for more ranks than rows of an optimizer step, and for ``replicas`` that do not divide the ranks."""
    check_replicas(config.replicas, ranks)
    per_row: int = getattr(config, "rows_per_pair", 1)
    for name in ("batch_size", "minibatch_size"):
        rows = getattr(config, name, None)
        if rows is not None and math.ceil(rows / per_row) < ranks:
            raise ConfigError(
                f"{ranks} ranks, but a step has {rows // per_row} rows to divide among them ({flag(name)} {rows}): "
                f"raise it to at least {ranks * per_row}, or start at most {rows // per_row} ranks"
            )


def check_replicas(replicas: int, ranks: int) -> None:
    """Raise ConfigError if ``replicas`` does not divide the ranks."""
    if ranks % replicas:
        divisors = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
        raise ConfigError(
            f"--replicas {replicas} does not divide the {ranks} ranks; choose one of {', '.join(divisors)}, or start a "
            f"multiple of {replicas} ranks"
        )


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Settings):
    """Seed, device and precision."""

    SECTION = "devices"

    seed: Annotated[int, SEED] = 0
    """Seed of every random draw. On a CPU the same seed gives the same run, bit for bit."""
    device: str = "auto"
    """auto (CUDA if there is any, else mps, else cpu), cpu, cuda, cuda:N, mps, or any other type of device that torch
    knows."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matrix products; what is trained stays float32 (but see weights-dtype). auto: bfloat16 if the hardware is
    fast at it, float16 on older GPUs, else float32."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """The run's folder, its checkpoints, and resuming."""

    SECTION = "checkpoints"

    output: Annotated[Path | None, REQUIRED] = None
    """Folder of the run: settings, metrics, samples, checkpoints, and the models best/ and final/. In Python None makes a
    temporary one, which is removed when Python ends."""
    overwrite: bool = False
    """Replace a run that is already in the output folder. It is kept until the new one has its final/."""
    resume: str = "auto"
    """What to do with an unfinished run in the output folder. auto: resume from its latest complete checkpoint; the settings
    must be the same. never: refuse. A path resumes from that checkpoint of the run, such as
    runs/first/checkpoints/step-000100, and sets later ones aside."""
    allow_change: tuple[str, ...] = ()
    """Settings that may differ from those that an unfinished run began with, such as steps learning-rate; data and models
    stand for other content of the same files."""
    save_every: Annotated[int, NOT_NEGATIVE] = 0
    """Save a resumable checkpoint every N steps. 0 counts only the time (save-minutes)."""
    save_minutes: Annotated[float, NOT_NEGATIVE] = 15.0
    """Minutes between checkpoints, taken at the end of a step. 0 counts only the steps (save-every). A run that is ended by
    Ctrl-C, SIGTERM or an error saves one too."""
    save_total_limit: Annotated[int, NOT_NEGATIVE] = 2
    """Checkpoints to keep; older ones are removed once a new one is complete. 0 keeps all."""
    save_dtype: Literal["base", "float32"] = "base"
    """Dtype of the weights in best/ and final/. base: that of the model's files, so that a bfloat16 model does not become
    twice as large; evaluations during the run are of the weights before this rounding. float32: as trained. Checkpoints are
    always exact."""

    @property
    def folder(self) -> Path:
        """The folder of a started run: trainers have replaced None by a temporary one."""
        assert self.output is not None
        return self.output

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "allow_change", tuple(name.strip("-").replace("-", "_") for name in self.allow_change))
        for name in self.allow_change:
            if not hasattr(self, name) and name != "models":
                raise ConfigError(
                    f"--allow-change {name} is not a setting; name flags without their dashes, such as learning-rate"
                )
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in str(self.output)):
            raise ConfigError(f"--output {str(self.output)!r} is not UTF-8; choose another name")
        if not self.resume:
            raise ConfigError("--resume must be auto, never, or the path of a checkpoint")
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the run, such as runs/first")


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions(Settings):
    """Held-out data, and evaluations on it."""

    SECTION = "evaluation"

    eval_data: str | None = None
    """Held-out data. None holds out a part of the training data, split by prompt."""
    eval_fraction: Annotated[float, FRACTION] = 0.05
    """Share of prompts to hold out if there is no eval-data, chosen by a hash of the prompt."""
    eval_every: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between evaluations on held-out data. 0 evaluates only at the start and the end."""
    early_stopping_patience: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many evaluations in a row without improvement. 0 never stops early."""

    def check(self) -> None:
        super().check()
        if self.eval_fraction >= 1:
            raise ConfigError(f"--eval-fraction must be below 1, got {self.eval_fraction}; nothing is left to train on")
        if self.early_stopping_patience and not self.eval_every:
            raise ConfigError("--early-stopping-patience counts evaluations: set --eval-every too")


@dataclass(frozen=True, kw_only=True)
class LoggingOptions(TrackingOptions):
    """A run's output on the screen."""

    SECTION = "logging"

    sample_every: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between tables of sampled responses (of scores, for a reward model). 0 shows none."""
    num_samples: Annotated[int, POSITIVE] = 4
    """Rows in such a table."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(CheckOptions, CheckpointOptions, LoggingOptions, HeldOutOptions, TrustOptions, MachineOptions):
    """A training run."""

    SECTION = "devices"

    distributed_timeout_minutes: Annotated[float, POSITIVE] = 30.0
    """Minutes that ranks (torchrun --nproc-per-node N -m heedful ...) wait for one another. If one has died or hangs, the job
    ends and can be resumed. It must be longer than the slowest rewards, evaluations and savings, which rank 0 does alone."""
    memory_check: bool = True
    """On a CUDA device, refuse a run that by its plan (heedful plan) needs more than 1.1 times the free memory, before
    anything is written; elsewhere one whose weights, gradients and moments are more than the main memory. Turn it off if the
    plan is wrong for your model."""


@dataclass(frozen=True, kw_only=True)
class RawTextOptions(Settings):
    """Prompts that are strings."""

    SECTION = "model and data"

    raw_prompts: bool = False
    """Prompts that are strings are meant as raw text, also for a model that learned conversations: no warning."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions(TemplateOptions, RawTextOptions):
    """Reading of records."""

    SECTION = "model and data"

    columns: str = ""
    """Columns of other names, such as prompt=question,chosen=answer. If several shapes fit, the named columns decide,
    as in messages=messages."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What to do with records longer than the model can read. drop and truncate are counted and reported."""
    unusable: Literal["error", "drop"] = "error"
    """What to do with unusable records: an empty response, a conversation that the chat template refuses, a ranking of equal
    answers. drop leaves them out; they are counted by cause."""
    max_dropped: Annotated[float, FRACTION] = 0.1
    """Largest share of records that may be dropped, for whatever reason; more is an error."""
    special_tokens: Literal["literal", "read"] = "literal"
    """How special tokens in raw text, such as <|im_end|>, are read: literal, letter by letter; or read, as the tokens. Use
    read for text that a chat template has already rendered. Text in messages is always literal."""
    max_samples: Annotated[int | None, POSITIVE] = None
    """Read only the first N records of each data set; one on the Hub is streamed, not downloaded. None reads all."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(HeldOutOptions, RecordOptions):
    """Training data."""

    SECTION = "model and data"

    data: Annotated[str, REQUIRED] = ""
    """Training data: a file, a folder or a quoted pattern of files, or a data set on the Hub (org/name). Files are .jsonl,
    .json, .csv, .tsv (also .gz), .parquet or .arrow. org/name:split chooses a split; modelscope:org/name is a data set on
    ModelScope."""
    shuffle: bool = True
    """Shuffle the training data anew in each epoch. Off, the records are taken in the order of the data, in every epoch."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Settings):
    """The model to train."""

    SECTION = "model and data"

    model: Annotated[str, REQUIRED] = ""
    """Model to start from: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""


class DefaultRate(float):
    """A default learning rate, for training all weights. Adapters get `ADAPTER_RATE` times it."""


ADAPTER_RATE = 10
"""Default learning rate of adapters, as a multiple of that of all weights (docs/lora.md)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Settings):
    """AdamW and its schedule."""

    SECTION = "optimisation"

    learning_rate: Annotated[float, POSITIVE] = DefaultRate(1e-5)
    """Peak learning rate. With lora-rank the default is ten times as large."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after warm-up: constant, or falling along a line or half a cosine that reaches 0 one step after the last."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled weight decay on weight matrices."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradients with a larger norm are scaled down to it. 0 leaves them as they are."""
    adam_beta2: Annotated[float, BELOW_ONE] = 0.999
    """Decay of Adam's mean of squared gradients. Lower forgets early gradients sooner, which suits short runs."""
    adam_eps: Annotated[float, POSITIVE] = 1e-8
    """Adam's epsilon."""
    micro_batch_size: Annotated[int, POSITIVE] = 8
    """Most rows in memory at a time: lower it if memory runs out. It never changes the gradient."""
    micro_batch_tokens: Annotated[int | None, POSITIVE] = None
    """Most tokens in memory at a time, besides micro-batch-size: rows times the longest one, so padding counts. A row (pair,
    ranking) that has more is processed by itself. It never changes the gradient. None means no limit."""

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.micro_batch_size, self.micro_batch_tokens)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ShardOptions, MemoryOptions, OptimizerOptions, DataOptions, ModelOptions, RunOptions):
    """Settings of every trainer, and what the memory plan, the doctor and the loops ask of them."""

    SECTION = "devices"

    compile: Literal["off", "on"] = "off"
    """on: compile the repeated layers (torch.compile) for learning, which pays in long runs where products are fast, such as
    bfloat16 on a CPU with AMX. If compiling fails, the run ends before it starts. Compiled layers round differently
    (docs/speed.md)."""

    algorithm: ClassVar[str]
    """The command, and the name of its runs."""
    learns_pairs: ClassVar[bool] = False
    """Whether it learns from pairs of texts, which a micro-batch keeps together."""
    learns_scores: ClassVar[bool] = False
    """Whether the model gives scores, as a reward model does, instead of tokens."""
    trains_policy: ClassVar[bool] = True
    """Whether ``model`` learns, not only a critic of it."""
    has_dropout: ClassVar[bool] = False
    """Whether the model learns with its dropout."""
    rate_is_of: ClassVar[Literal["imitation", "reference"]] = "reference"
    """What bounds its learning rate: imitating texts, or staying near a reference."""
    reads_reference_once: ClassVar[bool] = False
    """Whether the reference reads all texts before the first step, and is gone then."""

    @property
    def step_rows(self) -> int:
        """Texts that an optimizer step learns from."""
        raise NotImplementedError  # `EpochOptions` and `RolloutConfig` know

    @property
    def loads_reference(self) -> bool:
        """Whether there is a reference."""
        return False

    @property
    def strength(self) -> float | None:
        """``beta`` of a loss that holds the policy to a reference; None for other objectives."""
        return None

    @property
    def learns_prompts(self) -> bool:
        """Whether prompts are learned too."""
        return False

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss needs the entropy of each token."""
        return False

    def check(self) -> None:
        super().check()
        if isinstance(self.learning_rate, DefaultRate):
            rate = float(self.learning_rate)
            object.__setattr__(self, "learning_rate", round(ADAPTER_RATE * rate, 12) if self.lora_rank else rate)
        if self.compile == "on" and self.quantize != "none":
            raise ConfigError(
                f"--compile on does not go with --quantize {self.quantize} (untested); leave out one of the two"
            )
        if self.compile == "on" and self.gradient_checkpointing:
            raise ConfigError(
                "--compile on does not go with --gradient-checkpointing: torch.compile skips layers that are recomputed; "
                "leave out one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Settings):
    """Sampling of responses. Filters affect only sampling, not log-probs; temperature 0 is greedy."""

    SECTION = "sampling"

    max_new_tokens: Annotated[int, POSITIVE] = 64
    """Longest response, in tokens."""
    response_length: Literal["stop", "fixed"] = "stop"
    """Where a response ends. stop: up to a stop token. fixed: exactly max-new-tokens."""
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    """Divides the logits, in sampling and in every log-prob. Below 1 is more cautious."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Sample only from the k most likely tokens. 0 samples from all."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Sample only from the most likely tokens that together have this probability. 1 samples from all."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Record the kernels of one token and launch them together: two to five times as fast (0.6B on an H200), in exchange for
    memory that stays. auto: on CUDA, where the memory plan has room for it. on: refused on a device without such graphs."""

    @property
    def leaves_out(self) -> bool:
        """Whether filters exclude some tokens, so that the others have higher probabilities than under the policy."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1
