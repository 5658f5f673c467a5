"""Settings of commands that neither train nor measure: demo, tiny models, answers, chats, tools for runs."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.options import (
    MachineOptions,
    RawTextOptions,
    RecordOptions,
    SamplingOptions,
    TemplateOptions,
    TrustOptions,
)
from heedful.configs.settings import BELOW_ONE, POSITIVE, SEED, Range, Settings, refuse, require_label_extra
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class DemoConfig(MachineOptions):
    """Watch a tiny random model go through SFT, a reward model and PPO in a built-in world, and come out better."""

    output: Path = Path("runs/demo")
    """Folder of the demo: the world's data, the models, the three runs, tables and curves."""
    overwrite: bool = False
    """Replace a demo that is already in the output folder."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Compute precision; weights stay float32. A model this small gains nothing from bfloat16."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Language of the explanations: English or Chinese; auto takes that of the environment (LANG)."""
    label: bool = False
    """Label pairs of the model's answers yourself, in the browser. The reward model then learns only from your labels, not
    from the demo's preferences."""
    label_pairs: Annotated[int, Range(at_least=10, at_most=5000)] = 30
    """Pairs to label with --label. More make a better reward model."""
    label_port: Annotated[int, Range(at_least=1, at_most=65535)] = 8765
    """Port of the page with --label."""
    label_simulated: bool = False
    """With --label, without a browser: a simulated labeller who agrees with the gold judge on 73 % of the pairs."""

    def check(self) -> None:
        super().check()
        if self.label_simulated and not self.label:
            raise ConfigError("--label-simulated belongs to --label, which is not given; add it")
        if self.label and not self.label_simulated:
            require_label_extra("--label")
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the demo, such as runs/demo")


@dataclass(frozen=True, kw_only=True)
class TinyConfig(Settings):
    """Make a tiny model with random weights and a byte-level tokenizer, to try things on."""

    output: Path
    """Folder to write."""
    architecture: Literal["gpt2", "qwen2", "qwen3", "llama", "deberta-v2"] = "qwen3"
    """Shape of the model; deberta-v2 is an encoder, for reward models."""
    hidden_size: Annotated[int, POSITIVE] = 64
    """Width; a multiple of 8."""
    num_layers: Annotated[int, POSITIVE] = 2
    """Depth."""
    max_length: Annotated[int, POSITIVE] = 512
    """Context in tokens (bytes, unless the tokenizer learns from texts)."""
    initializer_range: Annotated[float, POSITIVE] = 0.02
    """Standard deviation of the random weights. 0.02 is small for narrow models; 1 / sqrt(hidden-size) keeps their scale."""
    texts: str | None = None
    """Demonstrations (docs/data.md) from whose texts the tokenizer learns frequent sequences of bytes as tokens. None: one
    token a byte."""
    vocab_size: Annotated[int, Range(at_least=264)] = 1024
    """Most tokens of a tokenizer that learns from texts: 8 special ones, 256 bytes, and the learned ones."""
    seed: Annotated[int, SEED] = 0
    """Seed of the weights."""
    overwrite: bool = False
    """Replace what is already in the folder."""

    def check(self) -> None:
        super().check()
        if self.hidden_size % 8:
            raise ConfigError(f"--hidden-size must be a multiple of 8 (4 heads of even size), got {self.hidden_size}")
        if self.texts is None:
            refuse(self, "vocab_size", because="belongs to --texts, which is not given; add it, or leave this out")
        elif self.architecture == "qwen2":
            raise ConfigError(
                "--texts: transformers reads a qwen2 folder with Qwen2's own rules of splitting, so it would not find the "
                "learned tokens; use --architecture qwen3, llama or gpt2, or leave out --texts"
            )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions, TemplateOptions, RawTextOptions, TrustOptions, MachineOptions):
    """Models that write answers, and their sampling."""

    SECTION = "sampling"

    models: tuple[str, ...]
    """Policies that write the answers: folders, Hub names, or modelscope:ORG/NAME. Several take turns within each
    prompt."""
    micro_batch_size: Annotated[int, POSITIVE] = 32
    """Rows in memory at a time."""
    micro_batch_tokens: Annotated[int | None, POSITIVE] = None
    """Most tokens in memory at a time, besides micro-batch-size: rows times the longest one. A row is as long as its prompt
    and max-new-tokens. None is no limit."""

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.micro_batch_size, self.micro_batch_tokens)

    def check(self) -> None:
        super().check()
        if not self.models or not all(self.models):
            raise ConfigError("--models is missing: name one policy or several, such as --models runs/sft/final")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(AnswerOptions, RecordOptions):
    """Write several answers to each prompt into a file, for people to compare (heedful label import)."""

    data: str
    """Prompts: a file (docs/data.md), or a data set on the Hub or ModelScope."""
    output: Path
    """JSON Lines file for the prompts with their answers; each answer says which model wrote it and how."""
    answers: Annotated[int, POSITIVE] = 2
    """Answers per prompt, of all models together."""
    max_prompts: Annotated[int | None, POSITIVE] = None
    """Use N prompts, drawn with the seed, in the order of the file. None uses all."""
    eval_fraction: Annotated[float, BELOW_ONE] = 0.0
    """Share of prompts to leave out, by the trainers' hash: give their eval-fraction, so that nobody labels what they
    hold out. 0 leaves out none."""
    overwrite: bool = False
    """Replace the output file."""

    def check(self) -> None:
        super().check()
        if self.answers < len(self.models):
            raise ConfigError(
                f"--answers {self.answers} are fewer than the {len(self.models)} --models, so some would write nothing; give "
                f"--answers {len(self.models)} or more"
            )
        if self.temperature == 0 and self.answers > len(self.models):
            raise ConfigError(
                f"--answers {self.answers} of {len(self.models)} --models need a --temperature above 0: greedy decoding "
                "gives the same answer every time"
            )


@dataclass(frozen=True, kw_only=True)
class SampleWorkerConfig(AnswerOptions):
    """Answer prompts that arrive on standard input as JSON lines (heedful.apps.rounds.sample)."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SamplingOptions, TemplateOptions, TrustOptions, MachineOptions):
    """Talk to a model in the terminal. /reset starts over, /help lists the commands, /exit ends."""

    model: str
    """The policy: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    system_prompt: str | None = None
    """System message at the start of the conversation."""
    raw: bool = False
    """No template: the model continues each line as plain text."""
    max_new_tokens: Annotated[int, POSITIVE] = 256
    """Longest answer, in tokens."""

    def check(self) -> None:
        super().check()
        if self.raw and self.system_prompt is not None:
            raise ConfigError("--system-prompt is a message, and --raw uses no messages; leave one of them out")
        if self.raw and (self.thinking != "default" or self.chat_template_kwargs):
            raise ConfigError("--thinking and --chat-template-kwargs are for a chat template, and --raw uses none")


@dataclass(frozen=True, kw_only=True)
class MergeConfig(TrustOptions):
    """Write a plain model from LoRA adapters and the model they belong to: a policy, reward model or value model."""

    adapter: str
    """Folder of the adapters, such as the final/ of a run with --lora-rank."""
    output: Path
    """Folder to write the model to."""
    overwrite: bool = False
    """Replace a model that is already in the output folder."""
    save_dtype: Literal["base", "float32"] = "base"
    """Dtype of the weights. base: that of the model's files; float32: as computed."""

    def check(self) -> None:
        super().check()
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the model, such as runs/merged")


@dataclass(frozen=True, kw_only=True)
class RunsConfig(Settings):
    """List the runs in a folder and below it, with their state, step and last metric."""

    folder: Path = Path("runs")
    """A run, or a folder that holds runs at any depth."""

    POSITIONAL = ("folder",)

    def check(self) -> None:
        super().check()
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is not a folder; name one that holds runs: heedful runs FOLDER")


REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class PushConfig(Settings):
    """Upload the model of a run to the Hugging Face Hub, with a card: heedful push RUN ORG/NAME --license apache-2.0."""

    run: Path
    """Folder of the run."""
    to: str
    """Repository on the Hub, as ORG/NAME; created if it does not exist."""
    license: str = ""
    """Licence of the weights, as the Hub writes it: apache-2.0, mit, cc-by-4.0, llama3.1, other. Must be given: it follows
    from the licences of the base model and the data, which heedful does not know."""
    best: bool = False
    """Upload best/ instead of final/."""
    private: bool = True
    """Make a private repository. --no-private makes a public one, or pushes to one that is public."""
    dry_run: bool = False
    """Write the upload to a folder instead of uploading it."""
    folder: Path | None = None
    """The folder of --dry-run. None is the run's with -push behind its name."""
    base_model: str | None = None
    """The base model on the Hub. None finds it through the run and the runs before it, or takes what the adapters
    name."""
    language: tuple[str, ...] = ()
    """Languages of the model, such as en zh."""
    results: tuple[Path, ...] = ()
    """Results of heedful evaluate (--output) for the card."""
    message: str = "Upload a model trained with heedful"
    """Message of the commit on the Hub."""

    POSITIONAL = ("run", "to")

    def check(self) -> None:
        super().check()
        if not REPOSITORY.fullmatch(self.to):
            raise ConfigError(
                f"{self.to!r} is not the name of a repository; write ORG/NAME: heedful push {self.run} ORG/NAME"
            )
        if not self.license:
            raise ConfigError(
                "--license is missing: the licence of the weights, as the Hub writes it, such as apache-2.0, mit, cc-by-4.0, "
                "llama3.1 or other; it follows from those of the base model and the data"
            )
        if not LICENSE.fullmatch(self.license):
            raise ConfigError(
                f"--license {self.license!r} is not in the Hub's form; write for example apache-2.0, mit or other"
            )
        if self.base_model is not None and not REPOSITORY.fullmatch(self.base_model):
            raise ConfigError(f"--base-model {self.base_model!r} is no model on the Hub; write ORG/NAME")
        for code in self.language:
            if not LANGUAGE.fullmatch(code):
                raise ConfigError(f"--language {code!r} is no code of a language, such as en, zh or pt-BR")
        if self.folder is not None and not self.dry_run:
            raise ConfigError(f"--folder {self.folder} belongs to --dry-run; add it, or leave --folder out")

    @property
    def model_folder(self) -> Path:
        """The folder of the model."""
        return self.run / ("best" if self.best else "final")

    @property
    def dry_run_folder(self) -> Path:
        """The folder of a dry run."""
        return self.folder or self.run.with_name(f"{self.run.resolve().name}-push")


VARIABLE = "HEEDFUL_VLLM_PYTHON"


@dataclass(frozen=True, kw_only=True)
class ServePolicyConfig(Settings):
    """Start a vLLM server that draws responses for --sampler vllm:http://HOST:PORT of a trainer: heedful serve-policy MODEL.
    The command is printed, with its environment, and then run. Ctrl-C ends it."""

    model: str
    """The policy: a folder in Hugging Face format, or a Hub name. The trainer gives it its weights."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1 is reachable only from this machine. Anybody who reaches the server can make it
    load files: use another address only in a network that you trust."""
    port: Annotated[int, Range(at_least=1, at_most=65535)] = 8000
    """Port to listen at."""
    python: str = ""
    """The Python of the environment that vLLM is installed in, such as ~/vllm/bin/python. Empty: the one that the environment
    variable HEEDFUL_VLLM_PYTHON names, or else the one that heedful runs in."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the server. auto: that of the model's files, but bfloat16 for float32."""
    max_model_len: Annotated[int | None, POSITIVE] = None
    """Longest prompt and response together, in tokens. Lowering it saves memory. None is what the model can read."""
    gpu_memory: Annotated[float | None, Range(above=0, at_most=1)] = None
    """Share of the GPU's memory that the server takes. Lower it for one that shares its GPU with the trainer. None is vLLM's
    own choice (0.9)."""
    tensor_parallel: Annotated[int, POSITIVE] = 1
    """GPUs over which each matrix is split."""
    sleep: bool = False
    """The server can sleep, for --sampler-sleep of a trainer on the same GPU."""
    nccl: bool = False
    """The server takes weights by NCCL, for --sampler-weights nccl."""
    extra: str = ""
    """More flags for vLLM, as one word: --extra='--max-num-seqs 512'."""
    dry_run: bool = False
    """Print the command and do not run it."""

    POSITIONAL = ("model",)

    def check(self) -> None:
        super().check()
        if not self.model:
            raise ConfigError("a model is missing: heedful serve-policy MODEL")
        if self.model.startswith("modelscope:"):
            raise ConfigError(f"{self.model}: vLLM does not accept this name; download the model, and name its folder")
        folder = Path(self.model).expanduser()
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{self.model} holds adapters; serve the model that they belong to: the trainer merges them"
            )
        try:
            shlex.split(self.extra)
        except ValueError as error:
            raise ConfigError(f"--extra {self.extra!r} is not a list of flags: {error}") from error

    @property
    def interpreter(self) -> str:
        """The Python that runs vLLM."""
        return self.python or str(Path(os.environ.get(VARIABLE, "") or sys.executable).expanduser())
