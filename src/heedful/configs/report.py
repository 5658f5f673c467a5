"""Settings of what shows runs: heedful report, look and watch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.options import MachineOptions
from heedful.configs.settings import NOT_NEGATIVE, POSITIVE, SEED, Range, Settings, refuse
from heedful.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")
FORMATS = (".html", *PICTURES)
Quantity = Literal["advantage", "log-ratio", "KL", "reward", "value", "return", "entropy", "log-prob"]


@dataclass(frozen=True, kw_only=True)
class ReportConfig(MachineOptions):
    """Write a page about runs: curves, lineage, samples, alarms, every token with its numbers; or a picture of the curves."""

    runs: tuple[str, ...]
    """Folders of runs, such as runs/sft runs/ppo."""
    output: Path = Path("report.html")
    """File to write: .html is the page, in one file that needs no network; .png, .svg or .pdf only the learning curves, runs
    of the same algorithm in the same panels."""
    responses: Annotated[int, POSITIVE] = 2000
    """Most responses in the token inspector (of runs with --rollouts all). Above it, and above what the page's 2 MB hold, it
    shows those with the highest numbers and a random sample of the others, and says so."""
    seed: Annotated[int, SEED] = 0
    """Seed of that sample."""
    best_of_n: Path | None = None
    """Result of heedful evaluate best-of-n (--output), the yardstick beside reward against KL. None takes it from the first
    step's responses if there are several to each prompt."""
    compare: tuple[str, ...] = ()
    """Two models (folders of checkpoints) that read the same responses: the inspector shows the log-probs of both, and their
    values if both have a value head."""

    POSITIONAL = ("runs",)

    def check(self) -> None:
        super().check()
        if not self.runs:
            raise ConfigError("no run is named: heedful report RUN ..., such as heedful report runs/sft runs/ppo")
        if self.output.suffix.lower() not in FORMATS:
            raise ConfigError(f"--output {self.output} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
        if self.output.suffix.lower() in PICTURES:
            because = f"is about the page, and --output {self.output} has only the curves; leave it out, or name a page"
            refuse(self, "responses", "seed", "best_of_n", "compare", because=because)
        if len(self.compare) not in (0, 2):
            raise ConfigError(
                f"--compare takes two models, got {len(self.compare)}; such as --compare runs/sft/final runs/ppo/final"
            )


@dataclass(frozen=True, kw_only=True)
class LookConfig(Settings):
    """Show responses of a run (--rollouts all) in the terminal, token by token: heedful look RUN --step 20 --by KL."""

    run: Path
    """Folder of the run."""
    step: Annotated[int | None, POSITIVE] = None
    """Step whose responses are shown. None is the last."""
    row: Annotated[int | None, NOT_NEGATIVE] = None
    """Only the response in this row of the step, from 0. None shows those with the largest numbers."""
    by: Quantity | None = None
    """Number that colours the tokens, and by whose largest magnitude responses are chosen. None is the advantage, or the next
    in this list that the run has."""
    count: Annotated[int, POSITIVE] = 3
    """How many responses to show."""

    POSITIONAL = ("run",)

    def check(self) -> None:
        super().check()
        if str(self.run) in ("", "."):
            raise ConfigError("no run is named: heedful look RUN, such as heedful look runs/ppo --step 20")


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Settings):
    """Serve the page of heedful report while runs go on: heedful watch RUN. It only reads files. Ctrl-C ends it."""

    runs: tuple[str, ...]
    """Folders of runs, such as runs/ppo."""
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 8766
    """Port on this machine (127.0.0.1) to listen at; 0 takes a free one."""
    responses: Annotated[int, POSITIVE] = 2000
    """Most responses in the token inspector."""
    seed: Annotated[int, SEED] = 0
    """Seed of the sample of responses."""

    POSITIONAL = ("runs",)

    def check(self) -> None:
        super().check()
        if not self.runs:
            raise ConfigError("no run is named: heedful watch RUN, such as heedful watch runs/ppo")
