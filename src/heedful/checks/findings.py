"""What a check finds, and what checks look at: a trainer's data as token ids, its model, rewards and settings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.configs.checks import CHECKS
from heedful.configs.options import TrainingOptions
from heedful.data.chat import Renderer
from heedful.data.encoding import decode_inside
from heedful.data.fitting import Counts
from heedful.data.splits import HasPrompt
from heedful.display import harmless, shown
from heedful.models.reward_model import RewardModel
from heedful.redact import redact_printed
from heedful.rewards import Reward

Level = Literal["fail", "warn"]
MOST_TOKENS = 8
"""Tokens that the evidence of a finding shows, at most."""
LONGEST_EVIDENCE = 200
"""Characters of each text of others in a finding, at most."""


@dataclass(frozen=True)
class Finding:
    """Something that ruins a run (``fail``), or may (``warn``)."""

    check: str
    level: Level
    what: str
    evidence: str
    """Where to look: file and line, tokens, numbers."""
    why: str
    fix: str

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self.check}: {self.what} ({self.evidence}). Fix: {self.fix}"

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def finding(check: str, level: Level, what: str, evidence: str, *, fix: str = "") -> Finding:
    """A finding of a check in `CHECKS`, which has its reason and its fix. What others wrote is escaped and cut."""
    of = CHECKS[check]
    assert level in of.levels
    evidence = shown(redact_printed(evidence), LONGEST_EVIDENCE)
    return Finding(check, level, harmless(what), evidence, of.why, fix or of.fix)


class TokenRow(NamedTuple):
    """A text as token ids."""

    source: str
    """Where it was read, as ``file:line``."""
    prompt: Sequence[int]
    response: Sequence[int]
    """What is learned, or scored. Empty for a prompt alone."""
    name: str = ""
    """Which response of its record it is, such as chosen or bad; empty if there is one kind only."""

    @property
    def ids(self) -> list[int]:
        """All of it."""
        return [*self.prompt, *self.response]


@dataclass(frozen=True)
class LoadedRun:
    """What a trainer has loaded and encoded, before its first step."""

    config: TrainingOptions
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    """The model that learns."""
    rows: Sequence[TokenRow]
    """The training data. Of pairs and rankings each response is a row."""
    records: tuple[Sequence[HasPrompt], Sequence[HasPrompt]]
    """Training and held-out records as they were read."""
    counts: Counts
    """How many records there were, and what became of them."""
    renderer: Renderer | None = None
    """None for a model that reads pairs of texts."""
    stop_ids: tuple[int, ...] = ()
    """The tokens that end a response in sampling. Empty if the model writes none."""
    rewards: Sequence[Reward] = ()
    reward_model: RewardModel | None = None
    """The one that learns, if it is one."""
    resumes: bool = False
    """Whether this resumes an unfinished run. Its warnings were given when it began."""


def spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most so many of some items, spread evenly over all of them: the same ones each time."""
    return items if len(items) <= most else [items[i * len(items) // most] for i in range(most)]


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token, as evidence shows it. Tokens that share a character are shown together."""
    texts: list[str] = []
    part: list[int] = []
    for i in ids:
        part.append(i)
        text = decode_inside(part, tokenizer)
        if "\ufffd" not in text or len(part) == LONGEST_CHARACTER:
            texts.append(text)
            part = []
    if part:
        texts.append(decode_inside(part, tokenizer))
    return texts


LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


def ending(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The last tokens of a text, as evidence shows them, from the beginning of a character on."""
    last = ids[-MOST_TOKENS:]
    parts = [token_texts(tokenizer, last[at:]) for at in range(min(LONGEST_CHARACTER, len(last)))]
    return " ".join(map(repr, next((part for part in parts if "\ufffd" not in part[0]), parts[0] if parts else [])))


def beginning(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The first tokens of a text, as evidence shows them."""
    return " ".join(map(repr, token_texts(tokenizer, ids[:MOST_TOKENS])))
