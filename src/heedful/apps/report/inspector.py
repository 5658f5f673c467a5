"""The token inspector's data: responses with the numbers of each token, packed so that a page of 2 MB holds thousands.

    zlib( length of the header: uint32 | header: JSON, padded to 4 bytes | tokens: uint32 | columns: float16 each )

Numbers are float16 times a power of two per column: a relative error of 0.05 % at most. Their high bytes come before their
low ones, which compresses better.
"""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heedful.apps.plot.whole_tokens import token_texts
from heedful.apps.report.rollouts import ENDS, QUANTITIES, Response, read_chosen, sample, survey
from heedful.apps.report.runs import RunRecord
from heedful.apps.report.svg import plain
from heedful.display import harmless
from heedful.errors import CheckpointError
from heedful.files import to_json

LONGEST, ENDING = 1000, 200
"""How many tokens of a response are shown, and how many of these are its last."""
MOST_TOKENS = 80_000
"""In a page."""
LONGEST_SAID = 4000
"""Characters that are shown of what the other one said at a time, in episodes."""


@dataclass(frozen=True)
class Inspected:
    """The responses of a page, and what was left out of it."""

    responses: Sequence[tuple[RunRecord, Response, float | None]]
    """Each with its run and its divergence of score and another reward."""
    chosen: str
    """How many of how many, and how they were chosen; empty if the runs have none."""
    tokens: Mapping[str, list[list[str]]]
    """By the name of a run, the texts of each response's tokens."""
    compared: Mapping[str, list[list[float]]]
    """By the name of a number that two models gave, one list per response; empty if nothing is compared."""
    notes: tuple[str, ...]


def inspect(
    runs: Sequence[RunRecord], *, most: int, most_tokens: int, seed: int, tokenizers: "Tokenizers"
) -> Inspected:
    """Choose responses of the runs that have any, an equal share each, and cut them into tokens. Raises DataError."""
    surveys = {run.name: (run, found) for run in runs if len(found := survey(run.folder))}
    responses, texts, notes = [], {}, []
    total = sum(len(found) for _, found in surveys.values())
    for run, found in surveys.values():
        room = {"most": max(1, most // len(surveys)), "most_tokens": most_tokens // len(surveys)}
        chosen = sample(found, **room, longest=LONGEST, seed=seed)
        of_run = read_chosen(found, chosen)
        texts[run.name], note = tokenizers.texts(run, of_run)
        notes += [note] if note else []
        responses += [(run, one, _or_none(found.divergence[index])) for one, index in zip(of_run, chosen, strict=True)]
    how = f"All {total:,} responses of rollouts/." if total else ""
    if total and not responses:
        how = f"None of {total:,} responses: the rest of the page leaves no room for them; name fewer runs."
    elif len(responses) < total:
        how = (
            f"{len(responses):,} of {total:,} responses: those with the highest KL, ratio, advantage, and the highest and "
            f"lowest score, and a random sample of the others (seed {seed})."
        )
    if any(len(response.ids) > LONGEST for _, response, _ in responses):
        how += f" Of responses beyond {LONGEST:,} tokens, the first {LONGEST - ENDING} and the last {ENDING} are shown."
    return Inspected(responses, how, texts, {}, tuple(notes))


def _or_none(number: float) -> float | None:
    return None if np.isnan(number) else float(number)


class Tokenizers:
    """The tokenizers of runs, each loaded once: from the run's own models, else from the model that it started from."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def texts(self, run: RunRecord, responses: Sequence[Response]) -> tuple[list[list[str]], str]:
        """The texts of each response's tokens, and a note if no tokenizer was found: then they are the ids."""
        tokenizer = self.of(run)
        if tokenizer is None:
            note = f"{run.name}: no tokenizer was found in the run or in its model, so tokens are shown as their ids."
            return [[f"{token} " for token in response.ids] for response in responses], note
        return [token_texts(response.ids, tokenizer) for response in responses], ""

    def of(self, run: RunRecord) -> Any:
        """The tokenizer of a run; None if there is none."""
        from heedful.models.tokenizer import load_tokenizer

        for place in self._places(run):
            if place not in self._loaded:
                try:
                    self._loaded[place] = load_tokenizer(place)
                except CheckpointError:
                    self._loaded[place] = None
            if self._loaded[place] is not None:
                return self._loaded[place]
        return None

    def _places(self, run: RunRecord) -> Iterator[str]:
        checkpoints = sorted((run.folder / "checkpoints").glob("step-*"))[-1:]
        for folder in (run.folder / "final", run.folder / "best", *checkpoints):
            if (folder / "tokenizer_config.json").is_file():
                yield str(folder)
        model = run.settings.get("model")
        if isinstance(model, str) and Path(model).is_dir():
            yield model


# Packing ----------------------------------------------------------------------------------------------------------------


def packed(found: Inspected, runs: Sequence[RunRecord]) -> str:
    """The data of the inspector as base64 of zlib."""
    vocabulary: dict[str, int] = {}
    prompts: dict[str, int] = {}
    names = [quantity.name for quantity in QUANTITIES] + list(found.compared)
    tokens: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in names}
    entries = []
    taken = dict.fromkeys(found.tokens, 0)
    for place, (run, response, divergence) in enumerate(found.responses):
        texts = found.tokens[run.name][taken[run.name]]
        taken[run.name] += 1
        shown = _shown(len(response.ids))
        numbers = {**response.numbers, **{name: lists[place] for name, lists in found.compared.items()}}
        tokens += [vocabulary.setdefault(harmless(texts[t]), len(vocabulary)) for t in shown]
        for name in names:
            given = numbers[name]
            columns[name] += [np.nan] * len(shown) if given is None else [given[t] for t in shown]
        entries.append(
            [
                [one.name for one in runs].index(run.name),
                response.step,
                response.row,
                prompts.setdefault(plain(response.prompt), len(prompts)),
                len(response.ids),
                response.score,
                response.kl,
                response.finish,
                sum(1 << bit for bit, name in enumerate(names) if numbers[name] is not None),
                divergence,
                {harmless(name): value for name, value in response.rewards.items()}
                if len(response.rewards) > 1
                else {},
                plain(response.failure),
                _turns(response, by_turn=run.settings.get("action") == "turn"),
                [response.ids[t] for t in shown],
            ]
        )
    meanings = {quantity.name: quantity.meaning for quantity in QUANTITIES}
    blocks, scales = zip(*(_half(columns[name]) for name in names), strict=True) if names else ((), ())
    header = {
        "runs": [harmless(run.name) for run in runs],
        "quantities": [[name, meanings.get(name, "")] for name in names],
        "compared": list(found.compared),
        "scales": scales,
        "vocabulary": list(vocabulary),
        "prompts": list(prompts),
        "ends": ENDS,
        "longest": [LONGEST, ENDING],
        "responses": entries,
    }
    content = to_json(header).encode("utf-8", "backslashreplace")
    content += b" " * (-len(content) % 4)
    binary = len(content).to_bytes(4, "little") + content + np.array(tokens, "<u4").tobytes() + b"".join(blocks)
    return base64.b64encode(zlib.compress(binary, 9)).decode()


def _turns(response: Response, *, by_turn: bool) -> list[Any]:
    """Of each turn its end, reward, numbers if it is one action, calls of tools, and what the other one said."""
    return [
        [
            turn.end,
            turn.reward,
            response.of_turn(turn) if by_turn else {},
            [plain(call) for call in turn.calls],
            [[plain(role), _cut(plain(words))] for role, words in turn.said],
        ]
        for turn in response.turns
    ]


def _cut(words: str) -> str:
    left = len(words) - LONGEST_SAID
    return words if left <= 0 else f"{words[:LONGEST_SAID]} … ({left:,} characters more)"


def _shown(length: int) -> list[int]:
    """The places of the tokens of a response that are shown."""
    if length <= LONGEST:
        return list(range(length))
    return [*range(LONGEST - ENDING), *range(length - ENDING, length)]


def _half(numbers: Sequence[float]) -> tuple[bytes, float]:
    """Numbers as float16, high bytes first, and the power of two that each is to be multiplied by."""
    exact: npt.NDArray[np.float64] = np.array(numbers, np.float64)
    largest = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    scale = 2.0 ** (np.frexp(largest)[1] - 15) if largest > 0 else 1.0
    halves = (exact / scale).astype("<f2").view("<u2")
    return (halves >> 8).astype("u1").tobytes() + (halves & 255).astype("u1").tobytes(), float(scale)
