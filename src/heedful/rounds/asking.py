"""The first step of a round: sample answers of the last policy, and choose the pairs to ask people about."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from heedful.configs.rounds import RoundConfig
from heedful.configs.scoring import RewardOptions
from heedful.configs.tools import SampleConfig
from heedful.data.schemas import read_prompts
from heedful.data.splits import split_by_prompt
from heedful.errors import DataError
from heedful.faults import hit
from heedful.files import read_record, to_json, write_text
from heedful.label.identity import item_id, to_line
from heedful.label.project import Project
from heedful.label.records import Candidate, Item
from heedful.rounds.active import Choice, Pair, choose, different_pairs, disagreement
from heedful.rounds.judging import load_judge, scores_of
from heedful.rounds.notes import Note, RoundNotes
from heedful.rounds.sample import Row, load_writers, sampled_rows
from heedful.types import Prompt

Asked = tuple[str, frozenset[str]]
"""A prompt, and two texts in no order."""


def ask(
    config: RoundConfig,
    project: Project,
    notes: RoundNotes,
    models: Sequence[str],
    check: Callable[[Sequence[Item]], None],
) -> Note:
    """Sample answers and add the chosen pairs to the project as items of this round. Returns what notes.py says.

    Args:
        config: the round's settings.
        project: open for writing.
        notes: of the round.
        models: the reward models of the round before, which say what they disagree about; none draws all pairs at random.
        check: is called with the round's and all earlier items before people are asked; what it raises ends the step.

    Raises DataError if there is no pair to ask about.
    """
    file = notes.folder / "answers.jsonl"
    if not file.exists():
        _sample(config, notes, file)
        hit("round.sampled")
    rows = _answers(file)
    earlier: set[Asked] = set()
    for item in project.items():
        if item.round != notes.number or item.chosen_by == "import":
            earlier |= compared(item)
    pairs = [_new_pairs(row, earlier) for row in rows]
    asked_before = f"round {notes.number} {config.seed}"
    if config.random_share < 1 and models:
        values = _disagreements(rows, pairs, models, config)
        chosen = choose(pairs, config.labels, asked_before, disagreements=values, random_share=config.random_share)
    else:
        chosen = choose(pairs, config.labels, asked_before)
    if not chosen:
        raise DataError(
            f"{file}: no two answers to one prompt differ, so there is nothing to compare; raise --answers or --temperature"
        )
    items = [item_of(rows[choice.prompt], choice, notes.number) for choice in chosen]
    check([*items, *project.items()])
    project.add_items(items)
    by = [choice.chosen_by for choice in chosen]
    return {
        "prompts": len(rows),
        "asked": len(chosen),
        "random": by.count("random"),
        "active": by.count("active"),
        "checkpoint": notes.before,
        "items": [item.item_id for item in items],
    }


def _answers(file: Path) -> list[Row]:
    """The answers that a round has sampled. Raises DataError for a damaged file."""
    remedy = "restore it, or remove it to sample the round's answers anew"
    if not file.is_file():
        raise DataError(f"{file}: it is a folder, not a file; {remedy}")
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line:
            row = read_record(line) or {}
            answers = row.get("responses")
            if not (isinstance(answers, list) and "prompt" in row and all(map(_is_answer, answers))):
                raise DataError(f"{file}:{number} is damaged: no answers to a prompt; {remedy}")
            rows.append(row)
    return rows


def _is_answer(answer: Any) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("response"), str) and "source" in answer


def how_many(config: RoundConfig, sampled: Note) -> str:
    """How many pairs a round asks about; if they are fewer than --labels, also why, and what would give more.

    Args:
        config: the round's settings.
        sampled: what `ask` returned.
    """
    asked = sampled["asked"]
    if asked >= config.labels:
        return f"{asked} pairs are ready to be labelled"
    return (
        f"{asked} pairs are ready to be labelled, fewer than --labels {config.labels}: the {config.answers} answers to each "
        f"of {sampled['prompts']} prompts give no more pairs that differ and are new. For more in the next round: "
        f"--pool {math.ceil(10 * config.pool * config.labels / asked) / 10:g} (or more prompts, if these are all), a higher "
        "--answers or --temperature"
    )


def refuse_few_prompts(config: RoundConfig) -> None:
    """Raise DataError if the prompts are too few to hold some out and keep some, which later steps of a round need."""
    prompts = read_prompts(config.prompts)
    train, held_out = split_by_prompt(prompts, config.eval_fraction, may_be_one_sided=True)
    if not (train and held_out):
        raise DataError(
            f"{config.prompts}: of {len(prompts)} prompts --eval-fraction {config.eval_fraction:g} holds out "
            f"{len(held_out)}, but a round needs some that are held out and some that are not; give more prompts, or another "
            "--eval-fraction"
        )


def item_of(row: Row, choice: Choice, number: int) -> Item:
    """The item that asks about a chosen pair."""
    candidates = tuple(Candidate(row["responses"][i]["response"], row["responses"][i]["source"]) for i in choice.pair)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "responses")}
    if choice.disagreement is not None:
        columns["disagreement"] = choice.disagreement
    return Item(
        item_id("pair", row["prompt"], candidates),
        "pair",
        row["prompt"],
        candidates,
        round=number,
        chosen_by=choice.chosen_by,
        columns=columns,
    )


def _sample(config: RoundConfig, notes: RoundNotes, file: Path) -> None:
    """Write the answers to a file: the same as heedful sample would, to prompts drawn for this round."""
    prompts = _prompts(config, notes.number)
    sampling = SampleConfig(
        models=(notes.before,),
        data=config.prompts,
        output=file,
        answers=config.answers,
        seed=(config.seed + 7919 * notes.number) % 2**63,
        **{name: getattr(config, name) for name in SHARED},
    )
    rows, _ = sampled_rows(load_writers(sampling), prompts, sampling)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(f"{to_json(row)}\n" for row in rows))


SHARED = (
    "max_new_tokens", "min_new_tokens", "response_length", "temperature", "top_k", "top_p", "cuda_graphs",
    "trust_remote_code", "device", "dtype", "micro_batch_size",
)  # fmt: skip
"""Settings of sampling that a round hands on."""


def _prompts(config: RoundConfig, number: int) -> list[Prompt]:
    prompts = read_prompts(config.prompts)
    if not config.ask_held_out:
        prompts = split_by_prompt(prompts, config.eval_fraction)[0]
    wanted = min(len(prompts), math.ceil(config.pool * config.labels))
    return random.Random(f"prompts of round {number} {config.seed}").sample(prompts, wanted)


def compared(item: Item) -> set[Asked]:
    """Which two texts an item has people compare, whatever their order; white space at the ends is no difference."""
    if item.task not in ("pair", "ranking"):
        return set()
    texts = [
        one.response.strip() if isinstance(one.response, str) else to_line(one.response, sort_keys=True)
        for one in item.candidates
    ]
    prompt = to_line(item.prompt, sort_keys=True)
    return {(prompt, frozenset(two)) for two in itertools.combinations(texts, 2)}


def _new_pairs(row: Row, earlier: set[Asked]) -> list[Pair]:
    """The pairs of a prompt's answers that nobody was asked about in another round."""
    found = different_pairs([answer["response"] for answer in row["responses"]])
    return [pair for pair in found if not compared(item_of(row, Choice(0, pair, "random", None), 0)) & earlier]


def _disagreements(
    rows: Sequence[Row], pairs: Sequence[Sequence[Pair]], models: Sequence[str], config: RoundConfig
) -> list[list[float]]:
    """How much reward models disagree about each pair."""
    by_model: list[list[Any]] = []
    for model in models:
        judge = load_judge([f"model:{model}"], RewardOptions(trust_remote_code=config.trust_remote_code), config)
        by_model.append(scores_of(judge, [(row["prompt"], row["responses"], row) for row in rows]))
    return [[disagreement([scores[at] for scores in by_model], pair) for pair in own] for at, own in enumerate(pairs)]
