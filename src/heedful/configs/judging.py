"""Settings of judges: language models that are asked how good a response is."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.checks import refuse
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE
from heedful.configs.settings import Settings
from heedful.errors import ConfigError

JudgeMode = Literal["score", "pairwise", "ranking"]
KEY = "HEEDFUL_JUDGE_API_KEY"
"""The environment variable with the key of judges, if no other is named."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Settings):
    """How a judge (judge:http://HOST/v1#MODEL) is asked. All of it is refused if there is none."""

    SECTION = "judge"

    judge_mode: JudgeMode = "score"
    """What a judge is asked. score: a number for each response. pairwise: which of two responses to a prompt is better, each
    two asked in both orders, so k (k - 1) requests for k responses. ranking: an order of all responses to a prompt, in one
    request. The last two need several responses to a prompt (samples-per-prompt), and give scores from 0 to 1; training with
    them holds nothing out, or has best-by."""
    judge_rubric: Path | None = None
    """Text file that says what a good response is, in any language, sent to the judge as it stands. None is a general one:
    right, complete, clear, and no longer than needed."""
    judge_scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best number that a judge may give (judge-mode score). Any other number is a failure; scores stay on this
    scale."""
    judge_columns: tuple[str, ...] = ()
    """Columns of the prompts' records that a judge is shown, such as answer, the solution to compare with. Nothing else of a
    record leaves the machine but its prompt."""
    judge_temperature: Annotated[float | None, NOT_NEGATIVE] = 0.0
    """The judge's sampling temperature. None leaves it to the server, for models that refuse any."""
    judge_max_tokens: Annotated[int | None, POSITIVE] = 1024
    """Most tokens of a judge's answer, its reasoning included. Raise it for models that think; a cut answer is a failure.
    None leaves it to the server."""
    judge_cache: Path | None = None
    """File that keeps judges' answers (SQLite), so that the same question to the same model is paid for once, in other runs
    and after a kill too. None keeps nothing."""
    judge_key_env: str = KEY
    """Environment variable with the judge's API key, sent as the header Authorization: Bearer KEY. The default one may be
    unset, for servers that ask for none. The key itself is written nowhere."""

    @property
    def judge_compares(self) -> bool:
        """Whether judges compare responses to a prompt with each other."""
        return self.judge_mode != "score"

    def check(self) -> None:
        super().check()
        scale = tuple(self.judge_scale)
        if len(scale) != 2 or not all(map(math.isfinite, scale)) or scale[0] >= scale[1]:
            raise ConfigError(
                "--judge-scale must be two finite numbers, the worst score and then the best, such as 0 10, got "
                f"{self.judge_scale}"
            )
        object.__setattr__(self, "judge_scale", scale)
        if self.judge_compares:
            refuse(
                self,
                "judge_scale",
                because=f"belongs to --judge-mode score; --judge-mode {self.judge_mode} gives scores from 0 to 1",
            )
        for name in ("judge_rubric", "judge_cache"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value))
        if not self.judge_key_env or "=" in self.judge_key_env:
            raise ConfigError(
                f"--judge-key-env must be the name of an environment variable, got {self.judge_key_env!r}"
            )
