"""Settings of ``heedful sample`` and of the process that samples answers for people to label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heedful.configs.options import MachineOptions, RecordOptions, SamplingOptions
from heedful.configs.ranges import BELOW_ONE, POSITIVE
from heedful.configs.template import TemplateOptions
from heedful.configs.trust import TrustOptions
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions, TemplateOptions, TrustOptions, MachineOptions):
    """Which models write answers, and how."""

    SECTION = "sampling"

    models: tuple[str, ...]
    """The policies that write answers, one or several: folders, Hub names, or modelscope:ORG/NAME. Each prompt's first answer
    is by the first model, its second by the second, and so on from the beginning again."""
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
    """Share of prompts to leave out, chosen by the trainers' hash: give theirs, so that nobody labels what they hold out. 0
    leaves out none."""
    overwrite: bool = False
    """Replace the output file."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "output", Path(self.output))
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
    """Answer prompts that arrive on standard input as JSON lines (heedful.rounds.sample_worker)."""
