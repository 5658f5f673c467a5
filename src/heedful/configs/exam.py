"""Settings of ``heedful exam``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heedful.configs.evaluate import EvaluationOptions
from heedful.configs.options import SamplingOptions
from heedful.configs.settings import POSITIVE, Range, refuse
from heedful.errors import ConfigError

PAGES = (".html", ".json")


@dataclass(frozen=True, kw_only=True)
class ExamConfig(SamplingOptions, EvaluationOptions):
    """Examine a reward before PPO optimises it: accuracy, spoilt responses, a search for responses that only it likes."""

    reward: str
    """The reward: a reward model (a folder or a Hub name), or anything that --rewards takes: python:FILE.py:FUNCTION,
    rule:NAME, http://HOST:PORT/PATH."""
    policy: str = ""
    """Policy that PPO would start from. It answers prompts of the data, and the search starts from its answers."""
    data: str = ""
    """Preference pairs that the reward did not learn from (docs/data.md). Without them a few built-in questions are
    used, and nothing is said about accuracy."""
    judge: tuple[str, ...] = ()
    """Another reward that is trusted more, in the same forms; several are summed. It foretells where best-of-n stops
    helping."""
    second: tuple[str, ...] = ()
    """Other rewards of the same purpose, such as the members of an ensemble, to find what only the examined one likes."""
    pairs: Annotated[int, Range(at_least=2)] = 256
    """Most pairs to use, drawn with the seed. More narrow the intervals."""
    prompts: Annotated[int, POSITIVE] = 32
    """Most prompts for the search and for the policy's answers."""
    n: Annotated[int, Range(at_least=2)] = 16
    """Answers of the policy to each prompt."""
    rounds: Annotated[int, POSITIVE] = 8
    """Rounds of the search. Each tries edits of every text and keeps the best."""
    edits: Annotated[int, POSITIVE] = 8
    """Edits tried on each text in a round."""
    output: Path | None = None
    """File for the page: .html, or .json for the numbers. None only prints."""
    json: bool = False
    """Print the numbers as JSON instead of the page."""

    POSITIONAL = ("reward",)

    def check(self) -> None:
        super().check()
        if not self.reward:
            raise ConfigError("a reward is missing: heedful exam REWARD, such as heedful exam runs/reward/final")
        if self.output is not None and self.output.suffix.lower() not in PAGES:
            raise ConfigError(f"--output {self.output} must end in {' or '.join(PAGES)}")
        if self.policy and self.temperature == 0:
            raise ConfigError(
                f"--n {self.n} needs a --temperature above 0: greedy decoding gives the same answer every time"
            )
        if not self.policy:
            refuse(
                self,
                "n",
                "max_new_tokens",
                "temperature",
                "top_k",
                "top_p",
                because="is about --policy; add it, or leave this out",
            )
            if self.judge:
                raise ConfigError("--judge scores the policy's answers: add --policy, or leave --judge out")
        if not self.data:
            refuse(self, "eval_fraction", "pairs", because="is about --data; add it, or leave this out")
        refuse(
            self,
            "too_long",
            because="has no effect: of a text that is longer than a reward model reads, it reads the beginning",
        )
