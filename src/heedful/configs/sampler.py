"""Settings of what draws the responses of a rollout batch: this process, or vLLM servers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from heedful.configs.checks import refuse
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE
from heedful.configs.settings import Settings
from heedful.errors import ConfigError

PREFIX = "vllm:"


@dataclass(frozen=True, kw_only=True)
class SamplerOptions(Settings):
    """Where responses are sampled. Without a sampler, in this process."""

    SECTION = "server"

    sampler: tuple[str, ...] = ()
    """vLLM servers that draw the responses, as vllm:http://HOST:PORT; several share them. heedful serve-policy starts one.
    None: this process draws them."""
    sampler_weights: Literal["folder", "nccl"] = "folder"
    """How a server gets the weights after each step. folder: it reads a folder that the trainer writes. nccl: from GPU to
    GPU, which needs vLLM in this environment too, and a server that heedful serve-policy started with --nccl."""
    sampler_folder: Path | None = None
    """The folder for the weights, which the servers must see under the same path. None: a temporary one of this machine; name
    one on a shared file system if a server is on another machine or in a container."""
    sampler_sleep: bool = False
    """Servers sleep, and leave their GPU's memory to the trainer, except while they sample. For servers on the trainer's GPU,
    started with heedful serve-policy --sleep, which get their weights through a folder."""
    sampler_concurrency: Annotated[int, POSITIVE] = 128
    """Most responses in flight at a time to each server."""
    sampler_timeout: Annotated[float, POSITIVE] = 600.0
    """Seconds for one response, or for loading weights. Raise it for long responses or large models."""
    sampler_retry_minutes: Annotated[float, NOT_NEGATIVE] = 10.0
    """How long servers that fail are asked again before the run ends (and can be resumed). A response that one lost is drawn
    by the others meanwhile. At the start of a new run it is 10 seconds."""
    sampler_token_env: str | None = None
    """Environment variable with a token that is sent to the servers (vLLM's --api-key)."""

    @property
    def sampler_addresses(self) -> tuple[str, ...]:
        """http://HOST:PORT of each server."""
        return tuple(
            one.strip().removeprefix(PREFIX).rstrip("/") for part in self.sampler for one in part.split(",") if one
        )

    def check(self) -> None:
        super().check()
        if not self.sampler:
            refuse(
                self,
                *("sampler_weights", "sampler_folder", "sampler_sleep", "sampler_concurrency", "sampler_timeout"),
                *("sampler_retry_minutes", "sampler_token_env"),
                because="belongs to --sampler, which is not set; add --sampler vllm:http://HOST:PORT, or leave it out",
            )
            return
        for part in self.sampler:
            for one in part.split(","):
                _check_address(one.strip())
        if len(set(self.sampler_addresses)) < len(self.sampler_addresses):
            raise ConfigError(f"--sampler names a server twice: {' '.join(self.sampler)}; name each once")
        if self.sampler_folder is not None:
            object.__setattr__(self, "sampler_folder", Path(self.sampler_folder))
            if self.sampler_weights == "nccl":
                raise ConfigError("--sampler-folder belongs to --sampler-weights folder; leave out one of the two")
        if self.sampler_weights == "nccl" and self.sampler_sleep:
            raise ConfigError(
                "--sampler-weights nccl does not go with --sampler-sleep: a server that sleeps is on the trainer's GPU, and "
                "NCCL sends nothing from a GPU to itself; use --sampler-weights folder, or leave out --sampler-sleep"
            )
        if self.sampler_token_env is not None and (not self.sampler_token_env or "=" in self.sampler_token_env):
            raise ConfigError(
                f"--sampler-token-env must be the name of an environment variable, got {self.sampler_token_env!r}"
            )


def _check_address(one: str) -> None:
    """Refuse what is not vllm:http://HOST:PORT. Raises ConfigError."""
    form = "write vllm:http://HOST:PORT, such as vllm:http://127.0.0.1:8000"
    if not one.startswith(PREFIX):
        raise ConfigError(f"--sampler {one!r} is not a sampler; {form}")
    try:
        parts = urlsplit(one.removeprefix(PREFIX))
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"--sampler {one!r} is not an address: {error}; {form}") from error
    if not is_good or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"--sampler {one!r}: {form}, without a path")
    if parts.username or parts.password:
        raise ConfigError(
            f"--sampler: the address of {parts.hostname} holds a user or password, which would be written down; use "
            "--sampler-token-env"
        )
