"""Groups of settings that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.lora import MemoryOptions
from heedful.configs.ranges import BELOW_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, SEED, Range
from heedful.configs.settings import Settings
from heedful.configs.sharding import ShardOptions
from heedful.configs.template import TemplateOptions
from heedful.configs.tracking import TrackingOptions
from heedful.configs.trust import TrustOptions
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Settings):
    """Where and how to compute."""

    SECTION = "devices"

    seed: Annotated[int, SEED] = 0
    """Seed of every random draw. On a CPU the same seed gives the same run, bit for bit."""
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matrix products; what is trained stays float32 (but see weights-dtype). auto: bfloat16 if the hardware is
    fast at it, float16 on older GPUs, else float32."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """The run's folder, and what an unfinished run resumes from."""

    SECTION = "checkpoints"

    output: Path
    """Folder of the run: settings, metrics, samples, checkpoints, and the models best/ and final/."""
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
    keep: Annotated[int, NOT_NEGATIVE] = 2
    """Checkpoints to keep; older ones are removed once a new one is complete. 0 keeps all."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "output", Path(self.output))
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
    """What is held out of training, and when a run is measured on it."""

    SECTION = "evaluation"

    eval_data: str | None = None
    """Held-out data. None holds out a part of the training data, split by prompt."""
    eval_fraction: Annotated[float, FRACTION] = 0.05
    """Share of prompts to hold out if there is no eval-data, chosen by a hash of the prompt."""
    eval_every: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between evaluations on held-out data. 0 evaluates only at the start and the end."""
    patience: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many evaluations in a row without improvement. 0 never stops early."""

    def check(self) -> None:
        super().check()
        if self.eval_fraction >= 1:
            raise ConfigError(f"--eval-fraction must be below 1, got {self.eval_fraction}; nothing is left to train on")
        if self.patience and not self.eval_every:
            raise ConfigError("--patience counts evaluations: set --eval-every too")


@dataclass(frozen=True, kw_only=True)
class LoggingOptions(TrackingOptions):
    """What a run shows of itself."""

    SECTION = "logging"

    sample_every: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between tables of sampled responses (of scores, for a reward model). 0 shows none."""
    num_samples: Annotated[int, POSITIVE] = 4
    """Rows in such a table."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(CheckpointOptions, LoggingOptions, HeldOutOptions, TrustOptions, MachineOptions):
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
class RecordOptions(TemplateOptions):
    """How records are read."""

    SECTION = "model and data"

    columns: str = ""
    """Other names of columns, such as prompt=question,chosen=answer. messages=messages chooses a shape where several fit."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What to do with records longer than the model can read. drop and truncate are counted and reported."""
    unusable: Literal["error", "drop"] = "error"
    """What to do with records that cannot be used: an empty response, a conversation that the chat template refuses, a
    ranking of equal answers. drop leaves them out; they are counted by cause."""
    max_dropped: Annotated[float, FRACTION] = 0.1
    """Largest share of records that may be dropped, for whatever reason; more is an error."""
    special_tokens: Literal["literal", "read"] = "literal"
    """How special tokens in raw text, such as <|im_end|>, are read: literal, letter by letter; or read, as the tokens. Use
    read for text that a chat template has already rendered. Text in messages is always literal."""
    max_samples: Annotated[int | None, POSITIVE] = None
    """Read only the first N records of each data set; one on the Hub is streamed, not downloaded. None reads all."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(HeldOutOptions, RecordOptions):
    """What to train on."""

    SECTION = "model and data"

    data: str
    """Training data: a file, a folder or a quoted pattern of files, or a data set on the Hub (org/name). Files are .jsonl,
    .json, .csv, .tsv (also .gz), .parquet or .arrow. org/name:split chooses a split; modelscope:org/name is a data set on
    ModelScope."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Settings):
    """What to train."""

    SECTION = "model and data"

    model: str
    """Model to start from: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Settings):
    """AdamW and its schedule."""

    SECTION = "optimisation"

    learning_rate: Annotated[float, POSITIVE] = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after warm-up: constant, or falling along a line or half a cosine that reaches 0 one step after the last."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled weight decay on weight matrices."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradients with a larger norm are scaled down to it. 0 leaves them as they are."""
    max_skipped_steps: Annotated[int, NOT_NEGATIVE] = 3
    """A step whose loss or gradient is not a finite number is left out, and skipped.jsonl in output says which records it was
    to learn from. More such steps in a row than this end the run. 0 ends it at the first."""
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
    """What every trainer has."""

    SECTION = "devices"

    compile: bool = False
    """Compile the repeated layers (torch.compile) for learning and scoring; sampling is not compiled. On a CPU it made
    iterations of PPO 1.0 to 1.3 times faster after 30 s of compiling, so where it pays, it does after 30 to 50 of them; later
    runs compile faster, as torch keeps the code."""

    def check(self) -> None:
        super().check()
        if self.compile and self.quantize != "none":
            raise ConfigError(
                f"--compile does not go with --quantize {self.quantize}, untried; leave out one of the two"
            )
        if self.compile and self.gradient_checkpointing:
            raise ConfigError(
                "--compile does not go with --gradient-checkpointing: torch.compile skips layers that are recomputed; leave "
                "out one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Settings):
    """How responses are sampled. Filters shape only what is sampled; temperature 0 is greedy."""

    SECTION = "sampling"

    max_new_tokens: Annotated[int, POSITIVE] = 64
    """Longest response, in tokens."""
    min_new_tokens: Annotated[int, POSITIVE] = 1
    """Shortest response if lengths are drawn."""
    response_length: Literal["stop", "fixed", "drawn"] = "stop"
    """Where a response ends. stop: up to a stop token. fixed: exactly max-new-tokens. drawn: for each row a random number
    between min and max."""
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    """Divides the logits, in sampling and in every log-prob. Below 1 is more cautious."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Sample only from the k most likely tokens. 0 samples from all."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Sample only from the most likely tokens that together have this probability. 1 samples from all."""
    cuda_graphs: bool = False
    """On a CUDA device, record the kernels of one token and launch them together: faster for small models, in exchange for
    the memory of the recordings. Other devices have none."""

    @property
    def leaves_out(self) -> bool:
        """Whether some tokens cannot be drawn, so that others are drawn more often than the policy says."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1

    def check(self) -> None:
        super().check()
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"--min-new-tokens {self.min_new_tokens} is larger than --max-new-tokens {self.max_new_tokens}"
            )
        if self.response_length != "drawn" and self.min_new_tokens != 1:
            raise ConfigError(
                f"--min-new-tokens {self.min_new_tokens} belongs to --response-length drawn, got {self.response_length}: "
                "it keeps no response from ending sooner; leave it out"
            )
