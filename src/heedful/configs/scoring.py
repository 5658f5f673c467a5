"""Settings of rewards, shared by every command that scores responses, and of the server of a reward model."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.options import MachineOptions
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE, Range
from heedful.configs.trust import TrustOptions
from heedful.errors import ConfigError

Combination = Literal["sum", "mean", "min", "mean-std"]


@dataclass(frozen=True, kw_only=True)
class RewardOptions(TrustOptions):
    """What scores responses, and how several scores become one."""

    rewards: tuple[str, ...] = ()
    """What scores a response: model:PATH, python:FILE.py:FUNCTION, rule:NAME, rule:NAME:ARGUMENT, http://HOST:PORT/PATH."""
    reward_weights: tuple[float, ...] = ()
    """What multiplies the score of each reward, in order, functions given in Python included; none given is 1 for each."""
    reward_combine: Literal["sum", "mean", "min", "mean-std"] = "sum"
    """How the weighted scores of several rewards become one. min and mean-std are for ensembles, and err on the low side."""
    reward_std_coef: Annotated[float, NOT_NEGATIVE] = 1.0
    """Standard deviations of the rewards that mean-std takes off their mean. Raising it trusts only what all agree on."""
    reward_timeout: Annotated[float, POSITIVE] = 60.0
    """Seconds to wait for an http reward's answer. Refused without such a reward."""
    reward_retries: Annotated[int, NOT_NEGATIVE] = 3
    """How often an http reward is asked again when it does not answer or is overloaded, after 0.5, 1, 2, ... seconds.
    Refused without such a reward."""

    def check(self) -> None:
        super().check()
        if not all(abs(weight) <= sys.float_info.max for weight in self.reward_weights):
            got = tuple(weight if isinstance(weight, float) else "an integer" for weight in self.reward_weights)
            raise ConfigError(f"--reward-weights must be finite numbers, got {got}")
        if self.reward_std_coef != 1.0 and self.reward_combine != "mean-std":
            raise ConfigError(
                f"--reward-std-coef {self.reward_std_coef} belongs to --reward-combine mean-std, got "
                f"{self.reward_combine}; leave out one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class ServeRewardConfig(TrustOptions, MachineOptions):
    """Serve a reward model over HTTP, for --rewards http://HOST:PORT/score of any trainer. Ctrl-C ends it."""

    model: str
    """The reward model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1 is reachable only from this machine; 0.0.0.0 from every machine, without a password."""
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 8001
    """Port to listen at; 0 takes a free one."""
    micro_batch_size: Annotated[int, POSITIVE] = 32
    """Rows in memory at a time."""
    max_request_mb: Annotated[float, POSITIVE] = 64.0
    """Largest request in megabytes; a larger one is refused."""
