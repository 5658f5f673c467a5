"""Groups of settings that several commands share. They are flat: a name is the same flag, YAML key and attribute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heedful.configs.checks import fraction, not_negative, positive, seed
from heedful.configs.lora import MemoryOptions
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where and how to compute."""

    seed: int = 0
    """Seed of every random draw. On a CPU the same seed gives the same run, bit for bit."""
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute precision; weights stay float32. auto: bfloat16 where the hardware is fast at it, float16 on older GPUs."""

    def check_machine(self) -> None:
        seed(self, "seed")


@dataclass(frozen=True, kw_only=True)
class RunOptions(MachineOptions):
    """A training run, its folder, and what it does every so many steps."""

    output: Path
    """Folder of the run: config, metrics, samples, checkpoints, best/ and final/ model."""
    overwrite: bool = False
    """Replace a run that already lies in the output folder."""
    eval_every: int = 50
    """Steps between evaluations on held-out data; 0 evaluates at the start and the end alone."""
    save_every: int = 0
    """Steps between saves under checkpoints/; 0 saves best/ and final/ alone."""
    sample_every: int = 50
    """Steps between tables of sampled responses (of a reward model: of scores); 0 shows none."""
    num_samples: int = 4
    """Rows of such a table."""
    patience: int = 0
    """Stop after this many evaluations in a row without improvement; 0 never stops early."""

    def check_run(self) -> None:
        self.check_machine()
        not_negative(self, "eval_every", "save_every", "sample_every", "patience")
        positive(self, "num_samples")
        object.__setattr__(self, "output", Path(self.output).expanduser())
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the run, such as runs/first")
        if self.patience and not self.eval_every:
            raise ConfigError("--patience counts evaluations: set --eval-every too")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How records are read."""

    columns: str = ""
    """Other names of columns, such as prompt=question,chosen=answer."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What to do with records longer than the model can read. drop and truncate are counted and reported."""
    unusable: Literal["error", "drop"] = "error"
    """What to do with records that do not make sense, such as an empty response. drop is counted and reported."""
    max_dropped: float = 0.1
    """Largest share of records that may be dropped, for whatever reason; more is an error."""
    max_samples: int | None = None
    """Read the first so many records of each data set alone; one on the Hub is streamed, not downloaded. None is all."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(RecordOptions):
    """What to train on."""

    data: str
    """Training data: a .jsonl, .jsonl.gz or .parquet file, a Hub data set (org/name or org/name:split), or one on
    ModelScope (modelscope:org/name)."""
    eval_data: str | None = None
    """Held-out data; None splits them off from the data by prompt."""
    eval_fraction: float = 0.05
    """Share of prompts to hold out when there is no eval-data, chosen by a hash of the prompt."""

    def check_data(self) -> None:
        fraction(self, "eval_fraction", "max_dropped")
        positive(self, "max_samples")
        if self.eval_fraction >= 1:
            raise ConfigError(f"--eval-fraction must be below 1, got {self.eval_fraction}; nothing is left to train on")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its schedule."""

    learning_rate: float = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after warm-up: constant, or along a line or a half cosine that reaches 0 one step after the last."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay on weight matrices."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it; 0 leaves them as they are."""
    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients. Lower forgets early gradients sooner, which suits short runs."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    micro_batch_size: int = 8
    """Rows in memory at a time. It never changes the gradient."""
    micro_batch_tokens: int | None = None
    """Most tokens in memory at a time, beside micro-batch-size: rows times the longest one, so padding counts. A row (pair,
    ranking) that has more comes alone. It never changes the gradient. None is no limit."""

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.micro_batch_size, self.micro_batch_tokens)

    def check_optimizer(self) -> None:
        positive(self, "learning_rate", "adam_eps", "micro_batch_size", "micro_batch_tokens")
        not_negative(self, "warmup_steps", "weight_decay", "max_grad_norm")
        fraction(self, "adam_beta2")
        if self.adam_beta2 == 1:
            raise ConfigError("--adam-beta2 must be below 1: at 1 the mean of squared gradients never leaves 0")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(MemoryOptions, OptimizerOptions, DataOptions, RunOptions):
    """What every trainer has."""

    compile: bool = False
    """Compile the layers that repeat (torch.compile) where trained models learn and score; sampling stays as it is. On a
    CPU, iterations of PPO became 1.1 to 1.3 times faster for 30 s of compiling: it pays after 30 to 50 of them, in later
    runs sooner, as torch keeps the code."""

    def check_training(self) -> None:
        self.check_run()
        self.check_data()
        self.check_optimizer()
        self.check_lora()
        self.check_memory()
        if self.compile and self.quantize != "none":
            raise ConfigError(
                f"--compile does not go with --quantize {self.quantize}, untried; leave out one of the two"
            )
        if self.compile and self.gradient_checkpointing:
            raise ConfigError(
                "--compile does not go with --gradient-checkpointing: torch.compile leaves layers that are computed again as "
                "they are; leave out one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are sampled. Filters shape what is sampled and nothing else; temperature 0 is greedy."""

    max_new_tokens: int = 64
    """Longest response, in tokens."""
    min_new_tokens: int = 1
    """Shortest response where lengths are drawn."""
    response_length: Literal["stop", "fixed", "drawn"] = "stop"
    """stop: up to a stop token; fixed: exactly max-new-tokens; drawn: a random number between min and max, each row."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in every log-prob. Below 1 is more cautious."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that together have this probability; 1 is all."""
    cuda_graphs: bool = False
    """On a CUDA device, record the kernels of a token once and launch them together: faster for small models, for the
    memory of the recordings. Other devices have none."""

    def check_sampling(self) -> None:
        positive(self, "max_new_tokens", "min_new_tokens", "top_p")
        not_negative(self, "temperature", "top_k")
        if self.top_p > 1:
            raise ConfigError(f"--top-p must be at most 1, got {self.top_p}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"--min-new-tokens {self.min_new_tokens} is larger than --max-new-tokens {self.max_new_tokens}"
            )
        if self.response_length != "drawn" and self.min_new_tokens != 1:
            raise ConfigError(
                f"--min-new-tokens {self.min_new_tokens} belongs to --response-length drawn, got {self.response_length}: "
                "it keeps no response from ending sooner; leave it out"
            )
