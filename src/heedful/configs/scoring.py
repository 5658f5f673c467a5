"""Settings of rewards, shared by every command that scores responses, and of the server of a reward model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.options import MachineOptions, TrustOptions
from heedful.configs.settings import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Range, Settings
from heedful.errors import ConfigError
from heedful.redact import HIDDEN

JudgeMode = Literal["score", "pairwise", "ranking"]


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Settings):
    """Settings of a judge (judge:http://HOST/v1#MODEL), refused without a judge. Its API key is read from the environment
    variable HEEDFUL_JUDGE_API_KEY."""

    SECTION = "judge"

    judge_mode: JudgeMode = "score"
    """Question to a judge. score: a number from 0 to 10 for each response. pairwise: which of two responses to a prompt is
    better, in both orders, so k (k - 1) requests for k responses. ranking: an order of all responses to a prompt, in one
    request. The last two need several responses to a prompt (samples-per-prompt) and give scores from 0 to 1; training
    with them needs eval-fraction 0, or selection-rewards."""
    judge_rubric: Path | None = None
    """Text file that says what a good response is, in any language, sent to the judge as it stands. None is a general one:
    right, complete, clear, and no longer than needed."""
    judge_columns: tuple[str, ...] = ()
    """Columns that the judge sees beside the prompt, such as answer, the solution to compare with. Nothing else of a
    record leaves the machine."""
    judge_temperature: Annotated[float | None, NOT_NEGATIVE] = 0.0
    """The judge's sampling temperature. None leaves it to the server, for models that refuse any."""
    judge_max_tokens: Annotated[int | None, POSITIVE] = 1024
    """Most tokens of a judge's answer, its reasoning included. Raise it for models that think; a cut answer is a failure.
    None leaves it to the server."""
    judge_cache: Path | None = None
    """File that keeps judges' answers (SQLite), so that the same question to the same model is paid for once, in other runs
    and after a kill too. None keeps nothing."""

    @property
    def judge_compares(self) -> bool:
        """Whether judges compare responses to a prompt with each other."""
        return self.judge_mode != "score"


Combination = Literal["sum", "mean", "min", "mean-std"]


@dataclass(frozen=True, kw_only=True)
class RewardOptions(JudgeOptions, TrustOptions):
    """Rewards, and the combination of their scores."""

    SECTION = "reward"

    rewards: tuple[str, ...] = ()
    """What scores a response: model:PATH, python:FILE.py:FUNCTION, rule:NAME, rule:NAME:ARGUMENT, verify:math,
    http://HOST:PORT/PATH, or a language model as a judge: judge:http://HOST/v1#MODEL. http rewards get the token in the
    environment variable HEEDFUL_REWARD_TOKEN."""
    reward_weights: tuple[float, ...] = ()
    """Factor of each reward's score, in order, functions given in Python included. The default is 1 for each."""
    reward_combine: Combination = "sum"
    """How weighted scores are combined. min and mean-std (mean minus standard deviation) are cautious: for
    ensembles."""
    max_failed_rewards: Annotated[float, BELOW_ONE] = 0.1
    """Largest share of a batch on which a reward may fail (an exception, a timeout, a crash, NaN). Failed responses are
    left out and counted; above this share the run stops. 0 stops at the first."""
    reward_timeout: Annotated[float | None, POSITIVE] = None
    """Seconds for one answer of an http reward or a judge, or one call of a python: function, rule:regex or verify:math,
    which is then stopped. None is 60 for http and judges, 300 for functions. Refused without such a reward."""
    reward_memory_gb: Annotated[float, POSITIVE] = 8.0
    """Most memory, in gigabytes, that the process of a python: function may hold with its children; beyond it the process is
    stopped (on Linux). Refused without such a reward."""
    reward_retry_minutes: Annotated[float, NOT_NEGATIVE] = 10.0
    """Minutes for which a request to an http reward or a judge that fails or is overloaded is retried. Raise it if the
    server takes longer to restart. Refused without such a reward."""
    reward_concurrency: Annotated[int | None, POSITIVE] = None
    """Most requests in flight at a time to an http reward or a judge. Raise it if the server answers many at once, lower it
    if it is overloaded. None is 4 for http and 64 for judges. Refused without such a reward."""

    @property
    def group_size(self) -> int:
        """Number of consecutive responses to one prompt, to be compared by a judge."""
        return 1

    @property
    def answer_timeout(self) -> float:
        """Seconds for an answer over http."""
        return self.reward_timeout or 60.0

    @property
    def function_timeout(self) -> float:
        """Seconds for a call of a function in a process of its own."""
        return self.reward_timeout or 300.0

    def check(self) -> None:
        super().check()
        if not all(abs(weight) <= sys.float_info.max for weight in self.reward_weights):
            got = tuple(weight if isinstance(weight, float) else "an integer" for weight in self.reward_weights)
            raise ConfigError(f"--reward-weights must be finite numbers, got {got}")
        for reward in (*self.rewards, *getattr(self, "selection_rewards", ()), *getattr(self, "judge", ())):
            if isinstance(reward, str) and "://" in reward and HIDDEN in reward:
                raise ConfigError(
                    f"the reward {reward}: a secret was replaced by {HIDDEN} when the settings were saved; write the address "
                    "again"
                )


@dataclass(frozen=True, kw_only=True)
class ServeRewardConfig(TrustOptions, MachineOptions):
    """Serve a reward model over HTTP, for --rewards http://HOST:PORT/score of any trainer. Ctrl-C ends it in seconds."""

    model: str
    """The reward model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1 is reachable only from this machine; 0.0.0.0 from every machine: set token-env too."""
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 8001
    """Port to listen at; 0 takes a free one."""
    micro_batch_size: Annotated[int, POSITIVE] = 32
    """Rows in memory at a time."""
    token_env: str | None = None
    """Name of an environment variable with a token that requests for scores must bring as `Authorization: Bearer TOKEN`.
    None asks for none."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which requests may call the server, besides the host setting and localhost. Others are refused, so that
    no web page can reach it by letting its own name point here."""
    max_queue: Annotated[int, POSITIVE] = 64
    """Most waiting requests. Above it requests are answered with 429, and trainers retry."""
    max_request_mb: Annotated[float, POSITIVE] = 64.0
    """Largest request in megabytes; a larger one is refused."""
    max_held_mb: Annotated[float, POSITIVE] = 256.0
    """Megabytes of requests in memory; a request above it is answered with 429."""
    receive_timeout: Annotated[float, POSITIVE] = 30.0
    """Seconds for a request's head, for its body, and for taking the answer. Raise it for slow connections."""
    max_connections: Annotated[int, POSITIVE] = 512
    """Most open connections. Above it the one that has waited longest without a whole request is closed."""

    @property
    def least_connections(self) -> int:
        """Minimal number of connections for a full queue and answers to further clients."""
        return self.max_queue + 8

    def check(self) -> None:
        super().check()
        if self.max_held_mb < self.max_request_mb:
            raise ConfigError(
                f"--max-held-mb {self.max_held_mb:g} is less than --max-request-mb {self.max_request_mb:g}, so the largest "
                "request could never be accepted; raise --max-held-mb or lower --max-request-mb"
            )
        if self.max_connections < self.least_connections:
            raise ConfigError(
                f"--max-connections {self.max_connections} must be at least {self.least_connections}: those of --max-queue "
                f"{self.max_queue} and 8 more; raise it, or lower --max-queue"
            )
        for name in self.allowed_hosts:
            if not name or any(sign in name for sign in "/:@ ") or not name.isascii():
                raise ConfigError(
                    f"--allowed-hosts {name!r} must be only a host name, such as gpu-box or rewards.example.org: no port, "
                    "no http://"
                )
        if self.token_env is not None and (not self.token_env or "=" in self.token_env):
            raise ConfigError(
                f"--token-env {self.token_env!r} must be the name of an environment variable, such as REWARD_TOKEN"
            )
