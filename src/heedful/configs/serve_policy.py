"""Settings of ``heedful serve-policy``."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from heedful.configs.ranges import POSITIVE, Range
from heedful.configs.settings import Settings
from heedful.errors import ConfigError

VARIABLE = "HEEDFUL_VLLM_PYTHON"


@dataclass(frozen=True, kw_only=True)
class ServePolicyConfig(Settings):
    """Start a vLLM server that draws responses for --sampler vllm:http://HOST:PORT of a trainer: heedful serve-policy MODEL.
    The command is printed, with its environment, and then run. Ctrl-C ends it."""

    model: str
    """The policy: a folder in Hugging Face format, or a Hub name. The trainer gives it its weights."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1 is reachable only from this machine. Whoever reaches the server can have it load files:
    open it to no network that you do not trust."""
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

    POSITIONAL: ClassVar[tuple[str, ...]] = ("model",)
    """Settings whose values may stand first, without their flags."""

    def check(self) -> None:
        super().check()
        if not self.model:
            raise ConfigError("a model is missing: heedful serve-policy MODEL")
        if self.model.startswith("modelscope:"):
            raise ConfigError(f"{self.model}: vLLM cannot be given that name; download the model, and name its folder")
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
        """The Python to run vLLM with."""
        return self.python or str(Path(os.environ.get(VARIABLE, "") or sys.executable).expanduser())
