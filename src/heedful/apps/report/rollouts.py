"""Logged responses (``--rollouts all``): a survey of all of them, a sample that a page can hold, each token's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heedful.errors import CheckpointError, DataError

Floats = npt.NDArray[np.float64]


class Quantity(NamedTuple):
    """A number of each token."""

    name: str
    columns: tuple[str, ...]
    """Of the files; of two, the first minus the second."""
    meaning: str


QUANTITIES = (
    Quantity("advantage", ("advantages",), "A, as the loss takes it"),
    Quantity("log-ratio", ("log_ratio",), "new minus old log-prob, in the last pass over the token"),
    Quantity("KL", ("old_logprobs", "ref_logprobs"), "log-prob minus that of the reference, in nats"),
    Quantity("reward", ("token_rewards",), "score and penalties where they fall, minus the price of the KL"),
    Quantity("value", ("values",), "what the critic expects, of the text before the token"),
    Quantity("return", ("returns",), "what the critic learns"),
    Quantity("entropy", ("entropy",), "of the policy at the token, in nats"),
    Quantity("log-prob", ("old_logprobs",), "of the token before the update, in nats"),
)
NEEDED = ("step", "prompt", "response", "prompt_ids", "response_ids", "score")
"""Columns without which a file is not of heedful; only scores may be null."""
KINDS = {
    "step": pa.types.is_integer,
    "prompt": pa.types.is_string,
    "response": pa.types.is_string,
    "prompt_ids": pa.types.is_list,
    "response_ids": pa.types.is_list,
    "logprobs": pa.types.is_list,
    "score": pa.types.is_floating,
    "kl": pa.types.is_floating,
    "rewards": pa.types.is_struct,
    **{name: pa.types.is_list for quantity in QUANTITIES for name in quantity.columns},
    **dict.fromkeys(("turns", "turn_ends", "other_ids", "turn_rewards"), pa.types.is_list),
    **dict.fromkeys(("ended", "failure"), pa.types.is_string),
}
"""What a column must be."""
EXTREMES = 40
"""How many responses with the highest of each number a sample always has."""
OF_TURNS = ("advantage", "value", "return")
"""Numbers that a run with ``--action turn`` has of each turn, at its first token."""
ENDS = {
    "stop": "ended",
    "length": "cut",
    "environment": "ended by the environment",
    "turns": "cut by --max-turns",
    "tokens": "cut by --max-new-tokens",
    "failed": "failed",
}
"""What ended a response, or an episode, in words."""


@dataclass(frozen=True)
class EpisodeTurn:
    """A turn of the policy, and what the other one said to it."""

    start: int
    """Of the response's tokens, the turn's first."""
    end: int
    """The one behind its last."""
    reward: float | None
    """The environment's, the last turn's with that of the episode; None if it gives none."""
    calls: Sequence[str]
    """Of tools, as they were read."""
    said: Sequence[tuple[str, str]]
    """By whom, and what."""
    other_ids: Sequence[int]
    """The tokens of the other one."""


@dataclass(frozen=True)
class Response:
    """A row of rollouts/, with the numbers of its tokens."""

    step: int
    row: int
    """Within its step, from 0."""
    prompt: str
    text: str
    prompt_ids: list[int]
    ids: list[int]
    score: float | None
    rewards: Mapping[str, float | None]
    kl: float | None
    finish: str
    """A key of `ENDS`; empty if it is not known."""
    source: str
    numbers: Mapping[str, list[float] | None]
    """By the name of a quantity, one for each of ``ids``; None where the run has none."""
    turns: Sequence[EpisodeTurn] = ()
    """Of an episode; empty without an environment."""
    failure: str = ""
    """Why its environment failed."""

    @property
    def with_others(self) -> tuple[list[int], list[bool]]:
        """The tokens behind the prompt, those of the other one too, and whether each is the policy's."""
        if not self.turns:
            return self.ids, [True] * len(self.ids)
        said: list[int] = []
        own: list[bool] = []
        for turn in self.turns:
            said += [*self.ids[turn.start : turn.end], *turn.other_ids]
            own += [True] * (turn.end - turn.start) + [False] * len(turn.other_ids)
        return said, own

    def of_turn(self, turn: EpisodeTurn) -> dict[str, float]:
        """The numbers of a turn that a run with ``--action turn`` has: those at its first token."""
        known = {name: self.numbers[name] for name in OF_TURNS}
        return {name: numbers[turn.start] for name, numbers in known.items() if numbers is not None}


@dataclass(frozen=True)
class Survey:
    """Numbers of every response of a run, an entry each, in the order of the steps; NaN where there is none."""

    step: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    score: Floats
    kl: Floats
    ratio: Floats
    """The largest magnitude of a token's log-ratio."""
    advantage: Floats
    """That of a token's advantage."""
    divergence: Floats
    """By how much the score rose while one of several rewards fell (`_divergence`)."""
    paths: Sequence[Path]
    """The file of each step."""
    steps: Sequence[int]

    def __len__(self) -> int:
        return len(self.step)


def rollout_files(run: Path) -> dict[int, Path]:
    """The files of a run's responses, by their steps."""
    found = {}
    for path in sorted((run / "rollouts").glob("step-*.parquet")):
        number = path.stem.removeprefix("step-")
        if number.isdecimal():
            found[int(number)] = path
    return found


def read_step(path: Path, rows: Sequence[int] | None = None) -> list[Response]:
    """Read the responses of a step, or some of its rows. Raises DataError if the file is damaged or is none of heedful's."""
    table = _table(path)
    places = list(range(len(table))) if rows is None else list(rows)
    if places and max(places) >= len(table):
        raise DataError(f"{path} has {len(table)} responses, and row {max(places)} was asked for")
    records = table.take(pa.array(places, pa.int64())).to_pylist()
    return [_response(record, row, path) for record, row in zip(records, places, strict=True)]


def read_texts(path: Path) -> list[dict[str, Any]]:
    """Read only step, prompt, response, score and KL of a step's responses. Raises DataError."""
    columns = ["step", "prompt", "response", "score", "kl"]
    return [{name: row.get(name) for name in columns} for row in _table(path, columns).to_pylist()]


def survey(run: Path) -> Survey:
    """Look at every response of a run, a file at a time. Raises DataError."""
    files = rollout_files(run)
    parts = [_survey_step(step, path) for step, path in files.items()]
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0, np.int64) for name in _SURVEYED
    }
    names = dict.fromkeys(name for part in parts for name in part if name.startswith(REWARD))
    missing = [np.full(len(part["step"]), np.nan) for part in parts]
    rewards = [
        np.concatenate([part.get(name, gap) for part, gap in zip(parts, missing, strict=True)]) for name in names
    ]
    prompts = columns.pop("prompt")
    divergence = _divergence(prompts, columns["score"], rewards)
    return Survey(**columns, divergence=divergence, paths=list(files.values()), steps=list(files))


def sample(found: Survey, *, most: int, most_tokens: int, longest: int, seed: int) -> list[int]:
    """Choose responses that a page can hold, in ascending order: all; or the extremes and a random part of the others.

    Args:
        found: all responses of a run.
        most: how many at most.
        most_tokens: of all that are chosen together; a response counts at most ``longest``.
        longest: how many tokens of a response are shown.
        seed: of the random part.

    The extremes are the `EXTREMES` responses with the largest KL, ratio, advantage, divergence of score and another reward,
    and the highest and the lowest score; fewer if they alone would take more than half of the room.
    """
    costs = np.minimum(found.tokens, longest)
    if len(found) <= most and costs.sum() <= most_tokens:
        return list(range(len(found)))
    orders = [
        np.argsort(np.where(np.isnan(numbers), -np.inf, numbers), kind="stable")[::-1]
        for numbers in (found.kl, found.ratio, found.advantage, found.score, -found.score, found.divergence)
    ]
    extremes = [int(order[place]) for place in range(min(EXTREMES, len(found))) for order in orders]
    others = np.random.default_rng(seed).permutation(len(found)).tolist()
    chosen: set[int] = set()
    left = most_tokens
    for pool, share in ((extremes, 0.5), (others, 1.0)):
        for index in pool:
            if len(chosen) >= most * share:
                break
            if index not in chosen and left - costs[index] >= most_tokens * (1 - share):
                chosen.add(index)
                left -= int(costs[index])
    return sorted(chosen)


def read_chosen(found: Survey, chosen: Sequence[int]) -> list[Response]:
    """Read the chosen responses, each file once, in the order of the choice, which is ascending. Raises DataError."""
    responses = []
    for step, path in zip(found.steps, found.paths, strict=True):
        rows = [int(found.row[index]) for index in chosen if found.step[index] == step]
        if rows:
            responses += read_step(path, rows)
    return responses


class StepValues(NamedTuple):
    """What a critic said of the responses of a step, and what came; ``[responses, tokens]``, 0 behind each response."""

    values: Floats
    rewards: Floats
    mask: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.bool_]
    """True at the first token of each turn."""
    known: npt.NDArray[np.bool_]
    """False for a response without these numbers, or with some that are not finite."""


def read_values(path: Path) -> StepValues:
    """Read the values and rewards of a step's tokens. Raises DataError."""
    table = _table(path, ["response_ids", "values", "token_rewards", "turn_ends"])
    lengths = _lengths(table["response_ids"])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, np.newaxis]
    starts = mask & (np.arange(mask.shape[1]) == 0)
    if "turn_ends" in table.column_names:
        for row, ends in enumerate(table["turn_ends"].to_pylist()):
            starts[row, [end for end in ends or () if end < lengths[row]]] = True
    found, known = {}, lengths > 0
    for name in ("values", "token_rewards"):
        found[name] = np.where(mask, np.nan, 0.0)
        if name in table.column_names:
            column, own = table[name].combine_chunks(), _lengths(table[name])
            has = column.is_valid().to_numpy(zero_copy_only=False)
            for row in (has & (own != lengths)).nonzero()[0][:1]:
                raise _wrong_length(path, row, own[row], name, lengths[row])
            found[name][mask & has[:, np.newaxis]] = _numpy(column.flatten())
        known = known & np.isfinite(found[name]).all(axis=1)
    return StepValues(found["values"], found["token_rewards"], mask, starts, known)


def without_rollouts(run: Path) -> CheckpointError:
    """What to say of a run that kept no responses."""
    return CheckpointError(f"{run} has no responses in rollouts/; train with --rollouts all to keep them")


_SURVEYED = ("step", "row", "tokens", "prompt", "score", "kl", "ratio", "advantage")
REWARD = "reward "
"""Before the name of a reward in what is known of a step."""


def _survey_step(step: int, path: Path) -> dict[str, npt.NDArray[Any]]:
    table = _table(path, [*NEEDED, "rewards", "kl", "log_ratio", "advantages"])
    count = len(table)
    numbers = {name: _floats(table, name) for name in ("score", "kl")}
    return {
        "step": np.full(count, step),
        "row": np.arange(count),
        "tokens": _lengths(table["response_ids"]),
        "prompt": np.array([hash(prompt) for prompt in table["prompt"].to_pylist()], np.int64),
        **numbers,
        "ratio": _largest(table, "log_ratio"),
        "advantage": _largest(table, "advantages"),
        **_rewards(table),
    }


def _rewards(table: pa.Table) -> dict[str, Floats]:
    """What each reward gave, if there are several; NaN where one did not apply."""
    parts = {} if "rewards" not in table.column_names else dict(_fields(table["rewards"].combine_chunks()))
    return {f"{REWARD}{name}": _numpy(column) for name, column in parts.items()} if len(parts) > 1 else {}


def _fields(rewards: pa.StructArray) -> list[tuple[str, pa.Array]]:
    return [(rewards.type.field(place).name, rewards.field(place)) for place in range(rewards.type.num_fields)]


def _divergence(prompt: npt.NDArray[np.int64], score: Floats, rewards: Sequence[Floats]) -> Floats:
    """By how much the score rose since the prompt's first response while one of several rewards fell; NaN if neither.

    Both in standard deviations of the run, and the smaller of the two counts.
    """
    first: dict[int, int] = {}
    since = np.array([first.setdefault(key, place) for place, key in enumerate(prompt.tolist())], np.int64)
    found = np.full(len(score), np.nan)
    for reward in rewards:
        with np.errstate(invalid="ignore", divide="ignore"):
            rise = (score - score[since]) / np.nanstd(score)
            fall = (reward[since] - reward) / np.nanstd(reward)
            both = np.minimum(rise, fall)
        found = np.fmax(found, np.where(both > 0, both, np.nan))
    return found


def _table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file, or those of some columns that it has. Raises DataError."""
    try:
        with pq.ParquetFile(path) as file:
            has = file.schema_arrow.names
            lacks = [name for name in NEEDED if name not in has]
            if lacks:
                raise DataError(
                    f"{path} has no column {lacks[0]}, so it is not of heedful's --rollouts all; move it away"
                )
            table = file.read(has if columns is None else [name for name in columns if name in has])
    except (pa.ArrowException, OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{path} is damaged: {why:.200}; delete it to see the other steps") from error
    for name in table.column_names:
        column = table[name]
        if name in KINDS and not KINDS[name](column.type):
            raise DataError(
                f"{path}: its {name} are {column.type}, so it is not of heedful's --rollouts all; move it away"
            )
        if name in NEEDED and name != "score" and column.null_count:
            raise DataError(
                f"{path} is damaged: {column.null_count} of its {name} are null; delete it to see the other steps"
            )
    return table


def _lengths(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = column.combine_chunks().value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths


def _floats(table: pa.Table, name: str) -> Floats:
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    return _numpy(table[name].combine_chunks())


def _numpy(column: pa.Array) -> Floats:
    numbers: Floats = column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    return numbers


def _largest(table: pa.Table, name: str) -> Floats:
    """The largest magnitude of each row's numbers; NaN for a row without any."""
    found = np.full(len(table), np.nan)
    if name not in table.column_names:
        return found
    column = table[name].combine_chunks()
    lengths = _lengths(table[name])
    values = np.abs(column.flatten().to_numpy(zero_copy_only=False).astype(np.float64))
    starts = np.cumsum(lengths) - lengths
    if (lengths > 0).any():
        found[lengths > 0] = np.fmax.reduceat(values, starts[lengths > 0])
    return found


def _response(record: Mapping[str, Any], row: int, path: Path) -> Response:
    ids, turns = record["response_ids"], _turns(record, row, path)
    if min([*ids, *record["prompt_ids"]], default=0) < 0:
        raise DataError(f"{path}: row {row} has a negative token id; delete the file")
    columns = {name: record.get(name) for quantity in QUANTITIES for name in quantity.columns}
    if columns["old_logprobs"] is None:
        columns["old_logprobs"] = record.get(
            "logprobs"
        )  # of a response that was not learned from, as sampling saw them
    for name, numbers in columns.items():
        if numbers is not None and len(numbers) != len(ids):
            raise _wrong_length(path, row, len(numbers), name, len(ids))
    if record.get("turns") == []:  # its environment failed before the first turn, and a token fills the place
        ids, columns = [], dict.fromkeys(columns)
    return Response(
        step=record["step"],
        row=row,
        prompt=record["prompt"],
        text=record["response"],
        prompt_ids=record["prompt_ids"],
        ids=ids,
        score=record["score"],
        rewards=record.get("rewards") or {},
        kl=record.get("kl"),
        finish="failed" if record.get("failure") else record.get("ended") or record.get("finish_reason") or "",
        source=record.get("source") or "",
        numbers={quantity.name: _numbers(quantity, columns) for quantity in QUANTITIES},
        turns=turns,
        failure=record.get("failure") or "",
    )


def _turns(record: Mapping[str, Any], row: int, path: Path) -> list[EpisodeTurn]:
    """The turns of an episode. Raises DataError if they do not fit to its tokens."""
    ends, messages = record.get("turn_ends") or [], record.get("turns") or []
    rewards, others = record.get("turn_rewards") or [None] * len(ends), record.get("other_ids") or [[]] * len(ends)
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    is_rising = all(a < b for a, b in pairwise([0, *ends, len(record["response_ids"]) + 1]))
    if not is_rising or len({len(own), len(ends), len(rewards), len(others)}) > 1:
        raise DataError(f"{path}: the turns of row {row} do not fit to its tokens; delete the file")
    found = []
    for turn, place in enumerate(own):
        called = [call["function"] for call in messages[place].get("tool_calls") or ()]
        replies = takewhile(lambda one: one["role"] != "assistant", messages[place + 1 :])
        found.append(
            EpisodeTurn(
                start=ends[turn - 1] if turn else 0,
                end=ends[turn],
                reward=rewards[turn],
                calls=[f"{call['name']}({call['arguments']})" for call in called],
                said=[
                    (" ".join(filter(None, (one["role"], one.get("name")))), one["content"] or "") for one in replies
                ],
                other_ids=others[turn],
            )
        )
    return found


def _wrong_length(path: Path, row: int, count: int, name: str, tokens: int) -> DataError:
    return DataError(f"{path}: row {row} has {count} {name} for {tokens} tokens; delete the file")


def _numbers(quantity: Quantity, columns: Mapping[str, list[float | None] | None]) -> list[float] | None:
    found = [columns[name] for name in quantity.columns]
    if any(numbers is None for numbers in found):
        return None
    first, *rest = ([np.nan if x is None else x for x in numbers or ()] for numbers in found)
    return first if not rest else [a - b for a, b in zip(first, rest[0], strict=True)]
